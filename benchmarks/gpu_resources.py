"""What each kernel takes of a GPU, from XLA's compiler and ptxas; no card is needed, and none is timed.

python benchmarks/gpu_resources.py [--json] [--quick] [--only compact]

Prints registers, spills, shared memory and loads of each kernel on an H200, then the bytes each operation moves against
the fewest possible, and the time these bytes take. `described_gpu.py` says what it needs.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import described_gpu
import jax
import jax.numpy as jnp
from described_gpu import Kernel, Program

from jaxmask.kernels.compact import pallas_gpu as compact

# What large copies reach on an H200, of 4.8 TB/s on paper.
BYTES_PER_SECOND = 4.3e12


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation with kernels, at one shape.

    Attributes:
      name: of the operation and its shape.
      function: the operation, on arrays.
      arguments: what it takes.
      streams: the operands that a kernel must read 16 bytes at a time, by its name.
      needed: bytes that any implementation moves, by what they are: inputs read once and outputs written once.
      further: bytes that this design moves beyond these.
      is_quick: compiled with --quick too.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    streams: Mapping[str, tuple[int, ...]]
    needed: Mapping[str, int]
    further: Mapping[str, int]
    is_quick: bool = True

    @property
    def fewest_bytes(self) -> int:
        """What any implementation moves."""
        return sum(self.needed.values())

    @property
    def design_bytes(self) -> int:
        """What this one moves."""
        return self.fewest_bytes + sum(self.further.values())


def compact_case(dtype: Any, R: int = 256, V: int = 151_936, W: int = 1024) -> Case:
    """Compaction with packed bits; the bits are written by one kernel and read by the next."""
    words, sizes = 4 * R * -(-V // 32), 4 * R * compact.num_chunks(V)
    return Case(
        name=f"compact, [{R}, {V:,}] {jnp.dtype(dtype).name}, W = {W}",
        function=lambda logits: compact.compact_support(logits, W, has_bits=True),
        arguments=(jax.ShapeDtypeStruct((R, V), dtype),),
        streams={"compact_pack": (0,)},
        needed={
            "logits": R * V * jnp.dtype(dtype).itemsize,
            "ids": 4 * R * W,
            "counts": 4 * R,
            "packed bits": R * -(-V // 8),
        },
        further={"bits read back": words, "sizes of chunks, written and read": 2 * sizes},
    )


CASES = (compact_case(jnp.float32), compact_case(jnp.bfloat16))


def main() -> int:
    """Compiles the cases and prints what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--quick", action="store_true", help="leave out cases that say little new")
    parser.add_argument("--only", default="", help="cases whose name starts like this")
    options = parser.parse_args()
    cases = [case for case in CASES if case.name.startswith(options.only) and (case.is_quick or not options.quick)]
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
            **{key: value for key, value in dataclasses.asdict(program).items() if key != "hlo"},
        }
        for case, program in compiled
    ]
    return json.dumps({"jax": jax.__version__, "gpu": described_gpu.NAME, "cases": cases}, indent=1)


def as_markdown(compiled: list[tuple[Case, Program]]) -> str:
    """Two tables, kernels and traffic, and what the traffic consists of."""
    kernels = [
        "| kernel | of | threads | registers | spills | shared memory | loads of 16 bytes / narrower |",
        "|---|---|---|---|---|---|---|",
    ]
    traffic = [
        "| operation | other kernels | fewest bytes | by design | ratio | time at 4.3 TB/s |",
        "|---|---|---|---|---|---|",
    ]
    parts = []
    for case, program in compiled:
        kernels += [_kernel_row(case, kernel) for kernel in program.kernels]
        microseconds = 1e6 * case.design_bytes / BYTES_PER_SECOND
        traffic.append(
            f"| {case.name} | {program.num_other_kernels} | {_mega(case.fewest_bytes)} | {_mega(case.design_bytes)} | "
            f"{case.design_bytes / case.fewest_bytes:.3f} | {microseconds:.1f} us |"
        )
        needed, further = (
            ", ".join(f"{what} {_mega(size)}" for what, size in sizes.items()) for sizes in (case.needed, case.further)
        )
        parts.append(f"- {case.name}: {needed}" + (f"; beyond these {further}." if further else "."))
    return "\n".join([*kernels, "", *traffic, "", *parts])


def _kernel_row(case: Case, kernel: Kernel) -> str:
    streams = case.streams.get(described_gpu.base_name(kernel.name), ())
    loads = f"{kernel.count_loads(streams, True)} / {kernel.count_loads(streams, False)}" if streams else "-"
    spills = kernel.spill_stores + kernel.spill_loads
    cells = (
        kernel.name,
        case.name,
        kernel.threads,
        kernel.registers,
        f"{spills} B",
        f"{kernel.shared_memory} B",
        loads,
    )
    return f"| {' | '.join(map(str, cells))} |"


def _mega(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


if __name__ == "__main__":
    described_gpu.run(main)
