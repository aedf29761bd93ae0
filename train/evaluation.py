"""How many held-out prompts a policy answers right: greedily, and within k draws."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from jaxmask import Rollout
from models import Decoder
from train import processes
from train.config import GRPOConfig
from train.loop import completions_of, make_prompts, score_on_device
from train.rollouts import completed
from train.run_config import EvaluationConfig
from train.tasks import DeviceTask, HostTask, Prompts

# No iteration has this number, so no training prompt or seed comes from its key.
HELD_OUT = 2**32 - 1


@functools.partial(jax.jit, static_argnames=("config", "group_size", "is_greedy", "vocab_size", "eos_token_ids"))
def complete(
    model: Decoder,
    prompts: Prompts,
    key: Key[Array, ""],
    *,
    config: GRPOConfig,
    group_size: int,
    is_greedy: bool,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> Rollout:
    """`group_size` completions of each prompt without their supports, greedy or as the config samples."""
    params = dataclasses.replace(config.sampling_params(), return_sampling_mask=False)
    if is_greedy:
        params = dataclasses.replace(params, temperature=0.0)
    options: dict[str, Any] = {"config": config, "vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
    return completed(model, key, prompts, params, group_size=group_size, **options)


def evaluate(
    model: Decoder, task: DeviceTask | HostTask, config: GRPOConfig, evaluation: EvaluationConfig, key: Key[Array, ""]
) -> dict[str, float]:
    """Shares of right answers on held-out prompts, by their names in files.

    "eval/greedy" is that of greedy completions, "eval/pass@k", for 1, 2, 4, ... up to `eval_samples`, that of prompts
    of which one of k sampled completions is right (see `pass_at_k`). Prompts and seeds are the same at each evaluation.

    Args:
      model: the policy.
      task: has the held-out prompts.
      config: sampling settings and shapes; no batch has more rows than a rollout, or than the samples of one prompt.
      evaluation: how many prompts and samples.
      key: root of the run.
    """
    key = jax.random.fold_in(key, HELD_OUT)
    # Far from the numbers of rows, so that prompts and seeds share no key.
    prompts, score = _held_out(task, jax.random.fold_in(key, HELD_OUT), evaluation.eval_prompts)
    run = functools.partial(
        complete, model, config=config, vocab_size=task.vocab_size, eos_token_ids=task.eos_token_ids
    )

    def right_answers(group_size: int, is_greedy: bool) -> np.ndarray:
        found = []
        for rows, block in _blocks(prompts, max(1, config.num_rows // group_size)):
            placed = processes.to_devices(block, model.rules)
            rollout = run(placed, jax.random.fold_in(key, rows[0]), group_size=group_size, is_greedy=is_greedy)
            found.append(score(rollout, rows, group_size)[: len(rows)])
        return np.concatenate(found)

    results = {"eval/greedy": float(right_answers(1, True).mean())}
    num = evaluation.eval_samples
    if num:
        correct = right_answers(num, False).sum(axis=1)
        sizes = [2**power for power in range(int(math.log2(num)) + 1)]
        results |= {f"eval/pass@{k}": float(np.mean([pass_at_k(num, int(c), k) for c in correct])) for k in sizes}
    return results


def pass_at_k(num: int, num_correct: int, k: int) -> float:
    """Chance that k of `num` samples, drawn without replacement, hold a right one: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


Score = Callable[[Rollout, Int[np.ndarray, " R"], int], np.ndarray]


def _held_out(task: DeviceTask | HostTask, key: Key[Array, ""], num: int) -> tuple[Prompts, Score]:
    """Held-out prompts on the host, and which completions [R, G] of the prompts at some rows are right."""
    if isinstance(task, DeviceTask):

        def scored_there(rollout: Rollout, rows: np.ndarray, group_size: int) -> np.ndarray:
            return processes.to_host(score_on_device(task, rollout).is_exact).reshape(-1, group_size)

        return processes.to_host(make_prompts(task, key, num)), scored_there
    prompts, entries = task.held_out(num)

    def scored_here(rollout: Rollout, rows: np.ndarray, group_size: int) -> np.ndarray:
        completions = completions_of(rollout)[: len(rows) * group_size]
        scored = processes.by_the_first(lambda: task.score([entries[row] for row in rows], completions, group_size))
        return np.asarray(scored.rewards.is_exact).reshape(-1, group_size)

    return prompts, scored_here


def _blocks(prompts: Prompts, size: int) -> Iterator[tuple[Any, Prompts]]:
    """Rows of the prompts, and them, `size` at a time; the last block is filled up with the first prompt."""
    num = prompts.lengths.shape[0]
    size = min(size, num)
    for start in range(0, num, size):
        rows = np.arange(start, min(start + size, num))
        padded = np.pad(rows, (0, size - len(rows)))
        yield rows, Prompts(np.asarray(prompts.token_ids)[padded], np.asarray(prompts.lengths)[padded])
