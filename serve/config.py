"""Settings of an engine, and the smallest shape that holds what is asked of it.

Shapes come in powers of two, so that few programs are compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxmask import DraftModel, PromptLookup
from jaxmask.checks import check_engine
from jaxmask.model import Model
from jaxmask.params import SamplingParams, check_count, check_flag, check_integer
from jaxmask.speculation import Speculation

# Wider supports are kept as bits.
MAX_WIDTH = 2048
# Names in generation_config.json that are settings of a request; its max_new_tokens is our max_tokens.
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "min_num_seqs",
    "min_model_len",
    "steps_per_chunk",
    "stream_interval",
    "prefill_tokens",
    "prefill_chunk_size",
    "prefix_cache_tokens",
)
_NGRAM = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What an engine can be told, with vLLM's names where vLLM has them.

    Attributes:
      return_sampling_mask: return supports, unless a request says otherwise; needs processed_logprobs.
      logprobs_mode: what log-probabilities are of; one of `jaxmask.params.LOGPROBS_MODES`.
      max_model_len: most tokens of prompt and completion together; None: as many as the model can read.
      max_num_seqs: completions that run at once, at most.
      min_num_seqs: slots for completions that there are at least, like min_model_len for their tokens: larger numbers
        waste steps of the device, and save compilations where requests come one by one.
      min_model_len: see min_num_seqs.
      max_logprobs: most top log-probabilities per token that a request may ask for; -1: the whole vocabulary. 4096 in
        any case.
      unbounded_support: allow supports without top_k; they may then be as large as the vocabulary.
      seed: from which requests without a seed get theirs, in the order in which they come; None: at random.
      speculation: guesses tokens ahead; None: one token at a time.
      steps_per_chunk: steps that the device takes between two looks of the host, at most.
      stream_interval: the same while the host waits for tokens: to stream them, or to look for stop strings.
      prefill_tokens: tokens of short prompts that are read at once; None: 32 on CPUs, 4096 elsewhere.
      prefill_chunk_size: longer prompts are read in pieces of so many tokens, between which others get theirs.
      enable_prefix_caching: keep what was read of prompts, for others that begin alike; without speculation only.
      prefix_cache_tokens: tokens that there is room for in what is kept.

    Raises:
      ValueError: a field outside its range or, with vLLM's text, a mode that supports cannot go with.
    """

    return_sampling_mask: bool = False
    logprobs_mode: str = "raw_logprobs"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    min_num_seqs: int = 1
    min_model_len: int = 16
    max_logprobs: int = 20
    unbounded_support: bool = False
    seed: int | None = 0
    speculation: Speculation | None = None
    steps_per_chunk: int = 16
    stream_interval: int = 4
    prefill_tokens: int | None = None
    prefill_chunk_size: int = 512
    enable_prefix_caching: bool = False
    prefix_cache_tokens: int = 16384

    def __post_init__(self) -> None:
        """Checks the fields."""
        for field in ("return_sampling_mask", "unbounded_support", "enable_prefix_caching"):
            check_flag(field, getattr(self, field))
        check_engine(return_sampling_mask=self.return_sampling_mask, logprobs_mode=self.logprobs_mode)
        for field in _COUNTS:
            if getattr(self, field) is not None:
                check_count(field, getattr(self, field))
        if self.min_num_seqs > self.max_num_seqs:
            raise ValueError(f"min_num_seqs must be at most max_num_seqs={self.max_num_seqs}, got {self.min_num_seqs}.")
        if check_integer("max_logprobs", self.max_logprobs) < -1:
            raise ValueError(f"max_logprobs must be non-negative or -1, got {self.max_logprobs}.")
        if self.seed is not None:
            check_integer("seed", self.seed)
        if self.enable_prefix_caching and self.speculation is not None:
            raise ValueError("enable_prefix_caching does not go with speculation: of guesses nothing is kept.")


def bucket(size: int, most: int | None = None) -> int:
    """The smallest power of two that is at least `size`; no more than `most`, where given."""
    power = 1 << max(size - 1, 0).bit_length()
    return power if most is None else min(power, most)


def most_tokens(model: Model, config: EngineConfig) -> int:
    """Most tokens of prompt and completion together: as asked for, or as many as the models can read.

    Raises:
      ValueError: more is asked for than they can read.
    """
    readable, speculation = model.max_length, config.speculation
    if isinstance(speculation, DraftModel):
        # It reads its guesses before they are taken back.
        readable = min(readable, speculation.model.max_length - speculation.num_tokens - 1)
    most = readable if config.max_model_len is None else config.max_model_len
    if not 2 <= most <= readable:
        raise ValueError(f"max_model_len must be in [2, {readable}], what the model can read, got {most}.")
    return most


def recommended(generation_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json says of settings, by their names in `SamplingParams`.

    Source: vLLM, ModelConfig.get_diff_sampling_param.
    """
    given = {name: generation_defaults[name] for name in _DEFAULTS if generation_defaults.get(name) is not None}
    max_tokens = generation_defaults.get("max_new_tokens")
    return given | ({} if max_tokens is None else {"max_tokens": max_tokens})


def default_params(generation_defaults: Mapping[str, Any]) -> SamplingParams:
    """The settings of requests that bring none, from the content of a generation_config.json."""
    return SamplingParams(**recommended(generation_defaults))


def ngram_speculation(settings: Mapping[str, Any]) -> PromptLookup:
    """Guesses from the text so far, from vLLM's `speculative_config` of method "ngram".

    Raises:
      ValueError: an unknown name, or a number out of its range.
    """
    unknown = sorted(set(settings) - set(_NGRAM))
    if unknown:
        raise ValueError(f"speculative_config of method 'ngram' must hold {', '.join(_NGRAM)}, got {unknown}.")
    counts = {name: check_count(name, settings[name]) for name in _NGRAM[1:] if name in settings}
    return PromptLookup(
        num_tokens=counts.get("num_speculative_tokens", 4),
        max_ngram=counts.get("prompt_lookup_max", 3),
        min_ngram=counts.get("prompt_lookup_min", 1),
    )


def derived_seeds(seed: int | None) -> Iterator[int]:
    """Seeds of 64 bits without end: the same ones for the same seed; for None, at random."""
    for number in itertools.count():
        if seed is None:
            yield secrets.randbits(64)
        else:
            sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(number,))
            yield int(sequence.generate_state(1, np.uint64)[0])
