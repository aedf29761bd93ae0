"""Keys and values of the tokens already read, row by row.

A layer has as many slots as a row may have tokens, or, where it has a sliding window, only as many as it can see: there
a token's slot is its index modulo the number of slots, and the oldest token is overwritten.

    In: 3 slots, 5 tokens read  Out: slots hold tokens 3, 4, 2

Rows that continue one prompt share its keys and values (`KVCache.repeat`).
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.config import DecoderConfig
from models.layer_slots import KEYS, VALUES, first_tokens, inserted, laid, laid_again, roomy, tokens_of_slots, written
from models.shared_prompt import SharedPrompt


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What each row has read so far; written by prefill, extend and decode.

    Attributes:
      keys: one array per layer, rotated to each token's position; heads and their dimensions before slots.
      values: one array per layer, heads before slots.
      lengths: tokens of each row, shared ones included; also the position of the row's next token.
      prompt: what rows share with their group; None where they share nothing.
      capacity: tokens that a row can hold beside the shared ones; a full row is left as it is.
      windows: tokens that each layer sees; None: all.
      chunk_size: most tokens written at once; layers with a window have slots for these too.
      is_ordered: slots follow positions, whatever is shared and seen, for `DecoderConfig.fixed_order`.
    """

    keys: tuple[Float[Array, "B K Hd _"], ...]
    values: tuple[Float[Array, "B K _ Hd"], ...]
    lengths: Int[Array, " B"]
    prompt: SharedPrompt | None
    capacity: int = field(metadata={"static": True})
    windows: tuple[int | None, ...] = field(metadata={"static": True})
    chunk_size: int = field(default=1, metadata={"static": True})
    is_ordered: bool = field(default=False, metadata={"static": True})

    @classmethod
    def empty(
        cls, num_rows: int, capacity: int, config: DecoderConfig, dtype: DTypeLike, chunk_size: int = 1
    ) -> "KVCache":
        """A cache of rows that have read nothing.

        Raises:
          ValueError: num_rows, capacity or chunk_size below 1.
        """
        for name, value in (("num_rows", num_rows), ("capacity", capacity), ("chunk_size", chunk_size)):
            _check_count(name, value)
        windows = tuple(config.window_of(layer) for layer in range(config.num_layers))
        empty = cls((), (), jnp.zeros(num_rows, jnp.int32), None, capacity, windows, chunk_size, config.fixed_order)
        keys, values = empty._no_tokens(num_rows, config.num_kv_heads, config.head_dim, dtype)
        return replace(empty, keys=keys, values=values)

    def num_slots(self, layer: int) -> int:
        """Tokens of a row that a layer keeps, shared ones not counted."""
        window = self.windows[layer]
        if window is None or self.is_ordered:
            return self.capacity
        return min(self.capacity, window + self.chunk_size - 1)

    @property
    def keeps_all(self) -> bool:
        """Whether each layer has a slot for every token of a row."""
        return all(self.num_slots(layer) == self.capacity for layer in range(len(self.windows)))

    def check_chunk(self, num_tokens: int) -> None:
        """Raises ValueError where a layer's window has no slots for so many tokens at once."""
        if num_tokens > self.chunk_size and not self.keeps_all:
            raise ValueError(
                f"at most chunk_size={self.chunk_size} tokens go into this cache at once, got {num_tokens}"
            )

    @property
    def starts(self) -> Int[Array, " B"]:
        """Position of each row's first own token."""
        if self.prompt is None:
            return jnp.zeros_like(self.lengths)
        return jnp.repeat(self.prompt.lengths, self.lengths.shape[0] // self.prompt.lengths.shape[0])

    @property
    def is_full(self) -> Array:
        """Rows that can read no further token, bool [B]."""
        return self.lengths - self.starts >= self.capacity

    def repeat(self, group_size: int, *, capacity: int) -> "KVCache":
        """Every row group_size times in a row: row b becomes rows b G .. b G + G - 1, with room for further tokens.

        What the rows hold so far is kept once for each group.

        Args:
          group_size: copies of each row, G.
          capacity: further tokens of each copy.

        Raises:
          ValueError: group_size or capacity below 1, or rows that share a prompt already.
        """
        _check_count("group_size", group_size)
        _check_count("capacity", capacity)
        if self.prompt is not None:
            raise ValueError("the rows of this cache share a prompt already; a cache is repeated once")
        lengths = jnp.repeat(self.lengths, group_size)
        if self.is_ordered:
            keys = tuple(roomy(leaf, group_size, capacity, KEYS) for leaf in self.keys)
            values = tuple(roomy(leaf, group_size, capacity, VALUES) for leaf in self.values)
            return replace(self, keys=keys, values=values, lengths=lengths, capacity=self.capacity + capacity)
        own = replace(self, capacity=capacity)
        _, num_heads, head_dim, _ = self.keys[0].shape
        keys, values = own._no_tokens(lengths.shape[0], num_heads, head_dim, self.keys[0].dtype)
        shared = SharedPrompt(self.keys, self.values, self.lengths)
        return replace(own, keys=keys, values=values, lengths=lengths, prompt=shared)

    def fill(
        self, layer: int, keys: Float[Array, "B T K Hd"], values: Float[Array, "B T K Hd"], lengths: Int[Array, " B"]
    ) -> "KVCache":
        """An empty cache with the first tokens of right-padded rows in a layer; `lengths` of the cache stay."""
        num_slots = self.num_slots(layer)
        return self._with_layer(layer, laid(keys, lengths, num_slots, KEYS), laid(values, lengths, num_slots, VALUES))

    def write(
        self, layer: int, keys: Float[Array, "B C K Hd"], values: Float[Array, "B C K Hd"], counts: Int[Array, " B"]
    ) -> "KVCache":
        """The cache with the next counts[b] tokens of each row in a layer; what is past the capacity is dropped."""
        num_slots = self.num_slots(layer)
        places = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        tokens = (self.lengths - self.starts)[:, None] + places
        is_written = (places < counts[:, None]) & (tokens < self.capacity)
        # Past the last slot: dropped. The default would clamp a full row's write onto its last token.
        slots = jnp.where(is_written, tokens % num_slots, num_slots)
        new_keys = written(self.keys[layer], keys, slots, KEYS)
        return self._with_layer(layer, new_keys, written(self.values[layer], values, slots, VALUES))

    def advance(self, counts: Int[Array, " B"]) -> "KVCache":
        """The cache after every layer wrote: rows are longer by their counts, up to the capacity."""
        return replace(self, lengths=jnp.minimum(self.lengths + counts, self.starts + self.capacity))

    def rewind(self, counts: Int[Array, " B"]) -> "KVCache":
        """The cache with the last counts[b] tokens of each row forgotten, as if they had never been read.

        A layer with a window has overwritten what it saw before: there a row must not become shorter than it was before
        the `extend` that took it to its greatest length so far, so that at most chunk_size tokens can be forgotten.

        Args:
          counts: clipped to the row's own tokens; shared ones stay. In fixed order all tokens are the row's own.
        """
        own = self.lengths - self.starts
        return replace(self, lengths=self.lengths - jnp.clip(counts, 0, own))

    def insert(self, rows: Int[Array, " P"], other: "KVCache") -> "KVCache":
        """The cache in which row rows[p] is row p of another cache, whatever it held before.

        Args:
          rows: distinct; rows below 0 or beyond the last are left out.
          other: of the same decoder, with a capacity that is not greater. Its chunk_size may differ; until it has been
            extended, an inserted row can be rewound by no more than that many tokens.

        Raises:
          ValueError: either cache shares a prompt, or the other is of another decoder, dtype or number of rows, or has
            a greater capacity.
        """
        _check_insert(self, rows, other)
        # Out of range on either side: dropped. Negative indices would count from the end.
        rows = jnp.where(rows < 0, self.lengths.shape[0], rows)

        def put(mine: Array, theirs: Array, axis: int) -> Array:
            num_slots, num_given = mine.shape[axis], theirs.shape[axis]
            if num_given != num_slots and not num_given == other.capacity < num_slots:
                theirs = laid_again(theirs, other.lengths, num_slots, axis)
            return inserted(mine, rows, theirs)

        keys = [put(*leaves, KEYS) for leaves in zip(self.keys, other.keys, strict=True)]
        values = [put(*leaves, VALUES) for leaves in zip(self.values, other.values, strict=True)]
        lengths = self.lengths.at[rows].set(other.lengths, mode="drop")
        return replace(self, keys=tuple(keys), values=tuple(values), lengths=lengths)

    def take_row(self, row: Int[Array, ""], num_tokens: Int[Array, ""], *, capacity: int, chunk_size: int) -> "KVCache":
        """The first tokens of a row alone, with room for `capacity` in all; they must fit, and windows still hold them.

        All else in it is 0: what the row read later, were it NaN, reaches nothing.
        """
        other = replace(self, capacity=capacity, chunk_size=chunk_size)
        lengths, is_plain = num_tokens[None], self.keeps_all and other.keeps_all

        def taken(leaf: Array, layer: int, axis: int) -> Array:
            own = jax.lax.dynamic_slice_in_dim(leaf, row, 1)
            return first_tokens(own, lengths, other.num_slots(layer), axis, is_plain)

        keys = tuple(taken(leaf, layer, KEYS) for layer, leaf in enumerate(self.keys))
        values = tuple(taken(leaf, layer, VALUES) for layer, leaf in enumerate(self.values))
        return replace(other, keys=keys, values=values, lengths=lengths)

    def positions(self, layer: int, lengths: Int[Array, " B"]) -> Int[Array, "B S"]:
        """Position of the token in each own slot of a layer once rows have these lengths; below 0 where it is empty."""
        starts = self.starts
        tokens = tokens_of_slots(lengths - starts, self.num_slots(layer))
        return jnp.where(tokens >= 0, starts[:, None] + tokens, -1)

    def prompt_positions(self, layer: int) -> Int[Array, "B S"]:
        """The same of the shared slots, for each row; there must be some."""
        assert self.prompt is not None
        lengths = self.prompt.lengths
        tokens = tokens_of_slots(lengths, self.prompt.keys[layer].shape[KEYS])
        return jnp.repeat(tokens, self.lengths.shape[0] // lengths.shape[0], axis=0)

    def _no_tokens(
        self, num_rows: int, num_heads: int, head_dim: int, dtype: DTypeLike
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Keys and values of each layer for so many rows that have read nothing."""
        counts = [self.num_slots(layer) for layer in range(len(self.windows))]
        keys = tuple(jnp.zeros((num_rows, num_heads, head_dim, count), dtype) for count in counts)
        return keys, tuple(jnp.zeros((num_rows, num_heads, count, head_dim), dtype) for count in counts)

    def _with_layer(self, layer: int, keys: Array, values: Array) -> "KVCache":
        new_keys, new_values = list(self.keys), list(self.values)
        new_keys[layer], new_values[layer] = keys, values
        return replace(self, keys=tuple(new_keys), values=tuple(new_values))


def _check_insert(cache: KVCache, rows: Int[Array, " P"], other: KVCache) -> None:
    if cache.prompt is not None or other.prompt is not None:
        raise ValueError("rows that share a prompt can be neither inserted nor replaced")
    if rows.shape != other.lengths.shape:
        raise ValueError(f"rows must name a row for each of the other cache's {len(other.lengths)}, got {len(rows)}")
    if other.capacity > cache.capacity:
        raise ValueError(f"the other cache's capacity must be at most {cache.capacity}, got {other.capacity}")
    ours, theirs = (
        (one.windows, one.is_ordered, [(*leaf.shape[1:3], leaf.dtype.name) for leaf in one.keys])
        for one in (cache, other)
    )
    if ours != theirs:
        raise ValueError("the other cache must be of the same decoder: layers, windows, heads or dtype differ")


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value}")
