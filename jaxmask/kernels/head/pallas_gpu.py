"""The gathered head on a GPU: three kernels that read the head's rows where the ids point, and no others.

    scores     (row): logits of its ids, running maximum and sums
    d hidden   (row, columns): what the derivatives of its logits do to the hidden state
    d head     (run of cells with one id, columns): sorted by id, every run is summed by one program, in order

A run is cut at multiples of `cut` cells, so that an id in every support does not keep one program busy while the
others wait; a fourth kernel adds up the pieces. There are no atomics: the result is the same on every run.

Tiles are shaped so that a thread's loads are 16 bytes, and so that sums over ids stay within a thread.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmask.filters import LOWEST
from jaxmask.kernels import triton
from jaxmask.kernels.head.reference import HeadScores

# Ids of a tile.
TILE = 16
WARPS = 4
# Programs along the sorted cells, enough to fill a card: a program that finds no run costs time, too.
RUN_PROGRAMS = 8192
# Cells up to which runs are cut short.
SHORT_CUTS = 2**22


@functools.partial(jax.jit, static_argnames="is_interpreted")
def gathered_head(
    hidden: Float[Array, "N D"],
    head: Float[Array, "U D"],
    token_ids: Int[Array, " M"],
    starts: Int[Array, " N"],
    counts: Int[Array, " N"],
    drawn_ids: Int[Array, " N"],
    factor: Float[Array, " N"],
    is_interpreted: bool = False,
) -> HeadScores:
    """Logits, log-probability and entropy over the ids of each row (see `reference.gathered_head`).

    hidden and head are float32 or bfloat16, indices int32; `is_interpreted`: see `triton.call`.
    """
    arrays = (hidden, head, token_ids, starts, counts, drawn_ids, factor)
    return HeadScores(*_differentiable(is_interpreted, *arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(is_interpreted: bool, *arrays: Array) -> tuple[Array, Array, Array]:
    # A tuple: JAX fills what is differentiated with descriptions of arrays, which a checked record refuses.
    scores, _ = _forward(is_interpreted, *arrays)
    return scores


def _forward(
    is_interpreted: bool, hidden: Array, head: Array, token_ids: Array, *per_row: Array
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    num_rows, num_cells = hidden.shape[0], token_ids.shape[0]
    of_row = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    # What no row owns keeps these.
    kept_logits, rows = jnp.zeros(num_cells, jnp.float32), jnp.full(num_cells, -1, jnp.int32)
    kernel = functools.partial(_scores_kernel, tile_width=_warp_width(head), row_width=_block_width(head)[0])
    shapes = (_like(kept_logits), _like(rows), of_row, of_row, of_row, of_row)
    operands = (hidden, head, token_ids, *per_row, kept_logits, rows)
    grid, aliases = (num_rows,), {7: 0, 8: 1}
    kept_logits, rows, *of_rows = triton.call(
        kernel,
        shapes,
        *operands,
        name="head_scores",
        grid=grid,
        num_warps=WARPS,
        aliases=aliases,
        is_interpreted=is_interpreted,
    )
    logprobs, entropy, top, log_mass = of_rows
    scores = (kept_logits, logprobs, entropy)
    return scores, (hidden, head, token_ids, *per_row, rows, kept_logits, logprobs, entropy, top, log_mass)


def _backward(
    is_interpreted: bool, residuals: tuple[Array, ...], cotangents: tuple[Array, Array, Array]
) -> tuple[Any, ...]:
    hidden, head, token_ids, starts, counts, *_, rows = residuals[:8]
    d_logits = _d_logits(*residuals[2:], cotangents)
    # Cells that move nothing, as those of supports of one id, get a key past every id: nothing is read for them.
    keys = jnp.where(d_logits != 0, jnp.clip(token_ids, 0, head.shape[0] - 1), head.shape[0])
    width, num_warps = _block_width(head)
    kernel, shapes = functools.partial(_d_hidden_kernel, width=width), (_like(hidden),)
    grid, operands = (hidden.shape[0], _parts(hidden.shape[1], width)), (head, starts, counts, keys, d_logits)
    (d_hidden,) = triton.call(
        kernel, shapes, *operands, name="head_d_hidden", grid=grid, num_warps=num_warps, is_interpreted=is_interpreted
    )
    # Stable, so a run's cells keep their order.
    keys, order = jax.lax.sort((keys, jnp.arange(keys.shape[0], dtype=jnp.int32)), num_keys=1, is_stable=True)
    d_head = _sum_runs(hidden, head, keys, rows[order], d_logits[order], is_interpreted)
    return d_hidden, d_head, None, None, None, None, None


_differentiable.defvjp(_forward, _backward)


def _d_logits(token_ids: Array, *residuals: Any) -> Float[Array, " M"]:
    """The derivative of each cell's logit, 0 in cells nobody owns.

    g_kept_j + (g_logprob (1[j = drawn] - p_j) - g_entropy p_j (log p_j + H)) / T
    """
    _, _, drawn_ids, factor, rows, kept_logits, logprobs, entropy, top, log_mass, cotangents = residuals
    g_kept, g_logprobs, g_entropy = cotangents
    # An id that is not in its row: its score is no function of the logits.
    g_logprobs = jnp.where(logprobs == -jnp.inf, 0.0, g_logprobs)
    per_row = (drawn_ids, factor, entropy, top, log_mass, g_logprobs, g_entropy)
    drawn, factor, entropy, top, log_mass, g_logprob, g_entropy = (value[jnp.maximum(rows, 0)] for value in per_row)
    # Where the difference of two huge logits overflows, p is 0, and 0 x inf would be NaN.
    log_p = jnp.maximum((kept_logits - top) * factor, LOWEST) - log_mass
    p = jnp.exp(log_p)
    g_z = g_logprob * (jnp.where(token_ids == drawn, 1.0, 0.0) - p) - g_entropy * (p * (log_p + entropy))
    return jnp.where(rows >= 0, g_kept + factor * g_z, 0.0)


def _sum_runs(
    hidden: Array, head: Array, keys: Array, rows: Array, d_logits: Array, is_interpreted: bool
) -> Float[Array, "U D"]:
    """d head[id] = sum of d_logits times hidden[row] over the run of cells whose key is the id."""
    num_cells, depth = keys.shape[0], hidden.shape[1]
    # Short cuts leave no program with many tiles, long ones need less memory for pieces: M D / 32, or M D / 256 bytes.
    cut = 16 * TILE if num_cells <= SHORT_CUTS else 128 * TILE
    num_cuts, stride = _parts(num_cells, cut), min(num_cells, RUN_PROGRAMS)
    width, num_warps = _block_width(hidden)
    num_parts = _parts(depth, width)
    call = functools.partial(triton.call, num_warps=num_warps, is_interpreted=is_interpreted)
    kernel = functools.partial(_runs_kernel, width=width, cut=cut, stride=stride)
    shapes = (_like(head), jax.ShapeDtypeStruct((2, num_cuts, depth), jnp.float32))
    operands = (hidden, keys, rows, d_logits, jnp.zeros_like(head))
    d_head, pieces = call(kernel, shapes, *operands, name="head_d_head", grid=(stride, num_parts), aliases={4: 0})
    if num_cuts == 1:
        return d_head
    kernel, grid = functools.partial(_join_kernel, width=width, cut=cut), (num_cuts - 1, num_parts)
    (d_head,) = call(kernel, (_like(head),), keys, pieces, d_head, name="head_join", grid=grid, aliases={2: 0})
    return d_head


def _scores_kernel(hidden_ref: Any, head_ref: Any, ids_ref: Any, *refs: Any, tile_width: int, row_width: int) -> None:
    *per_row, _, _, kept_ref, rows_ref = refs[:8]
    row = triton.program_id(0)
    depth, last_id = hidden_ref.shape[1], head_ref.shape[0] - 1
    start, count, drawn, factor = (triton.load(ref.at[row]) for ref in per_row)

    def store_row(logprob: Any, entropy: Any, top: Any, log_mass: Any) -> None:
        values = (logprob, entropy, top, log_mass)
        for ref, value in zip(refs[8:], values, strict=True):
            triton.store(ref.at[row], value)

    # Nearly half of all supports hold one id: all threads share its one row of the head.
    @triton.when(count == 1)
    def _one_id() -> None:
        token_id = triton.load(ids_ref.at[start])
        columns = jnp.arange(row_width, dtype=jnp.int32)

        def add(part: Any, total: Any) -> Any:
            d = part * row_width + columns
            h = triton.load(hidden_ref.at[row, d], mask=d < depth, other=0.0)
            w = triton.load(head_ref.at[jnp.clip(token_id, 0, last_id), d], mask=d < depth, other=0.0)
            return total + h.astype(jnp.float32) * w.astype(jnp.float32)

        x = jax.lax.fori_loop(0, _parts(depth, row_width), add, jnp.zeros(row_width, jnp.float32)).sum()
        triton.store(kept_ref.at[start], x)
        triton.store(rows_ref.at[start], row)
        # 0, but NaN where x is none.
        log_p = x - x
        store_row(jnp.where(token_id == drawn, log_p, -jnp.inf), log_p, x, log_p)

    @triton.when(count != 1)
    def _any_number() -> None:
        cells = jnp.arange(TILE, dtype=jnp.int32)
        columns = jnp.arange(tile_width, dtype=jnp.int32)

        def over_ids(tile: Any, state: Any) -> Any:
            top, mass, weighted, drawn_x, num_drawn = state
            cell = tile * TILE + cells
            is_owned = cell < count
            token_ids = triton.load(ids_ref.at[start + cell], mask=is_owned, other=0)
            safe_ids = jnp.clip(token_ids, 0, last_id)

            def add(part: Any, total: Any) -> Any:
                d = part * tile_width + columns
                h = triton.load(hidden_ref.at[row, d], mask=d < depth, other=0.0)
                is_there = is_owned[:, None] & (d < depth)[None, :]
                w = triton.load(head_ref.at[safe_ids[:, None], d[None, :]], mask=is_there, other=0.0)
                # Summed here, not at the end: a tile of sums takes twice the registers.
                return total + (h.astype(jnp.float32)[None, :] * w.astype(jnp.float32)).sum(axis=1)

            x = jax.lax.fori_loop(0, _parts(depth, tile_width), add, jnp.zeros(TILE, jnp.float32))
            triton.store(kept_ref.at[start + cell], x, mask=is_owned)
            triton.store(rows_ref.at[start + cell], jnp.full(TILE, row, jnp.int32), mask=is_owned)

            new_top = jnp.maximum(top, jnp.where(is_owned, x, LOWEST).max())
            step = (top - new_top) * factor
            shrink = jnp.exp(step)
            z = jnp.where(is_owned, (x - new_top) * factor, 0.0)
            weights = jnp.where(is_owned, jnp.exp(z), 0.0)
            # Where all that came before weighs nothing, step may be -inf, and 0 x inf is NaN.
            weighted = jnp.where(shrink > 0, shrink * (weighted + mass * step), 0.0)
            weighted += (weights * jnp.maximum(z, LOWEST)).sum()
            mass = shrink * mass + weights.sum()
            is_drawn = is_owned & (token_ids == drawn)
            drawn_x += jnp.where(is_drawn, x, 0.0).sum()
            return new_top, mass, weighted, drawn_x, num_drawn + jnp.where(is_drawn, 1.0, 0.0).sum()

        zero = jnp.float32(0.0)
        state = (jnp.float32(LOWEST), zero, zero, zero, zero)
        top, mass, weighted, drawn_x, num_drawn = jax.lax.fori_loop(0, _tiles(count), over_ids, state)
        mass = jnp.where(count > 0, mass, 1.0)
        log_mass = jnp.log(mass)
        logprob = jnp.maximum((drawn_x - top) * factor, LOWEST) - log_mass
        store_row(jnp.where(num_drawn > 0, logprob, -jnp.inf), log_mass - weighted / mass, top, log_mass)


def _d_hidden_kernel(head_ref: Any, *refs: Any, width: int) -> None:
    starts_ref, counts_ref, keys_ref, d_logits_ref, d_hidden_ref = refs
    row = triton.program_id(0)
    num_ids, depth = head_ref.shape
    start, count = triton.load(starts_ref.at[row]), triton.load(counts_ref.at[row])
    d = triton.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)

    def add(tile: Any, total: Any) -> Any:
        cell = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        is_owned = cell < count
        keys = triton.load(keys_ref.at[start + cell], mask=is_owned, other=num_ids)
        d_logits = triton.load(d_logits_ref.at[start + cell], mask=is_owned, other=0.0)
        is_there = (keys < num_ids)[:, None] & (d < depth)[None, :]
        w = triton.load(head_ref.at[keys[:, None], d[None, :]], mask=is_there, other=0.0)
        return total + (d_logits[:, None] * w.astype(jnp.float32)).sum(axis=0)

    total = jax.lax.fori_loop(0, _tiles(count), add, jnp.zeros(width, jnp.float32))
    triton.store(d_hidden_ref.at[row, d], total.astype(d_hidden_ref.dtype), mask=d < depth)


def _runs_kernel(hidden_ref: Any, keys_ref: Any, *refs: Any, width: int, cut: int, stride: int) -> None:
    rows_ref, d_logits_ref, _, d_head_ref, pieces_ref = refs
    (num_cells,), (num_ids, depth) = keys_ref.shape, d_head_ref.shape
    d = triton.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
    cells = jnp.arange(TILE, dtype=jnp.int32)

    def key_at(cell: Any) -> Any:
        return triton.load(keys_ref.at[cell], mask=cell < num_cells, other=num_ids)

    def over_cells(state: Any) -> Any:
        cell, key = state
        is_first = (cell == 0) | (key_at(jnp.maximum(cell - 1, 0)) != key)
        is_cut = cell % cut == 0

        @triton.when(is_first | is_cut)
        def _sum() -> None:
            limit = jnp.minimum(cell - cell % cut + cut, num_cells)
            # Counted first: a loop that ends on what its tile holds crashes Triton (jax 0.10.2).
            places = cell + jnp.arange(cut, dtype=jnp.int32)
            in_run = triton.load(keys_ref.at[places], mask=places < limit, other=num_ids) == key
            length = in_run.astype(jnp.int32).sum()

            def add(tile: Any, total: Any) -> Any:
                place = tile * TILE + cells
                is_in_run = place < length
                place = cell + place
                rows = triton.load(rows_ref.at[place], mask=is_in_run, other=0)
                d_logits = triton.load(d_logits_ref.at[place], mask=is_in_run, other=0.0)
                is_there = is_in_run[:, None] & (d < depth)[None, :]
                h = triton.load(hidden_ref.at[rows[:, None], d[None, :]], mask=is_there, other=0.0)
                return total + (d_logits[:, None] * h.astype(jnp.float32)).sum(axis=0)

            total = jax.lax.fori_loop(0, _tiles(length), add, jnp.zeros(width, jnp.float32))
            goes_on = key_at(limit) == key

            @triton.when(is_first & ~goes_on)
            def _whole() -> None:
                triton.store(d_head_ref.at[key, d], total.astype(d_head_ref.dtype), mask=d < depth)

            @triton.when(is_first & goes_on)
            def _head_piece() -> None:
                triton.store(pieces_ref.at[0, limit // cut, d], total, mask=d < depth)

            @triton.when(~is_first)
            def _other_piece() -> None:
                triton.store(pieces_ref.at[1, cell // cut, d], total, mask=d < depth)

        return cell + stride, key_at(cell + stride)

    first = triton.program_id(0)
    jax.lax.while_loop(lambda state: state[1] < num_ids, over_cells, (first, key_at(first)))


def _join_kernel(keys_ref: Any, pieces_ref: Any, _: Any, d_head_ref: Any, *, width: int, cut: int) -> None:
    (num_cells,), (num_ids, depth) = keys_ref.shape, d_head_ref.shape
    place = triton.program_id(0) + 1
    d = triton.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)

    def key_at(cell: Any) -> Any:
        return triton.load(keys_ref.at[cell], mask=cell < num_cells, other=num_ids)

    def piece(kind: int, place: Any) -> Any:
        return triton.load(pieces_ref.at[kind, place, d], mask=d < depth, other=0.0)

    key = key_at(place * cut)
    # Each run that is cut is joined by the program of its first cut.
    is_cut_before = (place > 1) & (key_at(jnp.maximum((place - 1) * cut - 1, 0)) == key)

    @triton.when((key < num_ids) & (key_at(place * cut - 1) == key) & ~is_cut_before)
    def _join() -> None:
        def add(state: Any) -> Any:
            place, total = state
            return place + 1, total + piece(1, place)

        state = (place, piece(0, place))
        _, total = jax.lax.while_loop(lambda state: key_at(state[0] * cut) == key, add, state)
        triton.store(d_head_ref.at[key, d], total.astype(d_head_ref.dtype), mask=d < depth)


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _warp_width(array: Any) -> int:
    """Elements that a warp reads in 16 bytes per thread."""
    return 32 * 16 // array.dtype.itemsize


def _block_width(array: Any) -> tuple[int, int]:
    """Elements of a row that a program takes at once, 16 bytes per thread, and its warps."""
    warps = min(WARPS, triton.power_of_two(_parts(array.shape[1], _warp_width(array))))
    return warps * _warp_width(array), warps


def _parts(size: int, part: int) -> int:
    return -(-size // part)


def _tiles(count: Any) -> Any:
    return (count + TILE - 1) // TILE
