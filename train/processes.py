"""The processes of a run, one or many, and arrays between their hosts and the devices.

With several, every function here but `is_first` is called by all of them in the same order, from the main thread.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from models import MeshRules
from models.processes import any_of, by_the_first, in_all, is_first, to_host, to_the_first, whole

__all__ = [
    "Cluster",
    "any_of",
    "by_the_first",
    "everywhere",
    "in_all",
    "introduce",
    "is_first",
    "join",
    "to_devices",
    "to_host",
    "to_the_first",
    "whole",
]

T = TypeVar("T")
# Seconds that a process which ends waits for the others: one that failed alone must not hold the rest for minutes.
SECONDS_TO_LEAVE = 60


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where the processes of a run meet.

    Attributes:
      coordinator: HOST:PORT, an address of the host of process 0 and a free port there; None: JAX finds everything out
        by itself, as it can from Slurm, Open MPI, Kubernetes jobs and TPU slices.
      num_processes: in all, at least 1; None as the coordinator is.
      process_id: of this one, from 0; None as the coordinator is.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self) -> None:
        """Checks that all three are given, or none."""
        given = {
            "--coordinator": self.coordinator,
            "--num-processes": self.num_processes,
            "--process-id": self.process_id,
        }
        missing = [option for option, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            raise ValueError(f"{' '.join(sorted(given.keys() - missing))} needs {' and '.join(missing)} too.")
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise ValueError(f"--coordinator must be HOST:PORT with a port in [1, 65535], got {self.coordinator!r}.")
        if self.num_processes < 1:
            raise ValueError(f"--num-processes must be at least 1, got {self.num_processes}.")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(f"--process-id must be in [0, {self.num_processes}), got {self.process_id}.")


def join(cluster: Cluster) -> None:
    """Meets the other processes of the run. Must come before anything asks JAX for its devices.

    Raises:
      ValueError: nothing here says where they are, or they did not come in time.
    """
    # Its handler takes SIGTERM also where a run does not ask for it yet, and then nothing ends the process.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            shutdown_timeout_seconds=SECONDS_TO_LEAVE,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the processes of the run did not meet: {' '.join(str(error).split())}") from error


def introduce(mesh: Mesh) -> None:
    """Lets all groups of devices that a mesh has meet now, while the processes are in step.

    Gloo waits 30 seconds for a group that meets for the first time, and as long as it takes for one that has met: a
    process that compiles longer than another would be taken for lost.
    """
    if jax.process_count() == 1:
        return
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    groups = itertools.chain.from_iterable(itertools.combinations(axes, num) for num in range(1, len(axes) + 1))
    for group in groups:
        cut, size = PartitionSpec(group), math.prod(mesh.shape[axis] for axis in group)
        cells = _placed(np.zeros(size, np.float32), NamedSharding(mesh, PartitionSpec()))
        add_up = jax.shard_map(
            functools.partial(jax.lax.psum, axis_name=group), mesh=mesh, in_specs=cut, out_specs=PartitionSpec()
        )
        jax.block_until_ready(jax.jit(add_up)(cells))


def to_devices(tree: T, rules: MeshRules | None) -> T:
    """Arrays that every host holds alike, whole on every device of the mesh."""
    if rules is None:
        return jax.device_put(tree)
    return jax.tree.map(lambda leaf: _placed(leaf, NamedSharding(rules.mesh, PartitionSpec())), tree)


def everywhere(leaf: jax.ShapeDtypeStruct, rules: MeshRules | None) -> jax.ShapeDtypeStruct:
    """The description of an array that lies whole on every device of the mesh."""
    sharding = SingleDeviceSharding(jax.devices()[0]) if rules is None else NamedSharding(rules.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_placed(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    values = np.asarray(leaf)
    # Not device_put, which compares the hosts' values over the network first.
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
