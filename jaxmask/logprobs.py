"""What a reported log-probability means: vLLM's four modes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmask import filters


def reported_values(
    mode: str,
    *,
    raw_logits: Float[Array, "B V"],
    edited: Float[Array, "B V"],
    processed_logprobs: Float[Array, " B"],
    token_ids: Int[Array, " B"],
    temperature: Float[Array, " B"],
) -> Float[Array, " B"]:
    """The value of each drawn token under a mode.

    raw_logits: x_a; raw_logprobs: x_a - log sum_v exp(x_v); processed_logits: edited_a / T;
    processed_logprobs: log-probability over the support.

    Args:
      mode: one of `params.LOGPROBS_MODES`.
      raw_logits: before any edit.
      edited: after the edits, before the temperature.
      processed_logprobs: after everything.
      token_ids: drawn ids.
      temperature: the rows' temperature, 0 for greedy.

    Source: vLLM, `logprobs_mode`.
    """
    if mode == "processed_logprobs":
        return processed_logprobs
    if mode == "processed_logits":
        return _pick(edited, token_ids).astype(jnp.float32) / filters.effective_temperature(temperature)
    raw = _pick(raw_logits, token_ids).astype(jnp.float32)
    return raw if mode == "raw_logits" else raw - jax.nn.logsumexp(filters.drawable(raw_logits), axis=1)


def _pick(values: Float[Array, "B V"], token_ids: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(values, token_ids[:, None], axis=1)[:, 0]
