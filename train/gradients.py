"""The gradient of a loss over a rollout, however its rows are cut into micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxmask import RaggedSupport, Reference, Scores, full_scores, support_scores
from jaxmask.ragged_support import as_cells
from models import Decoder
from train.aggregation import Aggregation, aggregation
from train.config import GRPOConfig
from train.losses import LossInputs, LossOutput
from train.metrics import Pass
from train.objective import objective
from train.partition import combine, partition
from train.rows import LearnerRows

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Learner:
    """What all passes over a rollout share.

    Attributes:
      config: the loss, and how rows are cut.
      reference: a policy whose KL the loss counts; None where it counts none.
      sharding: of the logits on a mesh; see `jaxmask.support_log_probs`. None: as the model says.
    """

    config: GRPOConfig
    reference: Decoder | None = None
    sharding: NamedSharding | PartitionSpec | None = None


def accumulate(model: Decoder, rows: LearnerRows, learner: Learner) -> tuple[Decoder, Pass]:
    """The gradient of the loss over all rows, and what the pass saw; the cut changes neither.

    The gradient is of what is trained alone: a decoder with None in place of frozen weights.
    """
    config = learner.config
    trained, frozen = partition(model)

    def loss_of(trained: Decoder, *rest: Any) -> tuple[Float[Array, ""], Any]:
        return _loss(combine(trained, frozen), *rest)

    # Those of the whole batch, known beforehand, so that parts add up to the undivided loss.
    whole = aggregation(rows.loss_mask, config.aggregation, max_length=config.max_new_tokens)

    def add_part(gradients: Decoder, part: Int[Array, ""]) -> tuple[Decoder, tuple[Any, ...]]:
        part_rows, weights = _part((rows, whole.weights), part, config)
        aggregated = Aggregation(weights, whole.denominator)
        (loss, seen), new = jax.value_and_grad(loss_of, has_aux=True)(trained, part_rows, aggregated, learner)
        return jax.tree.map(jnp.add, gradients, new), (loss, *seen)

    zeros = jax.tree.map(jnp.zeros_like, trained)
    gradients, (losses, outputs, entropy, kl) = jax.lax.scan(add_part, zeros, _parts(config))
    shape = rows.loss_mask.shape
    num_tokens = jnp.maximum(outputs.num_tokens.sum(), 1.0)
    return gradients, Pass(
        loss=losses.sum(),
        clip_fraction=outputs.num_clipped.sum() / num_tokens,
        ratio=outputs.ratio.reshape(shape),
        entropy=entropy.reshape(shape),
        kl=None if kl is None else kl.reshape(shape),
    )


def logprobs(model: Decoder, rows: LearnerRows, learner: Learner) -> Float[Array, "B T"]:
    """Of the sampled tokens, under a model, part by part."""
    config = learner.config

    def of_part(part: Int[Array, ""]) -> Float[Array, "R T"]:
        part_rows = _part(rows, part, config)
        hidden = hidden_states(model, part_rows)
        return _scores(hidden, model, part_rows, learner, config.sampling_mask).logprobs

    return jax.lax.map(of_part, _parts(config)).reshape(rows.loss_mask.shape)


def _loss(
    model: Decoder, rows: LearnerRows, aggregated: Aggregation, learner: Learner
) -> tuple[Float[Array, ""], tuple[LossOutput, Float[Array, "B T"], Float[Array, "B T"] | None]]:
    config = learner.config
    hidden = hidden_states(model, rows)
    reference = None
    if learner.reference is not None and config.kl_coefficient > 0:
        reference = Reference(hidden_states(learner.reference, rows), learner.reference.head)
    scores = _scores(hidden, model, rows, learner, config.sampling_mask, reference)
    spread = scores
    if config.sampling_mask and config.regularize_over == "vocabulary" and config.is_regularized:
        spread = _scores(hidden, model, rows, learner, False, reference)
    inputs = LossInputs(
        scores.logprobs,
        rows.behaviour_logprobs,
        rows.advantages,
        rows.loss_mask,
        weights=aggregated.weights,
        old_logprobs=rows.old_logprobs,
        ref_logprobs=scores.ref_logprobs,
        kl=spread.kl,
        entropy=spread.entropy,
    )
    output = objective(inputs, config)
    return output.total / aggregated.denominator, (output, scores.entropy, spread.kl)


def _scores(
    hidden: Float[Array, "B T D"],
    model: Decoder,
    rows: LearnerRows,
    learner: Learner,
    on_supports: bool,
    reference: Reference | None = None,
) -> Scores:
    """The policy's scores of the sampled tokens, on their supports or on the whole vocabulary."""
    temperature = jnp.broadcast_to(rows.temperature[:, None], rows.sampled_ids.shape)
    options: dict[str, Any] = {
        "temperature": temperature,
        "replay": rows.replay,
        "loss_mask": rows.loss_mask,
        "reference": reference,
        "sharding": learner.sharding or model.logits_sharding,
        "logit_softcap": model.logit_softcap,
    }
    if not on_supports:
        return full_scores(hidden, model.head, rows.sampled_ids, vocab_size=rows.support.vocab_size, **options)
    implementation = learner.config.implementation
    support = as_cells(rows.support)
    return support_scores(hidden, model.head, support, rows.sampled_ids, implementation=implementation, **options)


def hidden_states(model: Decoder, rows: LearnerRows) -> Float[Array, "B T D"]:
    """The states that predict the sampled tokens; those outside the loss mask mean nothing."""
    hidden = model.hidden(rows.token_ids, rows.lengths)
    steps = jnp.arange(rows.sampled_ids.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.minimum(rows.first_positions[:, None] + steps, hidden.shape[1] - 1)
    return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)


def _parts(config: GRPOConfig) -> Int[Array, " M"]:
    return jnp.arange(config.num_micro_batches, dtype=jnp.int32)


def _part(tree: T, part: Int[Array, ""], config: GRPOConfig) -> T:
    """One micro-batch: the same share of the rows of every leaf."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, RaggedSupport):
            size = leaf.counts.shape[0] // config.num_micro_batches
            return leaf.rows(part * size, size)
        size = leaf.shape[0] // config.num_micro_batches
        return jax.lax.dynamic_slice_in_dim(leaf, part * size, size)

    if config.num_micro_batches == 1:
        return tree
    return jax.tree.map(cut, tree, is_leaf=lambda node: isinstance(node, RaggedSupport))
