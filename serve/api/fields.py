"""Fields of requests that say how to sample, and what they come to.

Types are checked here; ranges are checked by `SamplingParams`, whose texts are vLLM's. The ranges below are for the
OpenAPI page alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jaxmask import SamplingParams
from jaxmask.params import MAX_NUM_SAMPLES
from serve.api.errors import bad_request
from serve.sizes import MAX_BAD_WORDS, MAX_STOP_STRINGS

# What vLLM or OpenAI know and this server does not do: taken where it asks for nothing, refused where it does.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (None, True),
    "logprob_token_ids": (None,),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "watermarking": (None, False),
    "extra_args": (None, {}),
    "vllm_xargs": (None, {}),
    "priority": (None, 0),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "truncation_side": (None,),
    "session_id": (None,),
    "return_token_offsets": (None, False),
    "return_weight_versions": (None, True, False),
    "chat_template": (None,),
    "documents": (None,),
    "functions": (None,),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True, False),
    "reasoning_effort": (None,),
    "include_reasoning": (None, True),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "mm_processor_kwargs": (None,),
}

_MAX_FIELDS = 256
_MAX_ITEMS = {"stop": MAX_STOP_STRINGS, "bad_words": MAX_BAD_WORDS}


def about(text: str, **schema: Any) -> Any:
    """A field that may be left out, with its text and its range on the OpenAPI page."""
    return Field(default=None, description=text, json_schema_extra=schema or None)


class Body(BaseModel):
    """A body that holds no other fields than its own, each of exactly its type; null stands for a field left out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, values: Any) -> Any:
        """The fields without those that ask for nothing."""
        if not isinstance(values, dict):
            return values
        _check_sizes(values)
        kept = {name: value for name, value in values.items() if name not in NEUTRAL or name in cls.model_fields}
        for name in values.keys() - kept.keys():
            if not any(value == values[name] and type(value) is type(values[name]) for value in NEUTRAL[name]):
                raise ValueError(f"{name} is not supported by this server, got {values[name]!r:.100}")
        return kept

    @field_validator("*", mode="after")
    @classmethod
    def check_text(cls, value: Any) -> Any:
        """The value; half of a surrogate pair, which JSON can write, is no text that an answer could hold."""
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise ValueError(f"text must have whole characters alone, got {value!r:.100}")
        return value


def _check_sizes(values: dict[Any, Any]) -> None:
    """Raises ValueError for what would take seconds to look through, only to be refused then."""
    if len(values) > _MAX_FIELDS:
        raise ValueError(f"an object must have at most {_MAX_FIELDS} fields, got {len(values)}")
    for name, most in _MAX_ITEMS.items():
        value = values.get(name)
        if isinstance(value, list) and len(value) > most:
            raise ValueError(f"{name} must hold at most {most} values, got {len(value)}")


class StreamOptions(Body):
    """What a stream holds besides."""

    include_usage: bool | None = about("End with the number of tokens.")
    continuous_usage_stats: bool | None = about("Tell the number of tokens so far with each event.")


class SamplingFields(Body):
    """How to sample, with vLLM's names."""

    n: int | None = about("Completions of each prompt; 1.", minimum=1, maximum=MAX_NUM_SAMPLES)
    temperature: float | None = about("0 takes the likeliest token; 1.", minimum=0, maximum=2)
    top_p: float | None = about("Mass to keep; 1 keeps all.", exclusiveMinimum=0, maximum=1)
    top_k: int | None = about("Likeliest tokens to keep; 0 and -1 keep all.", minimum=-1)
    min_p: float | None = about("Least probability to keep, as a share of the greatest; 0.", minimum=0, maximum=1)
    seed: int | None = about("Makes draws repeatable.", minimum=-(2**63), maximum=2**64 - 1)
    min_tokens: int | None = about("EOS and stop ids come no sooner; 0.", minimum=0)
    stop: str | list[str] | None = about("Text that ends a completion.")
    stop_token_ids: list[int] | None = about("Ids that end a completion.")
    ignore_eos: bool | None = about("Go on after the model's EOS; false.")
    logit_bias: dict[str, float] | None = about("Added to logits, by id; clamped to [-100, 100].")
    allowed_token_ids: list[int] | None = about("Only these ids are drawn.")
    bad_words: list[str | list[int]] | None = about("What must not be written, as texts or ids.")
    presence_penalty: float | None = about("0.", minimum=-2, maximum=2)
    frequency_penalty: float | None = about("0.", minimum=-2, maximum=2)
    repetition_penalty: float | None = about("1.", exclusiveMinimum=0)
    return_sampling_mask: bool | None = about("The ids each token was drawn from; null: as the server was started.")
    include_stop_str_in_output: bool | None = about("Keep the stop string in the text; false.")
    skip_special_tokens: bool | None = about("Leave special tokens out of the text; true.")
    stream_interval: int | None = about("Taken, and without effect: the server chooses how many tokens an event holds.")


# Those of SamplingParams that each endpoint takes under the same name.
SHARED = tuple(name for name in SamplingFields.model_fields if name != "stream_interval")


def sampling_params(fields: SamplingFields, defaults: Mapping[str, Any], **values: Any) -> SamplingParams:
    """The settings of a request; raises ApiError 400 where one is out of range.

    Args:
      fields: as they came.
      defaults: of fields that were left out.
      values: what takes precedence, like max_tokens, which endpoints name differently.
    """
    given = {name: value for name in SHARED if (value := getattr(fields, name)) is not None}
    with bad_request():
        return SamplingParams(**{**defaults, **given, **values})
