"""Our side of the benchmark of a whole iteration: the two programs of a task whose rewards come from the host."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from generate_case import Case
from generate_ours import Ours
from grpo_case import CLIP, LEARNING_RATE, Rewards
from process_memory import Measured

import models
from train import GRPOConfig, grpo_step, init_state
from train.step import collect_for_host
from train.tasks import Prompts
from train.tasks import Rewards as TaskRewards

update = jax.jit(grpo_step, static_argnames=("config", "optimizer"), donate_argnums=0)


class Rival(Measured):
    def __init__(self, folder: str, max_length: int, *, case: dict[str, Any], group_size: int, **config: Any):
        """`config` has further fields of `GRPOConfig`."""
        super().__init__()
        asked = Case.from_plain(case)
        self.model, _ = models.load(folder, jnp.float32)
        self.config = GRPOConfig(
            num_prompts=asked.num_rows,
            group_size=group_size,
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            clip_epsilon=CLIP,
            **config,
        )
        self.optimizer = optax.adamw(LEARNING_RATE)
        self.vocab_size = self.model.vocab_size
        lengths = np.full(asked.num_rows, asked.prompt_length, np.int32)
        self.prompts = Prompts(np.array(asked.prompts, np.int32), lengths)
        self.rewards = Rewards(self.vocab_size)
        self.state = None

    def token_logprobs(self, token_ids: list[int]) -> list[float]:
        return Ours(self.model).token_logprobs(token_ids)

    def step(self) -> dict[str, float]:
        if self.state is None:
            # The state is donated from step to step: no second copy of the weights may live.
            self.state, self.model = init_state(self.model, self.optimizer, 0), None
        self.rewards.begin()
        rollout = self._collect()
        token_ids, lengths = jax.device_get((rollout.token_ids, rollout.lengths))
        completions = [row[:length].tolist() for row, length in zip(token_ids, lengths, strict=True)]
        values = np.array(self.rewards(completions), np.float32)
        self.state, metrics = self._update(rollout, TaskRewards(values, values == 1))
        told = jax.device_get(metrics)
        return self.rewards.told() | {"support_size": float(told.support_size)}

    def compiled(self) -> dict[str, float]:
        """MiB that the two programs take: arguments and results, and temporaries. After the first step."""
        rollout = jax.eval_shape(self._collect)
        values = np.zeros(self.config.num_rows, np.float32)
        made = (
            collect_for_host.lower(self.state, self.prompts, **self._collect_options()),
            update.lower(
                self.state, rollout, TaskRewards(values, values == 1), config=self.config, optimizer=self.optimizer
            ),
        )
        found = {}
        for name, lowered in zip(("rollout", "update"), made, strict=True):
            memory = lowered.compile().memory_analysis()
            found[f"{name}, arguments"] = memory.argument_size_in_bytes / 2**20
            found[f"{name}, temporaries"] = memory.temp_size_in_bytes / 2**20
        return found

    def _collect(self):
        return collect_for_host(self.state, self.prompts, **self._collect_options())

    def _collect_options(self) -> dict[str, Any]:
        return {"config": self.config, "vocab_size": self.vocab_size, "eos_token_ids": ()}

    def _update(self, rollout, rewards: TaskRewards):
        return update(self.state, rollout, rewards, config=self.config, optimizer=self.optimizer)
