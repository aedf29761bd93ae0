import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rows
import tolerances
from scipy import stats

from jaxmask import History, Sample, SamplingBatch, SamplingParams, sample

# Against an oracle, within a tolerance or in law: other tests ask for the same bits of several programs.
UNOPTIMIZED = pytest.mark.unoptimized


def draw(logits, params, *, width, vocab_size=None, **options) -> Sample:
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    requests = [params] * len(logits) if isinstance(params, SamplingParams) else params
    batch = SamplingBatch.from_params(requests, vocab_size=vocab_size or logits.shape[1])
    return sample(jnp.asarray(logits), batch, step=0, width=width, **options)


def popcount(packed) -> np.ndarray:
    return np.unpackbits(np.asarray(packed), axis=-1).sum(axis=-1)


def assert_invariants(drawn: Sample) -> None:
    """What holds of every row of every result."""
    support, V = drawn.support, drawn.support.vocab_size
    counts, cells, tokens = map(np.asarray, (support.counts, support.token_ids, drawn.token_ids))
    lists = support.to_lists()
    assert [len(ids) for ids in lists] == counts.tolist()
    assert all(ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < V for ids in lists if ids)
    for ids, row in zip(lists, cells, strict=True):
        assert row.tolist() == (ids + [V] * len(row))[: len(row)]
    if support.packed is not None:
        np.testing.assert_array_equal(popcount(support.packed), counts)
        np.testing.assert_array_equal(
            np.unpackbits(np.asarray(support.packed), axis=1, bitorder="little", count=V).astype(bool),
            np.asarray(support.to_mask()),
        )
    is_valid = np.asarray(drawn.is_valid)
    np.testing.assert_array_equal(is_valid, counts > 0)
    assert ((tokens >= 0) & (tokens < V)).all()
    assert all(token in ids for token, ids, valid in zip(tokens, lists, is_valid, strict=True) if valid)
    assert np.isneginf(np.asarray(drawn.logprobs)[~is_valid]).all()
    assert (np.asarray(drawn.logprobs)[is_valid] <= 0).all()


def assert_as_oracle(drawn: Sample, edited: np.ndarray, params: list[SamplingParams]) -> oracle.Truth:
    """Support, log-probability and greedy token of each row are those of the contract."""
    truth = oracle.truth(edited, params)
    keep, counts = np.asarray(drawn.support.to_mask()), np.asarray(drawn.support.counts)
    assert ((truth.low <= counts) & (counts <= truth.high)).all(), np.flatnonzero(
        (truth.low > counts) | (counts > truth.high)
    )
    np.testing.assert_array_equal(keep, truth.keep(counts))
    tokens, is_valid = np.asarray(drawn.token_ids), counts > 0
    expected = np.take_along_axis(oracle.log_probs(truth.z, keep), tokens[:, None], axis=1)[:, 0][is_valid]
    error = np.abs(np.asarray(drawn.logprobs, np.float64)[is_valid] - expected)
    assert (error <= tolerances.LOGPROB * np.maximum(1, np.abs(expected))).all(), error.max()
    # Greedy takes the first of the canonical order, however small the difference to the second.
    is_greedy = np.array([p.temperature == 0 for p in params]) & is_valid
    np.testing.assert_array_equal(tokens[is_greedy], truth.order[is_greedy, 0])
    return truth


def assert_same_rows(a: Sample, b: Sample) -> None:
    """Bit for bit."""
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(
            np.atleast_1d(np.asarray(one)).view(np.uint8), np.atleast_1d(np.asarray(other)).view(np.uint8)
        )


# All columns: V <= 2 width + 32. Otherwise top-k rows go through candidate columns while top_k <= ceil(V / 64) and the
# ties fit, and every other row through bisection of the whole row. 18,000 rows in all.
GRID = [
    pytest.param(1, 4, 1000, id="one id", marks=UNOPTIMIZED),
    pytest.param(7, 3, 3750, id="V is not a multiple of 8"),
    pytest.param(8, 8, 3750, id="width = V", marks=UNOPTIMIZED),
    pytest.param(9, 4, 3750, id="one past a byte", marks=UNOPTIMIZED),
    pytest.param(257, 8, 3000, id="5 chunks"),
    pytest.param(257, 113, 3000, id="257 in all columns", marks=UNOPTIMIZED),
    pytest.param(5003, 32, 500, id="79 chunks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("vocab_size", "width", "num_rows"), GRID)
def test_every_filter_on_every_kind_of_row(vocab_size, width, num_rows):
    rng = np.random.default_rng([vocab_size, width])
    logits = rows.adversarial(rng, num_rows, vocab_size)
    grid = rows.filter_grid(vocab_size)
    # 1250 settings, 18 kinds of rows: a step that shares no factor with either meets all pairs over the vocabularies.
    index = (np.arange(num_rows) * 7 + vocab_size) % len(grid)
    batch = rows.with_seeds(rows.take(SamplingBatch.from_params(grid, vocab_size=vocab_size), index))
    drawn = sample(jnp.asarray(logits), batch, step=3, width=width)
    assert_invariants(drawn)
    truth = assert_as_oracle(drawn, logits, [grid[i] for i in index])
    # The slack on rounding edges (ties make many masses meet top_p exactly) must not hollow out the comparison.
    assert truth.is_exact.mean() > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("V", "num_rows", "dtype"), [(151_936, 36, jnp.float32), (262_144, 27, jnp.bfloat16)])
def test_real_vocabularies(V, num_rows, dtype):
    """The two sizes that people use; what a dtype changes, it changes at every size."""
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rows.adversarial(rng, num_rows, V)).astype(dtype)
    grid = rows.filter_grid(V)
    index = rng.permutation(len(grid))[:num_rows]
    batch = rows.with_seeds(rows.take(SamplingBatch.from_params(grid, vocab_size=V), index))
    drawn = sample(logits, batch, step=0, width=64)
    assert_invariants(drawn)
    assert_as_oracle(drawn, np.asarray(logits.astype(jnp.float32)), [grid[i] for i in index])


