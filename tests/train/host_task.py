"""A task of the host without text: sort three digits, scored in Python; what it is asked is remembered."""

import dataclasses

import jax
import numpy as np
from rich.console import Console
from tiny import CONFIG, OPTIMIZER, TASK, make_model

from train.build import Built
from train.config import GRPOConfig
from train.loop import HostLoop
from train.progress import RunState
from train.run_config import EvaluationConfig, RunConfig, SavingConfig, WatchConfig
from train.state import init_state
from train.tasks import Prompts, Rewards, Scored
from train.tasks.base import Cursor

QUIET = Console(quiet=True)
EPOCH = 20


@dataclasses.dataclass
class HostDigits:
    """An epoch has 20 prompts; `fails_at` raises at that call of `score`, as a kill would come at that moment."""

    asked: list = dataclasses.field(default_factory=list)
    num_scored: int = 0
    fails_at: int | None = None
    is_open: bool = True

    vocab_size = TASK.vocab_size
    prompt_width = TASK.prompt_width
    eos_token_ids = ()

    def draw(self, cursor: Cursor, num: int):
        entries = []
        for _ in range(num):
            order = np.random.default_rng(cursor.epoch).permutation(EPOCH)
            entries.append((cursor.epoch, int(order[cursor.position])))
            last = cursor.position == EPOCH - 1
            cursor = Cursor(cursor.epoch + 1, 0) if last else Cursor(cursor.epoch, cursor.position + 1)
        self.asked.append(entries)
        return prompts_of(entries), entries, cursor

    def held_out(self, num: int):
        entries = [(1000, index) for index in range(min(num, EPOCH))]
        return prompts_of(entries), entries

    def score(self, entries, completions, group_size: int) -> Scored:
        self.num_scored += 1
        if self.num_scored == self.fails_at:
            raise RuntimeError("as if killed")
        answers = [sorted(digits_of(entry)) for entry in entries]
        shares = [
            sum(one == other for one, other in zip(completion, answers[row // group_size], strict=False)) / 3
            for row, completion in enumerate(completions)
        ]
        rewards = Rewards(np.array(shares, np.float32), np.array([share == 1 for share in shares]))
        return Scored(rewards, {"rewards/answer": float(np.mean(shares))})

    def show(self, token_ids) -> str:
        return TASK.show(token_ids)

    def close(self) -> None:
        self.is_open = False


def digits_of(entry) -> list[int]:
    return np.random.default_rng(entry).integers(0, 10, 3).tolist()


def prompts_of(entries) -> Prompts:
    rows = np.array([[*digits_of(entry), 10] for entry in entries], np.int32)
    return Prompts(rows, np.full(len(rows), rows.shape[1], np.int32))


def make_config(iterations: int, grpo: GRPOConfig = CONFIG, **changes) -> RunConfig:
    sections = {
        "grpo": grpo,
        "evaluation": EvaluationConfig(),
        "saving": SavingConfig(checkpoint_every=2),
        "watch": WatchConfig(),
    }
    return RunConfig(preset="digits", iterations=iterations, **{**sections, **changes})


def make_built(config: RunConfig, task: HostDigits) -> Built:
    """A run of the shared tiny model, with its optimiser, so that its programs are those of other tests."""
    # Where a restored state lies, too: lying there by request is part of a program.
    state = jax.device_put(init_state(make_model(), OPTIMIZER, config.seed, config.grpo), jax.devices()[0])
    return Built(HostLoop(task, config.grpo, OPTIMIZER, None, config.overlap), task, RunState(state))
