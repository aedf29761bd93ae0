"""The experiment of docs/experiments/keep_sampling_mask.md: what does it change to keep the sampling mask?

python benchmarks/keep_sampling_mask.py [--iterations 500] [--seeds 6] [--folder runs/keep_sampling_mask]
    [--picture docs/images/keep_sampling_mask.png]

A small decoder learns to sort five digits, with four updates on each rollout, in these arms:

    supports         truncated by top-p, scored on the recorded supports
    full             truncated by top-p, scored over the whole vocabulary
    full-tis         the same with truncated importance sampling, cap 2
    no-truncation    not truncated, so that both scorings are the same
    supports-uneven  `supports` at top-p 0.8, clipped between 1 - 0.06 and 1 + 0.41

The first three with top-p 0.8 and 0.9. Runs of one seed start from the same weights and see the same prompts. Each run
is kept as a file of JSON lines: first its settings, then an iteration a line; a run whose file is there is not run
again, so an interrupted experiment goes on. At the end tables are printed and the picture is drawn.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keep_sampling_mask_report as report
import numpy as np
from flax import nnx

import models
from jaxmask import SamplingBatch, generate
from train import GRPOConfig, init_state, make_optimizer, train_iteration
from train.build import tiny_shape
from train.tasks import Prompts, SortDigits

ROOT = Path(__file__).parents[1]
NUM_DIGITS, VOCAB = 5, 11
EVALUATE_EVERY, NUM_HELD_OUT = 25, 256
# The rows of one held-out prompt: as the run samples, from the whole policy, and its most likely ids.
MODES = ("own", "whole", "greedy")
# Prompts whose digits sum to a multiple of this are held out.
HELD_OUT = 8


@dataclasses.dataclass(frozen=True)
class Sorting(SortDigits):
    """`SortDigits`, whose training prompts never are held-out ones."""

    def prompts(self, key: jax.Array, num: int) -> Prompts:
        found = super().prompts(key, num)
        digits, last = found.token_ids[:, : self.num_digits], self.num_digits - 1
        # One digit moves on by one, or from 9 to 0: the sum changes by 1 or by -9, and 8 divides it no longer.
        moved = digits.at[:, last].set((digits[:, last] + 1) % 10)
        digits = jnp.where(is_held_out(digits)[:, None], moved, digits)
        return dataclasses.replace(found, token_ids=found.token_ids.at[:, : self.num_digits].set(digits))

    def held_out(self, num: int) -> Prompts:
        """The same for all runs."""
        # One in eight is held out; enough are drawn to find `num`, whatever the key.
        drawn = super().prompts(jax.random.key(0), 16 * num)
        chosen = np.flatnonzero(is_held_out(drawn.token_ids[:, : self.num_digits]))[:num]
        return Prompts(drawn.token_ids[chosen], drawn.lengths[chosen])


def is_held_out(digits: jax.Array) -> jax.Array:
    return digits.sum(axis=1) % HELD_OUT == 0


TASK = Sorting(NUM_DIGITS)


def arms(iterations: int) -> dict[tuple[str, float], GRPOConfig]:
    """The iteration of each arm and top-p."""
    config = GRPOConfig(
        num_prompts=16,
        group_size=8,
        max_new_tokens=NUM_DIGITS,
        # All ids: top-p alone truncates.
        top_k=VOCAB,
        num_updates=4,
        learning_rate=3e-4,
        schedule="cosine",
        warmup_iterations=min(20, iterations // 2),
    )
    found = {("no-truncation", 1.0): dataclasses.replace(config, top_p=1.0)}
    for top_p in report.TOP_P:
        kept = dataclasses.replace(config, top_p=top_p)
        found["supports", top_p] = kept
        found["full", top_p] = dataclasses.replace(kept, sampling_mask=False)
        found["full-tis", top_p] = dataclasses.replace(kept, sampling_mask=False, tis_cap=2.0)
    # Asked after the others were seen: 0.8 / S and 1.2 / S at the mean S = 0.853 of `full` at top-p 0.8.
    found["supports-uneven", 0.8] = dataclasses.replace(
        found["supports", 0.8], clip_epsilon=0.06, clip_epsilon_high=0.41
    )
    return found


def decoder(seed: int) -> models.Decoder:
    """That of `sort-tiny`, in the order of sums that is fastest."""
    return models.Decoder(tiny_shape(VOCAB, fixed_order=False), rngs=nnx.Rngs(seed))


def held_out_batch(config: GRPOConfig) -> SamplingBatch:
    """A row for each mode of each held-out prompt; top-k 1 is greedy with a support."""
    own = config.sampling_params()
    modes = {
        "own": own,
        "whole": dataclasses.replace(own, top_p=1.0),
        "greedy": dataclasses.replace(own, top_p=1.0, top_k=1),
    }
    params = [
        dataclasses.replace(modes[mode], seed=len(MODES) * row + place)
        for row in range(NUM_HELD_OUT)
        for place, mode in enumerate(MODES)
    ]
    return SamplingBatch.from_params(params, vocab_size=VOCAB, support_bound=VOCAB)


@jax.jit
def evaluate(model: models.Decoder, batch: SamplingBatch, prompts: Prompts) -> dict[str, jax.Array]:
    """Exact answers of each mode; of the rows sampled as the run samples, what lies under truncation."""
    rollout = generate(
        model,
        batch,
        prompts.token_ids,
        prompts.lengths,
        max_new_tokens=NUM_DIGITS,
        width=VOCAB,
        group_size=len(MODES),
    )
    exact = TASK.score(rollout).is_exact.reshape(NUM_HELD_OUT, len(MODES)).mean(axis=0, dtype=jnp.float32)
    own_ids, recorded = rollout.token_ids[:: len(MODES)], rollout.logprobs[:: len(MODES)]
    # Prompts have one length, so completions begin in one column.
    joined = jnp.concatenate([prompts.token_ids, own_ids], axis=1)[:, :-1]
    logprobs = jax.nn.log_softmax(model.logits(joined)[:, prompts.token_ids.shape[1] - 1 :])
    chosen = jnp.take_along_axis(logprobs, own_ids[..., None], axis=2)[..., 0]
    return {
        **{f"exact/{mode}": exact[place] for place, mode in enumerate(MODES)},
        "vocabulary_entropy": -(jnp.exp(logprobs) * logprobs).sum(axis=2).mean(),
        "kept_mass": jnp.exp(chosen - recorded).mean(),
        "one_id_share": (rollout.support.counts[:: len(MODES)] == 1).mean(dtype=jnp.float32),
    }


@functools.cache
def optimizer_of(iterations: int) -> Any:
    """One object for all arms and seeds, which it is static to; their schedules are the same."""
    return make_optimizer(arms(iterations)["no-truncation", 1.0], iterations)


def run(config: GRPOConfig, iterations: int, seed: int) -> list[dict[str, float]]:
    """The metrics of every iteration, with those of held-out prompts after each `EVALUATE_EVERY` and the last."""
    optimizer, prompts, batch = optimizer_of(iterations), TASK.held_out(NUM_HELD_OUT), held_out_batch(config)
    state = init_state(decoder(seed), optimizer, seed)
    rows = []
    for step in range(1, iterations + 1):
        state, metrics = train_iteration(state, task=TASK, config=config, optimizer=optimizer)
        row = {name: getattr(metrics, name) for name in report.TRAINING}
        if step % EVALUATE_EVERY == 0 or step == iterations:
            row |= evaluate(state.model, batch, prompts)
        rows.append(row)
    return [{name: float(value) for name, value in row.items()} for row in jax.device_get(rows)]


def settings(config: GRPOConfig, iterations: int, seed: int) -> dict[str, Any]:
    return {"seed": seed, "iterations": iterations, "digits": NUM_DIGITS, "grpo": dataclasses.asdict(config)}


def kept_run(path: Path, config: GRPOConfig, iterations: int, seed: int) -> list[dict[str, float]]:
    """The run that the file holds; where it holds none of these settings, it is run and written whole."""
    wanted = settings(config, iterations, seed)
    if path.exists():
        first, *rows = map(json.loads, path.read_text().splitlines())
        if first == wanted and len(rows) == iterations:
            return rows
    begun = time.perf_counter()
    rows = run(config, iterations, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text("".join(json.dumps(row) + "\n" for row in [wanted, *rows]))
    half.replace(path)
    print(f"{path.name}: reward {rows[-1]['reward']:.3f}, {time.perf_counter() - begun:.0f} s", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/keep_sampling_mask")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/keep_sampling_mask.png")
    args = parser.parse_args(arguments)
    found: report.Results = {}
    # Arms within seeds, so that an experiment cut short has whole pairs.
    for seed in range(args.seeds):
        for (arm, top_p), config in arms(args.iterations).items():
            path = args.folder / f"{args.iterations}" / f"{arm}-{top_p}-{seed}.jsonl"
            found.setdefault((arm, top_p), []).append(kept_run(path, config, args.iterations, seed))
    print(report.tables(found))
    report.plot(found, args.picture)


if __name__ == "__main__":
    main()
