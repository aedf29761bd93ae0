"""Completions out of the batches of other trainers, which keep supports as sparse rows: prime-rl and Miles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from jaxmask import ragged
from jaxmask.answered import as_params, part, parts
from jaxmask.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class SparseRow:
    """One completion with its supports one after another; what the lists hold is whatever was in the batch.

    Attributes:
      prompt: ids before the first token that may train.
      token_ids: of the completion.
      logprobs: of each token over its support.
      loss_mask: which tokens train.
      ids: of all supports.
      counts: ids of each support; 0 where there is none.
      params: what it was sampled with.
    """

    prompt: Sequence[Any]
    token_ids: Sequence[Any]
    logprobs: Sequence[Any]
    loss_mask: Sequence[Any]
    ids: Integer[np.ndarray, " nnz"]
    counts: Integer[np.ndarray, " T"]
    params: SamplingParams


def prime_rl_row(sample: Any, where: str) -> SparseRow:
    """The row of a training sample, which begins with the first sampled token."""
    token_ids = parts(sample, "token_ids", where)
    length = len(token_ids)
    mask = _as_long(parts(sample, "mask", where), length, f"'mask' of {where}")
    logprobs = _as_long(parts(sample, "logprobs", where), length, f"'logprobs' of {where}")
    temperatures = _as_long(parts(sample, "temperatures", where), length, f"'temperatures' of {where}")
    kept = part(sample, "sampling_mask", where, "prime-rl keeps it where top_p or top_k truncates")
    ids = _integers(part(kept, "ids", f"'sampling_mask' of {where}"), f"ids of {where}")
    counts = _integers(part(kept, "counts", f"'sampling_mask' of {where}"), f"counts of {where}")
    _as_long(counts, length, f"'counts' of {where}")
    if True not in mask:
        raise ValueError(f"{where} has no sampled token.")
    begin = mask.index(True)
    used = {temperature for temperature, is_sampled in zip(temperatures, mask, strict=True) if is_sampled}
    if len(used) != 1:
        raise ValueError(f"{where} was sampled at several temperatures, {sorted(used)}: a row has one.")
    params = as_params(where, {"temperature": used.pop(), "max_tokens": None})
    num_before = int(counts[:begin].sum())
    return SparseRow(
        token_ids[:begin], token_ids[begin:], logprobs[begin:], mask[begin:], ids[num_before:], counts[begin:], params
    )


def miles_row(batch: Any, number: int, params: SamplingParams) -> SparseRow:
    """The row of a sample of a batch, which begins with its response."""
    where = f"sample {number}"

    def of_sample(name: str) -> Any:
        entries = part(batch, name, "batch")
        if len(entries) <= number:
            raise ValueError(f"{name!r} of the batch must have an entry for each sample, got {len(entries)}.")
        return entries[number]

    tokens = parts({"tokens": of_sample("tokens")}, "tokens", where)
    length = int(of_sample("response_lengths"))
    if not 0 <= length < len(tokens):
        raise ValueError(f"'response_lengths' of {where} must be in [0, {len(tokens)}), got {length}.")
    per_token = {
        name: _as_long(parts({name: of_sample(name)}, name, where), length, f"{name!r} of {where}")
        for name in ("loss_masks", "rollout_log_probs")
    }
    ids = _integers(of_sample("rollout_sampling_mask_ids"), f"ids of {where}")
    offsets = _integers(of_sample("rollout_sampling_mask_offsets"), f"offsets of {where}")
    try:
        counts = ragged.row_lengths(offsets, len(ids))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    _as_long(counts, length, f"supports of {where}")
    begin = len(tokens) - length
    # Flags are numbers there; what is none is refused with the rest.
    flags = [bool(flag) if flag in (0, 1) else flag for flag in per_token["loss_masks"]]
    return SparseRow(tokens[:begin], tokens[begin:], per_token["rollout_log_probs"], flags, ids, counts, params)


def _integers(given: Any, name: str) -> Integer[np.ndarray, " N"]:
    """An array or a list, or the bytes of little-endian int32 as prime-rl sends them."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        if len(given) % 4:
            raise ValueError(f"{name} must be bytes of int32, got {len(given)} of them.")
        return np.frombuffer(given, "<i4")
    return ragged.integer_array(name, given)


def _as_long(values: Any, length: int, name: str) -> Any:
    if len(values) != length:
        raise ValueError(f"{name} must have one entry for each token, {length}, got {len(values)}.")
    return values
