"""The shape of a decoder as plain values; hub files are read into it by `hub_config`, GGUF files by `gguf`.

Dense, causal, text only: mixtures of experts and vision towers are not described.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Activation = Literal["silu", "gelu_tanh"]
AttentionName = Literal["auto", "xla", "cudnn", "tokamax"]
COMPUTE_DTYPES = (None, "float32", "bfloat16", "float16")


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
        require(self.factor >= 1.0, "factor", self.factor, ">= 1")
        require(self.low_freq_factor > 0, "low_freq_factor", self.low_freq_factor, "> 0")
        allowed = f"> low_freq_factor={self.low_freq_factor}"
        require(self.high_freq_factor > self.low_freq_factor, "high_freq_factor", self.high_freq_factor, allowed)
        require_count("original_max_length", self.original_max_length)


@dataclass(frozen=True)
class LinearRopeScaling:
    """Every rotary frequency divided by one factor (Gemma 3 from 4B on).

    Attributes:
      factor: >= 1.
    """

    factor: float

    def __post_init__(self) -> None:
        """Refuse factors that would shorten the context."""
        require(self.factor >= 1.0, "factor", self.factor, ">= 1")


RopeScaling = Llama3RopeScaling | LinearRopeScaling


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of some projections: W becomes W + alpha / rank * B A.

    Attributes:
      rank: rows of A and columns of B, r.
      alpha: scale of the adapters, > 0.
      targets: projections that have one, among `PROJECTIONS`.

    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("query", "key", "value", "output", "gate", "up", "down")

    def __post_init__(self) -> None:
        """Refuse what no adapter can be built from."""
        require_count("rank", self.rank)
        require(0 < self.alpha < math.inf, "alpha", self.alpha, "finite and > 0")
        unknown = [name for name in self.targets if name not in PROJECTIONS]
        once = len(set(self.targets)) == len(self.targets) > 0
        require(once and not unknown, "targets", self.targets, f"one or more of {PROJECTIONS}, each once")

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


MAX_LAYERS = 1000  # every layer is compiled; no open model has a fifth of these
PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")


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
      mlp_width: hidden size of the gated MLP.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: None, or a stretch of the wavelengths.
      norm_eps: added to the mean square in every RMS norm.
      tie_embeddings: the head is the embedding.
      attention_bias: query, key and value projections have biases (Qwen 2); the output projection never has one.
      qk_norm: queries and keys are normalised per head before rotation (Qwen 3, Gemma 3).
      max_length: longest context the weights were trained for, in tokens.
      remat: recompute each layer in the backward pass of teacher forcing instead of storing it.
      fixed_order: write out the order of the sums that decoding and teacher forcing would otherwise round differently.
        A learner then meets the sampler's log-probabilities to about an ulp, at the cost of memory in the attention
        (see `attention.ordered_attention`): for small models.
      activation: of the gated MLP.
      sliding_window: tokens a windowed layer sees, its own included; None: all.
      full_layers: indices of the layers that see all tokens in spite of `sliding_window` (Gemma 3).
      local_rope_theta: rotary base of windowed layers, unscaled; None: as the others.
      unrotated_layers: indices of layers without rotary positions (SmolLM 3).
      attention_scale: queries times keys are multiplied by it; None: head_dim ** -0.5.
      attention_softcap: scores s become cap * tanh(s / cap); None: as they are.
      logit_softcap: the same for the logits.
      norm_plus_one: norms multiply by 1 + weight (Gemma).
      post_norms: attention and MLP are normalised again before they are added to the residual stream (Gemma 3).
      scale_embedding: embeddings are multiplied by sqrt(width) (Gemma).
      compute_dtype: weights are cast to it where they are used; None: computation in the weights' dtype. Training in
        bfloat16 keeps float32 weights this way.
      attention: which implementation attends to many tokens at once (see `attention.attend`).
      lora: adapters, None for none.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tie_embeddings: bool
    attention_bias: bool = False
    qk_norm: bool = False
    max_length: int = 2048
    remat: bool = False
    fixed_order: bool = False
    activation: Activation = "silu"
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    unrotated_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    norm_plus_one: bool = False
    post_norms: bool = False
    scale_embedding: bool = False
    compute_dtype: str | None = None
    attention: AttentionName = "auto"
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        """Refuse values no decoder can be built from."""
        for name in ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
            require_count(name, getattr(self, name))
        require_count("max_length", self.max_length)
        require(self.num_layers <= MAX_LAYERS, "num_layers", self.num_layers, f"at most {MAX_LAYERS}")
        allowed = f"a multiple of num_kv_heads={self.num_kv_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, allowed)
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even: rotary turns pairs")
        require(0 < self.norm_eps < 1, "norm_eps", self.norm_eps, "in (0, 1)")
        require(0 < self.rope_theta < math.inf, "rope_theta", self.rope_theta, "finite and > 0")
        for name in ("local_rope_theta", "attention_scale", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, name, value, "finite and > 0, or None")
        if self.sliding_window is not None:
            require_count("sliding_window", self.sliding_window)
        for name in ("full_layers", "unrotated_layers"):
            value = getattr(self, name)
            inside = all(0 <= index < self.num_layers for index in value)
            require(inside, name, value, f"indices below num_layers={self.num_layers}")
        for name, choices in (("activation", get_args(Activation)), ("attention", get_args(AttentionName))):
            require(getattr(self, name) in choices, name, getattr(self, name), f"one of {choices}")
        require(self.compute_dtype in COMPUTE_DTYPES, "compute_dtype", self.compute_dtype, f"one of {COMPUTE_DTYPES}")

    def window_of(self, layer: int) -> int | None:
        """Tokens that a layer sees, its own included; None: all."""
        return None if layer in self.full_layers else self.sliding_window

    def theta_of(self, layer: int) -> tuple[float, RopeScaling | None] | None:
        """Rotary base and stretch of a layer; None where it has no rotary positions."""
        if layer in self.unrotated_layers:
            return None
        if self.local_rope_theta is not None and self.window_of(layer) is not None:
            return self.local_rope_theta, None
        return self.rope_theta, self.rope_scaling

    @property
    def score_scale(self) -> float:
        """What queries times keys are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


def require_count(name: str, value: Any) -> None:
    """A ValueError unless the value is an integer of at least 1."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(is_count, name, value, "an integer >= 1")


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """A ValueError that names a field, its value and what is allowed, unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}={value!r} is not supported, allowed: {allowed}")
