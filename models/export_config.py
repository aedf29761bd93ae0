"""The `config.json` of a decoder, in the words of the hub family that computes the same."""

from typing import Any

from models.config import DecoderConfig, LinearRopeScaling, RopeScaling, require
from models.hub_config import ACTIVATIONS, FULL, SLIDING


def to_hub(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The object of a `config.json` that transformers builds the same decoder from.

    Args:
      config: adapters are not described: merge them first.
      dtype: of the stored weights.

    Raises:
      ValueError: no hub family computes this.
    """
    model_type = hub_model_type(config)
    layer_types = [FULL if config.window_of(layer) is None else SLIDING for layer in range(config.num_layers)]
    rope = _rope_parameters(config.rope_theta, config.rope_scaling)
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    hub: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "hidden_activation" if model_type == "gemma3_text" else "hidden_act": activation,
        # Read by transformers 5; the two fields after it by transformers 4.
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if model_type in ("mistral", "qwen2", "qwen3", "smollm3"):
        hub["sliding_window"] = config.sliding_window
    if model_type in ("qwen2", "qwen3", "smollm3"):
        hub |= {"use_sliding_window": config.sliding_window is not None, "layer_types": layer_types}
    if model_type in ("qwen2", "qwen3"):
        hub["max_window_layers"] = layer_types.index(SLIDING) if SLIDING in layer_types else config.num_layers
    if model_type == "smollm3":
        hub["no_rope_layers"] = [int(layer not in config.unrotated_layers) for layer in range(config.num_layers)]
    return hub | _gemma_fields(config, layer_types, rope) if model_type == "gemma3_text" else hub


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def hub_model_type(config: DecoderConfig) -> str:
    """The hub family that computes what a configuration says.

    Raises:
      ValueError: there is none, or it has adapters.
    """
    require(config.lora is None, "lora", config.lora, "None: merge the adapters first")
    gemma = (config.norm_plus_one, config.post_norms, config.scale_embedding, config.local_rope_theta is not None)
    if all(gemma) and config.qk_norm and not (config.attention_bias or config.unrotated_layers):
        return "gemma3_text"
    only_gemma = (*gemma, config.attention_scale, config.attention_softcap, config.logit_softcap)
    if any(only_gemma) or config.activation != "silu":
        raise ValueError("no hub family has this mixture of Gemma's parts and others; it cannot be exported")
    parts = (config.attention_bias, config.qk_norm, bool(config.unrotated_layers), config.sliding_window is not None)
    kinds = {
        (False, False, False, False): "llama",
        (False, False, False, True): "mistral",
        (True, False, False, False): "qwen2",
        (True, False, False, True): "qwen2",
        (False, True, False, False): "qwen3",
        (False, True, False, True): "qwen3",
        (False, False, True, False): "smollm3",
        (False, False, True, True): "smollm3",
    }
    model_type = kinds.get(parts)
    if model_type is None or (model_type == "mistral" and config.full_layers):
        raise ValueError("no hub family has this mixture of biases, q/k norms, windows and rotary layers")
    return model_type


def _gemma_fields(config: DecoderConfig, layer_types: list[str], rope: dict[str, Any]) -> dict[str, Any]:
    assert config.local_rope_theta is not None
    return {
        "layer_types": layer_types,
        "sliding_window": config.max_length if config.sliding_window is None else config.sliding_window,
        "query_pre_attn_scalar": _whole(config.score_scale),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "rope_parameters": {FULL: rope, SLIDING: _rope_parameters(config.local_rope_theta, None)},
        "rope_local_base_freq": config.local_rope_theta,
        "use_bidirectional_attention": False,
    }


def _whole(score_scale: float) -> int:
    # Files hold the inverse square of the scale, an integer.
    value = score_scale**-2
    allowed = "the inverse root of an integer, as Gemma's files store it"
    require(abs(value - round(value)) < 1e-6 * value, "attention_scale", score_scale, allowed)
    return round(value)


def _rope_parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    if isinstance(scaling, LinearRopeScaling):
        return {"rope_type": "linear", "rope_theta": theta, "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_length,
    }
