"""Sampling settings of a batch of rows, as arrays: what enters a compiled program.

Changing a value never recompiles; only using an edit that no row used before does (its arrays stop being None).
Lists of different lengths are padded to powers of two for the same reason.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from jaxmask.params import SamplingParams

_NO_LIMIT = np.iinfo(np.int32).max


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
    ) -> SamplingBatch:
        """One row per completion: request r takes `params[r].n` consecutive rows, row i of them with seed + i.

        Requests without a seed draw one here, on the host: a batch made inside jit keeps its seeds in the program.

        Args:
          params: the requests.
          vocab_size: number of real ids, V.
          eos_token_ids: ids at which the model ends a completion.
          support_bound: promise checked here: every row that returns its support has 1 <= top_k <= support_bound.

        Raises:
          ValueError: an id outside [0, V), a bad word given as text, or a row that breaks the promised bound.
        """
        requests = [params] if isinstance(params, SamplingParams) else list(params)
        if not requests:
            raise ValueError("params must hold at least one SamplingParams, got none.")
        for request in requests:
            _check_ids(request, vocab_size)
            _check_bound(request, support_bound)
        _check_id_list("eos_token_ids", eos_token_ids, vocab_size)
        rows = [(request, child) for request in requests for child in range(request.n)]
        settings = [request for request, _ in rows]
        return cls(
            **_filters(settings, vocab_size),
            **_ends(settings, vocab_size, tuple(eos_token_ids)),
            **_edits(settings, vocab_size),
            seeds=_seeds(requests),
            returns_support=_unless_all([r.return_sampling_mask is not False for r in settings], True, np.bool_),
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

    def repeat(self, group_size: int) -> SamplingBatch:
        """Each row `group_size` times in a row; repetition i has seed + i."""
        repeated = jax.tree.map(lambda leaf: jnp.repeat(leaf, group_size, axis=0), self)
        child = jnp.tile(jnp.arange(group_size, dtype=jnp.uint32), self.num_rows)
        low = repeated.seeds[:, 0] + child
        carry = (low < child).astype(jnp.uint32)
        return dataclasses.replace(repeated, seeds=jnp.stack([low, repeated.seeds[:, 1] + carry], axis=1))


def _check_ids(request: SamplingParams, vocab_size: int) -> None:
    _check_id_list("stop_token_ids", request.stop_token_ids or (), vocab_size)
    _check_id_list("logit_bias", tuple(request.logit_bias or ()), vocab_size)
    _check_id_list("allowed_token_ids", request.allowed_token_ids or (), vocab_size)
    for word in request.bad_words or ():
        if isinstance(word, str):
            raise ValueError(f"bad_words given as text need a tokenizer; pass token id lists here, got {word!r}.")
        _check_id_list("bad_words", word, vocab_size)


def _check_id_list(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise ValueError(
            f"token_id(s) {outside} in {field} contain out-of-vocab token ids. Vocabulary size: {vocab_size}"
        )


def _check_bound(request: SamplingParams, support_bound: int | None) -> None:
    if support_bound is None or request.return_sampling_mask is False:
        return
    if request.is_greedy or not 1 <= request.top_k <= support_bound:
        raise ValueError(
            f"top_k must be in [1, {support_bound}] and temperature > 0 where supports are bounded by "
            f"support_bound={support_bound}, got top_k={request.top_k}, temperature={request.temperature}."
        )


def _filters(rows: list[SamplingParams], vocab_size: int) -> dict[str, Any]:
    # Greedy rows are not filtered (as in vLLM): their log-probability is over the whole edited vocabulary.
    top_k = [vocab_size if r.is_greedy or r.top_k <= 0 else min(r.top_k, vocab_size) for r in rows]
    return {
        "temperature": _column([r.temperature for r in rows], np.float32),
        "min_p": _column([0.0 if r.is_greedy else r.min_p for r in rows], np.float32),
        "top_k": _column(top_k, np.int32),
        "top_p": _column([1.0 if r.is_greedy else r.top_p for r in rows], np.float32),
    }


def _ends(rows: list[SamplingParams], vocab_size: int, eos: tuple[int, ...]) -> dict[str, Any]:
    stops = [tuple(r.stop_token_ids or ()) + (() if r.ignore_eos else eos) for r in rows]
    withheld = [tuple(r.stop_token_ids or ()) + eos if r.min_tokens else () for r in rows]
    min_tokens = _unless_all([r.min_tokens for r in rows], 0, np.int32)
    return {
        "max_tokens": _column([_NO_LIMIT if r.max_tokens is None else r.max_tokens for r in rows], np.int32),
        "stop_token_ids": _padded(stops, vocab_size, np.int32),
        "min_tokens": min_tokens,
        "withheld_token_ids": None if min_tokens is None else _padded(withheld, vocab_size, np.int32),
    }


def _edits(rows: list[SamplingParams], vocab_size: int) -> dict[str, Any]:
    biases = [r.logit_bias or {} for r in rows]
    allowed = [r.allowed_token_ids or () for r in rows]
    words = [[w for w in r.bad_words or () if not isinstance(w, str)] for r in rows]
    return {
        "allowed_token_ids": _padded(allowed, vocab_size, np.int32) if any(allowed) else None,
        "logit_bias_ids": _padded([tuple(b) for b in biases], vocab_size, np.int32) if any(biases) else None,
        "logit_bias_values": _padded([tuple(b.values()) for b in biases], 0.0, np.float32) if any(biases) else None,
        "repetition_penalty": _unless_all([r.repetition_penalty for r in rows], 1.0, np.float32),
        "frequency_penalty": _unless_all([r.frequency_penalty for r in rows], 0.0, np.float32),
        "presence_penalty": _unless_all([r.presence_penalty for r in rows], 0.0, np.float32),
        "bad_words": _padded_words(words, vocab_size) if any(words) else None,
    }


def _seeds(requests: list[SamplingParams]) -> Array:
    seeds = []
    for request in requests:
        first = secrets.randbits(64) if request.seed is None else request.seed
        seeds += [(first + child) % 2**64 for child in range(request.n)]
    return jnp.asarray(np.array([(seed & 0xFFFFFFFF, seed >> 32) for seed in seeds], np.uint32))


def _bucket(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _column(values: Sequence[float | int], dtype: type) -> Array:
    return jnp.asarray(np.array(values, dtype))


def _unless_all(values: Sequence[float | int], neutral: float | int, dtype: type) -> Array | None:
    return None if all(value == neutral for value in values) else _column(values, dtype)


def _padded(lists: Sequence[Sequence[float | int]], fill: float | int, dtype: type) -> Shaped[Array, "B N"]:
    width = _bucket(max(len(values) for values in lists))
    padded: np.ndarray = np.full((len(lists), width), fill, dtype)
    for row, values in zip(padded, lists, strict=True):
        row[: len(values)] = values
    return jnp.asarray(padded)


def _padded_words(lists: Sequence[Sequence[Sequence[int]]], fill: int) -> Int[Array, "B M L"]:
    num_words = _bucket(max(len(words) for words in lists))
    length = _bucket(max(len(word) for words in lists for word in words))
    padded = np.full((len(lists), num_words, length), fill, np.int32)
    for row, words in zip(padded, lists, strict=True):
        for slot, word in zip(row, words, strict=False):
            slot[length - len(word) :] = word
    return jnp.asarray(padded)