@pytest.mark.slow
def test_a_nan_beside_the_likeliest_token_hides_nothing():
    """XLA's `max` over a chunk may lose what stands before a NaN: here 5.0, eight lanes before it."""
    logits = -np.arange(4096, dtype=np.float32) / 4096
    settings = [SamplingParams(top_k=1, seed=1), SamplingParams(top_p=0.01, seed=1)]
    batch = SamplingBatch.from_params(settings, vocab_size=4096)
    for place in range(1, 64):
        row = logits.copy()
        row[0], row[place] = 5, np.nan
        drawn = sample(jnp.asarray(np.stack([row, row])), batch, step=0, width=1)
        assert drawn.token_ids.tolist() == [0, 0], place


def test_too_large_a_vocabulary_is_refused():
    batch = SamplingBatch.from_params(SamplingParams(), vocab_size=2**19)
    with pytest.raises(ValueError, match="vocab_size must be at most 524287, got 524288"):
        sample(jnp.zeros((1, 2**19)), batch, step=0, width=4)


HAND_COMPUTED_SUPPORTS = [
    pytest.param([1, 2, 2, 2, 3], {"top_k": 3}, [1, 2, 4], id="P01 ties at k go to the lower id"),
    pytest.param(np.log([0.3, 0.1, 0.1, 0.5]), {"top_p": 0.79}, [0, 3], id="P03 below the edge"),
    pytest.param(np.log([0.3, 0.1, 0.1, 0.5]), {"top_p": 0.81}, [0, 1, 3], id="P03 above the edge"),
    pytest.param([0, 1, 2, 3], {"top_p": 1.0}, [0, 1, 2, 3], id="P04 top_p 1 keeps all"),
    pytest.param([1, 3, 2], {"top_p": 1e-8}, [1], id="P05 tiny top_p"),
    pytest.param([1, 3, 2], {"top_p": 1e-4}, [1], id="P05 small top_p"),
    pytest.param(np.log([0.5, 0.3, 0.2]), {"top_k": 1, "top_p": 0.8}, [0], id="P06 never empty"),
    pytest.param([3, 2, 1], {"temperature": 2.0, "top_p": 0.9}, [0, 1, 2], id="P07 temperature before top-p (up)"),
    pytest.param([3, 2, 1], {"temperature": 0.5, "top_p": 0.8}, [0], id="P07 temperature before top-p (down)"),
    pytest.param([2, 1, 0], {"min_p": 0.2}, [0, 1], id="P07 min-p"),
    pytest.param([-2, -1, -3], {"min_p": 0.3}, [0, 1], id="P07 min-p on negative logits"),
    pytest.param(np.log([0.4, 0.3, 0.2, 0.1]), {"top_k": 2, "top_p": 0.5}, [0], id="P08 top-p of the top-k"),
    pytest.param([0, 1, 2, 3], {"top_k": 0}, [0, 1, 2, 3], id="P09 top_k 0 is off"),
    pytest.param([0, 1, 2, 3], {"top_k": -1}, [0, 1, 2, 3], id="P09 top_k -1 is off"),
    pytest.param([0, 1, 2, 3, 4, 5, 6, 7], {"top_k": 9}, list(range(8)), id="P10 top_k beyond the vocabulary"),
    pytest.param([0, 1, 2, 3, 4], {"top_k": 100_000}, [0, 1, 2, 3, 4], id="P10 huge top_k"),
    pytest.param([0] * 8, {"top_p": 0.5}, [0, 1, 2, 3], id="an exact half is reached by an exact half"),
    pytest.param([0, -200, -70], {"min_p": 0.0}, [0, 1, 2], id="P11 min_p 0 is a no-op"),
    pytest.param([0, -200, -80], {"min_p": 1e-40}, [0, 2], id="a min_p below the normal numbers is not off"),
    pytest.param([0, -np.inf, -np.inf, 0], {}, [0, 3], id="P26 excluded ids"),
    pytest.param([2, np.nan, np.inf, 1], {}, [0, 3], id="NaN and inf are out"),
]


def without_missing_ids(logits, V) -> np.ndarray:
    """One row of V logits, of which those that are not given are excluded."""
    return np.append(np.asarray(logits, np.float32), np.full(V - len(logits), -np.inf, np.float32))


@functools.cache
def hand_computed_supports() -> Sample:
    """All the rows in one batch, which is one program."""
    cases = [case.values for case in HAND_COMPUTED_SUPPORTS]
    logits = np.stack([without_missing_ids(logits, 8) for logits, *_ in cases])
    return draw(logits, [SamplingParams(seed=1, **params) for _, params, _ in cases], width=8)


