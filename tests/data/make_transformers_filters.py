"""Writes transformers_filters.npz: what the filters of Hugging Face transformers keep of tie-free rows.

Needs torch and transformers, which the tests do not:  python tests/data/make_transformers_filters.py

transformers applies its filters in the order it is given: here temperature, min-p, top-k, top-p. Each is built only
where the setting is on. Top-p there drops, from the least likely token up, whatever a mass of 1 - top_p covers, and
keeps at least one token. Logits are not stored: tests make them again from their seeds (tests/tie_free.py).
"""

import itertools
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tie_free import tie_free  # noqa: E402

# (vocab_size, scale). Wide and flat rows are missing on purpose: their running mass passes so many tokens around
# top_p that float32 rounding decides one row in five.
GROUPS = ((50, 0.5), (50, 3.0), (1000, 2.0), (1000, 6.0), (5003, 4.0), (5003, 10.0))
REPEATS = 7
# Neutral value and values to choose from, in the order of the filters.
CHOICES = {
    "temperature": (1.0, (0.3, 0.6, 0.7, 0.9, 1.2, 1.5, 2.0)),
    "min_p": (0.0, (0.001, 0.02, 0.05, 0.1, 0.3, 0.7)),
    "top_k": (0.0, (1.0, 2.0, 5.0, 20.0, 50.0, 200.0, 6000.0)),
    "top_p": (1.0, (0.1, 0.5, 0.8, 0.9, 0.95, 0.99)),
}


def random_settings(rng: np.random.Generator) -> np.ndarray:
    """[rows, 4]: every set of filters, each alone, pairs, triples, all and none, REPEATS times."""
    rows = [
        [
            rng.choice(values) if is_on else neutral
            for is_on, (neutral, values) in zip(on, CHOICES.values(), strict=True)
        ]
        for on in itertools.product((False, True), repeat=len(CHOICES))
        for _ in range(REPEATS)
    ]
    return np.array(rows)


def kept(row: np.ndarray, temperature: float, min_p: float, top_k: float, top_p: float) -> np.ndarray:
    scores = torch.from_numpy(row)[None, :]
    filters = [
        TemperatureLogitsWarper(float(temperature)) if temperature != 1 else None,
        MinPLogitsWarper(float(min_p)) if min_p > 0 else None,
        TopKLogitsWarper(int(top_k)) if top_k > 0 else None,
        TopPLogitsWarper(float(top_p)) if top_p < 1 else None,
    ]
    for one in filters:
        scores = scores if one is None else one(None, scores)
    return torch.isfinite(scores)[0].numpy()


def main() -> None:
    rng = np.random.default_rng(0)
    recorded = {"groups": np.array(GROUPS), "fields": np.array(list(CHOICES))}
    recorded["versions"] = np.array([f"transformers {transformers.__version__}", f"torch {torch.__version__}"])
    for seed, (vocab_size, scale) in enumerate(GROUPS):
        settings = random_settings(rng)
        logits = tie_free(seed, len(settings), vocab_size, scale)
        keep = [kept(row, *values) for row, values in zip(logits, settings, strict=True)]
        recorded[f"settings_{seed}"] = settings
        recorded[f"checksum_{seed}"] = np.uint32(zlib.crc32(logits.astype("<f4").tobytes()))
        # NumPy's default order, the highest bit first.
        recorded[f"kept_{seed}"] = np.packbits(keep, axis=1)
    np.savez_compressed(HERE / "transformers_filters.npz", **recorded)


if __name__ == "__main__":
    main()
