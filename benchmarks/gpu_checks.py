"""Whether kernels and plain XLA agree, for `gpu_kernels.py`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmask import SamplingBatch
from jaxmask.drawn import Sample

# Compilers round exp differently: a row whose nucleus meets top_p this closely may keep one id more or less.
EDGE, MOST_EDGES = 1e-6, 1e-3
# What the plain path may differ from float64 by (see docs/design.md, section 4), and rows that are compared.
HOST_EDGE, HOST_ROWS = 5e-6, 14
LOGPROB = 1e-5
# Of the largest entry. Two roundings of one gradient to bfloat16 differ by a unit in its last place at most.
GRADIENTS = {"float32": 1e-5, "bfloat16": 2.0**-7}


@dataclasses.dataclass
class Findings:
    """What a comparison found.

    Attributes:
      problems: one line each; none where all is well.
      num_rows: draws that were compared.
      num_edges: those that differ, and may.
    """

    problems: list[str] = dataclasses.field(default_factory=list)
    num_rows: int = 0
    num_edges: int = 0


def different_bits(expected: Any, found: Any) -> list[str]:
    """Every array of two trees that is not the same bit for bit."""
    problems = []
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            problems.append(f"{name} is {other.dtype}{other.shape}, not {one.dtype}{one.shape}")
        elif num := int(_num_different(one, other)):
            problems.append(f"{name} differs in {num} of {one.size} places")
    return problems


def too_far(name: str, expected: Any, found: Any, tolerance: float, is_of_largest: bool = False) -> list[str]:
    """Where numbers differ by more than the tolerance times what exceeds 1, or the largest; NaN is never near."""
    num, worst = map(float, _far(expected, found, tolerance, is_of_largest))
    return [f"{name} is off in {num:.0f} of {expected.size} places, by {worst:.3g} at most"] if num else []


@jax.jit
def _num_different(one: jax.Array, other: jax.Array) -> jax.Array:
    if jnp.issubdtype(one.dtype, jnp.floating):
        words = jnp.dtype(f"uint{8 * one.dtype.itemsize}")
        one, other = (jax.lax.bitcast_convert_type(x, words) for x in (one, other))
    return (one != other).sum()


@functools.partial(jax.jit, static_argnames="is_of_largest")
def _far(expected: jax.Array, found: jax.Array, tolerance: float, is_of_largest: bool) -> tuple[jax.Array, jax.Array]:
    expected, found = expected.astype(jnp.float32), found.astype(jnp.float32)
    sizes = jnp.abs(expected)
    scale = jnp.broadcast_to(sizes.max(initial=0), sizes.shape) if is_of_largest else jnp.maximum(1.0, sizes)
    distance = jnp.where(expected == found, 0.0, jnp.abs(found - expected))
    is_far = ~(distance <= tolerance * jnp.where(jnp.isfinite(scale), scale, 0.0))
    return is_far.sum(), distance.max(initial=0)


def compare_heads(expected: Any, found: Any) -> Findings:
    """Log-probabilities, then gradients relative to their largest entry."""
    problems = too_far("log-probabilities", expected[0], found[0], LOGPROB)
    for index, (one, other) in enumerate(zip(expected[1], found[1], strict=True)):
        problems += too_far(f"gradient {index}", one, other, GRADIENTS[one.dtype.name], is_of_largest=True)
    return Findings(problems)


def in_order(row: np.ndarray, batch: SamplingBatch, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids in canonical order that survive min-p and top-k, and the share of each prefix in float64."""
    x = row.astype(np.float64)
    ids = np.flatnonzero(np.isfinite(x))
    ids = ids[np.argsort(-x[ids], kind="stable")]
    z = (x[ids] - x[ids[:1]]) / float(batch.temperature[index])
    with np.errstate(divide="ignore"):
        ids = ids[z >= np.log(np.float64(batch.min_p[index]))][: int(batch.top_k[index])]
    mass = np.cumsum(np.exp(z[: len(ids)]))
    return ids, mass / mass[-1:]


def may_keep(count: int, shares: np.ndarray, top_p: float, edge: float) -> bool:
    """Whether a nucleus may hold `count` tokens, if masses are known to within `edge`."""
    if count == 0 or top_p >= 1:
        return count == len(shares)
    reaches = count == len(shares) or shares[count - 1] >= top_p - edge
    return count <= len(shares) and reaches and (count == 1 or shares[count - 2] < top_p + edge)


def is_possible(drawn: Sample, index: int, row: np.ndarray, batch: SamplingBatch, edge: float) -> bool:
    """Whether the cells of a row hold a prefix of the canonical order that may be its nucleus, and the drawn id."""
    ids, shares = in_order(row, batch, index)
    count = int(drawn.support.counts[index])
    if not may_keep(count, shares, float(batch.top_p[index]), edge):
        return False
    cells = np.asarray(drawn.support.token_ids[index])
    kept = np.sort(ids[:count])
    is_drawn = count == 0 or int(drawn.token_ids[index]) in kept
    return is_drawn and cells[: len(kept)].tolist() == kept[: len(cells)].tolist()


def compare_samples(expected: Sample, found: Sample, logits: jax.Array, batch: SamplingBatch) -> Findings:
    """Bit for bit but for log-probabilities, and for rows at the edge of top-p; some rows against float64, too."""
    num_rows = len(logits)
    findings, differs = Findings(num_rows=num_rows), np.zeros(num_rows, bool)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if not jnp.issubdtype(one.dtype, jnp.floating):
            differs |= (np.asarray(one) != np.asarray(other)).reshape(num_rows, -1).any(axis=1)
    for index in map(int, np.flatnonzero(differs)):
        row, counts = np.asarray(logits[index]), [int(drawn.support.counts[index]) for drawn in (expected, found)]
        if counts[0] != counts[1] and all(is_possible(x, index, row, batch, EDGE) for x in (expected, found)):
            findings.num_edges += 1
        else:
            tokens = [int(drawn.token_ids[index]) for drawn in (expected, found)]
            findings.problems.append(f"row {index} differs: {counts} ids kept, {tokens} drawn")
    for index in range(min(HOST_ROWS, num_rows)):
        if not is_possible(expected, index, np.asarray(logits[index]), batch, HOST_EDGE):
            findings.problems.append(f"row {index} of plain XLA is not what float64 says")
    for name in ("logprobs", "support_logprobs"):
        one, other = getattr(expected, name), getattr(found, name)
        if one is not None:
            is_out = differs.reshape(-1, *[1] * (one.ndim - 1))
            findings.problems += too_far(name, one, jnp.where(is_out, one, other), LOGPROB)
    return findings
