"""Sampling settings of one request, on the host, with vLLM's names and error texts.

What needs the vocabulary size (ids out of range) is checked where it is known, in `SamplingBatch.from_params`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

LOGPROBS_MODES = ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")

# Below this the division by the temperature only amplifies rounding; vLLM raises it to the same floor.
MIN_TEMPERATURE = 0.01
MAX_NUM_SAMPLES = 16384
# The smallest normal float32: beyond it and its inverse, a penalty would be 0 or infinite where it is applied.
_TINY = 2.0**-126
# Kept as Python's integers: NumPy's do not hold 64-bit seeds in arithmetic.
_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
# Also what the serving layer says of a model without a tokenizer.
NO_TEXT_TO_STOP = "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    The filters run in the order temperature, min-p, top-k, top-p; each sees the survivors of the one before.

    Attributes:
      n: completions per prompt, 1 to 16384; completion i uses seed + i.
      temperature: in [0, 2]; 0 is greedy (no filter, no noise); values in (0, 0.01) are raised to 0.01 with a warning.
      top_p: in (0, 1]; 1 is off.
      top_k: at least 1; 0 or -1 is off.
      min_p: in [0, 1]; keeps tokens at least `min_p` times as likely as the likeliest; 0 is off, and positive values
        below 1.2e-38 count as that.
      seed: 64-bit integer; None or -1 draws one.
      max_tokens: at least 1; None leaves the limit to the caller.
      min_tokens: EOS and stop ids cannot be drawn before this many tokens; in [0, max_tokens].
      stop: string or strings that end the text; honoured where there is a tokenizer (the serving layer). The text is
        cut there, the token that completes one is kept whole.
      stop_token_ids: ids that end the completion; they are kept as its last token.
      ignore_eos: do not end at the model's EOS ids.
      logprobs: number of top log-probabilities to report per token, at most 4096; -1 for all ids of a vocabulary that
        has no more; None for none (serving layer).
      prompt_logprobs: the same for prompt tokens (serving layer).
      logit_bias: id -> value added to the logit, clamped to [-100, 100].
      allowed_token_ids: only these ids can be drawn.
      bad_words: sequences that cannot be completed, as token id lists (strings need a tokenizer: the serving layer).
      presence_penalty: in [-2, 2]; subtracted once from the logit of every id in the output.
      frequency_penalty: in [-2, 2]; subtracted for each occurrence in the output.
      repetition_penalty: finite and > 0; divides positive and multiplies other logits of ids in prompt or output.
      return_sampling_mask: None follows the engine; False opts this request out of supports.
      include_stop_str_in_output: keep the stop string, or the text of the stop id, at the end of the text.
      skip_special_tokens: leave special tokens out of the text.
      detokenize: make text at all; False goes without `stop`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[Any, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    return_sampling_mask: bool | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        """Checks every field; lists become tuples, the temperature meets its floor."""
        for field in _INTEGERS:
            if getattr(self, field) is not None:
                self._set(field, check_integer(field, getattr(self, field)))
        for field in _FLAGS:
            check_flag(field, getattr(self, field))
        if self.return_sampling_mask is not None:
            check_flag("return_sampling_mask", self.return_sampling_mask)
        self._check_filters()
        self._check_penalties()
        self._check_lengths()
        self._check_token_lists()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken without noise."""
        return self.temperature == 0

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _check_filters(self) -> None:
        temperature = _number("temperature", self.temperature)
        if not math.isfinite(temperature):
            raise ValueError(f"temperature must be a finite number, got {temperature}.")
        _check_range("temperature", temperature, 0, 2)
        if 0 < temperature < MIN_TEMPERATURE:
            warnings.warn(f"temperature {temperature} is raised to {MIN_TEMPERATURE}", stacklevel=4)
            self._set("temperature", MIN_TEMPERATURE)
        top_p = _number("top_p", self.top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}.")
        if (top_k := check_integer("top_k", self.top_k)) < -1:
            raise ValueError(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
        _check_range("min_p", _number("min_p", self.min_p), 0, 1)

    def _check_penalties(self) -> None:
        _check_range("presence_penalty", _number("presence_penalty", self.presence_penalty), -2, 2)
        _check_range("frequency_penalty", _number("frequency_penalty", self.frequency_penalty), -2, 2)
        repetition = _number("repetition_penalty", self.repetition_penalty)
        if not math.isfinite(repetition):
            raise ValueError(f"repetition_penalty must be a finite number, got {repetition}.")
        if not repetition > 0:
            raise ValueError(f"repetition_penalty must be greater than zero, got {repetition}.")
        if not _TINY <= repetition <= 1 / _TINY:
            raise ValueError(f"repetition_penalty must be in [{_TINY}, {1 / _TINY}], got {repetition}.")

    def _check_lengths(self) -> None:
        n = check_integer("n", self.n)
        _check_range("n", n, 1, MAX_NUM_SAMPLES)
        if self.is_greedy and n > 1:
            raise ValueError(f"n must be 1 when using greedy sampling, got {n}.")
        if self.seed is not None:
            _check_range("seed", check_integer("seed", self.seed), -(2**63), 2**64 - 1)
            if self.seed == -1:
                self._set("seed", None)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens)
        if check_integer("min_tokens", self.min_tokens) < 0:
            raise ValueError(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            )
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None and check_integer(field, value) < -1:
                raise ValueError(f"{field} must be non-negative or -1, got {value}.")

    def _check_token_lists(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must hold strings and cannot contain an empty string. Got stop={self.stop!r}.")
        self._set("stop", tuple(stop))
        if self.stop and not self.detokenize:
            raise ValueError(NO_TEXT_TO_STOP)
        self._set("stop_token_ids", check_integers("stop_token_ids", self.stop_token_ids or ()))
        self._set("logit_bias", _biases(self.logit_bias or {}))
        self._set("bad_words", _bad_words(self.bad_words or ()))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", check_integers("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is not None and empty!")


def check_logprobs_mode(mode: str) -> None:
    """Raises ValueError unless `mode` is one of `LOGPROBS_MODES`."""
    if mode not in LOGPROBS_MODES:
        raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {mode!r}.")


def check_flag(field: str, value: Any) -> None:
    """Raises ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, got {value!r}.")


def check_integer(field: str, value: Any) -> int:
    """`value` as Python's integer; raises ValueError for anything else, bools and whole floats included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{field} must be an integer, got {type(value).__name__} {value!r}.")
    return operator.index(value)


def check_integers(field: str, values: Sequence[int]) -> tuple[int, ...]:
    """`values` as Python's integers; raises ValueError unless it is a sequence of integers."""
    try:
        return tuple(check_integer(field, value) for value in values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field} must contain only integers, got {values!r}.") from error


def check_count(field: str, value: Any) -> int:
    """`value` as Python's integer; raises ValueError unless it is an integer of at least 1."""
    if check_integer(field, value) < 1:
        raise ValueError(f"{field} must be at least 1, got {value}.")
    return operator.index(value)


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{field} must be a number, got {value!r}.")
    return float(value)


def _check_range(field: str, value: float | int, low: int, high: int) -> None:
    # Written so that NaN fails.
    if not low <= value <= high:
        raise ValueError(f"{field} must be in [{low}, {high}], got {value}.")


def _biases(biases: Mapping[Any, float]) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {biases!r}.")
    clamped = {}
    for key, value in biases.items():
        try:
            # JSON keys are strings; int() alone would cut 1.5 to 1.
            token_id = int(key) if isinstance(key, str) else check_integer("logit_bias", key)
        except (TypeError, ValueError) as error:
            raise ValueError(f"logit_bias keys must be token ids, got {key!r}.") from error
        if math.isnan(_number("logit_bias", value)):
            raise ValueError(f"logit_bias of token_id {token_id} must be a number, got {value}.")
        clamped[token_id] = min(max(float(value), -100.0), 100.0)
    return clamped


def _bad_words(words: Sequence[str | Sequence[int]]) -> tuple[str | tuple[int, ...], ...]:
    is_list = isinstance(words, Sequence) and not isinstance(words, str)
    if not is_list or not all(isinstance(word, Sequence) for word in words):
        raise ValueError(f"bad_words must hold strings or token id lists, got {words!r}.")
    if any(len(word) == 0 for word in words):
        raise ValueError(f"bad_words cannot contain an empty string. Got bad_words={words!r}.")
    return tuple(word if isinstance(word, str) else check_integers("bad_words", word) for word in words)
