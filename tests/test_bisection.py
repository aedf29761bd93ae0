import functools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rows
from jax.sharding import PartitionSpec

from jaxmask import SamplingBatch, SamplingParams, bisection, filters, shards

LARGE = 20_000


def arguments(logits: np.ndarray, params: list[SamplingParams]) -> tuple[jax.Array, ...]:
    x = jnp.asarray(oracle.finite_or_excluded(logits))
    batch = SamplingBatch.from_params(params, vocab_size=x.shape[1])
    return x, filters.temper(x, x.max(axis=1), batch.temperature), batch.min_p, batch.top_k, batch.top_p


def keep(logits: np.ndarray, params: list[SamplingParams]) -> np.ndarray:
    # A function of its own is traced anew, with whatever was patched.
    return np.asarray(jax.jit(lambda *rows: bisection.keep(*rows))(*arguments(logits, params)))


def check_exactly(kept: np.ndarray, logits: np.ndarray, params: list[SamplingParams]) -> None:
    """Prefixes of the canonical order, of the lengths that integer masses give."""
    _, z, min_p, top_k, _ = arguments(logits, params)
    order = np.argsort(-oracle.finite_or_excluded(logits).astype(np.float64), axis=1, kind="stable")
    survivors = np.minimum(filters.min_p_length(z, min_p), top_k)
    z_in_order = np.take_along_axis(np.asarray(z), order, axis=1)
    settings = zip(z_in_order, survivors, params, strict=True)
    lengths = np.array([exact.nucleus_length(row, int(count), p.top_p) for row, count, p in settings])
    assert kept.sum(axis=1).tolist() == lengths.tolist()
    is_prefix = np.arange(kept.shape[1]) < lengths[:, None]
    np.testing.assert_array_equal(np.take_along_axis(kept, order, axis=1), is_prefix)


def large_rows() -> dict[str, np.ndarray]:
    """One row of each kind of mass: spread, concentrated, in ties large and small, in one token."""
    rng = np.random.default_rng(0)
    peaked = rng.normal(size=LARGE)
    peaked[12_345] = 30
    return {
        "flat": rng.normal(0, 0.3, LARGE),
        "wide": rng.normal(0, 3, LARGE),
        "ties": rng.integers(-3, 4, LARGE).astype(float),
        "rare top": np.where(rng.random(LARGE) < 0.01, 5.0, rng.integers(-1, 2, LARGE)),
        "equal": np.full(LARGE, -2.5),
        "peaked": peaked,
        "bfloat16": np.asarray(jnp.asarray(rng.normal(0, 2, LARGE), jnp.bfloat16).astype(jnp.float32)),
        "few": np.where(np.arange(LARGE) % 97 == 5, rng.normal(size=LARGE), -np.inf),
    }


def large(kinds: tuple[str, ...], top_ps: tuple[float, ...], **settings) -> tuple[np.ndarray, list[SamplingParams]]:
    every = large_rows()
    params = [SamplingParams(top_p=top_p, **settings) for _ in kinds for top_p in top_ps]
    return np.stack([every[kind] for kind in kinds for _ in top_ps]).astype(np.float32), params


# Rows whose nucleus ends among fewer tokens than a bracket holds.
TIE_FREE = ("flat", "wide", "peaked", "few")


def no_tokens(logits, z, target, part):
    return jnp.zeros(z.shape, jnp.bool_)


@pytest.mark.parametrize("vocab_size", [1, 300])
def test_every_filter_on_every_kind_of_row(vocab_size):
    grid = rows.filter_grid(vocab_size)
    logits = rows.adversarial(np.random.default_rng(vocab_size), len(grid), vocab_size)
    kept, truth = keep(logits, grid), oracle.truth(logits, grid)
    length = kept.sum(axis=1)
    assert ((truth.low <= length) & (length <= truth.high)).all()
    np.testing.assert_array_equal(kept, truth.keep(length))
    assert truth.is_exact.mean() > 0.8


@pytest.mark.unoptimized
def test_ties_are_taken_by_id():
    """P01, P03, and an exact boundary inside a tie."""
    logits = np.array([[1, 2, 2, 2, 3], [0, 0, 0, 0, -9], [1, 1, 1, 1, 1]], np.float32)
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(top_p=1e-8)]
    assert [np.flatnonzero(row).tolist() for row in keep(logits, params)] == [[1, 2, 4], [0, 1, 2], [0]]
    equal = keep(np.zeros((7, 8)), [SamplingParams(top_p=n / 8) for n in range(1, 8)])
    assert [np.flatnonzero(row).tolist() for row in equal] == [list(range(n)) for n in range(1, 8)]


@pytest.mark.unoptimized
def test_one_large_tie():
    """vLLM's vector: 1000 tied tokens at top_p 0.5 keep the first 500."""
    (kept,) = keep(np.zeros((1, 1000)), [SamplingParams(top_p=0.5)])
    assert np.flatnonzero(kept).tolist() == list(range(500))


@pytest.mark.unoptimized
def test_rows_with_filters_off_keep_every_token_beside_rows_with_filters_on():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]] * 3))
    params = [SamplingParams(), SamplingParams(top_k=2, top_p=0.5), SamplingParams(min_p=0.6)]
    assert [np.flatnonzero(row).tolist() for row in keep(logits, params)] == [[0, 1, 2, 3], [0], [0, 1]]


@pytest.mark.parametrize("settings", [{}, {"min_p": 0.01, "top_k": 7000}], ids=str)
def test_large_rows_against_the_oracle_and_integer_masses(settings):
    logits, params = large(tuple(large_rows()), (1e-8, 0.5, 0.999, 1.0), **settings)
    kept, truth = keep(logits, params), oracle.truth(logits, params)
    length = kept.sum(axis=1)
    assert ((truth.low <= length) & (length <= truth.high)).all()
    np.testing.assert_array_equal(kept, truth.keep(length))
    check_exactly(kept, logits, params)


