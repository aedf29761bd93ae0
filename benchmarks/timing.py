"""Two rivals, timed in turn."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def in_turn(rivals: Mapping[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """Median milliseconds of each rival; each round runs all of them once, so that load falls on all alike."""
    for run in rivals.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}
