"""Compiles what the first requests need, before there are any."""

from __future__ import annotations

import dataclasses
import logging
import time

from jaxmask import SamplingParams
from serve.arrivals import MIN_PROMPT_WIDTH
from serve.compilation import compiled_so_far
from serve.config import bucket
from serve.engine import Engine

LOG = logging.getLogger("serve")
_TOP_LOGPROBS = 20


def warm_up(engine: Engine, *, all_sizes: bool = False) -> None:
    """Answers requests as they usually come: with a sampling mask and without, known prompts, new ones and long ones.

    Args:
      engine: without requests.
      all_sizes: for each number of slots that there may be, not only for the smallest.
    """
    LOG.info("compiling for the first requests")
    before, started = compiled_so_far(), time.monotonic()
    config = engine.config
    sizes = {bucket(config.min_num_seqs, config.max_num_seqs)}
    while all_sizes and max(sizes) < config.max_num_seqs:
        sizes.add(bucket(max(sizes) + 1, config.max_num_seqs))
    # The second round finds what the first one left.
    for number, num_rows in enumerate(size for size in sorted(sizes) for _ in range(2)):
        _answer(engine, f"warm-up {number}", num_rows)
    engine.reset_prefix_cache()
    num_programs = (compiled_so_far() - before).num_programs
    LOG.info("compiled %d programs in %.1f s", num_programs, time.monotonic() - started)


def _answer(engine: Engine, name: str, num_rows: int) -> None:
    config, most = engine.config, engine.limits.max_model_len
    plain = SamplingParams(max_tokens=2, ignore_eos=True, seed=0, return_sampling_mask=False)
    params = dataclasses.replace(
        plain,
        top_k=min(50, engine.limits.vocab_size),
        top_p=0.95,
        logprobs=min(_TOP_LOGPROBS, engine.limits.max_logprobs),
        return_sampling_mask=config.return_sampling_mask,
    )
    longest = max(min(config.min_model_len, most) - 2, 1)
    lengths = [min(length, longest) for length in _prompt_lengths(config.prefill_chunk_size)]
    for index, length in enumerate(dict.fromkeys(lengths)):
        requests = [plain] + [params] * (num_rows - 1) if num_rows > 1 else [params]
        for row, one in enumerate(requests):
            engine.add_request(f"{name} {index} {row}", [0] * length, one)
        while engine.has_unfinished_requests():
            engine.step()


def _prompt_lengths(chunk_size: int) -> list[int]:
    """One of each width in which prompts are read, and one that is read in pieces."""
    width, lengths = MIN_PROMPT_WIDTH, []
    while width <= chunk_size:
        lengths.append(width)
        width *= 2
    return [*lengths, chunk_size + MIN_PROMPT_WIDTH]
