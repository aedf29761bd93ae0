import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rows
from jax.sharding import PartitionSpec

from jaxmask import candidates, mass, shards
from jaxmask.candidates import CHUNK

NO = -np.inf

leading_columns = jax.jit(candidates.leading_columns, static_argnames=("num", "part"))


def canonical(logits: np.ndarray) -> np.ndarray:
    """Ids by (logit descending, id ascending), on exact float64 values of the float32 logits."""
    return np.argsort(-logits.astype(np.float64), axis=1, kind="stable")


def finite(logits: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(logits), logits, np.float32(-np.inf))


def as_float32(logits) -> np.ndarray:
    return np.asarray(jnp.asarray(logits).astype(jnp.float32))


def check_head(columns: candidates.Columns, logits: np.ndarray) -> np.ndarray:
    """The lengths, once all that `Columns` says holds of these logits."""
    logits = finite(as_float32(logits))
    order = canonical(logits)
    in_order = np.take_along_axis(logits, order, axis=1)
    length, num_tokens = np.asarray(columns.length), np.isfinite(logits).sum(axis=1)
    num = columns.token_ids.shape[1]
    is_listed = np.arange(num) < length[:, None]
    np.testing.assert_array_equal(np.where(is_listed, columns.token_ids, 0), np.where(is_listed, order[:, :num], 0))
    np.testing.assert_array_equal(columns.logits, np.where(is_listed, in_order[:, :num], NO))
    assert (length <= num_tokens).all()
    assert (length[np.asarray(columns.is_whole)] == num_tokens[np.asarray(columns.is_whole)]).all()
    return length


def test_keys_have_the_order_of_the_logits():
    """Also of subnormals, which float comparisons may flush to zero; -0 and 0 are one."""
    tiny = np.float32(1e-45)
    ascending = np.array(
        [
            -3.4e38,
            -3e38,
            -1,
            -1e-38,
            -2 * tiny,
            -tiny,
            0,
            tiny,
            2 * tiny,
            1.2e-38,
            1,
            np.nextafter(np.float32(1), 2),
            3e38,
        ],
        np.float32,
    )
    keys = np.asarray(candidates.order_keys(jnp.asarray(ascending[None])))[0]
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    zeros = candidates.order_keys(jnp.array([[0.0, -0.0]]))[0]
    assert int(zeros[0]) == int(zeros[1]) == keys[6]
    out = candidates.order_keys(jnp.array([[jnp.nan, -jnp.nan, jnp.inf, -jnp.inf]]))
    assert out.tolist() == [[0, 0, 0, 0]]
    assert keys.min() > 0


