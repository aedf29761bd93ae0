"""Rollouts from elsewhere: what another engine sampled, checked and laid out as the learner reads it.

On the host, and whole: either all of it fits together or nothing comes back. Every refusal names the row and, where
there is one, the position in its completion, both from 0. How the data travelled, and how text became ids, is the
caller's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from jaxmask import settings
from jaxmask.batch import SamplingBatch
from jaxmask.checks import check_sampling_mask
from jaxmask.completions import (
    NO_VERSION,
    Tokens,
    before_padding,
    check_certain,
    check_order,
    trained_logprobs,
    trained_tokens,
    trained_versions,
)
from jaxmask.given_supports import GivenSupports
from jaxmask.params import SamplingParams, check_count
from jaxmask.rollout import Finish, Rollout


def rollout_from_lists(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None]],
    supports: Sequence[Sequence[Sequence[int] | None] | None],
    *,
    params: SamplingParams | Sequence[SamplingParams],
    vocab_size: int,
    group_size: int = 1,
    loss_mask: Sequence[Sequence[bool]] | None = None,
    policy_versions: Sequence[Sequence[int | None]] | None = None,
    eos_token_ids: Sequence[int] = (),
    width: int | None = None,
    max_prompt_length: int | None = None,
    max_length: int | None = None,
) -> Rollout:
    """The rollout of completions that another engine sampled, their supports as nested lists.

    Tokens that do not train are context. What was given of them is never looked at: their log-probability is stored as
    0, their support empty. Where a completion ends in repeats of its stop id (an engine that refilled it), the first of
    them that trains is its last token.

    Args:
      prompts: ids of each of the P prompts, at least one.
      completions: ids of each of the B = P `group_size` completions, those of a prompt side by side. Tokens of others
        in between (a tool's output) stand where the model read them.
      logprobs: of each completion token over its support (`processed_logprobs`), natural logarithms; at most 1e-3.
      supports: of each completion token, the ids it was drawn from, in any order; None where the engine gave none.
        None for a whole row where `loss_mask` trains no token of it.
      params: the settings that the completions were sampled with, of all rows or of each; n = 1. Seeds do not matter.
      vocab_size: number of ids, V.
      group_size: completions per prompt, G.
      loss_mask: whether each completion token trains; None: those that have a support do, and each row has one.
      policy_versions: updates behind the policy that sampled each token, in [0, 2^31).
      eos_token_ids: ids at which the model ends a completion, unless a row's params ignore them.
      width: compact cells per support, W; the longest by default. Longer ones go to packed bits, for all tokens.
      max_prompt_length: padded width of the prompts, S; the longest by default.
      max_length: padded width of the completions, T; the longest by default. With it, `width` and
        `max_prompt_length`, shapes are the same for every batch, and a learner compiles once.

    Returns:
      The rollout, with `sampled_mask` set to the tokens that train. A row finishes with STOP where its last token is
      one of its stop ids, with LENGTH otherwise (stop strings are not known here).

    Raises:
      ValueError: lengths that disagree; an empty prompt; an id outside [0, V); more tokens than `max_prompt_length` or
        `max_length`; a token that trains and has no support, an empty one, one with an id twice, with an id that the
        row may not draw or without the sampled id, or a log-probability that is not finite, above 1e-3, or below -1e-3
        over one id; a token that trains right behind a stop id that trains; a row without any support and no
        `loss_mask` that says so; a row that trains at temperature 0, or behind tokens of others with a setting that
        looks back at the output (penalties, bad words, min_tokens), as what counted there is not known; n > 1.
    """
    tokens = Tokens.of(completions, check_count("vocab_size", vocab_size), "completion", "row")
    return _rollout(
        prompts,
        tokens,
        logprobs,
        GivenSupports.from_lists(tokens, supports, vocab_size),
        params=params,
        vocab_size=vocab_size,
        group_size=group_size,
        loss_mask=loss_mask,
        policy_versions=policy_versions,
        eos_token_ids=eos_token_ids,
        width=width,
        max_prompt_length=max_prompt_length,
        max_length=max_length,
    )


def rollout_from_csr(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None]],
    token_ids: Integer[np.ndarray, " nnz"] | Sequence[int],
    offsets: Integer[np.ndarray, " N_plus_1"] | Sequence[int] | None = None,
    *,
    counts: Integer[np.ndarray, " N"] | Sequence[int] | None = None,
    params: SamplingParams | Sequence[SamplingParams],
    vocab_size: int,
    group_size: int = 1,
    loss_mask: Sequence[Sequence[bool]] | None = None,
    policy_versions: Sequence[Sequence[int | None]] | None = None,
    eos_token_ids: Sequence[int] = (),
    width: int | None = None,
    max_prompt_length: int | None = None,
    max_length: int | None = None,
) -> Rollout:
    """The same as `rollout_from_lists` of supports that came as compressed sparse rows.

    Args:
      prompts: as there, like everything not listed here.
      completions: N tokens in all.
      logprobs: as there.
      token_ids: ids of the supports of all completion tokens one after another, row by row.
      offsets: where the support of each token starts, with the total last (vLLM, miles).
      counts: ids of each support, in place of `offsets` (prime-rl). No ids means no support.

    Raises:
      ValueError: what `rollout_from_lists` refuses; not one of `offsets` and `counts`, or such as do not cut the ids
        into one support per token.
    """
    tokens = Tokens.of(completions, check_count("vocab_size", vocab_size), "completion", "row")
    return _rollout(
        prompts,
        tokens,
        logprobs,
        GivenSupports.from_csr(tokens, token_ids, offsets, counts),
        params=params,
        vocab_size=vocab_size,
        group_size=group_size,
        loss_mask=loss_mask,
        policy_versions=policy_versions,
        eos_token_ids=eos_token_ids,
        width=width,
        max_prompt_length=max_prompt_length,
        max_length=max_length,
    )


def _rollout(
    prompts: Sequence[Sequence[int]],
    tokens: Tokens,
    logprobs: Sequence[Sequence[float | None]],
    supports: GivenSupports,
    *,
    params: SamplingParams | Sequence[SamplingParams],
    vocab_size: int,
    group_size: int,
    loss_mask: Sequence[Sequence[bool]] | None,
    policy_versions: Sequence[Sequence[int | None]] | None,
    eos_token_ids: Sequence[int],
    width: int | None,
    max_prompt_length: int | None,
    max_length: int | None,
) -> Rollout:
    prompt_ids, prompt_lengths = _prompts(prompts, vocab_size, max_prompt_length)
    num_rows = len(prompt_lengths) * check_count("group_size", group_size)
    if len(tokens.lengths) != num_rows:
        raise ValueError(
            f"completions must be {len(prompt_lengths)} prompts * group_size {group_size} = {num_rows}, "
            f"got {len(tokens.lengths)}."
        )
    requests = _requests(params, num_rows)
    sampling = SamplingBatch.from_params(requests, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    is_stop = (tokens.ids[:, None] == np.asarray(sampling.stop_token_ids)[tokens.rows]).any(axis=1)

    trains = trained_tokens(tokens, supports.is_given, loss_mask)
    is_kept = before_padding(tokens, trains, is_stop)
    trains = trains & is_kept
    supports.check_given(tokens, trains)
    check_order(tokens, trains, is_stop, requests)
    _check_temperatures(requests, np.unique(tokens.rows[trains]))
    lengths = np.bincount(tokens.rows[is_kept], minlength=num_rows)
    T = tokens.width("max_length", max_length, lengths)

    def padded(values: np.ndarray, fill: float | int) -> Array:
        return jnp.asarray(tokens.padded(values, is_kept, fill, T))

    versions = None if policy_versions is None else trained_versions(tokens, trains, policy_versions)
    support = supports.to_support(tokens, trains, requests, T, vocab_size, width)
    values = trained_logprobs(tokens, trains, logprobs)
    sizes = np.asarray(support.counts)[tokens.rows, np.minimum(tokens.positions, T - 1)]
    check_certain(tokens, trains, values, sizes)
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        token_ids=padded(tokens.ids.astype(np.int32), 0),
        lengths=jnp.asarray(lengths.astype(np.int32)),
        logprobs=padded(values, 0.0),
        support=support,
        finish=jnp.asarray(_finish(tokens, is_stop, lengths)),
        sampling=sampling,
        group_size=group_size,
        sampled_mask=padded(trains, False),
        policy_versions=None if versions is None else padded(versions, NO_VERSION),
    )


def _prompts(
    prompts: Sequence[Sequence[int]], vocab_size: int, most: int | None
) -> tuple[Int[Array, "P S"], Int[Array, " P"]]:
    tokens = Tokens.of(prompts, vocab_size, "prompt", "group")
    if not tokens.lengths.all() or len(tokens.lengths) == 0:
        which = f"that of group {tokens.lengths.argmin()} is empty" if len(tokens.lengths) else "there is none"
        raise ValueError(f"prompts must be at least one, and each hold at least one id, but {which}.")
    width = tokens.width("max_prompt_length", most, tokens.lengths)
    cells = tokens.padded(tokens.ids.astype(np.int32), np.ones(len(tokens.ids), np.bool_), 0, width)
    return jnp.asarray(cells), jnp.asarray(tokens.lengths.astype(np.int32))


def _requests(params: SamplingParams | Sequence[SamplingParams], num_rows: int) -> list[SamplingParams]:
    given = settings.as_requests(params)
    for row, request in enumerate(given):
        if request.n != 1:
            raise ValueError(f"row {row}: params must have n=1, one completion each, got n={request.n}.")
    # Nothing is drawn here, and equal data make equal rollouts. The supports are at hand, whoever asked for them.
    plain = [dataclasses.replace(r, seed=r.seed or 0, return_sampling_mask=None) for r in given]
    plain = plain * num_rows if isinstance(params, SamplingParams) else plain
    if len(plain) != num_rows:
        raise ValueError(f"params must be one, or one per completion, {num_rows}, got {len(plain)}.")
    return plain


def _check_temperatures(requests: Sequence[SamplingParams], rows: Int[np.ndarray, " R"]) -> None:
    for row in rows:
        try:
            check_sampling_mask(requests[row], logprobs_mode="processed_logprobs", unbounded_support=True)
        except ValueError as error:
            raise ValueError(f"row {row}: {error}.") from error


def _finish(tokens: Tokens, is_stop: Bool[np.ndarray, " N"], lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    finish = np.full(len(lengths), Finish.LENGTH, np.int32)
    finish[tokens.rows[is_stop & (tokens.positions == lengths[tokens.rows] - 1)]] = Finish.STOP
    return finish
