"""The two kinds of task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmask import Rollout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of one iteration.

    Attributes:
      token_ids: right-padded.
      lengths: at least 1.
    """

    token_ids: Int[Array | np.ndarray, "P S"]
    lengths: Int[Array | np.ndarray, " P"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rewards:
    """Rewards of a rollout, one per completion.

    Attributes:
      values: what the policy is trained on.
      is_exact: whether the completion is fully right, for reports.
    """

    values: Float[Array | np.ndarray, " B"]
    is_exact: Bool[Array | np.ndarray, " B"]


@runtime_checkable
class DeviceTask(Protocol):
    """A task whose prompts and rewards are made inside the compiled iteration; hashable, being a static argument."""

    @property
    def vocab_size(self) -> int:
        """Ids that have a meaning; a model's head may be padded beyond."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        ...

    def prompts(self, key: Key[Array, ""], num: int) -> Prompts:
        """`num` prompts drawn with `key`."""
        ...

    def score(self, rollout: Rollout) -> Rewards:
        """The rewards of a rollout."""
        ...

    def show(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, for people."""
        ...


@runtime_checkable
class HostTask(Protocol):
    """A task whose rewards need text: token ids come down, rewards go up."""

    @property
    def vocab_size(self) -> int:
        """Ids that have a meaning; a model's head may be padded beyond."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        ...

    def prompts(self, step: int, num: int) -> tuple[Prompts, list[Any]]:
        """The prompts of an iteration, a function of `step` alone, and what `score` needs to know of each."""
        ...

    def score(self, entries: Sequence[Any], completions: Sequence[Sequence[int]], group_size: int) -> Rewards:
        """The rewards of completions; those of one entry lie side by side."""
        ...

    def show(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, for people."""
        ...
