"""What `generate` asks of a model. Any pytree with these methods will do; `models.Decoder` is one."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int


@runtime_checkable
class Cache(Protocol):
    """What a model remembers of each row; a pytree."""

    def repeat(self, group_size: int, *, capacity: int) -> Cache:
        """Each row `group_size` times in a row, each of them with room for `capacity` more positions."""
        ...


@runtime_checkable
class Model(Protocol):
    """Prefill and decode; a pytree, passed to the compiled program as an argument."""

    @property
    def max_length(self) -> int:
        """Most positions a row can have."""
        ...

    def prefill(self, token_ids: Int[Array, "P S"], lengths: Int[Array, " P"], *, capacity: int) -> Any:
        """A `Cache` with room for `capacity` positions that holds the first `lengths` tokens of each row."""
        ...

    def decode(self, token_ids: Int[Array, " B"], cache: Any) -> tuple[Float[Array, "B V"], Any]:
        """Logits after one more token per row, and the cache with that token in it."""
        ...


def prefill_options(chunk_size: int | None, extend_size: int | None) -> dict[str, int]:
    """What `prefill` is told besides, where there is something to tell: not every model can be asked.

    Args:
      chunk_size: places of the prompts read at once; None: all of them.
      extend_size: most tokens that will later be read at once, or taken back; None: one at a time, for good.
    """
    asked = {"chunk_size": chunk_size, "extend_size": extend_size}
    return {name: size for name, size in asked.items() if size is not None}


@runtime_checkable
class PlacedModel(Protocol):
    """A model that knows how it lies on a mesh."""

    @property
    def logits_sharding(self) -> NamedSharding | None:
        """How its logits [B, V] are cut over rows and vocabulary; None on one device."""
        ...
