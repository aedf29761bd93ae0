"""Settings of rows as arrays, in shapes that only grow, so that few programs are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxmask import SamplingParams
from jaxmask.batch import SamplingBatch
from jaxmask.decoding import StepOptions
from jaxmask.kernels.dispatch import settle
from jaxmask.model import PlacedModel
from serve.arrivals import sizes_of
from serve.completions import Completion
from serve.config import MAX_WIDTH, EngineConfig, bucket

MIN_WIDTH, MIN_WIDTH_UNBOUNDED = 8, 64
IDLE = SamplingParams(max_tokens=1, seed=0, return_sampling_mask=False)


class RowSettings:
    """What the settings of an engine's rows need in the way of shapes.

    Attributes:
      options: of every step.
    """

    def __init__(self, model: Any, config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int]):
        """For rows without wishes; arguments as of `Slots`."""
        self._config, self._vocab_size, self._eos = config, vocab_size, tuple(eos_token_ids)
        self._widest = MIN_WIDTH_UNBOUNDED if config.unbounded_support else MIN_WIDTH
        self.options = StepOptions(
            width=min(self._widest, vocab_size),
            logprobs_mode=config.logprobs_mode,
            sharding=model.logits_sharding if isinstance(model, PlacedModel) else None,
            implementation=settle("auto", jax.tree.leaves(model)[0]),
        )
        # The sizes of all settings so far. Its one row returns no support, so that this setting is always there.
        self._seen: set[tuple[int, ...]] = set()
        self._largest: SamplingBatch | None = None
        self._largest = self.batch_of([IDLE])

    def expect(self, completions: Sequence[Completion]) -> None:
        """Settings that will come, so that no shape has to grow for them later."""
        for completion in completions:
            self._widen(completion)
            sizes = sizes_of(completion.row_params)
            if sizes not in self._seen:
                self._seen.add(sizes)
                self._largest = self.batch_of([completion.row_params])

    def batch_of(self, rows: Sequence[SamplingParams]) -> SamplingBatch:
        """The settings of rows."""
        is_bounded = not self._config.unbounded_support and self._widest <= MAX_WIDTH
        return SamplingBatch.from_params(
            rows,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos,
            support_bound=self.options.width if is_bounded else None,
            like=self._largest,
        )

    def _widen(self, completion: Completion) -> None:
        request, asked = completion.request, completion.request.params.logprobs
        self._widest = max(self._widest, _cells_for(completion.row_params, request.returns_mask))
        num_logprobs = self.options.num_logprobs
        if asked is not None:
            most = self._vocab_size if asked == -1 else asked
            num_logprobs = max(num_logprobs or 0, bucket(most, self._vocab_size) if most else 0)
        width = min(bucket(self._widest, MAX_WIDTH), self._vocab_size)
        self.options = dataclasses.replace(self.options, width=width, num_logprobs=num_logprobs)


def _cells_for(row: SamplingParams, returns_mask: bool) -> int:
    """Cells in which the sampler finds this row's support at once, where its top-k says so.

    A row that does not return it is exact with fewer, and searched apart, slowly: it gets some, but not thousands.
    """
    if row.is_greedy or row.top_k <= 0:
        return 0
    return row.top_k if returns_mask else min(row.top_k, MIN_WIDTH_UNBOUNDED)
