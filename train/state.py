"""The learner's state, and the optimiser that moves it."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Key

from models import Decoder, MeshRules, shard
from train import processes
from train.config import GRPOConfig
from train.partition import combine, partition

# Share of the learning rate that a cosine schedule ends with.
FINAL_LEARNING_RATE = 0.05
T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an iteration changes.

    Attributes:
      model: the policy; its own parameter pytree. What is trained is float32: all of it, or its adapters alone where it
        has some (see `train.partition`).
      opt_state: of the optimiser, for what is trained.
      step: iterations done.
      key: root of all randomness; iteration s uses fold_in(key, s), so a resumed run draws what an unbroken one would.
      reference: what is trained, of the policy that the KL refers to, where that policy changes during the run; None:
        the caller gives it, or it is the base of the adapters.
      average: running mean of what is trained, float32; None where the run keeps none.
    """

    model: Decoder
    opt_state: Any
    step: Int[Array, ""]
    key: Key[Array, ""]
    reference: Decoder | None = None
    average: Decoder | None = None

    @property
    def averaged_model(self) -> Decoder:
        """The policy with its averaged weights; the policy itself where no average is kept."""
        if self.average is None:
            return self.model
        return combine(self.average, partition(self.model)[1])


def make_optimizer(config: GRPOConfig, num_iterations: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm, with the config's schedule over a run of `num_iterations`."""
    # Without decay this is Adam.
    adam = optax.adamw(learning_rates(config, num_iterations), weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)


def learning_rates(config: GRPOConfig, num_iterations: int) -> optax.Schedule:
    """The learning rate of each update of a run of `num_iterations`."""
    warmup = config.warmup_iterations * config.num_updates
    steps = max(num_iterations * config.num_updates, warmup + 1)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(config.learning_rate, steps - warmup, alpha=FINAL_LEARNING_RATE)
    elif config.schedule == "linear":
        final = config.learning_rate * FINAL_LEARNING_RATE
        after = optax.linear_schedule(config.learning_rate, final, steps - warmup)
    else:
        after = optax.constant_schedule(config.learning_rate)
    rise = optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def init_state(
    model: Decoder, optimizer: optax.GradientTransformation, seed: int, config: GRPOConfig | None = None
) -> TrainState:
    """The state before the first iteration; it holds the model's own arrays, which iterations donate.

    Args:
      model: the policy.
      optimizer: of what is trained.
      seed: of all randomness of the run.
      config: says whether the state has a reference of its own, and an average; None: neither.

    Raises:
      ValueError: weights to train that are not float32: a bfloat16 weight of 1 does not move by less than 0.004.
    """
    trained, _ = partition(model)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(trained) if leaf.dtype != jnp.float32}
    if dtypes:
        raise ValueError(f"the weights that are trained must be float32, got {', '.join(sorted(dtypes))}.")
    state = TrainState(model, optimizer.init(trained), jnp.int32(0), jax.random.key(seed))
    if config is not None and config.reference_every:
        state = with_new_reference(state)
    if config is not None and config.ema_decay:
        state = dataclasses.replace(state, average=copied(trained))
    return state if model.rules is None else _on_mesh(state, model.rules)


def with_new_reference(state: TrainState) -> TrainState:
    """The state with the policy as it is now for its reference."""
    return dataclasses.replace(state, reference=copied(partition(state.model)[0]))


def copied(tree: Decoder) -> Decoder:
    """The tree in arrays of its own: iterations donate those of the policy."""
    return jax.tree.map(jnp.copy, tree)


def averaged(average: T, trained: T, decay: float) -> T:
    """decay * average + (1 - decay) * trained."""
    return jax.tree.map(lambda mean, weight: mean + (1 - decay) * (weight - mean), average, trained)


def apply_gradients(
    state: TrainState, gradients: Decoder, optimizer: optax.GradientTransformation
) -> tuple[Decoder, Any]:
    """The model and the optimiser's state after one update of what is trained."""
    trained, frozen = partition(state.model)
    # Optax mixes its integer step count with Python floats, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, trained)
        trained = optax.apply_updates(trained, updates)
    # The next iteration is then the same program.
    trained = trained if trained.rules is None else shard(trained, trained.rules)
    return combine(trained, frozen), opt_state


def _on_mesh(state: TrainState, rules: MeshRules) -> TrainState:
    """Counts and keys on all devices of the mesh that the weights and their moments lie on."""
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf.sharding, NamedSharding) else processes.to_devices(leaf, rules), state
    )
