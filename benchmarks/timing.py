"""Rivals, timed in turn."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax

# A rival this slow, and three times slower than another, takes part in a few rounds only: its median settles early, and
# the others should not wait for it.
SLOW_MS, SLOW_ROUNDS = 300, 3
# Below this, what the rival before left behind shows.
BRIEF_MS = 500


def in_turn(rivals: Mapping[str, Callable[[], object]], rounds: int = 9, seconds: float = 0.0) -> dict[str, float]:
    """Median milliseconds of each rival; each round runs all of them once, so that load falls on all alike.

    Args:
      rivals: what to run, by name. JAX arrays in a result are waited for; anything else must be ready on return.
      rounds: at least this many, or `SLOW_ROUNDS` for slow rivals.
      seconds: further rounds are run until this much time is spent: short runs need many.
    """
    first = {name: _milliseconds(run) for name, run in rivals.items()}
    times: dict[str, list[float]] = {name: [] for name in rivals}
    begun = time.perf_counter()
    done = 0
    while done < rounds or time.perf_counter() - begun < seconds:
        usual = {name: statistics.median(values or [first[name]]) for name, values in times.items()}
        slow = max(SLOW_MS, 3 * min(usual.values()))
        # Every other round runs backwards, so that no rival always follows the same one.
        for name in list(rivals)[:: 1 if done % 2 == 0 else -1]:
            if done >= SLOW_ROUNDS and usual[name] > slow:
                continue
            if usual[name] < BRIEF_MS:
                # Untimed: whoever follows a sort of the vocabulary would start with cold caches, or wait while a
                # gigabyte is given back to the system.
                _milliseconds(rivals[name])
            times[name].append(_milliseconds(rivals[name]))
        done += 1
    return {name: statistics.median(values) for name, values in times.items()}


def _milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run())
    return 1e3 * (time.perf_counter() - started)
