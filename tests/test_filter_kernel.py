"""The filter kernels, run step by step on the CPU, against the plain path and the float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rows
import tolerances

from jaxmask import SamplingBatch, SamplingParams, sample
from jaxmask.drawn import Plan
from jaxmask.kernels import dispatch
from jaxmask.kernels.filter import api
from jaxmask.shards import Slice

INF = np.inf
SLOW = pytest.mark.slow


def both(logits, batch, **options):
    """What the plain path and the kernels draw."""
    return [
        sample(jnp.asarray(logits), batch, implementation=implementation, **options)
        for implementation in ("xla", "interpret")
    ]


def assert_alike(plain, kernel):
    """Bit for bit but for log-probabilities."""
    for (path, expected), found in zip(
        jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(kernel), strict=True
    ):
        expected, found = np.asarray(expected), np.asarray(found)
        if np.issubdtype(expected.dtype, np.floating):
            np.testing.assert_allclose(found, expected, atol=tolerances.LOGPROB, err_msg=str(path))
        else:
            np.testing.assert_array_equal(found, expected, err_msg=str(path))


def decided_by_kernel(logits, batch, width):
    """Which rows the kernels decide without a look at the whole row."""
    plan = Plan(width, False, "processed_logprobs", None, False, Slice(batch.vocab_size), "interpret")
    steps = jnp.zeros(batch.num_rows, jnp.int32)
    return np.asarray(api.draw(jnp.asarray(logits), batch, steps, plan)[1])


def every_kind(vocab_size, count, seed):
    """Rows of every kind, each under settings of its own out of the grid of all filters."""
    rng = np.random.default_rng([vocab_size, seed])
    params = [
        dataclasses.replace(request, temperature=request.temperature or 1.0) for request in rows.filter_grid(vocab_size)
    ]
    picked = [params[index] for index in rng.choice(len(params), count)]
    return rows.adversarial(rng, count, vocab_size), picked


@pytest.mark.parametrize(
    ("vocab_size", "width"),
    [
        (7, 3),
        pytest.param(4097, 64, marks=SLOW),
    ],
)
def test_the_kernels_draw_what_the_plain_path_draws(vocab_size, width):
    logits, params = every_kind(vocab_size, 180, 0)
    # Numbers that both dtypes hold.
    logits = jnp.asarray(logits).astype(jnp.bfloat16)
    batch = SamplingBatch.from_params(params, vocab_size=vocab_size)
    options = {"step": 3, "width": width, "num_logprobs": min(5, vocab_size), "return_support_logprobs": True}
    plain, kernel = both(logits.astype(jnp.float32), batch, **options)
    assert_alike(plain, kernel)
    truth = oracle.truth(np.asarray(logits.astype(jnp.float32)), params)
    counts = np.asarray(kernel.support.counts)
    is_returned = np.array([request.return_sampling_mask is not False for request in params])
    assert ((truth.low <= counts) & (counts <= truth.high))[is_returned].all()
    assert (counts[~is_returned] == 0).all()
    is_greedy = np.array([request.temperature == 0 for request in params]) & np.asarray(kernel.is_valid)
    np.testing.assert_array_equal(np.asarray(kernel.token_ids)[is_greedy], truth.order[is_greedy, 0])

    # bfloat16, read by other loads, so at rows that end within and past a block; `test_a_real_vocabulary` has the rest.
    if vocab_size not in (7, 5003):
        return
    # What falls back has nothing to do with kernels, and is left out.
    plan = Plan(width, width < vocab_size, "processed_logprobs", 0, False, Slice(vocab_size), "interpret")
    half, is_decided = jax.jit(lambda x: api.draw(x, batch, jnp.full(180, 3, jnp.int32), plan))(logits)
    is_seen = np.asarray(is_decided & plain.is_valid)
    assert is_seen.sum() > 40
    np.testing.assert_array_equal(np.asarray(half.token_ids)[is_seen], np.asarray(plain.token_ids)[is_seen])
    np.testing.assert_allclose(
        np.asarray(half.logprobs)[is_seen], np.asarray(plain.logprobs)[is_seen], atol=tolerances.LOGPROB
    )
    is_seen = is_seen & is_returned
    for name in ("token_ids", "counts", "packed"):
        found, expected = getattr(half.support, name), getattr(plain.support, name)
        assert (found is None) == (expected is None)
        if found is not None:
            np.testing.assert_array_equal(np.asarray(found)[is_seen], np.asarray(expected)[is_seen])


@pytest.mark.slow
def test_a_real_vocabulary():
    """In bfloat16; what the dtype changes are the loads."""
    logits, params = every_kind(151_936, 18, 1)
    logits = jnp.asarray(logits).astype(jnp.bfloat16)
    batch = SamplingBatch.from_params(params, vocab_size=151_936)
    assert_alike(*both(logits, batch, step=0, width=50, num_logprobs=2, return_support_logprobs=True))


# Rows of the four tests below, which share the programs: five, four, three and forty of them.
OVERFLOWING, TIED, AROUND, USUAL = slice(0, 5), slice(5, 9), slice(9, 12), slice(12, 52)
AROUND_WIDTH = (49, 50, 51)


@functools.cache
def special_rows():
    """Two draws of all rows with cells for 50, and which of them the kernels decide."""
    V, width = 5003, 50
    rng = np.random.default_rng(0)
    logits = np.tile(np.linspace(10, -10, V, dtype=np.float32), (52, 1))
    logits[1] = 0  # every token ties at the bound
    logits[3] = logits[3] * 0.01  # a nucleus of half the vocabulary
    params = [SamplingParams(top_k=16, seed=1)] * 3 + [SamplingParams(top_p=0.5, seed=1)] * 2
    logits[TIED] = -INF
    logits[TIED, 4090:4102] = 1
    logits[TIED, 5000] = 2
    logits[6:9:2, :4090] = -3e38
    params += [SamplingParams(top_k=top_k, seed=row) for row, top_k in enumerate((8, 8, 9, 9))]
    logits[AROUND] = rng.normal(size=(3, V))
    params += [SamplingParams(top_k=top_k, seed=5) for top_k in AROUND_WIDTH]
    logits[USUAL] = rng.normal(size=(40, V)) * 6
    settings = [
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.95},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 0.0, "return_sampling_mask": False},
    ]
    params += [SamplingParams(**settings[row % 5], seed=row) for row in range(40)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    return both(logits, batch, step=0, width=width), decided_by_kernel(logits, batch, width)


def some_special_rows(which):
    (plain, kernel), is_decided = special_rows()
    plain, kernel = (jax.tree.map(lambda leaf: leaf[which], drawn) for drawn in (plain, kernel))
    assert_alike(plain, kernel)
    return kernel, is_decided[which]


def test_the_kernels_decide_what_they_are_made_for():
    """Random rows of a language model's kind fall back never: the tests above do not pass by falling back."""
    _, is_decided = some_special_rows(USUAL)
    assert is_decided.all()