@UNOPTIMIZED
@pytest.mark.parametrize(
    ("row", "support"),
    [pytest.param(row, case.values[2], id=case.id) for row, case in enumerate(HAND_COMPUTED_SUPPORTS)],
)
def test_hand_computed_supports(row, support):
    drawn = hand_computed_supports()
    assert drawn.support.to_lists()[row] == support
    assert_invariants(jax.tree.map(lambda leaf: leaf[row : row + 1], drawn))


HAND_COMPUTED_LOG_PROBS = [
    pytest.param([1, 2, 2, 2, 3], {"top_k": 3}, {1: -1.5514447139, 2: -1.5514447139, 4: -0.5514447139}, id="P01"),
    pytest.param(
        [0, 1, 2, 3],
        {},
        {0: -3.4401896986, 1: -2.4401896986, 2: -1.4401896986, 3: -0.4401896986},
        id="P04",
    ),
    pytest.param([2, 1, 0], {"min_p": 0.2}, {0: -0.3132616875, 1: -1.3132616875}, id="P07"),
    pytest.param(
        [0, 1, 2, 3, 4],
        {"top_k": 100_000},
        dict(enumerate([-4.4519143959, -3.4519143959, -2.4519143959, -1.4519143959, -0.4519143959])),
        id="P10",
    ),
    pytest.param(
        [2, 1, 0],
        {"temperature": 2.0},
        dict(enumerate(np.log([0.5064803911, 0.3071958857, 0.1863237232]))),
        id="P12 the temperature divides once",
    ),
    pytest.param([2, 1, 0, -1], {"temperature": 0.5, "top_k": 2}, {0: -0.1269280110, 1: -2.1269280110}, id="P33"),
]


