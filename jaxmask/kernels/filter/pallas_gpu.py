"""The filters and the draw on a GPU, without a sort: one pass over the logits, and little else.

    maxima       (row, chunk): the largest logit of each group of 64 ids, a stride apart
    bound        (row): a logit that the leading tokens reach, from the maxima alone (see `jaxmask.candidates`)
    candidates   (row, chunk): which ids reach it. Only what holds a leading group's ids is read again, unless the mass
                 of the whole row is asked for
    expand       (row, chunk): their ids (see `kernels.compact`)
    decide       (row): min-p, top-k, top-p, noise, the drawn token and its support, among the candidates

Searches are bisections on order-preserving integer keys, and masses are the integers of `jaxmask.mass`, so supports are
those of the plain path. Rows whose candidates overflow, or do not decide the row, are flagged, as in `by_columns`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import bits, candidates, draw, drawn, filters, mass
from jaxmask.kernels import triton
from jaxmask.kernels.compact import pallas_gpu as compact
from jaxmask.kernels.filter.records import Decided, Settings
from jaxmask.mass import Mass

_SIZE = candidates.CHUNK


@functools.partial(jax.jit, static_argnames=("vocab_size", "num_candidates", "num_cells", "num_top", "is_interpreted"))
def filter_and_draw(
    logits: Float[Array, "R C"],
    settings: Settings,
    *,
    vocab_size: int,
    num_candidates: int,
    num_cells: int,
    num_top: int,
    is_interpreted: bool,
) -> Decided:
    """What the candidates of each row decide.

    Args:
      logits: edited logits; what columns at or past `vocab_size` hold is not looked at.
      settings: of each row.
      vocab_size: ids, V.
      num_candidates: room for candidates, a power of two of at most `mass.MAX_COLUMNS`.
      num_cells: cells of the supports, M.
      num_top: candidates that a greedy row needs to be decided; at most `num_candidates`.
      is_interpreted: see `triton.call`.
    """
    keys = _maxima(logits, vocab_size, is_interpreted)
    # Where all tokens fit, more groups than there are make the bound none.
    fits = vocab_size <= num_candidates
    most = keys.shape[1] + 1 if fits else candidates.rank_that_fits(num_candidates, keys.shape[1])
    bound, largest, leading = _bound(keys, settings.top_k, most, is_interpreted)
    words, sizes, high, low = _candidates(logits, leading, bound, largest, settings, vocab_size, is_interpreted)
    ids, counts = compact.expand(words, sizes, num_candidates, vocab_size, is_interpreted=is_interpreted)
    rows = (logits, ids, counts, bound, largest, high, low, settings)
    return _decide(*rows, vocab_size, num_cells, num_top, is_interpreted=is_interpreted)


def num_groups(vocab_size: int) -> int:
    """Groups of a row, G; id i is in group i mod G. Whole chunks of them, so that a program reads runs of 64 ids."""
    return _SIZE * compact.num_chunks(vocab_size)


def _maxima(logits: Float[Array, "R C"], vocab_size: int, is_interpreted: bool) -> UInt[Array, "R G"]:
    """The key of the largest token of each group; 0 where it has none."""
    num_rows, groups = logits.shape[0], num_groups(vocab_size)

    def kernel(logits_ref: Any, keys_ref: Any) -> None:
        row, first = triton.program_id(0), triton.program_id(1) * _SIZE
        shape = (_SIZE, _SIZE)
        ids = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * groups + first
        ids += jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        x = _load(logits_ref, row, ids, True, vocab_size)
        places = first + jnp.arange(_SIZE, dtype=jnp.int32)
        triton.store(keys_ref.at[row, places], candidates.order_keys(x).max(axis=0))

    (keys,) = triton.call(
        kernel,
        [jax.ShapeDtypeStruct((num_rows, groups), jnp.uint32)],
        logits,
        name="filter_maxima",
        grid=(num_rows, compact.num_chunks(vocab_size)),
        num_warps=4,
        is_interpreted=is_interpreted,
    )
    return keys


def _bound(
    keys: UInt[Array, "R G"], top_k: Int[Array, " R"], most: int, is_interpreted: bool
) -> tuple[UInt[Array, " R"], UInt[Array, " R"], UInt[Array, "R M"]]:
    """The k-th largest of each row's keys, k being top_k but at most `most`, 0 where fewer groups hold a token; the
    largest; and which groups reach the bound, as bits."""
    num_rows, groups = keys.shape
    num_words = groups // bits.WORD_BITS
    shape = (triton.power_of_two(num_words), bits.WORD_BITS)

    def kernel(keys_ref: Any, top_k_ref: Any, bound_ref: Any, largest_ref: Any, leading_ref: Any) -> None:
        row, words = triton.program_id(0), jnp.arange(shape[0], dtype=jnp.int32)
        lanes = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
        places = words[:, None] * bits.WORD_BITS + lanes.astype(jnp.int32)
        row_keys = triton.load(keys_ref.at[row, places], mask=places < groups, other=jnp.uint32(0))
        k = jnp.minimum(triton.load(top_k_ref.at[row]), most)
        bound = _largest_key(lambda trial: _count(row_keys >= trial) >= k)
        triton.store(bound_ref.at[row], bound)
        triton.store(largest_ref.at[row], row_keys.max())
        is_leading = row_keys >= jnp.maximum(bound, jnp.uint32(1))
        leading = jnp.where(is_leading, jnp.uint32(1) << lanes, jnp.uint32(0)).sum(axis=1, dtype=jnp.uint32)
        triton.store(leading_ref.at[row, words], leading, mask=words < num_words)

    of_rows = jax.ShapeDtypeStruct((num_rows,), jnp.uint32)
    bound, largest, leading = triton.call(
        kernel,
        [of_rows, of_rows, jax.ShapeDtypeStruct((num_rows, num_words), jnp.uint32)],
        keys,
        top_k,
        name="filter_bound",
        grid=(num_rows,),
        num_warps=_num_warps(shape[0] * shape[1], 512),
        is_interpreted=is_interpreted,
    )
    return bound, largest, leading


def _candidates(
    logits: Float[Array, "R C"],
    leading: UInt[Array, "R M"],
    bound: UInt[Array, " R"],
    largest: UInt[Array, " R"],
    settings: Settings,
    vocab_size: int,
    is_interpreted: bool,
) -> tuple[UInt[Array, "R N"], Int[Array, "R K"], Int[Array, "R K"], Int[Array, "R K"]]:
    """Which ids reach the bound, as bits and counts of each chunk; sums of `mass.parts` of each chunk's tokens that
    survive min-p, in rows that ask for them."""
    num_rows, num_words = leading.shape
    # Words, sectors of memory (32 bytes of float32), ids: where a sector has an id to look at, it is read whole.
    shape = (compact.WORDS, 4, 8)

    def kernel(
        logits_ref: Any, leading_ref: Any, bound_ref: Any, largest_ref: Any, row_settings: Settings, *outputs: Any
    ) -> None:
        words_ref, sizes_ref, high_ref, low_ref = outputs
        row, chunk = triton.program_id(0), triton.program_id(1)
        least = jnp.maximum(triton.load(bound_ref.at[row]), jnp.uint32(1))
        wants_total = triton.load(row_settings.wants_total.at[row]) > 0
        places = chunk * compact.WORDS + jnp.arange(compact.WORDS, dtype=jnp.int32)
        leading_words = triton.load(leading_ref.at[row, places % num_words])[:, None, None]
        sectors = jax.lax.broadcasted_iota(jnp.uint32, (compact.WORDS, 4, 1), 1)
        has_leading = ((leading_words >> (sectors * jnp.uint32(8))) & jnp.uint32(255)) > 0
        lanes = jax.lax.broadcasted_iota(jnp.int32, shape, 1) * 8 + jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        ids = places[:, None, None] * bits.WORD_BITS + lanes
        x = _load(logits_ref, row, ids, has_leading | wants_total, vocab_size)
        is_candidate = candidates.order_keys(x) >= least
        words = jnp.where(is_candidate, jnp.uint32(1) << lanes.astype(jnp.uint32), jnp.uint32(0))
        compact.store_words(words.sum(axis=2, dtype=jnp.uint32).sum(axis=1, dtype=jnp.uint32), words_ref, sizes_ref)

        @triton.when(wants_total)
        def _() -> None:
            z, survives = _tempered(x, triton.load(largest_ref.at[row]), row_settings, row)
            high, low = mass.parts(jnp.where(survives, z, -jnp.inf))
            triton.store(high_ref.at[row, chunk], high.sum(dtype=jnp.int32))
            triton.store(low_ref.at[row, chunk], low.sum(dtype=jnp.int32))

    bit_shapes = compact.bit_shapes(num_rows, vocab_size)
    words, sizes, high, low = triton.call(
        kernel,
        [*bit_shapes, bit_shapes[1], bit_shapes[1]],
        logits,
        leading,
        bound,
        largest,
        settings,
        name="filter_candidates",
        grid=(num_rows, compact.num_chunks(vocab_size)),
        num_warps=4,
        is_interpreted=is_interpreted,
    )
    return words, sizes, high, low


def _decide(
    logits: Float[Array, "R C"],
    candidate_ids: Int[Array, "R N"],
    candidate_counts: Int[Array, " R"],
    bound: UInt[Array, " R"],
    largest: UInt[Array, " R"],
    high: Int[Array, "R K"],
    low: Int[Array, "R K"],
    settings: Settings,
    vocab_size: int,
    num_cells: int,
    num_top: int,
    *,
    is_interpreted: bool,
) -> Decided:
    num_rows, num_candidates = candidate_ids.shape

    def kernel(logits_ref: Any, ids_ref: Any, counts_ref: Any, bound_ref: Any, largest_ref: Any, *rest: Any) -> None:
        high_ref, low_ref, row_settings, out = *rest[:3], Decided(*rest[3:])
        row, slots = triton.program_id(0), jnp.arange(num_candidates, dtype=jnp.int32)
        setting = Settings(*(triton.load(ref.at[row]) for ref in row_settings))
        count = triton.load(counts_ref.at[row])
        fits = count <= num_candidates
        is_token = slots < count
        ids = triton.load(ids_ref.at[row, slots], mask=is_token, other=0)
        x = triton.load(logits_ref.at[row, ids], mask=is_token, other=-jnp.inf).astype(jnp.float32)
        keys = candidates.order_keys(x)
        z, survives = _tempered(x, triton.load(largest_ref.at[row]), row_settings, row)

        num_survivors = _count(survives)
        is_whole = fits & (triton.load(bound_ref.at[row]) == 0)
        is_decided = is_whole | (fits & ((setting.top_k <= count) | (num_survivors < count)))
        kept = _first(keys, survives, jnp.minimum(num_survivors, setting.top_k))
        parts = mass.parts(jnp.where(kept, z, -jnp.inf))
        needs_total = fits & ~is_decided & (count > 0) & (setting.wants_total > 0)
        total = mass.select(needs_total, _row_mass(high_ref, low_ref, row), _mass(parts, kept))
        target = total.share_of_units(setting.top_p_units)
        is_cut = setting.is_cut > 0
        is_reached = _mass(parts, kept).reaches(target)
        kept = _nucleus(keys, parts, kept, target, is_cut)
        # Without a cut, the total is wanted of greedy rows whose support nobody asks for.
        is_decided |= needs_total & jnp.where(is_cut, is_reached, count >= num_top)
        log_mass = drawn.log_of(mass.select(needs_total & ~is_cut, total, _mass(parts, kept)))
        _store_drawn(ids, x, z, keys, kept, log_mass, setting, out)
        triton.store(out.is_decided.at[row], is_decided.astype(jnp.int32))

    def _store_drawn(
        ids: Array, x: Array, z: Array, keys: Array, kept: Array, log_mass: Array, setting: Settings, out: Decided
    ) -> None:
        row = triton.program_id(0)
        score = z + draw.noise((setting.seed_low, setting.seed_high), setting.position, ids)
        score_keys = candidates.order_keys(jnp.where(setting.is_greedy > 0, x, score))
        score_keys = jnp.where(kept, score_keys, jnp.uint32(0))
        # Equal scores go to the lower id.
        winner = jnp.where(kept & (score_keys == score_keys.max()), ids, vocab_size).min()
        is_winner = kept & (ids == winner)
        count = _count(kept)
        triton.store(out.token_ids.at[row], jnp.where(count > 0, winner, 0))
        triton.store(out.logprobs.at[row], jnp.where(is_winner, z, -jnp.inf).max() - log_mass)
        triton.store(out.ranks.at[row], _count(kept & (keys >= jnp.where(is_winner, keys, jnp.uint32(0)).max())))
        triton.store(out.counts.at[row], count)
        places = jnp.cumsum(kept, dtype=jnp.int32) - kept.astype(jnp.int32)
        cells = jnp.arange(triton.power_of_two(num_cells), dtype=jnp.int32)
        is_unused, is_stored = (cells >= count) & (cells < num_cells), kept & (places < num_cells)
        triton.store(out.cells.at[row, cells], jnp.full_like(cells, vocab_size), mask=is_unused)
        triton.store(out.cells.at[row, places], ids, mask=is_stored)
        triton.store(out.values.at[row, cells], jnp.full(cells.shape, -jnp.inf), mask=is_unused)
        triton.store(out.values.at[row, places], z - log_mass, mask=is_stored)

    dtypes = Decided(jnp.int32, jnp.float32, jnp.int32, jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    shapes = [(num_rows,)] * 5 + [(num_rows, num_cells)] * 2
    return Decided(
        *triton.call(
            kernel,
            [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)],
            logits,
            candidate_ids,
            candidate_counts,
            bound,
            largest,
            high,
            low,
            settings,
            name="filter_decide",
            grid=(num_rows,),
            num_warps=_num_warps(num_candidates, 256),
            is_interpreted=is_interpreted,
        )
    )


def _load(logits_ref: Any, row: Array, ids: Array, is_wanted: Array | bool, vocab_size: int) -> Array:
    """float32 logits of some ids of a row; -inf where they are not wanted, and past the vocabulary."""
    # A padded head is read to the end of its rows: where a vocabulary ends, no load of 16 bytes need end.
    x = triton.load(logits_ref.at[row, ids], mask=(ids < logits_ref.shape[1]) & is_wanted, other=-jnp.inf)
    return jnp.where(ids < vocab_size, x.astype(jnp.float32), -jnp.inf)


def _num_warps(num: int, per_warp: int) -> int:
    """Warps that share `num` elements: one alone needs no barriers for its sums, many hide latency."""
    return min(max(num // per_warp, 1), 16)


def _count(is_counted: Bool[Array, "*C"]) -> Int[Array, ""]:
    return is_counted.astype(jnp.int32).sum(dtype=jnp.int32)


def _tempered(x: Array, largest: Array, row_settings: Settings, row: Array) -> tuple[Array, Array]:
    """z of each token of a row, and which of them survive min-p."""
    factor, least_z = triton.load(row_settings.factor.at[row]), triton.load(row_settings.least_z.at[row])
    z = filters.tempered(x, candidates.logit_of(largest), factor)
    return z, filters.reaches(z, least_z)


def _largest_key(reaches: Callable[[Array], Array], is_searched: Array | bool = True) -> Array:
    """The largest key that `reaches`, given that lower keys do whenever higher ones do; 0 if none does, or without a
    search."""

    def set_bit(step: Array, key: Array) -> Array:
        trial = key | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        return jnp.where(reaches(trial), trial, key)

    return jax.lax.fori_loop(jnp.int32(0), jnp.where(is_searched, jnp.int32(32), jnp.int32(0)), set_bit, jnp.uint32(0))


def _first(keys: Array, is_token: Array, length: Array) -> Array:
    """The first `length` tokens in canonical order; cells are in the order of ids."""
    key = _largest_key(lambda trial: _count(is_token & (keys >= trial)) >= length, length < _count(is_token))
    is_above, is_tied = is_token & (keys > key), is_token & (keys == key)
    rank = jnp.cumsum(is_tied, dtype=jnp.int32)
    return is_above | (is_tied & (rank <= length - _count(is_above)))


def _nucleus(keys: Array, parts: tuple[Array, Array], is_token: Array, target: Mass, is_cut: Array) -> Array:
    """The shortest prefix of the tokens whose mass reaches the target; all of them if none does, or without a cut."""
    key = _largest_key(lambda trial: _mass(parts, is_token & (keys >= trial)).reaches(target), is_cut)
    is_above, is_tied = is_token & (keys > key), is_token & (keys == key)
    tied = [jnp.where(is_tied, part, 0) for part in parts]
    before = _mass(parts, is_above) + mass.from_sums(*(jnp.cumsum(part) - part for part in tied))
    return is_above | (is_tied & ~before.reaches(target))


def _mass(parts: tuple[Array, Array], is_counted: Array) -> Mass:
    return mass.from_sums(*(jnp.where(is_counted, part, 0).sum(dtype=jnp.int32) for part in parts))


def _row_mass(high_ref: Any, low_ref: Any, row: Array) -> Mass:
    num = high_ref.shape[1]
    chunks = jnp.arange(triton.power_of_two(num), dtype=jnp.int32)
    return mass.from_blocks(
        *(triton.load(ref.at[row, chunks], mask=chunks < num, other=0) for ref in (high_ref, low_ref))
    )
