"""What an engine has done, and what a call of the offline API took."""

from __future__ import annotations

import dataclasses

from serve.compilation import Compiled, compiled_so_far
from serve.outputs import RequestOutput
from serve.report import Reading


@dataclasses.dataclass
class Counters:
    """What an engine has done since it was made.

    Attributes:
      num_prompt_tokens: of requests that were submitted.
      num_tokens: read from the device, dropped ones included.
      num_steps: of the device, each for all slots.
      num_slot_steps: the same, times slots.
      num_busy_slot_steps: those in which a slot drew a token.
      num_bytes: fetched from the device.
      num_prefix_queries: tokens of prompts whose beginnings were looked for in what is kept.
      num_prefix_hits: those of them that were found and not read again.
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_slot_steps: int = 0
    num_busy_slot_steps: int = 0
    num_bytes: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0

    def count(self, reading: Reading, num_slots: int) -> None:
        """A chunk of steps on so many slots."""
        self.num_tokens += int(reading.counts.sum())
        self.num_steps += reading.num_steps
        self.num_slot_steps += reading.num_steps * num_slots
        self.num_busy_slot_steps += reading.num_busy
        self.num_bytes += reading.num_bytes


@dataclasses.dataclass(frozen=True)
class CallStats:
    """What a call took.

    Attributes:
      num_requests: prompts.
      num_prompt_tokens: of all prompts.
      num_tokens: of all completions.
      seconds: from the first program to the last token; compilation included.
      compiled: programs compiled meanwhile.
      num_steps: of the device.
      idle_share: of all steps of all slots, those in which a slot drew no token; in [0, 1].
      num_bytes: fetched from the device.
    """

    num_requests: int
    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    compiled: Compiled
    num_steps: int
    idle_share: float
    num_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of completions in a second that was not spent compiling."""
        return self.num_tokens / max(self.seconds - self.compiled.seconds, 1e-9)


def call_stats(
    answers: list[RequestOutput], before: Counters, after: Counters, compiled: Compiled, seconds: float
) -> CallStats:
    """What happened since `before` and `compiled`, in so many seconds."""
    num_slot_steps = after.num_slot_steps - before.num_slot_steps
    num_busy = after.num_busy_slot_steps - before.num_busy_slot_steps
    return CallStats(
        num_requests=len(answers),
        num_prompt_tokens=sum(len(answer.prompt_token_ids) for answer in answers),
        num_tokens=sum(len(completion.token_ids) for answer in answers for completion in answer.outputs),
        seconds=seconds,
        compiled=compiled_so_far() - compiled,
        num_steps=after.num_steps - before.num_steps,
        idle_share=1 - num_busy / num_slot_steps if num_slot_steps else 0.0,
        num_bytes=after.num_bytes - before.num_bytes,
    )
