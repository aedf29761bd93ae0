"""Keys and values of prompts that several rows of a cache continue."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedPrompt:
    """What the rows of each group have in common; written once, by `KVCache.repeat`.

    Attributes:
      keys: one array per layer, laid as in `KVCache`.
      values: one array per layer.
      lengths: tokens of each prompt.
    """

    keys: tuple[Float[Array, "P K Hd _"], ...]
    values: tuple[Float[Array, "P K _ Hd"], ...]
    lengths: Int[Array, " P"]
