"""What a draw returns, what is asked of it, and the draw itself among tokens that survived the filters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask import candidates, draw, shards
from jaxmask.batch import SamplingBatch
from jaxmask.mass import Mass
from jaxmask.support import Support


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens of a position, in canonical order.

    Attributes:
      token_ids: vocab_size in unused cells, where fewer tokens could be drawn than were asked for.
      logprobs: what the mode says of them; -inf in unused cells.
    """

    token_ids: Int[Array, "*B N"]
    logprobs: Float[Array, "*B N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sample:
    """One drawn token per row, over any leading axes.

    Attributes:
      token_ids: in [0, vocab_size).
      logprobs: of the token, as the mode says; over the support in `processed_logprobs`.
      support: the ids the token was drawn from.
      is_valid: False where the row had no finite logit: its token means nothing and its log-probability is -inf.
      ranks: how many tokens are at least as likely as the drawn one, itself included; 0 in rows that are not valid.
        None unless `num_logprobs` was given.
      top: the likeliest tokens; None unless `num_logprobs` was given.
      support_logprobs: log-probability over the support of each id in `support.token_ids`, -inf in unused cells; None
        unless asked for.
    """

    token_ids: Int[Array, "*B"]
    logprobs: Float[Array, "*B"]
    support: Support
    is_valid: Bool[Array, "*B"]
    ranks: Int[Array, "*B"] | None = None
    top: TopLogprobs | None = None
    support_logprobs: Float[Array, "*B W"] | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a call: shapes of the result, and where the columns of the logits lie.

    Attributes:
      width: compact cells per support.
      has_bits: packed bits beside them.
      logprobs_mode: one of `params.LOGPROBS_MODES`.
      num_logprobs: top tokens to report; None for neither these nor ranks.
      with_support_logprobs: report each kept id's log-probability.
      part: the columns of a row that this device holds.
      implementation: what draws the rows that leading tokens decide: pallas_gpu, interpret or xla.
    """

    width: int
    has_bits: bool
    logprobs_mode: str
    num_logprobs: int | None
    with_support_logprobs: bool
    part: shards.Slice
    implementation: str = "xla"


def winner(
    logits: Float[Array, "B C"],
    z: Float[Array, "B C"],
    is_kept: Bool[Array, "B C"],
    token_ids: Int[Array, "#B C"],
    batch: SamplingBatch,
    steps: Int[Array, " B"],
    part: shards.Slice,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The kept id with the largest z + noise (greedy rows: logit), and its z; V and -inf in rows that keep none.

    Source: the Gumbel-max trick, Maddison et al. 2014, "A* sampling", section 2.
    """
    score = z + draw.gumbel(batch.seeds, steps, jnp.broadcast_to(token_ids, z.shape))
    # By keys, since z of a greedy row may have lost a subnormal difference; scores of any row compare alike.
    keys = candidates.order_keys(jnp.where((batch.temperature > 0)[:, None], score, logits))
    keys = jnp.where(is_kept, keys, jnp.uint32(0))
    best = part.largest(keys.max(axis=1))
    # Equal scores go to the lower id, so the winner does not depend on the order of the columns.
    is_best = is_kept & (keys == best[:, None])
    winner_id = part.smallest(jnp.where(is_best, token_ids, batch.vocab_size).min(axis=1))
    winner_z = part.largest(jnp.where(token_ids == winner_id[:, None], z, -jnp.inf).max(axis=1))
    return winner_id, winner_z


def rank(
    logits: Float[Array, "B C"],
    is_counted: Bool[Array, "B C"],
    token_ids: Int[Array, "#B C"],
    winner_id: Int[Array, " B"],
    part: shards.Slice,
) -> Int[Array, " B"]:
    """How many counted tokens have at least the winner's logit."""
    keys = jnp.where(is_counted, candidates.order_keys(logits.astype(jnp.float32)), jnp.uint32(0))
    key = part.largest(jnp.where(token_ids == winner_id[:, None], keys, jnp.uint32(0)).max(axis=1))
    return part.total((is_counted & (keys >= key[:, None])).sum(axis=1, dtype=jnp.int32))


def log_of(kept: Mass) -> Float[Array, "*B"]:
    """Logarithm of the mass that log-probabilities are normalised by; 0 in rows that keep nothing."""
    value = kept.to_float()
    return jnp.log(jnp.where(value > 0, value, 1.0))


def top_logprobs(
    token_ids: Int[Array, "B C"],
    logprobs: Float[Array, "B C"],
    counts: Int[Array, " B"],
    num: int,
    vocab_size: int,
) -> TopLogprobs:
    """The first `num` of columns in canonical order, of which `counts` are kept."""
    padding = ((0, 0), (0, max(num - token_ids.shape[1], 0)))
    token_ids = jnp.pad(token_ids[:, :num], padding, constant_values=vocab_size)
    logprobs = jnp.pad(logprobs[:, :num], padding, constant_values=-jnp.inf)
    is_used = jnp.arange(num, dtype=jnp.int32)[None, :] < counts[:, None]
    return TopLogprobs(jnp.where(is_used, token_ids, vocab_size), jnp.where(is_used, logprobs, -jnp.inf))
