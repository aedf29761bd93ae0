"""What `gpu_resources.py` compiles: each operation that has kernels, at shapes people use, and two whole programs."""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmask import SamplingBatch, SamplingParams, sample
from jaxmask.kernels.compact import pallas_gpu as compact
from jaxmask.kernels.filter import pallas_gpu as filters
from jaxmask.kernels.filter.records import Settings
from jaxmask.kernels.head import pallas_gpu as head

# Memory is read in sectors of this many bytes.
SECTOR = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation with kernels, at one shape, or a whole program.

    Attributes:
      name: of the operation and its shape.
      function: the operation, on arrays.
      arguments: what it takes.
      streams: the operands that a kernel must read 16 bytes at a time, by its name; kernels that must be there.
      needed: bytes that any implementation moves, by what they are: inputs read once and outputs written once; empty
        for a whole program.
      further: bytes that this design moves beyond these.
      most_temporary_bytes: more than this in XLA's buffers would be a copy nobody asked for; None for no such bound.
      is_quick: compiled with --quick too.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    streams: Mapping[str, tuple[int, ...]]
    needed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    further: Mapping[str, int] = dataclasses.field(default_factory=dict)
    most_temporary_bytes: int | None = None
    is_quick: bool = True

    @property
    def fewest_bytes(self) -> int:
        """What any implementation moves."""
        return sum(self.needed.values())

    @property
    def design_bytes(self) -> int:
        """What this one moves."""
        return self.fewest_bytes + sum(self.further.values())


