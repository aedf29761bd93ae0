"""The decoder in two trees of its own shape: what is trained and what is frozen, None in place of the rest.

With adapters these alone are trained. Gradients, Adam's moments and checkpoints are made from the trained tree, so that
nothing of them exists for a frozen weight. Without adapters the trained tree is the decoder itself.
"""

from __future__ import annotations

import jax

from models import Decoder
from models.lora import is_adapter
from models.weights import parameter_name


def partition(model: Decoder) -> tuple[Decoder, Decoder]:
    """What is trained, and what is frozen."""
    return _part_of(model, True), _part_of(model, False)


def combine(trained: Decoder, frozen: Decoder) -> Decoder:
    """The decoder that `partition` cut in two."""
    return jax.tree.map(
        lambda one, other: other if one is None else one, trained, frozen, is_leaf=lambda leaf: leaf is None
    )


def _part_of(model: Decoder, is_trained: bool) -> Decoder:
    has_adapters = model.config.lora is not None

    def keep(path: tuple, leaf: jax.Array) -> jax.Array | None:
        trains = not has_adapters or is_adapter(parameter_name(path))
        return leaf if trains == is_trained else None

    return jax.tree_util.tree_map_with_path(keep, model)
