"""`python -m serve MODEL`: the options of the HTTP server, and its start."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

# All else is imported once the command line is read: JAX takes longer than that does.
if TYPE_CHECKING:
    from serve import LLM
    from serve.api.service import Service

LOG = logging.getLogger("serve")
API_KEY_VARIABLE = "JAXMASK_API_KEY"


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Serve a model over HTTP, with the support of every token.

    Attributes:
      model: a folder, a GGUF file, or a name.
      host: address to listen on; 0.0.0.0 for all.
      port: to listen on; 0 takes a free one.
      served_model_name: by which requests call the model; give the option again for more names.
      api_key: what each request must bring; give the option again for more keys. Also from JAXMASK_API_KEY.
      return_sampling_mask: return supports, unless a request says otherwise.
      logprobs_mode: what log-probabilities are of.
      unbounded_support: allow supports without top_k.
      max_model_len: most tokens of prompt and completion together.
      max_num_seqs: completions that run at once, at most.
      min_num_seqs: slots that are there at least; the same as max_num_seqs saves compilations under load.
      min_model_len: tokens that a slot has room for at least.
      max_waiting: completions that may wait for a slot; further requests get 429.
      max_logprobs: most log-probabilities per token that a request may ask for.
      enable_prefix_caching: read the common beginning of prompts once.
      prefix_cache_tokens: tokens that there is room for in what is kept of prompts.
      prefill_chunk_size: tokens of a long prompt that are read at once, between which others go on; 128 on CPUs, 512
        elsewhere.
      steps_per_chunk: steps of the device between two looks of the host.
      stream_interval: the same while a request is streamed.
      speculative_config: as JSON, for example {"method": "ngram", "num_speculative_tokens": 4}.
      generation_config: auto takes over what the model recommends where a request says nothing, vllm does not.
      dtype: float type of the weights.
      seed: from which requests without a seed get theirs.
      request_timeout: seconds after which a request ends with what it has.
      drain_timeout: seconds for requests to end in, once SIGTERM came.
      enable_rl_endpoints: let clients pause the server and replace its weights.
      compilation_cache_dir: compiled programs are kept there for the next start.
      warmup: compile, before requests are taken, what the first ones need, or what any number of them needs.
      access_log: a line for each request.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    api_key: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    return_sampling_mask: bool = False
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    unbounded_support: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 32
    min_num_seqs: int = 1
    min_model_len: int = 256
    max_waiting: int = 1024
    max_logprobs: int = 20
    enable_prefix_caching: bool | None = None
    prefix_cache_tokens: int = 16384
    prefill_chunk_size: int | None = None
    steps_per_chunk: int = 16
    stream_interval: int = 4
    speculative_config: str | None = None
    generation_config: Literal["auto", "vllm"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    enable_rl_endpoints: bool = False
    compilation_cache_dir: Path | None = None
    warmup: Literal["none", "first", "all"] = "first"
    access_log: bool = True


def run(options: ServerOptions) -> int:
    """Loads the model and serves it until a signal comes; returns 0.

    Raises:
      ValueError: settings out of range, or a model that does not fit them.
      OSError: there is no such model, or the address cannot be had.
    """
    from serve import server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # It tells which kinds of device there are not.
    logging.getLogger("jax").setLevel(logging.WARNING)
    bound = server.listen(options.host, options.port)
    with bound:
        server.run(open_service(options), bound, access_log=options.access_log)
    return 0


def open_service(options: ServerOptions) -> Service:
    """The model, loaded, behind what endpoints need; raises as `run`."""
    from serve.api.service import ServerConfig, Service
    from serve.async_engine import AsyncEngine
    from serve.compilation import keep_programs
    from serve.config import recommended
    from serve.inputs import generation_defaults
    from serve.warmup import warm_up

    # Settings out of range are refused before the weights are read.
    if options.max_waiting < 0:
        raise ValueError(f"max_waiting must be at least 0, got {options.max_waiting}.")
    config = ServerConfig(
        model_names=options.served_model_name or (options.model,),
        api_keys=options.api_key or tuple(filter(None, [os.environ.get(API_KEY_VARIABLE)])),
        enable_rl_endpoints=options.enable_rl_endpoints,
        request_timeout=options.request_timeout,
        drain_timeout=options.drain_timeout,
    )
    keep_programs(options.compilation_cache_dir)
    LOG.info("loading %s", options.model)
    llm = _open_model(options)
    if options.warmup != "none":
        warm_up(llm.engine, all_sizes=options.warmup == "all")
    defaults = recommended(generation_defaults(options.generation_config, llm.get_tokenizer()))
    return Service(AsyncEngine(llm.engine, max_waiting=options.max_waiting), config, defaults)


def engine_settings(options: ServerOptions) -> dict[str, Any]:
    """The fields of `EngineConfig` that the command line sets."""
    import jax

    from serve.config import EngineConfig

    names = {field.name for field in dataclasses.fields(EngineConfig)} & set(vars(options))
    chunk_size = options.prefill_chunk_size
    if chunk_size is None:
        # On a CPU a longer piece keeps others waiting for a second, and is hardly read faster for its length.
        chunk_size = 128 if jax.default_backend() == "cpu" else EngineConfig.prefill_chunk_size
    return {name: getattr(options, name) for name in names} | {"prefill_chunk_size": chunk_size}


def _open_model(options: ServerOptions) -> LLM:
    from serve import LLM

    speculative = _speculative_config(options.speculative_config)
    caches = speculative is None if options.enable_prefix_caching is None else options.enable_prefix_caching
    logging.getLogger("serve").info("loading %s", options.model)
    return LLM(
        options.model,
        dtype=options.dtype,
        generation_config=options.generation_config,
        speculative_config=speculative,
        **engine_settings(options) | {"enable_prefix_caching": caches},
    )


def _speculative_config(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"speculative_config must be JSON, got {text!r}: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"speculative_config must be a JSON object, got {text!r}.")
    return settings
