"""Programs compiled for an H200 that is only described: XLA's own GPU compiler, ptxas, and what they say of a kernel.

It needs a folder with the CUDA plugin of the installed jaxlib and ptxas (`tests/gpu_compilers.sh` makes one): not the
environment itself, where the plugin looks for a card and fails at every start of JAX. XLA reads its flags and plugins
as JAX starts, so a script runs once more as a child that has them:

    if __name__ == "__main__":
        described_gpu.run(main)

Nothing runs here and nothing is timed: what this cannot see is a wrong result, a race, or the speed of a card.
"""

import collections
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

FOLDER = "JAXMASK_GPU_COMPILER"
# The status of a script that `run` could not give a compiler.
NO_COMPILER = 77
_DUMPS = "JAXMASK_GPU_DUMPS"
TRITON_CALL = "__gpu$xla.gpu.triton"
_PTXAS = "nvidia/cu*/bin/ptxas"
_HAS_ABSTRACT_DEVICES = jax.__version_info__ >= (0, 11)

NAME = "NVIDIA H200"
_CORES = 132
# A GpuTargetConfigProto.
_TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {_CORES}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{NAME}"
"""


@dataclasses.dataclass(frozen=True)
class Loads:
    """Instructions of a thread that read global memory.

    Attributes:
      operand: the argument of the kernel they read, operands before outputs; None where it could not be followed.
      width: bytes one instruction reads, up to 16.
      count: how many there are in the text, however often they run.
    """

    operand: int | None
    width: int
    count: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Triton kernel as ptxas compiled it.

    Attributes:
      name: its own; one that a program has twice ends with "__1" the second time.
      grid: programs along each axis.
      threads: threads of a program.
      registers: of each thread.
      spill_stores, spill_loads: bytes of registers that went to memory.
      shared_memory: bytes of a program.
      loads: of global memory.
    """

    name: str
    grid: tuple[int, ...]
    threads: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    loads: tuple[Loads, ...]

    def count_loads(self, operands: tuple[int, ...], is_wide: bool) -> int:
        """Loads of these operands with 16 bytes, or with fewer."""
        return sum(loads.count for loads in self.loads if loads.operand in operands and (loads.width == 16) == is_wide)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program compiled for the GPU.

    Attributes:
      hlo: the text of the optimized program.
      argument_bytes, output_bytes, temporary_bytes: from XLA's buffer assignment.
      kernels: its Triton kernels, in the order they are launched.
      num_other_kernels: the others (fusions, XLA's own top-k and sorts); one in the body of a loop counts once.
      host_transfers: see `host_transfers`.
      num_host_decisions: see `count_host_decisions`.
    """

    hlo: str
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    kernels: tuple[Kernel, ...]
    num_other_kernels: int
    host_transfers: tuple[str, ...]
    num_host_decisions: int


def compiler_folder() -> Path:
    """The folder with plugin and ptxas: $JAXMASK_GPU_COMPILER, or gpu-compiler within the environment."""
    return Path(os.environ.get(FOLDER, Path(sys.prefix) / "gpu-compiler"))


def missing(folder: Path, jaxlib: str) -> str | None:
    """What a folder lacks to compile for this version of jaxlib; None where it can."""
    found = {item.name: item.version for item in importlib.metadata.distributions(path=[str(folder)])}
    plugin = found.get("jax-cuda13-plugin")
    if plugin != jaxlib or found.get("jax-cuda13-pjrt") != jaxlib:
        return f"{folder} should have jax-cuda13-plugin and jax-cuda13-pjrt {jaxlib}, and has {plugin or 'none'}"
    return None if any(folder.glob(_PTXAS)) else f"{folder} has no {_PTXAS}"


def run(main: Callable[[], int]) -> None:
    """Ends the process with the status of `main`, run in a child that has compiler and flags; or with NO_COMPILER."""
    if _DUMPS in os.environ:
        sys.exit(main())
    folder = compiler_folder()
    lacks = missing(folder, importlib.metadata.version("jaxlib"))
    if lacks is None and importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        lacks = f"JAX {jax.__version__} has no Triton backend of Pallas"
    if lacks is not None:
        print(lacks, file=sys.stderr)
        sys.exit(NO_COMPILER)
    with tempfile.TemporaryDirectory() as dumps:
        child = subprocess.run([sys.executable, *sys.orig_argv[1:]], env=os.environ | _environment(folder, dumps))
    sys.exit(child.returncode)


def _environment(folder: Path, dumps: str) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_fail_ptx_compilation_on_register_spilling"]
    flags.append(f"--xla_dump_to={dumps}")
    if _HAS_ABSTRACT_DEVICES:
        # PTX alone: with the listings of Triton's passes, a kernel takes 4 s instead of 0.5.
        flags.append("--xla_dump_emitter_re=ptx")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {
        FOLDER: str(folder),
        _DUMPS: dumps,
        # On any other platform JAX asks for a card before it looks at a description.
        "JAX_PLATFORMS": "cpu",
        # A program from the cache has no PTX.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": " ".join(filter(None, flags)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def tracing_for_gpu() -> contextlib.AbstractContextManager[Any]:
    """A context to trace and lower in: JAX >= 0.11 asks for the device, which 0.10 has no word for."""
    if not _HAS_ABSTRACT_DEVICES:
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind=NAME, num_cores=_CORES, platform="cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def lower_for_gpu(function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> Any:
    """The lowered program; this much needs no plugin."""
    with tracing_for_gpu():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def compile_for_gpu(function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> Program:
    """The program for the described GPU; only in a child of `run`.

    Raises:
      jax.errors.JaxRuntimeError: Triton cannot compile a kernel, or a kernel spills registers.
    """
    dumps = Path(os.environ[_DUMPS])
    topology = topologies.get_topology_desc(platform="cuda", target_config=_TARGET, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("device",)), PartitionSpec())
    specs = [jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding) for spec in arguments]
    # Of the program before; what ran on the CPU in between has left folders, too.
    shutil.rmtree(dumps)
    dumps.mkdir()
    compiled = lower_for_gpu(function, *specs).compile()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    launches = [launch for dump in sorted(dumps.glob("*.thunk_sequence.txt")) for launch in read_launches(dump)]
    if not launches:
        raise RuntimeError("XLA launches nothing, or has written no list of what it launches.")
    entries = {name: ptx for ptx in dumps.glob("*.ptx") for name in re.findall(r"\.entry (\w+)\(", ptx.read_text())}
    calls = triton_calls(hlo)
    is_triton = [base_name(name) in calls for name, *_ in launches]
    if sum(is_triton) != len(calls):
        raise RuntimeError(f"the program calls {calls}, and XLA launches {[name for name, *_ in launches]}.")
    return Program(
        hlo,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        tuple(_kernel(*launch, entries[launch[0]]) for launch, yes in zip(launches, is_triton, strict=True) if yes),
        is_triton.count(False),
        tuple(host_transfers(hlo)),
        count_host_decisions(hlo),
    )


def base_name(name: str) -> str:
    """The name a kernel was given, of one that XLA may have numbered."""
    return re.sub(r"__\d+$", "", name)


def read_launches(dump: Path) -> list[tuple[str, tuple[int, ...], int, int]]:
    """Name, grid, threads and bytes of shared memory of every kernel in XLA's list of thunks."""
    pattern = r"kCustomKernel .*\] (\w+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\] +shared_memory: (\d+)"
    launches = []
    for name, grid, block, shared in re.findall(pattern, dump.read_text()):
        x, y, z = map(int, block.split(","))
        launches.append((name, tuple(map(int, grid.split(","))), x * y * z, int(shared)))
    return launches


def _kernel(name: str, grid: tuple[int, ...], threads: int, shared_memory: int, ptx: Path) -> Kernel:
    ptxas = next(Path(os.environ[FOLDER]).glob(_PTXAS))
    text = ptx.read_text()
    [target] = re.findall(r"^\.target (\w+)", text, re.MULTILINE)
    command = [str(ptxas), f"-arch={target}", "-v", str(ptx), "-o", os.devnull]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    [(spill_stores, spill_loads)] = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    [registers] = re.findall(r"Used (\d+) registers", report)
    # What Triton asks for stands in the launch; what the PTX declares itself, in the report.
    declared = sum(map(int, re.findall(r"(\d+) bytes smem", report)))
    return Kernel(
        name,
        grid,
        threads,
        int(registers),
        int(spill_stores),
        int(spill_loads),
        shared_memory + declared,
        read_loads(text),
    )


_PARAMETER = re.compile(r"ld\.param[.:\w]*\s+(%rd\d+), \[\w+_param_(\d+)\]")
_MEMORY = re.compile(r"\b(?:ld|st|atom|red|cp)\.")
# An address that names no other memory is taken for global.
_LOAD = re.compile(r"\bld\.(?![.:\w]*(?:param|shared|local|const))[.:\w]*?(?:\.v(\d))?\.?[bsuf](\d+)\s.*\[\s*(%rd\d+)")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[.:\w]*\s*\[.*?\]\s*,\s*\[\s*(%rd\d+).*?\]\s*,\s*(\w+)")


def read_loads(ptx: str) -> tuple[Loads, ...]:
    """The global loads in the PTX of one kernel, by argument and width.

    An address is a sum of an argument and offsets, so its argument is found by following 64-bit registers back.
    """
    statements = [statement.strip() for statement in re.split(r"[;\n]", ptx)]
    origin: dict[str, int] = {}
    # A pointer that a loop carries is used above its definition, so once is not enough.
    for _ in range(3):
        for statement in statements:
            if parameter := _PARAMETER.search(statement):
                origin[parameter[1]] = int(parameter[2])
            elif not _MEMORY.search(statement):
                target, *sources = re.findall(r"%rd\d+", statement) or [""]
                for source in sources:
                    if source in origin:
                        origin[target] = origin[source]
    counts: collections.Counter[tuple[int | None, int]] = collections.Counter()
    for statement in statements:
        if load := _LOAD.search(statement):
            counts[origin.get(load[3]), int(load[1] or 1) * int(load[2]) // 8] += 1
        elif copy := _COPY.search(statement):
            counts[origin.get(copy[1]), int(copy[2], 0)] += 1
    return tuple(Loads(*where, count) for where, count in sorted(counts.items(), key=str))


_HOST_OPCODES = {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}
_HOST_TARGETS = re.compile("callback|ToHost|FromHost|HostExecute|annotate_device_placement", re.IGNORECASE)
# f32[8]{0:S(5)} and f32[8,128]{1,0:T(8,128)S(5)}.
_HOST_MEMORY = re.compile(r":(?:\w\([^)]*\))*S\(5\)")


def host_transfers(hlo: str) -> list[str]:
    """What in the text of a program moves data between device and host, or asks the host; one line each.

    Arguments and results are not meant, unless they lie in the host's memory (space 5).
    """
    found = []
    for line in hlo.splitlines():
        # What stands behind, names and the bytes of kernels, may hold any word.
        instruction = re.split(", (?:metadata|backend_config)=", line.strip())[0]
        opcode = re.search(r" = .*?[ )\]}]([a-z][a-z0-9-]*)\(", instruction)
        target = re.search(r'custom_call_target="([^"]*)"', instruction)
        if (
            (opcode and opcode[1] in _HOST_OPCODES)
            or (target and _HOST_TARGETS.search(target[1]))
            or _HOST_MEMORY.search(instruction)
            or '_xla_compute_type="host"' in instruction
        ):
            found.append(instruction[:200])
    return found


def count_host_decisions(hlo: str) -> int:
    """Loops of unknown length and conditionals: the host waits for the value that decides each of them."""
    lines = [line for line in hlo.splitlines() if re.search(r" (?:while|conditional)\(%", line)]
    return sum("known_trip_count" not in line for line in lines)


def triton_calls(program: str) -> list[str]:
    """The name of the kernel of each Triton call in a program, lowered (StableHLO) or compiled (HLO)."""
    calls = [line for line in program.splitlines() if TRITON_CALL in line]
    return [name for call in calls for name in re.findall(r'name = "(\w+)", num_', call)]