@functools.cache
def hand_computed_log_probs() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of 400 draws of each row, in one batch."""
    cases, count = [case.values for case in HAND_COMPUTED_LOG_PROBS], 400
    logits = np.stack([without_missing_ids(logits, 5) for logits, *_ in cases])
    requests = SamplingBatch.from_params([SamplingParams(seed=0, **params) for _, params, _ in cases], vocab_size=5)
    index = np.repeat(np.arange(len(cases)), count)
    drawn = sample(jnp.asarray(logits[index]), rows.with_seeds(rows.take(requests, index)), step=0, width=8)
    return np.asarray(drawn.token_ids).reshape(-1, count), np.asarray(drawn.logprobs).reshape(-1, count)


@UNOPTIMIZED
@pytest.mark.parametrize(
    ("row", "expected"),
    [pytest.param(row, case.values[2], id=case.id) for row, case in enumerate(HAND_COMPUTED_LOG_PROBS)],
)
def test_hand_computed_log_probs(row, expected):
    tokens, logprobs = (array[row] for array in hand_computed_log_probs())
    # P02: the smallest of these probabilities is 0.011: 400 draws miss it with chance 0.012, and the seeds are fixed.
    assert set(tokens.tolist()) == set(expected)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(expected[int(token)], abs=tolerances.LOGPROB)


@UNOPTIMIZED
def test_a_tiny_temperature_in_half_precision_stays_finite():
    """P11: scaled logits beyond float16."""
    with pytest.warns(UserWarning, match="raised to"):
        params = SamplingParams(temperature=1e-5, seed=3)
    batch = SamplingBatch.from_params(params, vocab_size=3)
    drawn = sample(jnp.array([[2.875, 2.955078125, 11.0625]], jnp.float16), batch, step=0, width=3)
    assert drawn.token_ids.tolist() == [2]
    assert drawn.logprobs.tolist() == [0.0]
    assert drawn.support.to_lists() == [[0, 1, 2]]


@pytest.mark.slow
def test_bfloat16_logits_are_read_exactly():
    rng = np.random.default_rng(11)
    logits = jnp.asarray(rng.normal(size=(64, 257)) * 4).astype(jnp.bfloat16)
    _, batch, _ = mixed_rows()
    drawn = sample(logits, batch, step=5, width=8)
    assert_same_rows(drawn, sample(logits.astype(jnp.float32), batch, step=5, width=8))


@functools.cache
def mixed_rows() -> tuple[np.ndarray, SamplingBatch, Sample]:
    """64 rows through candidates and bisection, and their result at width 8, always with packed bits."""
    V = 257
    rng = np.random.default_rng(17)
    logits = rows.adversarial(rng, 64, V)
    grid = rows.filter_grid(V)
    batch = rows.with_seeds(mixed_settings([grid[i] for i in rng.permutation(len(grid))[:64]]))
    return logits, batch, sample(jnp.asarray(logits), batch, step=5, width=8)


def mixed_settings(requests, support_bound: int | None = 257) -> SamplingBatch:
    """64 rows whose batch has the structure of all others made here, so that tests share one program.

    No row opts out, and the bits do not depend on which rows stand together.
    """
    batch = SamplingBatch.from_params(requests, vocab_size=257)
    return dataclasses.replace(batch, returns_support=jnp.ones(64, jnp.bool_), support_bound=support_bound)


SLOW = pytest.mark.slow


# Alone, and a vector of rows with a rest; the 64 rows together are whole vectors.
@pytest.mark.parametrize("size", [pytest.param(1, marks=SLOW), 9])
def test_a_row_does_not_depend_on_its_batch(size):
    """P01, P22: bit for bit, alone and in batches of other sizes, wherever it stands."""
    logits, batch, together = mixed_rows()
    for start in range(0, 64, size):
        index = np.arange(start, start + size) % 64
        some = sample(jnp.asarray(logits[index]), rows.take(batch, index), step=5, width=8)
        assert_same_rows(some, jax.tree.map(lambda leaf, index=index: leaf[index], together))


def test_a_row_does_not_depend_on_its_place():
    """P22: rows in another order give the same rows in that order."""
    logits, batch, together = mixed_rows()
    index = np.random.default_rng(0).permutation(64)
    shuffled = sample(jnp.asarray(logits[index]), rows.take(batch, index), step=5, width=8)
    assert_same_rows(shuffled, jax.tree.map(lambda leaf: leaf[index], together))


@pytest.mark.parametrize("width", [1, 300])
def test_the_width_changes_nothing_but_the_cells(width):
    """Rows take other paths at other widths; masses are integers, so not a bit of their results differs."""
    logits, batch, narrow = mixed_rows()
    wide = sample(jnp.asarray(logits), batch, step=5, width=width)
    assert_invariants(wide)
    assert wide.support.to_lists() == narrow.support.to_lists()
    for one, other in ((wide.token_ids, narrow.token_ids), (wide.logprobs, narrow.logprobs)):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(wide.is_valid, narrow.is_valid)


@pytest.mark.slow
def test_a_mass_at_the_edge_of_top_p_falls_on_one_side_on_every_path():
    """Rows whose top_p is the float32 share of one of their own prefixes: every width keeps the same ids."""
    rng = np.random.default_rng(23)
    V, num_batches = 257, 3
    logits = (2 * rng.normal(size=(64 * num_batches, V))).astype(np.float32)
    probabilities = np.exp(oracle.log_probs(logits))
    shares = np.cumsum(-np.sort(-probabilities, axis=1), axis=1)
    # Small nuclei and wide ones.
    lengths = rng.integers(1, 140, len(logits))
    top_p = np.float32(shares[np.arange(len(logits)), lengths - 1])
    params = [SamplingParams(top_p=float(p), seed=i) for i, p in enumerate(top_p)]
    differences = set()
    for start in range(0, len(logits), 64):
        these = slice(start, start + 64)
        batch = mixed_settings(params[these])
        drawn = [sample(jnp.asarray(logits[these]), batch, step=0, width=width) for width in (1, 8, 300)]
        differences |= set((np.asarray(drawn[0].support.counts) - lengths[these]).tolist())
        for other in drawn[1:]:
            assert other.support.to_lists() == drawn[0].support.to_lists()
            np.testing.assert_array_equal(other.token_ids, drawn[0].token_ids)
            np.testing.assert_array_equal(other.logprobs, drawn[0].logprobs)
    # Rounding decides, so either side is right; both come up, and both are the same everywhere.
    assert differences == {0, 1}


def test_inside_jit_is_outside_of_jit():
    logits, batch, eager = mixed_rows()
    jitted = jax.jit(lambda logits, batch, step: sample(logits, batch, step=step, width=8))
    assert_same_rows(jitted(jnp.asarray(logits), batch, jnp.int32(5)), eager)


def test_an_unseeded_neighbour_changes_nothing():
    """P22."""
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(64, 257)).astype(np.float32))
    requests = [SamplingParams(seed=42, temperature=0.8, top_k=4)] + [SamplingParams(top_k=4)] * 63
    first, second = (sample(logits, mixed_settings(requests), step=5, width=8) for _ in range(2))
    assert_same_rows(*(jax.tree.map(lambda leaf: leaf[:1], drawn) for drawn in (first, second)))
    assert first.token_ids[1:].tolist() != second.token_ids[1:].tolist()


def test_each_row_has_its_own_step():
    logits = jnp.tile(jnp.asarray(np.random.default_rng(1).normal(size=257), jnp.float32), (64, 1))
    batch = mixed_settings([SamplingParams(seed=9, top_k=4)] * 64)
    steps = np.arange(64, dtype=np.int32) % 16
    together = sample(logits, batch, step=jnp.asarray(steps), width=8)
    apart = [int(sample(logits, batch, step=step, width=8).token_ids[0]) for step in range(16)]
    assert together.token_ids.tolist() == apart * 4
    assert len(set(apart)) > 1


def test_padded_head():
    """P25: columns past the vocabulary never win, also under a bias and with top_k = 8."""
    padded = [-3.0, -1, -2, -5, -4, 0, 0, 0]
    expected = [-2.4519143959, -0.4519143959, -1.4519143959, -4.4519143959, -3.4519143959]
    params = [
        SamplingParams(seed=0),
        SamplingParams(seed=0, top_k=8),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={3: 10.0}),
    ]
    drawn = draw([padded] * 4, params, width=8, vocab_size=5)
    assert drawn.support.to_lists() == [[0, 1, 2, 3, 4]] * 4
    assert drawn.token_ids[2:].tolist() == [1, 3]
    for token, logprob in zip(drawn.token_ids[:3].tolist(), drawn.logprobs[:3].tolist(), strict=True):
        assert logprob == pytest.approx(expected[token], abs=tolerances.LOGPROB)
    wide = np.random.default_rng(2).normal(size=(64, 300)).astype(np.float32)
    wide[:, 257:] = 50
    _, batch, _ = mixed_rows()
    assert_same_rows(
        sample(jnp.asarray(wide), batch, step=0, width=8), sample(jnp.asarray(wide[:, :257]), batch, step=0, width=8)
    )


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_nothing_to_draw_is_flagged_and_leaves_its_neighbours_alone(width, bad):
    """P24."""
    logits = np.random.default_rng(3).normal(size=(64, 257)).astype(np.float32)
    batch = mixed_settings([SamplingParams(seed=seed, top_p=0.9) for seed in range(64)])
    whole = sample(jnp.asarray(logits), batch, step=5, width=width)
    is_broken = np.arange(64) == 1
    logits[is_broken] = bad
    broken = sample(jnp.asarray(logits), batch, step=5, width=width)
    assert np.asarray(whole.is_valid).all()
    np.testing.assert_array_equal(broken.is_valid, ~is_broken)
    assert_invariants(broken)
    assert broken.support.to_lists()[1] == []
    neighbours = np.flatnonzero(~is_broken)
    assert_same_rows(*(jax.tree.map(lambda leaf: leaf[neighbours], drawn) for drawn in (whole, broken)))


def test_opted_out_rows_come_back_without_support():
    logits, batch, kept = mixed_rows()
    stays = np.arange(64) % 3 > 0
    dropped = sample(
        jnp.asarray(logits), dataclasses.replace(batch, returns_support=jnp.asarray(stays)), step=5, width=8
    )
    np.testing.assert_array_equal(dropped.token_ids, kept.token_ids)
    np.testing.assert_array_equal(dropped.logprobs, kept.logprobs)
    np.testing.assert_array_equal(dropped.is_valid, kept.is_valid)
    expected = [ids if stay else [] for ids, stay in zip(kept.support.to_lists(), stays, strict=True)]
    assert dropped.support.to_lists() == expected
    np.testing.assert_array_equal(popcount(dropped.support.packed), list(map(len, expected)))
    # A row that left does not ask for bits, however wide its support.
    params = [SamplingParams(top_k=3), SamplingParams(return_sampling_mask=False)] * 32
    narrow = sample(jnp.zeros((64, 257)), SamplingBatch.from_params(params, vocab_size=257), step=5, width=8).support
    assert narrow.packed is None
    assert narrow.to_lists() == [[0, 1, 2], []] * 32


def test_packed_bits_are_there_whenever_a_support_may_exceed_the_width():
    def has_bits(top_k, width, *, is_jitted=False, **options):
        batch = SamplingBatch.from_params([SamplingParams(seed=1, top_k=k) for k in top_k], vocab_size=60, **options)
        answers = []

        def run(logits, settings):
            drawn = sample(logits, settings if is_jitted else batch, step=0, width=width)
            answers.append(drawn.support.packed is not None)

        # Traced, never compiled: arguments are tracers, what is closed over keeps its values.
        jax.eval_shape(run, jnp.zeros((2, 60)), batch)
        return answers[0]

    assert not has_bits((8, 3), 8)
    assert has_bits((9, 3), 8)
    assert has_bits((0, 3), 8)
    assert has_bits((0, 3), 59)
    assert not has_bits((0, 3), 60)
    # Inside jit the values of top_k are unknown: only a promise saves the bits.
    assert has_bits((8, 3), 8, is_jitted=True)
    assert not has_bits((8, 3), 8, is_jitted=True, support_bound=8)
    assert has_bits((8, 3), 7, is_jitted=True, support_bound=8)


def test_without_bits_a_support_is_the_same():
    """P01 at batch 64: the compact form alone, as engines that bound top_k use it."""
    logits, batch, _ = mixed_rows()
    bounded = dataclasses.replace(batch, top_k=jnp.minimum(batch.top_k, 8))
    with_bits = sample(jnp.asarray(logits), bounded, step=5, width=8)
    without = sample(jnp.asarray(logits), dataclasses.replace(bounded, support_bound=8), step=5, width=8)
    assert without.support.packed is None
    assert_invariants(without)
    assert without.support.to_lists() == with_bits.support.to_lists()
    np.testing.assert_array_equal(without.token_ids, with_bits.token_ids)


def test_a_support_wider_than_its_cells_is_whole_in_the_bits():
    """P29."""
    drawn = sample(jnp.zeros((64, 257)), mixed_settings([SamplingParams(seed=2)] * 64), step=5, width=8)
    assert drawn.support.counts.tolist() == [257] * 64
    assert popcount(drawn.support.packed).tolist() == [257] * 64
    assert drawn.support.to_lists() == [list(range(257))] * 64
    # - ln 257
    np.testing.assert_allclose(drawn.logprobs, -5.5490760849, atol=tolerances.LOGPROB)


RAW, PROCESSED = (
    {"raw_logits": 1.0, "raw_logprobs": -1.4401896986},
    {
        "processed_logits": 2.0,
        "processed_logprobs": -2.1269280110,
    },
)


@UNOPTIMIZED
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "expected"), [*RAW.items(), *PROCESSED.items()])
def test_the_four_log_prob_modes(mode, expected):
    """P33, then rows with a bias against the oracle."""
    logits = rows.adversarial(np.random.default_rng(6), 64, 4)
    logits = np.where(np.abs(logits) > 1e4, 0, logits)
    logits[:32] = [2, 1, 0, -1]
    params = [SamplingParams(temperature=0.5, top_k=2, seed=i) for i in range(32)]
    params += [SamplingParams(temperature=t, top_p=0.9, logit_bias={1: 1.5}, seed=0) for t in (0.0, 0.5) * 16]
    drawn, default = draw(logits, params, width=4, logprobs_mode=mode), draw(logits, params, width=4)
    np.testing.assert_array_equal(drawn.token_ids, default.token_ids)
    assert drawn.support.to_lists() == default.support.to_lists()
    is_one = np.flatnonzero(np.asarray(drawn.token_ids)[:32] == 1)
    assert is_one.size
    np.testing.assert_allclose(np.asarray(drawn.logprobs)[is_one], expected, atol=tolerances.LOGPROB)
    for row, (token, value, is_valid) in enumerate(zip(drawn.token_ids, drawn.logprobs, drawn.is_valid, strict=True)):
        if is_valid:
            edited = oracle.edit(logits[row], params[row])
            keep = np.asarray(drawn.support.to_mask())[row]
            right = oracle.reported(mode, logits[row], edited, keep, params[row])[int(token)]
            assert float(value) == pytest.approx(right, abs=tolerances.LOGPROB, rel=tolerances.LOGPROB)
        else:
            assert np.isneginf(value)


@UNOPTIMIZED
def test_all_edits_and_filters_in_order():
    """P27."""
    params = SamplingParams(
        logit_bias={3: 2.2},
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        temperature=0.7,
        min_p=0.05,
        top_k=4,
        top_p=0.83,
        seed=0,
    )
    batch = rows.repeated(params, 64, 6)
    history = History.from_lists([[0]] * 64, [[3, 5]] * 64, batch)
    logits = jnp.tile(jnp.array([2, 1, 0.5, 0, -1, 1.6], jnp.float32), (64, 1))
    drawn = sample(logits, batch, step=2, history=history, width=4)
    assert drawn.support.to_lists() == [[0, 1, 3]] * 64
    expected = {0: -0.8219510563, 1: -1.5911818255, 3: -1.0307422651}
    assert set(drawn.token_ids.tolist()) == set(expected)
    for token, logprob in zip(drawn.token_ids.tolist(), drawn.logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(expected[token], abs=tolerances.LOGPROB)


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of drawn ids against exact probabilities; 0 where an impossible id was drawn."""
    observed = np.bincount(tokens, minlength=len(probabilities))
    if observed[probabilities == 0].any():
        return 0.0
    expected = probabilities * len(tokens)
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), max(len(expected) - 1, 1)))


