"""The draw from leading columns in plain JAX: the oracle of the kernels, and the path of every platform without one."""

from jaxtyping import Array, Bool, Float, Int

from jaxmask import by_columns
from jaxmask.batch import SamplingBatch
from jaxmask.drawn import Plan, Sample


def draw(
    edited: Float[Array, "B C"], batch: SamplingBatch, steps: Int[Array, " B"], plan: Plan
) -> tuple[Sample, Bool[Array, " B"]]:
    """A sample, and which of its rows could be decided (see `jaxmask.by_columns`)."""
    return by_columns.draw(edited[:, : plan.part.size], batch, steps, plan)
