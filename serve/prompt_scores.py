"""Log-probabilities of a request's prompt, by one pass over it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmask.prompt import PromptLogprobs
from jaxmask.wire import Logprob, logprob_dicts
from serve import programs
from serve.config import bucket
from serve.requests import Limits, Request
from serve.texts import with_texts


class PromptScores:
    """What the model says of the prompt's tokens."""

    def __init__(self, request: Request, limits: Limits):
        """Nothing yet; the request must ask for prompt_logprobs."""
        self._request, self._limits = request, limits
        self._scores: PromptLogprobs | None = None
        self._entries: list[dict[int, Logprob] | None] | None = None

    def start(self, model: Any) -> None:
        """Asks the device for them; nothing waits for it. A second call does nothing."""
        if self._scores is not None:
            return
        token_ids, vocab_size = self._request.prompt_token_ids, self._limits.vocab_size
        cells: np.ndarray = np.zeros((1, bucket(len(token_ids), self._limits.max_model_len)), np.int32)
        cells[0, : len(token_ids)] = token_ids
        self._scores = programs.score_prompts(
            model,
            jnp.asarray(cells),
            jnp.asarray(np.array([len(token_ids)], np.int32)),
            vocab_size=vocab_size,
            logprobs_mode=self._limits.config.logprobs_mode,
            num_logprobs=bucket(self._num, vocab_size) if self._num else 0,
        )

    def entries(self) -> list[dict[int, Logprob] | None] | None:
        """For each token of the prompt: its own and the likeliest, None for the first; None where it was not begun."""
        if self._entries is None and self._scores is not None:
            num_places, scores = len(self._request.prompt_token_ids) - 1, self._scores
            leaves = (scores.logprobs, scores.ranks, scores.top.token_ids, scores.top.logprobs)
            values, ranks, top_ids, top_values = (np.asarray(leaf)[0, :num_places] for leaf in leaves)
            token_ids = np.array(self._request.prompt_token_ids[1:], np.int32)
            tokenizer = self._limits.tokenizer if self._request.params.detokenize else None
            dicts = logprob_dicts(token_ids, values, ranks, top_ids, top_values, self._num)
            self._entries = [None, *with_texts(dicts, tokenizer)]
        return self._entries

    @property
    def _num(self) -> int:
        asked = self._request.params.prompt_logprobs
        assert asked is not None
        return self._limits.vocab_size if asked == -1 else asked
