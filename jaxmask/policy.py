"""The learner's side: log-probabilities, entropy and KL of a policy on the supports its tokens were sampled from.

Work and memory follow the kept ids, not the vocabulary: see `jaxmask.gathered`, and `jaxmask.heads` for meshes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxmask import placement, scores, scoring
from jaxmask.kernels import dispatch
from jaxmask.kernels.head import api as head_kernel
from jaxmask.params import check_count
from jaxmask.replay import Replay
from jaxmask.scores import Scores
from jaxmask.scoring import Policy, Reference
from jaxmask.support import Support


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
    temperatures = scoring.temperatures(temperature, token_ids)
    if logits.shape[-1] < support.vocab_size:
        raise ValueError(f"logits have {logits.shape[-1]} columns, fewer than the support's {support.vocab_size} ids.")
    if support.packed is None:
        kept = support.cells()
        columns = jnp.where(kept, support.token_ids, 0)
        kept_logits = jnp.take_along_axis(logits, columns, axis=-1)
    else:
        kept, kept_logits = support.to_mask(), logits[..., : support.vocab_size]
        columns = jax.lax.broadcasted_iota(jnp.int32, kept.shape, kept.ndim - 1)
    rows = scores.of_columns(kept_logits, kept, columns == token_ids[..., None], temperatures)
    return rows.logprobs


def support_log_probs(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "U D"],
    support: Support,
    token_ids: Int[Array, "*B"],
    *,
    temperature: float | Float[Array, ...] = 1.0,
    logit_softcap: float | None = None,
    replay: Replay | None = None,
    loss_mask: Bool[Array, "*B"] | None = None,
    sharding: NamedSharding | PartitionSpec | None = None,
    implementation: str = "auto",
) -> Float[Array, "*B"]:
    """Log-probability of each token under the softmax restricted to its support; never builds [*B, V].

    log p(a) = z_a / T - log sum_{v in support} exp(z_v / T),  z_v = edits(cap(hidden . head[v]))

    Supports wider than their cells go through the vocabulary, 64 rows at a time; all others cost their ids.

    Args:
      hidden: final hidden states, any float dtype; products accumulate in float32.
      head: rows of the LM head, tied to an embedding or not; it may have more rows than the vocabulary (padding).
      support: recorded at sampling; its leading axes are those of `hidden`.
      token_ids: sampled ids.
      temperature: that of the rollout: one number, or an array of the leading shape; 0 (greedy) tempers nothing.
      logit_softcap: the model's cap on its logits, x -> cap tanh(x / cap); > 0; None: none.
      replay: the edits of the rollout, `Replay.of(rollout)`; the leading axes are then [B, T].
      loss_mask: tokens that are scored; None: all. The others cost nothing and get no gradient, whatever they hold, and
        their scores mean nothing.
      sharding: how the logits [N, V] are cut over a mesh, the rows' first axis and the ids: a `NamedSharding`, or a
        `PartitionSpec` for the mesh in context, such as `PartitionSpec("data", "tensor")`. Not needed outside of jit,
        where `hidden` and `head` show it. The head stays where it is; one sum of kept columns crosses devices. Inside
        the caller's `shard_map`, with a device's own rows and a whole head, leave it out and say `check_vma=False`.
      implementation: "pallas_gpu", "xla", "interpret" or "auto": the kernel on NVIDIA GPUs, plain XLA elsewhere (see
        `kernels.dispatch`). The kernel has first derivatives alone.

    Returns:
      In (-inf, 0]; -inf where the token lies outside its support; NaN where a logit of the support is. Differentiable
      in `hidden` and `head`, in reverse, and to any order where no support has packed bits; the gradient is exactly 0
      in the rows of `head` outside the supports.

    Raises:
      ValueError: leading shapes or the vocabulary differ, a number is out of its range, or a sharding that the mesh
        does not have.
      NotImplementedError: the kernel was asked for and cannot do this, or the sharding is one inside `shard_map`.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1; the cap: Gemma 2, arXiv 2408.00118, section 2.
    """
    return support_scores(
        hidden,
        head,
        support,
        token_ids,
        temperature=temperature,
        logit_softcap=logit_softcap,
        replay=replay,
        loss_mask=loss_mask,
        sharding=sharding,
        implementation=implementation,
    ).logprobs


def support_scores(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "U D"],
    support: Support,
    token_ids: Int[Array, "*B"],
    *,
    temperature: float | Float[Array, ...] = 1.0,
    logit_softcap: float | None = None,
    replay: Replay | None = None,
    reference: Reference | None = None,
    loss_mask: Bool[Array, "*B"] | None = None,
    return_id_logprobs: bool = False,
    sharding: NamedSharding | PartitionSpec | None = None,
    implementation: str = "auto",
) -> Scores:
    """`support_log_probs` and, from the same kept logits, the entropy over each support; more on request.

    Rows with an empty support score -inf and get no gradient, whatever their hidden state holds.

    Args:
      hidden: as in `support_log_probs`, like all that is not named here.
      head: the same.
      support: the same.
      token_ids: the same.
      temperature: the same.
      logit_softcap: the same.
      replay: the same.
      reference: a reference policy: gives its log-probabilities and KL(policy || reference), exact over each support.
        It is scored with the same cap, edits and temperature, and cut over devices in the same way.
      loss_mask: as in `support_log_probs`.
      return_id_logprobs: the log-probability of every id in the compact cells.
      sharding: as in `support_log_probs`.
      implementation: the same.

    Raises:
      ValueError: as in `support_log_probs`, or the reference does not have the shapes of the policy.
      NotImplementedError: as in `support_log_probs`.
    """
    _check_shapes(hidden.shape[:-1], support, token_ids)
    placed = placement.resolve_head(hidden, head, sharding)
    policy = Policy(
        hidden, head, scoring.temperatures(temperature, token_ids), logit_softcap, replay, reference, placed
    )
    scoring.check_policy(policy, support.vocab_size, loss_mask)
    mesh = None if placed is None else placed.mesh
    refusal = head_kernel.refusal(hidden, head, support.token_ids)
    chosen = dispatch.choose("support_scores", implementation, hidden, refusal, mesh)
    if loss_mask is not None:
        support = dataclasses.replace(support, counts=jnp.where(loss_mask, support.counts, 0))
    return scoring.on_supports(policy, support, token_ids, return_id_logprobs, chosen)


def full_scores(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "U D"],
    token_ids: Int[Array, "*B"],
    *,
    vocab_size: int | None = None,
    temperature: float | Float[Array, ...] = 1.0,
    logit_softcap: float | None = None,
    replay: Replay | None = None,
    reference: Reference | None = None,
    loss_mask: Bool[Array, "*B"] | None = None,
    sharding: NamedSharding | PartitionSpec | None = None,
) -> Scores:
    """Scores over the whole vocabulary, as trainers without supports compute them; after the edits, where there are.

    Rows go through in chunks that are recomputed in the backward pass: memory is 64 V, not [*B, V]. First derivatives
    alone.

    Args:
      hidden: final hidden states, any float dtype.
      head: rows of the LM head.
      token_ids: sampled ids.
      vocab_size: ids that there are, where the head is padded with more rows; None: all rows are ids.
      temperature: as in `support_log_probs`.
      logit_softcap: the same.
      replay: the same.
      reference: as in `support_scores`.
      loss_mask: as in `support_log_probs`.
      sharding: as in `support_log_probs`.

    Raises:
      ValueError: as in `support_scores`.
      NotImplementedError: the sharding is one inside `shard_map`.
    """
    if hidden.shape[:-1] != token_ids.shape:
        raise ValueError(f"leading shapes must agree, got {hidden.shape[:-1]} for hidden and {token_ids.shape}.")
    placed = placement.resolve_head(hidden, head, sharding)
    policy = Policy(
        hidden, head, scoring.temperatures(temperature, token_ids), logit_softcap, replay, reference, placed
    )
    vocab_size = head.shape[0] if vocab_size is None else check_count("vocab_size", vocab_size)
    scoring.check_policy(policy, vocab_size, loss_mask)
    rows = scoring.over_vocabulary(policy, token_ids, vocab_size, is_chosen=loss_mask)
    return Scores(rows.logprobs, rows.entropy, None, rows.kl, rows.ref_logprobs)


def _check_shapes(leading: tuple[int, ...], support: Support, token_ids: Int[Array, "*B"]) -> None:
    if not leading == support.shape == token_ids.shape:
        raise ValueError(
            f"leading shapes must agree, got {leading} for the policy, {support.shape} for the support and "
            f"{token_ids.shape} for token_ids."
        )
