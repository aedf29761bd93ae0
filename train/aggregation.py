"""From token losses to one number: weights and a denominator that the whole batch's mask alone decides.

Both are known before any loss is, so a batch cut into micro-batches, or over devices, adds up to the undivided loss:
loss = sum over all parts of (weights * token losses) / denominator.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How token losses add up.

    Attributes:
      weights: of each token, 0 outside the loss mask; cut like the rows (M: micro-batches).
      denominator: of the whole batch, > 0 also where nothing was sampled; never cut.
    """

    weights: Float[Array, "*M B T"]
    denominator: Float[Array, ""]


def aggregation(loss_mask: Bool[Array, "B T"], mode: str, *, max_length: int) -> Aggregation:
    """Weights and denominator of an aggregation mode, under the names of verl and TRL.

    token-mean:           w = 1,       denominator = tokens                    (DAPO)
    seq-mean-token-mean:  w = 1 / |o|, denominator = sequences                 (GRPO as published)
    seq-mean-token-sum:   w = 1,       denominator = sequences                 (plain policy gradient)
    constant-length:      w = 1,       denominator = sequences * max_length    (Dr. GRPO)

    |o| is the number of sampled tokens of a sequence, and a sequence counts where it has one: a completion whose mask
    is empty has left both sides of the fraction.

    In: losses [[1, 1, .], [2, 2, 2]], max_length 3  Out: 1.6, 1.5, 4.0, 1.333

    Args:
      loss_mask: that of the whole batch, before it is cut.
      mode: one of the four above.
      max_length: tokens a completion may have; constant-length alone looks at it.

    Raises:
      ValueError: no such mode.

    Source: DAPO, arXiv 2503.14476, section 3.3; DeepSeekMath, arXiv 2402.03300, equation 3; Dr. GRPO, arXiv
      2503.20783, section 3.2, whose 1 / L is a constant of the run. verl calls that one "seq-mean-token-sum-norm".
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {mode!r}.")
    weights = loss_mask.astype(jnp.float32)
    lengths = weights.sum(axis=1, keepdims=True)
    num_sequences = (lengths > 0).sum(dtype=jnp.float32)
    # Nothing sampled: all weights are 0, and 0 / 1 is the loss.
    if mode == "token-mean":
        return Aggregation(weights, jnp.maximum(loss_mask.sum(dtype=jnp.float32), 1.0))
    num_sequences = jnp.maximum(num_sequences, 1.0)
    if mode == "seq-mean-token-mean":
        return Aggregation(weights / jnp.maximum(lengths, 1.0), num_sequences)
    return Aggregation(weights, num_sequences * (max_length if mode == "constant-length" else 1))
