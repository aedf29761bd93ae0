"""Every kernel compiles for an H200 that is only described: by the installed JAX, and by the newest.

`tests/gpu_compilers.sh` fetches the compilers; without them these tests are skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import described_gpu
from benchmarks.described_gpu import Loads

ROOT = Path(__file__).parents[1]
NEWEST = Path(os.environ.get("JAXMASK_NEWEST_PYTHON", Path(sys.prefix) / "newest" / "bin" / "python"))
NEWEST_COMPILER = os.environ.get("JAXMASK_NEWEST_GPU_COMPILER", NEWEST.parents[1] / "gpu-compiler")
LANES = {
    "installed": (Path(sys.executable), described_gpu.compiler_folder()),
    "newest": (NEWEST, NEWEST_COMPILER),
}


def run_in(lane, *command):
    """What a script printed that runs under a lane's Python and GPU compiler."""
    python, compiler = LANES[lane]
    if not python.exists():
        pytest.skip(f"no Python with the newest JAX at {python}")
    environment = os.environ | {described_gpu.FOLDER: str(compiler), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode == described_gpu.NO_COMPILER:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def faults(case):
    """What is wrong with a compiled case."""
    wrong = [f"asks the host: {line}" for line in case["host_transfers"]]
    if not case["kernels"]:
        wrong.append("calls no kernel")
    if case["design_bytes"] < case["fewest_bytes"]:
        wrong.append("moves fewer bytes than the fewest")
    if case["fewest_bytes"] > case["argument_bytes"] + case["output_bytes"]:
        wrong.append("needs more bytes than it takes and gives")
    if case["most_temporary_bytes"] is not None and case["temporary_bytes"] > case["most_temporary_bytes"]:
        wrong.append(f"has {case['temporary_bytes']} bytes of temporaries")
    missing = set(case["streams"]) - {described_gpu.base_name(kernel["name"]) for kernel in case["kernels"]}
    wrong += [f"does not call {name}" for name in sorted(missing)]
    for kernel in case["kernels"]:
        name, loads = kernel["name"], kernel["loads"]
        if kernel["spill_stores"] or kernel["spill_loads"]:
            wrong.append(f"{name} spills")
        if any(load["operand"] is None for load in loads):
            wrong.append(f"{name} reads what cannot be followed to an argument")
        for operand in case["streams"].get(described_gpu.base_name(name), ()):
            widths = {load["width"] for load in loads if load["operand"] == operand}
            if widths != {16}:
                wrong.append(f"{name} reads argument {operand} by {sorted(widths)} bytes")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("lane", LANES)
def test_every_kernel_compiles(lane):
    """No spills, no host, and logits read 16 bytes at a time."""
    # The iteration says little new, and is left to one lane.
    options = ["--json", "--quick", *(["--also", "iteration"] if lane == "installed" else [])]
    report = json.loads(run_in(lane, "benchmarks/gpu_resources.py", *options))
    names = [case["name"] for case in report["cases"]]
    assert len(names) == 7 + (lane == "installed")
    assert any("of padding" in name for name in names)
    assert {case["name"]: found for case in report["cases"] if (found := faults(case))} == {}
    if lane == "installed":
        assert report["jax"] == jax.__version__


BROKEN = """
import jax, jax.numpy as jnp
from benchmarks import described_gpu
from jaxmask.kernels import triton

def call(kernel, out_size, x):
    shape = jax.ShapeDtypeStruct((out_size,), x.dtype)
    return triton.call(kernel, [shape], x, name="broken", grid=(1,), num_warps=1, is_interpreted=False)[0]

def popcount(x_ref, out_ref):
    cells = jnp.arange(128, dtype=jnp.int32)
    bits = jax.lax.population_count(triton.load(x_ref.at[cells]))
    triton.store(out_ref.at[cells], bits)

def hungry(x_ref, out_ref):
    cells = jnp.arange(1024, dtype=jnp.int32)
    parts = [triton.load(x_ref.at[cells + 1024 * part]) for part in range(10)]
    total = sum(part.sum() for part in parts)
    for index, part in enumerate(parts):
        triton.store(out_ref.at[cells + 1024 * index], part * total)

def message(function, size, dtype):
    try:
        described_gpu.compile_for_gpu(function, jax.ShapeDtypeStruct((size,), dtype))
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return "compiled"

def main():
    print(message(lambda x: call(popcount, 128, x), 128, jnp.uint32))
    print(message(lambda x: call(hungry, 10240, x), 10240, jnp.float32))
    # A program for the CPU leaves dumps as well.
    jnp.arange(3) + 1
    to_host = lambda x: jax.device_put(x * 2, jax.memory.Space.Host)
    print(described_gpu.compile_for_gpu(to_host, jax.ShapeDtypeStruct((8,), jnp.float32)).host_transfers)
    return 0

described_gpu.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lane", LANES)
def test_the_compiler_refuses(lane, tmp_path):
    """What the gate is for: operations that lower and do not compile, spills, and copies to the host."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    popcount, hungry, to_host = run_in(lane, str(script)).splitlines()
    assert "Failed to compile Triton kernel" in popcount
    assert "register spilling" in hungry
    assert "copy-start" in to_host


OFFSETS = """
import os, pathlib, re
import jax, jax.numpy as jnp
from benchmarks import described_gpu
from jaxmask.kernels.compact import compact_support

def main():
    for num_rows in (1000, 14136):
        described_gpu.compile_for_gpu(
            lambda x: compact_support(x, 8, implementation="pallas_gpu"),
            jax.ShapeDtypeStruct((num_rows, 151_936), jnp.float32),
        )
        ptx = [path.read_text() for path in pathlib.Path(os.environ["JAXMASK_GPU_DUMPS"]).glob("*.ptx")]
        pack = next(text for text in ptx if ".entry compact_pack(" in text)
        print(len(re.findall(r"mul\\.wide\\.[us]32\\s+%rd\\d+, %r\\d+, 607744;", pack)))
    return 0

described_gpu.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lane", LANES)
def test_offsets_beyond_32_bits(lane, tmp_path):
    """2^31 logits and more: where a row begins, 607,744 bytes after the one before, is computed in 64 bits."""
    script = tmp_path / "offsets.py"
    script.write_text(OFFSETS)
    few, many = map(int, run_in(lane, str(script)).split())
    assert few == 0
    assert many >= 1


def calls_back(x):
    jax.debug.callback(lambda _: None, x.sum())
    return x + 1


def asks(x):
    return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def prints(x):
    jax.debug.print("{}", x)
    return x


@pytest.mark.parametrize("function", [calls_back, asks, prints])
def test_callbacks_are_host_transfers(function):
    hlo = jax.jit(function).lower(jnp.ones(4)).compile().as_text()
    assert len(described_gpu.host_transfers(hlo)) == 1


def test_a_plain_program_transfers_nothing():
    hlo = jax.jit(lambda x: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x)).lower(jnp.ones(4))
    assert described_gpu.host_transfers(hlo.compile().as_text()) == []
    assert described_gpu.count_host_decisions(hlo.compile().as_text()) == 1


@pytest.mark.parametrize(
    ("line", "is_transfer"),
    [
        ("%a = ((f32[4]{0}, token[]), token[]) infeed(%token)", True),
        ("%a = token[] outfeed(%x, %token), outfeed_shape=f32[4]{0}", True),
        ("%a = (f32[4]{0}, u32[], token[]) send(%x, %token), channel_id=1, is_host_transfer=true", True),
        ("%a = (f32[4]{0}, token[]) recv-done(%b), channel_id=2", True),
        ('%a = () custom-call(%x), custom_call_target="xla_python_gpu_callback"', True),
        ('ROOT %a = f32[4]{0} custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"', True),
        ('%a = f32[4]{0} custom-call(%x), custom_call_target="MoveToHost"', True),
        ('%a = f32[4]{0} custom-call(%x), custom_call_target="annotate_device_placement"', True),
        ('%a = f32[4]{0} call(%x), to_apply=%f, frontend_attributes={_xla_compute_type="host"}', True),
        ("%a = (f32[8,9]{1,0:S(5)}, f32[8,9]{1,0}, u32[]) copy-start(%x)", True),
        ("ROOT %a = f32[8,9]{1,0:T(8,128)S(5)} copy(%x)", True),
        ("HloModule m, entry_computation_layout={(f32[8]{0})->f32[8]{0:S(5)}}", True),
        ("%a = f32[8,9]{1,0:T(8,128)S(1)} copy(%x)", False),
        ("%send = f32[4]{0} fusion(%recv), kind=kLoop, calls=%infeed", False),
        ('%a = f32[4]{0} custom-call(%x), custom_call_target="__gpu$TopK"', False),
        ('%a = f32[4]{0} add(%x, %y), metadata={op_name="jit(callback)/send(1) S(5)"}', False),
    ],
)
def test_host_transfers(line, is_transfer):
    assert bool(described_gpu.host_transfers(line)) == is_transfer


PTX = """
.visible .entry pack(
	.param .u64 .ptr .align 16 pack_param_0,
	.param .u64 .ptr .align 16 pack_param_1
)
{
	ld.param.b64 	%rd1, [pack_param_0];
	ld.param::entry.b64 	%rd2, [pack_param_1];
	mul.wide.s32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	cvta.to.global.u64 	%rd9, %rd2;
	add.s64 	%rd5, %rd3, %rd9;
	mov.u32 %r1, %r5; mov.u32 %r2, %r5; @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd4 + 0 ];
	@%p2 ld.global.L1::evict_first.v2.b64 { %rd7, %rd8 }, [ %rd4 + 16 ];
	ld.global.nc.u16 	%rs1, [%rd5+2];
	ld.global.b32 	%r6, [%rd7];
	ld.volatile.v2.u32 	{%r6, %r7}, [%rd5];
	ld.shared.v4.b32 	{%r6, %r7, %r8, %r9}, [%rd5];
	cp.async.cg.shared.global [ %r7 + 0 ], [ %rd4 + 32 ], 0x10, %r8;
	st.global.b32 	[%rd5], %r6;
"""


def test_loads_are_followed_to_arguments():
    """Two arguments, five ways to read, and an address that was itself read from memory."""
    assert set(described_gpu.read_loads(PTX)) == {Loads(0, 16, 3), Loads(1, 2, 1), Loads(1, 8, 1), Loads(None, 4, 1)}


def test_the_checks_see_what_they_look_for():
    loads = [{"operand": 0, "width": 16, "count": 8}, {"operand": 1, "width": 4, "count": 1}]
    kernel = {"name": "pack__1", "spill_stores": 0, "spill_loads": 0, "loads": loads}
    case = {
        "kernels": [kernel],
        "streams": {"pack": [0]},
        "host_transfers": [],
        "fewest_bytes": 1,
        "design_bytes": 1,
        "argument_bytes": 1,
        "output_bytes": 0,
        "temporary_bytes": 9,
        "most_temporary_bytes": 9,
    }
    assert faults(case) == []
    assert faults(case | {"most_temporary_bytes": 8}) == ["has 9 bytes of temporaries"]
    assert faults(case | {"streams": {"pack": [0, 1]}}) == ["pack__1 reads argument 1 by [4] bytes"]
    assert faults(case | {"streams": {"expand": [0]}}) == ["does not call expand"]
    assert faults(case | {"kernels": [kernel | {"spill_loads": 4}]}) == ["pack__1 spills"]
    assert faults(case | {"kernels": [], "streams": {}}) == ["calls no kernel"]
    assert faults(case | {"host_transfers": ["send"]}) == ["asks the host: send"]
    assert faults(case | {"fewest_bytes": 2, "output_bytes": 1}) == ["moves fewer bytes than the fewest"]
    assert faults(case | {"fewest_bytes": 2, "design_bytes": 2}) == ["needs more bytes than it takes and gives"]
    lost = {"operand": None, "width": 4, "count": 1}
    assert faults(case | {"kernels": [kernel | {"loads": [*loads, lost]}]}) == [
        "pack__1 reads what cannot be followed to an argument"
    ]


def test_what_a_folder_lacks(tmp_path):
    assert "has none" in described_gpu.missing(tmp_path, "0.10.2")
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        metadata = tmp_path / f"{name.replace('-', '_')}-0.10.2.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.10.2\n")
    assert "and has 0.10.2" in described_gpu.missing(tmp_path, "0.12.0")
    assert described_gpu.missing(tmp_path, "0.10.2").endswith("has no nvidia/cu*/bin/ptxas")
    ptxas = tmp_path / "nvidia" / "cu13" / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.touch()
    assert described_gpu.missing(tmp_path, "0.10.2") is None
