"""Keys and values of the tokens already read, row by row."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What each row has read so far; written by prefill and decode.

    Attributes:
      keys: one array per layer, rotated to each token's position.
      values: one array per layer.
      lengths: tokens held by each row, in [0, S]; also the position of the row's next token.
    """

    keys: tuple[Float[Array, "B S K Hd"], ...]
    values: tuple[Float[Array, "B S K Hd"], ...]
    lengths: Int[Array, " B"]

    @property
    def capacity(self) -> int:
        """Number of tokens a row can hold (S)."""
        return self.keys[0].shape[1]

    def repeat(self, group_size: int) -> "KVCache":
        """Every row group_size times in a row: row b becomes rows b * G .. b * G + G - 1.

        Raises:
          ValueError: group_size < 1.
        """
        if group_size < 1:
            raise ValueError(f"group_size must be an integer >= 1, got {group_size}")
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, group_size, axis=0), self)

    def write(self, layer: int, keys: Float[Array, "B K Hd"], values: Float[Array, "B K Hd"]) -> "KVCache":
        """The cache with one token's keys and values at each row's own length; a full row is left as it is."""
        new_keys, new_values = list(self.keys), list(self.values)
        new_keys[layer] = self._put(self.keys[layer], keys)
        new_values[layer] = self._put(self.values[layer], values)
        return replace(self, keys=tuple(new_keys), values=tuple(new_values))

    def advance(self) -> "KVCache":
        """The cache after every layer wrote its token: lengths grow by one, and stop at the capacity."""
        return replace(self, lengths=jnp.minimum(self.lengths + 1, self.capacity))

    def _put(self, slots: Float[Array, "B S K Hd"], token: Float[Array, "B K Hd"]) -> Float[Array, "B S K Hd"]:
        rows = jnp.arange(slots.shape[0])
        # "drop": the default would clamp a full row's write onto its last token.
        return slots.at[rows, self.lengths].set(token, mode="drop", unique_indices=True, indices_are_sorted=True)
