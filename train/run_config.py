"""What a run is: frozen, plain values in sections, checked once, written to and read from JSON and YAML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_type_hints

import yaml

from models.config import PROJECTIONS, LoraConfig
from models.records import from_values
from models.sharding import MESH_AXES
from train.config import GRPOConfig, require
from train.data_config import DataConfig

TRACKERS = ("tensorboard", "wandb")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Looks at held-out prompts.

    Attributes:
      eval_every: iterations between evaluations, the first one before the first update; 0: none.
      eval_prompts: held-out prompts of each.
      eval_samples: completions of each prompt for pass@k, beside the greedy one; 0: the greedy one alone.
      early_stop_target: end where the greedy share of right answers reaches this, in (0, 1]; None: never.
      early_stop_patience: end where that share has not grown for so many evaluations; 0: never.
    """

    eval_every: int = 0
    eval_prompts: int = 64
    eval_samples: int = 0
    early_stop_target: float | None = None
    early_stop_patience: int = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        for field, low in (("eval_every", 0), ("eval_prompts", 1), ("eval_samples", 0), ("early_stop_patience", 0)):
            require(getattr(self, field) >= low, field, getattr(self, field), f"at least {low}")
        target = self.early_stop_target
        require(target is None or 0 < target <= 1, "early_stop_target", target, "in (0, 1]")
        if (target is not None or self.early_stop_patience) and not self.eval_every:
            raise ValueError(
                "early_stop_target and early_stop_patience need evaluations: eval_every must be at least 1."
            )


@dataclasses.dataclass(frozen=True)
class SavingConfig:
    """What stays on the disk.

    Attributes:
      checkpoint_every: iterations between checkpoints; the last iteration always has one.
      keep_last: newest checkpoints that are kept, at least 1.
      keep_every: checkpoints of iterations that this divides are kept for good; 0: none are.
      export_policy: write the final policy in the hub's layout, where the run began with such a model.
    """

    checkpoint_every: int = 100
    keep_last: int = 3
    keep_every: int = 0
    export_policy: bool = True

    def __post_init__(self) -> None:
        """Checks every field."""
        for field, low in (("checkpoint_every", 1), ("keep_last", 1), ("keep_every", 0)):
            require(getattr(self, field) >= low, field, getattr(self, field), f"at least {low}")


