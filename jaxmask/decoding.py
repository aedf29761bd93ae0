"""One step of decoding, state -> state: what `generate`'s loop, `stream` and an engine's slots have in common.

Rows are independent: each has its own number of tokens, limit and end; a finished row keeps what it has.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from jaxmask.batch import SamplingBatch
from jaxmask.drawn import Sample
from jaxmask.history import History
from jaxmask.model import Model, prefill_options
from jaxmask.recording import NewTokens, Recording
from jaxmask.rollout import Finish
from jaxmask.sampling import sample
from jaxmask.speculation import Speculation, verify
from jaxmask.state import Decoding


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What is static about a step; see `sample` and `generate` for each.

    Attributes:
      width: compact cells per support, W.
      logprobs_mode: what log-probabilities are of.
      num_logprobs: report ranks and this many top tokens; None for neither.
      pad_token_id: in cells that hold no token.
      sharding: of the logits.
      implementation: of the sampler.
    """

    width: int
    logprobs_mode: str = "processed_logprobs"
    num_logprobs: int | None = None
    pad_token_id: int = 0
    sharding: NamedSharding | PartitionSpec | None = None
    implementation: str = "xla"


def start(
    model: Model,
    batch: SamplingBatch,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    *,
    max_new_tokens: int,
    group_size: int = 1,
    prefill_chunk_size: int | None = None,
    speculation: Speculation | None = None,
) -> Decoding:
    """The state before the first token: all but the last token of each prompt is in the cache.

    Args:
      model: see `Model`.
      batch: one row per completion, B = P G.
      prompt_ids: right-padded; cells past a row's length are never read.
      prompt_lengths: in [1, S].
      max_new_tokens: room for this many further tokens, T.
      group_size: completions per prompt, G, which share what the prompt left in the cache.
      prefill_chunk_size: places of the prompts read at once; None: all of them.
      speculation: as for every step.
    """
    S, T = prompt_ids.shape[1], max_new_tokens
    options = prefill_options(prefill_chunk_size, None if speculation is None else speculation.num_tokens + 1)
    # A group shares the cache of its prompt, and each of its rows has room of its own for what it generates.
    cache = model.prefill(prompt_ids, prompt_lengths - 1, capacity=S if group_size > 1 else S + T, **options)
    cache = cache.repeat(group_size, capacity=T) if group_size > 1 else cache
    last_ids = jnp.take_along_axis(prompt_ids, prompt_lengths[:, None] - 1, axis=1)[:, 0]
    rows = (jnp.repeat(prompt_ids, group_size, axis=0), jnp.repeat(prompt_lengths, group_size))
    return Decoding(
        last_ids=jnp.repeat(last_ids, group_size),
        cache=cache,
        history=History.start(*rows, batch) if batch.needs_history else None,
        lengths=jnp.zeros(batch.num_rows, jnp.int32),
        finish=jnp.full(batch.num_rows, Finish.RUNNING, jnp.int32),
        drafts=None
        if speculation is None
        else speculation.start(
            prompt_ids,
            prompt_lengths,
            max_new_tokens=T,
            group_size=group_size,
            prefill_chunk_size=prefill_chunk_size,
        ),
    )


def step(
    model: Model,
    batch: SamplingBatch,
    state: Decoding,
    options: StepOptions,
    speculation: Speculation | None = None,
) -> tuple[Decoding, NewTokens]:
    """The state after one more token in each running row, or after several with a speculation that guessed them.

    Rows end at their stop ids, at `batch.max_tokens`, or where they have nothing to draw from. Runs under jit.
    """
    batch = _without_work(batch, ~state.is_running)

    def draw(logits: Array, batch: SamplingBatch, steps: Array, history: History | None) -> Sample:
        return sample(
            logits,
            batch,
            step=steps,
            history=history,
            width=options.width,
            logprobs_mode=options.logprobs_mode,
            num_logprobs=options.num_logprobs,
            sharding=options.sharding,
            implementation=options.implementation,
        )

    if speculation is None:
        logits, cache = model.decode(state.last_ids, state.cache)
        drawn = jax.tree.map(lambda leaf: leaf[:, None], draw(logits, batch, state.lengths, state.history))
        new, finish = _accepted(state, drawn, jnp.ones_like(state.lengths), batch, options)
        drafts = None
    else:
        room = jnp.where(state.is_running, batch.max_tokens - state.lengths, 0)
        checked = verify(model, speculation, batch, state, room, draw)
        new, finish = _accepted(state, checked.drawn, checked.num_matching + 1, batch, options)
        cache = checked.cache.rewind(checked.num_read - new.counts)
        drafts = speculation.keep(checked.drafts, new.token_ids, new.counts)
    last = jnp.take_along_axis(new.token_ids, jnp.maximum(new.counts - 1, 0)[:, None], axis=1)[:, 0]
    advanced = Decoding(
        last_ids=jnp.where(new.counts > 0, last, options.pad_token_id),
        cache=cache,
        history=None if state.history is None else state.history.extend(new.token_ids, new.counts),
        lengths=state.lengths + new.counts,
        finish=finish,
        drafts=drafts,
    )
    return advanced, new


