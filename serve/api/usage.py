"""Numbers of tokens, as OpenAI reports them."""

from __future__ import annotations

from typing import Any


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
