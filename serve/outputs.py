"""What a request gives back, with vLLM's names; supports stay in two arrays until someone asks for lists."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, overload

import numpy as np
from jaxtyping import Int, Integer

from jaxmask import ragged
from jaxmask.wire import Logprob

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclasses.dataclass(frozen=True, eq=False)
class SamplingMask:
    """The supports of one completion: the ids each token was drawn from.

    `mask[3]` is the support of token 3, `mask[:3]` the mask of the first three tokens.

    Attributes:
      ids: ids of all supports one after another, ascending in each.
      offsets: where the support of each token starts, with the total last.
    """

    ids: Int[np.ndarray, " N"]
    offsets: Int[np.ndarray, " T_plus_1"]

    @classmethod
    def from_csr(
        cls, ids: Integer[np.ndarray, " N"] | Sequence[int], offsets: Integer[np.ndarray, " T_plus_1"] | Sequence[int]
    ) -> SamplingMask:
        """The mask of compressed sparse rows, as `jaxmask.wire.to_csr` gives them; arrays are not copied.

        Raises:
          ValueError: ids or offsets that are not integers, or offsets that do not cut the ids.
        """
        id_array, offset_array = ragged.integer_array("ids", ids), ragged.integer_array("offsets", offsets)
        ragged.row_lengths(offset_array, len(id_array))
        return cls(id_array.astype(np.int32, copy=False), offset_array.astype(np.int64, copy=False))

    @classmethod
    def from_lists(cls, token_ids: Sequence[Sequence[int]]) -> SamplingMask:
        """The mask of one ascending list of ids for each token; the inverse of `token_ids`."""
        offsets = np.cumsum([0, *map(len, token_ids)])
        return cls.from_csr(list(itertools.chain.from_iterable(token_ids)), offsets)

    @classmethod
    def concatenate(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """The mask of all tokens of the parts, one part after another; no parts give the mask of no tokens."""
        lengths = [np.diff(part.offsets) for part in parts]
        ids = np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)])
        return cls(ids, np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths])))

    @property
    def token_ids(self) -> list[list[int]]:
        """One ascending list of ids for each generated token; made anew each time."""
        ids, offsets = self.ids.tolist(), self.offsets.tolist()
        return [ids[start:end] for start, end in itertools.pairwise(offsets)]

    @property
    def counts(self) -> Int[np.ndarray, " T"]:
        """Ids in each support."""
        return np.diff(self.offsets)

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        return self.ids.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        """Number of generated tokens."""
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> SamplingMask: ...

    def __getitem__(self, index: int | slice) -> list[int] | SamplingMask:
        """The support of one token, or the mask of a range of tokens without a copy of their ids.

        Raises:
          IndexError: there is no such token.
          ValueError: a slice with a step other than 1.
        """
        if not isinstance(index, slice):
            token = range(len(self))[index]
            return self.ids[self.offsets[token] : self.offsets[token + 1]].tolist()
        start, end, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of a sampling mask must have step 1, got {step}.")
        offsets = self.offsets[start : max(start, end) + 1]
        return SamplingMask(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    def __iter__(self) -> Iterator[list[int]]:
        """The support of each token in turn."""
        return iter(self.token_ids)

    def __eq__(self, other: object) -> bool:
        """Whether both masks hold the same supports."""
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]


class WeightSpan(NamedTuple):
    """Tokens of one completion that were drawn with the same weights.

    Attributes:
      version: of the weights.
      start: place of the first token, counted from the first of the completion.
      end: place after the last token.
    """

    version: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """When what happened to a request, in seconds of `time.monotonic`; None where it has not yet.

    Attributes:
      arrival_time: it was submitted.
      first_scheduled_time: the first of its completions got a slot.
      first_token_time: its first tokens were there.
      last_token_time: its newest tokens were there.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: which of the n completions of its prompt.
      text: what the ids say, cut at the stop string; "" without a tokenizer.
      token_ids: all generated ids, those included whose text was cut.
      cumulative_logprob: sum of the drawn ids' log-probabilities; None where none were asked for.
      logprobs: for each token, by id: the drawn one, then the likeliest.
      sampling_mask: the supports; None where the request did not take part.
      finish_reason: "stop" (a stop string, a stop id or EOS), "length", "error", "abort", or None while it goes on.
      stop_reason: the stop string or stop id that ended it; None for EOS and all else.
      weight_versions: which weights drew which of the tokens; of a delta, those of its own tokens.

    Raises:
      ValueError: sampling_mask or logprobs without exactly one entry for each token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    sampling_mask: SamplingMask | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightSpan] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        """Checks that what belongs to tokens has one entry for each."""
        per_token: tuple[tuple[str, list | SamplingMask | None], ...] = (
            ("sampling_mask", self.sampling_mask),
            ("logprobs", self.logprobs),
        )
        for field, values in per_token:
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"{field} must have one entry for each of the {len(self.token_ids)} token_ids, got {len(values)}."
                )

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """All completions of one prompt.

    Attributes:
      request_id: the engine's name of the request.
      prompt: its text; None where ids were given.
      prompt_token_ids: its ids, BOS included.
      prompt_logprobs: for each of them, by id: its own, then the likeliest; None for the first, which nothing predicts.
      outputs: the completions, by index.
      finished: whether all of them are.
      num_cached_tokens: of the prompt, not read because they had been read before; None where nothing is kept.
      metrics: when what happened; None from others than the engine.

    Raises:
      ValueError: prompt_logprobs without exactly one entry for each prompt token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None

    def __post_init__(self) -> None:
        """Checks that log-probabilities of the prompt have one entry for each of its tokens."""
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) != len(self.prompt_token_ids):
            raise ValueError(
                f"prompt_logprobs must have one entry for each of the {len(self.prompt_token_ids)} prompt_token_ids, "
                f"got {len(self.prompt_logprobs)}."
            )
