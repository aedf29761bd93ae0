"""The shape of a decoder as plain values, and how hub configuration files are read into it.

Only full causal attention is described: sliding windows, mixtures of experts and soft caps are refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "llama3")
ACTIVATIONS = ("silu",)


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's stretch of the slow rotary frequencies.

    Attributes:
      factor: how much the slowest frequencies are slowed down, >= 1.
      low_freq_factor: wavelengths above original_max_length / low_freq_factor are stretched fully.
      high_freq_factor: wavelengths below original_max_length / high_freq_factor are left alone.
      original_max_length: context length before the stretch, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int

    def __post_init__(self) -> None:
        """Refuse values for which the interpolation is undefined."""
        _require(self.factor >= 1.0, "factor", self.factor, ">= 1")
        _require(self.low_freq_factor > 0, "low_freq_factor", self.low_freq_factor, "> 0")
        allowed = f"> low_freq_factor={self.low_freq_factor}"
        _require(self.high_freq_factor > self.low_freq_factor, "high_freq_factor", self.high_freq_factor, allowed)
        _require_count("original_max_length", self.original_max_length)


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides the shapes and the formula of a decoder; hashable, so safe as a static argument.

    Attributes:
      vocab_size: number of rows of the embedding and of the head (V).
      num_layers: number of blocks.
      width: size of the residual stream (D).
      num_heads: query heads (H), a multiple of num_kv_heads.
      num_kv_heads: key and value heads (K).
      head_dim: size of one head, even; num_heads * head_dim may differ from width.
      mlp_width: hidden size of the SwiGLU block.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: None, or Llama 3.1's stretch.
      norm_eps: added to the mean square in every RMS norm.
      tie_embeddings: the head is the embedding.
      attention_bias: query, key and value projections have biases (Qwen 2); the output projection never has one.
      qk_norm: queries and keys are normalised per head before rotation (Qwen 3).
      max_length: longest context the weights were trained for, in tokens.
      remat: recompute each layer in the backward pass of teacher forcing instead of storing it.
      fixed_order: write out the order of the sums that decoding and teacher forcing would otherwise round differently.
        A learner then meets the sampler's log-probabilities to about an ulp, at the cost of memory in the attention
        (see `layers.ordered_attention`): for small models.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    norm_eps: float
    tie_embeddings: bool
    attention_bias: bool = False
    qk_norm: bool = False
    max_length: int = 2048
    remat: bool = False
    fixed_order: bool = False

    def __post_init__(self) -> None:
        """Refuse values no decoder can be built from."""
        for name in ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
            _require_count(name, getattr(self, name))
        _require_count("max_length", self.max_length)
        allowed = f"a multiple of num_kv_heads={self.num_kv_heads}"
        _require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, allowed)
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even: rotary turns pairs")
        _require(0 < self.rope_theta < math.inf, "rope_theta", self.rope_theta, "finite and > 0")
        _require(0 < self.norm_eps < 1, "norm_eps", self.norm_eps, "in (0, 1)")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
        """The configuration that a hub `config.json` describes, in the style of transformers 4 or 5.

        Raises:
          ValueError: a field is missing, or asks for something this decoder does not compute.
        """
        model_type = hf.get("model_type")
        _require(model_type in MODEL_TYPES, "model_type", model_type, f"one of {MODEL_TYPES}")
        _refuse_unsupported(hf)
        rope = _rope_settings(hf)
        num_heads, width = _count(hf, "num_attention_heads"), _count(hf, "hidden_size")
        return cls(
            vocab_size=_field(hf, "vocab_size"),
            num_layers=_field(hf, "num_hidden_layers"),
            width=width,
            num_heads=num_heads,
            num_kv_heads=_optional(hf, "num_key_value_heads", num_heads),
            head_dim=_optional(hf, "head_dim", width // num_heads),
            mlp_width=_field(hf, "intermediate_size"),
            rope_theta=_number(rope, "rope_theta"),
            rope_scaling=_rope_scaling(rope),
            norm_eps=_number(hf, "rms_norm_eps"),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            max_length=_field(hf, "max_position_embeddings"),
        )


def _rope_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 gathers in `rope_parameters` what transformers 4 spread over the top level and `rope_scaling`.
    gathered = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    _require(isinstance(gathered, Mapping), "rope_parameters", gathered, "an object")
    return {name: hf.get(name) for name in ("rope_theta", "partial_rotary_factor")} | dict(gathered)


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3RopeScaling | None:
    # Files older than transformers 4.43 write `type`.
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    _require(rope_type in ROPE_TYPES, "rope_type", rope_type, f"one of {ROPE_TYPES}")
    partial = rope.get("partial_rotary_factor") or 1.0
    _require(partial == 1.0, "partial_rotary_factor", partial, "1.0")
    if rope_type == "default":
        return None
    return Llama3RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_length=_field(rope, "original_max_position_embeddings"),
    )


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    activation = hf.get("hidden_act", "silu")
    _require(activation in ACTIVATIONS, "hidden_act", activation, f"one of {ACTIVATIONS}")
    layer_types = hf.get("layer_types") or ()
    windowed = sorted(set(layer_types) - {"full_attention"})
    _require(not windowed, "layer_types", windowed, "only 'full_attention'")
    # Qwen files carry a window size that `use_sliding_window: false` switches off.
    if hf.get("use_sliding_window", hf["model_type"] == "llama"):
        _require(hf.get("sliding_window") is None, "sliding_window", hf.get("sliding_window"), "null")
    _require(not hf.get("mlp_bias"), "mlp_bias", hf.get("mlp_bias"), "false")
    if hf["model_type"] != "qwen2":
        _require(not hf.get("attention_bias"), "attention_bias", hf.get("attention_bias"), "false, except in qwen2")


def _field(hf: Mapping[str, Any], name: str) -> Any:
    if hf.get(name) is None:
        raise ValueError(f"the model configuration has no {name!r}; it has {sorted(hf)}")
    return hf[name]


def _count(hf: Mapping[str, Any], name: str) -> int:
    value = _field(hf, name)
    _require_count(name, value)
    return value


def _number(hf: Mapping[str, Any], name: str) -> float:
    value = _field(hf, name)
    _require(isinstance(value, int | float) and not isinstance(value, bool), name, value, "a number")
    return float(value)


def _optional(hf: Mapping[str, Any], name: str, default: int) -> Any:
    # An explicit null means "absent" in hub files.
    return default if hf.get(name) is None else hf[name]


def _require_count(name: str, value: Any) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _require(is_count, name, value, "an integer >= 1")


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r} is not supported, allowed: {allowed}")
