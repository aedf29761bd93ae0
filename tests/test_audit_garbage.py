"""Whatever stands in a file, an audit ends with a verdict and whole reports, or says that it cannot read it."""

import json
import math
import random

import numpy as np
import pytest

from jaxmask.audit import UnreadableError, audit
from tests.rollout_files import VARIANTS, good_rows, rollout_arrays

JUNK = (None, True, -1, 2**63, 2**70, 1e308, -1e308, math.inf, math.nan, "x", "\ud800", [], {}, [None], 1.5, 300)


def leaves(value, path=()):
    """Where something stands in a JSON value."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield from leaves(entry, (*path, name))


def spoil(record, draw):
    """Puts junk somewhere into it."""
    *inside, last = draw.choice([*leaves(record)])
    for name in inside:
        record = record[name]
    record[last] = draw.choice(JUNK)


def reports_are_whole(path, draw):
    try:
        result = audit(path, vocab_size=draw.choice([None, 300, 7]), eos_token_ids=draw.choice([(), (5,)]))
    except UnreadableError:
        return 0
    assert result.to_text().startswith("fit" if result.is_fit else "NOT fit")
    assert "</html>" in result.to_html()
    json.dumps(result.to_dict(), allow_nan=False)
    return 1


@pytest.mark.parametrize("name", ["vllm-kept", "sglang-batch", "prime-rl", "miles", "samples"])
def test_lines(tmp_path, name):
    draw, path, num_read = random.Random(name), tmp_path / "rollouts.jsonl", 0
    VARIANTS[name].write(path, good_rows(2, 2, 6))
    lines = path.read_text().splitlines()
    for _ in range(12):
        records = [json.loads(line) for line in lines]
        for _ in range(draw.randint(1, 4)):
            spoil(draw.choice(records), draw)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        num_read += reports_are_whole(path, draw)
    assert num_read > 8


def test_arrays(tmp_path):
    draw, path = random.Random(0), tmp_path / "rollout.npz"
    generator = np.random.default_rng(0)
    junk = (np.nan, np.inf, -np.inf, -9999.0, 1e30, -1, 0, 2**31 - 1)
    num_read = 0
    for _ in range(20):
        arrays = {name: np.array(value) for name, value in rollout_arrays(good_rows(2, 2, 6)).items()}
        name = draw.choice([name for name, array in arrays.items() if array.ndim])
        flat = arrays[name].reshape(-1)
        value = draw.choice([one for one in junk if flat.dtype.kind == "f" or np.isfinite(one)])
        flat[generator.integers(0, len(flat), 3)] = (
            np.clip(value, -(2**31), 2**31 - 1) if flat.dtype.kind != "f" else value
        )
        np.savez(path, **arrays)
        num_read += reports_are_whole(path, draw)
    assert num_read > 15