def compact_case(dtype: Any, R: int = 256, V: int = 151_936, W: int = 1024) -> Case:
    """Compaction with packed bits; the bits are written by one kernel and read by the next."""
    words, sizes = 4 * R * -(-V // 32), 4 * R * compact.num_chunks(V)
    return Case(
        name=f"compact, [{R}, {V:,}] {jnp.dtype(dtype).name}, W = {W}",
        function=lambda logits: compact.compact_support(logits, W, has_bits=True),
        arguments=(jax.ShapeDtypeStruct((R, V), dtype),),
        streams={"compact_pack": (0,)},
        needed={
            "logits": R * V * jnp.dtype(dtype).itemsize,
            "ids": 4 * R * W,
            "counts": 4 * R,
            "packed bits": R * -(-V // 8),
        },
        further={"bits read back": words, "sizes of chunks, written and read": 2 * sizes},
    )


def filter_case(dtype: Any, has_top_k: bool, R: int = 256, V: int = 151_936, W: int = 50) -> Case:
    """Filters and draw. With a top-k, only sectors of leading groups are read again (at most W groups of 64 ids, each
    id in a sector of its own); without one, the whole row is, for its mass."""
    itemsize, room = jnp.dtype(dtype).itemsize, 256
    dtypes = Settings(*[jnp.int32] * 10)._replace(
        factor=jnp.float32, least_z=jnp.float32, top_p_units=jnp.uint32, seed_low=jnp.uint32, seed_high=jnp.uint32
    )

    def draw(logits: Any, *settings: Any) -> Any:
        sizes = {"vocab_size": V, "num_candidates": room, "num_cells": W, "num_top": 0}
        return filters.filter_and_draw(logits, Settings(*settings), **sizes, is_interpreted=False)

    second_read = R * W * 64 * SECTOR if has_top_k else R * V * itemsize
    setting = "top-k" if has_top_k else "top-p without top-k"
    return Case(
        name=f"filter, [{R}, {V:,}] {jnp.dtype(dtype).name}, {setting}, W = {W}",
        function=draw,
        arguments=(jax.ShapeDtypeStruct((R, V), dtype), *(jax.ShapeDtypeStruct((R,), dtype) for dtype in dtypes)),
        streams={"filter_maxima": (0,), "filter_candidates": (0,)},
        needed={"logits": R * V * itemsize, "settings": 4 * 10 * R, "ids and log-probs": 8 * R * W, "per row": 20 * R},
        further={
            "logits read again": second_read,
            "maxima, written and read": 2 * 4 * R * filters.num_groups(V),
            "bits, written and read": 2 * 4 * R * -(-V // 32),
            "candidates, written, read and looked up": R * room * (8 + SECTOR),
            "sizes and sums of chunks": 2 * 3 * 4 * R * compact.num_chunks(V),
        },
        # The same kernels: the settings are arrays.
        is_quick=has_top_k,
    )


def head_case(
    dtype: Any, is_trained: bool, N: int = 2048, D: int = 2048, V: int = 151_936, ids_per_row: int = 8
) -> Case:
    """The gathered head and its gradients; a row of the head for each kept id, wherever it comes from."""
    itemsize, M = jnp.dtype(dtype).itemsize, N * ids_per_row
    kept_rows = M * D * itemsize

    def loss(hidden: Any, weights: Any, *rest: Any) -> Any:
        return head.gathered_head(hidden, weights, *rest).logprobs.sum()

    gradient = jax.grad(loss, argnums=(0, 1))
    ints = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (M, N, N, N)]
    needed = {"hidden": N * D * itemsize, "kept rows of the head": kept_rows, "ids and rows": 4 * (M + 4 * N)}
    further = {}
    streams: dict[str, tuple[int, ...]] = {"head_scores": (1,)}
    if is_trained:
        streams |= {"head_d_hidden": (0,), "head_d_head": (0,)}
        needed |= {"d hidden": N * D * itemsize, "d head": V * D * itemsize}
        further |= {
            "kept rows, read for d hidden": kept_rows,
            "hidden states, read for d head": kept_rows,
            "rows of d head, written over its zeros": kept_rows,
            "keys, rows and derivatives of cells": 10 * 4 * M,
        }
    return Case(
        name=f"head{', forward and backward' if is_trained else ''}, N = {N}, D = {D}, {jnp.dtype(dtype).name}, "
        f"{ids_per_row} ids a row",
        function=gradient if is_trained else (lambda *arrays: head.gathered_head(*arrays)),
        arguments=(
            jax.ShapeDtypeStruct((N, D), dtype),
            jax.ShapeDtypeStruct((V, D), dtype),
            *ints,
            jax.ShapeDtypeStruct((N,), jnp.float32),
        ),
        streams=streams,
        needed=needed | ({} if is_trained else {"scores": 4 * (2 * M + 4 * N)}),
        further=further,
        is_quick=is_trained,
    )


def sample_case(R: int = 256, V: int = 151_936, padding: int = 0) -> Case:
    """The whole sampling step, with the fall-back of rows that overflow and packed bits, on a head padded or not."""
    params = [SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=0)] * (R - 1) + [SamplingParams(seed=1)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    leaves, tree = jax.tree.flatten(batch)

    def step(logits: Any, *leaves: Any) -> Any:
        batch = jax.tree.unflatten(tree, leaves)
        return sample(logits, batch, step=0, width=64, num_logprobs=2, implementation="pallas_gpu")

    return Case(
        name=f"sample, [{R}, {V:,}{f' + {padding} of padding' if padding else ''}] float32, any filter, W = 64",
        function=step,
        arguments=(jax.ShapeDtypeStruct((R, V + padding), jnp.float32), *map(_like, leaves)),
        streams={"filter_maxima": (0,), "filter_candidates": (0,), "filter_decide": ()},
        # Half of the logits: they are read where they lie, but for up to 16 rows that fall back.
        most_temporary_bytes=2 * R * V,
        # The harder of the two, with the same kernels.
        is_quick=padding > 0,
    )


def iteration_case() -> Case:
    """A whole GRPO iteration of the demo: rollout, reward, loss, update."""
    from train import make_optimizer, train_iteration
    from train.build import build
    from train.presets import find_preset

    preset = find_preset("sort-tiny")
    config = dataclasses.replace(preset, grpo=dataclasses.replace(preset.grpo, implementation="pallas_gpu"))
    built = build(config)
    leaves, tree = jax.tree.flatten(built.run.train)
    options = {"task": built.task, "config": config.grpo, "optimizer": make_optimizer(config.grpo, config.iterations)}

    def iteration(*leaves: Any) -> Any:
        return train_iteration(jax.tree.unflatten(tree, leaves), **options)

    return Case(
        name="one GRPO iteration of the demo",
        function=iteration,
        arguments=tuple(map(_like, leaves)),
        streams={"filter_maxima": (), "filter_decide": (), "head_scores": (), "head_d_hidden": (), "head_d_head": ()},
        # Its kernels are those of the other cases.
        is_quick=False,
    )


def all_cases() -> list[Case]:
    """The iteration needs what training needs, and is left out where that is not installed."""
    cases = [compact_case(jnp.float32), compact_case(jnp.bfloat16)]
    cases += [filter_case(dtype, has_top_k) for has_top_k in (True, False) for dtype in (jnp.float32, jnp.bfloat16)]
    cases += [head_case(dtype, is_trained) for is_trained in (False, True) for dtype in (jnp.float32, jnp.bfloat16)]
    cases += [sample_case(), sample_case(V=151_643, padding=293)]
    return [*cases, iteration_case()] if importlib.util.find_spec("optax") else cases


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
