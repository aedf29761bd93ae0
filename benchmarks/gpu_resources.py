"""What each kernel takes of a GPU, from XLA's compiler and ptxas; no card is needed, and none is timed.

python benchmarks/gpu_resources.py [--json] [--quick [--also iteration]] [--only compact]

Prints registers, spills, shared memory and loads of each kernel on an H200, then the bytes each operation moves against
the fewest possible, and the time these bytes take; then what whole programs consist of. `gpu_cases.py` has the cases,
`described_gpu.py` says what it needs.
"""

import argparse
import dataclasses
import json

import described_gpu
import jax
from described_gpu import Kernel, Program
from gpu_cases import Case, all_cases

# What large copies reach on an H200, of 4.8 TB/s on paper.
BYTES_PER_SECOND = 4.3e12


def main() -> int:
    """Compiles the cases and prints what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--quick", action="store_true", help="leave out cases that say little new")
    parser.add_argument("--also", help="with --quick, cases whose name holds this are not left out")
    parser.add_argument("--only", default="", help="cases whose name starts like this")
    options = parser.parse_args()
    cases = [case for case in all_cases() if case.name.startswith(options.only)]
    if options.quick:
        cases = [case for case in cases if case.is_quick or (options.also and options.also in case.name)]
    compiled = [(case, described_gpu.compile_for_gpu(case.function, *case.arguments)) for case in cases]
    print(as_json(compiled) if options.json else as_markdown(compiled))
    return 0


def as_json(compiled: list[tuple[Case, Program]]) -> str:
    """Versions, and what is known of each case."""
    cases = [
        {
            "name": case.name,
            "streams": case.streams,
            "fewest_bytes": case.fewest_bytes,
            "design_bytes": case.design_bytes,
            "most_temporary_bytes": case.most_temporary_bytes,
            **{key: value for key, value in dataclasses.asdict(program).items() if key != "hlo"},
        }
        for case, program in compiled
    ]
    return json.dumps({"jax": jax.__version__, "gpu": described_gpu.NAME, "cases": cases}, indent=1)


def as_markdown(compiled: list[tuple[Case, Program]]) -> str:
    """Tables of kernels and traffic, what the traffic consists of, and a table of whole programs."""
    operations = [(case, program) for case, program in compiled if case.needed]
    programs = [(case, program) for case, program in compiled if not case.needed]
    tables = [
        _table(
            "kernel, of, threads, registers, spills, shared memory, loads of 16 bytes / narrower",
            _different([_kernel_row(case, kernel) for case, program in operations for kernel in program.kernels]),
        ),
        _table(
            "operation, other kernels, fewest bytes, by design, ratio, time at 4.3 TB/s",
            [_traffic_row(case, program) for case, program in operations],
        ),
        "\n".join(_parts(case) for case, _ in operations),
        _table(
            "program, kernels, other kernels, host transfers, decisions of the host",
            [_program_row(case, program) for case, program in programs],
        ),
    ]
    return "\n\n".join(tables)


def _table(heads: str, rows: list[tuple[object, ...]]) -> str:
    lines = [heads.split(", "), ["---"] * len(heads.split(", ")), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _different(rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Rows that differ from all before in more than the operation: most kernels do not depend on it."""
    first = {(row[0], *row[2:]): row for row in reversed(rows)}
    return [row for row in rows if first[row[0], *row[2:]] is row]


def _traffic_row(case: Case, program: Program) -> tuple[object, ...]:
    ratio, microseconds = case.design_bytes / case.fewest_bytes, 1e6 * case.design_bytes / BYTES_PER_SECOND
    sizes = (_mega(case.fewest_bytes), _mega(case.design_bytes))
    return case.name, program.num_other_kernels, *sizes, f"{ratio:.3f}", f"{microseconds:.1f} us"


def _parts(case: Case) -> str:
    needed, further = (
        ", ".join(f"{what} {_mega(size)}" for what, size in sizes.items()) for sizes in (case.needed, case.further)
    )
    return f"- {case.name}: {needed}" + (f"; beyond these {further}." if further else ".")


def _program_row(case: Case, program: Program) -> tuple[object, ...]:
    names = ", ".join(kernel.name for kernel in program.kernels)
    return case.name, names, program.num_other_kernels, len(program.host_transfers), program.num_host_decisions


def _kernel_row(case: Case, kernel: Kernel) -> tuple[object, ...]:
    streams = case.streams.get(described_gpu.base_name(kernel.name), ())
    loads = f"{kernel.count_loads(streams, True)} / {kernel.count_loads(streams, False)}" if streams else "-"
    spills, memory = kernel.spill_stores + kernel.spill_loads, kernel.shared_memory
    return kernel.name, case.name, kernel.threads, kernel.registers, f"{spills} B", f"{memory} B", loads


def _mega(size: int) -> str:
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


if __name__ == "__main__":
    described_gpu.run(main)
