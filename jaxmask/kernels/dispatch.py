"""Which implementation of an operation runs.

pallas_gpu   the kernel, for NVIDIA GPUs
interpret    the same kernel, run by JAX step by step on any platform: for tests, slow
xla          plain JAX, on every platform
auto         pallas_gpu where the arrays lie on a GPU that can run it, xla elsewhere
"""

import warnings
from typing import Any

import jax

IMPLEMENTATIONS = ("auto", "pallas_gpu", "xla", "interpret")

# The kernels compute offsets in int32.
MAX_ELEMENTS = 2**31 - 1

_READABLE = ("float32", "bfloat16", "float16")

# Triton, which compiles the kernels, knows GPUs from here on.
_LEAST_COMPUTE_CAPABILITY = 8.0

_warned: set[tuple[str, str]] = set()


def choose(operation: str, implementation: str, array: Any, refusal: str | None = None) -> str:
    """pallas_gpu, interpret or xla: what runs where `implementation` was asked for.

    "auto" looks at the platform of `array`; traced arrays have none yet, and count as lying on the default device.
    Where a GPU could run the kernel and something speaks against it, xla runs, and a RuntimeWarning says why, once.

    Args:
      operation: its name, for messages.
      implementation: one of `IMPLEMENTATIONS`.
      array: what the operation reads.
      refusal: why the kernel cannot do what is asked; None where it can.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: the kernel was asked for and cannot do it.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return "xla"
    if implementation != "auto":
        if refusal is not None:
            raise NotImplementedError(f"{operation}: implementation {implementation!r} cannot run: {refusal}")
        return implementation
    device = _device_of(array)
    if device.platform not in ("gpu", "cuda"):
        return "xla"
    refusal = refusal or _refusal_of(device)
    if refusal is None:
        return "pallas_gpu"
    if (operation, refusal) not in _warned:
        _warned.add((operation, refusal))
        warnings.warn(f"{operation} runs in plain XLA: {refusal}", RuntimeWarning, stacklevel=3)
    return "xla"


def check_implementation(implementation: str) -> None:
    """Raises ValueError unless the name is one of `IMPLEMENTATIONS`."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}.")


def too_large(**arrays: jax.Array) -> str | None:
    """Why no kernel can address these arrays; None where all can be."""
    for name, array in arrays.items():
        if array.size > MAX_ELEMENTS:
            return f"{name} has {array.size} elements, and the kernels address at most 2^31 - 1; cut it into row blocks"
    return None


def cannot_read(logits: jax.Array) -> str | None:
    """Why no kernel can read these logits; None where all can."""
    if logits.dtype not in _READABLE:
        return f"logits are {logits.dtype}, and the kernels read {', '.join(map(str, _READABLE))}"
    return too_large(logits=logits)


def _device_of(array: Any) -> Any:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    default = getattr(jax.config, "jax_default_device", None)
    if default is None or isinstance(default, str):
        return jax.devices(default)[0]
    return default


def _refusal_of(device: Any) -> str | None:
    """Why no kernel runs on a GPU."""
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
