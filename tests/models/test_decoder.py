import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmask
import models
from models.decoder import Decoder

# The same float32 formula in another order of summation; logits here are of order 1.
REORDER_TOLERANCE = 1e-5

TOKEN_IDS = np.random.default_rng(3).integers(0, 31, (3, 12)).astype(np.int32)
LENGTHS = np.array([7, 0, 3], np.int32)

full_logits = jax.jit(lambda decoder, token_ids: decoder.logits(token_ids))
prefill = jax.jit(
    lambda decoder, token_ids, lengths, capacity: decoder.prefill(token_ids, lengths, capacity=capacity),
    static_argnums=3,
)
extend_logits = jax.jit(lambda decoder, *inputs: decoder.extend_logits(*inputs))
read = jax.jit(
    lambda decoder, token_ids, lengths, capacity, chunk_size: decoder.read(
        token_ids, lengths, capacity=capacity, chunk_size=chunk_size
    )[1],
    static_argnums=(3, 4),
)
decode = jax.jit(lambda decoder, token_ids, cache: decoder.decode(token_ids, cache))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=REORDER_TOLERANCE)


def decode_from(decoder, cache, token_ids, num_steps):
    """Teacher-forced decode: logits [num_steps, B, V] of the tokens that follow each row's cache, and the cache."""

    def step(cache, _):
        rows = jnp.arange(token_ids.shape[0])
        logits, cache = decoder.decode(jnp.asarray(token_ids)[rows, cache.lengths], cache)
        return cache, logits

    return jax.jit(lambda cache: jax.lax.scan(step, cache, length=num_steps)[::-1])(cache)


@pytest.fixture(params=["decoder", "windowed"])
def any_decoder(request):
    return request.getfixturevalue(request.param)


def test_prefill_and_decode_equal_the_full_forward_at_every_position(any_decoder):
    """P77, P79: rows of different lengths, the cache of each continued for 5 tokens."""
    expected = full_logits(any_decoder, TOKEN_IDS)
    logits, cache = decode_from(any_decoder, prefill(any_decoder, TOKEN_IDS, LENGTHS, 12), TOKEN_IDS, 5)
    for row, length in enumerate(LENGTHS):
        close(logits[:, row], expected[row, length : length + 5])
    assert cache.lengths.tolist() == [12, 5, 8]


