"""Every kernel lowers to Triton for a GPU, here and now: no plugin, no card, nothing compiled.

Interpreted kernels, which the tests of each operation run, take shapes and primitives that Triton does not know.
`test_gpu_compile.py` sends the kernels through the compiler as well.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks.described_gpu import lower_for_gpu, triton_calls
from jaxmask import SamplingBatch, SamplingParams
from jaxmask.drawn import Plan
from jaxmask.kernels import triton
from jaxmask.kernels.compact import pallas_gpu as compact
from jaxmask.kernels.filter import api as filter_api
from jaxmask.kernels.head import api as head_api
from jaxmask.shards import Slice

# One id, fewer than a load of 16 bytes, a chunk less or more an id, rows without alignment, and a real vocabulary.
VOCAB_SIZES = (1, 7, 8, 9, 4095, 4097, 5003, 151_936)
# What Pallas lowers and XLA's Triton compiler then has no pattern for, as it stands in the kernel's bytes.
NOT_COMPILED = ("ctpop", "ctlz")


def compact_support(dtype, V):
    return lambda logits: compact.compact_support(logits, 64, has_bits=True), jax.ShapeDtypeStruct((3, V), dtype)


def draw(dtype, V):
    """Greedy, top-k and pure top-p rows; bits and ranks, so that every output is used."""
    params = [
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(top_k=5, seed=1),
        SamplingParams(top_p=0.5, seed=2),
    ]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    plan = Plan(min(V, 20), V > 20, "processed_logprobs", min(V, 3), True, Slice(V), "pallas_gpu")
    steps = jnp.zeros(3, jnp.int32)
    return lambda logits: filter_api.draw(logits, batch, steps, plan), jax.ShapeDtypeStruct((3, V), dtype)


def head_gradients(dtype, V):
    """One row of the head per token; V is as awkward a width as any."""
    width = min(V, 5003)
    cells = jnp.zeros(30, jnp.int32)
    rows = (jnp.array([0, 10, 11], jnp.int32), jnp.array([10, 1, 19], jnp.int32), jnp.zeros(3, jnp.int32), jnp.ones(3))

    def loss(hidden, head):
        scores = head_api.gathered_head(hidden, head, cells, *rows, implementation="pallas_gpu")
        return scores.logprobs.sum() + scores.entropy.sum() + scores.kept_logits.sum()

    return jax.grad(loss, argnums=(0, 1)), *(jax.ShapeDtypeStruct((size, width), dtype) for size in (3, 40))


# A function and its arguments, of a dtype and a vocabulary, and the kernels it calls.
CASES = {
    "compact": (compact_support, ["compact_pack", "compact_expand"]),
    "filter": (draw, ["filter_maxima", "filter_bound", "filter_candidates", "compact_expand", "filter_decide"]),
    "head": (head_gradients, ["head_scores", "head_d_hidden", "head_d_head"]),
}


def lowered(function, *arguments):
    """The text of a program; JAX has deprecated the backend since 0.11, and says so each time."""
    is_deprecated = jax.__version_info__ >= (0, 11)
    with pytest.warns(DeprecationWarning, match="Triton") if is_deprecated else contextlib.nullcontext():
        return lower_for_gpu(function, *arguments).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("case", CASES)
def test_lowers(case, vocab_size, dtype):
    make, kernels = CASES[case]
    text = lowered(*make(dtype, vocab_size))
    assert triton_calls(text) == kernels
    assert not [word for word in NOT_COMPILED if word in text]


def on_words(operation):
    """A program of one kernel that applies an operation to 128 words."""

    def kernel(words_ref, result_ref):
        cells = jnp.arange(128, dtype=jnp.int32)
        triton.store(result_ref.at[cells], operation(triton.load(words_ref.at[cells])))

    shape = jax.ShapeDtypeStruct((128,), jnp.uint32)
    call = {"name": "on_words", "grid": (1,), "num_warps": 1, "is_interpreted": False}
    return lambda words: triton.call(kernel, [shape], words, **call)[0], shape


def test_the_checks_see_what_they_look_for():
    assert triton_calls(lowered(*on_words(lambda words: words + jnp.uint32(1)))) == ["on_words"]
    assert "ctpop" in lowered(*on_words(jax.lax.population_count))
    assert "ctlz" in lowered(*on_words(jax.lax.clz))
    with pytest.raises(NotImplementedError, match="sort"):
        lowered(*on_words(jnp.sort))
    plain = lower_for_gpu(lambda x: x + 1, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert triton_calls(plain.as_text()) == []
