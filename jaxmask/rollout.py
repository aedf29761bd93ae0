"""What generation returns: completions with all that a learner needs."""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask.batch import SamplingBatch
from jaxmask.ragged_support import RaggedSupport
from jaxmask.support import Support


class Finish(enum.IntEnum):
    """Why a row ended."""

    RUNNING = 0
    STOP = 1  # drew one of its stop ids, which is its last token
    LENGTH = 2  # reached its own or the call's limit
    ERROR = 3  # a row of logits held no finite entry; the tokens before it stand
    OVERFLOW = 4  # `generate(max_ids=...)` had no room left for its next support; the tokens before stand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """Completions with everything a learner needs; the rows of a prompt's group lie side by side.

    Attributes:
      prompt_ids: right-padded.
      prompt_lengths: at least 1.
      token_ids: generated ids; a stop id is the last one. Cells at or past a row's length hold padding.
      lengths: generated tokens of each row.
      logprobs: of each token over its support; 0 where nothing was sampled.
      support: what each token was drawn from; empty where nothing was sampled.
      finish: a `Finish` code per row.
      sampling: the settings of each row.
      group_size: rows per prompt, G; B = P G.
      logprobs_mode: what `logprobs` holds.
      sampled_mask: which tokens the policy sampled; None: all of them. The others (a tool's output, forced text) are
        context: read by the model, never trained on.
      policy_versions: version of the policy that sampled each token, as `TrainState.step` counts; -1 where none did;
        None: nobody said.
      num_steps: steps that each row took: one for each token, and one more where it ended with ERROR or OVERFLOW;
        fewer with a speculation that guessed some. None: nobody counted.
    """

    prompt_ids: Int[Array, "P S"]
    prompt_lengths: Int[Array, " P"]
    token_ids: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    logprobs: Float[Array, "B T"]
    support: Support | RaggedSupport
    finish: Int[Array, " B"]
    sampling: SamplingBatch
    group_size: int = dataclasses.field(default=1, metadata={"static": True})
    logprobs_mode: str = dataclasses.field(default="processed_logprobs", metadata={"static": True})
    sampled_mask: Bool[Array, "B T"] | None = None
    policy_versions: Int[Array, "B T"] | None = None
    num_steps: Int[Array, " B"] | None = None

    @property
    def token_mask(self) -> Bool[Array, "B T"]:
        """Which cells hold tokens; from the lengths, since padding may look like a token."""
        return jnp.arange(self.token_ids.shape[1], dtype=jnp.int32)[None, :] < self.lengths[:, None]

    @property
    def loss_mask(self) -> Bool[Array, "B T"]:
        """Which tokens a learner trains on."""
        return self.token_mask if self.sampled_mask is None else self.token_mask & self.sampled_mask
