import contextlib
import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

from benchmarks.described_gpu import tracing_for_gpu
from jaxmask.kernels.head import HeadScores, gathered_head, pallas_gpu

# Tiles of the kernel hold 16 ids, and a run of cells with one id is cut at multiples of 256 cells.
TILE, CUT = 16, 256
N, M, D, U = 40, 1500, 100, 5003
COUNTS = (0, 1, 2, TILE - 1, TILE, TILE + 1, 5, 1, 3 * TILE, 0)
LONG = 290

BOTH = pytest.mark.parametrize("implementation", ["xla", "interpret"])
LAYOUTS = pytest.mark.parametrize("layout", ["csr", "padded", "gaps"])


@dataclasses.dataclass(frozen=True)
class Truth:
    """`HeadScores` in NumPy."""

    kept_logits: np.ndarray
    logprobs: np.ndarray
    entropy: np.ndarray

    def leaves(self) -> tuple:
        return dataclasses.astuple(self)


@dataclasses.dataclass(frozen=True)
class Case:
    """Float64 inputs; one entry of `lists` per row."""

    hidden: np.ndarray
    head: np.ndarray
    lists: list
    token_ids: np.ndarray
    starts: np.ndarray
    drawn_ids: np.ndarray
    temperature: np.ndarray
    weights: tuple

    @property
    def counts(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.lists], np.int32)

    @property
    def is_owned(self) -> np.ndarray:
        owned = np.zeros(len(self.token_ids), bool)
        for start, ids in zip(self.starts, self.lists, strict=True):
            owned[start : start + len(ids)] = True
        return owned


def exact(rng, *shape) -> np.ndarray:
    """Multiples of 1/8 in [-2, 2]: exact in bfloat16, and sums of their products are exact in float32."""
    return rng.integers(-16, 17, shape) / 8


def counts_of(layout, num_rows) -> np.ndarray:
    counts = np.resize(COUNTS, num_rows)
    if layout != "padded":
        counts[3] = LONG
    return counts


