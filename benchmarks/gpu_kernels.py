"""The kernels on a real GPU: are they right there, and how fast are they against what others do.

python benchmarks/gpu_kernels.py [--json FILE] [--seed N] [--limit SECONDS] [--smoke]

Takes about four minutes on one card. Everything is printed as it is found, and a table to keep comes last. The status
is 1 if anything was wrong, and 2 without a GPU; `--smoke` interprets the kernels at tiny sizes, on any machine.

A time is that of one call in a burst of up to 20, which go round copies of the input. Short calls are bound by what it
takes to launch a program, which is measured, too.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# The checkout may be all there is.
sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_checks
import gpu_rivals
import gpu_timed
import jax
import jax.numpy as jnp
import numpy as np
import rivals
from gpu_checks import Findings
from gpu_timed import KERNEL, PLAIN, Case, Sizes
from timing import in_turn

from jaxmask import Support

# Calls of a burst; fewer of what takes longer than this in all.
BURST, BURST_SECONDS = 20, 0.1
# Of one check, in print.
MOST_PROBLEMS = 5


@dataclasses.dataclass
class Report:
    """What was found, printed at once and kept in a file, so that a run cut short leaves what it has.

    Attributes:
      path: the JSON file; None for none.
      found: everything, by section.
      failures: one line each.
    """

    path: Path | None
    found: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def say(self, line: str) -> None:
        print(f"{self.seconds():6.1f} s  {line}", flush=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def add(self, section: str, record: Any) -> None:
        self.found.setdefault(section, []).append(record)
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.found | {"failures": self.failures}, indent=1))

    def fail(self, line: str) -> None:
        self.failures.append(line)
        self.say(f"FAILED: {line}")
        self._write()

    @contextlib.contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Whatever goes wrong is a failure, and the rest still runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{what}: {type(error).__name__}: {str(error)[:300]}")


def compare(case: Case, expected: Any, found: Any) -> Findings:
    """Results of plain XLA and of the kernels on the first input."""
    if case.is_head:
        return gpu_checks.compare_heads(expected, found)
    if isinstance(expected, Support):
        return Findings(gpu_checks.different_bits(expected, found))
    return gpu_checks.compare_samples(expected, found, *case.inputs[0])


def compiled(report: Report, cases: Sequence[Case]) -> list[dict[str, Callable[..., Any]]]:
    """The programs of each case, compiled side by side; what does not compile is a failure."""

    def build(program: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
        return jax.jit(program).lower(*arguments).compile()

    begun = report.seconds()
    runs: list[dict[str, Callable[..., Any]]] = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = [
            {name: pool.submit(build, program, case.inputs[0]) for name, program in case.programs.items()}
            for case in cases
        ]
        for case, futures in zip(cases, pending, strict=True):
            runs.append({})
            for name, future in futures.items():
                with report.going_on(f"compiling {case.name}, {name}"):
                    runs[-1][name] = future.result()
    report.say(f"compiled {sum(len(run) for run in runs)} programs in {report.seconds() - begun:.1f} s")
    return runs


def verify(report: Report, case: Case, runs: dict[str, Callable[..., Any]]) -> None:
    """Compares the kernel with plain XLA, and with itself."""
    expected, found = (runs[name](*case.inputs[0]) for name in (PLAIN, KERNEL))
    findings = compare(case, expected, found)
    again = gpu_checks.different_bits(found, runs[KERNEL](*case.inputs[0]))
    findings.problems += [f"not deterministic: {problem}" for problem in again]
    edges = f", {findings.num_edges} of {findings.num_rows} rows at the edge of top-p" if findings.num_edges else ""
    report.say(f"{'WRONG' if findings.problems else 'right'}: {case.name}{edges}")
    for problem in findings.problems[:MOST_PROBLEMS]:
        report.fail(f"{case.name}: {problem}")
    if len(findings.problems) > MOST_PROBLEMS:
        report.fail(f"{case.name}: {len(findings.problems)} problems in all")
    report.add("checks", {"case": case.name} | dataclasses.asdict(findings))


def check(report: Report, sizes: Sizes, kernel: str, rng: np.random.Generator) -> None:
    """Every operation on fresh random inputs."""
    cases = gpu_timed.checked_cases(sizes, kernel, rng)
    for case, runs in zip(cases, compiled(report, cases), strict=True):
        with report.going_on(case.name):
            verify(report, case, runs)


def count_edges(report: Report) -> None:
    """Rows that may differ must be few: one, or one in a thousand."""
    checks = report.found.get("checks", [])
    num_edges, num_rows = (sum(record[key] for record in checks) for key in ("num_edges", "num_rows"))
    line = f"{num_edges} of {num_rows} rows differ where a nucleus meets top_p to within {gpu_checks.EDGE}"
    if num_edges > max(1, gpu_checks.MOST_EDGES * num_rows):
        report.fail(f"{line}: more than rounding explains")
    else:
        report.say(line)


def bursts(runs: dict[str, Callable[..., Any]], case: Case, rounds: int) -> dict[str, float]:
    """Microseconds of a call, in bursts that take turns."""
    counts, burst = {}, {}
    for name, run in runs.items():
        jax.block_until_ready(_wait(run(*case.inputs[0])))
        begun = time.perf_counter()
        jax.block_until_ready(_wait(run(*case.inputs[-1])))
        counts[name] = count = max(1, min(BURST, int(BURST_SECONDS / (time.perf_counter() - begun))))
        arguments = itertools.cycle(case.inputs)

        def call_often(run: Callable[..., Any] = run, count: int = count, arguments: Any = arguments) -> Any:
            for _ in range(count):
                # Only the last is kept: a gradient of the head takes a gigabyte.
                result = run(*next(arguments))
            return _wait(result)

        burst[name] = call_often
    times = in_turn(burst, rounds)
    return {name: 1e3 * milliseconds / counts[name] for name, milliseconds in times.items()}


def _wait(result: Any) -> Any:
    """JAX arrays are waited for by who gets them; torch waits for its whole queue."""
    if rivals.torch is not None and isinstance(result, rivals.torch.Tensor) and result.is_cuda:
        rivals.torch.cuda.synchronize()
        return None
    return result


def measure(report: Report, case: Case, runs: dict[str, Callable[..., Any]], sizes: Sizes, bandwidth: float) -> None:
    """Times a case, and adds it to the table."""
    working = {}
    for name, run in (runs | dict(case.others)).items():
        with report.going_on(f"{case.name}, {name}"):
            jax.block_until_ready(_wait(run(*case.inputs[0])))
            working[name] = run
    times = bursts(working, case, sizes.rounds)
    alone = statistics.median(_alone(working[KERNEL], case.inputs[0]) for _ in range(9)) if KERNEL in working else None
    share = case.fewest_bytes / (1e-6 * times[KERNEL]) / bandwidth if KERNEL in times else None
    report.add("times", {"case": case.name, "microseconds": times, "alone": alone, "share": share})
    report.say(f"{case.name}: " + ", ".join(f"{name} {us:,.0f} us" for name, us in times.items()))


def _alone(run: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return 1e6 * (time.perf_counter() - begun)


def yardsticks(report: Report, sizes: Sizes) -> float:
    """Bytes per second of a large copy, read and written; and the time of the smallest program."""
    large, small = jnp.ones(sizes.copied), jnp.ones(8)
    run = jax.jit(lambda x: 2 * x)
    times: dict[str, float] = {}
    for name, array in (("copy", large), ("launch", small)):
        times |= bursts({name: run}, Case(name, {}, [(array,)]), sizes.rounds)
    bandwidth = 2 * large.nbytes / (1e-6 * times["copy"])
    report.say(f"copy: {bandwidth / 1e9:,.0f} GB/s, read and written; the smallest program: {times['launch']:.1f} us")
    report.add("yardsticks", {"bytes_per_second": bandwidth, "launch_microseconds": times["launch"]})
    return bandwidth


def time_all(report: Report, sizes: Sizes, kernel: str, rng: np.random.Generator, limit: float) -> None:
    """Every case, section by section, until the time is up."""
    bandwidth = yardsticks(report, sizes)
    for section, make in gpu_timed.timed_sections(sizes, kernel, rng).items():
        with report.going_on(section):
            if report.seconds() > limit:
                report.say(f"left out, for lack of time: {section}")
                continue
            cases = make()
            for case, runs in zip(cases, compiled(report, cases), strict=True):
                if report.seconds() > limit:
                    report.say(f"left out, for lack of time: {case.name}")
                    continue
                with report.going_on(case.name):
                    verify(report, case, runs)
                with report.going_on(case.name):
                    measure(report, case, runs, sizes, bandwidth)


def environment(report: Report, seed: int) -> None:
    """Where this runs, and which rivals are there."""
    device = jax.devices()[0]
    modules = ("torch", "triton", "vllm.v1.sample.ops.topk_topp_triton", "flashinfer.sampling")
    found = {name: gpu_rivals.imported(name) for name in modules}
    versions = {
        name.split(".")[0]: "not installed" if found[name] is None else _version(name.split(".")[0]) for name in modules
    }
    report.say(f"{device.device_kind} ({device.platform}), jax {jax.__version__}, seed {seed}")
    report.say(", ".join(f"{name}: {version}" for name, version in versions.items()))
    report.add("environment", {"device": device.device_kind, "jax": jax.__version__, "seed": seed} | versions)


def _version(package: str) -> str:
    return str(getattr(sys.modules[package], "__version__", "unknown"))


def table(report: Report) -> str:
    """The times as Markdown: the kernels', and how many times as long the others take."""
    lines = [
        "| operation | kernel, us | alone, us | bandwidth / copy's | plain XLA / kernel | others / kernel |",
        "|---|---|---|---|---|---|",
    ]
    for record in report.found.get("times", []):
        times = record["microseconds"]
        kernel = times.get(KERNEL)
        if kernel is None:
            lines.append(f"| {record['case']} | failed | | | | |")
            continue
        ratios = {name: f"{time / kernel:.3g}x" for name, time in times.items() if name != KERNEL}
        plain = ratios.pop(PLAIN, "failed")
        others = ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())
        cells = (record["case"], f"{kernel:,.0f}", f"{record['alone']:,.0f}", f"{record['share']:.2f}", plain, others)
        lines.append(f"| {' | '.join(cells)} |")
    (place,), (yardstick,) = report.found["environment"], report.found["yardsticks"]
    absent = [name for name, version in place.items() if version == "not installed"]
    lines += [
        "",
        f"{place['device']}, jax {place['jax']}; a copy moves {yardstick['bytes_per_second'] / 1e9:,.0f} GB/s, the "
        f"smallest program takes {yardstick['launch_microseconds']:.1f} us. Rival samplers return no supports. "
        + (f"Not installed: {', '.join(absent)}." if absent else ""),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; without a GPU, kernels are interpreted")
    parser.add_argument("--json", type=Path, help="file for everything that is found")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of the random inputs")
    parser.add_argument("--limit", type=float, default=210, help="seconds after which no further case is timed")
    options = parser.parse_args()
    has_gpu = jax.default_backend() == "gpu"
    if not has_gpu and not options.smoke:
        print("no GPU here: this script measures the kernels on one (--smoke interprets them)", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", DeprecationWarning)
    if not has_gpu:
        # Nothing is measured: what is interpreted takes seconds to compile.
        jax.config.update("jax_disable_most_optimizations", True)
    sizes, kernel = gpu_timed.SMOKE if options.smoke else gpu_timed.FULL, "pallas_gpu" if has_gpu else "interpret"
    report, rng = Report(options.json), np.random.default_rng(options.seed)
    environment(report, options.seed)
    with report.going_on("checks"):
        check(report, sizes, kernel, rng)
    with report.going_on("times"):
        time_all(report, sizes, kernel, rng, options.limit)
    count_edges(report)
    with report.going_on("table"):
        print("\n" + table(report) + "\n", flush=True)
    for line in report.failures:
        print(f"FAILED: {line}")
    print(f"{len(report.failures)} failures, {report.seconds():.0f} s", flush=True)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
