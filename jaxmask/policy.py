"""The learner's side: log-probabilities and entropy of a policy on the supports its tokens were sampled from.

Work and memory follow the kept ids, not the vocabulary: see `jaxmask.gathered`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask import filters, gathered
from jaxmask.kernels import dispatch
from jaxmask.kernels.head import api as head_kernel
from jaxmask.support import Support

# Rows at once where a whole vocabulary is needed: bounds memory to this times V.
_ROWS_PER_CHUNK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """What a policy says about sampled tokens.

    Attributes:
      logprobs: of each token; -inf where it lies outside its support.
      entropy: of the distribution the token is scored on, in nats.
    """

    logprobs: Float[Array, "*B"]
    entropy: Float[Array, "*B"]


def masked_log_probs(
    logits: Float[Array, "*B V"],
    support: Support,
    token_ids: Int[Array, "*B"],
    *,
    temperature: float | Float[Array, ...] = 1.0,
) -> Float[Array, "*B"]:
    """Log-probability of each token under the softmax of full logits restricted to its support.

    log p(a) = x_a / T - log sum_{v in support} exp(x_v / T)

    Args:
      logits: any float dtype; entries outside the support, NaN included, change nothing and get no gradient.
      support: recorded at sampling; its leading axes are those of the logits.
      token_ids: sampled ids.
      temperature: that of the rollout: one number, or an array of the leading shape; 0 (greedy) tempers nothing.

    Returns:
      In (-inf, 0]; -inf where the token lies outside its support.

    Raises:
      ValueError: leading shapes or the vocabulary differ.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    _check_shapes(logits.shape[:-1], support, token_ids)
    _check_temperature(temperature, token_ids.shape)
    if logits.shape[-1] < support.vocab_size:
        raise ValueError(f"logits have {logits.shape[-1]} columns, fewer than the support's {support.vocab_size} ids.")
    if support.packed is None:
        kept = support.cells()
        columns = jnp.where(kept, support.token_ids, 0)
        kept_logits = jnp.take_along_axis(logits, columns, axis=-1)
    else:
        kept, kept_logits = support.to_mask(), logits[..., : support.vocab_size]
        columns = jax.lax.broadcasted_iota(jnp.int32, kept.shape, kept.ndim - 1)
    return _scores(kept_logits, kept, columns == token_ids[..., None], temperature).logprobs


