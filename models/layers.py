"""The formulas of a decoder block, as pure functions of arrays.

No parameters live here and no cache is known; float32 inputs give true float32 products on every backend.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import Activation, Llama3RopeScaling, RopeScaling

# GPUs would otherwise multiply float32 as TF32, which breaks the learner's 1e-5 agreement with the sampler.
PRECISION = jax.lax.Precision.HIGHEST
NUM_BLOCKS, MAX_ROWS_IN_BLOCKS = 4, 16


def linear(
    x: Float[Array, "*B I"], weight: Float[Array, "O I"], bias: Float[Array, " O"] | None = None, num_blocks: int = 1
) -> Float[Array, "*B O"]:
    """x @ weight.T + bias, with the weight as the hub files store it: one row per output.

    Both operands contract their last axis. On XLA:CPU (jax 0.10.2 and 0.12.0, two machines) no layout of the weights is
    faster at the batch sizes of rollouts (`benchmarks/decoder.py --only layouts`).

    Args:
      x: rows.
      weight: one row per output.
      bias: of each output; None for none.
      num_blocks: computes the outputs as so many blocks of one batched product; see `num_blocks`.
    """
    if num_blocks == 1:
        y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=PRECISION)
    else:
        rows, blocks = x.reshape(-1, x.shape[-1]), weight.reshape(num_blocks, -1, weight.shape[1])
        same = jnp.broadcast_to(rows[None], (num_blocks, *rows.shape))
        y = jnp.einsum("gni,goi->ngo", same, blocks, precision=PRECISION).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def num_blocks(num_rows: int, num_outputs: int) -> int:
    """Blocks of outputs in which a product of few rows is fastest.

    On XLA:CPU (jax 0.10.2, AVX-512) four blocks take 8 % off a step of 8 rows of a small model, whose weights stay in
    the caches, nothing off SmolLM2's, which waits for memory; a single row is the same, and 32 rows are slower.
    """
    is_few = 1 < num_rows <= MAX_ROWS_IN_BLOCKS
    return NUM_BLOCKS if is_few and num_outputs % NUM_BLOCKS == 0 and jax.default_backend() == "cpu" else 1


def head_logits(hidden: Float[Array, "*B D"], head: Float[Array, "V D"]) -> Float[Array, "*B V"]:
    """hidden . head[v] for every v, accumulated and returned in float32 whatever the inputs are."""
    contraction = (((hidden.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(hidden, head, contraction, precision=PRECISION, preferred_element_type=jnp.float32)


def apart(
    hidden: Float[Array, "B C D"], keys: Float[Array, "B C K Hd"], values: Float[Array, "B C K Hd"]
) -> tuple[Float[Array, "B C D"], Float[Array, "B C K Hd"], Float[Array, "B C K Hd"]]:
    """The same, but where a token's key or value is not finite these are 0 and its own state is NaN.

    What attention does not look at still meets its weights as 0 times the value, which would be NaN for all others.
    """
    is_whole = (jnp.isfinite(keys) & jnp.isfinite(values)).all(axis=(2, 3))
    in_heads = is_whole[:, :, None, None]
    keys, values = jnp.where(in_heads, keys, 0), jnp.where(in_heads, values, 0)
    return jnp.where(is_whole[:, :, None], hidden, jnp.nan), keys, values


def ordered_sum(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The sum over an axis, which stays with size 1, in an order that is written out: it rounds alike in every program.

    Zeros fill the axis up to a power of two, then its halves are added until one term is left; more zeros at the end
    change nothing.
    In: [a, b, c]  Out: [(a + c) + (b + 0)]
    """
    # Terms are often products: without the barrier some programs fuse multiply and add, which rounds once, not twice.
    x = jax.lax.optimization_barrier(x)
    size = x.shape[axis]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, (1 << (size - 1).bit_length()) - size)
    x = jnp.pad(x, widths)
    while x.shape[axis] > 1:
        first, second = jnp.split(x, 2, axis=axis)
        x = first + second
    return x


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    eps: float,
    *,
    plus_one: bool = False,
    fixed_order: bool = False,
) -> Float[Array, "*B D"]:
    """scale * x / sqrt(mean(x^2) + eps) over the last axis, computed in float32, in the dtype of x.

    With `plus_one` it is scaled by 1 + scale, still in float32 (Gemma). With `fixed_order` the squares are added by
    `ordered_sum`.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.
    """
    wide = x.astype(jnp.float32)
    squares = wide * wide
    total = ordered_sum(squares, -1) if fixed_order else jnp.sum(squares, axis=-1, keepdims=True)
    inverse_rms = jax.lax.rsqrt(total / x.shape[-1] + eps)
    if plus_one:
        return (wide * inverse_rms * jnp.broadcast_to(1.0 + scale.astype(jnp.float32), x.shape)).astype(x.dtype)
    return (wide * inverse_rms).astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians per token of each rotated pair, float32 [head_dim / 2]: theta^(-2i / head_dim), then the stretch."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if isinstance(scaling, Llama3RopeScaling):
        frequencies = _stretch(frequencies, scaling)
    elif scaling is not None:
        frequencies = frequencies / scaling.factor
    return frequencies.astype(np.float32)


def _stretch(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    # keep = 1 for fast pairs, 0 for slow ones, linear in the number of turns over the original context between.
    turns = scaling.original_max_length * frequencies / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotary_table(
    positions: Int[Array, "*B"], head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Float[Array, "*B P"], Float[Array, "*B P"]]:
    """Cosine and sine, float32, of each position's angle for each of the P = head_dim / 2 pairs."""
    frequencies = jnp.asarray(rotary_frequencies(head_dim, theta, scaling))
    table_shape = (*positions.shape, head_dim // 2)
    angles = positions.astype(jnp.float32)[..., None] * jnp.broadcast_to(frequencies, table_shape)
    return jnp.cos(angles), jnp.sin(angles)


def stored_rotary_table(
    positions: Int[Array, "*B"], head_dim: int, theta: float, scaling: RopeScaling | None, max_length: int
) -> tuple[Float[Array, "*B P"], Float[Array, "*B P"]]:
    """`rotary_table` looked up among positions 0 to max_length - 1, so that every program uses the same bits."""
    angles = np.arange(max_length, dtype=np.float32)[:, None] * rotary_frequencies(head_dim, theta, scaling)
    return jnp.asarray(np.cos(angles))[positions], jnp.asarray(np.sin(angles))[positions]


def rotate(
    x: Float[Array, "*B N H"], cosine: Float[Array, "*B P"], sine: Float[Array, "*B P"], fixed_order: bool = False
) -> Float[Array, "*B N H"]:
    """Each of the N heads with pair (i, i + P) turned by its angle, H = 2 P.

    In: x = [a, b], angle t  Out: [a cos t - b sin t, b cos t + a sin t]

    With `fixed_order` the products are rounded before they are added, as in `ordered_sum`.

    Source: Su et al., arXiv 2104.09864, section 3.2, with the halves layout of the hub files.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    products = (first * cosine, second * sine, second * cosine, first * sine)
    if fixed_order:
        products = jax.lax.optimization_barrier(products)
    return jnp.concatenate([products[0] - products[1], products[2] + products[3]], axis=-1).astype(x.dtype)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}  # jax.nn.gelu takes the tanh form by default


def gated(
    gate: Float[Array, "*B M"], up: Float[Array, "*B M"], activation: Activation = "silu"
) -> Float[Array, "*B M"]:
    """activation(gate) * up.

    Source: Shazeer, arXiv 2002.05202, equation 6.
    """
    return ACTIVATIONS[activation](gate) * up