NUM_DRAWS = 20_000
LADDER = tuple(np.linspace(2, -3, 12))
DRAWS = [
    {"temperature": temperature, **filters}
    for temperature in (0.3, 0.7, 1.0, 2.0)
    for filters in (
        {},
        {"min_p": 0.1},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_k": 7, "top_p": 0.9},
        {"min_p": 0.05, "top_k": 9, "top_p": 0.95},
        {"min_p": 0.02, "top_p": 0.6},
        {"logit_bias": {11: 6.0, 0: -2.0}},
        {"allowed_token_ids": [1, 4, 6, 9], "top_k": 3},
        {"logit_bias": {5: 1.5}, "min_tokens": 2, "stop_token_ids": [0, 1], "top_p": 0.9},
        # P86: logits that such a bias makes equal are drawn equally often; it does not swallow the noise.
        {"logit_bias": dict.fromkeys(range(6), 1e9)},
    )
]


@functools.cache
def batch_of_draws() -> SamplingBatch:
    return SamplingBatch.from_params([SamplingParams(seed=0, **settings) for settings in DRAWS], vocab_size=12)


def draws(batch: SamplingBatch, step) -> np.ndarray:
    """Tokens of rows that all have the same logits; all in one program."""
    logits = jnp.tile(jnp.asarray(LADDER, jnp.float32), (batch.num_rows, 1))
    return np.asarray(sample(logits, batch, step=step, width=12).token_ids)


