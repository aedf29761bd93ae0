"""Weights from files, checked against the model that serves, to where its own lie."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import models
from models.weights import named_parameters

LOG = logging.getLogger("serve")
ADAPTERS = "adapter_config.json"
# How a decoder computes, which files do not say.
_CHOICES = ("remat", "fixed_order", "compute_dtype", "attention")
_NUMBERS_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an array lies. Programs are compiled anew where only `is_committed` differs."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    is_committed: bool


class Places:
    """What the weights of a model are, and where on its devices they lie; the model itself is not kept."""

    def __init__(self, model: Any):
        """Those of a model on devices of this process."""
        leaves, self._tree = jax.tree.flatten(model)
        self._places = [_Place(leaf.shape, leaf.dtype, leaf.sharding, leaf.committed) for leaf in leaves]
        self._config: models.DecoderConfig | None = None
        if isinstance(model, models.Decoder):
            self._config, self._dtype = model.config, model.final_norm.dtype

    def read(self, path: str) -> list[np.ndarray]:
        """The weights of a decoder on the disk, on the host, checked; takes as long as the disk does.

        Args:
          path: of a folder in the hub's layout, or one that `models.orbax_weights` wrote; a GGUF file.

        Raises:
          FileNotFoundError: nothing is there, or no weights in it.
          ValueError: the files are damaged, hold another model, or a number that is not finite.
        """
        if self._config is None:
            raise ValueError("weights are read for a models.Decoder, which the server's model is not.")
        # A name of the hub would be downloaded.
        if not Path(path).exists():
            raise FileNotFoundError(f"there is nothing at {path!r} on the server's machine.")
        if (Path(path) / ADAPTERS).is_file():
            raise ValueError(f"{path} holds adapters: merge them with their model (`models.lora.merge`) first.")
        decoder = self._load(Path(path))
        self._check_config(path, decoder.config)
        leaves = []
        for (name, leaf), place in zip(named_parameters(decoder).items(), self._places, strict=True):
            if (leaf.shape, leaf.dtype) != (place.shape, place.dtype):
                raise ValueError(
                    f"{path}: {name!r} must have shape {place.shape} and type {place.dtype}, "
                    f"got {leaf.shape} and {leaf.dtype}."
                )
            leaves.append(np.asarray(leaf))
            if not _is_finite(leaves[-1]):
                raise ValueError(f"{path}: {name!r} has a number that is not finite.")
        return leaves

    def put(self, leaves: Sequence[np.ndarray]) -> Any:
        """A model of weights from the host, where the first one's lay, and no program is compiled anew for it."""
        pairs = zip(leaves, self._places, strict=True)
        placed = [jax.device_put(leaf, place.sharding if place.is_committed else None) for leaf, place in pairs]
        return jax.block_until_ready(jax.tree.unflatten(self._tree, placed))

    def without_values(self) -> Any:
        """A model of shapes and types alone, which takes no memory."""
        shapes = [jax.ShapeDtypeStruct(place.shape, place.dtype) for place in self._places]
        return jax.tree.unflatten(self._tree, shapes)

    def _load(self, path: Path) -> models.Decoder:
        try:
            with _on_the_host():
                return models.load(path, self._dtype)[0]
        except (FileNotFoundError, ValueError, MemoryError):
            raise
        except Exception as error:  # files may be damaged in ways that no reader foresees
            LOG.warning("weights that cannot be read", exc_info=True)
            raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error

    def _check_config(self, path: str, found: models.DecoderConfig) -> None:
        ours = self._config
        differing = [
            f"{field.name} is {theirs!r}, of the server's model {own!r}"
            for field in dataclasses.fields(found)
            if field.name not in _CHOICES
            and (theirs := getattr(found, field.name)) != (own := getattr(ours, field.name))
        ]
        if differing:
            raise ValueError(f"{path} holds another model: {'; '.join(differing)}.")


def on_the_host(model: Any) -> list[np.ndarray]:
    """The weights of a model, bit for bit."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


@contextlib.contextmanager
def _on_the_host() -> Iterator[None]:
    """Lets arrays be made on the host, so that weights that are refused take nothing of the device's memory."""
    if jax.default_backend() == "cpu":
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def _is_finite(values: np.ndarray) -> bool:
    flat = values.reshape(-1)
    parts = (flat[start : start + _NUMBERS_AT_ONCE] for start in range(0, flat.size, _NUMBERS_AT_ONCE))
    return all(bool(np.isfinite(part).all()) for part in parts)
