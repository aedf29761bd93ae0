"""Tokens as they are drawn: the loop of `generate`, turned in Python.

One jitted step, whose state is donated from step to step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from jaxmask import decoding
from jaxmask.batch import SamplingBatch
from jaxmask.decoding import StepOptions
from jaxmask.generate import prepared, with_limit
from jaxmask.model import Model
from jaxmask.recording import NewTokens
from jaxmask.speculation import Speculation
from jaxmask.state import Decoding


def stream(
    model: Model,
    batch: SamplingBatch,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    *,
    max_new_tokens: int,
    width: int,
    logprobs_mode: str = "processed_logprobs",
    num_logprobs: int | None = None,
    pad_token_id: int = 0,
    prefill_chunk_size: int | None = None,
    speculation: Speculation | None = None,
    sharding: NamedSharding | PartitionSpec | None = None,
    implementation: str = "auto",
) -> Iterator[NewTokens]:
    """The tokens of `generate`, step by step, as they are drawn; ends when every row has.

    Prompts are read at the call. The device is one step ahead of the caller, and so takes one step more than is needed;
    its state is donated from step to step. Two programs per shape.

    Args:
      model: as for `generate`, like the others not named here.
      batch: one row per prompt.
      prompt_ids: right-padded rows of ids.
      prompt_lengths: in [1, S].
      max_new_tokens: most tokens of a row.
      width: compact cells per support, W.
      logprobs_mode: what log-probabilities are of.
      num_logprobs: report ranks and this many top tokens; None for neither.
      pad_token_id: in cells that hold no token.
      prefill_chunk_size: places of the prompts read at once.
      speculation: guesses tokens ahead; a step may then add several tokens to a row.
      sharding: how the model's logits are cut.
      implementation: of the sampler.

    Raises:
      ValueError: at the call, as `generate`.
    """
    options = StepOptions(width, logprobs_mode, num_logprobs, pad_token_id, sharding, implementation)
    batch, options = prepared(
        model,
        batch,
        prompt_ids,
        prompt_lengths,
        speculation,
        options,
        max_new_tokens=max_new_tokens,
        group_size=1,
        prefill_chunk_size=prefill_chunk_size,
    )
    batch = with_limit(batch, max_new_tokens)
    state = _start(
        model,
        batch,
        prompt_ids.astype(jnp.int32),
        prompt_lengths.astype(jnp.int32),
        speculation,
        max_new_tokens=max_new_tokens,
        prefill_chunk_size=prefill_chunk_size,
    )
    return _steps(model, batch, state, speculation, options)


def _steps(
    model: Model, batch: SamplingBatch, state: Decoding, speculation: Speculation | None, options: StepOptions
) -> Iterator[NewTokens]:
    state, new, is_going = _step(model, batch, state, speculation, options)
    while True:
        # In flight while the caller looks at the step before; the last one is for nothing.
        state, following, goes_on = _step(model, batch, state, speculation, options)
        yield new
        if not np.asarray(is_going):
            return
        new, is_going = following, goes_on


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "prefill_chunk_size"))
def _start(
    model: Any,
    batch: SamplingBatch,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    speculation: Speculation | None,
    *,
    max_new_tokens: int,
    prefill_chunk_size: int | None,
) -> Decoding:
    return decoding.start(
        model,
        batch,
        prompt_ids,
        prompt_lengths,
        max_new_tokens=max_new_tokens,
        prefill_chunk_size=prefill_chunk_size,
        speculation=speculation,
    )


@functools.partial(jax.jit, static_argnames="options", donate_argnames="state")
def _step(
    model: Any, batch: SamplingBatch, state: Decoding, speculation: Speculation | None, options: StepOptions
) -> tuple[Decoding, NewTokens, Bool[Array, ""]]:
    state, new = decoding.step(model, batch, state, options, speculation)
    return state, new, state.is_running.any()