@UNOPTIMIZED
def test_draws_follow_the_exact_probabilities():
    """Chi-square of 44 settings, 20,000 seeds each, at a false-alarm rate of 1e-6 together; none outside a support."""
    assert len(DRAWS) == 44
    requests = [SamplingParams(seed=0, **settings) for settings in DRAWS]
    batch = rows.take(batch_of_draws(), np.repeat(np.arange(len(DRAWS)), NUM_DRAWS))
    tokens = draws(rows.with_seeds(batch), 0).reshape(len(DRAWS), NUM_DRAWS)
    logits = np.array(LADDER, np.float32)
    edited = np.stack([oracle.edit(logits, request) for request in requests])
    truth = oracle.truth(edited, requests)
    assert truth.is_exact.all()
    probabilities = np.exp(oracle.log_probs(truth.z, truth.keep()))
    for row, setting in enumerate(DRAWS):
        assert chi_square(tokens[row], probabilities[row]) > tolerances.FALSE_ALARM / len(DRAWS), setting
    # The test has teeth: a temperature 10 % off would be seen.
    row = DRAWS.index({"temperature": 1.0})
    wrong = np.exp(oracle.log_probs(truth.z[[row]] / 1.1, truth.keep()[[row]]))[0]
    assert chi_square(tokens[row], wrong) < tolerances.FALSE_ALARM


