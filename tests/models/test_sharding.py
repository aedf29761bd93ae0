"""Decoders cut over meshes of 1, 2, 4 and 8 devices: the same numbers, and only what must crosses devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import models
from jaxmask import SamplingBatch, SamplingParams, generate
from models.sharding import MeshRules, make_mesh

# Sums over heads, MLP and width are cut and added up in another order; logits are of order 1 to 10.
REORDER_TOLERANCE = 2e-5
MESHES = ({"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
NUM_ROWS, WIDTH = 8, 20
TOKEN_IDS = jnp.asarray(np.random.default_rng(0).integers(0, 512, (NUM_ROWS, 12)), jnp.int32)
LENGTHS = jnp.asarray([12, 5, 3, 9, 1, 12, 7, 2], jnp.int32)
BATCH = SamplingBatch.from_params(
    [SamplingParams(top_k=WIDTH, seed=row, max_tokens=6) for row in range(NUM_ROWS)],
    vocab_size=512,
    support_bound=WIDTH,
)


def on_mesh(decoder, sizes):
    return models.shard(decoder, MeshRules(make_mesh(**sizes)))


@pytest.fixture(scope="module")
def qwen3(tiny):
    return tiny("tiny_qwen3")


@pytest.fixture(scope="module")
def gemma3(tiny):
    return tiny("tiny_gemma3")


@jax.jit
def continue_greedily(decoder):
    """Tokens and logits of each step, two rows of a group to a prompt."""

    def step(state, _):
        logits, cache = decoder.decode(*state)
        return (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache), logits

    last_ids = jnp.take_along_axis(TOKEN_IDS, LENGTHS[:, None] - 1, axis=1)[:, 0]
    cache = decoder.prefill(TOKEN_IDS, LENGTHS - 1, capacity=12).repeat(2, capacity=6)
    (last_ids, _), logits = jax.lax.scan(step, (jnp.repeat(last_ids, 2), cache), length=6)
    return logits


@pytest.mark.parametrize("sizes", MESHES)
def test_greedy_tokens_are_the_same_on_every_mesh(sizes, qwen3):
    found, expected = continue_greedily(on_mesh(qwen3, sizes)), continue_greedily(qwen3)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=REORDER_TOLERANCE)


@pytest.mark.slow
def test_a_rollout_finds_the_sharding_of_the_logits_by_itself(qwen3):
    options = {"max_new_tokens": 6, "width": WIDTH, "group_size": 2}
    expected = generate(qwen3, BATCH, TOKEN_IDS, LENGTHS, **options)
    found = generate(on_mesh(qwen3, MESHES[-1]), BATCH, TOKEN_IDS, LENGTHS, **options)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.support.token_ids, expected.support.token_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=REORDER_TOLERANCE)


def test_one_key_value_head_and_windows_too(gemma3):
    """Gemma's single key-value head cannot be cut over `tensor`: it lies whole, all else is cut."""
    run = jax.jit(lambda decoder, ids, lengths: decoder.logits(ids, lengths))
    placed = on_mesh(gemma3, {"data": 2, "fsdp": 2, "tensor": 2})
    assert placed.layers[0].key[...].sharding.spec == P(None, "fsdp")
    assert placed.layers[0].query[...].sharding.spec == P("tensor", "fsdp")
    assert placed.embedding[...].sharding.spec == P("tensor", "fsdp")
    found = run(placed, TOKEN_IDS, LENGTHS)
    assert found.sharding.spec == P(("data", "fsdp"), None, "tensor")
    is_token = np.arange(12)[None] < np.asarray(LENGTHS)[:, None]
    alone = run(gemma3, TOKEN_IDS, LENGTHS)
    np.testing.assert_allclose(np.asarray(found)[is_token], np.asarray(alone)[is_token], rtol=0, atol=REORDER_TOLERANCE)


def test_a_decode_step_moves_weights_and_sums_alone(qwen3, unchecked):
    """Weights are gathered over `fsdp`; over `tensor` there is one sum for the embedding and two for each layer."""
    placed = on_mesh(qwen3, {"fsdp": 4, "tensor": 2})
    cache = jax.eval_shape(lambda decoder: decoder.prefill(TOKEN_IDS, LENGTHS, capacity=20), placed)
    program = jax.jit(lambda decoder, ids, cache: decoder.decode(ids, cache)).lower(placed, TOKEN_IDS[:, 0], cache)
    text = program.compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    weights = {",".join(map(str, gathered_shape(leaf))) for leaf in jax.tree.leaves(placed) if leaf.ndim == 2}
    assert gathered
    assert set(gathered) <= weights
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1 + 2 * qwen3.config.num_layers
    assert not re.findall(r" (?:all-to-all|collective-permute)\(", text)


def gathered_shape(weight):
    """Of a device's piece of a weight once it is no longer cut over `fsdp`."""
    sharding = weight.sharding
    spec = P(*(None if axes in ("fsdp", ("fsdp",)) else axes for axes in sharding.spec))
    return NamedSharding(sharding.mesh, spec).shard_shape(weight.shape)


def test_rules_pass_over_what_does_not_divide():
    rules = MeshRules(make_mesh(data=2, fsdp=2, tensor=2))
    assert rules.spec(("batch", None, "vocab"), (8, 3, 31)) == P(("data", "fsdp"), None, None)
    assert rules.spec(("batch", "width"), (6, 16)) == P(None, ("fsdp",))
    assert rules.logits(512).spec == P(("data", "fsdp"), ("tensor",))
    assert MeshRules(make_mesh(tensor=2)).logits(512).spec == P(None, ("tensor",))


def test_rules_can_be_changed(gemma3):
    rules = MeshRules(make_mesh(data=2), rules=(("batch", ("data",)), ("mlp", ("data",))))
    placed = models.shard(gemma3, rules)
    assert placed.layers[0].gate[...].sharding.spec == P(("data",), None)
    assert placed.layers[0].query[...].sharding.spec == P(None, None)


def test_sharding_leaves_the_callers_decoder_alone_and_can_be_undone(qwen3):
    placed = on_mesh(qwen3, {"tensor": 2})
    assert qwen3.rules is None
    assert qwen3.logits_sharding is None
    assert placed.logits_sharding.spec == P(None, ("tensor",))
    back = models.shard(placed, None)
    assert back.rules is None
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(qwen3), strict=True):
        assert len(one.devices()) == 1
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 0}, "data=0 is not supported, allowed: an integer >= 1"),
        ({"tensor": 2.0}, "tensor=2.0"),
        ({"data": 4, "tensor": 4}, "needs 16 devices, there are 8"),
    ],
)
def test_impossible_meshes_are_refused(sizes, message, unchecked):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


def test_explicit_meshes_are_refused():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match="a mesh of automatic axes"):
        MeshRules(mesh)


def test_jnp_arrays_of_any_rank_are_constrained(qwen3):
    rules = MeshRules(make_mesh(data=2, tensor=2))
    placed = jax.jit(lambda x: rules.constrain(x, "batch", None, "heads"))(jnp.zeros((4, 3, 6, 5)))
    assert placed.sharding.spec == P("data", None, "tensor")
