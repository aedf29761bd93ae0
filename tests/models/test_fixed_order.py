"""Sums whose order is written out: the same bits alone, from a cache, and inside a sequence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.attention import Scoring, attention, ordered_attention
from models.layers import ordered_sum, rms_norm, rotary_table, stored_rotary_table


def draws(*shapes):
    noise = np.random.default_rng(7)
    return [jnp.asarray(noise.standard_normal(shape).astype(np.float32)) for shape in shapes]


@pytest.fixture(scope="module")
def fixed_decoder():
    config = models.DecoderConfig(
        vocab_size=31,
        num_layers=2,
        width=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=48,
        rope_theta=1e4,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_length=32,
        fixed_order=True,
    )
    # Ten times the initial weights: sharp attention, where rounding would show.
    return jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim == 2 else leaf, models.Decoder(config, rngs=nnx.Rngs(0)))


def test_ordered_sum_by_hand():
    # (1e8 + -1e8) + (1 + 0): the order that is promised. From left to right the 1 would be lost.
    assert ordered_sum(jnp.array([1e8, 1.0, -1e8]), 0).tolist() == [1.0]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 24, 33])
def test_ordered_sum_against_float64(size):
    (x,) = draws((5, size, 3))
    np.testing.assert_allclose(
        ordered_sum(x, 1), np.asarray(x, np.float64).sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("zeros", [1, 7, 40])
def test_zeros_at_the_end_change_no_bit(zeros):
    (x,) = draws((50, 11))
    longer = jnp.pad(x, ((0, 0), (0, zeros)))
    np.testing.assert_array_equal(jax.jit(lambda x: ordered_sum(x, 1))(x), jax.jit(lambda x: ordered_sum(x, 1))(longer))


def test_the_fixed_forms_are_the_plain_formulas():
    queries, keys, values, x, scale = draws((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), (3, 24), (24,))
    causal = jnp.broadcast_to(jnp.tri(5, dtype=bool), (2, 5, 5))
    arrays = (queries, keys, values, causal, Scoring(8**-0.5))
    np.testing.assert_allclose(ordered_attention(*arrays), attention(*arrays), atol=1e-6)
    np.testing.assert_allclose(rms_norm(x, scale, 1e-6, fixed_order=True), rms_norm(x, scale, 1e-6), rtol=1e-6)
    positions = jnp.array([[0, 3, 31]], jnp.int32)
    for stored, computed in zip(
        stored_rotary_table(positions, 8, 1e4, None, 32), rotary_table(positions, 8, 1e4, None), strict=True
    ):
        np.testing.assert_allclose(stored, computed, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_those_of_the_plain_forms(fixed_decoder):
    plain = models.Decoder(dataclasses.replace(fixed_decoder.config, fixed_order=False), rngs=nnx.Rngs(0))
    plain = jax.tree.unflatten(jax.tree.structure(plain), jax.tree.leaves(fixed_decoder))
    token_ids = jnp.asarray(np.random.default_rng(1).integers(0, 31, (2, 7)), jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(decoder):
        return jnp.square(decoder.logits(token_ids)).mean()

    for one, other in zip(jax.tree.leaves(gradient(fixed_decoder)), jax.tree.leaves(gradient(plain)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4 * float(jnp.abs(other).max()))


def test_decoding_is_teacher_forcing_to_an_ulp(fixed_decoder):
    """Rows of a batch, a cache with spare room, one token at a time: the logits hardly move, sharp as they are."""
    token_ids = jnp.asarray(np.random.default_rng(2).integers(0, 31, (40, 12)), jnp.int32)
    whole = jax.jit(lambda decoder, ids: decoder.logits(ids))(fixed_decoder, token_ids)
    cache = fixed_decoder.prefill(token_ids, jnp.full(40, 4, jnp.int32), capacity=19)
    step = jax.jit(lambda decoder, ids, cache: decoder.decode(ids, cache))
    for position in range(4, 12):
        logits, cache = step(fixed_decoder, token_ids[:, position], cache)
        np.testing.assert_allclose(logits, whole[:, position], rtol=0, atol=2e-6 * float(jnp.abs(whole).max()))
