"""vLLM's offline API: prompts in, completions with their supports out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike
from rich.console import Console

import models
from jaxmask import SamplingParams
from jaxmask.model import Model
from serve.compilation import compiled_so_far, persistent_cache
from serve.config import EngineConfig
from serve.engine import Engine
from serve.inputs import (
    Message,
    Prompt,
    conversations,
    dtype_of,
    generation_defaults,
    listed_prompts,
    settings_of,
    speculation_of,
)
from serve.outputs import RequestOutput
from serve.progress import progress_bar
from serve.requests import Request
from serve.stats import CallStats, call_stats


class LLM:
    """A model that answers prompts.

    Attributes:
      engine: what does the work.
      last_stats: of the last call; None before the first.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        tokenizer: Any = None,
        dtype: DTypeLike = "auto",
        generation_config: str | Mapping[str, Any] = "auto",
        speculative_config: Mapping[str, Any] | None = None,
        compilation_cache_dir: str | Path | None = None,
        **engine_settings: Any,
    ):
        """Loads the model; nothing is compiled before the first call.

        Args:
          model: what `models.load` takes, or a decoder, which may lie on a mesh, or another `Model` with a vocab_size.
          tokenizer: of a decoder, or instead of the model's own; with `encode`, `decode`, `stream` and `eos_token_ids`.
          dtype: of the weights as they are loaded; "auto" is float32. A decoder stays as it is.
          generation_config: "auto": settings of calls that bring none are those that the model recommends; "vllm":
            those of `SamplingParams()`; or the settings themselves.
          speculative_config: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
            "prompt_lookup_min": 1} guesses from the text so far; {"method": "draft_model", "model": ...,
            "num_speculative_tokens": 4} by a smaller model of the same vocabulary. None: no guesses.
          compilation_cache_dir: compiled programs are kept there for the next process; None: as JAX is configured.
          engine_settings: the other fields of `EngineConfig`: return_sampling_mask, logprobs_mode, max_model_len,
            max_num_seqs, max_logprobs, seed and more.

        Raises:
          ValueError: settings out of range or, with vLLM's texts, that supports cannot go with.
          TypeError: an unknown setting.
        """
        speculation = None if speculative_config is None else speculation_of(speculative_config, dtype)
        config = EngineConfig(**engine_settings, speculation=speculation)
        if isinstance(model, (str, Path)):
            model, own_tokenizer = models.load(model, dtype_of(dtype))
            tokenizer = own_tokenizer if tokenizer is None else tokenizer
        elif not isinstance(model, Model):
            raise ValueError(f"model must be a name, a path or a model with prefill and decode, got {model!r:.100}.")
        defaults = generation_defaults(generation_config, tokenizer)
        self.engine = Engine(model, tokenizer, config, generation_defaults=defaults)
        self.last_stats: CallStats | None = None
        self._tokenizer, self._cache_dir, self._num_requests = tokenizer, compilation_cache_dir, 0

    def get_tokenizer(self) -> Any:
        """The tokenizer; None where there is none."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The settings of calls that bring none."""
        return self.engine.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Console = True,
    ) -> list[RequestOutput]:
        """Completions of prompts, in their order. All are checked before any of them runs.

        Args:
          prompts: one or many: texts, lists of ids, or {"prompt": text} and {"prompt_token_ids": ids}.
          sampling_params: for all prompts, or one for each; None: see `get_default_sampling_params`.
          use_tqdm: show a bar, where standard error is a terminal; or on a given console.

        Raises:
          ValueError: a prompt or settings that cannot be answered, or another number of settings than of prompts.
        """
        listed = listed_prompts(prompts)
        settings = settings_of(sampling_params, len(listed))
        if self.engine.has_unfinished_requests():
            raise ValueError("the engine is answering requests of others: let it finish, or reset it")
        pairs = enumerate(zip(listed, settings, strict=True), start=self._num_requests)
        requests = [self._request(str(number), prompt, params) for number, (prompt, params) in pairs]
        self._num_requests += len(requests)
        return self._answer(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Console = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Replies to one conversation or to many.

        Args:
          messages: mappings with "role" and "content"; or a list of such lists.
          sampling_params: as for `generate`, like use_tqdm.
          use_tqdm: show a bar.
          add_generation_prompt: end the prompt with the opening of the assistant's reply.
          tools: that the template may describe.
          chat_template_kwargs: further names of the template ("enable_thinking").

        Raises:
          ValueError: as `generate`; no tokenizer or chat template, or messages that the template refuses.
        """
        if self._tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template, which this model does not have.")
        many = conversations(messages)
        values = {**(chat_template_kwargs or {}), **({} if tools is None else {"tools": tools})}
        prompts = []
        for conversation in many:
            text = self._tokenizer.apply_chat_template(
                conversation, add_generation_prompt=add_generation_prompt, **values
            )
            # The template writes the BOS itself.
            prompts.append({"prompt": text, "prompt_token_ids": self._tokenizer.encode(text)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _request(self, request_id: str, prompt: Prompt, params: SamplingParams | None) -> Request:
        if not isinstance(prompt, Mapping):
            return self.engine.check(request_id, prompt, params)
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
        if unknown or not prompt:
            raise ValueError(f"a prompt must hold prompt or prompt_token_ids, got {unknown or 'nothing'}.")
        text = prompt.get("prompt")
        return self.engine.check(request_id, prompt.get("prompt_token_ids", text), params, text=text)

    def _answer(self, requests: list[Request], use_tqdm: bool | Console) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        before, compiled, started = dataclasses.replace(self.engine.counters), compiled_so_far(), time.perf_counter()
        try:
            with persistent_cache(self._cache_dir), progress_bar(len(requests), use_tqdm) as advance:
                for request in requests:
                    self.engine.submit(request)
                while self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        outputs[output.request_id] = output
                        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
                        advance(1, len(output.prompt_token_ids), num_tokens)
        except BaseException:
            self.engine.reset()
            raise
        answers = [outputs[request.request_id] for request in requests]
        self.last_stats = call_stats(answers, before, self.engine.counters, compiled, time.perf_counter() - started)
        return answers
