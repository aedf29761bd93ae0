"""`python -m serve generate`: prompts in, completions and their supports out, on the screen or as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

# All else is imported once the command line is read: JAX takes longer than that does.
if TYPE_CHECKING:
    from jaxmask import SamplingParams
    from models import Tokenizer
    from serve import LLM
    from serve.outputs import CompletionOutput, Logprob, RequestOutput

# JSON has no infinity; vLLM writes this number too.
LEAST_LOGPROB = -9999.0


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Complete prompts offline, and show how many ids each token was drawn from.

    Attributes:
      model: a folder, a GGUF file, or a name.
      prompts: texts to complete, each in quotes.
      temperature: in [0, 2]; 0 takes the likeliest token, without a sampling mask.
      top_k: likeliest tokens to keep; 0 keeps all.
      top_p: in (0, 1]; the mass to keep.
      min_p: in [0, 1]; keeps tokens at least so many times as likely as the likeliest.
      repetition_penalty: above 0; 1 is off.
      max_tokens: most tokens of a completion.
      n: completions of each prompt.
      seed: makes the draws repeatable.
      stop: text that ends a completion; give the option again for more of them.
      chat: prompts are messages of a user, put into the model's chat template.
      logprobs: log-probabilities to report of each token (with --json).
      sampling_mask: record the supports.
      max_model_len: most tokens of prompt and completion together.
      dtype: float type of the weights.
      json: one JSON object for each completion and line.
      sizes: write the size of each support behind its token.
      plain: no colours.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    prompts: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PROMPT [PROMPT ...]")]
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 64
    n: int = 1
    seed: int | None = None
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    logprobs: int | None = None
    sampling_mask: bool = True
    max_model_len: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    sizes: tyro.conf.FlagCreatePairsOff[bool] = False
    plain: tyro.conf.FlagCreatePairsOff[bool] = False

    @property
    def has_mask(self) -> bool:
        """Whether supports are recorded: greedy requests have none."""
        return self.sampling_mask and self.temperature != 0


def run(options: GenerateOptions) -> int:
    """Loads the model, completes the prompts and prints; returns 1 where a completion ended in an error, else 0.

    Raises:
      ValueError: no prompt, settings out of range, or a model that does not fit them.
      OSError: there is no such model.
    """
    if not options.prompts:
        raise ValueError("give at least one prompt: python -m serve generate MODEL PROMPT")
    params = sampling_params(options)  # a setting out of range is refused before the weights are read
    llm = open_model(options)
    started = time.perf_counter()
    outputs = _complete(llm, options, params)
    seconds = time.perf_counter() - started
    if options.json:
        for request, completion in _completions(outputs):
            print(as_json(request, completion))
    else:
        _show(outputs, llm.get_tokenizer(), options, seconds)
    return _exit_code(outputs)


def sampling_params(options: GenerateOptions) -> SamplingParams:
    """The settings of every prompt; raises ValueError where one is out of range."""
    from jaxmask import SamplingParams

    same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "n", "seed", "logprobs")
    values = {name: getattr(options, name) for name in same}
    return SamplingParams(**values, stop=options.stop, return_sampling_mask=None if options.has_mask else False)


def open_model(options: GenerateOptions) -> LLM:
    """The model, loaded; with supports of any size where no top-k bounds them."""
    from serve import LLM

    mask = options.has_mask
    with _console(options, stderr=True).status(f"loading {options.model}"):
        return LLM(
            options.model,
            return_sampling_mask=mask,
            logprobs_mode="processed_logprobs" if mask else "raw_logprobs",
            unbounded_support=mask and options.top_k <= 0,
            max_model_len=options.max_model_len,
            dtype=options.dtype,
        )


def as_json(request: RequestOutput, completion: CompletionOutput) -> str:
    """One completion as a JSON object on one line: ASCII, every number finite."""
    values = {
        "request_id": request.request_id,
        "prompt": request.prompt,
        "prompt_token_ids": request.prompt_token_ids,
        **{field.name: getattr(completion, field.name) for field in dataclasses.fields(completion)},
    }
    mask, logprobs, total = completion.sampling_mask, completion.logprobs, completion.cumulative_logprob
    values["sampling_mask"] = None if mask is None else mask.token_ids
    values["cumulative_logprob"] = None if total is None else _finite(total)
    values["logprobs"] = None if logprobs is None else [_plain(entries) for entries in logprobs]
    return json.dumps(values, allow_nan=False)


def _plain(entries: dict[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {token_id: entry._asdict() | {"logprob": _finite(entry.logprob)} for token_id, entry in entries.items()}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _complete(llm: LLM, options: GenerateOptions, params: SamplingParams) -> list[RequestOutput]:
    prompts, use_tqdm = list(options.prompts), sys.stderr.isatty()
    if not options.chat:
        return llm.generate(prompts, params, use_tqdm=use_tqdm)
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=use_tqdm)


def _completions(outputs: list[RequestOutput]) -> list[tuple[RequestOutput, CompletionOutput]]:
    return [(request, completion) for request in outputs for completion in request.outputs]


def _show(outputs: list[RequestOutput], tokenizer: Tokenizer, options: GenerateOptions, seconds: float) -> None:
    from serve.colours import coloured, legend, summary

    console = _console(options)
    for prompt, request in zip(options.prompts, outputs, strict=True):
        console.print(Text(prompt, "bold"))
        for completion in request.outputs:
            console.print(coloured(completion, tokenizer, sizes=options.sizes))
            console.print(Text(summary(completion), "dim"), end="\n\n")
    if options.has_mask and console.is_terminal and not console.no_color:
        console.print(legend())
    num_tokens = sum(len(completion.token_ids) for _, completion in _completions(outputs))
    speed = f"{num_tokens} tokens in {seconds:.1f} s, compilation included: {num_tokens / seconds:,.1f} tokens/s"
    console.print(Text(speed, "dim"))


def _console(options: GenerateOptions, stderr: bool = False) -> Console:
    is_terminal = False if options.plain else None
    return Console(stderr=stderr, force_terminal=is_terminal, highlight=False, soft_wrap=True)


def _exit_code(outputs: list[RequestOutput]) -> int:
    reasons = [completion.finish_reason for _, completion in _completions(outputs)]
    failed = reasons.count("error")
    if failed:
        print(f"error: {failed} of {len(reasons)} completions ended in an error", file=sys.stderr)
    return 1 if failed else 0