def run(
    model: Model,
    batch: SamplingBatch,
    state: Decoding,
    recording: Recording,
    num_steps: int | Int[Array, ""],
    options: StepOptions,
    speculation: Speculation | None = None,
    max_idle: int | Int[Array, ""] | None = None,
) -> tuple[Decoding, Recording]:
    """Up to `num_steps` steps, and fewer where every row ends before; each new token is recorded. Runs under jit.

    Where others wait for a row, the loop also ends as soon as more than `max_idle` rows have ended.
    """

    def is_going(carry: tuple[Decoding, Recording, Array]) -> Bool[Array, ""]:
        state, _, done = carry
        is_useful = state.is_running.any()
        if max_idle is not None:
            is_useful &= (~state.is_running).sum(dtype=jnp.int32) <= max_idle
        return is_useful & (done < num_steps)

    def go(carry: tuple[Decoding, Recording, Array]) -> tuple[Decoding, Recording, Array]:
        before, recording, done = carry
        state, new = step(model, batch, before, options, speculation)
        recording, kept = recording.write(new, before.lengths, before.is_running)
        # Supports that found no room: their row ends at the token before.
        is_cut = kept < new.counts
        lengths = before.lengths + kept
        state = dataclasses.replace(
            state, lengths=lengths, finish=jnp.where(is_cut, jnp.int32(Finish.OVERFLOW), state.finish)
        )
        return state, recording, done + 1

    state, recording, _ = jax.lax.while_loop(is_going, go, (state, recording, jnp.int32(0)))
    return state, recording


def _without_work(batch: SamplingBatch, is_idle: Bool[Array, " B"]) -> SamplingBatch:
    """Rows that are idle take their likeliest token: a wide nucleus would be searched for nothing."""
    return dataclasses.replace(batch, top_k=jnp.where(is_idle, 1, batch.top_k))


def _accepted(
    state: Decoding, drawn: Sample, num_offered: Int[Array, " B"], batch: SamplingBatch, options: StepOptions
) -> tuple[NewTokens, Int[Array, " B"]]:
    """The drawn tokens [B, C] that count, of the first `num_offered`, and the rows' new finish codes.

    A stop id and the token at the limit are the last to count; one with nothing to draw from does not.
    """
    places = jnp.arange(drawn.token_ids.shape[1], dtype=jnp.int32)[None, :]
    stops = (drawn.token_ids[:, :, None] == batch.stop_token_ids[:, None, :]).any(axis=2)
    is_at_limit = state.lengths[:, None] + places + 1 >= batch.max_tokens[:, None]
    ends = jnp.where(stops, jnp.int32(Finish.STOP), jnp.where(is_at_limit, jnp.int32(Finish.LENGTH), Finish.RUNNING))
    ends = jnp.where(drawn.is_valid, ends, jnp.int32(Finish.ERROR))
    is_reached = (places < num_offered[:, None]) & state.is_running[:, None]
    first_end = jnp.where(ends != Finish.RUNNING, places, places.shape[1]).min(axis=1, keepdims=True)
    is_reached &= places <= first_end
    counts = (is_reached & drawn.is_valid).sum(axis=1, dtype=jnp.int32)
    finish = jnp.where(is_reached, ends, Finish.RUNNING).max(axis=1)
    return NewTokens.first(counts, drawn, options.pad_token_id), jnp.where(state.is_running, finish, state.finish)