def support_log_probs(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "U D"],
    support: Support,
    token_ids: Int[Array, "*B"],
    *,
    temperature: float | Float[Array, ...] = 1.0,
    edit: Callable[[Float[Array, "*B W"]], Float[Array, "*B W"]] | None = None,
    implementation: str = "auto",
) -> Float[Array, "*B"]:
    """Log-probability of each token under the softmax restricted to its support; never builds [*B, V].

    log p(a) = z_a / T - log sum_{v in support} exp(z_v / T),  z_v = hidden . head[v]

    Args:
      hidden: final hidden states, any float dtype; products accumulate in float32.
      head: rows of the LM head; it may have more rows than the vocabulary (padding).
      support: recorded at sampling; its leading axes are those of `hidden`.
      token_ids: sampled ids.
      temperature: that of the rollout: one number, or an array of the leading shape; 0 (greedy) tempers nothing.
      edit: what the sampler did to the logits before the temperature, on the cells of the supports (see `replay`).
      implementation: "pallas_gpu", "xla", "interpret" or "auto": the kernel on NVIDIA GPUs, plain XLA elsewhere (see
        `kernels.dispatch`). Supports with packed bits have no kernel, and the kernel has first derivatives alone.

    Returns:
      In (-inf, 0]; -inf where the token lies outside its support. Differentiable in `hidden` and `head`; the gradient
      is exactly 0 in the rows of `head` outside the supports. There is no forward mode.

    Raises:
      ValueError: leading shapes or the vocabulary differ, or an edit is to be replayed on supports with packed bits.
      NotImplementedError: the kernel was asked for and cannot do this.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    return support_scores(
        hidden, head, support, token_ids, temperature=temperature, edit=edit, implementation=implementation
    ).logprobs


def support_scores(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "U D"],
    support: Support,
    token_ids: Int[Array, "*B"],
    *,
    temperature: float | Float[Array, ...] = 1.0,
    edit: Callable[[Float[Array, "*B W"]], Float[Array, "*B W"]] | None = None,
    implementation: str = "auto",
) -> Scores:
    """`support_log_probs` and, from the same kept logits, the entropy over each support.

    Rows with an empty support score -inf and get no gradient, whatever their hidden state holds.
    """
    _check_shapes(hidden.shape[:-1], support, token_ids)
    _check_temperature(temperature, token_ids.shape)
    if head.shape[0] < support.vocab_size:
        raise ValueError(f"head has {head.shape[0]} rows, fewer than the support's {support.vocab_size} ids.")
    refusal = head_kernel.refusal(hidden, head, support.token_ids)
    refusal = (
        refusal if support.packed is None else "supports have packed bits, and the kernel sees compact cells alone"
    )
    chosen = dispatch.choose("support_scores", implementation, hidden, refusal)
    if support.packed is not None:
        if edit is not None:
            raise ValueError("edit cannot be replayed on supports with packed bits: their ids do not lie in cells.")
        # A row without a support is no sampled token: whatever its state holds must not reach the head's gradient.
        hidden = jnp.where(support.counts[..., None] > 0, hidden, jnp.zeros((), hidden.dtype))
        return _over_vocabulary(hidden, head[: support.vocab_size], support, token_ids, temperature)
    kept = _kept_logits(hidden, head, support, chosen)
    if edit is not None:
        kept = edit(kept)
    return _scores(kept, support.cells(), support.token_ids == token_ids[..., None], temperature)


def _kept_logits(
    hidden: Float[Array, "*B D"], head: Float[Array, "U D"], support: Support, implementation: str
) -> Float[Array, "*B W"]:
    rows = support.reshape(-1)
    # A broken `support_bound` lets counts exceed the cells: what is beyond them is lost, and is not the next row's.
    arrays = hidden.reshape(-1, hidden.shape[-1]), head, rows.token_ids, jnp.minimum(rows.counts, rows.width)
    if implementation == "xla":
        return gathered.kept_logits(*arrays).reshape(support.token_ids.shape)
    return head_kernel.kept_logits(*arrays, implementation=implementation).reshape(support.token_ids.shape)


def full_scores(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"],
    token_ids: Int[Array, "*B"],
    *,
    temperature: float | Float[Array, ...] = 1.0,
) -> Scores:
    """Log-probability and entropy over the whole vocabulary, as trainers without supports compute them.

    Rows go through in chunks that are recomputed in the backward pass: memory is 64 V, not [*B, V].

    Raises:
      ValueError: leading shapes differ.
    """
    if hidden.shape[:-1] != token_ids.shape:
        raise ValueError(f"leading shapes must agree, got {hidden.shape[:-1]} for hidden and {token_ids.shape}.")
    _check_temperature(temperature, token_ids.shape)
    return _over_vocabulary(hidden, head, None, token_ids, temperature)


def _over_vocabulary(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"],
    support: Support | None,
    token_ids: Int[Array, "*B"],
    temperature: float | Float[Array, ...],
) -> Scores:
    vocabulary = jnp.arange(head.shape[0], dtype=jnp.int32)
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), token_ids.shape)

    @jax.checkpoint
    def score_row(row: tuple[Array, Support | None, Array, Array]) -> Scores:
        row_hidden, row_support, token_id, row_temperature = row
        kept = jnp.ones(head.shape[0], jnp.bool_) if row_support is None else row_support.to_mask()
        # Highest precision: the sampler's logits must be met to rounding, also where products default to TF32.
        row_logits = jnp.einsum(
            "d,vd->v", row_hidden, head, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return _scores(row_logits, kept, vocabulary == token_id, row_temperature)

    rows = (hidden, support, token_ids, temperatures)
    leading = token_ids.ndim
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[leading:]), rows)
    scores = jax.lax.map(score_row, flat, batch_size=min(_ROWS_PER_CHUNK, token_ids.size))
    return jax.tree.map(lambda leaf: leaf.reshape(token_ids.shape), scores)


def _scores(
    logits: Float[Array, "*B C"],
    kept: Bool[Array, "*#B C"],
    is_token: Bool[Array, "*#B C"],
    temperature: float | Float[Array, ...],
) -> Scores:
    """Scores over the kept columns; the others are replaced before any arithmetic, so NaN there is harmless."""
    factor = filters.inverse_temperature(jnp.asarray(temperature, jnp.float32))
    factor = factor[..., None] if factor.ndim else factor
    x = jnp.where(kept, logits, 0.0).astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.where(kept, x, -jnp.inf).max(axis=-1, keepdims=True))
    # As in the sampler: the maximum leaves first, so the likeliest token is at exactly 0.
    shifted = (x - jnp.where(jnp.isfinite(top), top, 0.0)) * factor
    weights = jnp.where(kept, jnp.exp(jnp.where(kept, shifted, 0.0)), 0.0)
    mass = weights.sum(axis=-1)
    log_mass = jnp.log(jnp.where(mass > 0, mass, 1.0))
    is_found = kept & is_token
    logprobs = jnp.where(is_found, shifted, 0.0).sum(axis=-1) - log_mass
    # H = log mass - sum_v p_v shifted_v
    entropy = log_mass - jnp.where(kept, weights * shifted, 0.0).sum(axis=-1) / jnp.where(mass > 0, mass, 1.0)
    return Scores(jnp.where(is_found.any(axis=-1), logprobs, -jnp.inf), entropy)


def _check_shapes(leading: tuple[int, ...], support: Support, token_ids: Int[Array, "*B"]) -> None:
    if not leading == support.shape == token_ids.shape:
        raise ValueError(
            f"leading shapes must agree, got {leading} for the policy, {support.shape} for the support and "
            f"{token_ids.shape} for token_ids."
        )


def _check_temperature(temperature: float | Float[Array, ...], leading: tuple[int, ...]) -> None:
    if not isinstance(temperature, jax.Array):
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}.")
    elif temperature.ndim and temperature.shape != leading:
        raise ValueError(
            f"temperature must be one number or have the leading shape {leading}, got {temperature.shape}."
        )
