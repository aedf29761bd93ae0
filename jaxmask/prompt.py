"""Log-probabilities of prompt tokens, which no sampling parameter touches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmask import logprobs, mass, shards
from jaxmask.checks import check_num_logprobs, check_prompts
from jaxmask.drawn import TopLogprobs
from jaxmask.params import check_logprobs_mode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """What a model says of the tokens of prompts, from the second on: nothing comes before the first.

    Attributes:
      logprobs: column t is of token t + 1; -inf past the end of a prompt.
      ranks: how many tokens are at least as likely, itself included; 0 past the end.
      top: the likeliest tokens at each place; unused past the end.
    """

    logprobs: Float[Array, "B T"]
    ranks: Int[Array, "B T"]
    top: TopLogprobs


def prompt_logprobs(
    logits: Float[Array, "B S V"],
    prompt_ids: Int[Array, "B S"],
    prompt_lengths: Int[Array, " B"],
    *,
    vocab_size: int | None = None,
    logprobs_mode: str = "raw_logprobs",
    num_logprobs: int = 0,
) -> PromptLogprobs:
    """Log-probability, rank and likeliest tokens of every prompt token but the first.

    Sampling parameters do not touch prompts, so `processed_*` modes give what `raw_*` modes do (as in vLLM).

    Args:
      logits: of teacher forcing: those at place t are of token t + 1; on one device, or cut over rows alone.
      prompt_ids: right-padded; cells at or past a prompt's length are never read.
      prompt_lengths: in [1, S].
      vocab_size: number of real ids; by default every column is one.
      logprobs_mode: one of the four; `*_logits` modes give logits.
      num_logprobs: top tokens at each place, 0 to min(V, 4096).

    Raises:
      ValueError: shapes or types that do not fit, an unknown mode, a number out of its range or, seen outside of jit
        only, an empty prompt or an id outside the vocabulary.

    Source: vLLM, `prompt_logprobs`.
    """
    check_logprobs_mode(logprobs_mode)
    if not jnp.issubdtype(logits.dtype, jnp.floating) or not jnp.issubdtype(prompt_ids.dtype, jnp.integer):
        raise ValueError(
            f"logits must be floating-point numbers and prompt_ids integers, got {logits.dtype} and {prompt_ids.dtype}."
        )
    V = logits.shape[-1] if vocab_size is None else vocab_size
    if logits.ndim != 3 or logits.shape[:2] != prompt_ids.shape or prompt_lengths.shape != prompt_ids.shape[:1]:
        raise ValueError(
            f"logits must be [B, S, V], prompt_ids [B, S] and prompt_lengths [B], got {logits.shape}, "
            f"{prompt_ids.shape} and {prompt_lengths.shape}."
        )
    if not 1 <= V <= min(logits.shape[-1], mass.MAX_TERMS):
        raise ValueError(f"vocab_size must be in [1, {min(logits.shape[-1], mass.MAX_TERMS)}], got {V}.")
    num_logprobs = check_num_logprobs(num_logprobs, V)
    check_prompts(prompt_ids, prompt_lengths, V)
    mode = "raw_logits" if logprobs_mode.endswith("logits") else "raw_logprobs"
    num_rows, num_places = prompt_ids.shape[0], prompt_ids.shape[1] - 1
    is_token = jnp.arange(1, num_places + 1, dtype=jnp.int32)[None, :] < prompt_lengths[:, None]
    token_ids = jnp.where(is_token, prompt_ids[:, 1:], 0).astype(jnp.int32)
    if token_ids.size == 0:
        empty = jnp.zeros((*token_ids.shape, num_logprobs))
        return PromptLogprobs(jnp.zeros(token_ids.shape), token_ids, TopLogprobs(empty.astype(jnp.int32), empty))
    flat = (logits[:, :-1, :V].reshape(-1, V), token_ids.reshape(-1))
    found = logprobs.raw_values(*flat, mode, num_logprobs, V, shards.Slice(V))
    values, ranks, top = jax.tree.map(lambda leaf: leaf.reshape(num_rows, num_places, *leaf.shape[1:]), found)
    return PromptLogprobs(
        jnp.where(is_token, values, -jnp.inf),
        jnp.where(is_token, ranks, 0),
        TopLogprobs(
            jnp.where(is_token[:, :, None], top.token_ids, V),
            jnp.where(is_token[:, :, None], top.logprobs, -jnp.inf),
        ),
    )
