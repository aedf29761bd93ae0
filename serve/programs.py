"""The programs an engine runs, on rows called slots: a completion each, or nothing.

The model and the settings are arguments, so that neither new weights nor other requests compile anything. The state is
donated from program to program.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask import decoding
from jaxmask.batch import SamplingBatch
from jaxmask.decoding import Decoding, StepOptions
from jaxmask.history import History
from jaxmask.prompt import PromptLogprobs, prompt_logprobs
from jaxmask.recording import Recording
from jaxmask.rollout import Finish
from jaxmask.speculation import Speculation
from serve.report import Report


@runtime_checkable
class ScoringModel(Protocol):
    """A `Model` that also reads whole rows."""

    def logits(self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, "B T V"]:
        """Of the token after each cell of right-padded rows."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Completions that begin; several of them may continue one prompt.

    Attributes:
      token_ids: the prompts, right-padded.
      lengths: at least 1; of unused rows too.
      sources: the prompt of each completion, ascending.
      slots: where each completion goes.
      num_prompts: rows of `token_ids` in use.
      num_rows: entries of `sources` and `slots` in use.
    """

    token_ids: Int[Array, "P S"]
    lengths: Int[Array, " P"]
    sources: Int[Array, " B"]
    slots: Int[Array, " B"]
    num_prompts: Int[Array, ""]
    num_rows: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pace:
    """How long a chunk of steps goes on.

    Attributes:
      num_steps: at most.
      max_idle: ends where more rows than these have ended.
      is_cut: rows that the host ended.
    """

    num_steps: Int[Array, ""]
    max_idle: Int[Array, ""]
    is_cut: Bool[Array, " B"]


@functools.partial(jax.jit, static_argnames="capacity")
def empty_slots(model: Any, batch: SamplingBatch, speculation: Speculation | None, *, capacity: int) -> Decoding:
    """A slot for each row of the batch, without completions, and with room for `capacity` tokens each."""
    ones = jnp.ones(batch.num_rows, jnp.int32)
    ids = ones[:, None] - 1
    state = decoding.start(model, batch, ids, ones, max_new_tokens=capacity - 1, speculation=speculation)
    # An enum's member would make a weak type, for which the next program is compiled once more.
    return dataclasses.replace(state, finish=jnp.full(batch.num_rows, int(Finish.STOP), jnp.int32))


@functools.partial(jax.jit, static_argnames=("group_size", "capacity", "chunk_size"), donate_argnames="state")
def admit(
    model: Any,
    batch: SamplingBatch,
    state: Decoding,
    speculation: Speculation | None,
    arrivals: Arrivals,
    *,
    group_size: int,
    capacity: int,
    chunk_size: int | None,
) -> Decoding:
    """The slots with new completions in some of them.

    Prompts are read a few at a time, each once; both loops run as often as there is something to do, so that one
    program serves any number of arrivals.

    Args:
      model: see `Model`; its caches take rows of others.
      batch: settings of all slots, the new completions included.
      state: the slots.
      speculation: as for every step.
      arrivals: what begins; the rows of prompts are a multiple of group_size.
      group_size: prompts read at once.
      capacity: tokens of a slot.
      chunk_size: places of a prompt read at once; None: all of them.
    """
    width = arrivals.token_ids.shape[1]
    some_rows = jax.tree.map(lambda leaf: leaf[:group_size], batch)
    places = jnp.arange(arrivals.sources.shape[0], dtype=jnp.int32)
    sources = jnp.where(places < arrivals.num_rows, arrivals.sources, arrivals.token_ids.shape[0])

    def admit_group(group: Int[Array, ""], state: Decoding) -> Decoding:
        first = group * group_size
        ids, lengths = (
            jax.lax.dynamic_slice_in_dim(leaf, first, group_size) for leaf in (arrivals.token_ids, arrivals.lengths)
        )
        started = decoding.start(
            model,
            some_rows,
            ids,
            lengths,
            max_new_tokens=capacity - width,
            prefill_chunk_size=chunk_size,
            speculation=speculation,
        )

        def put(entry: Int[Array, ""], state: Decoding) -> Decoding:
            source = sources[entry] - first
            row = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, source, 1), started)
            return placed(state, row, arrivals.slots[entry])

        begin, end = ((sources < bound).sum(dtype=jnp.int32) for bound in (first, first + group_size))
        return jax.lax.fori_loop(begin, end, put, state)

    num_groups = (arrivals.num_prompts + group_size - 1) // group_size
    return jax.lax.fori_loop(0, num_groups, admit_group, state)


@functools.partial(jax.jit, static_argnames=("num_columns", "options"), donate_argnames="state")
def decode(
    model: Any,
    batch: SamplingBatch,
    state: Decoding,
    speculation: Speculation | None,
    pace: Pace,
    *,
    num_columns: int,
    options: StepOptions,
) -> tuple[Decoding, Report]:
    """The slots after some steps, and what these drew.

    Args:
      model: see `Model`.
      batch: settings of all slots.
      state: the slots.
      speculation: as for every step.
      pace: how many steps.
      num_columns: most tokens of a slot; at least as many as the steps can add.
      options: of every step.
    """
    state = dataclasses.replace(state, finish=jnp.where(pace.is_cut, jnp.int32(Finish.STOP), state.finish))
    recording = Recording.empty(
        batch,
        num_columns,
        width=options.width,
        starts=state.lengths,
        pad_token_id=options.pad_token_id,
        num_logprobs=options.num_logprobs,
    )
    state, recording = decoding.run(model, batch, state, recording, pace.num_steps, options, speculation, pace.max_idle)
    return state, Report.of(recording, state)


@functools.partial(jax.jit, donate_argnames="larger")
def move(larger: Decoding, state: Decoding) -> Decoding:
    """The slots, in the first rows of others with room for more, which keep their history where these bring none."""
    return placed(larger, state, jnp.int32(0))


@functools.partial(jax.jit, donate_argnames="state")
def remember(
    batch: SamplingBatch,
    state: Decoding,
    prompt_ids: Int[Array, "B S"],
    prompt_lengths: Int[Array, " B"],
    token_ids: Int[Array, "B S"],
) -> Decoding:
    """The slots with their history made anew, for settings that look back at more than those before."""
    history = History.start(prompt_ids, prompt_lengths, batch).extend(token_ids, state.lengths)
    return dataclasses.replace(state, history=history)


@functools.partial(jax.jit, static_argnames=("vocab_size", "logprobs_mode", "num_logprobs"))
def score_prompts(
    model: Any,
    prompt_ids: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    *,
    vocab_size: int,
    logprobs_mode: str,
    num_logprobs: int,
) -> PromptLogprobs:
    """Log-probabilities of prompt tokens, by teacher forcing."""
    logits = model.logits(prompt_ids, prompt_lengths)
    return prompt_logprobs(
        logits,
        prompt_ids,
        prompt_lengths,
        vocab_size=vocab_size,
        logprobs_mode=logprobs_mode,
        num_logprobs=num_logprobs,
    )


def placed(state: Decoding, others: Decoding, first: Int[Array, ""]) -> Decoding:
    """The slots, with others in their places from `first` on."""

    def put(slots: Any, rows: Any) -> Any:
        if hasattr(slots, "insert"):
            return slots.insert(first + jnp.arange(rows.lengths.shape[0], dtype=jnp.int32), rows)
        if isinstance(slots, jax.Array):
            return jax.lax.dynamic_update_slice(slots, rows, (first, *(0,) * (slots.ndim - 1)))
        return jax.tree.map(put, slots, rows)

    return Decoding(
        last_ids=put(state.last_ids, others.last_ids),
        cache=put(state.cache, others.cache),
        history=state.history if others.history is None else jax.tree.map(put, state.history, others.history),
        lengths=put(state.lengths, others.lengths),
        finish=put(state.finish, others.finish),
        drafts=put(state.drafts, others.drafts),
    )
