"""Whole rollouts in a file: NumPy's archive, of arrays alone.

Nothing in it is a Python object, so that reading one never runs anything. Supports are stored one after another,
`support_ids` with `support_counts` [B, T], whatever they were in memory.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmask import ragged
from jaxmask.batch import SamplingBatch
from jaxmask.ragged_support import RaggedSupport
from jaxmask.rollout import Rollout
from jaxmask.support import Support
from jaxmask.wire import to_csr

VERSION = 1
# What tells the archive from others.
MARK = "jaxmask_rollout"
SAMPLING = "sampling_"
_ARRAYS = ("prompt_ids", "prompt_lengths", "token_ids", "lengths", "logprobs", "finish")
_OPTIONAL = ("sampled_mask", "policy_versions", "num_steps")


def save_rollout(
    path: Path | str,
    rollout: Rollout,
    *,
    full_logprobs: Float[Array | np.ndarray, "B T"] | None = None,
    kept_logprobs: Float[Array | np.ndarray, " K"] | None = None,
    logits: Float[Array | np.ndarray, "B T V"] | None = None,
) -> None:
    """Writes a rollout to a file, which is replaced if it is there.

    What is not part of a rollout is for `jaxmask audit` alone: it looks deeper where it finds it.

    Args:
      path: of the file; `.npz` by custom.
      rollout: any.
      full_logprobs: of each token over the vocabulary at its row's temperature, natural.
      kept_logprobs: of each id of the supports over its support, in the order of `jaxmask.wire.to_csr`.
      logits: of each token, before temperature and filters.
    """
    arrays = to_arrays(rollout, full_logprobs=full_logprobs, kept_logprobs=kept_logprobs, logits=logits)
    with Path(path).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def to_arrays(
    rollout: Rollout,
    *,
    full_logprobs: Float[Array | np.ndarray, "B T"] | None = None,
    kept_logprobs: Float[Array | np.ndarray, " K"] | None = None,
    logits: Float[Array | np.ndarray, "B T V"] | None = None,
) -> dict[str, np.ndarray]:
    """What `save_rollout`, whose arguments these are, writes: arrays of the host by name."""
    token_ids, offsets = to_csr(rollout.support)
    arrays: dict[str, Any] = {MARK: VERSION, "support_ids": token_ids}
    arrays["support_counts"] = np.diff(offsets).astype(np.int32).reshape(rollout.support.shape)
    arrays |= {name: getattr(rollout, name) for name in (*_ARRAYS, *_OPTIONAL)}
    arrays |= {"group_size": rollout.group_size, "logprobs_mode": rollout.logprobs_mode}
    arrays |= {f"support_{name}": value for name, value in _layout(rollout.support).items()}
    fields = dataclasses.fields(rollout.sampling)
    arrays |= {f"{SAMPLING}{field.name}": getattr(rollout.sampling, field.name) for field in fields}
    arrays |= {"full_logprobs": full_logprobs, "kept_logprobs": kept_logprobs, "logits": logits}
    return {name: np.asarray(value) for name, value in arrays.items() if value is not None}


def load_rollout(path: Path | str) -> Rollout:
    """The rollout of a file that `save_rollout` wrote.

    All leaves are equal but for the pool of a `RaggedSupport`, in which the supports may stand in another order.

    Raises:
      ValueError: a file that is no such archive, or of a later version; arrays that are missing; supports that do not
        fit the tokens, or have an id outside the vocabulary or twice.
    """
    arrays = _arrays(Path(path))
    if MARK not in arrays or arrays[MARK].ndim or not 1 <= int(arrays[MARK]) <= VERSION:
        raise ValueError(f"{path} is no rollout of version {VERSION} or before.")
    try:
        return _rollout(arrays)
    except KeyError as error:
        raise ValueError(f"{path} has no array {error}.") from error


def _layout(support: Support | RaggedSupport) -> dict[str, Any]:
    """How supports were stored in memory."""
    if isinstance(support, RaggedSupport):
        return {"width": support.width, "pool_size": support.token_ids.shape[0]}
    return {"width": support.width, "has_bits": support.packed is not None}


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            return {name: archive[name] for name in archive.files}
    # Whatever is wrong with the archive; a single array has no `files`.
    except (zipfile.BadZipFile, zlib.error, EOFError, AttributeError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{path} is no NumPy archive: {error}") from error


def _rollout(arrays: Mapping[str, np.ndarray]) -> Rollout:
    values = {name: jnp.asarray(arrays[name]) for name in _ARRAYS}
    values |= {name: jnp.asarray(arrays[name]) for name in _OPTIONAL if name in arrays}
    sampling: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingBatch):
        stored = arrays.get(f"{SAMPLING}{field.name}")
        is_static = field.name in ("vocab_size", "support_bound")
        sampling[field.name] = None if stored is None else int(stored) if is_static else jnp.asarray(stored)
    if sampling["vocab_size"] is None:
        raise KeyError(f"{SAMPLING}vocab_size")
    return Rollout(
        **values,
        support=_support(arrays, sampling["vocab_size"]),
        sampling=SamplingBatch(**sampling),
        group_size=int(arrays["group_size"]),
        logprobs_mode=str(arrays["logprobs_mode"]),
    )


def _support(arrays: Mapping[str, np.ndarray], vocab_size: int) -> Support | RaggedSupport:
    ids = ragged.integer_array("support_ids", arrays["support_ids"])
    counts, width = arrays["support_counts"], int(arrays["support_width"])
    if counts.shape != arrays["token_ids"].shape or (counts < 0).any() or counts.sum(dtype=np.int64) != len(ids):
        raise ValueError(f"support_counts must cut {len(ids)} ids into one support for each token.")
    lengths = counts.reshape(-1).astype(np.int64)
    cells, sizes, packed = ragged.to_cells(ids, lengths, vocab_size, width)
    if "support_pool_size" in arrays:
        return _pool(ids, lengths.reshape(counts.shape), width, int(arrays["support_pool_size"]), vocab_size)
    if packed is None and bool(arrays["support_has_bits"]):
        rows = np.repeat(np.arange(len(lengths)), lengths)
        packed = ragged.pack(ids.astype(np.int64), rows, (len(lengths), -(-vocab_size // 8)))
    parts = (cells, sizes) if packed is None else (cells, sizes, packed)
    leaves = [jnp.asarray(part.reshape(*counts.shape, *part.shape[1:])) for part in parts]
    return Support(leaves[0], leaves[1], leaves[2] if packed is not None else None, vocab_size)


def _pool(ids: np.ndarray, counts: Int[np.ndarray, "B T"], width: int, size: int, vocab_size: int) -> RaggedSupport:
    if not len(ids) <= size:
        raise ValueError(f"support_pool_size must be at least the number of ids, {len(ids)}, got {size}.")
    pool = np.full(size, vocab_size, np.int32)
    pool[: len(ids)] = ids
    begins = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
    return RaggedSupport(
        jnp.asarray(pool),
        jnp.asarray(begins.astype(np.int32)),
        jnp.asarray(counts.astype(np.int32)),
        jnp.int32(len(ids)),
        width,
        vocab_size,
    )
