"""How a decoder lies on a device mesh: logical axes of its arrays, and one table of rules from these to mesh axes.

A mesh has the axes `data` (copies of the weights, rows cut), `fsdp` (rows cut, weights cut and gathered where they are
used) and `tensor` (heads, MLP and vocabulary cut); any of them may be missing or have size 1.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.config import DecoderConfig, require

MESH_AXES = ("data", "fsdp", "tensor")
# Logical axis -> mesh axes, first that fits.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("batch", ("data", "fsdp")),
    ("vocab", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("width", ("fsdp",)),
)
# Logical axes of each parameter, by the last part of its name; norms lie whole on every device.
PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", "width"),
    "lm_head": ("vocab", "width"),
    "query": ("heads", "width"),
    "key": ("kv_heads", "width"),
    "value": ("kv_heads", "width"),
    "output": ("width", "heads"),
    "gate": ("mlp", "width"),
    "up": ("mlp", "width"),
    "down": ("width", "mlp"),
    "query_bias": ("heads",),
    "key_bias": ("kv_heads",),
    "value_bias": ("kv_heads",),
}


@dataclass(frozen=True)
class MeshRules:
    """A mesh and the rules by which arrays are cut over it; hashable, so safe as a static argument.

    Attributes:
      mesh: with automatic axes, as `make_mesh` makes it.
      rules: pairs of a logical axis and the mesh axes it is cut over; mesh axes that `mesh` lacks are passed over, and
        so are logical axes without a pair.
    """

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...] = RULES

    def __post_init__(self) -> None:
        """Refuse meshes on which nothing could be constrained."""
        is_automatic = all(kind == AxisType.Auto for kind in self.mesh.axis_types)
        require(is_automatic, "mesh", self.mesh, "a mesh of automatic axes (see models.make_mesh)")

    def spec(self, axes: tuple[str | None, ...], counts: tuple[int, ...]) -> PartitionSpec:
        """The mesh axes of each logical axis; whole where its count does not divide.

        Args:
          axes: logical axes of an array, None for one that is never cut.
          counts: of what is cut along each: heads rather than their numbers.
        """
        table = dict(self.rules)
        return PartitionSpec(
            *(self._mesh_axes(table.get(axis or "", ()), n) for axis, n in zip(axes, counts, strict=True))
        )

    def _mesh_axes(self, names: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        names = tuple(name for name in names if self.mesh.shape.get(name, 1) > 1)
        size = math.prod(self.mesh.shape[name] for name in names)
        return names if names and count % size == 0 else None

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """x, cut along its logical axes; those left out at the end are whole."""
        axes = (*axes, *(None,) * (x.ndim - len(axes)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(axes, x.shape)))

    def parameter(self, name: str, config: DecoderConfig, gathered: bool = False) -> NamedSharding:
        """Where a parameter lies.

        Args:
          name: as "layers.3.query".
          config: of its decoder.
          gathered: where it is used: no longer cut along `width`.
        """
        leaf = name.rpartition(".")[2]
        counts = {
            "vocab": config.vocab_size,
            "width": config.width,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "mlp": config.mlp_width,
        }
        axes = _with_adapters(leaf)
        spec = self.spec(
            tuple(None if gathered and axis == "width" else axis for axis in axes),
            tuple(counts.get(axis or "", 1) for axis in axes),
        )
        return NamedSharding(self.mesh, spec)

    def logits(self, vocab_size: int) -> NamedSharding:
        """Of logits [B, V], as the sampler and the learner take it; rows need not divide."""
        table = dict(self.rules)
        rows = tuple(name for name in table.get("batch", ()) if self.mesh.shape.get(name, 1) > 1)
        return NamedSharding(self.mesh, PartitionSpec(rows or None, *self.spec(("vocab",), (vocab_size,))))


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Any = None) -> Mesh:
    """A mesh for `MeshRules`.

    Args:
      data: devices that hold copies of the weights and rows of their own.
      fsdp: devices that share the weights and have rows of their own.
      tensor: devices that share heads, MLP and vocabulary.
      devices: as many as the product; by default the first ones there are.

    Raises:
      ValueError: a size below 1, or more devices asked for than there are.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    for name, size in sizes.items():
        require(isinstance(size, int) and size >= 1, name, size, "an integer >= 1")
    needed = math.prod(sizes.values())
    devices = list(jax.devices() if devices is None else devices)
    if needed > len(devices):
        raise ValueError(f"a mesh of {sizes} needs {needed} devices, there are {len(devices)}")
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=kinds, devices=devices[:needed])


def _with_adapters(leaf: str) -> tuple[str | None, ...]:
    """Logical axes of a parameter; an adapter's lie as those of the weight it adds to, its rank whole."""
    for suffix, side in (("_lora_a", 1), ("_lora_b", 0)):
        if leaf.endswith(suffix):
            axis = PARAMETER_AXES[leaf.removesuffix(suffix)][side]
            return (None, axis) if side == 1 else (axis, None)
    return PARAMETER_AXES.get(leaf, ())
