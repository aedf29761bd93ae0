"""Supports in responses: vLLM's nested lists, or two arrays."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np

from serve.outputs import SamplingMask

MaskFormat = Literal["lists", "base64"]


def mask_json(mask: SamplingMask | None, form: MaskFormat) -> Any:
    """A mask as it goes into JSON; None for None.

    Args:
      mask: of a completion, or of a delta.
      form: "lists": one ascending list of ids for each token. "base64": {"token_ids", "offsets"}, little-endian int32,
        of which token t keeps token_ids[offsets[t] : offsets[t + 1]].
    """
    if mask is None:
        return None
    if form == "lists":
        return mask.token_ids
    arrays = {"token_ids": mask.ids, "offsets": mask.offsets}
    return {name: base64.b64encode(array.astype(np.dtype("<i4")).tobytes()).decode() for name, array in arrays.items()}
