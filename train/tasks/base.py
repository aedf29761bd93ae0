"""The two kinds of task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmask import Rollout
from train.data import Cursor


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


@dataclasses.dataclass(frozen=True)
class Scored:
    """What the host says of completions.

    Attributes:
      rewards: one per completion, NumPy arrays.
      details: figures for the metrics by their names there, as "rewards/answer": the mean of one function.
    """

    rewards: Rewards
    details: Mapping[str, float]


@runtime_checkable
class DeviceTask(Protocol):
    """A task whose prompts and rewards are made inside the compiled iteration; hashable, being a static argument."""

    @property
    def prompt_width(self) -> int:
        """Cells of every prompt, S."""
        ...

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
    def prompt_width(self) -> int:
        """Cells of every prompt, S."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids that have a meaning; a model's head may be padded beyond."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        ...

    def draw(self, cursor: Cursor, num: int) -> tuple[Prompts, list[Any], Cursor]:
        """The next `num` training prompts, what `score` needs to know of each, and where the next ones begin.

        A function of the cursor alone.
        """
        ...

    def held_out(self, num: int) -> tuple[Prompts, list[Any]]:
        """The first `num` held-out prompts, or all there are; always the same, and never among the training ones."""
        ...

    def score(self, entries: Sequence[Any], completions: Sequence[Sequence[int]], group_size: int) -> Scored:
        """The rewards of completions; those of one entry lie side by side. May be called from any thread."""
        ...

    def show(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, for people."""
        ...

    def close(self) -> None:
        """Ends what the task started."""
        ...
