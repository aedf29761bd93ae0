"""One completion as a file gave it: nothing has been looked at yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from jaxmask.audit.rows import Setting
from jaxmask.audit.values import Problem

NOT_SAID = Setting()


@dataclasses.dataclass(frozen=True)
class Cut:
    """Supports as one array of ids, cut into one piece per token by offsets or by counts.

    Attributes:
      ids: of all tokens one after another.
      offsets: where each piece starts, with the total last.
      counts: how long each piece is, in place of offsets.
      is_none_empty: an empty piece says that the token has no support, rather than an empty one (prime-rl).
    """

    ids: Any
    offsets: Any = None
    counts: Any = None
    is_none_empty: bool = False


@dataclasses.dataclass(frozen=True)
class Fields:
    """What the parts of a completion are called in the file, for messages."""

    token_ids: str = "token_ids"
    supports: str = "sampling_mask"
    logprobs: str = "logprobs"
    full_logprobs: str = "full_logprobs"
    kept_logprobs: str = "sampling_mask_logprobs"
    loss_mask: str = "loss_mask"
    prompt_ids: str = "prompt"


PLAIN = Fields()


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a file gives of one completion, each part as it stands there: lists or arrays, or anything else.

    Attributes:
      name: where it stands.
      token_ids: of the completion.
      supports: lists of ids, one for each token, None for a token without; or a `Cut`. None: not in the file.
      logprobs: of each token over its support, natural; None for a token without. None: not in the file.
      full_logprobs: over the vocabulary, at the row's temperature. None: not in the file.
      kept_logprobs: of each id of each support: lists of numbers, or all of them in one array. None: not in the file.
      logits: [T, V] before temperature and filters. None: not in the file.
      loss_mask: which tokens train. None: all of them.
      setting: what it was sampled with.
      group: something equal for the completions of one prompt; None: not known.
      prompt_ids: of the prompt; None: not known.
      vocab_size: number of ids, V; None: the file does not say.
      fields: what the parts are called.
      problems: those known already.
    """

    name: str
    token_ids: Any
    supports: Any = None
    logprobs: Any = None
    full_logprobs: Any = None
    kept_logprobs: Any = None
    logits: Any = None
    loss_mask: Any = None
    setting: Setting = NOT_SAID
    group: Hashable = None
    prompt_ids: Any = None
    vocab_size: int | None = None
    fields: Fields = PLAIN
    problems: tuple[Problem, ...] = ()
