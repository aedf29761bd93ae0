"""Sampling settings of a batch of rows, as arrays: what enters a compiled program.

Changing a value never recompiles; only using an edit that no row used before does (its arrays stop being None).
Lists of different lengths are padded to powers of two for the same reason, and a batch made `like` the one before never
gives up an array or a column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import settings
from jaxmask.params import SamplingParams, check_count, check_integers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """Per-row sampling settings; optional fields are None where no row uses them, and then cost nothing.

    Id lists are padded with `vocab_size`, an id that no token has.

    Attributes:
      seeds: low and high word of each row's 64-bit seed.
      temperature: 0 for greedy rows.
      min_p: 0 is off.
      top_k: in [1, vocab_size]; vocab_size is off.
      top_p: 1 is off.
      max_tokens: most tokens a row generates.
      stop_token_ids: ids that end a row (EOS ids included unless the row ignores them).
      min_tokens: withheld ids cannot be drawn before this many tokens.
      withheld_token_ids: EOS and stop ids of each row.
      allowed_token_ids: the only ids a row may draw; a row of padding is not restricted.
      logit_bias_ids: ids whose logits are shifted.
      logit_bias_values: by how much.
      repetition_penalty: 1 is off.
      frequency_penalty: 0 is off.
      presence_penalty: 0 is off.
      bad_words: forbidden sequences, right-aligned, padded on the left.
      returns_support: False for rows that opted out: their supports come back empty. None: every row returns it.
      vocab_size: number of real ids; logits may be wider (a padded head).
      support_bound: a promise that no returned support is larger; None where it is not known. `from_params` checks it;
        arrays replaced later can break it, and ids beyond the compact width are then lost.
    """

    seeds: UInt[Array, "B 2"]
    temperature: Float[Array, " B"]
    min_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    max_tokens: Int[Array, " B"]
    stop_token_ids: Int[Array, "B E"]
    min_tokens: Int[Array, " B"] | None
    withheld_token_ids: Int[Array, "B F"] | None
    allowed_token_ids: Int[Array, "B A"] | None
    logit_bias_ids: Int[Array, "B N"] | None
    logit_bias_values: Float[Array, "B N"] | None
    repetition_penalty: Float[Array, " B"] | None
    frequency_penalty: Float[Array, " B"] | None
    presence_penalty: Float[Array, " B"] | None
    bad_words: Int[Array, "B M L"] | None
    returns_support: Bool[Array, " B"] | None
    vocab_size: int = dataclasses.field(metadata={"static": True})
    support_bound: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def from_params(
        cls,
        params: SamplingParams | Sequence[SamplingParams],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        support_bound: int | None = None,
        like: SamplingBatch | None = None,
    ) -> SamplingBatch:
        """One row per completion: request r takes `params[r].n` consecutive rows, row i of them with seed + i.

        Requests without a seed draw one here, on the host: a batch made inside jit keeps its seeds in the program.

        Args:
          params: the requests.
          vocab_size: number of real ids, V, at least 1.
          eos_token_ids: ids at which the model ends a completion.
          support_bound: promise checked here: every row that returns its support has 1 <= top_k <= support_bound.
          like: a batch of the same vocabulary whose arrays this one keeps: fields present there are present here, with
            neutral values where no row uses them (they then count as used: see `is_edited`), and no list is narrower.
            Engines pass their previous batch, so that shapes only ever grow and few programs are compiled.

        Raises:
          ValueError: params that are no SamplingParams, an id outside [0, V), a bad word given as text, a vocab_size or
            support_bound that is no integer of at least 1, a row that breaks the promised bound, or a `like` of another
            vocabulary.
        """
        requests = settings.as_requests(params)
        vocab_size = check_count("vocab_size", vocab_size)
        eos = check_integers("eos_token_ids", eos_token_ids)
        settings.check_token_ids("eos_token_ids", eos, vocab_size)
        for request in requests:
            settings.check_request(request, vocab_size)
        if support_bound is not None:
            support_bound = check_count("support_bound", support_bound)
            for request in requests:
                settings.check_bound(request, support_bound)
        least = {} if like is None else _sizes(like, vocab_size)
        rows = [request for request in requests for _ in range(request.n)]
        return cls(
            **settings.filters(rows, vocab_size),
            **settings.ends(rows, vocab_size, eos, least),
            **settings.edits(rows, vocab_size, least),
            seeds=settings.seeds(requests),
            returns_support=settings.returns_support(rows, least),
            vocab_size=vocab_size,
            support_bound=support_bound,
        )

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return self.temperature.shape[0]

    @property
    def needs_history(self) -> bool:
        """Whether an edit looks at prompt or output ids."""
        return self.has_penalties or self.bad_words is not None

    @property
    def is_edited(self) -> bool:
        """Whether some row's logits are edited before the temperature."""
        lists = (self.min_tokens, self.allowed_token_ids, self.logit_bias_ids)
        return self.needs_history or any(edit is not None for edit in lists)

    @property
    def has_penalties(self) -> bool:
        """Whether some row repeats itself at a price."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return any(penalty is not None for penalty in penalties)

    def is_greedy_without_support(self) -> Bool[Array, " B"]:
        """Which rows take their likeliest token and opted out of supports: nothing else of them is asked for."""
        if self.returns_support is None:
            return jnp.zeros(self.num_rows, jnp.bool_)
        return (self.temperature == 0) & ~self.returns_support

    def repeat(self, group_size: int) -> SamplingBatch:
        """Each row `group_size` times in a row; repetition i has seed + i."""
        repeated = jax.tree.map(lambda leaf: jnp.repeat(leaf, group_size, axis=0), self)
        child = jnp.tile(jnp.arange(group_size, dtype=jnp.uint32), self.num_rows)
        low = repeated.seeds[:, 0] + child
        carry = (low < child).astype(jnp.uint32)
        return dataclasses.replace(repeated, seeds=jnp.stack([low, repeated.seeds[:, 1] + carry], axis=1))


def _sizes(batch: SamplingBatch, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """What each array of a batch measures past the row axis."""
    if batch.vocab_size != vocab_size:
        raise ValueError(f"like must have vocab_size {vocab_size}, got {batch.vocab_size}.")
    values = ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))
    return {name: value.shape[1:] for name, value in values if hasattr(value, "shape")}
