"""Rollouts out of what other engines and trainers hold, checked as `rollout_from_lists` checks them.

Fields are taken out here; what must fit together is said, and refused, there. Rows are numbered over all responses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmask import sglang_answers, vllm_answers
from jaxmask.answered import Answered, as_params, parts
from jaxmask.params import check_count
from jaxmask.received import rollout_from_csr, rollout_from_lists
from jaxmask.rollout import Rollout
from jaxmask.trainer_batches import SparseRow, miles_row, prime_rl_row


def rollout_from_vllm(
    requests: Sequence[Mapping[str, Any]],
    responses: Sequence[Mapping[str, Any] | Sequence[Any]],
    *,
    vocab_size: int,
    group_size: int | None = None,
    eos_token_ids: Sequence[int] = (),
    width: int | None = None,
    max_prompt_length: int | None = None,
    max_length: int | None = None,
) -> Rollout:
    """The rollout of what vLLM's `/inference/v1/generate` answered, with its settings, edits included.

    The server runs with `--return-sampling-mask --logprobs-mode processed_logprobs`; requests ask for `logprobs=0`.
    Names of weights that are numbers become policy versions.

    Args:
      requests: bodies of the requests, as JSON objects.
      responses: bodies of the answers in the same order; of a streamed one, the list of its events.
      vocab_size: number of ids, V.
      group_size: completions per prompt, G, where each was a request of its own; those of a prompt side by side. None:
        the choices of each response, equally many.
      eos_token_ids: as in `rollout_from_lists`, like all that follow.
      width: cells per support.
      max_prompt_length: padded width of the prompts.
      max_length: padded width of the completions.

    Raises:
      ValueError: something is missing in a response (it is named, with its choice), groups are not equally large or
        not of one prompt, or what `rollout_from_lists` refuses, by row and position.
    """
    groups = vllm_answers.completions(requests, responses)
    shapes = {"width": width, "max_prompt_length": max_prompt_length, "max_length": max_length}
    return _rollout(groups, vocab_size, group_size, eos_token_ids, shapes)


def rollout_from_sglang(
    requests: Sequence[Mapping[str, Any]],
    responses: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]],
    *,
    vocab_size: int,
    group_size: int | None = None,
    eos_token_ids: Sequence[int] = (),
    width: int | None = None,
    max_prompt_length: int | None = None,
    max_length: int | None = None,
) -> Rollout:
    """The rollout of what SGLang's `/generate` answered to `input_ids` with `return_sampling_mask`.

    Args:
      requests: bodies of the requests, of one prompt each, which say the temperature.
      responses: bodies of the answers in the same order; a list of them where n was above 1.
      vocab_size: number of ids, V.
      group_size: as in `rollout_from_vllm`, like all that follow.
      eos_token_ids: ids at which the model ends a completion.
      width: cells per support.
      max_prompt_length: padded width of the prompts.
      max_length: padded width of the completions.

    Raises:
      ValueError: as there; penalties or a bias, which are not replayed.
    """
    groups = sglang_answers.completions(requests, responses)
    shapes = {"width": width, "max_prompt_length": max_prompt_length, "max_length": max_length}
    return _rollout(groups, vocab_size, group_size, eos_token_ids, shapes)


def rollout_from_prime_rl(
    samples: Sequence[Mapping[str, Any]], *, vocab_size: int, group_size: int = 1, **shapes: Any
) -> Rollout:
    """The rollout of prime-rl's training samples: whole sequences, of which `mask` tells the sampled tokens.

    A sample holds `token_ids`, `mask`, `logprobs` and `temperatures`, an entry for each token, and `sampling_mask`:
    `ids`, and `counts` of each token (int32, as arrays, lists or bytes). What stands before the first sampled token is
    the prompt. Sampled tokens that have no support are refused, where prime-rl scores them over the vocabulary.

    Args:
      samples: those of a prompt side by side.
      vocab_size: number of ids, V.
      group_size: samples per prompt, G.
      **shapes: `eos_token_ids`, `width`, `max_prompt_length` and `max_length` of `rollout_from_csr`.

    Raises:
      ValueError: something is missing, or is of another length than the sequence; a sample without a sampled token, or
        with several temperatures; groups that are not of one prompt; what `rollout_from_csr` refuses.

    Source: prime-rl, transport/types.py, TrainingSample.
    """
    rows = [prime_rl_row(sample, f"sample {number}") for number, sample in enumerate(samples)]
    return _of_sparse(rows, vocab_size, group_size, shapes)


def rollout_from_miles(
    batch: Mapping[str, Any], *, temperature: float, vocab_size: int, group_size: int = 1, **shapes: Any
) -> Rollout:
    """The rollout of a batch of Miles' training data: a list for each field, an entry for each sample.

    `tokens` (prompt and response), `response_lengths`, and of each token of the response `loss_masks`,
    `rollout_log_probs` and its support, in `rollout_sampling_mask_ids` and `rollout_sampling_mask_offsets`.

    Args:
      batch: samples of a prompt side by side.
      temperature: that of the rollout (`--rollout-temperature`); Miles samples without penalties or biases.
      vocab_size: number of ids, V.
      group_size: samples per prompt, G.
      **shapes: `eos_token_ids`, `width`, `max_prompt_length` and `max_length` of `rollout_from_csr`.

    Raises:
      ValueError: a field is missing, or has other lengths; offsets that do not cut the ids of their sample; groups
        that are not of one prompt; what `rollout_from_csr` refuses.

    Source: Miles, its conversion of samples to training data.
    """
    params = as_params("batch", {"temperature": temperature, "max_tokens": None})
    rows = [miles_row(batch, number, params) for number in range(len(parts(batch, "tokens", "batch")))]
    return _of_sparse(rows, vocab_size, group_size, shapes)


def _rollout(
    groups: list[list[Answered]],
    vocab_size: int,
    group_size: int | None,
    eos_token_ids: Sequence[int],
    shapes: dict[str, int | None],
) -> Rollout:
    if group_size is None:
        sizes = sorted({len(group) for group in groups})
        if len(sizes) != 1 or sizes[0] == 0:
            raise ValueError(f"responses must hold equally many completions, at least one, got {sizes}.")
        group_size = sizes[0]
    rows = list(itertools.chain.from_iterable(groups))
    versions = [row.policy_versions for row in rows if row.policy_versions is not None]
    return rollout_from_lists(
        _prompts([row.prompt for row in rows], group_size),
        [row.token_ids for row in rows],
        [row.logprobs for row in rows],
        [row.supports for row in rows],
        params=[row.params for row in rows],
        # All were sampled: a token without a support is an error, and an empty completion is none.
        loss_mask=[[True] * len(row.token_ids) for row in rows],
        policy_versions=versions if len(versions) == len(rows) else None,
        vocab_size=vocab_size,
        group_size=group_size,
        eos_token_ids=eos_token_ids,
        **shapes,
    )


def _of_sparse(rows: list[SparseRow], vocab_size: int, group_size: int, shapes: dict[str, Any]) -> Rollout:
    return rollout_from_csr(
        _prompts([row.prompt for row in rows], group_size),
        [row.token_ids for row in rows],
        [row.logprobs for row in rows],
        np.concatenate([np.zeros(0, np.int32), *(row.ids for row in rows)]),
        counts=np.concatenate([np.zeros(0, np.int32), *(row.counts for row in rows)]),
        params=[row.params for row in rows],
        loss_mask=[row.loss_mask for row in rows],
        vocab_size=vocab_size,
        group_size=group_size,
        **shapes,
    )


def _prompts(prompts: list[Any], group_size: int) -> list[Any]:
    """One prompt for each group, of which every row has the same."""
    check_count("group_size", group_size)
    for row, prompt in enumerate(prompts):
        first = row - row % group_size
        if list(prompt) != list(prompts[first]):
            raise ValueError(f"row {row} has another prompt than row {first}, with which it shares a group.")
    return prompts[::group_size]
