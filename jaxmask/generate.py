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
from jaxtyping import Array, Bool, Float, Int

from jaxmask.batch import SamplingBatch
from jaxmask.checks import check_prompts
from jaxmask.drawn import Sample
from jaxmask.history import History
from jaxmask.kernels.dispatch import settle
from jaxmask.model import Model, PlacedModel
from jaxmask.params import check_count, check_logprobs_mode
from jaxmask.rollout import Finish, Rollout
from jaxmask.sampling import needs_bits, sample, with_support_bound
from jaxmask.support import Support

_STATIC = ("max_new_tokens", "width", "group_size", "logprobs_mode", "pad_token_id", "sharding", "implementation")


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
      sharding: how the model's logits [B, V] are cut over a mesh (see `sample`); None: as a `PlacedModel` says.
      implementation: of the sampler (see `sample`).

    Raises:
      ValueError: shapes do not fit, an unknown implementation, prompt and completion exceed the model's length or, seen
        outside of jit only, a prompt is empty or holds an id outside the vocabulary.
    """
    check_logprobs_mode(logprobs_mode)
    implementation = settle(implementation, prompt_ids)
    num_prompts = prompt_ids.shape[0]
    check_prompts(prompt_ids, prompt_lengths, batch.vocab_size)
    for field, value in (("max_new_tokens", max_new_tokens), ("width", width), ("group_size", group_size)):
        check_count(field, value)
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
    if sharding is None and isinstance(model, PlacedModel):
        sharding = model.logits_sharding
    batch = with_support_bound(batch, width)
    return _generate(
        model,
        batch,
        prompt_ids.astype(jnp.int32),
        prompt_lengths.astype(jnp.int32),
        max_new_tokens=max_new_tokens,
        width=width,
        group_size=group_size,
        logprobs_mode=logprobs_mode,
        pad_token_id=pad_token_id,
        sharding=sharding,
        implementation=implementation,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Decoding:
    """Loop state. `last_ids` are the tokens still to be fed: at first the last one of each prompt."""

    step: Int[Array, ""]
    last_ids: Int[Array, " B"]
    cache: Any
    history: History | None
    token_ids: Int[Array, "B T"]
    logprobs: Float[Array, "B T"]
    support: Support
    lengths: Int[Array, " B"]
    finish: Int[Array, " B"]


@functools.partial(jax.jit, static_argnames=_STATIC)
def _generate(
    model: Any,
    batch: SamplingBatch,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    *,
    max_new_tokens: int,
    width: int,
    group_size: int,
    logprobs_mode: str,
    pad_token_id: int,
    sharding: NamedSharding | PartitionSpec | None,
    implementation: str,
) -> Rollout:
    limits = jnp.minimum(batch.max_tokens, max_new_tokens)
    draw = functools.partial(
        sample,
        batch=batch,
        width=width,
        logprobs_mode=logprobs_mode,
        sharding=sharding,
        implementation=implementation,
    )

    def is_running(state: _Decoding) -> Bool[Array, ""]:
        return (state.finish == Finish.RUNNING).any()

    def step(state: _Decoding) -> _Decoding:
        logits, cache = model.decode(state.last_ids, state.cache)
        drawn = draw(logits, step=state.step, history=state.history)
        return _record(dataclasses.replace(state, cache=cache), drawn, batch, limits, pad_token_id)

    state = _start(model, batch, prompt_ids, prompt_lengths, max_new_tokens, width, group_size, pad_token_id)
    state = jax.lax.while_loop(is_running, step, state)
    return Rollout(
        prompt_ids,
        prompt_lengths,
        state.token_ids,
        state.lengths,
        state.logprobs,
        state.support,
        state.finish,
        batch,
        group_size,
        logprobs_mode,
    )


def _start(
    model: Model,
    batch: SamplingBatch,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    max_new_tokens: int,
    width: int,
    group_size: int,
    pad_token_id: int,
) -> _Decoding:
    """The state before the first token: all but the last token of each prompt is in the cache."""
    B, S, T, V = batch.num_rows, prompt_ids.shape[1], max_new_tokens, batch.vocab_size
    # A group shares the cache of its prompt, and each of its rows has room of its own for what it generates.
    cache = model.prefill(prompt_ids, prompt_lengths - 1, capacity=S if group_size > 1 else S + T)
    last_ids = jnp.take_along_axis(prompt_ids, prompt_lengths[:, None] - 1, axis=1)[:, 0]
    history = None
    if batch.needs_history:
        rows = (jnp.repeat(prompt_ids, group_size, axis=0), jnp.repeat(prompt_lengths, group_size))
        history = History.start(*rows, batch)
    packed = jnp.zeros((B, T, -(-V // 8)), jnp.uint8) if needs_bits(batch, width) else None
    return _Decoding(
        step=jnp.int32(0),
        last_ids=jnp.repeat(last_ids, group_size),
        cache=cache.repeat(group_size, capacity=T) if group_size > 1 else cache,
        history=history,
        token_ids=jnp.full((B, T), pad_token_id, jnp.int32),
        logprobs=jnp.zeros((B, T), jnp.float32),
        support=Support(jnp.full((B, T, width), V, jnp.int32), jnp.zeros((B, T), jnp.int32), packed, V),
        lengths=jnp.zeros(B, jnp.int32),
        finish=jnp.full(B, Finish.RUNNING, jnp.int32),
    )


def _record(
    state: _Decoding, drawn: Sample, batch: SamplingBatch, limits: Int[Array, " B"], pad_token_id: int
) -> _Decoding:
    """The state after a drawn token; rows that had finished, or had nothing to draw from, keep what they have."""
    is_running = state.finish == Finish.RUNNING
    is_recorded = is_running & drawn.is_valid
    stops = (drawn.token_ids[:, None] == batch.stop_token_ids).any(axis=1)
    ended = jnp.where(stops, Finish.STOP, jnp.where(state.step + 1 >= limits, Finish.LENGTH, Finish.RUNNING))
    ended = jnp.where(drawn.is_valid, ended, Finish.ERROR)

    def write(cells: Array, new: Array) -> Array:
        old = jax.lax.dynamic_index_in_dim(cells, state.step, axis=1, keepdims=False)
        is_written = is_recorded.reshape(-1, *(1,) * (new.ndim - 1))
        return jax.lax.dynamic_update_index_in_dim(cells, jnp.where(is_written, new, old), state.step, axis=1)

    return dataclasses.replace(
        state,
        step=state.step + 1,
        last_ids=jnp.where(is_recorded, drawn.token_ids, pad_token_id),
        history=None if state.history is None else state.history.append(drawn.token_ids, is_recorded),
        token_ids=write(state.token_ids, drawn.token_ids),
        logprobs=write(state.logprobs, drawn.logprobs),
        support=jax.tree.map(write, state.support, drawn.support),
        lengths=state.lengths + is_recorded.astype(jnp.int32),
        finish=jnp.where(is_running, ended, state.finish),
    )
