"""A decoder's configuration from the `config.json` of a hub folder, in the style of transformers 4 or 5."""

import sys
from collections.abc import Mapping
from typing import Any

from models.config import (
    MAX_LAYERS,
    DecoderConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
    require,
    require_count,
)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3_text")
ROPE_TYPES = ("default", "llama3", "linear")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"
# Families whose windows have a switch of their own, and those that always have them where a size is given.
SWITCHED, WINDOWED = ("qwen2", "qwen3", "smollm3"), ("mistral", "gemma3_text")
# What transformers takes where a file says nothing; other families' files always say.
DEFAULTS: dict[str, dict[str, Any]] = {
    "smollm3": {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "mistral": {"sliding_window": 4096},
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"max_window_layers": 28},
}


def from_hub(hub: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that the object in a `config.json` describes.

    Raises:
      ValueError: a field is missing, or asks for something this decoder does not compute.
    """
    model_type = hub.get("model_type")
    require(model_type in MODEL_TYPES, "model_type", model_type, f"one of {MODEL_TYPES}")
    hub = _with_defaults(hub, DEFAULTS.get(str(model_type), {}))
    _refuse_unsupported(hub)
    rope, local_rope = _rope_settings(hub)
    num_heads, width, num_layers = (
        _count(hub, name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    require(num_layers <= MAX_LAYERS, "num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
    layers = _layers(hub, num_layers)
    is_gemma = model_type == "gemma3_text"
    return DecoderConfig(
        vocab_size=_count(hub, "vocab_size"),
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=_count(hub, "num_key_value_heads", num_heads),
        head_dim=_count(hub, "head_dim", width // num_heads),
        mlp_width=_count(hub, "intermediate_size"),
        rope_theta=_number(rope, "rope_theta"),
        rope_scaling=_rope_scaling(rope),
        norm_eps=_number(hub, "rms_norm_eps"),
        tie_embeddings=_flag(hub, "tie_word_embeddings"),
        attention_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3" or is_gemma,
        max_length=_count(hub, "max_position_embeddings"),
        activation=ACTIVATIONS[_activation(hub)],  # type: ignore[arg-type]
        local_rope_theta=_number(local_rope, "rope_theta") if is_gemma else None,
        attention_scale=_positive(hub, "query_pre_attn_scalar") ** -0.5 if is_gemma else None,
        attention_softcap=_positive(hub, "attn_logit_softcapping")
        if is_gemma and "attn_logit_softcapping" in hub
        else None,
        logit_softcap=_positive(hub, "final_logit_softcapping")
        if is_gemma and "final_logit_softcapping" in hub
        else None,
        norm_plus_one=is_gemma,
        post_norms=is_gemma,
        scale_embedding=is_gemma,
        **layers,
    )


def _with_defaults(hub: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    # An explicit null means "absent" in hub files; of the window alone it means "none".
    is_unbounded = "sliding_window" in hub and hub["sliding_window"] is None
    merged = dict(defaults) | {name: value for name, value in hub.items() if value is not None}
    return {name: value for name, value in merged.items() if not (is_unbounded and name == "sliding_window")}


def _layers(hub: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Which layers have a window, and which have no rotary positions."""
    model_type = hub["model_type"]
    unrotated: tuple[int, ...] = ()
    if model_type == "smollm3":
        interval = _count(hub, "no_rope_layer_interval")
        default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
        is_rotated = _per_layer(hub, "no_rope_layers", num_layers) or default
        require(all(value in (0, 1) for value in is_rotated), "no_rope_layers", is_rotated, "a list of 0 and 1")
        unrotated = tuple(layer for layer in range(num_layers) if not is_rotated[layer])
    # Qwen files carry a window size that `use_sliding_window: false` switches off.
    is_used = _flag(hub, "use_sliding_window") if model_type in SWITCHED else model_type in WINDOWED
    window = hub.get("sliding_window") if is_used else None
    types = _per_layer(hub, "layer_types", num_layers)
    if types:
        unknown = [kind for kind in types if kind not in (FULL, SLIDING)]
        require(not unknown, "layer_types", unknown, f"{FULL!r} and {SLIDING!r}")
        full = [layer for layer in range(num_layers) if types[layer] == FULL]
        require(window is not None or len(full) == num_layers, "sliding_window", window, "a number, as layer_types say")
    elif model_type == "gemma3_text":
        pattern = _count(hub, "sliding_window_pattern")
        full = [layer for layer in range(num_layers) if (layer + 1) % pattern == 0]
    elif model_type == "smollm3":
        full = [layer for layer in range(num_layers) if layer not in unrotated]
    else:
        first = hub.get("max_window_layers", 0)
        require(isinstance(first, int) and first >= 0, "max_window_layers", first, "an integer >= 0")
        full = list(range(min(first, num_layers)))
    if window is None or len(full) == num_layers:
        return {"unrotated_layers": unrotated}
    return {"sliding_window": _count(hub, "sliding_window"), "full_layers": tuple(full), "unrotated_layers": unrotated}


def _per_layer(hub: Mapping[str, Any], name: str, num_layers: int) -> list[Any]:
    values = hub.get(name, [])
    is_list = isinstance(values, list) and len(values) in (0, num_layers)
    require(is_list, name, values, f"a list with one entry for each of {num_layers} layers")
    return values


def _rope_settings(hub: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of all layers, and of those with a window in Gemma 3."""
    # transformers 5 gathers in `rope_parameters` what transformers 4 spread over the top level and `rope_scaling`.
    gathered = hub.get("rope_parameters") or hub.get("rope_scaling") or {}
    require(isinstance(gathered, Mapping), "rope_parameters", gathered, "an object")
    top = {name: hub[name] for name in ("rope_theta", "partial_rotary_factor") if name in hub}
    if FULL not in gathered:
        return top | dict(gathered), {"rope_theta": hub.get("rope_local_base_freq")}
    require(hub["model_type"] == "gemma3_text", "rope_parameters", gathered, "one object for all layers")
    for name in (FULL, SLIDING):
        require(isinstance(gathered.get(name, {}), Mapping), f"rope_parameters.{name}", gathered.get(name), "an object")
    local = {"rope_theta": hub.get("rope_local_base_freq")} | dict(gathered.get(SLIDING, {}))
    require(local.get("rope_type", "default") == "default", "rope_type", local.get("rope_type"), "'default' in windows")
    return top | dict(gathered[FULL]), local


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    # Files older than transformers 4.43 write `type`.
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    require(rope_type in ROPE_TYPES, "rope_type", rope_type, f"one of {ROPE_TYPES}")
    partial = rope.get("partial_rotary_factor") or 1.0
    require(partial == 1.0, "partial_rotary_factor", partial, "1.0")
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return LinearRopeScaling(_number(rope, "factor"))
    return Llama3RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_length=_count(rope, "original_max_position_embeddings"),
    )


def _refuse_unsupported(hub: Mapping[str, Any]) -> None:
    activation = _activation(hub)
    require(activation in tuple(ACTIVATIONS), "hidden_act", activation, f"one of {tuple(ACTIVATIONS)}")
    if hub["model_type"] not in (*SWITCHED, *WINDOWED):
        require("sliding_window" not in hub, "sliding_window", hub.get("sliding_window"), "null in this model_type")
    for name in ("mlp_bias", "use_bidirectional_attention"):
        require(not hub.get(name), name, hub.get(name), "false")
    if hub["model_type"] != "qwen2":
        require(not hub.get("attention_bias"), "attention_bias", hub.get("attention_bias"), "false, except in qwen2")


def _activation(hub: Mapping[str, Any]) -> Any:
    return hub.get("hidden_activation", hub.get("hidden_act", "silu"))


def _field(hub: Mapping[str, Any], name: str) -> Any:
    if hub.get(name) is None:
        raise ValueError(f"the model configuration has no {name!r}; it has {sorted(hub)}")
    return hub[name]


def _count(hub: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _field(hub, name) if default is None else hub.get(name, default)
    require_count(name, value)
    return value


def _number(hub: Mapping[str, Any], name: str) -> float:
    value = _field(hub, name)
    require(isinstance(value, int | float) and not isinstance(value, bool), name, value, "a number")
    is_held = isinstance(value, float) or abs(value) <= sys.float_info.max
    require(is_held, name, str(value)[:20], "a number that a float can hold")
    return float(value)


def _positive(hub: Mapping[str, Any], name: str) -> float:
    value = _number(hub, name)
    require(value > 0, name, value, "> 0")
    return value


def _flag(hub: Mapping[str, Any], name: str) -> bool:
    value = hub.get(name, False)
    require(isinstance(value, bool), name, value, "true or false")
    return value
