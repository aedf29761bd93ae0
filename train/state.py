"""The learner's state, and the optimiser that moves it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from models import Decoder
from train.config import GRPOConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an iteration changes.

    Attributes:
      model: the policy; its own parameter pytree, float32.
      opt_state: of the optimiser.
      step: iterations done.
      key: root of all randomness; iteration s uses fold_in(key, s), so a resumed run draws what an unbroken one would.
    """

    model: Decoder
    opt_state: Any
    step: Int[Array, ""]
    key: Key[Array, ""]


def make_optimizer(config: GRPOConfig) -> optax.GradientTransformation:
    """Adam behind a clip of the global gradient norm."""
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.learning_rate))


def init_state(model: Decoder, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first iteration."""
    return TrainState(model, optimizer.init(model), jnp.int32(0), jax.random.key(seed))


def apply_gradients(
    state: TrainState, gradients: Decoder, optimizer: optax.GradientTransformation
) -> tuple[Decoder, Any]:
    """The model and the optimiser's state after one update."""
    # Optax mixes its integer step count with Python floats, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.model)
        return optax.apply_updates(state.model, updates), opt_state