def test_keys_of_random_bit_patterns():
    """Any two floats compare like their keys."""
    words = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    x = words.view(np.float32)
    x = x[np.isfinite(x)]
    keys = np.asarray(candidates.order_keys(jnp.asarray(x[None])))[0].astype(np.int64)
    a, b = x[:-1].astype(np.float64), x[1:].astype(np.float64)
    np.testing.assert_array_equal(np.sign(a - b), np.sign(keys[:-1] - keys[1:]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num"), [(50, 40), (257, 48), (1000, 64), (4100, 160)])
def test_leading_columns_are_the_head_of_the_canonical_order(vocab_size, num, dtype):
    rng = np.random.default_rng([vocab_size, num])
    logits = jnp.asarray(rows.adversarial(rng, 360, vocab_size)).astype(dtype)
    top_k = np.where(rng.random(360) < 0.5, rng.integers(1, 9, 360), rng.integers(1, vocab_size + 9, 360))
    columns = leading_columns(logits, jnp.asarray(top_k.astype(np.int32)), num=num)
    length = check_head(columns, logits)
    values = as_float32(logits)
    # A chunk whose maximum is unknown takes the place of one that is known.
    is_clean = ~(np.isnan(values) | np.isposinf(values)).any(axis=1)
    is_small = top_k <= min(-(-vocab_size // CHUNK), num // 2) - 1
    num_needed = np.minimum(top_k, np.isfinite(values).sum(axis=1))
    assert (length[is_clean & is_small & (length > 0)] >= num_needed[is_clean & is_small & (length > 0)]).all()
    # Rows of normal logits (every 18th) have no ties to overflow.
    is_plain = is_small & (np.arange(360) % 18 == 0)
    if vocab_size > 2 * CHUNK:
        assert is_plain.any()
    if dtype == jnp.float32:
        assert (length[is_plain] >= top_k[is_plain]).all()


@pytest.mark.parametrize(("vocab_size", "num"), [(1, 1), (7, 7), (50, 60), (200, 200)])
def test_rows_that_fit_come_whole(vocab_size, num):
    logits = rows.adversarial(np.random.default_rng(vocab_size), 180, vocab_size)
    columns = leading_columns(jnp.asarray(logits), jnp.ones(180, jnp.int32), num=num)
    assert check_head(columns, logits).tolist() == np.isfinite(logits).sum(axis=1).tolist()
    assert columns.is_whole.all()


def test_a_few_tokens_of_a_large_vocabulary_come_whole():
    """Fewer chunks hold a token than top-k asks for, so nothing bounds them."""
    rng = np.random.default_rng(0)
    logits = np.full((40, 1000), NO, np.float32)
    for row in range(1, 40):
        logits[row, rng.integers(0, 1000, row)] = rng.integers(-2, 3, row)
    logits[20:, 3 * CHUNK] = np.nan
    columns = leading_columns(jnp.asarray(logits), jnp.full(40, 16, jnp.int32), num=40)
    # Of 16 chunks, of ids 16 apart, 10 are looked into: 9 that hold a token, or a NaN, bound the rest.
    is_looked_into = ~np.isneginf(np.pad(logits, ((0, 0), (0, 24)), constant_values=NO)).reshape(40, CHUNK, 16)
    is_free = is_looked_into.any(axis=1).sum(axis=1) < 9
    length = check_head(columns, logits)
    assert 10 < is_free.sum() < 30
    assert columns.is_whole[is_free].all()
    assert (length[is_free] == np.isfinite(logits).sum(axis=1)[is_free]).all()
    assert not check_head(
        leading_columns(jnp.full((1, 1000), NO), jnp.ones(1, jnp.int32), num=40), np.full((1, 1000), NO)
    )


def test_normal_rows_have_what_their_top_k_needs():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(40, 32_000)).astype(np.float32)
    top_k = np.array([1, 2, 5, 20, 50, 64, 32_000, 32_000] * 5, np.int32)
    columns = leading_columns(jnp.asarray(logits), jnp.asarray(top_k), num=160)
    length = check_head(columns, logits)
    assert (length >= np.minimum(top_k, 98)).all()
    # A few more than asked for: some chunks hold two.
    assert (length[top_k == 20] <= 26).all()
    assert not columns.is_whole.any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.nan])
def test_what_is_not_finite_hides_no_token(dtype, value):
    """The top token at one place of the chunk, NaN or +inf at each other; elsewhere nothing comes near."""
    rng = np.random.default_rng(2)
    V, num_rows = 64 * CHUNK, 4 * (CHUNK - 1)
    logits = rng.normal(-20, 1, (num_rows, V)).astype(np.float32)
    top, odd = np.zeros(num_rows, int), np.tile(np.arange(1, CHUNK), 4)
    top[CHUNK - 1 :] = (odd[CHUNK - 1 :] + rng.integers(1, CHUNK, num_rows - CHUNK + 1)) % CHUNK
    chunk = rng.integers(0, 64, num_rows)
    every = np.arange(num_rows)
    logits[every, chunk + 64 * odd] = value
    logits[every, chunk + 64 * top] = 5
    columns = leading_columns(jnp.asarray(logits).astype(dtype), jnp.ones(num_rows, jnp.int32), num=40)
    length = check_head(columns, jnp.asarray(logits).astype(dtype))
    # The second best may tie in bfloat16, but hardly fill the room.
    assert (length >= 1).all()
    assert columns.token_ids[:, 0].tolist() == (chunk + 64 * top).tolist()


def test_many_chunks_that_are_not_finite():
    """More of them than are looked into, too, never give a wrong head; fewer hide nothing at all."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(101, 100 * CHUNK)).astype(np.float32)
    for row in range(101):
        logits[row, rng.permutation(100)[:row] + 100 * rng.integers(0, CHUNK, row)] = rng.choice([np.nan, np.inf])
    columns = leading_columns(jnp.asarray(logits), jnp.full(101, 3, jnp.int32), num=40)
    length = check_head(columns, logits)
    # 14 chunks are looked into, the last of which sets the bound of the others.
    assert (length[:11] >= 3).all()


def test_too_many_ties_are_flagged_and_a_fitting_number_is_not():
    V, num = 256, 40
    logits = np.full((3, V), -1, np.float32)
    logits[0, :num] = 1
    logits[1, : num + 1] = 1
    logits[2, ::7] = 1
    columns = leading_columns(jnp.asarray(logits), jnp.ones(3, jnp.int32), num=num)
    assert check_head(columns, logits).tolist() == [40, 0, 37]
    assert columns.is_whole.tolist() == [False, False, False]
    assert columns.token_ids[0].tolist() == list(range(num))
    assert columns.token_ids[2, :3].tolist() == [0, 7, 14]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ties_of_chunk_maxima_beyond_the_chunks_looked_into_are_not_lost(dtype):
    """One tied token per chunk: 14 of 100 chunks are looked into for 40 columns, so as many ties must flag the row."""
    rng = np.random.default_rng(4)
    num_tied = np.tile([5, 12, 13, 14, 15, 99, 100], 9)
    logits = rng.normal(-20, 1, (63, 100 * CHUNK)).astype(np.float32)
    for row, count in enumerate(num_tied):
        # The first chunks, the last ones, any.
        chunks = (np.arange(count), 99 - np.arange(count), rng.permutation(100)[:count])[row // 7 % 3]
        logits[row, chunks + 100 * rng.integers(0, CHUNK, count)] = 1
    top_k = np.repeat([1, 2, 5], 21)
    columns = leading_columns(jnp.asarray(logits).astype(dtype), jnp.asarray(top_k.astype(np.int32)), num=40)
    length = check_head(columns, jnp.asarray(logits).astype(dtype))
    assert length.tolist() == np.where(num_tied < 14, num_tied, 0).tolist()


def test_ties_below_what_top_k_needs_do_no_harm():
    """Five tokens above a tie of 90 chunks: the first five can be told, a sixth cannot."""
    logits = np.full((2, 100 * CHUNK), -20, np.float32)
    logits[:, 3 : 90 * CHUNK : CHUNK] = 1
    logits[:, [70, 64 * 64, 4, 65 * 64, 99 * 64]] = [5, 6, 7, 8, 9]
    columns = leading_columns(jnp.asarray(logits), jnp.array([5, 6], jnp.int32), num=40)
    assert check_head(columns, logits).tolist() == [5, 0]
    assert columns.token_ids[0, :5].tolist() == [99 * 64, 65 * 64, 4, 64 * 64, 70]


@pytest.mark.parametrize("num_columns", [3, 100, 1200])
def test_leading_columns_of_slices(num_columns):
    """Devices that hold a slice each agree on the head of the whole row."""
    devices = jax.devices()
    assert len(devices) > 1
    mesh = jax.sharding.Mesh(np.array(devices), ("tensor",))
    part = shards.Slice(num_columns, ("tensor",), len(devices))
    V, rng = num_columns * len(devices), np.random.default_rng(num_columns)
    logits = rows.adversarial(rng, 180, V)
    top_k = rng.integers(1, 12, 180).astype(np.int32)
    over_devices = jax.shard_map(
        functools.partial(candidates.leading_columns, num=min(60, V), part=part),
        mesh=mesh,
        in_specs=(PartitionSpec(None, "tensor"), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    columns = jax.jit(over_devices)(jnp.asarray(logits), jnp.asarray(top_k))
    length = check_head(columns, logits)
    if num_columns == 3:
        assert columns.is_whole.all()
    else:
        # A slice bounds as many tokens as it has chunks.
        assert (length >= np.minimum(top_k, num_columns // CHUNK))[::18].all()


def test_wanted_columns_in_canonical_order():
    logits = jnp.array([[1.0, 3.0, 1.0, NO, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [NO, 0.0, -0.0, NO, 1.0, 0.0]])
    is_wanted = np.array([[1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 1]], bool)
    columns = candidates.between_columns(logits, jnp.asarray(is_wanted), 4, shards.Slice(6))
    # Five do not fit.
    assert columns.length.tolist() == [4, 0, 3]
    assert columns.is_whole.tolist() == [True, False, True]
    assert columns.token_ids[0].tolist() == [1, 4, 0, 2]
    assert columns.token_ids[2, :3].tolist() == [1, 2, 5]
    assert columns.logits.tolist() == [[3, 3, 1, 1], [NO] * 4, [0, 0, 0, NO]]


def test_wanted_columns_where_there_is_more_room_than_columns():
    columns = candidates.between_columns(
        jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[True, False, True]]), 8, shards.Slice(3)
    )
    assert columns.length.tolist() == [2]
    assert columns.token_ids[0, :2].tolist() == [2, 0]
    assert columns.logits.tolist() == [[3, 1, NO]]


def test_gather():
    logits = jnp.arange(80.0).reshape(2, 40).astype(jnp.bfloat16)
    is_wanted = np.zeros((2, 40), bool)
    is_wanted[0, [3, 31, 32, 39]] = True
    is_wanted[1, [0, 39]] = True
    positions, values, fits = candidates.gather(logits, jnp.asarray(is_wanted), 3)
    assert positions.tolist() == [[3, 31, 32], [0, 39, 0]]
    assert values.dtype == jnp.float32
    assert values.tolist() == [[3, 31, 32], [40, 79, NO]]
    assert fits.tolist() == [False, True]


def test_number_of_columns():
    assert candidates.num_columns(8, 1000) == 48
    assert candidates.num_columns(8, 20) == 20
    assert candidates.num_columns(8, 1000, 100) == 232
    assert candidates.num_columns(10_000, 151_936) == mass.MAX_COLUMNS
