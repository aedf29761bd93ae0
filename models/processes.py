"""What the processes of one program do together, where there are several (`jax.distributed`).

Every function but `is_first` is called by all processes in the same order, from the main thread: each is a computation
of all devices, and two threads could begin theirs in different orders.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
# Bytes that a value fills up to a power of two of; each size is a program of its own.
SMALLEST_MESSAGE = 1024


def is_first() -> bool:
    """Whether this process is the one that writes files and speaks to people."""
    return jax.process_index() == 0


def by_the_first(compute: Callable[[], T]) -> T:
    """What `compute` returns in the first process, in all of them.

    Args:
      compute: called in the first process alone; its value is pickled.

    Raises:
      Exception: what `compute` raised, in all processes; where it is not of Python's own kinds, the others raise a
        RuntimeError that names it.
    """
    if jax.process_count() == 1:
        return compute()
    if not is_first():
        value, error = pickle.loads(_broadcast(b""))
        if error is not None:
            raise error
        return value
    try:
        value = compute()
        message = pickle.dumps((value, None))
    except BaseException as error:
        _broadcast(pickle.dumps((None, _portable(error))))
        raise
    _broadcast(message)
    return value


def any_of(flag: bool) -> bool:
    """Whether the flag holds in any process."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def in_all(compute: Callable[[], T]) -> T:
    """What `compute` returns here, once it has returned in all processes.

    Raises:
      Exception: what `compute` raised here.
      RuntimeError: it raised in another process.
    """
    error: Exception | None = None
    try:
        value = compute()
    except Exception as raised:
        error = raised
    if any_of(error is not None):
        raise error or RuntimeError("another process failed")
    return value


def to_host(tree: T) -> T:
    """The arrays as NumPy arrays, whole in every process."""
    return jax.device_get(jax.tree.map(_whole, tree))


def whole(tree: T) -> T:
    """The arrays, still on devices, such that every process can read any part of them by itself."""
    if jax.process_count() == 1:
        return tree
    here = jax.local_devices()[0]
    return jax.tree.map(lambda leaf: jax.device_put(jax.device_get(_whole(leaf)), here), tree)


def to_the_first(tree: T) -> T | None:
    """The arrays as NumPy arrays, whole in the first process; None in the others.

    In the others, one array at a time is whole.
    """
    if is_first():
        return jax.tree.map(lambda leaf: jax.device_get(_whole(leaf)), tree)
    for leaf in jax.tree.leaves(tree):
        _whole(leaf)
    return None


def _whole(leaf: Any) -> Any:
    """What `device_get` can take: an array whose pieces lie on devices of other processes is gathered."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    return multihost_utils.process_allgather(leaf, tiled=True)


def _broadcast(message: bytes) -> bytes:
    """The first process's message, in all of them."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
    room = max(SMALLEST_MESSAGE, 1 << (size - 1).bit_length())
    padded = np.zeros(room, np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    return multihost_utils.broadcast_one_to_all(padded)[:size].tobytes()


def _portable(error: BaseException) -> BaseException:
    """The error, where every process can unpickle it; else one that names it."""
    named = RuntimeError(f"{type(error).__name__} in process 0: {error}")
    if type(error).__module__ != "builtins":
        return named
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an argument of it may be anything
        return named
    return error
