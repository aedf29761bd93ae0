"""Where rows stand between two steps of decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Int

from jaxmask.history import History
from jaxmask.rollout import Finish


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """Where each row stands.

    Attributes:
      last_ids: the tokens still to be read: at first the last one of each prompt.
      cache: the model's, of the tokens before.
      history: of prompt and output, for edits; None where none looks back.
      lengths: tokens generated so far.
      finish: a `Finish` code; RUNNING rows go on.
      drafts: what a `Speculation` remembers; None without one.
    """

    last_ids: Int[Array, " B"]
    cache: Any
    history: History | None
    lengths: Int[Array, " B"]
    finish: Int[Array, " B"]
    drafts: Any = None

    @property
    def is_running(self) -> Bool[Array, " B"]:
        """Rows that go on."""
        return self.finish == Finish.RUNNING
