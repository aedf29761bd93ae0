"""The learner's head on a mesh: rows and vocabulary over 1, 2, 4 and 8 devices give what one device gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmask import Reference, Support, full_scores, support_log_probs, support_scores

# Neither divides by the meshes' sizes; one support is wider than its cells, one has a single id, one is empty.
N, V, D, W = 13, 101, 6, 5
SIZES = [3, 1, 0, 40, 5, 2, 4, 5, 1, 2, 3, 5, 4]
# Every program takes seconds to compile; (2, 4) is below, with the kernel.
MESHES = [(1, 2), (2, 2), (1, 8), (8, 1)]


def f32(x):
    return jnp.asarray(np.asarray(x, np.float32))


@functools.cache
def case():
    rng = np.random.default_rng(0)
    lists = [np.sort(rng.permutation(V)[:size]).tolist() for size in SIZES]
    token_ids = np.array([rng.choice(ids) if ids else 0 for ids in lists], np.int32)
    states = {name: rng.normal(size=shape) for name, shape in (("hidden", (N, D)), ("head", (V, D)))}
    ref = {name: value + 0.2 * rng.normal(size=value.shape) for name, value in states.items()}
    return states, ref, lists, token_ids, rng.uniform(0.5, 2, N), rng.normal(size=(3, N))


def total(hidden, head, weights, sharding=None, implementation="xla"):
    """A sum of everything that is scored, on cells, on wide rows and on the vocabulary; and the scores."""
    _, ref, lists, token_ids, temperatures, _ = case()
    reference = Reference(f32(ref["hidden"]), f32(ref["head"]))
    support = Support.from_lists(lists, V, width=W)
    options = {"temperature": f32(temperatures), "reference": reference, "sharding": sharding, "logit_softcap": 3.0}
    arguments = hidden, head, support, jnp.asarray(token_ids)
    kept = support_scores(*arguments, return_id_logprobs=True, implementation=implementation, **options)
    full = full_scores(hidden, head, jnp.asarray(token_ids), **options)
    value = 0.0
    for scores in (kept, full):
        found = jnp.where(jnp.isfinite(scores.logprobs), scores.logprobs, 0.0), scores.entropy, scores.kl
        value += sum((weight * part).sum() for weight, part in zip(weights, found, strict=True))
    return value, (kept, full)


@functools.cache
def program(sharding=None, implementation="xla"):
    run = functools.partial(total, sharding=sharding, implementation=implementation)
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))


def arrays():
    states, *_, weights = case()
    return f32(states["hidden"]), f32(states["head"]), f32(weights)


def assert_alike(found, expected):
    (value, scores), gradients = found
    (right_value, right_scores), right_gradients = expected
    np.testing.assert_allclose(value, right_value, rtol=tolerances.LOGPROB)
    for one, other in zip(jax.tree.leaves(scores), jax.tree.leaves(right_scores), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerances.LOGPROB, atol=tolerances.LOGPROB)
    for one, other in zip(gradients, right_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerances.GRADIENT * np.abs(other).max())


def test_one_device_is_the_oracle():
    """Values in float64, by formulas over the whole vocabulary; gradients by differences of them."""
    states, ref, lists, token_ids, temperatures, weights = case()
    keep = np.zeros((N, V), bool)
    for row, ids in zip(keep, lists, strict=True):
        row[ids] = True

    def capped(hidden, head):
        return 3 * np.tanh(hidden @ head.T / 3)

    def scores_of(hidden, head, keep):
        # An empty support: all numbers of its row are 0, and its weight here is nothing.
        some = np.where(keep.any(axis=1, keepdims=True), keep, True)
        logits, ref_logits = capped(hidden, head), capped(ref["hidden"], ref["head"])
        lp, ref_lp = (oracle.log_probs(x, some, temperatures) for x in (logits, ref_logits))
        p = np.exp(lp)
        kl = np.where(some, p * (np.where(some, lp, 0) - np.where(some, ref_lp, 0)), 0).sum(axis=1)
        logprobs = np.take_along_axis(lp, token_ids[:, None], axis=1)[:, 0]
        has_ids = keep.any(axis=1)
        return [np.where(has_ids, x, 0) for x in (logprobs, oracle.entropy(logits, some, temperatures), kl)]

    def value(hidden, head):
        found = scores_of(hidden, head, keep), scores_of(hidden, head, np.ones_like(keep))
        return sum((weights * np.stack(parts)).sum() for parts in found)

    (found, (kept, full)), gradients = program()(*arrays())
    for scores, right in ((kept, scores_of(*states.values(), keep)), (full, scores_of(*states.values(), keep | True))):
        for one, other in zip((scores.logprobs, scores.entropy, scores.kl), right, strict=True):
            np.testing.assert_allclose(np.where(np.isfinite(one), one, 0), other, atol=tolerances.LOGPROB)
    assert kept.logprobs[2] == -jnp.inf
    np.testing.assert_allclose(found, value(*states.values()), rtol=tolerances.LOGPROB)
    rng, step = np.random.default_rng(1), 1e-5
    for _ in range(3):
        move = {name: rng.normal(size=array.shape) for name, array in states.items()}
        ends = [value(*(states[name] + sign * step * move[name] for name in states)) for sign in (1, -1)]
        slope = sum(
            (np.asarray(gradient, np.float64) * move[name]).sum()
            for gradient, name in zip(gradients, states, strict=True)
        )
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=tolerances.GRADIENT, atol=1e-4)


@pytest.mark.parametrize("sizes", MESHES)
def test_every_cut_scores_as_one_device(sizes):
    mesh = jax.make_mesh(sizes, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    assert_alike(program(NamedSharding(mesh, P("data", "tensor")))(*arrays()), program()(*arrays()))


def test_the_kernel_on_slices():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    cut = program(NamedSharding(mesh, P("data", "tensor")), "interpret")(*arrays())
    assert_alike(cut, program()(*arrays()))


def test_the_head_and_the_logits_stay_where_they_are():
    """One sum of kept columns [N, W] crosses devices; no program gathers the head."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    support = Support.from_lists([[1, 2, 3]] * 8, 104)
    on = functools.partial(NamedSharding, mesh)

    @functools.partial(jax.jit, out_shardings=(on(P("data")), on(P("tensor"))))
    def score(hidden, head):
        def summed(hidden, head):
            ids = jnp.ones(8, jnp.int32)
            return support_log_probs(hidden, head, support, ids, sharding=P("data", "tensor")).sum()

        return jax.grad(summed, argnums=(0, 1))(hidden, head)

    with jax.set_mesh(mesh):
        placed = (jax.ShapeDtypeStruct((8, D), jnp.float32, sharding=on(P("data"))),)
        placed += (jax.ShapeDtypeStruct((104, D), jnp.float32, sharding=on(P("tensor"))),)
        text = score.lower(*placed).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    assert f"f32[104,{D}]" not in text


