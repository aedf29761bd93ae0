import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask.scoring import soft_cap
from models.config import LinearRopeScaling, Llama3RopeScaling
from models.layers import (
    gated,
    head_logits,
    linear,
    rms_norm,
    rotary_frequencies,
    rotary_table,
    rotate,
)

FLOAT32 = 1e-5  # float32 against float64, values of order 1


def draws(*shapes):
    noise = np.random.default_rng(7)
    return [noise.standard_normal(shape).astype(np.float32) for shape in shapes]


def wide(*arrays):
    return [array.astype(np.float64) for array in arrays]


def close(found, expected, tolerance=FLOAT32):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_linear_by_hand():
    x, weight, bias = jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]]), jnp.array([0.5, 0, 1])
    close(linear(x, weight), [[11.0, 17.0, 2.0]])
    close(linear(x, weight, bias), [[11.5, 17.0, 3.0]])


def test_linear_keeps_leading_axes():
    x, weight, bias = draws((2, 3, 5), (4, 5), (4,))
    close(linear(*map(jnp.asarray, (x, weight, bias))), np.einsum("bti,oi->bto", *wide(x, weight)) + bias)


def test_head_logits_are_float32_sums_of_bfloat16_products():
    # 256 + 1 is not a bfloat16 number, so a bfloat16 sum would lose the 1.
    hidden, head = jnp.array([[256.0, 1.0]], jnp.bfloat16), jnp.array([[1.0, 1.0]], jnp.bfloat16)
    logits = head_logits(hidden, head)
    assert logits.dtype == jnp.float32
    assert logits.tolist() == [[257.0]]


def test_rms_norm_by_hand():
    # mean square of (3, 4) is 12.5
    close(rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), 0.0), [[3 / 12.5**0.5, 8 / 12.5**0.5]])


def test_rms_norm_against_float64():
    x, scale = draws((2, 3, 16), (16,))
    x64, scale64 = wide(x, scale)
    expected = scale64 * x64 / np.sqrt(np.mean(x64**2, axis=-1, keepdims=True) + 1e-2)
    close(rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-2), expected)


def test_rms_norm_of_bfloat16_squares_in_float32():
    # In bfloat16 the squares of 1 and 1/256 would sum to 1 and the mean be off by more than the result's rounding.
    x = jnp.full((1, 512), 300.0, jnp.bfloat16)
    out = rms_norm(x, jnp.ones(512, jnp.bfloat16), 1e-6)
    assert out.dtype == jnp.bfloat16
    assert out.astype(jnp.float32).tolist() == [[1.0] * 512]


def test_rotation_by_hand():
    # theta 1: both pairs turn by the position; at a quarter turn (a, b) becomes (-b, a).
    quarter = jnp.full((1, 2), np.pi / 2, jnp.float32)
    close(rotate(jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), jnp.cos(quarter), jnp.sin(quarter)), [[[-3.0, -4.0, 1.0, 2.0]]])


@pytest.mark.parametrize("scaling", [None, Llama3RopeScaling(8.0, 1.0, 4.0, 32)])
def test_rotary_against_complex_multiplication(scaling):
    (x,) = draws((2, 5, 3, 16))
    positions = np.array([[0, 1, 2, 3, 39], [7, 0, 100, 5, 5]], np.int32)
    frequencies = expected_frequencies(16, 1e4, scaling)
    turned = (x[..., :8] + 1j * x[..., 8:].astype(np.float64)) * np.exp(1j * positions[..., None, None] * frequencies)
    cosine, sine = rotary_table(jnp.asarray(positions), 16, 1e4, scaling)
    close(rotate(jnp.asarray(x), cosine, sine), np.concatenate([turned.real, turned.imag], axis=-1), 5e-5)


def expected_frequencies(head_dim, theta, scaling):
    """Llama 3.1's rule, pair by pair, as its model card states it."""
    frequencies = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2 * pair / head_dim)
        if scaling is not None:
            wavelength = 2 * np.pi / frequency
            if wavelength > scaling.original_max_length / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength > scaling.original_max_length / scaling.high_freq_factor:
                smooth = scaling.original_max_length / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


def test_llama3_scaling_touches_slow_pairs_only():
    plain = rotary_frequencies(16, 1e4, None)
    ratio = rotary_frequencies(16, 1e4, Llama3RopeScaling(8.0, 1.0, 4.0, 32)) / plain
    assert ratio[0] == 1.0
    assert 1 / 8 < ratio[1] < 1.0
    np.testing.assert_allclose(ratio[2:], 1 / 8, rtol=1e-6)


def test_gated_against_float64():
    gate, up = draws((2, 3, 7), (2, 3, 7))
    gate64, up64 = wide(gate, up)
    close(gated(jnp.asarray(gate), jnp.asarray(up)), gate64 / (1 + np.exp(-gate64)) * up64)
    inner = np.sqrt(2 / np.pi) * (gate64 + 0.044715 * gate64**3)
    close(gated(jnp.asarray(gate), jnp.asarray(up), "gelu_tanh"), 0.5 * gate64 * (1 + np.tanh(inner)) * up64)


def test_soft_cap_by_hand():
    x = jnp.array([0.0, 1.0, -100.0])
    close(soft_cap(x, 2.0), [0.0, 2 * np.tanh(0.5), -2.0])
    assert soft_cap(x, None) is x


def test_rms_norm_plus_one_by_hand():
    close(
        rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([0.0, 1.0]), 0.0, plus_one=True), [[3 / 12.5**0.5, 8 / 12.5**0.5]]
    )


def test_linear_scaling_slows_every_pair():
    slow = rotary_frequencies(16, 1e4, LinearRopeScaling(8.0))
    np.testing.assert_allclose(slow, rotary_frequencies(16, 1e4, None) / 8, rtol=1e-6)
