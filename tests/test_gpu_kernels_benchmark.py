"""The script for a machine with a GPU runs without one, and would report what is wrong."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask import SamplingBatch, SamplingParams, Support, sample

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_kernels.py"
V = 100


def run(*options):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *map(str, options)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)


@pytest.fixture(scope="module")
def checks():
    """Scripts find each other in their own folder."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(SCRIPT.parent))
    import gpu_checks

    yield gpu_checks
    patch.undo()


@pytest.fixture(scope="module")
def script(checks):
    """`checks` has opened the folder."""
    import gpu_kernels

    return gpu_kernels


@pytest.fixture
def drawn():
    """Logits, settings and draws of eight rows; row 7 holds a nucleus that meets top_p at 20 of 40 equal tokens."""
    logits = np.random.default_rng(0).normal(size=(8, V)).astype(np.float32) * 3
    logits[7] = np.where(np.arange(V) < 40, 1.0, -np.inf)
    params = [SamplingParams(top_k=20, top_p=0.9, seed=row) for row in range(7)] + [SamplingParams(top_p=0.5, seed=7)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    return logits, batch, sample(jnp.asarray(logits), batch, step=0, width=32, return_support_logprobs=True)


def with_support(found, row, ids):
    """The draws with another support in one row; its ids are ascending."""
    cells = np.full(found.support.width, V, np.int32)
    cells[: len(ids)] = ids
    packed = np.packbits(np.isin(np.arange(8 * found.support.packed.shape[1]), ids), bitorder="little")
    support = dataclasses.replace(
        found.support,
        token_ids=found.support.token_ids.at[row].set(cells),
        counts=found.support.counts.at[row].set(len(ids)),
        packed=found.support.packed.at[row].set(packed),
    )
    return dataclasses.replace(found, support=support)


@pytest.mark.slow
def test_smoke(tmp_path):
    done = run("--smoke", "--seed", 1, "--limit", 1000, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failures"] == []
    assert [record["case"].split(",")[0] for record in found["checks"][:4]] == ["compact", "compact", "sample", "head"]
    assert all(record["problems"] == [] for record in found["checks"])
    assert found["environment"][0]["seed"] == 1
    # What was timed stands in the table, with the kernel against each rival.
    assert len(found["times"]) == 6
    for record in found["times"]:
        [row] = [line for line in done.stdout.splitlines() if line.startswith(f"| {record['case']} |")]
        assert row.count("x") >= len(record["microseconds"]) - 1 >= 2
        assert all(name in row for name in record["microseconds"] if name not in ("kernel", "plain XLA"))


def test_without_a_gpu():
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no GPU here" in done.stderr


def test_equal_draws_have_no_findings(checks, drawn):
    logits, batch, found = drawn
    findings = checks.compare_samples(found, found, logits, batch)
    assert dataclasses.astuple(findings) == ([], 8, 0)


def test_a_wrong_support_is_found(checks, drawn):
    logits, batch, found = drawn
    ids = found.support.to_lists()
    fewer = with_support(found, 2, ids[2][:-1])
    [problem] = checks.compare_samples(found, fewer, logits, batch).problems
    assert problem.startswith(f"row 2 differs: [{len(ids[2])}, {len(ids[2]) - 1}] ids kept")
    other = with_support(found, 3, sorted({*ids[3][1:], next(i for i in range(V) if i not in ids[3])}))
    assert len(checks.compare_samples(found, other, logits, batch).problems) == 1
    # Both alike, and both wrong: float64 says so.
    problems = checks.compare_samples(fewer, fewer, logits, batch).problems
    assert problems == ["row 2 of plain XLA is not what float64 says"]


def test_a_wrong_bit_and_a_wrong_token_are_found(checks, drawn):
    logits, batch, found = drawn
    packed = found.support.packed.at[1, 0].set(found.support.packed[1, 0] ^ 1)
    other = dataclasses.replace(found, support=dataclasses.replace(found.support, packed=packed))
    assert len(checks.compare_samples(found, other, logits, batch).problems) == 1
    other = dataclasses.replace(found, token_ids=found.token_ids.at[0].add(1))
    assert len(checks.compare_samples(found, other, logits, batch).problems) == 1


def test_a_row_at_the_edge_of_top_p_is_counted(checks, drawn):
    """Twenty of forty equal tokens hold exactly half of the mass; 21 may be kept, and 22 may not."""
    logits, batch, found = drawn
    assert found.support.to_lists()[7] == list(range(20))
    for count, expected in ((21, (0, 1)), (22, (1, 0))):
        findings = checks.compare_samples(found, with_support(found, 7, range(count)), logits, batch)
        assert (len(findings.problems), findings.num_edges) == expected


@pytest.mark.parametrize(("shift", "is_wrong"), [(9e-6, False), (2e-5, True), (np.nan, True), (np.inf, True)])
def test_log_probabilities(checks, drawn, shift, is_wrong):
    logits, batch, found = drawn
    # The likeliest value, near 0: the tolerance is absolute there.
    row = int(found.logprobs.argmax())
    other = dataclasses.replace(found, logprobs=found.logprobs.at[row].add(shift))
    assert bool(checks.compare_samples(found, other, logits, batch).problems) == is_wrong


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients(checks, dtype):
    logprobs, gradient = jnp.zeros(3), jnp.asarray([[4.0, 0.001], [0.0, -1.0]], dtype)

    def problems(error):
        moved = gradient.astype(jnp.float32).at[0, 1].add(error).astype(dtype)
        return checks.compare_heads((logprobs, (gradient,)), (logprobs, (moved,))).problems

    tolerance = 4 * checks.GRADIENTS[jnp.dtype(dtype).name]
    assert problems(0.9 * tolerance) == []
    assert len(problems(1.1 * tolerance)) == 1
    assert len(problems(np.nan)) == 1


def test_bits(checks):
    one = Support.from_lists([[1, 5], [2]], V, width=1)
    assert checks.different_bits(one, one) == []
    other = dataclasses.replace(one, token_ids=one.token_ids.at[0, 0].set(2))
    assert checks.different_bits(one, other) == [".token_ids differs in 1 of 2 places"]
    zero = jnp.zeros(2)
    assert checks.different_bits(zero, -zero) == [" differs in 2 of 2 places"]
    assert checks.different_bits(zero, zero.astype(jnp.int32)) != []
    assert checks.different_bits(zero * jnp.nan, zero * jnp.nan) == []


def test_a_wrong_kernel_fails_and_the_rest_goes_on(script, capsys):
    """The same path as on a GPU: compile, compare, report; one program does not even compile."""
    import gpu_timed

    logits = jnp.asarray(np.where(np.arange(V) % 3 == 0, 1.0, -np.inf)[None, :].repeat(2, axis=0).astype(np.float32))
    right = gpu_timed.compact_case(logits, 8, "xla")
    missing = dataclasses.replace(right, programs=right.programs | {gpu_timed.KERNEL: lambda x: x.nonsense})

    def shifted(x):
        return right.programs[gpu_timed.PLAIN](jnp.roll(x, 1, axis=1))

    wrong = dataclasses.replace(right, programs=right.programs | {gpu_timed.KERNEL: shifted})
    report = script.Report(None)
    cases = [missing, wrong, right]
    for case, runs in zip(cases, script.compiled(report, cases), strict=True):
        with report.going_on(case.name):
            script.verify(report, case, runs)
    assert len(report.found["checks"]) == 2
    assert [len(record["problems"]) for record in report.found["checks"]] == [2, 0]
    assert sum("has no attribute" in line for line in report.failures) == 1
    assert sum("token_ids differs" in line for line in report.failures) == 1
    assert "FAILED" in capsys.readouterr().out


def test_too_many_edges_fail(script):
    report = script.Report(None)
    report.add("checks", {"num_rows": 3000, "num_edges": 3})
    script.count_edges(report)
    assert report.failures == []
    report.add("checks", {"num_rows": 10, "num_edges": 1})
    script.count_edges(report)
    assert len(report.failures) == 1


@pytest.mark.slow
def test_rivals_compute_the_same(script):
    """A rival that did less would be no rival."""
    import gpu_timed

    rng = np.random.default_rng(0)
    case = gpu_timed.compact_case(jnp.asarray(gpu_timed.adversarial_rows(rng, 28, V)), 8, "xla")
    expected = case.programs[gpu_timed.PLAIN](*case.inputs[0])
    assert script.gpu_checks.different_bits(expected, case.programs["cumsum + scatter"](*case.inputs[0])) == []
    *_, case = gpu_timed.head_cases(gpu_timed.SMOKE, jnp.float32, "xla", rng)
    expected, found = (jax.jit(case.programs[name])(*case.inputs[0]) for name in (gpu_timed.PLAIN, "dense"))
    assert script.compare(case, expected, found).problems == []
    assert float(jnp.abs(expected[1][1]).max()) > 0


def test_sizes_of_supports(checks):
    import gpu_timed

    sizes = gpu_timed.support_sizes(2048)
    moments = sizes.mean(), np.median(sizes), (sizes == 1).mean(), np.quantile(sizes, 0.99)
    np.testing.assert_allclose(moments, (8, 2, 0.46, 82), rtol=0.02)