@pytest.mark.slow
def test_brackets_and_keys_agree_bit_for_bit(monkeypatch):
    logits, params = large(TIE_FREE, (1e-8, 0.5, 0.99))
    by_brackets = keep(logits, params)
    with monkeypatch.context() as patch:
        # No bracket is left undecided, so nobody asks the keys.
        patch.setattr(bisection, "_nucleus_by_keys", no_tokens)
        np.testing.assert_array_equal(keep(logits, params), by_brackets)
    # A bracket of all tokens overflows, so that the keys decide.
    monkeypatch.setattr(bisection, "_BRACKET", 1)
    monkeypatch.setattr(
        bisection, "_bracket", lambda z, top_p, part: (-27 * jnp.ones_like(top_p), jnp.ones_like(top_p))
    )
    np.testing.assert_array_equal(keep(logits, params), by_brackets)
    check_exactly(by_brackets, logits, params)
    monkeypatch.setattr(bisection, "_nucleus_by_keys", no_tokens)
    assert not keep(logits, params).any()


def test_a_misplaced_bracket_changes_nothing(monkeypatch):
    """Float masses may place it anywhere: exact ones notice."""
    logits, params = large((*TIE_FREE, "ties"), (0.5, 0.99))
    rows_and_settings = arguments(logits, params)
    expected = keep(logits, params)
    check_exactly(expected, logits, params)

    @jax.jit
    def keep_between(low, high):
        monkeypatch.setattr(bisection, "_bracket", lambda *_: (low, high))
        return bisection.keep(*rows_and_settings)

    # The z at which each nucleus ends, and its neighbours.
    last = np.where(expected, rows_and_settings[1], np.inf).min(axis=1)
    above, below = (np.nextafter(last, np.float32(to)) for to in (1, -100))
    whole_range, empty_at_the_top, empty_at_the_end = (-27, 1), (1, 1), (-27, -27)
    too_low, too_high, reversed_bounds = (-12, -11.5), (-0.01, 1), (1, -27)
    leaves_out_the_last, ends_before_it, the_last_alone, one_too_low = (
        (above, 1),
        (below, last),
        (last, above),
        (below, 1),
    )
    for bounds in (
        whole_range,
        empty_at_the_top,
        empty_at_the_end,
        too_low,
        too_high,
        reversed_bounds,
        leaves_out_the_last,
        ends_before_it,
        the_last_alone,
        one_too_low,
    ):
        low, high = (jnp.asarray(np.broadcast_to(bound, last.shape).astype(np.float32)) for bound in bounds)
        np.testing.assert_array_equal(keep_between(low, high), expected, err_msg=str(bounds))


def test_boundaries_on_a_unit_of_mass():
    """n of 20,000 equal tokens are exactly enough; at the next larger top_p they are not."""
    counts = [625, 5000, 10_000, 15_000]
    top_ps = [n / 20_000 for n in counts]
    params = [SamplingParams(top_p=p) for p in (*top_ps, *(p + 2.0**-24 for p in top_ps))]
    logits = np.full((len(params), LARGE), 1.5, np.float32)
    kept = keep(logits, params)
    assert kept.sum(axis=1).tolist() == [*counts, *(n + 1 for n in counts)]
    check_exactly(kept, logits, params)


@pytest.mark.unoptimized
def test_first_tokens_in_canonical_order():
    logits = jnp.array([[1.0, 3.0, 3.0, -jnp.inf, 3.0, 2.0]] * 5)
    is_token = np.array([[1, 1, 1, 0, 1, 1]] * 4 + [[1, 1, 0, 0, 1, 1]], bool)
    length = jnp.array([1, 2, 4, 5, 2], jnp.int32)
    first = bisection.first(logits, jnp.asarray(is_token), length, shards.Slice(6))
    assert [np.flatnonzero(row).tolist() for row in first] == [[1], [1, 2], [1, 2, 4, 5], [0, 1, 2, 4, 5], [1, 4]]


def test_first_of_every_kind_of_row():
    rng = np.random.default_rng(1)
    logits = oracle.finite_or_excluded(rows.adversarial(rng, 360, 200))
    is_token = np.isfinite(logits) & (rng.random(logits.shape) < 0.7)
    length = np.minimum(rng.integers(1, 200, 360), is_token.sum(axis=1)).astype(np.int32)
    run = jax.jit(functools.partial(bisection.first, part=shards.Slice(200)))
    first = np.asarray(run(jnp.asarray(logits), jnp.asarray(is_token), jnp.asarray(length)))
    order = np.argsort(-np.where(is_token, logits, -np.inf).astype(np.float64), axis=1, kind="stable")
    in_order = np.take_along_axis(first, order, axis=1)
    np.testing.assert_array_equal(in_order, np.arange(200) < length[:, None])


def test_slices_keep_what_whole_rows_would():
    devices = jax.devices()
    assert len(devices) > 1
    mesh = jax.sharding.Mesh(np.array(devices), ("tensor",))
    part = shards.Slice(LARGE // len(devices), ("tensor",), len(devices))
    assert LARGE % len(devices) == 0
    logits, params = large(("flat", "ties", "few", "peaked"), (0.9,), top_k=7000)
    columns, rows_alone = PartitionSpec(None, "tensor"), PartitionSpec()
    over_devices = jax.shard_map(
        functools.partial(bisection.keep, part=part),
        mesh=mesh,
        in_specs=(columns, columns, rows_alone, rows_alone, rows_alone),
        out_specs=columns,
        check_vma=False,
    )
    kept = np.asarray(jax.jit(over_devices)(*arguments(logits, params)))
    check_exactly(kept, logits, params)
