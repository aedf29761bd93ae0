"""The one door to Pallas' Triton backend, which JAX has deprecated (0.11) and still has (0.12).

What the kernels use of it is here, so that another backend needs changes here and in `pallas_gpu.py` of each operation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend
from jaxtyping import Array, Int, UInt

load = backend.load
# Interpreted, a masked-out lane writes back what it read: one that shares its index with a lane that stores must come
# before it.
store = backend.store
program_id = pl.program_id
when = pl.when


def call(
    kernel: Callable[..., None],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    *operands: Any,
    name: str,
    grid: tuple[int, ...],
    num_warps: int,
    is_interpreted: bool,
    aliases: dict[int, int] | None = None,
) -> tuple[Any, ...]:
    """The outputs of a kernel whose programs see all operands and outputs whole.

    Args:
      kernel: takes a reference for each operand, then one for each output.
      out_shape: the outputs.
      operands: arrays, or trees of arrays; the backend takes 64-bit offsets where one exceeds 2^32 bytes.
      name: shown in profiles and dumps.
      grid: programs along each axis.
      num_warps: warps of 32 threads of a program, a power of two.
      is_interpreted: run by JAX step by step, on any platform.
      aliases: operands whose memory becomes that of an output, by index.
    """
    outputs = pl.pallas_call(
        kernel,
        out_shape=list(out_shape),
        grid=grid,
        name=name,
        interpret=is_interpreted,
        input_output_aliases=aliases or {},
        compiler_params=backend.CompilerParams(num_warps=num_warps, num_stages=1),
    )(*operands)
    return tuple(outputs)


def population_count(words: UInt[Array, "*C"]) -> Int[Array, "*C"]:
    """How many bits are set, in pairs, nibbles and bytes: XLA's compiler has no lowering of the backend's own.

    Source: Warren, "Hacker's delight", section 5-1.
    """
    words = words - ((words >> jnp.uint32(1)) & jnp.uint32(0x55555555))
    words = (words & jnp.uint32(0x33333333)) + ((words >> jnp.uint32(2)) & jnp.uint32(0x33333333))
    words = (words + (words >> jnp.uint32(4))) & jnp.uint32(0x0F0F0F0F)
    return ((words * jnp.uint32(0x01010101)) >> jnp.uint32(24)).astype(jnp.int32)


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`: the only sizes the backend knows."""
    return 1 << max(size - 1, 0).bit_length()
