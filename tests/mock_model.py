"""A model whose logits depend on the whole prefix and that costs nothing: for tests of what is around a model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

V = 40
NUM_STATES = 4099  # prime


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """A cache that knows every token of each row through one number, and all numbers before it."""

    states: jax.Array
    lengths: jax.Array

    @property
    def last(self):
        return jnp.take_along_axis(self.states, self.lengths[:, None], axis=1)[:, 0]

    def repeat(self, group_size, *, capacity):
        padded = jnp.pad(self.states, ((0, 0), (0, capacity)))
        return Memory(jnp.repeat(padded, group_size, axis=0), jnp.repeat(self.lengths, group_size))

    def rewind(self, counts):
        return Memory(self.states, self.lengths - counts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mock:
    """A linear recurrence modulo a prime picks a row of a table."""

    table: jax.Array
    max_length: int = dataclasses.field(default=64, metadata={"static": True})

    def prefill(self, token_ids, lengths, *, capacity, chunk_size=1, extend_size=1):
        states = jnp.zeros((token_ids.shape[0], capacity + 1), jnp.int32)
        cache = Memory(states, jnp.zeros_like(lengths))
        for column in range(token_ids.shape[1]):
            cache = self._read(cache, token_ids[:, column], column < lengths)
        return cache

    def decode(self, token_ids, cache):
        cache = self._read(cache, token_ids, jnp.ones_like(token_ids, jnp.bool_))
        return self.table[cache.last], cache

    def extend_logits(self, token_ids, counts, cache):
        logits = []
        for column in range(token_ids.shape[1]):
            cache = self._read(cache, token_ids[:, column], column < counts)
            logits.append(self.table[cache.last])
        return jnp.stack(logits, axis=1), cache

    def _read(self, cache, token_ids, is_read):
        is_read = is_read & (cache.lengths + 1 < cache.states.shape[1])
        state = (cache.last * 31 + token_ids + 7) % self.table.shape[0]
        lengths = cache.lengths + is_read.astype(jnp.int32)
        place = jnp.where(is_read, lengths, cache.states.shape[1])
        put = jax.vmap(lambda row, index, value: row.at[index].set(value, mode="drop"))
        return Memory(put(cache.states, place, state), lengths)

    def state_after(self, prefix) -> int:
        """On the host."""
        return functools.reduce(lambda state, token: (state * 31 + token + 7) % self.table.shape[0], prefix, 0)

    def logits(self, prefix):
        """Of the token after a prefix, on the host."""
        return np.asarray(self.table)[self.state_after(prefix)]


def random_model(seed=0, scale=2.0, **options) -> Mock:
    table = np.random.default_rng(seed).normal(size=(NUM_STATES, V)) * scale
    return Mock(jnp.asarray(table, jnp.float32), **options)


def fixed_model(logits, **options) -> Mock:
    """The same logits at every step."""
    return Mock(jnp.tile(jnp.asarray(np.asarray(logits, np.float32)), (NUM_STATES, 1)), **options)
