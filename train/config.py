"""One GRPO iteration: frozen, plain values, checked once. What is around it: `train.run_config`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from jaxmask import SamplingParams, check_sampling_mask
from jaxmask.kernels.dispatch import check_implementation

LossName = Literal["grpo", "gspo", "gspo-token", "cispo", "reinforce"]
AdvantageName = Literal["grpo", "dr-grpo", "rloo", "reinforce++-baseline"]
AggregationName = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"]
SequenceRatioName = Literal["geometric-mean", "max"]
KLEstimatorName = Literal["exact", "k1", "k2", "k3"]
RegularizeOver = Literal["support", "vocabulary"]
ScheduleName = Literal["constant", "linear", "cosine"]


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    """One GRPO iteration.

    Attributes:
      num_prompts: prompts per iteration, P.
      group_size: completions per prompt, G; at least 2, since advantages compare completions of one prompt.
      max_new_tokens: longest completion, T.
      temperature: of the rollout, and so of the policy that is trained; > 0.
      top_k: at least 1; bounds the supports.
      top_p: in (0, 1].
      min_p: in [0, 1].
      sampling_mask: score the policy on the recorded supports; False scores it over the whole vocabulary, as trainers
        without supports do.
      loss: the policy term: "grpo" (PPO's clip; also Dr. GRPO and DAPO), "gspo", "gspo-token", "cispo" or "reinforce".
      advantages: "grpo" (centred and scaled per group), "dr-grpo" (centred), "rloo" (leave-one-out) or
        "reinforce++-baseline" (centred per group, scaled per batch).
      aggregation: of the token losses: "token-mean" (DAPO), "seq-mean-token-mean" (GRPO as published),
        "seq-mean-token-sum", or "constant-length" (Dr. GRPO; divides by max_new_tokens per completion).
      clip_epsilon: the ratio counts between 1 - epsilon and 1 + epsilon. "cispo" has no lower bound, "reinforce" none.
      clip_epsilon_high: the upper epsilon, where it differs; > 0; None: clip_epsilon. DAPO: 0.28.
      entropy_coefficient: bonus per nat of entropy, >= 0.
      kl_coefficient: price per nat of KL(policy || reference), >= 0; the reference is the policy a run starts with.
      kl_estimator: "exact" (the sum over the ids), or "k1", "k2", "k3" from the sampled token alone.
      regularize_over: which ids entropy bonus and exact KL range over: "support", or "vocabulary", in chunks, at the
        price of a whole head. Without the sampling mask it is the vocabulary.
      tis_cap: truncated importance sampling: tokens of an older policy weigh min(pi_old / pi_behaviour, cap), pi_old
        being the policy before the iteration's first update, and the loss clips pi / pi_old; >= 1; None: off, and the
        loss clips pi / pi_behaviour.
      max_staleness: tokens sampled by a policy more than this many iterations old are left out; >= 0; None: off.
      sequence_ratio_min: completions whose ratio pi / pi_behaviour lies below weigh nothing; in [0, 1]; None: off.
      sequence_ratio_max: the same above; >= 1; None: off.
      sequence_ratio: "geometric-mean" of its tokens' ratios, or "max": every one of them must lie within.
      sequence_negative_only: such completions are dropped only where their advantage is negative (DeepSeek-V3.2).
      overlong_buffer: the reward falls to -1 more over the last tokens before max_new_tokens (DAPO); 0: off.
      mask_truncated: completions that the length cut off do not train (DAPO's overlong filtering).
      dynamic_sampling: groups of equal rewards, which teach nothing, do not train, and other prompts take their places
        (DAPO).
      max_refills: at most this many further rollouts for that in an iteration, >= 0.
      reference_every: iterations after which the policy becomes the reference of the KL anew; 0: never.
      ema_decay: also keep a running mean of the weights, m <- decay m + (1 - decay) w after each update; in [0, 1);
        0: none. It is what evaluations see.
      learning_rate: of AdamW, at its highest.
      weight_decay: per step, times the learning rate, of all that is trained, norms too; >= 0.
      schedule: "constant", or "linear" or "cosine": down to a twentieth at the end of the run.
      warmup_iterations: the learning rate rises from 0 over these.
      max_grad_norm: gradients are scaled down to this global norm.
      num_updates: passes over each rollout batch (mu in the paper).
      num_micro_batches: the rows are cut into this many parts, whose gradients add up; exact for every cut.
      implementation: of sampler and learner: "pallas_gpu", "xla", "interpret" or "auto" (the kernels on NVIDIA GPUs).
    """

    num_prompts: int = 32
    group_size: int = 16
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95
    min_p: float = 0.0
    sampling_mask: bool = True
    loss: LossName = "grpo"
    advantages: AdvantageName = "grpo"
    aggregation: AggregationName = "token-mean"
    clip_epsilon: float = 0.2
    clip_epsilon_high: float | None = None
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimatorName = "exact"
    regularize_over: RegularizeOver = "support"
    tis_cap: float | None = None
    max_staleness: int | None = None
    sequence_ratio_min: float | None = None
    sequence_ratio_max: float | None = None
    sequence_ratio: SequenceRatioName = "geometric-mean"
    sequence_negative_only: bool = False
    overlong_buffer: int = 0
    mask_truncated: bool = False
    dynamic_sampling: bool = False
    max_refills: int = 3
    reference_every: int = 0
    ema_decay: float = 0.0
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    schedule: ScheduleName = "constant"
    warmup_iterations: int = 0
    max_grad_norm: float = 1.0
    num_updates: int = 1
    num_micro_batches: int = 1
    implementation: Literal["auto", "pallas_gpu", "xla", "interpret"] = "auto"

    def __post_init__(self) -> None:
        """Checks every field."""
        check_sampling_mask(self.sampling_params(), logprobs_mode="processed_logprobs")
        for field, low in _AT_LEAST.items():
            require(getattr(self, field) >= low, field, getattr(self, field), f"at least {low}")
        self._check_loss()
        require(0 < self.learning_rate < 1, "learning_rate", self.learning_rate, "in (0, 1)")
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "in [0, 1)")
        check_implementation(self.implementation)
        require(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "> 0")
        if self.reference_every and self.kl_coefficient == 0:
            raise ValueError(f"reference_every {self.reference_every} needs a kl_coefficient above 0, got 0.")
        if self.num_rows % self.num_micro_batches:
            raise ValueError(
                f"num_micro_batches must divide num_prompts * group_size = {self.num_rows}, "
                f"got {self.num_micro_batches}."
            )

    def _check_loss(self) -> None:
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            require(value in allowed, field, repr(value), f"one of {', '.join(allowed)}")
        require(0 < self.clip_epsilon < 1, "clip_epsilon", self.clip_epsilon, "in (0, 1)")
        require(0 < self.upper_clip_epsilon < math.inf, "clip_epsilon_high", self.clip_epsilon_high, "> 0 and finite")
        for field, low, high in (
            ("entropy_coefficient", 0, math.inf),
            ("kl_coefficient", 0, math.inf),
            ("weight_decay", 0, math.inf),
            ("max_staleness", 0, math.inf),
            ("tis_cap", 1, math.inf),
            ("sequence_ratio_min", 0, 1),
            ("sequence_ratio_max", 1, math.inf),
            ("overlong_buffer", 0, self.max_new_tokens),
        ):
            value, is_optional = getattr(self, field), getattr(type(self), field) is None
            within = f"in [{low}, {high}]" if high < math.inf else f"at least {low} and finite"
            holds = (is_optional and value is None) or (low <= value <= high and value < math.inf)
            require(holds, field, value, within)

    @property
    def upper_clip_epsilon(self) -> float:
        """`clip_epsilon_high`, or `clip_epsilon` where it is None."""
        return self.clip_epsilon if self.clip_epsilon_high is None else self.clip_epsilon_high

    @property
    def is_regularized(self) -> bool:
        """Whether the loss has a term of the whole distribution: entropy, or the exact KL."""
        return self.entropy_coefficient > 0 or (self.kl_coefficient > 0 and self.kl_estimator == "exact")

    @property
    def num_rows(self) -> int:
        """Completions per iteration, B = P G."""
        return self.num_prompts * self.group_size

    def sampling_params(self) -> SamplingParams:
        """The settings of every completion."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=0,
            max_tokens=self.max_new_tokens,
        )


_AT_LEAST = {
    "num_prompts": 1,
    "group_size": 2,
    "num_updates": 1,
    "num_micro_batches": 1,
    "max_refills": 0,
    "reference_every": 0,
    "warmup_iterations": 0,
}
_CHOICES = {
    "loss": get_args(LossName),
    "advantages": get_args(AdvantageName),
    "aggregation": get_args(AggregationName),
    "sequence_ratio": get_args(SequenceRatioName),
    "kl_estimator": get_args(KLEstimatorName),
    "regularize_over": get_args(RegularizeOver),
    "schedule": get_args(ScheduleName),
}


def require(holds: bool, field: str, value: Any, allowed: str) -> None:
    """Raises ValueError with the field, what is allowed and the value, where it does not hold."""
    if not holds:
        raise ValueError(f"{field} must be {allowed}, got {value}.")