def test_a_group_decodes_on_one_copy_of_its_prompt(any_decoder):
    expected = full_logits(any_decoder, TOKEN_IDS)
    cache = prefill(any_decoder, TOKEN_IDS[:, :7], LENGTHS, 7).repeat(2, capacity=5)
    assert cache.prompt.keys[1].shape == (3, 2, 8, 7)
    assert cache.keys[1].shape == (6, 2, 8, 5)
    logits, cache = decode_from(any_decoder, cache, TOKEN_IDS.repeat(2, axis=0), 5)
    for row, length in enumerate(LENGTHS.repeat(2)):
        close(logits[:, row], expected[row // 2, length : length + 5])
    assert cache.lengths.tolist() == [12, 12, 5, 5, 8, 8]
    assert cache.is_full.all()


def test_decoding_from_an_empty_cache_equals_the_full_forward(any_decoder):
    cache = prefill(any_decoder, TOKEN_IDS, np.zeros(3, np.int32), 12)
    logits, _ = decode_from(any_decoder, cache, TOKEN_IDS, 12)
    close(logits.swapaxes(0, 1), full_logits(any_decoder, TOKEN_IDS))


def test_a_window_holds_no_more_slots_than_it_sees(windowed):
    cache = prefill(windowed, TOKEN_IDS, LENGTHS, 12)
    assert [keys.shape[3] for keys in cache.keys] == [4, 12, 4]


def test_prefill_in_chunks_leaves_what_prefill_at_once_leaves(windowed):
    """Chunks of 5 for rows of 7, 0 and 3 tokens: the last chunk is partly empty, and the window wraps."""
    expected = full_logits(windowed, TOKEN_IDS)
    run = jax.jit(lambda *inputs: windowed.prefill(*inputs, capacity=12, chunk_size=5))
    cache = run(TOKEN_IDS, LENGTHS)
    assert cache.lengths.tolist() == LENGTHS.tolist()
    logits, _ = decode_from(windowed, cache, TOKEN_IDS, 5)
    for row, length in enumerate(LENGTHS):
        close(logits[:, row], expected[row, length : length + 5])
    # What comes after the rows' tokens in their chunks is not read.
    junk = np.where(np.arange(12)[None] < LENGTHS[:, None], TOKEN_IDS, 2**31 - 1).astype(np.int32)
    for one, other in zip(jax.tree.leaves(run(junk, LENGTHS)), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(one, other)


def test_extending_a_group_by_chunks_equals_the_full_forward(decoder):
    hidden = jax.jit(lambda ids: decoder.hidden(ids))(TOKEN_IDS)
    cache = prefill(decoder, TOKEN_IDS[:, :7], LENGTHS, 7).repeat(2, capacity=5)
    rows = TOKEN_IDS.repeat(2, axis=0)
    chunk = np.take_along_axis(rows, cache.lengths[:, None] + np.arange(3)[None], axis=1)
    counts = np.array([3, 2, 3, 1, 0, 3], np.int32)
    states, cache = jax.jit(lambda *inputs: decoder.extend(*inputs))(chunk, counts, cache)
    for row, (length, count) in enumerate(zip(LENGTHS.repeat(2), counts, strict=True)):
        close(states[row, :count], hidden[row // 2, length : length + count])
    assert cache.lengths.tolist() == (LENGTHS.repeat(2) + counts).tolist()


def next_tokens(cache, rows, count):
    """The next tokens of each row of a text, after what a cache holds."""
    return np.take_along_axis(rows, cache.lengths[:, None] + np.arange(count)[None], axis=1)


@pytest.mark.parametrize("copies", [1, 2])
def test_forgotten_tokens_leave_no_trace(windowed, copies):
    """Three tokens are read, of which the last one, all three and two are wrong and taken back; windows of 4 wrap."""
    cache = read(windowed, TOKEN_IDS[:, :7], LENGTHS, 12, 3)
    cache = cache if copies == 1 else cache.repeat(copies, capacity=6)
    rows, wrong = TOKEN_IDS.repeat(copies, axis=0), np.array([1, 3, 2], np.int32).repeat(copies)
    draft = next_tokens(cache, rows, 3)
    draft = np.where(np.arange(3)[None] < 3 - wrong[:, None], draft, (draft + 1) % 31)
    _, read_all = extend_logits(windowed, draft, np.full_like(wrong, 3), cache)
    _, never_read = extend_logits(windowed, draft, 3 - wrong, cache)
    back = read_all.rewind(jnp.asarray(wrong))
    assert back.lengths.tolist() == never_read.lengths.tolist()
    after, counts = next_tokens(back, rows, 3), np.full_like(wrong, 3)
    logits, expected = (extend_logits(windowed, after, counts, one)[0] for one in (back, never_read))
    np.testing.assert_array_equal(logits, expected)
    whole = full_logits(windowed, TOKEN_IDS)
    for row, length in enumerate(back.lengths):
        close(logits[row], whole[row // copies, length : length + 3])


def test_a_row_that_is_given_no_tokens_is_left_as_it_is(windowed):
    before = read(windowed, TOKEN_IDS[:, :7], LENGTHS, 12, 3)
    _, after = extend_logits(windowed, next_tokens(before, TOKEN_IDS, 3), np.array([0, 3, 0], np.int32), before)
    assert after.lengths.tolist() == [7, 3, 3]
    for old, new in zip(before.keys + before.values, after.keys + after.values, strict=True):
        np.testing.assert_array_equal(old[::2], new[::2])


def test_a_broken_guess_reaches_no_other_token(any_decoder):
    """P24: a token whose numbers are not finite, guessed and taken back, leaves nothing behind."""
    broken = 30
    table = any_decoder.embedding[...].at[broken].set(jnp.nan)
    decoder = jax.tree.map(lambda leaf: table if leaf.shape == table.shape else leaf, any_decoder)
    text = np.minimum(TOKEN_IDS, broken - 1)
    before = read(decoder, text[:, :7], LENGTHS, 12, 3)
    guesses = np.array(next_tokens(before, text, 3))
    right, _ = extend_logits(decoder, guesses, np.full(3, 3, np.int32), before)
    guesses[:, 1] = broken
    found, after = extend_logits(decoder, guesses, np.full(3, 3, np.int32), before)
    np.testing.assert_array_equal(found[:, 0, :broken], right[:, 0, :broken])
    assert np.isnan(found[:, 1]).all()
    assert np.isfinite(right[:, 1:, :broken]).all()
    back = after.rewind(jnp.full(3, 2, jnp.int32))
    again, _ = extend_logits(decoder, np.array(next_tokens(back, text, 3)), np.full(3, 2, np.int32), back)
    close(again[:, :2, :broken], right[:, 1:, :broken])


def test_room_for_guesses_is_no_more_than_they_take(windowed, unchecked):
    for chunk_size in (None, 5):
        options = {"capacity": 12, "chunk_size": chunk_size, "extend_size": 3}
        cache = jax.eval_shape(lambda *inputs, o=options: windowed.prefill(*inputs, **o), TOKEN_IDS, LENGTHS)
        assert cache.keys[0].shape[-1] == 4 + max(chunk_size or 1, 3) - 1


def test_inserted_rows_go_on_as_if_they_had_been_read_there(windowed):
    """Rows 2 and 0 of three prompts, read with fewer slots, into rows 0 and 1 of a cache in use."""
    cache = read(windowed, TOKEN_IDS[:, :7], LENGTHS, 12, 3)
    other = prefill(windowed, TOKEN_IDS[:, :8], np.array([6, 1, 8], np.int32), 8)
    cache = jax.jit(models.KVCache.insert, donate_argnums=0)(cache, jnp.array([1, 3, 0], jnp.int32), other)
    assert cache.lengths.tolist() == [8, 6, 3]
    rows = TOKEN_IDS[[2, 0, 2]]
    logits, _ = extend_logits(windowed, next_tokens(cache, rows, 3), np.full(3, 3, np.int32), cache)
    whole = full_logits(windowed, TOKEN_IDS)
    for row, (length, text) in enumerate(zip(cache.lengths, (2, 0, 2), strict=True)):
        close(logits[row], whole[text, length : length + 3])


def test_a_chunk_that_a_window_has_no_room_for_is_refused(windowed):
    cache = prefill(windowed, TOKEN_IDS, LENGTHS, 12)
    with pytest.raises(ValueError, match="at most chunk_size=1 tokens go into this cache at once, got 2"):
        windowed.extend(jnp.zeros((3, 2), jnp.int32), jnp.ones(3, jnp.int32), cache)


def test_later_tokens_do_not_reach_earlier_positions(decoder):
    changed = TOKEN_IDS.copy()
    changed[:, 8:] = (changed[:, 8:] + 1) % 31
    before, after = full_logits(decoder, TOKEN_IDS), full_logits(decoder, changed)
    np.testing.assert_array_equal(before[:, :8], after[:, :8])
    assert np.abs(before[:, 8:] - after[:, 8:]).min(axis=-1).max() > REORDER_TOLERANCE


def test_positions_matter(decoder):
    same = np.full((1, 6), 4, np.int32)
    same[0, 0] = 9
    logits = full_logits(decoder, same)[0]
    assert np.abs(np.diff(logits[1:], axis=0)).max(axis=-1).min() > 1e-3


def test_a_row_alone_equals_the_row_in_a_batch(decoder):
    together, cache = decode(decoder, TOKEN_IDS[:, 9], prefill(decoder, TOKEN_IDS, LENGTHS, 12))
    for row in range(3):
        alone = prefill(decoder, TOKEN_IDS[row : row + 1], LENGTHS[row : row + 1], 12)
        logits, alone = decode(decoder, TOKEN_IDS[row : row + 1, 9], alone)
        close(logits[0], together[row])
        end = LENGTHS[row] + 1
        close(alone.keys[1][0, :, :, :end], cache.keys[1][row, :, :, :end])


def test_a_full_row_changes_nothing_and_its_neighbours_go_on(decoder):
    lengths = np.array([12, 3, 12], np.int32)
    before = prefill(decoder, TOKEN_IDS, lengths, 12)
    logits, after = decode(decoder, TOKEN_IDS[:, 3], before)
    slots_last = [leaf.swapaxes(2, 3) for leaf in before.values], [leaf.swapaxes(2, 3) for leaf in after.values]
    for old, new in zip(before.keys + tuple(slots_last[0]), after.keys + tuple(slots_last[1]), strict=True):
        np.testing.assert_array_equal(old[::2], new[::2])
        np.testing.assert_array_equal(old[1][..., np.arange(12) != 3], new[1][..., np.arange(12) != 3])
        assert (old[1][..., 3] != new[1][..., 3]).any()
    assert after.lengths.tolist() == [12, 4, 12]
    close(logits[1], full_logits(decoder, TOKEN_IDS)[1, 3])


def test_cells_past_a_rows_length_are_never_read(decoder):
    junk = np.where(np.arange(12)[None] < LENGTHS[:, None], TOKEN_IDS, 2**31 - 1).astype(np.int32)
    run = jax.jit(lambda token_ids, lengths: decoder.hidden(token_ids, lengths))
    np.testing.assert_array_equal(run(TOKEN_IDS, LENGTHS), run(junk, LENGTHS))
    clean, dirty = prefill(decoder, TOKEN_IDS, LENGTHS, 12), prefill(decoder, junk, LENGTHS, 12)
    for one, other in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(one, other)


def test_prefill_refuses_a_capacity_below_its_columns(decoder):
    for capacity in (11, 33):
        with pytest.raises(ValueError, match=rf"capacity must be in \[12, 32\], .* got {capacity}"):
            decoder.prefill(jnp.asarray(TOKEN_IDS), jnp.asarray(LENGTHS), capacity=capacity)


def test_texts_beyond_the_models_length_and_none_at_all_are_refused(decoder):
    for columns in (0, 33):
        with pytest.raises(ValueError, match=f"1 to max_length=32 columns, got {columns}"):
            decoder.hidden(jnp.zeros((1, columns), jnp.int32))
    with pytest.raises(ValueError, match="chunk_size=0 is not supported, allowed: an integer >= 1"):
        decoder.prefill(jnp.asarray(TOKEN_IDS), jnp.asarray(LENGTHS), capacity=12, chunk_size=0)


def test_a_cache_as_long_as_the_model_is_right_to_its_last_position(decoder):
    token_ids = np.random.default_rng(4).integers(0, 31, (1, 32)).astype(np.int32)
    cache = prefill(decoder, token_ids[:, :30], np.array([30], np.int32), 32)
    logits, _ = decode_from(decoder, cache, token_ids, 2)
    close(logits[:, 0], full_logits(decoder, token_ids)[0, 30:])


def test_logits_are_hidden_times_head(decoder):
    hidden = jax.jit(lambda token_ids: decoder.hidden(token_ids))(TOKEN_IDS)
    close(full_logits(decoder, TOKEN_IDS), np.asarray(hidden) @ np.asarray(decoder.head).T)
    assert decoder.head is decoder.lm_head[...]
    assert (decoder.vocab_size, decoder.max_length) == (31, 32)


def test_gradient_equals_finite_differences_and_remat_keeps_it(decoder):
    weights = np.random.default_rng(5).standard_normal((3, 12, 16)).astype(np.float32)

    def loss(model, remat):
        again = rebuild(model, remat=remat)
        return jnp.sum(again.hidden(jnp.asarray(TOKEN_IDS)) * weights)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain, rematerialised = gradient(decoder, False), gradient(decoder, True)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(plain))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(rematerialised), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=REORDER_TOLERANCE * largest)
    check_slope(jax.jit(loss, static_argnums=1), decoder, plain)


def check_slope(loss, decoder, gradient):
    noise = np.random.default_rng(6)
    direction = jax.tree.map(lambda leaf: jnp.asarray(noise.standard_normal(leaf.shape), jnp.float32), decoder)
    moved = [
        loss(jax.tree.map(lambda leaf, step, size=size: leaf + size * step, decoder, direction), False)
        for size in (1e-3, -1e-3)
    ]
    slope = sum(np.vdot(*pair) for pair in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    # float32 differences of a step of 1e-3 hold about three digits.
    np.testing.assert_allclose((moved[0] - moved[1]) / 2e-3, slope, rtol=2e-2)


def rebuild(decoder, **changes):
    """The same parameters under a changed configuration."""
    config = dataclasses.replace(decoder.config, **changes)
    skeleton = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return jax.tree.unflatten(jax.tree.structure(skeleton), jax.tree.leaves(decoder))


def test_the_module_is_a_pytree_of_float_parameters_only(decoder):
    leaves = jax.tree.leaves(decoder)
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    config = decoder.config
    attention_size = 2 * 16 * 32 + 2 * 16 * 16 + 32 + 2 * 16 + 2 * 8
    layer_size = attention_size + 3 * 16 * 24 + 2 * 16
    assert sum(leaf.size for leaf in leaves) == 2 * 31 * 16 + config.num_layers * layer_size + 16


def test_random_weights_have_the_stated_spread():
    config = models.DecoderConfig(2000, 2, 64, 4, 2, 16, 256, 1e4, None, 1e-6, True)
    decoder = Decoder(config, rngs=nnx.Rngs(1))
    layer = decoder.layers[1]
    # 4 standard errors of a spread over 1e4 to 1e5 draws are below 3 %.
    for parameter, spread in [
        (decoder.embedding, 0.02),
        (layer.gate, 0.02),
        (layer.down, 0.02 / 2),
        (layer.output, 0.02 / 2),
    ]:
        np.testing.assert_allclose(np.std(parameter[...]), spread, rtol=0.05)
    assert (layer.mlp_norm[...] == 1).all()
    assert (layer.query[...] != decoder.layers[0].query[...]).all()
    assert decoder.head is decoder.embedding[...]


def test_bfloat16_computation_keeps_float32_weights(decoder):
    """Logits are those of bfloat16 weights; the gradient arrives in float32, at weights that stayed float32."""
    mixed = rebuild(decoder, compute_dtype="bfloat16")
    coarse = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), decoder)
    np.testing.assert_array_equal(full_logits(mixed, TOKEN_IDS), full_logits(coarse, TOKEN_IDS))
    assert mixed.head.dtype == jnp.bfloat16
    gradients = jax.jit(jax.grad(lambda model: model.logits(jnp.asarray(TOKEN_IDS)).sum()))(mixed)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    logits, cache = decode(mixed, TOKEN_IDS[:, 7], prefill(mixed, TOKEN_IDS, LENGTHS, 12))
    assert (logits.dtype, cache.keys[0].dtype) == (jnp.float32, jnp.bfloat16)


def test_bfloat16_weights_give_float32_logits_near_the_float32_ones(decoder):
    coarse = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), decoder)
    logits, cache = decode(coarse, TOKEN_IDS[:, 7], prefill(coarse, TOKEN_IDS, LENGTHS, 12))
    assert logits.dtype == jnp.float32
    assert cache.keys[0].dtype == jnp.bfloat16
    expected, _ = decode(decoder, TOKEN_IDS[:, 7], prefill(decoder, TOKEN_IDS, LENGTHS, 12))
    # bfloat16 keeps 8 bits; two layers lose a few more.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0.1 * np.abs(expected).max())


@pytest.mark.slow
def test_generate_reads_long_prompts_by_chunks(windowed):
    """The same tokens and supports as from prompts read at once, with guesses and groups too."""
    lengths = jnp.array([12, 5], jnp.int32)
    params = [jaxmask.SamplingParams(seed=seed, top_k=5, max_tokens=None) for seed in (1, 9)]
    batch = jaxmask.SamplingBatch.from_params(params, vocab_size=31, support_bound=5)
    run = functools.partial(
        jaxmask.generate, windowed, batch, jnp.asarray(TOKEN_IDS[:2]), lengths, max_new_tokens=6, width=5, group_size=2
    )
    at_once, by_chunks = run(), run(prefill_chunk_size=5, speculation=jaxmask.PromptLookup(num_tokens=2))
    np.testing.assert_array_equal(by_chunks.token_ids, at_once.token_ids)
    np.testing.assert_array_equal(by_chunks.support.token_ids, at_once.support.token_ids)
    close(by_chunks.logprobs, at_once.logprobs)
