"""Prefill and decode in one compiled program, for any model that keeps the protocol of `jaxmask.model`.

Knows nothing of text: token ids in, token ids and supports out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxmask import decoding
from jaxmask.batch import SamplingBatch
from jaxmask.checks import check_num_logprobs, check_prompts
from jaxmask.decoding import StepOptions
from jaxmask.kernels.dispatch import settle
from jaxmask.model import Model, PlacedModel
from jaxmask.params import check_count, check_integer, check_logprobs_mode
from jaxmask.recording import Recording
from jaxmask.rollout import Rollout
from jaxmask.sampling import needs_bits, with_support_bound
from jaxmask.speculation import Speculation, VerifyingModel

_STATIC = ("max_new_tokens", "group_size", "max_ids", "prefill_chunk_size", "options")


def generate(
    model: Model,
    batch: SamplingBatch,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    *,
    max_new_tokens: int,
    width: int,
    group_size: int = 1,
    logprobs_mode: str = "processed_logprobs",
    pad_token_id: int = 0,
    max_ids: int | None = None,
    prefill_chunk_size: int | None = None,
    speculation: Speculation | None = None,
    sharding: NamedSharding | PartitionSpec | None = None,
    implementation: str = "auto",
) -> Rollout:
    """Samples completions with their supports; stops when every row has.

    One program per shape; settings, seeds and prompts are arrays. Can be called inside a larger jitted function.

    Args:
      model: see `Model`.
      batch: one row per completion, or one per prompt, which is then repeated with seeds seed + i.
      prompt_ids: right-padded rows of ids.
      prompt_lengths: in [1, S].
      max_new_tokens: length of the output; a row ends earlier at its own `max_tokens`.
      width: compact cells per support, W (see `sample`).
      group_size: completions per prompt, G; a prompt is prefilled once for its group, which shares what it leaves.
      logprobs_mode: what `Rollout.logprobs` holds.
      pad_token_id: written past the end of each row.
      max_ids: store supports one after another, with room for this many ids of all rows together (`RaggedSupport`);
        a row whose support finds no room ends with `Finish.OVERFLOW`. None: W cells for every token.
      prefill_chunk_size: places of the prompts read at once, which bounds the memory of long ones; for models whose
        `prefill` takes `chunk_size`. None: all of them.
      speculation: guesses tokens ahead, `PromptLookup` or `DraftModel`; needs a `VerifyingModel`. The rollout is the
        one without it, up to rounding.
      sharding: how the model's logits [B, V] are cut over a mesh (see `sample`); None: as a `PlacedModel` says.
      implementation: of the sampler (see `sample`).

    Raises:
      ValueError: shapes do not fit, an unknown implementation, prompt and completion exceed the model's length,
        `max_ids` where supports may be wider than `width`, a model that cannot verify guesses, a draft model without
        room for them or, seen outside of jit only, a prompt is empty or holds an id outside the vocabulary.
    """
    options = StepOptions(width, logprobs_mode, None, pad_token_id, sharding, implementation)
    batch, options = prepared(
        model,
        batch,
        prompt_ids,
        prompt_lengths,
        speculation,
        options,
        max_new_tokens=max_new_tokens,
        group_size=group_size,
        prefill_chunk_size=prefill_chunk_size,
    )
    if max_ids is not None:
        check_count("max_ids", max_ids)
    if max_ids is not None and needs_bits(batch, width):
        raise ValueError(
            f"max_ids needs supports of at most width={width} ids, and this batch promises none: make it with "
            f"support_bound={width} or less."
        )
    return _generate(
        model,
        batch,
        prompt_ids.astype(jnp.int32),
        prompt_lengths.astype(jnp.int32),
        speculation,
        max_new_tokens=max_new_tokens,
        group_size=group_size,
        max_ids=max_ids,
        prefill_chunk_size=prefill_chunk_size,
        options=options,
    )


def with_limit(batch: SamplingBatch, max_new_tokens: int) -> SamplingBatch:
    """The batch, with no row's `max_tokens` above a limit."""
    return dataclasses.replace(batch, max_tokens=jnp.minimum(batch.max_tokens, max_new_tokens))


def prepared(
    model: Model,
    batch: SamplingBatch,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    speculation: Speculation | None,
    options: StepOptions,
    *,
    max_new_tokens: int,
    group_size: int,
    prefill_chunk_size: int | None,
) -> tuple[SamplingBatch, StepOptions]:
    """One row per completion, and options with nothing left to choose; what does not fit together is refused."""
    check_logprobs_mode(options.logprobs_mode)
    check_prompts(prompt_ids, prompt_lengths, batch.vocab_size)
    for field, value in (("max_new_tokens", max_new_tokens), ("width", options.width), ("group_size", group_size)):
        check_count(field, value)
    if prefill_chunk_size is not None:
        check_count("prefill_chunk_size", prefill_chunk_size)
    check_integer("pad_token_id", options.pad_token_id)
    if options.num_logprobs is not None:
        check_num_logprobs(options.num_logprobs, batch.vocab_size, "None or an integer")
    num_prompts = prompt_ids.shape[0]
    if group_size > 1 and batch.num_rows == num_prompts:
        batch = batch.repeat(group_size)
    if batch.num_rows != num_prompts * group_size:
        raise ValueError(
            f"batch must have {num_prompts} rows (one per prompt) or {num_prompts * group_size} (one per completion), "
            f"got {batch.num_rows}."
        )
    capacity = prompt_ids.shape[1] + max_new_tokens
    if capacity > model.max_length:
        raise ValueError(
            f"prompt width {prompt_ids.shape[1]} + max_new_tokens {max_new_tokens} = {capacity} exceeds the model's "
            f"max_length {model.max_length}."
        )
    if not isinstance(speculation, Speculation | None):
        raise ValueError(f"speculation must be a Speculation such as PromptLookup(), got {speculation!r:.100}.")
    if speculation is not None and not isinstance(model, VerifyingModel):
        raise ValueError(f"speculation needs a model with extend_logits, which {type(model).__name__} lacks.")
    sharding = options.sharding
    if sharding is None and isinstance(model, PlacedModel):
        sharding = model.logits_sharding
    settled = settle(options.implementation, prompt_ids)
    options = dataclasses.replace(options, sharding=sharding, implementation=settled)
    return with_support_bound(batch, options.width), options


@functools.partial(jax.jit, static_argnames=_STATIC)
def _generate(
    model: Any,
    batch: SamplingBatch,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    speculation: Speculation | None,
    *,
    max_new_tokens: int,
    group_size: int,
    max_ids: int | None,
    prefill_chunk_size: int | None,
    options: StepOptions,
) -> Rollout:
    limited = with_limit(batch, max_new_tokens)
    state = decoding.start(
        model,
        limited,
        prompt_ids,
        prompt_lengths,
        max_new_tokens=max_new_tokens,
        group_size=group_size,
        prefill_chunk_size=prefill_chunk_size,
        speculation=speculation,
    )
    recording = Recording.empty(
        batch, max_new_tokens, width=options.width, pad_token_id=options.pad_token_id, max_ids=max_ids
    )
    state, recording = decoding.run(model, limited, state, recording, max_new_tokens, options, speculation)
    return Rollout(
        prompt_ids,
        prompt_lengths,
        recording.token_ids,
        state.lengths,
        recording.logprobs,
        recording.support,
        state.finish,
        batch,
        group_size,
        options.logprobs_mode,
        num_steps=recording.num_steps,
    )
