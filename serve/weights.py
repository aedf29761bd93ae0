"""The model that answers, and the name of its weights."""

from __future__ import annotations

from typing import Any

import jax


class Weights:
    """A model that can be replaced by one of the same shapes.

    Attributes:
      model: the model.
      version: the name of its weights; "0" at first.
    """

    def __init__(self, model: Any):
        """The first ones."""
        self.model, self.version = model, "0"

    def replace(self, model: Any, version: str | None) -> None:
        """Others; see `Engine.update_weights`."""
        if _shapes(model) != _shapes(self.model):
            raise ValueError("the new model must have the shapes and types of the one before")
        self.model = model
        self.version = _next_version(self.version) if version is None else version


def _shapes(model: Any) -> list[Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return [(path, leaf.shape, leaf.dtype) for path, leaf in leaves]


def _next_version(version: str) -> str:
    return str(int(version) + 1) if version.isdecimal() else f"{version}+1"
