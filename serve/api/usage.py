"""Numbers of tokens, as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.outputs import RequestOutput
from serve.tickets import Ticket


def usage_of(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object.

    Args:
      num_prompt_tokens: of all prompts of a request, each once.
      num_tokens: of all completions.
      num_cached_tokens: of the prompts, found in the prefix cache; None where there is none.
    """
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": None if num_cached_tokens is None else {"cached_tokens": num_cached_tokens},
    }


class Tally:
    """The tokens of a request while its prompts are answered."""

    def __init__(self, tickets: Sequence[Ticket]):
        """Of all prompts, and of no completions yet."""
        self._num_prompt_tokens = sum(len(ticket.request.prompt_token_ids) for ticket in tickets)
        self._num_tokens = 0
        self._num_cached: dict[int, int] = {}

    def add(self, number: int, output: RequestOutput) -> None:
        """Counts what came of one prompt."""
        self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.num_cached_tokens is not None:
            self._num_cached[number] = output.num_cached_tokens

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        num_cached = sum(self._num_cached.values()) if self._num_cached else None
        return usage_of(self._num_prompt_tokens, self._num_tokens, num_cached)