@dataclasses.dataclass(frozen=True)
class WatchConfig:
    """What a person can look at.

    Attributes:
      trackers: besides `metrics.jsonl`: "tensorboard", "wandb" (offline where WANDB_MODE says nothing).
      sample_every: iterations between looks: sampled completions for `samples.jsonl`, and the kept mass, which costs a
        pass over the whole vocabulary; 0: at the end alone.
      num_samples: completions of each look.
    """

    trackers: tuple[str, ...] = ()
    sample_every: int = 0
    num_samples: int = 5

    def __post_init__(self) -> None:
        """Checks every field."""
        require(set(self.trackers) <= set(TRACKERS), "trackers", self.trackers, f"some of {', '.join(TRACKERS)}")
        for field, low in (("sample_every", 0), ("num_samples", 1)):
            require(getattr(self, field) >= low, field, getattr(self, field), f"at least {low}")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run.

    Attributes:
      preset: where the values came from.
      iterations: of the whole run.
      model: "tiny" for a small decoder from random weights, or a model `models.load` knows.
      seed: of weights, prompts and sampling.
      overlap: draw the next rollout while the host scores this one; it is then one update older than the policy that
        learns from it. For tasks whose rewards come from the host.
      mesh: devices along each axis, as "data=2,fsdp=2,tensor=2"; empty: one device.
      lora_rank: rank of the adapters that are trained in place of the weights, which stay as they are; 0: none.
      lora_alpha: B A is multiplied by alpha / rank, > 0.
      lora_targets: projections that have an adapter, among `models.config.PROJECTIONS`.
      base_dtype: of weights that are not trained: "float32", or "bfloat16" with adapters.
      compute_dtype: "float32" or "bfloat16", to which weights are cast where they are used; None: as they are.
      remat: recompute each layer in the backward pass instead of keeping its inner states: slower, less memory.
      grpo: the iteration.
      data: the task.
      evaluation: on held-out prompts.
      saving: checkpoints.
      watch: trackers and samples.
    """

    preset: str
    iterations: int
    model: str = "tiny"
    seed: int = 0
    overlap: bool = False
    mesh: str = ""
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = PROJECTIONS
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    remat: bool = False
    grpo: GRPOConfig = dataclasses.field(default_factory=GRPOConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    saving: SavingConfig = dataclasses.field(default_factory=SavingConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        """Checks every field."""
        require(self.iterations >= 1, "iterations", self.iterations, "at least 1")
        require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")
        require(self.lora_rank >= 0, "lora_rank", self.lora_rank, "at least 0")
        require(0 < self.lora_alpha < math.inf, "lora_alpha", self.lora_alpha, "> 0 and finite")
        known = bool(self.lora_targets) and set(self.lora_targets) <= set(PROJECTIONS)
        require(known, "lora_targets", self.lora_targets, f"some of {', '.join(PROJECTIONS)}")
        allowed = "float32 or bfloat16" if self.lora_rank else "float32 without adapters"
        is_allowed = self.base_dtype == "float32" or (self.base_dtype == "bfloat16" and self.lora_rank > 0)
        require(is_allowed, "base_dtype", repr(self.base_dtype), allowed)
        is_known = self.compute_dtype in (None, "float32", "bfloat16")
        require(is_known, "compute_dtype", repr(self.compute_dtype), "float32 or bfloat16")
        mesh_sizes(self.mesh)

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters; None for a run that trains the weights."""
        return LoraConfig(self.lora_rank, self.lora_alpha, self.lora_targets) if self.lora_rank else None

    def to_json(self) -> str:
        """The run as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def to_yaml(self) -> str:
        """The run as YAML text, which `--config` takes."""
        # Through JSON: YAML has no tuples.
        return yaml.safe_dump(json.loads(self.to_json()), sort_keys=False, default_flow_style=None, width=120)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """The run that `to_json` wrote.

        Raises:
          ValueError: not JSON, a field is missing or unknown, or a value is out of range.
        """
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply for JSON.") from None
        if not isinstance(values, dict):
            raise ValueError(f"a run must be a JSON object, got {type(values).__name__}.")
        sections: dict[str, Any] = {
            name: _section(name, kind, values.pop(name, {})) for name, kind in _sections(cls).items()
        }
        return from_values(cls, {**values, **sections})


def mesh_sizes(mesh: str) -> dict[str, int]:
    """Devices along each axis of a mesh written as "data=2,tensor=4"; empty for "".

    Raises:
      ValueError: not written so, an unknown axis or one named twice, or a size below 1.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, mesh.split(",")):
        axis, _, size = part.strip().partition("=")
        is_good = axis in MESH_AXES and axis not in sizes and size.isascii() and size.isdigit() and int(size) >= 1
        require(is_good, "mesh", repr(mesh), f"AXIS=SIZE,... with sizes of at least 1 and axes {', '.join(MESH_AXES)}")
        sizes[axis] = int(size)
    return sizes


def with_values(record: T, values: Mapping[Any, Any], where: str = "") -> T:
    """The record with these values in place of its own, section by section.

    Args:
      record: a config.
      values: as a YAML file holds them: a mapping for each section, some or all of the fields.
      where: the section's name in front of the fields, for errors.

    Raises:
      ValueError: an unknown key, with the nearest known one; a section that is no mapping; a value of another type or
        out of range.
    """
    hints = get_type_hints(type(record))
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(str(name), list(hints), 1) or sorted(hints)
            raise ValueError(f"unknown key {where}{name}; there is {', '.join(near)}.")
        own = getattr(record, name)
        if dataclasses.is_dataclass(own):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}{name} must be a mapping of its fields, got {value!r}.")
            value = with_values(own, value, f"{where}{name}.")
        changed[name] = _number(value) if hints.get(name) in (float, float | None) else value
    kept = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    return from_values(type(record), {**kept, **changed})


def _number(value: Any) -> Any:
    """A float where YAML says a whole number, or takes one for text: for it, 1.0e-5 is a number, and 1e-5 is not."""
    try:
        return float(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else value
    except ValueError:
        return value
    except OverflowError:
        return math.inf


def _section(name: str, kind: type[T], values: Any) -> T:
    require(isinstance(values, Mapping), name, values, "an object of its fields")
    return from_values(kind, values)


def _sections(kind: type) -> dict[str, type]:
    hints = get_type_hints(kind).items()
    return {name: hint for name, hint in hints if isinstance(hint, type) and dataclasses.is_dataclass(hint)}
