"""From hidden states to scores: logits of kept cells or of whole rows, then cap, edits, temperature and softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmask import heads, scores
from jaxmask.bits import unpack_bytes
from jaxmask.gathered import Cells
from jaxmask.placement import Placement
from jaxmask.replay import Replay
from jaxmask.scores import RowScores, Scores
from jaxmask.shards import Slice
from jaxmask.support import Support


class Reference(NamedTuple):
    """A reference policy's last hidden states at the same tokens, and its LM head; neither gets a gradient."""

    hidden: Float[Array, "*B D"]
    head: Float[Array, "U D"]


class Policy(NamedTuple):
    """A policy at some tokens, and how its logits become those that are scored; see `policy.support_log_probs`."""

    hidden: Float[Array, "*B D"]
    head: Float[Array, "U D"]
    temperature: Float[Array, "*B"]
    logit_softcap: float | None
    replay: Replay | None
    reference: Reference | None
    placed: Placement | None


def temperatures(temperature: float | Float[Array, ...], token_ids: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """One temperature per token, a constant; raises ValueError for a number below 0 or an array that does not fit."""
    if not isinstance(temperature, jax.Array | np.ndarray):
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}.")
    elif temperature.ndim and temperature.shape != token_ids.shape:
        raise ValueError(
            f"temperature must be one number or have the leading shape {token_ids.shape}, got {temperature.shape}."
        )
    return jax.lax.stop_gradient(jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), token_ids.shape))


def check_policy(policy: Policy, vocab_size: int, loss_mask: Bool[Array, "*B"] | None) -> None:
    """Raises ValueError unless head, cap, replay, reference and mask fit the hidden states."""
    hidden, head, cap, replay, reference = (
        policy.hidden,
        policy.head,
        policy.logit_softcap,
        policy.replay,
        policy.reference,
    )
    if head.ndim != 2 or head.shape[1] != hidden.shape[-1]:
        raise ValueError(f"head must have the {hidden.shape[-1]} columns of hidden, got shape {head.shape}.")
    if head.shape[0] < vocab_size:
        raise ValueError(f"head has {head.shape[0]} rows, fewer than the {vocab_size} ids of the vocabulary.")
    if cap is not None and not 0 < cap < jnp.inf:
        raise ValueError(f"logit_softcap must be > 0 and finite, or None, got {cap}.")
    if loss_mask is not None and loss_mask.shape != hidden.shape[:-1]:
        raise ValueError(f"loss_mask must have the leading shape {hidden.shape[:-1]}, got {loss_mask.shape}.")
    if replay is not None and replay.token_ids.shape != hidden.shape[:-1]:
        raise ValueError(f"replay is of tokens {replay.token_ids.shape}, and hidden has {hidden.shape[:-1]}.")
    if reference is None:
        return
    tokens, ids = hidden.shape[:-1], head.shape[0]
    found = reference.hidden.shape[:-1], reference.head.shape[0]
    if found != (tokens, ids) or reference.hidden.shape[-1] != reference.head.shape[1]:
        raise ValueError(
            f"reference must have the tokens and ids of the policy, {tokens} and {ids}, and one width, got hidden "
            f"{reference.hidden.shape} and head {reference.head.shape}."
        )


def on_supports(
    policy: Policy,
    support: Support,
    token_ids: Int[Array, "*B"],
    return_id_logprobs: bool,
    implementation: str,
) -> Scores:
    """Scores of each token on its support; `implementation` is settled."""
    is_wide = support.counts > support.width
    # The one id of a support has probability 1 whatever its logit is.
    num = jnp.where(support.counts > 1, jnp.minimum(support.counts, support.width), 0)
    if support.packed is not None and not return_id_logprobs:
        num = jnp.where(is_wide, 0, num)
    ids = support.reshape(-1).token_ids
    cells = Cells(ids, jnp.zeros(ids.shape[0], jnp.int32), num.reshape(-1))

    def edited(hidden: Array, head: Array) -> Array:
        flat = hidden.reshape(-1, hidden.shape[-1])
        kept = heads.kept_logits(flat, head, cells, policy.placed, implementation)
        kept = soft_cap(kept.reshape(support.token_ids.shape), policy.logit_softcap)
        if policy.replay is None:
            return kept
        # Whatever the settings of a row without a support are, they are not its.
        return jnp.where((num > 0)[..., None], policy.replay.edited(kept), 0.0)

    kept = edited(policy.hidden, policy.head)
    is_cell = support.cells() & (support.counts > 0)[..., None]
    ref_kept = None if policy.reference is None else jax.lax.stop_gradient(edited(*policy.reference))
    rows = scores.of_columns(kept, is_cell, support.token_ids == token_ids[..., None], policy.temperature, ref_kept)
    if support.packed is not None:
        wide = over_vocabulary(policy, token_ids, support.vocab_size, support.packed, is_wide)
        chosen = is_wide if policy.placed is None else policy.placed.along_rows(is_wide)
        rows = jax.tree.map(lambda wide, narrow: jnp.where(chosen, wide, narrow), wide, rows)
    id_logprobs = scores.of_ids(kept, is_cell, policy.temperature, rows) if return_id_logprobs else None
    return Scores(rows.logprobs, rows.entropy, id_logprobs, rows.kl, rows.ref_logprobs)


def over_vocabulary(
    policy: Policy,
    token_ids: Int[Array, "*B"],
    vocab_size: int,
    packed: Array | None = None,
    is_chosen: Bool[Array, "*B"] | None = None,
) -> RowScores:
    """Scores of the chosen tokens over the vocabulary, or over the ids that packed bits keep; 0 for the others."""
    leading = token_ids.shape
    is_chosen = jnp.ones(leading, jnp.bool_) if is_chosen is None else is_chosen

    def score(
        logits: Array, ref_logits: Array | None, of_rows: Any, replay: Replay | None, index: Array, part: Slice
    ) -> RowScores:
        token_ids, temperature, packed = of_rows

        def edited(logits: Array) -> Array:
            logits = soft_cap(logits, policy.logit_softcap)
            return logits if replay is None else replay.edited_rows(logits, index, part)

        logits, ref_logits = edited(logits), None if ref_logits is None else edited(ref_logits)
        if packed is None:
            kept = jnp.broadcast_to(part.token_ids() < vocab_size, logits.shape)
        else:
            kept = part.columns_of(unpack_bytes(packed, vocab_size))
        return scores.of_columns(logits, kept, part.token_ids() == token_ids[:, None], temperature, ref_logits, part)

    def flat(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(leading) :]), tree)

    of_rows = flat((token_ids, policy.temperature, packed))
    reference = None if policy.reference is None else (flat(policy.reference.hidden), policy.reference.head)
    rows = heads.row_scores(
        score, is_chosen.reshape(-1), flat(policy.hidden), policy.head, of_rows, policy.replay, reference, policy.placed
    )
    return jax.tree.map(lambda leaf: leaf.reshape(leading), rows)


def soft_cap(logits: Float[Array, "*B"], cap: float | None) -> Float[Array, "*B"]:
    """cap * tanh(logits / cap); without a cap the logits themselves. The model's own, so that both sides agree.

    Source: Gemma 2, arXiv 2408.00118, section 2.
    """
    return logits if cap is None else cap * jnp.tanh(logits / cap)