@functools.cache
def draws_of_paths(width: int) -> tuple[np.ndarray, np.ndarray]:
    """The same logits under a top-k and under a top-p, 4000 draws each; and the exact probabilities."""
    num_draws = 4000
    logits = (3 * np.random.default_rng(12).normal(size=320)).astype(np.float32)
    requests = [SamplingParams(seed=0, top_k=5), SamplingParams(seed=0, top_p=0.7)]
    batch = rows.take(SamplingBatch.from_params(requests, vocab_size=320), np.repeat([0, 1], num_draws))
    drawn = sample(
        jnp.tile(jnp.asarray(logits), (2 * num_draws, 1)), rows.with_seeds(batch, 10**6), step=7, width=width
    )
    truth = oracle.truth(np.stack([logits, logits]), requests)
    return np.asarray(drawn.token_ids).reshape(2, num_draws), np.exp(oracle.log_probs(truth.z, truth.keep()))


@UNOPTIMIZED
@pytest.mark.parametrize(
    ("width", "row"),
    [
        pytest.param(8, 0, id="candidates"),
        pytest.param(8, 1, id="bisection"),
        pytest.param(150, 1, id="all columns"),
    ],
)
def test_draws_on_each_path(width, row):
    tokens, probabilities = draws_of_paths(width)
    assert chi_square(tokens[row], probabilities[row]) > tolerances.FALSE_ALARM


@UNOPTIMIZED
def test_successive_positions_of_one_seed_are_independent_draws():
    # As many rows as above, so that it is the same program.
    num_draws = len(DRAWS) * NUM_DRAWS
    plain = DRAWS.index({"temperature": 1.0})
    tokens = draws(rows.take(batch_of_draws(), np.full(num_draws, plain)), jnp.arange(num_draws, dtype=jnp.int32))
    p = np.exp(oracle.log_probs(np.array(LADDER)))
    assert chi_square(tokens, p) > tolerances.FALSE_ALARM
    # Pairs of neighbours: a position that leaked into the next would show in the joint counts.
    pairs = tokens[:-1:2] * 12 + tokens[1::2]
    assert chi_square(pairs, np.outer(p, p).reshape(-1)) > tolerances.FALSE_ALARM


@UNOPTIMIZED
@pytest.mark.slow
def test_improbable_ids_are_never_drawn():
    """P26: an id of probability exp(-1e5), and ids outside a support, in 24,000 draws each."""
    certain = np.full(320, -1e5, np.float32)
    certain[0] = 1
    # The shapes of `draws_of_paths`.
    logits = jnp.tile(jnp.asarray(certain), (8000, 1))
    for first_seed in range(0, 24_000, 8000):
        batch = rows.repeated(SamplingParams(seed=0), 8000, 320, first_seed)
        assert not np.asarray(sample(logits, batch, step=0, width=150).token_ids).any()