def starts_of(layout, counts, num_cells) -> np.ndarray:
    if layout == "padded":
        return np.arange(len(counts)) * (num_cells // len(counts))
    gaps = np.arange(len(counts)) % 3 if layout == "gaps" else np.zeros(len(counts), np.int64)
    return np.concatenate([[0], np.cumsum(counts + gaps)[:-1]]) + (2 if layout == "gaps" else 0)


@functools.cache
def make(layout="csr", num_rows=N, num_cells=None, depth=D, num_ids=U, seed=0) -> Case:
    """Rows of every size; id 7 in every other one, and one row in seven drew an id it does not hold."""
    rng = np.random.default_rng([seed, depth])
    # Cells for the long rows, or 50 to a row.
    num_cells = num_cells or max(M, 50 * num_rows)
    counts = counts_of(layout, num_rows)
    lists = []
    for row, count in enumerate(counts):
        others = 8 + rng.permutation(num_ids - 8)[:count]
        lists.append(np.sort(np.append(others[1:], 7) if count and row % 2 else others))
    return fill(layout, lists, exact(rng, num_rows, depth), exact(rng, num_ids, depth) / 8, num_cells, rng)


def fill(layout, lists, hidden, head, num_cells, rng) -> Case:
    counts = np.array([len(ids) for ids in lists])
    starts = starts_of(layout, counts, num_cells).astype(np.int32)
    assert (starts + counts).max() <= num_cells
    token_ids = np.full(num_cells, len(head), np.int32)
    for start, ids in zip(starts, lists, strict=True):
        token_ids[start : start + len(ids)] = ids
    drawn = np.array([rng.choice(ids) if len(ids) and row % 7 else 3 for row, ids in enumerate(lists)], np.int32)
    temperature = rng.choice([0, 0.01, 0.7, 1, 2], len(lists))
    weights = (rng.normal(size=num_cells), rng.normal(size=len(lists)), rng.normal(size=len(lists)))
    return Case(hidden, head, lists, token_ids, starts, drawn, temperature, weights)


def f32(x) -> jax.Array:
    return jnp.asarray(np.asarray(x, np.float32))


@functools.partial(jax.jit, static_argnames="implementation")
def score_and_pull(hidden, head, indices, temperature, cotangents, implementation):
    def scores(hidden, head):
        return gathered_head(hidden, head, *indices, temperature, implementation=implementation)

    values, pullback = jax.vjp(scores, hidden, head)
    return values, pullback(cotangents)


def run(case, implementation, dtypes=(jnp.float32, jnp.float32)):
    """Scores, and gradients of their sum weighted by `case.weights`."""
    indices = [jnp.asarray(x) for x in (case.token_ids, case.starts, case.counts, case.drawn_ids)]
    arrays = [f32(x).astype(dtype) for x, dtype in zip((case.hidden, case.head), dtypes, strict=True)]
    cotangents = HeadScores(*map(f32, case.weights))
    scores, gradients = score_and_pull(*arrays, indices, f32(case.temperature), cotangents, implementation)
    return Truth(*map(np.asarray, jax.tree.leaves(scores))), tuple(map(np.asarray, gradients))


def truth(case):
    """The same in float64: scores, then gradients by their closed form."""
    kept, d_cells = np.zeros(len(case.token_ids)), np.zeros(len(case.token_ids))
    logprobs, entropy = np.full(len(case.lists), -np.inf), np.zeros(len(case.lists))
    d_hidden, d_head = np.zeros(case.hidden.shape), np.zeros(case.head.shape)
    temperature = np.where(case.temperature > 0, case.temperature, 1).astype(np.float32)
    factors = (1 / temperature).astype(np.float64)
    for row, (start, ids, factor) in enumerate(zip(case.starts, case.lists, factors, strict=True)):
        if len(ids) == 0:
            continue
        cells = slice(start, start + len(ids))
        kept[cells] = x = case.head[ids] @ case.hidden[row]
        z = (x - x.max()) * factor
        log_p = z - np.log(np.exp(z).sum())
        p = np.exp(log_p)
        entropy[row] = -(p * log_p).sum()
        is_drawn = ids == case.drawn_ids[row]
        g_kept, g_logprob, g_entropy = case.weights[0][cells], case.weights[1][row], case.weights[2][row]
        d_z = -g_entropy * p * (log_p + entropy[row])
        if is_drawn.any():
            logprobs[row] = log_p[is_drawn].sum()
            d_z += g_logprob * (is_drawn - p)
        d_cells[cells] = d_x = g_kept + factor * d_z
        d_hidden[row] = d_x @ case.head[ids]
        np.add.at(d_head, ids, d_x[:, None] * case.hidden[row])
    return Truth(kept, logprobs, entropy), (d_hidden, d_head)


def assert_is_truth(case, actual, dtypes=(jnp.float32, jnp.float32)):
    (scores, gradients), (right_scores, right_gradients) = actual, truth(case)
    for field in dataclasses.fields(Truth):
        value, right = getattr(scores, field.name), getattr(right_scores, field.name)
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, right, rtol=tolerances.LOGPROB, atol=tolerances.LOGPROB, err_msg=field.name)
    assert not scores.kept_logits[~case.is_owned].any()
    for value, right, dtype in zip(gradients, right_gradients, dtypes, strict=True):
        assert value.dtype == dtype
        rounding = tolerances.BFLOAT16_GRADIENT if dtype == jnp.bfloat16 else 0
        atol = tolerances.GRADIENT * max(1.0, np.abs(right).max())
        np.testing.assert_allclose(value.astype(np.float64), right, rtol=rounding, atol=atol)


