"""A whole answer as NumPy's archive: ids, supports and log-probabilities as arrays, all else as JSON beside them."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import Response
from jaxtyping import Float
from pydantic_core import to_json

from serve.outputs import CompletionOutput

NPZ = "application/x-npz"


def prefers_npz(accept: str | None) -> bool:
    """Whether an Accept header names the archive, and JSON not before it. Wildcards are content with JSON."""
    quality = _qualities(accept or "")
    return quality.get(NPZ, 0.0) > 0 and quality[NPZ] >= quality.get("application/json", 0.0)


def npz_response(response: Mapping[str, Any], completions: Sequence[CompletionOutput]) -> Response:
    """The archive (`numpy.savez`) of an answer.

    For each completion i: `token_ids_{i}` (int32); `mask_ids_{i}` and `mask_offsets_{i}` (int32) where supports were
    asked for, of which token t keeps mask_ids[mask_offsets[t] : mask_offsets[t + 1]]; `logprobs_{i}` (float32, of the
    drawn ids) where any were. `response` holds the JSON text of all else (uint8).

    Args:
      response: the answer, without what is in the arrays.
      completions: what the arrays are made of.
    """
    # Given strictly as JSON: a number that is not finite becomes null.
    text = to_json(response, inf_nan_mode="null")
    arrays: dict[str, np.ndarray] = {"response": np.frombuffer(text, np.uint8)}
    for completion in completions:
        named = {"token_ids": np.array(completion.token_ids, "<i4")}
        if completion.sampling_mask is not None:
            named["mask_ids"] = completion.sampling_mask.ids.astype("<i4")
            named["mask_offsets"] = completion.sampling_mask.offsets.astype("<i4")
        if completion.logprobs is not None:
            named["logprobs"] = drawn_logprobs(completion)
        arrays |= {f"{name}_{completion.index}": array for name, array in named.items()}
    archive = io.BytesIO()
    np.savez(archive, **arrays)  # type: ignore[arg-type]
    return Response(archive.getvalue(), media_type=NPZ, headers={"Vary": "Accept"})


def drawn_logprobs(completion: CompletionOutput) -> Float[np.ndarray, " T"]:
    """Of each drawn id; NaN where it is not known. The completion has log-probabilities."""
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    values = [entries[token_id].logprob if token_id in entries else math.nan for token_id, entries in pairs]
    return np.array(values, "<f4")


def _qualities(accept: str) -> dict[str, float]:
    """The media types of a header with their weights; what is no weight counts as none."""
    found = {}
    for part in accept.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weights = [text.removeprefix("q=") for text in parameters if text.startswith("q=")]
        found[kind] = _number(weights[0]) if weights else 1.0
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
