"""The learner's head on supports as rollouts have them, against what trainers do over the vocabulary.

python benchmarks/learner.py [--vocab 151936 ...] [--width 2048 ...] [--tokens 2048] [--rounds 3] [--only forward]
python benchmarks/learner.py --flat [--width 2048 ...]

    dense        logits [N, V] at once, masked log-softmax
    by tokens    the same in chunks of 256 tokens, recomputed in the backward pass (as Tunix and SkyRL do)
    by ids       log-softmax over the whole vocabulary in chunks of 8192 ids with a running maximum and sum, recomputed
                 (as cut cross-entropy does; no mask at all, which is less work)
    ours         `support_log_probs`

Supports hold 8 ids on average, 2 at the median, one for 46 % of all tokens, 82 at the 99th percentile. Forward; forward
and backward with a frozen head; the same with the head's gradient. Time as a ratio to ours, temporaries from the
compiler. `--flat` runs ours alone, at 32,768 and at 262,144 ids in turn: with supports from all over each vocabulary,
and with the small one's ids in the large head.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timed import support_sizes
from timing import in_turn

from jaxmask import Support, masked_log_probs, support_log_probs

TOKENS, IDS = 256, 8192


def dense(hidden: jax.Array, head: jax.Array, support: Support, token_ids: jax.Array) -> jax.Array:
    return masked_log_probs(hidden @ head.T, support, token_ids)


def by_tokens(hidden: jax.Array, head: jax.Array, support: Support, token_ids: jax.Array) -> jax.Array:
    @jax.checkpoint
    def score(part: tuple[jax.Array, Support, jax.Array]) -> jax.Array:
        return dense(part[0], head, part[1], part[2])

    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, TOKENS, *leaf.shape[1:]), (hidden, support, token_ids))
    return jax.lax.map(score, parts).reshape(-1)


def by_ids(hidden: jax.Array, head: jax.Array, support: Support, token_ids: jax.Array) -> jax.Array:
    num_chunks = -(-head.shape[0] // IDS)
    chunks = jnp.pad(head, ((0, num_chunks * IDS - head.shape[0]), (0, 0))).reshape(num_chunks, IDS, -1)
    ids = jnp.arange(num_chunks * IDS, dtype=jnp.int32).reshape(num_chunks, IDS)

    @jax.checkpoint
    def add(state: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]) -> Any:
        top, mass = state
        logits = jnp.where(chunk[1] < head.shape[0], hidden @ chunk[0].T, -jnp.inf)
        new_top = jax.lax.stop_gradient(jnp.maximum(top, logits.max(axis=1)))
        return (new_top, mass * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(axis=1)), None

    start = jnp.full(hidden.shape[0], -jnp.inf), jnp.zeros(hidden.shape[0])
    (top, mass), _ = jax.lax.scan(add, start, (chunks, ids))
    return (hidden * head[token_ids]).sum(axis=1) - top - jnp.log(mass)


RIVALS: dict[str, Callable[..., jax.Array]] = {
    "dense": dense,
    "by tokens": by_tokens,
    "by ids": by_ids,
    "ours": support_log_probs,
}


def inputs(vocab: int, width: int, num_tokens: int) -> tuple[jax.Array, jax.Array, Support, jax.Array]:
    rng = np.random.default_rng(0)
    sizes = rng.permutation(support_sizes(num_tokens))
    lists = [rng.choice(vocab, size, replace=False) for size in sizes]
    hidden = jnp.asarray(rng.normal(size=(num_tokens, width)).astype(np.float32))
    head = jax.random.normal(jax.random.key(0), (vocab, width)) / width**0.5
    token_ids = jnp.asarray(np.array([ids[0] for ids in lists], np.int32))
    print(f"V={vocab} D={width} N={num_tokens}, float32; ids per token: mean {sizes.mean():.1f}, ", end="")
    print(f"median {np.median(sizes):.0f}, {100 * (sizes == 1).mean():.0f} % ones, p99 {np.percentile(sizes, 99):.0f}")
    return hidden, head, Support.from_lists(lists, vocab), token_ids


def gradient(argnums: tuple[int, ...]) -> Callable[[Callable[..., jax.Array]], Any]:
    return lambda score: jax.grad(lambda *arrays: score(*arrays).sum(), argnums=argnums)


PASSES = {"forward": lambda score: score, "frozen head": gradient((0,)), "with d head": gradient((0, 1))}


def compare(vocab: int, width: int, num_tokens: int, rounds: int, only: str) -> None:
    arrays = inputs(vocab, width, num_tokens)
    for title, transform in PASSES.items():
        if not title.startswith(only):
            continue
        programs = {name: jax.jit(transform(score)).lower(*arrays).compile() for name, score in RIVALS.items()}
        times = in_turn({name: lambda p=program: p(*arrays) for name, program in programs.items()}, rounds)
        memory = {name: program.memory_analysis().temp_size_in_bytes / 2**20 for name, program in programs.items()}
        for name in programs:
            print(f"{title:12} {name:10} {times[name] / times['ours']:8.1f}x ({times[name]:9.1f} ms), ", end="")
            print(f"temporaries {memory[name]:8.1f} MiB", flush=True)
        best = min(times[name] for name in RIVALS if name != "ours") / times["ours"]
        print(f"{title:12} best rival {best:8.1f}x, dense has {memory['dense'] / memory['ours']:.0f}x our temporaries")


def flat(width: int, num_tokens: int, rounds: int) -> None:
    """Our time at two vocabularies, in turn; and that of the small one's very ids in the large head."""
    small, large = 32_768, 262_144
    cases = {str(vocab): inputs(vocab, width, num_tokens) for vocab in (small, large)}
    hidden, _, support, token_ids = cases[str(small)]
    same_ids = Support(support.token_ids, support.counts, None, large)
    cases["same ids"] = (hidden, cases[str(large)][1], same_ids, token_ids)
    for name in (str(small), str(large)):
        print(f"{len(np.unique(np.asarray(cases[name][2].token_ids))) - 1} different ids of {name}")
    for title, transform in PASSES.items():
        programs = {name: jax.jit(transform(support_log_probs)).lower(*case).compile() for name, case in cases.items()}
        times = in_turn({name: lambda n=name: programs[n](*cases[n]) for name in cases}, rounds)
        of_small = times[str(small)]
        print(f"{title:12} {large} / {small} ids: {times[str(large)] / of_small:.2f}x in time, ", end="")
        print(f"with the same ids {times['same ids'] / of_small:.2f}x ({of_small:.1f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[151_936])
    parser.add_argument("--width", type=int, nargs="+", default=[2048])
    parser.add_argument("--tokens", type=int, default=2048, help=f"a multiple of {TOKENS}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="passes whose name starts like this")
    parser.add_argument("--flat", action="store_true", help="ours alone, at two vocabularies")
    options = parser.parse_args()
    for width in options.width:
        if options.flat:
            flat(width, options.tokens, max(options.rounds, 15))
            continue
        for vocab in options.vocab:
            compare(vocab, width, options.tokens, options.rounds, options.only)


if __name__ == "__main__":
    main()
