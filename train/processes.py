"""Arrays between the hosts and the devices of a run, whether it has one process or many."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from models import MeshRules

T = TypeVar("T")


def to_host(tree: T) -> T:
    """The arrays as NumPy arrays, whole on every host."""
    return jax.device_get(tree)


def whole(tree: T) -> T:
    """The arrays, still on devices, such that every host can read all of them."""
    return tree


def to_devices(tree: T, rules: MeshRules | None) -> T:
    """Arrays that every host holds alike, whole on every device of the mesh."""
    return jax.device_put(tree)


def by_the_first(compute: Callable[[], T]) -> T:
    """What the first process computes, on all of them."""
    return compute()


def is_first() -> bool:
    """Whether this process is the one that writes the run's files."""
    return jax.process_index() == 0


def any_of(flag: bool) -> bool:
    """Whether the flag holds in any process."""
    return flag


def everywhere(leaf: jax.ShapeDtypeStruct, rules: MeshRules | None) -> jax.ShapeDtypeStruct:
    """The description of an array that lies whole on every device of the mesh."""
    sharding = SingleDeviceSharding(jax.devices()[0]) if rules is None else NamedSharding(rules.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