@pytest.mark.slow
def test_rows_that_overflow_fall_back_alone():
    kernel, is_decided = some_special_rows(OVERFLOWING)
    assert is_decided.tolist() == [True, False, True, False, False]
    assert kernel.support.counts[1] == 16
    assert kernel.support.to_lists()[1] == list(range(16))


@pytest.mark.slow
def test_ties_across_the_border_of_a_block():
    """Ids 4090 to 4101 tie at the top-k bound: the lower ids win, on either side of the border at 4096."""
    kernel, _ = some_special_rows(TIED)
    assert kernel.support.to_lists() == [[*range(4090, 4089 + top_k), 5000] for top_k in (8, 8, 9, 9)]


@pytest.mark.slow
def test_supports_around_the_width():
    """One id fewer than the cells, as many, and one more."""
    kernel, _ = some_special_rows(AROUND)
    assert tuple(kernel.support.counts.tolist()) == AROUND_WIDTH
    assert [len(ids) for ids in kernel.support.to_lists()] == list(AROUND_WIDTH)


@pytest.mark.slow
def test_a_padded_head_is_not_drawn_and_edits_come_before_the_kernels():
    """That the head is not copied either is seen in the compiled program (`test_gpu_compile.py`)."""
    logits = np.random.default_rng(0).normal(size=(5, 128)).astype(np.float32)
    logits[:, 100:] = 1e4
    params = [
        SamplingParams(top_k=5, seed=0),
        SamplingParams(seed=1),
        SamplingParams(top_p=0.99, seed=2),
        SamplingParams(top_k=4, seed=0, logit_bias={7: 50.0, 9: -50.0}, allowed_token_ids=[3, 7, 9, 80, 99]),
        SamplingParams(top_k=4, seed=1, min_tokens=2, stop_token_ids=[5]),
    ]
    batch = SamplingBatch.from_params(params, vocab_size=100)
    plain = sample(jnp.asarray(logits[:, :100]), batch, step=0, width=5, implementation="xla")
    kernel = sample(jnp.asarray(logits), batch, step=0, width=5, implementation="interpret")
    assert_alike(plain, kernel)
    assert kernel.support.to_lists()[3] == [3, 7, 80, 99]


