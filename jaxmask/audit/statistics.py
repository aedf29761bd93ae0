"""What truncation did to the rollouts of some files, in figures."""

from __future__ import annotations

import dataclasses

# Sizes of supports fall in buckets of 1, 2, 3-4, 5-8, ... ids: up to and including each limit.
NUM_SIZE_BUCKETS = 20
SIZE_LIMITS = tuple(2**power for power in range(NUM_SIZE_BUCKETS))
NUM_MASS_BINS = 50
MAX_STRETCHES = 40
# The usual clipping of the ratio, 1 - 0.2 to 1 + 0.2.
CLIP = 0.2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Ids per support, over the supports of the tokens that train and are not at fault.

    Attributes:
      num: supports.
      mean: ids.
      median: ids, as the other quantiles.
      p90: 90 % are not larger.
      p99: 99 % are not larger.
      largest: ids.
      one_id_share: supports of a single id, which leave no choice and teach nothing.
      histogram: supports up to and including each of `SIZE_LIMITS`, and above the one before.
    """

    num: int
    mean: float
    median: int
    p90: int
    p99: int
    largest: int
    one_id_share: float
    histogram: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Supports at some positions of the completions.

    Attributes:
      start: first position.
      end: first position that is not in it any more.
      num: supports.
      mean_size: ids.
      one_id_share: of a single id.
      mean_mass: mean kept mass; None where it is not known.
    """

    start: int
    end: int
    num: int
    mean_size: float
    one_id_share: float
    mean_mass: float | None


@dataclasses.dataclass(frozen=True)
class KeptMass:
    """The probability S that the full policy gives to the supports.

    S is also the ratio that a learner computes which scores over the whole vocabulary, with the very weights that
    sampled: pi_full(a) / pi_behaviour(a) = S, in place of 1. Over the supports it is 1.

    Attributes:
      num: tokens for which S is known.
      mean: of S, and so of that ratio.
      least: of S.
      p1: 1 % of tokens have no more, as the other quantiles.
      p10: 10 % have no more.
      median: half have no more.
      p90: 90 % have no more.
      clipped_share: tokens whose ratio is below 1 - `CLIP` before the first update.
      mean_log: mean of log S, nats.
      mismatch_kl: mean of S - 1 - log S, nats: what the k3 estimator takes for a divergence.
      num_rows: rows all of whose tokens are known.
      mean_log_of_row: mean over rows of the sum of log S, the logarithm of the ratio of a whole completion.
      least_of_row: smallest ratio of a whole completion.
      histogram: tokens in bins of equal width from 0 to 1.
    """

    num: int
    mean: float
    least: float
    p1: float
    p10: float
    median: float
    p90: float
    clipped_share: float
    mean_log: float
    mismatch_kl: float
    num_rows: int
    mean_log_of_row: float | None
    least_of_row: float | None
    histogram: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A form of supports.

    Attributes:
      name: what it is called in reports.
      bytes_per_token: over all tokens; None: not known.
      note: what it consists of, or why it is not known.
    """

    name: str
    bytes_per_token: float | None
    note: str


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Figures of all rows.

    Attributes:
      num_rows: completions.
      num_tokens: of all completions.
      num_trained: tokens that train.
      num_ids: of all supports.
      sizes: of supports; None where there is none.
      entropy: mean over supports, nats; None: kept log-probabilities are not known.
      kept_mass: None: not known.
      mass_note: where the kept mass is not known, what is known of it, and how to learn it.
      stretches: by position in the completion, at most `MAX_STRETCHES`.
      encodings: bytes per token in each form.
    """

    num_rows: int
    num_tokens: int
    num_trained: int
    num_ids: int
    sizes: Sizes | None
    entropy: float | None
    kept_mass: KeptMass | None
    mass_note: str
    stretches: tuple[Stretch, ...]
    encodings: tuple[Encoding, ...]