def test_placed_arrays_say_themselves_how_they_lie():
    hidden, head, _ = arrays()
    lists, token_ids = case()[2], jnp.asarray(case()[3])
    support = Support.from_lists(lists, V, width=W)
    mesh = jax.make_mesh((2, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = Support.from_lists(lists[:12], V, width=W)
    placed = jax.device_put(hidden[:12], NamedSharding(mesh, P("data"))), jax.device_put(head, NamedSharding(mesh, P()))
    found = support_log_probs(*placed, rows, token_ids[:12])
    expected = jax.jit(support_log_probs)(hidden, head, support, token_ids)[:12]
    np.testing.assert_allclose(found, expected, atol=tolerances.LOGPROB)
    assert len(found.sharding.device_set) == 2


@pytest.mark.parametrize(("width", "cut"), [(W, P()), (3, P("data"))])
def test_on_a_mesh_of_explicit_axes(width, cut):
    """Rows in two leading axes; supports that lie like the rows, or everywhere; some wider than 3 cells."""
    hidden, head, _ = arrays()
    hidden, head = hidden[:12].reshape(4, 3, D), head[:100]
    lists = [[token_id for token_id in ids if token_id < 100][:5] or [0] for ids in case()[2][:12]]
    support = Support.from_lists(lists, 100, width=width).reshape(4, 3)
    token_ids = jnp.array([ids[0] for ids in lists], jnp.int32).reshape(4, 3)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def total(hidden, head, support, token_ids):
        scores = support_scores(hidden, head, support, token_ids, reference=Reference(2 * hidden, head))
        return scores.logprobs.sum() + scores.kl.sum()

    right = total(hidden, head, support, token_ids)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    on = [NamedSharding(mesh, spec) for spec in (P("data"), P("tensor"), cut, cut)]
    with jax.set_mesh(mesh):
        placed = jax.sharding.reshard((hidden, head, support, token_ids), tuple(on))
        found = total(*placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerances.LOGPROB, atol=tolerances.GRADIENT)


def test_inside_shard_map_a_slice_of_the_head_is_refused():
    hidden, *_ = arrays()
    support = Support.from_lists([[1, 2]] * N, V)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))

    def piece(head):
        return support_log_probs(hidden, head, support, jnp.ones(N, jnp.int32), sharding=P(None, "tensor"))

    on_mesh = jax.shard_map(piece, mesh=mesh, in_specs=P("tensor"), out_specs=P(), check_vma=False)
    with pytest.raises(NotImplementedError, match="manual axes: inside shard_map"):
        on_mesh(jnp.ones((2 * V, D)))