def assert_same_bits(one, other):
    for a, b in zip((*one[0].leaves(), *one[1]), (*other[0].leaves(), *other[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_closed_form_is_finite_differences():
    case = make(num_rows=12, num_cells=500, depth=5, num_ids=40 + LONG)
    case = dataclasses.replace(case, temperature=np.resize([0.7, 2.0], 12))
    found = np.isfinite(truth(case)[0].logprobs)
    _, gradients = truth(case)

    def objective(hidden, head):
        scores, _ = truth(dataclasses.replace(case, hidden=hidden, head=head))
        values = scores.kept_logits, np.where(found, scores.logprobs, 0), scores.entropy
        return sum((weight * value).sum() for weight, value in zip(case.weights, values, strict=True))

    # The derivative along the steps; logits of cells nobody owns are 0 and stay so.
    rng = np.random.default_rng(1)
    for _ in range(5):
        steps = rng.normal(size=case.hidden.shape), rng.normal(size=case.head.shape)
        expected = sum((gradient * step).sum() for gradient, step in zip(gradients, steps, strict=True))
        ends = [objective(case.hidden + e * steps[0], case.head + e * steps[1]) for e in (1e-6, -1e-6)]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(expected, rel=1e-5)


@LAYOUTS
@pytest.mark.parametrize("depth", [1, 7, 64, D, 576])
def test_reference_is_the_truth(layout, depth):
    case = make(layout, num_cells=2000, depth=depth)
    assert_is_truth(case, run(case, "xla"))


@LAYOUTS
def test_kernel_is_the_truth(layout):
    case = make(layout, num_cells=2000)
    assert_is_truth(case, run(case, "interpret"))


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "layout"), [(1, "gaps"), (7, "csr"), (64, "padded"), (576, "csr"), (1100, "gaps")])
def test_kernel_at_other_depths(depth, layout):
    case = make(layout, num_cells=2000, depth=depth, num_ids=503)
    assert_is_truth(case, run(case, "interpret"))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_whole_vocabulary(implementation):
    case = make(num_rows=16, num_cells=700, depth=64, num_ids=151_936)
    assert_is_truth(case, run(case, implementation))


@BOTH
@pytest.mark.parametrize("dtypes", [(jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.bfloat16)], ids=["both", "head"])
def test_bfloat16_is_summed_in_float32(implementation, dtypes):
    case = make("gaps", num_cells=2000, num_ids=503)
    assert_is_truth(case, run(case, implementation, dtypes), dtypes)


@BOTH
def test_logits_that_are_rounded(implementation):
    """Inputs as they come, at temperatures that do not magnify the rounding of float32."""
    exact_case = make(num_cells=2000)
    rng = np.random.default_rng(5)
    hidden, head = (
        rng.normal(size=x.shape).astype(np.float32).astype(np.float64) / scale
        for x, scale in ((exact_case.hidden, 1), (exact_case.head, 5))
    )
    case = dataclasses.replace(exact_case, hidden=hidden, head=head, temperature=np.resize([0, 1, 2.0], N))
    assert_is_truth(case, run(case, implementation))


@BOTH
@LAYOUTS
def test_what_nobody_owns_changes_nothing(implementation, layout):
    """Ids and cotangents in cells nobody owns, and hidden states and cotangents of rows without ids."""
    case = make(layout, num_cells=2000)
    is_empty = case.counts == 0
    kept_weights, *row_weights = case.weights
    dirty = dataclasses.replace(
        case,
        hidden=np.where(is_empty[:, None], np.nan, case.hidden),
        token_ids=np.where(case.is_owned, case.token_ids, np.resize([2**31 - 1, -1, 7, U], 2000)).astype(np.int32),
        drawn_ids=np.where(is_empty, 7, case.drawn_ids).astype(np.int32),
        weights=(
            np.where(case.is_owned, kept_weights, np.nan),
            *(np.where(is_empty, np.nan, weight) for weight in row_weights),
        ),
    )
    clean, other = run(case, implementation), run(dirty, implementation)
    assert_same_bits(clean, other)
    scores, (d_hidden, d_head) = other
    assert np.isneginf(scores.logprobs[is_empty]).all()
    assert not scores.entropy[is_empty].any()
    assert not d_hidden[is_empty].any()
    assert np.isfinite(d_hidden).all()
    assert np.isfinite(d_head).all()


@BOTH
def test_head_rows_outside_the_supports(implementation):
    """Whatever they hold changes nothing, and their gradient is exactly 0."""
    case = make(num_cells=2000)
    is_kept = np.isin(np.arange(U), np.concatenate(case.lists))
    dirty = dataclasses.replace(case, head=np.where(is_kept[:, None], case.head, np.nan))
    clean, other = run(case, implementation), run(dirty, implementation)
    assert_same_bits(clean, other)
    d_head = clean[1][1]
    assert not d_head[~is_kept].any()
    assert d_head[is_kept].any(axis=1).all()


@BOTH
def test_a_drawn_id_outside_its_row_gives_no_gradient(implementation):
    case = make(num_cells=2000)
    nothing = np.zeros(2000), np.ones(N), np.zeros(N)
    scores, (d_hidden, d_head) = run(dataclasses.replace(case, weights=nothing), implementation)
    is_absent = np.array([drawn not in ids for drawn, ids in zip(case.drawn_ids, case.lists, strict=True)])
    np.testing.assert_array_equal(np.isneginf(scores.logprobs), is_absent)
    assert (is_absent & (case.counts > 1)).sum() > 2
    assert not d_hidden[is_absent].any()
    assert d_hidden[~is_absent & (case.counts > 1) & (case.temperature != 0.01)].any(axis=1).all()
    kept_elsewhere = np.concatenate([ids for ids, absent in zip(case.lists, is_absent, strict=True) if not absent])
    assert not np.delete(d_head, kept_elsewhere, axis=0).any()


@BOTH
def test_a_row_of_one_id(implementation):
    case = make(num_cells=2000)
    weights = np.zeros(2000), np.full(N, 3.0), np.full(N, -2.0)
    scores, (d_hidden, _) = run(dataclasses.replace(case, weights=weights), implementation)
    is_one = (case.counts == 1) & np.isfinite(scores.logprobs)
    assert is_one.sum() > 5
    assert not scores.logprobs[is_one].any()
    assert not scores.entropy[case.counts == 1].any()
    assert not d_hidden[case.counts == 1].any()


@BOTH
def test_an_id_in_every_row(implementation):
    """Runs that end at a cut, begin at one, pass over one and over several; the same bits again."""
    num_rows = 2 * CUT + 100
    rng = np.random.default_rng(0)
    # Sorted: id 2 in cells 0:256, id 3 in 256:868, id 5 in 868:913, id 8 in 913:1091.
    lists = [[2, 3] if row < CUT else [3, 5] if row % 8 == 0 else [3, 8] if row % 2 else [3] for row in range(num_rows)]
    lists = [np.array(ids) for ids in lists]
    assert np.bincount(np.concatenate(lists)).tolist() == [0, 0, CUT, num_rows, 0, 45, 0, 0, 178]
    case = fill("csr", lists, exact(rng, num_rows, 7), exact(rng, 9, 7) / 8, 5 * CUT, rng)
    first = run(case, implementation)
    assert_is_truth(case, first)
    assert_same_bits(first, run(case, implementation))


@pytest.mark.slow
@pytest.mark.parametrize(("programs", "short_cuts"), [(37, 2**22), (8192, 0)])
def test_more_cells_than_programs_and_long_cuts(programs, short_cuts, monkeypatch):
    """Programs that take several cells in turn, and the cut of learners with millions of cells, on a few."""
    monkeypatch.setattr(pallas_gpu, "RUN_PROGRAMS", programs)
    monkeypatch.setattr(pallas_gpu, "SHORT_CUTS", short_cuts)
    # A width of its own, so that nothing compiled before is taken.
    case = make(depth=5 + (programs == 37), num_rows=70, num_cells=4000)
    assert case.counts.sum() > 8 * 37
    assert_is_truth(case, run(case, "interpret"))


@BOTH
def test_huge_logits(implementation):
    case = make(num_cells=2000)
    case = dataclasses.replace(case, hidden=case.hidden * 1e15, head=case.head * 1e15)
    scores, gradients = run(case, implementation)
    assert np.abs(scores.kept_logits).max() > 1e30
    assert not np.isnan(scores.logprobs).any()
    for array in (scores.kept_logits, scores.entropy, *gradients):
        assert np.isfinite(array).all()


def test_empty_rows_may_start_where_another_does():
    case = make("csr", num_cells=2000)
    starts = case.starts.copy()
    # Row 9 has no ids; row 8 before it has many.
    starts[9] = starts[8]
    for implementation in ("xla", "interpret"):
        moved = dataclasses.replace(case, starts=starts)
        assert_same_bits(run(moved, implementation), run(case, implementation))


@pytest.mark.parametrize("implementation", ["auto", "xla", "interpret"])
@pytest.mark.parametrize(("num_rows", "num_cells"), [(3, 0), (0, 0), (0, 4)])
def test_nothing_to_score(implementation, num_rows, num_cells):
    index = jnp.zeros(num_rows, jnp.int32)
    cells = jnp.zeros(num_cells, jnp.int32)
    arrays = jnp.ones((num_rows, 4)), jnp.ones((5, 4))
    scores = gathered_head(*arrays, cells, index, index, index, jnp.ones(num_rows), implementation=implementation)
    assert scores.kept_logits.tolist() == [0] * num_cells
    assert scores.logprobs.tolist() == [-np.inf] * num_rows
    assert scores.entropy.tolist() == [0] * num_rows


def inputs(dtype=jnp.float32, num_rows=2) -> list:
    index = jnp.zeros(num_rows, jnp.int32)
    arrays = jnp.ones((num_rows, 4), dtype), jnp.ones((5, 4), dtype)
    return [*arrays, jnp.arange(3, dtype=jnp.int32), index, index, index, jnp.ones(num_rows)]


def test_what_the_kernel_cannot_read_is_refused():
    for implementation in ("pallas_gpu", "interpret"):
        with pytest.raises(NotImplementedError, match=r"gathered_head: .*hidden is float16, and the kernel reads"):
            gathered_head(*inputs(jnp.float16), implementation=implementation)
    assert gathered_head(*inputs(jnp.float16)).kept_logits.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"implementation must be one of auto, .*, got 'triton'"):
        gathered_head(*inputs(), implementation="triton")


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (2, 4, 1), r"hidden must have 2 axes, got shape \(2, 4, 1\)"),
        (1, (5, 3), r"head must have the 4 columns of hidden, got shape \(5, 3\)"),
        (2, (2, 3), r"token_ids must have 1 axes, got shape \(2, 3\)"),
        (3, (3,), r"starts must have shape \(2,\), one per row of hidden, got \(3,\)"),
        (4, (1,), r"counts must have shape \(2,\)"),
        (5, (2, 1), r"drawn_ids must have shape \(2,\), one per row of hidden, got \(2, 1\)"),
        (6, (), r"temperature must have shape \(2,\), one per row of hidden, got \(\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(place, shape, message, unchecked):
    arguments = inputs()
    arguments[place] = jnp.zeros(shape, arguments[place].dtype)
    with pytest.raises(ValueError, match=message):
        gathered_head(*arguments)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("depth", [1, 100, 2048])
def test_kernels_lower_for_cuda(dtype, depth, unchecked):
    """What interpretation does not see: primitives and sizes that the backend lacks."""
    of = jax.ShapeDtypeStruct
    index, row, cell = of((64,), jnp.int32), of((64,), jnp.float32), of((700,), jnp.float32)
    arrays = of((64, depth), dtype), of((U, depth), dtype)
    arguments = (*arrays, (of((700,), jnp.int32), index, index, index), row, HeadScores(cell, row, row))
    is_deprecated = jax.__version_info__ >= (0, 11)
    warns = pytest.warns(DeprecationWarning, match="Triton") if is_deprecated else contextlib.nullcontext()
    with tracing_for_gpu(), warns:
        lowered = score_and_pull.trace(*arguments, implementation="pallas_gpu").lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("__gpu$xla.gpu.triton") == 4
    for name in ("head_scores", "head_d_hidden", "head_d_head", "head_join"):
        assert f'"{name}"' in text


def test_a_machine_without_a_gpu_never_imports_pallas():
    script = (
        "import sys, jax.numpy as jnp; from jaxmask.kernels.head import gathered_head;"
        "i = jnp.zeros(2, jnp.int32); x = jnp.ones((2, 4));"
        "gathered_head(x, x, i, i, i, i, jnp.ones(2)); assert 'jax.experimental.pallas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
