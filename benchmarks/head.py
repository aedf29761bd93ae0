"""The learner's head: gathered rows of the supports against the dense masked log-softmax that trainers use.

python benchmarks/head.py [--vocab 151936] [--width 512] [--tokens 512] [--support 64]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from timing import in_turn

from jaxmask import Support, masked_log_probs, support_log_probs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--support", type=int, default=64, help="ids per token")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(options.tokens, options.width)).astype(np.float32))
    head = jnp.asarray(rng.normal(size=(options.vocab, options.width)).astype(np.float32) / options.width**0.5)
    ids = [rng.choice(options.vocab, options.support, replace=False) for _ in range(options.tokens)]
    support = Support.from_lists(ids, options.vocab)
    token_ids = jnp.asarray(np.array([row[0] for row in ids], np.int32))

    def dense(hidden, head):
        return masked_log_probs(hidden @ head.T, support, token_ids).sum()

    def gathered(hidden, head):
        return support_log_probs(hidden, head, support, token_ids).sum()

    print(f"V={options.vocab} D={options.width} N={options.tokens}, {options.support} ids per token, float32")
    for title, transform in (
        ("forward", jax.jit),
        ("forward + backward", lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1)))),
    ):
        programs = {name: transform(f) for name, f in (("dense", dense), ("gathered", gathered))}
        times = in_turn({name: lambda p=program: p(hidden, head) for name, program in programs.items()})
        memory = {
            name: program.lower(hidden, head).compile().memory_analysis().temp_size_in_bytes / 2**20
            for name, program in programs.items()
        }
        print(
            f"{title:20} dense / gathered: {times['dense'] / times['gathered']:6.1f}x in time "
            f"({times['dense']:.0f} / {times['gathered']:.0f} ms), "
            f"temporaries {memory['dense']:.0f} / {memory['gathered']:.0f} MiB"
        )


if __name__ == "__main__":
    main()
