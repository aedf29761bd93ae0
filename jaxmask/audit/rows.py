"""Completions as they were read from a file, one after another in flat arrays. Nothing here has been checked."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

NOT_GIVEN = -1


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a row was sampled with, as far as the file says; None where it does not.

    Attributes:
      temperature: that divided the logits.
      top_k: as asked for; 0 or -1 for none.
      top_p: as asked for; 1 for none.
      min_p: as asked for; 0 for none.
      stop_token_ids: ids that end the row, besides those of its model.
      ignore_eos: whether the model's own stop ids do not end it.
      asks_for_logprobs: whether log-probabilities were asked for.
      allowed_token_ids: the only ids that could be drawn.
      looks_back: the name of a setting that depends on the tokens the engine put out before (a penalty, say).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    asks_for_logprobs: bool | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    looks_back: str | None = None


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A value that is not of the kind it should be, so that it has no place in the arrays.

    Attributes:
      row: of the block.
      position: of the token, or -1 where it is a matter of the row.
      field: the name it has in the file.
      text: what was found and what should stand there.
    """

    row: int
    position: int
    field: str
    text: str


@dataclasses.dataclass(frozen=True)
class Rows:
    """A block of R completions with N tokens, the supports of which hold K ids in all.

    Arrays over tokens have an entry for each token of each row, whatever the file gave: supports and log-probabilities
    beyond a row's last token are cut off, missing ones are "not given". How many the file gave stands in `num_supports`
    and `num_logprobs`. Support t holds support_ids[offset : offset + support_sizes[t]], in the order of the file, where
    the offset is the sum of the sizes before that are not -1.

    Attributes:
      names: where each row stands: file, line from 1 and choice, or file and row.
      settings: of each row.
      lengths: tokens of each row.
      num_supports: supports that the file gave for each row; -1: none at all (the field is missing or null).
      num_logprobs: log-probabilities that the file gave for each row; -1: none at all.
      token_ids: of each token; not checked, so possibly outside of the vocabulary.
      trains: which tokens train; of a loss mask, or all.
      support_sizes: ids of the support of each token; -1: not given.
      support_ids: of all supports one after another.
      logprobs: of each token over its support, natural; where not given, NaN.
      has_logprob: where one was given (it may be a NaN itself).
      full_logprobs: of each token over the whole vocabulary, at the row's temperature; NaN: not known. None: nowhere.
      kept_logprobs: of each id of `support_ids`, over the support; NaN where not known. None: nowhere.
      logits: of each token over the vocabulary [N, V], before temperature and filters; None: not in the file.
      malformed: what had no place in the arrays.
      groups: an equal number for rows of one prompt; -1: not known.
      num_bytes: what the block took in the file.
      vocab_size: number of ids, V, where the file says so; None where it does not.
      prompt_lengths: tokens of each row's prompt; -1: not known. None: nowhere.
      prompt_bounds: the least and the largest id of each row's prompt; 0 where it has none, or is not known.
    """

    names: tuple[str, ...]
    settings: tuple[Setting, ...]
    lengths: Int[np.ndarray, " R"]
    num_supports: Int[np.ndarray, " R"]
    num_logprobs: Int[np.ndarray, " R"]
    token_ids: Int[np.ndarray, " N"]
    trains: Bool[np.ndarray, " N"]
    support_sizes: Int[np.ndarray, " N"]
    support_ids: Int[np.ndarray, " K"]
    logprobs: Float[np.ndarray, " N"]
    has_logprob: Bool[np.ndarray, " N"]
    full_logprobs: Float[np.ndarray, " N"] | None = None
    kept_logprobs: Float[np.ndarray, " K"] | None = None
    logits: Float[np.ndarray, "N V"] | None = None
    malformed: tuple[Malformed, ...] = ()
    groups: Int[np.ndarray, " R"] | None = None
    num_bytes: int = 0
    vocab_size: int | None = None
    prompt_lengths: Int[np.ndarray, " R"] | None = None
    prompt_bounds: Int[np.ndarray, "R 2"] | None = None

    @property
    def row_of_token(self) -> Int[np.ndarray, " N"]:
        """The row of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def positions(self) -> Int[np.ndarray, " N"]:
        """The place of each token in its row, from 0."""
        return np.arange(len(self.token_ids)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)

    @property
    def token_of_id(self) -> Int[np.ndarray, " K"]:
        """The token of each id of `support_ids`, counted over the block."""
        return np.repeat(np.arange(len(self.token_ids)), np.maximum(self.support_sizes, 0))
