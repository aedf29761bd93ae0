"""Which implementation of an operation runs.

pallas_gpu   the kernel, for NVIDIA GPUs
interpret    the same kernel, run by JAX step by step on any platform: for tests, slow
xla          plain JAX, on every platform
auto         pallas_gpu where the arrays lie on a GPU that can run it, xla elsewhere
"""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

IMPLEMENTATIONS = ("auto", "pallas_gpu", "xla", "interpret")

_READABLE = ("float32", "bfloat16", "float16")
# Cells are counted in int32; arrays of two axes may be larger, since the backend widens their offsets.
MAX_CELLS = 2**31 - 1

# Triton, which compiles the kernels, knows GPUs from here on.
_LEAST_COMPUTE_CAPABILITY = 8.0

_PACKAGE = str(Path(__file__).parents[1])
_warned: set[tuple[str, str]] = set()


def choose(operation: str, implementation: str, array: Any, refusal: str | None = None, mesh: Any = None) -> str:
    """pallas_gpu, interpret or xla: what runs where `implementation` was asked for.

    "auto" looks at the platform of `array`, or of the mesh it is placed on; traced arrays have none yet, and count as
    lying on the default device. Where a GPU could run the kernel and something speaks against it, xla runs, and a
    RuntimeWarning says why, once.

    Args:
      operation: its name, for messages.
      implementation: one of `IMPLEMENTATIONS`.
      array: what the operation reads.
      refusal: why the kernel cannot do what is asked; None where it can.
      mesh: where `array` is or will be placed; None where it says so itself.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: the kernel was asked for and cannot do it, or cannot run on the device of a concrete array.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return "xla"
    device = _device_of(array, mesh)
    if implementation != "auto":
        # What is traced may be compiled for another machine.
        if implementation == "pallas_gpu" and _is_concrete(array):
            refusal = refusal or _refusal_of(device)
        if refusal is not None:
            raise NotImplementedError(f"{operation}: implementation {implementation!r} cannot run: {refusal}")
        return implementation
    if not _is_gpu(device):
        return "xla"
    refusal = refusal or _refusal_of(device)
    if refusal is None:
        return "pallas_gpu"
    _warn_once(operation, refusal)
    return "xla"


def settle(implementation: str, array: Any) -> str:
    """ "xla" for "auto" where a concrete array lies off the GPUs; else `implementation`, to be chosen later.

    For those who trace before they choose: inside, the array no longer says where it lies.

    Raises:
      ValueError: an unknown implementation.
    """
    check_implementation(implementation)
    is_off_gpu = _is_concrete(array) and not _is_gpu(_device_of(array, None))
    return "xla" if implementation == "auto" and is_off_gpu else implementation


def check_implementation(implementation: str) -> None:
    """Raises ValueError unless the name is one of `IMPLEMENTATIONS`."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}.")


def cannot_read(logits: Any) -> str | None:
    """Why no kernel can read these logits; None where all can."""
    dtype = jax.dtypes.canonicalize_dtype(logits.dtype)
    return None if dtype in _READABLE else f"logits are {dtype}, and the kernels read {', '.join(_READABLE)}"


def too_many_cells(cells: Any) -> str | None:
    """Why no kernel can count these cells; None where all can."""
    if cells.size <= MAX_CELLS:
        return None
    return f"there are {cells.size} cells, and the kernel counts to 2^31 - 1; cut the rows into blocks"


def _is_gpu(device: Any) -> bool:
    return device.platform in ("gpu", "cuda")


def _is_concrete(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def _device_of(array: Any, mesh: Any) -> Any:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0]
    if _is_concrete(array):
        return next(iter(array.devices()))
    default = getattr(jax.config, "jax_default_device", None)
    if default is None or isinstance(default, str):
        return jax.devices(default)[0]
    return default


def _refusal_of(device: Any) -> str | None:
    """Why no kernel runs on a device."""
    if not _is_gpu(device):
        return f"the kernels are for NVIDIA GPUs, and the arrays lie on a {device.platform}"
    try:
        capability = float(device.compute_capability)
    except (AttributeError, ValueError):
        return f"the kernels are for NVIDIA GPUs, and this is {device.device_kind}"
    if capability < _LEAST_COMPUTE_CAPABILITY:
        return f"the kernels need compute capability 8.0, and {device.device_kind} has {capability}"
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError as error:
        return f"this JAX has no Triton backend of Pallas ({error})"
    return None


def _warn_once(operation: str, refusal: str) -> None:
    # Sizes change from call to call, and the reason stays the same.
    reason = (operation, re.sub(r"\d+", "", refusal))
    if reason in _warned:
        return
    _warned.add(reason)
    # The caller of jaxmask is who can do something about it.
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(f"{operation} runs in plain XLA: {refusal}", RuntimeWarning, stacklevel=depth)
