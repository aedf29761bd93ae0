"""GRPO on recorded supports, with Optax: the step, the loop around it, and `python -m train`."""

from train.advantages import group_advantages
from train.config import GRPOConfig
from train.losses import LossInputs, LossOutput, grpo_loss
from train.metrics import Metrics
from train.presets import as_published
from train.run_config import RunConfig
from train.state import TrainState, init_state, make_optimizer
from train.step import grpo_step, train_iteration

__all__ = [
    "GRPOConfig",
    "LossInputs",
    "LossOutput",
    "Metrics",
    "RunConfig",
    "TrainState",
    "as_published",
    "group_advantages",
    "grpo_loss",
    "grpo_step",
    "init_state",
    "make_optimizer",
    "train_iteration",
]
