"""What the kernels of the filters read and write, as tuples of arrays, or of references to arrays inside a kernel."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmask import filters, mass
from jaxmask.batch import SamplingBatch


class Settings(NamedTuple):
    """What the kernels read of each row's settings, [R] each; flags are 0 or 1."""

    top_k: Any
    factor: Any
    least_z: Any
    top_p_units: Any
    is_cut: Any
    is_greedy: Any
    wants_total: Any
    seed_low: Any
    seed_high: Any
    position: Any


class Decided(NamedTuple):
    """What was drawn of each row, [R], and its support in id order, [R, M]; flags are 0 or 1."""

    token_ids: Any
    logprobs: Any
    ranks: Any
    counts: Any
    is_decided: Any
    cells: Any
    values: Any


def settings_of(batch: SamplingBatch, steps: Int[Array, " B"]) -> Settings:
    """The settings of a batch, in the form the kernels read."""
    is_cut = batch.top_p < 1
    wants_total = (batch.top_k >= batch.vocab_size) & (is_cut | batch.is_greedy_without_support())
    return Settings(
        batch.top_k,
        filters.inverse_temperature(batch.temperature),
        jnp.log(batch.min_p),
        mass.fraction_units(batch.top_p),
        is_cut.astype(jnp.int32),
        (batch.temperature == 0).astype(jnp.int32),
        wants_total.astype(jnp.int32),
        batch.seeds[:, 0],
        batch.seeds[:, 1],
        steps,
    )
