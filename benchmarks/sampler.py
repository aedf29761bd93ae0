"""The sampler with supports against samplers written on `lax.top_k` and on a sort of the vocabulary.

python benchmarks/sampler.py [--vocab 151936] [--rows 1 8]
"""

import argparse
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from timing import in_turn

from jaxmask import SamplingBatch, SamplingParams, sample

TOP_K, TOP_P = 50, 0.95


@jax.jit
def on_top_k(logits, key):
    """Top-k by `lax.top_k`, top-p by a running sum over the k; returns no support."""
    values, ids = jax.lax.top_k(logits, TOP_K)
    return _draw_nucleus(values, ids, key)


@jax.jit
def on_sort(logits, key):
    """Top-p by an argsort of the row, as when there is no top-k; returns no support."""
    ids = jnp.argsort(-logits, axis=-1)
    return _draw_nucleus(jnp.take_along_axis(logits, ids, axis=-1), ids, key)


def _draw_nucleus(values, ids, key):
    probabilities = jax.nn.softmax(values, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    winner = jax.random.categorical(key, jnp.where(before < TOP_P, values, -jnp.inf), axis=-1)
    return jnp.take_along_axis(ids, winner[:, None], axis=-1)[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    key = jax.random.key(0)
    print(f"V={options.vocab}, float32, normal logits of deviation 3; rival / ours, supports included in ours")
    for num_rows in options.rows:
        rng = np.random.default_rng(0)
        logits = jnp.asarray(rng.normal(size=(num_rows, options.vocab)).astype(np.float32) * 3)
        for title, rival, params, bound in (
            (f"top-k {TOP_K} + top-p {TOP_P} vs lax.top_k", on_top_k, SamplingParams(top_k=TOP_K, top_p=TOP_P), TOP_K),
            (f"top-p {TOP_P} vs argsort", on_sort, SamplingParams(top_p=TOP_P), None),
        ):
            batch = SamplingBatch.from_params([params] * num_rows, vocab_size=options.vocab, support_bound=bound)
            ours = jax.jit(lambda logits, batch: sample(logits, batch, step=0, width=64))
            times = in_turn(
                {
                    "rival": lambda r=rival, x=logits: r(x, key),
                    "ours": lambda o=ours, x=logits, b=batch: o(x, b),
                }
            )
            ratio = times["rival"] / times["ours"]
            print(f"B={num_rows:3}  {title:38} {ratio:6.1f}x  ({times['rival']:.1f} / {times['ours']:.1f} ms)")


if __name__ == "__main__":
    main()
