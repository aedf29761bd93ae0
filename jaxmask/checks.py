"""Checks before anything is computed: whether sampling can be replayed, and whether prompts are ids.

Texts and order of the former are vLLM's, so that clients written for it recognise them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxmask import mass
from jaxmask.params import SamplingParams, check_integer, check_logprobs_mode


def check_engine(
    *,
    return_sampling_mask: bool,
    logprobs_mode: str,
    logits_processors: Sequence[Any] | None = (),
    is_diffusion: bool = False,
) -> None:
    """Raises unless an engine of these settings can start; to be called once, before any request.

    Args:
      return_sampling_mask: whether the engine keeps supports for replay; without them only the mode is checked.
      logprobs_mode: the engine's mode, one of `LOGPROBS_MODES`.
      logits_processors: what rewrites logits outside of the edits of `SamplingParams`; it cannot be replayed.
      is_diffusion: whether the model is a diffusion model.

    Raises:
      ValueError: an unknown mode; then, with vLLM's texts, a diffusion model, custom logits processors, or a mode whose
        log-probabilities are not normalised over the support. The first that applies, in this order.

    Source: vLLM, config/vllm.py.
    """
    check_logprobs_mode(logprobs_mode)
    if not return_sampling_mask:
        return
    if is_diffusion:
        raise ValueError("sampling distribution replay does not support diffusion models")
    if logits_processors:
        raise ValueError("sampling distribution replay does not support custom logits processors")
    _check_replay_mode(logprobs_mode)


def check_sampling_mask(params: SamplingParams, *, logprobs_mode: str, unbounded_support: bool = False) -> None:
    """Raises unless `params` can be sampled with its supports kept for replay.

    Args:
      params: the request.
      logprobs_mode: the engine's mode.
      unbounded_support: allow top_k = 0; supports of any size are then kept as packed bits.

    Raises:
      ValueError: with vLLM's texts; a request that opted out (`return_sampling_mask=False`) is not checked.

    Source: vLLM, config/vllm.py and v1/engine/input_processor.py.
    """
    _check_replay_mode(logprobs_mode)
    if params.return_sampling_mask is False:
        return
    if params.temperature <= 0:
        raise ValueError("sampling distribution replay requires temperature > 0")
    if params.top_k <= 0 and not unbounded_support:
        raise ValueError(
            "sampling distribution replay requires top_k > 0 to bound sampling mask size, reduce transfer overhead, "
            "and avoid potential OOMs"
        )


def _check_replay_mode(logprobs_mode: str) -> None:
    if logprobs_mode != "processed_logprobs":
        raise ValueError(
            "sampling distribution replay requires logprobs_mode='processed_logprobs' so that returned logprobs are "
            "normalized over the same nucleus as the sampling mask"
        )


def check_num_logprobs(num: Any, vocab_size: int, allowed: str = "an integer") -> int:
    """`num` as Python's integer; raises ValueError, which names what is `allowed`, unless as many can be reported."""
    most = min(vocab_size, mass.MAX_COLUMNS)
    if not 0 <= check_integer("num_logprobs", num) <= most:
        raise ValueError(f"num_logprobs must be {allowed} in [0, {most}], got {num}.")
    return int(num)


def check_prompts(prompt_ids: Int[Array, "P S"], prompt_lengths: Int[Array, " P"], vocab_size: int) -> None:
    """Raises ValueError unless shapes fit and, seen outside of jit only, every prompt holds ids and at least one."""
    if prompt_ids.ndim != 2 or prompt_lengths.shape != prompt_ids.shape[:1]:
        raise ValueError(
            f"prompt_ids must be [P, S] and prompt_lengths [P], got {prompt_ids.shape} and {prompt_lengths.shape}."
        )
    if isinstance(prompt_ids, jax.core.Tracer) or isinstance(prompt_lengths, jax.core.Tracer):
        return
    ids, lengths = np.asarray(prompt_ids), np.asarray(prompt_lengths)
    for row, length in enumerate(lengths):
        if not 1 <= length <= ids.shape[1]:
            raise ValueError(f"prompt_lengths must be in [1, {ids.shape[1]}], got {length} in row {row}.")
        outside = [int(i) for i in ids[row, :length] if not 0 <= i < vocab_size]
        if outside:
            raise ValueError(f"prompt_ids must be in [0, {vocab_size}), got {outside} in row {row}.")