@pytest.mark.parametrize(("vocab_size", "width"), [(300, 300), (100, 128)])
def test_vocabularies_that_fit_are_always_decided(vocab_size, width):
    """Also without any filter, and with a top-k that is as good as none."""
    logits = np.random.default_rng(0).normal(size=(3, vocab_size)).astype(np.float32)
    params = [SamplingParams(seed=0), SamplingParams(top_k=vocab_size, seed=1), SamplingParams(top_p=0.999, seed=2)]
    batch = SamplingBatch.from_params(params, vocab_size=vocab_size)
    assert decided_by_kernel(logits, batch, width).all()


@pytest.mark.slow
def test_under_vmap_and_scan():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 300)).astype(np.float32) * 3)
    batch = SamplingBatch.from_params(SamplingParams(n=2, top_k=6, top_p=0.9, seed=4), vocab_size=300)

    def draw(x):
        return sample(x, batch, step=0, width=6, implementation="interpret").support.token_ids

    alone = jnp.stack([draw(x) for x in logits])
    np.testing.assert_array_equal(jax.vmap(draw)(logits), alone)
    np.testing.assert_array_equal(jax.lax.scan(lambda _, x: (None, draw(x)), None, logits)[1], alone)


@pytest.mark.slow
def test_rows_over_devices():
    """Each device runs the kernels on its rows; a vocabulary that is cut takes the plain path."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32) * 4)
    batch = SamplingBatch.from_params(SamplingParams(n=4, top_k=8, top_p=0.9, seed=0), vocab_size=512)
    alone = sample(logits, batch, step=0, width=8)
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    over = sample(logits, batch, step=0, width=8, sharding=by_rows, implementation="interpret")
    assert_alike(alone, over)
    by_both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "tensor"))
    with pytest.raises(NotImplementedError, match=r"sample: .* the vocabulary is cut over devices"):
        sample(logits, batch, step=0, width=8, sharding=by_both, implementation="interpret")


def test_what_the_kernels_refuse():
    batch = SamplingBatch.from_params(SamplingParams(seed=0), vocab_size=9000)
    with pytest.raises(NotImplementedError, match="width or num_logprobs is 2049, and the kernels hold 2048"):
        sample(jnp.zeros((1, 9000)), batch, step=0, width=2049, implementation="pallas_gpu")
    names = ", ".join(dispatch.IMPLEMENTATIONS)
    with pytest.raises(ValueError, match=f"implementation must be one of {names}, got 'cuda'"):
        sample(jnp.zeros((1, 9000)), batch, step=0, width=8, implementation="cuda")