class CompileCounter(logging.Handler):
    """Counts the programs JAX compiles."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        self.count += record.getMessage().startswith("Compiling ")


@pytest.fixture
def compiles():
    handler, logger = CompileCounter(), logging.getLogger("jax")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield handler
    logger.removeHandler(handler)


def any_request(rng: np.random.Generator, is_edited: bool) -> SamplingParams:
    """Any value in any field; edits in some requests only, lists of different lengths."""
    filters = {
        "temperature": float(rng.choice([0.0, 0.1, 0.7, 1.3])),
        "top_k": int(rng.choice([0, 3, 8, 9, 200])),
        "top_p": float(rng.choice([0.1, 0.9, 1.0])),
        "min_p": float(rng.choice([0.0, 0.1, 0.5])),
    }
    if not is_edited:
        return SamplingParams(**filters)
    ids = [int(i) for i in rng.permutation(300)[: int(rng.integers(1, 5))]]
    edits = {
        "repetition_penalty": float(rng.uniform(0.5, 1.5)),
        "frequency_penalty": float(rng.uniform(0.1, 2)),
        "presence_penalty": float(rng.uniform(0.1, 2)),
        "logit_bias": dict.fromkeys(ids, 1.0),
        "bad_words": [[1, 2, *ids[:2]], [ids[0]]],
        "min_tokens": 3,
        "stop_token_ids": ids,
        "allowed_token_ids": list(range(100, 104)),
    }
    chosen = [name for name in edits if rng.random() < 0.5]
    return SamplingParams(**filters, **{name: edits[name] for name in chosen})


@UNOPTIMIZED
@pytest.mark.slow
def test_200_steps_of_changing_requests_compile_nothing(compiles):
    """P72: other values, rows that join and leave, edits that come and go; a batch made `like` the widest one."""
    rng = np.random.default_rng(0)
    ids = [5, 6, 7, 8]
    widest = SamplingParams(
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias=dict.fromkeys(ids, 1.0),
        bad_words=[[1, 2, 3, 4], [5]],
        min_tokens=3,
        stop_token_ids=ids,
        allowed_token_ids=ids,
        return_sampling_mask=False,
    )
    widest = SamplingBatch.from_params([widest] * 4, vocab_size=300, support_bound=300)

    def step(index, requests):
        batch = SamplingBatch.from_params(requests, vocab_size=300, like=widest)
        batch = dataclasses.replace(batch, support_bound=300)
        history = History.from_lists([[1, 2, int(rng.integers(0, 300))]] * 4, [[3]] * 4, batch)
        logits = jnp.asarray(rng.normal(size=(4, 300)).astype(np.float32))
        return sample(logits, batch, step=index, history=history, width=8)

    for index in range(2):
        step(index, [any_request(rng, True) for _ in range(4)])
    warm = compiles.count
    assert warm > 0
    for index in range(2, 202):
        step(index, [any_request(rng, rng.random() < 0.5) for _ in range(4)])
    assert compiles.count == warm
    # The counter counts: another function is another program.
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert compiles.count > warm


def test_greedy_sees_differences_below_the_normal_numbers():
    """x - max is flushed to 0 there; the order is not."""
    a = np.float32(1.2e-38)
    logits = np.array([[a, np.nextafter(a, np.float32(1)), -1], [1e-45, 2.8e-45, 0]], np.float32)
    drawn = draw(logits, SamplingParams(temperature=0.0), width=3, num_logprobs=1)
    assert drawn.token_ids.tolist() == [1, 1]
    assert drawn.ranks.tolist() == [1, 1]


def test_a_history_of_another_batch_is_refused(unchecked):
    """It would be read where it fits, and edits that it knows nothing of would be left out in silence."""
    plain = SamplingBatch.from_params([SamplingParams(presence_penalty=1.0)] * 2, vocab_size=8)
    repeated = SamplingBatch.from_params([SamplingParams(repetition_penalty=2.0)] * 2, vocab_size=8)
    words = SamplingBatch.from_params([SamplingParams(bad_words=[[1, 2, 3, 4]])] * 2, vocab_size=8)
    short = SamplingBatch.from_params([SamplingParams(bad_words=[[1, 2]])] * 2, vocab_size=8)

    def refuses(batch, made_for, message):
        with pytest.raises(ValueError, match=message):
            sample(jnp.zeros((2, 8)), batch, step=0, history=History.from_lists([[]] * 2, [[]] * 2, made_for), width=4)

    refuses(repeated, plain, r"history.in_prompt must be \[2, 8\] for this batch, got none")
    refuses(words, plain, r"history.tail must be \[2, 3\] for this batch, got none")
    refuses(words, short, r"history.tail must be \[2, 3\] for this batch, got \[2, 1\]")
    smaller = SamplingBatch.from_params([SamplingParams(presence_penalty=1.0)] * 2, vocab_size=5)
    refuses(plain, smaller, r"history.output_counts must be \[2, 8\] for this batch, got \[2, 5\]")
    with pytest.raises(ValueError, match=r"prompt of row 0 must contain only integers, got \[1.7\]"):
        History.from_lists([[1.7], []], [[], []], plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros((1, 8), np.int16)}, "logits must be an array of floating-point numbers, got int16"),
        (
            {"logits": np.zeros((1, 8), np.complex64)},
            "logits must be an array of floating-point .*, got complex64",
        ),
        ({"logits": None}, "logits must be an array of floating-point numbers, got NoneType"),
        ({"batch": None}, "batch must be a SamplingBatch, got NoneType"),
        ({"step": 1.7}, "step must be an integer, got float 1.7"),
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"step": np.zeros(1)}, "step must be integers, got float64"),
        ({"width": 2.5}, "width must be an integer, got float 2.5"),
        ({"width": None}, "width must be an integer, got NoneType None"),
        ({"num_logprobs": 1.0}, "num_logprobs must be an integer, got float 1.0"),
    ],
    ids=str,
)
def test_wrong_types_are_named(unchecked, change, message):
    batch = SamplingBatch.from_params(SamplingParams(), vocab_size=8)
    arguments = {"logits": jnp.zeros((1, 8)), "batch": batch, "step": 0, "width": 4, **change}
    with pytest.raises(ValueError, match=message):
        sample(arguments.pop("logits"), arguments.pop("batch"), **arguments)


@UNOPTIMIZED
@pytest.mark.slow
def test_logits_from_numpy_and_numpys_integers_will_do(unchecked):
    batch = SamplingBatch.from_params(SamplingParams(seed=1), vocab_size=8)
    drawn = sample(np.zeros((1, 8), np.float32), batch, step=np.int64(2), width=np.int64(8), num_logprobs=np.int64(2))
    expected = sample(jnp.zeros((1, 8)), batch, step=2, width=8, num_logprobs=2)
    assert_same_rows(drawn, expected)


def test_errors_name_what_was_wrong():
    batch = SamplingBatch.from_params(SamplingParams(), vocab_size=8)
    row = jnp.zeros((1, 8))
    with pytest.raises(ValueError, match=r"logprobs_mode must be one of raw_logits, .*, got 'raw'"):
        sample(row, batch, step=0, width=4, logprobs_mode="raw")
    with pytest.raises(ValueError, match=r"logits must be \[1, at least 8\] to fit the batch, got \(1, 7\)"):
        sample(row[:, :7], batch, step=0, width=4)
    with pytest.raises(ValueError, match=r"logits must be \[1, at least 8\] to fit the batch, got \(2, 8\)"):
        sample(jnp.zeros((2, 8)), batch, step=0, width=4)
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        sample(row, batch, step=0, width=0)
    penalized = SamplingBatch.from_params(SamplingParams(presence_penalty=1.0), vocab_size=8)
    with pytest.raises(ValueError, match="history is None"):
        sample(row, penalized, step=0, width=4)
