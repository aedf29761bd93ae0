import subprocess
import sys
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask.kernels import dispatch
from jaxmask.kernels.compact import compact_support

H200 = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
TURING = types.SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
AMD = types.SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="AMD Instinct MI300X")
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v5")


@pytest.fixture
def on(monkeypatch):
    """`choose` as if arrays lay on some device, with no warning given before."""
    monkeypatch.setattr(dispatch, "_warned", set())

    def choose(device, implementation="auto", refusal=None):
        monkeypatch.setattr(dispatch, "_device_of", lambda array, mesh: device)
        return dispatch.choose("op", implementation, None, refusal)

    return choose


def test_auto_follows_the_platform(on):
    assert on(H200) == "pallas_gpu"
    assert on(TPU) == "xla"
    assert on(jax.devices("cpu")[0]) == "xla"
    # What the kernel cannot do is no matter where none would run.
    assert on(TPU, refusal="too large") == "xla"


@pytest.mark.parametrize(
    ("device", "refusal", "message"),
    [
        (H200, "too large", "op runs in plain XLA: too large"),
        (TURING, None, "need compute capability 8.0, and Tesla T4 has 7.5"),
        (AMD, None, "are for NVIDIA GPUs, and this is AMD Instinct MI300X"),
    ],
)
def test_auto_falls_back_with_one_warning(on, device, refusal, message):
    with pytest.warns(RuntimeWarning, match=message):
        assert on(device, refusal=refusal) == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on(device, refusal=refusal) == "xla"


def test_auto_falls_back_where_pallas_has_no_triton(on, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    with pytest.warns(RuntimeWarning, match="this JAX has no Triton backend of Pallas"):
        assert on(H200) == "xla"


@pytest.mark.parametrize("implementation", ["pallas_gpu", "interpret", "xla"])
def test_what_is_asked_for_runs_anywhere(on, implementation):
    assert on(TPU, implementation) == implementation


def test_errors(on):
    with pytest.raises(NotImplementedError, match="op: implementation 'pallas_gpu' cannot run: too large"):
        on(TPU, "pallas_gpu", "too large")
    with pytest.raises(NotImplementedError, match="'interpret' cannot run: too large"):
        on(TPU, "interpret", "too large")
    assert on(TPU, "xla", "too large") == "xla"
    with pytest.raises(ValueError, match="implementation must be one of auto, pallas_gpu, xla, interpret, got 'cuda'"):
        on(TPU, "cuda")


def test_the_device_of_an_array(unchecked):
    first, second = jax.devices()[:2]
    assert dispatch._device_of(jax.device_put(jnp.ones(2), second), None) == second
    assert dispatch._device_of(None, None) == first
    with jax.default_device(second):
        assert dispatch._device_of(None, None) == second
    found = []
    jax.jit(lambda x: found.append(dispatch._device_of(x, None)) or x)(jnp.ones(2))
    assert found == [first]
    mesh = jax.sharding.Mesh(np.array([second, first]), ("data",))
    assert dispatch._device_of(None, mesh) == second


def test_the_reason_is_given_once_whatever_the_sizes_and_to_the_caller(on):
    with pytest.warns(RuntimeWarning) as record:
        on(H200, refusal="there are 5 cells")
    # In tests a wrapper that checks types stands between; it is not jaxmask either.
    assert [Path(dispatch.__file__).parents[1] in Path(warning.filename).parents for warning in record] == [False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on(H200, refusal="there are 6 cells")
    with pytest.warns(RuntimeWarning, match="a width above 2048"):
        on(H200, refusal="a width above 2048")


def test_a_kernel_that_is_asked_for_where_an_array_does_not_lie_on_a_gpu(unchecked):
    logits = jnp.zeros((1, 9))
    with pytest.raises(NotImplementedError, match="are for NVIDIA GPUs, and the arrays lie on a cpu"):
        compact_support(logits, 3, implementation="pallas_gpu")
    # What is traced may be lowered for a GPU.
    jax.eval_shape(lambda x: compact_support(x, 3, implementation="pallas_gpu"), logits)


def test_who_traces_first_settles_what_arrays_still_say(monkeypatch, unchecked):
    on_cpu = jnp.zeros(3)
    # As if the default device were a GPU.
    monkeypatch.setattr(dispatch.jax, "devices", lambda *_: [H200])
    assert dispatch.settle("auto", on_cpu) == "xla"
    assert dispatch.settle("interpret", on_cpu) == "interpret"
    seen = []
    jax.jit(lambda x: seen.append(dispatch.settle("auto", x)) or x)(on_cpu)
    assert seen == ["auto"]
    with pytest.raises(ValueError, match="implementation must be one of"):
        dispatch.settle("cuda", on_cpu)


def test_logits_that_jax_reads_as_float32(unchecked):
    assert dispatch.cannot_read(np.zeros((2, 3))) is None
    assert dispatch.cannot_read(jax.ShapeDtypeStruct((2, 3), jnp.float8_e5m2)) == (
        "logits are float8_e5m2, and the kernels read float32, bfloat16, float16"
    )


@pytest.mark.slow
def test_without_a_gpu_pallas_is_never_imported():
    program = """
import sys, jax.numpy as jnp
from jaxmask import SamplingBatch, SamplingParams, sample, support_log_probs
from jaxmask.kernels.compact import compact_support
batch = SamplingBatch.from_params(SamplingParams(top_k=3, seed=0), vocab_size=9)
drawn = sample(jnp.zeros((1, 9)), batch, step=0, width=3)
support_log_probs(jnp.ones((1, 2)), jnp.ones((9, 2)), drawn.support, drawn.token_ids)
compact_support(jnp.zeros((1, 9)), 3)
print([name for name in sys.modules if "pallas" in name])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
