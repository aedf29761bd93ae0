import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask import Support
from jaxmask.decoding import Decoding
from jaxmask.recording import Recording
from serve.report import Reading, Report

V, B, K, W = 300, 3, 5, 8
random = np.random.default_rng(0)


def lists_of(sizes):
    return [sorted(random.choice(V, size, replace=False).tolist()) for size in sizes]


def report_of(supports, counts):
    """Rows with so many new tokens; the other cells are empty."""
    support = Support.from_lists(supports, V, W).reshape(B, K)
    shape = jnp.zeros((B, K), jnp.int32)
    starts = jnp.asarray([4, 0, 9])
    recording = Recording(
        token_ids=shape + 7,
        logprobs=jnp.zeros((B, K)),
        support=support,
        starts=starts,
        num_steps=jnp.asarray([3, 0, 5]),
    )
    state = Decoding(jnp.zeros(B, jnp.int32), None, None, starts + jnp.asarray(counts), jnp.zeros(B, jnp.int32))
    return jax.jit(Report.of)(recording, state)


@pytest.mark.parametrize(
    "sizes", [[1] * 15, [8] * 15, [0, 2, 7, 8, 1] * 3, [1, 9, 2, 300, 8] * 3, [0] * 15, [299] * 15]
)
def test_supports_come_back_whole(sizes):
    """Also those wider than the cells, more of them in a row than are fetched at once."""
    counts = [5, 0, 3]
    sizes = [size if place % K < counts[place // K] else 0 for place, size in enumerate(sizes)]
    supports = lists_of(sizes)
    reading = Reading(report_of(supports, counts))
    assert (reading.num_steps, reading.num_busy) == (5, 8)
    for row, count in enumerate(counts):
        mask = reading.mask(row)
        assert mask.token_ids == supports[row * K : row * K + count]
        assert mask.ids.base is None
    assert reading.num_ids == sum(size for size in sizes if size <= W)


def test_the_pool_is_cut_into_segments_that_double():
    report = report_of(lists_of([1] * 15), [5, 5, 5])
    assert [len(segment) for segment in report.pool] == [15, 15, 30, 60]
    reading = Reading(report)
    before = reading.num_bytes
    for row in range(B):
        reading.mask(row)
    # The sizes, and one segment.
    assert reading.num_bytes - before == 15 * 4 + 15 * 4
    wide = Reading(report_of(lists_of([8] * 15), [5, 5, 5]))
    wide.mask(0)
    assert wide.num_bytes - before == 15 * 4 + 120 * 4


def test_copies_begin_before_they_are_asked_for(monkeypatch):
    report = report_of(lists_of([2] * 15), [5, 5, 5])
    begun = []

    class Leaf:
        def __init__(self, name, size=1):
            self.name, self.size = name, size

        def __len__(self):
            return self.size

        def copy_to_host_async(self):
            begun.append(self.name)

    names = ("token_ids", "counts", "finish", "num_steps", "num_busy", "sizes", "logprobs")
    fake = object.__new__(Report)
    for field in dataclasses.fields(report):
        object.__setattr__(fake, field.name, Leaf(field.name) if field.name in names else None)
    object.__setattr__(fake, "pool", tuple(Leaf(f"pool{n}", size) for n, size in enumerate((15, 15, 30, 60))))
    fake.prefetch(16, with_logprobs=False)
    assert set(begun) == {"token_ids", "counts", "finish", "num_steps", "num_busy", "sizes", "pool0", "pool1"}
    begun.clear()
    fake.prefetch(0, with_logprobs=True)
    assert set(begun) == {"token_ids", "counts", "finish", "num_steps", "num_busy", "logprobs"}
