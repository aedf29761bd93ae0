"""Reward functions: plain Python over texts, run in processes of their own. Nothing here imports JAX."""

from train.rewards.runner import RewardRunner, Scores
from train.rewards.specs import RewardSpec, parse_rewards
from train.rewards.verifiers import Verifier

__all__ = ["RewardRunner", "RewardSpec", "Scores", "Verifier", "parse_rewards"]
