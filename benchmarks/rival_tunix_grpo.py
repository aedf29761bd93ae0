"""Tunix's `GRPOLearner` with its own rollout engine; the loss is over the whole vocabulary."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import rival_tunix
from flax import nnx
from generate_case import Case
from grpo_case import CLIP, LEARNING_RATE, Rewards
from process_memory import Measured
from stepping import Stepper
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

MAX_STEPS = 1_000_000


class Tokenizer(rival_tunix.Tokenizer):
    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


class Rival(Measured):
    def __init__(self, folder: str, max_length: int, *, case: dict[str, Any], group_size: int):
        """Both in one mesh, so that rollouts use the trained weights themselves; one update on the whole batch."""
        super().__init__()
        self.case = Case.from_plain(case)
        model = rival_tunix.load_model(folder)
        vocab_size = model.config.vocab_size
        self.rewards = Rewards(vocab_size)
        mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        cluster = RLCluster(
            actor=model,
            tokenizer=Tokenizer(vocab_size),
            cluster_config=ClusterConfig(
                role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
                training_config=RLTrainingConfig(
                    actor_optimizer=optax.adamw(LEARNING_RATE), eval_every_n_steps=MAX_STEPS, max_steps=MAX_STEPS
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=self.case.max_new_tokens,
                    max_prompt_length=self.case.prompt_length,
                    kv_cache_size=max_length,
                    temperature=self.case.temperature,
                    top_k=self.case.top_k,
                    top_p=self.case.top_p,
                ),
            ),
        )
        config = GRPOConfig(num_generations=group_size, beta=0.0, epsilon=CLIP)
        # On the mesh now; the first one would be a second copy.
        self.model = cluster.actor_trainer.model
        learner = GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=self._reward)
        self.stepper = Stepper(lambda: learner.train(self._batches()))

    def token_logprobs(self, token_ids: list[int]) -> list[float]:
        return rival_tunix.token_logprobs(self.model, token_ids)

    def step(self) -> dict[str, float]:
        self.rewards.begin()
        self.stepper.step()
        jax.block_until_ready(nnx.state(self.model))
        return self.rewards.told()

    def _batches(self) -> Iterator[dict[str, Any]]:
        texts = np.array([" ".join(map(str, ids)) for ids in self.case.prompts])
        while True:
            self.stepper.wait()
            yield {"prompts": texts}

    def _reward(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return self.rewards([[int(word) for word in text.split()] for text in completions])
