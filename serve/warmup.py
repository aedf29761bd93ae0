"""Compiles what the first requests need, before there are any."""

from __future__ import annotations

import dataclasses
import logging
import time

from jaxmask import SamplingParams
from serve.compilation import compiled_so_far
from serve.engine import Engine

LOG = logging.getLogger("serve")


def warm_up(engine: Engine) -> None:
    """Answers two requests of the engine's smallest shape, as one with and one without a sampling mask would be."""
    before, started = compiled_so_far(), time.monotonic()
    prompt = [0] * max(min(8, engine.limits.max_model_len - 2), 1)
    plain = SamplingParams(max_tokens=2, ignore_eos=True, seed=0, return_sampling_mask=False)
    engine.add_request("warm-up plain", prompt, plain)
    if engine.config.return_sampling_mask:
        top_k = min(50, engine.limits.vocab_size)
        masked = dataclasses.replace(plain, top_k=top_k, top_p=0.95, logprobs=1, return_sampling_mask=True)
        engine.add_request("warm-up masked", prompt, masked)
    while engine.has_unfinished_requests():
        engine.step()
    num_programs = (compiled_so_far() - before).num_programs
    LOG.info("compiled %d programs in %.1f s", num_programs, time.monotonic() - started)
