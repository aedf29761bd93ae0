"""What the learner refuses, the audit calls unfit; where the audit is stricter, the reason stands here."""

import dataclasses

import numpy as np
import pytest

import jaxmask
from jaxmask.audit.auditing import Auditor
from jaxmask.audit.builder import RowsBuilder
from jaxmask.audit.checks import CHECKS
from jaxmask.audit.completion import Completion
from jaxmask.audit.finding import Severity
from jaxmask.audit.requests import SILENT, setting_of
from tests.planted_faults import FAULTS
from tests.rollout_files import VOCAB_SIZE, good_rows

# Values of the wrong kind must reach the checks.
pytestmark = pytest.mark.usefixtures("unchecked")

NOT_SEEN = "the learner is given neither logits, nor kept log-probabilities, nor those over the vocabulary"
STRICTER = {
    "support-id-impossible": NOT_SEEN,
    "support-not-largest": NOT_SEEN,
    "temperature-not-applied": NOT_SEEN,
    "temperature-on-logprob": NOT_SEEN,
    "kept-sum": NOT_SEEN,
    "kept-differs": NOT_SEEN,
    "full-above-support": NOT_SEEN,
    "support-past-filters": NOT_SEEN,
    "logprob-not-finite": "-9999 is a number to the learner; vLLM writes it where it means minus infinity",
    "logprob-not-over-support": "the learner sees it in supports of one id alone, the logits show it in all",
}


def refusal(rows, eos_token_ids=(), loss_mask=None):
    """What the learner says of rows; None where it takes them."""
    params = [jaxmask.SamplingParams(**row.sampling_params) for row in rows]
    own = [row.loss_mask or [True] * len(row.token_ids) for row in rows]
    try:
        jaxmask.rollout_from_lists(
            [row.prompt_ids for row in rows],
            [row.token_ids for row in rows],
            [row.logprobs for row in rows],
            [row.supports for row in rows],
            params=params,
            vocab_size=VOCAB_SIZE,
            loss_mask=loss_mask or own,
            eos_token_ids=eos_token_ids,
        )
    except ValueError as error:
        return str(error)
    return None


def audited(rows, eos_token_ids=(), loss_mask=None, *, sees_all=False):
    builder = RowsBuilder()
    for number, row in enumerate(rows):
        more = {"kept_logprobs": row.kept_logprobs, "logits": row.logits, "full_logprobs": row.full_logprobs}
        setting = setting_of(row.sampling_params, [], silent=SILENT)
        completion = Completion(
            f"row {number}",
            row.token_ids,
            row.supports,
            row.logprobs,
            setting=setting,
            prompt_ids=row.prompt_ids,
            loss_mask=row.loss_mask if loss_mask is None else loss_mask[number],
        )
        builder.add(dataclasses.replace(completion, **more) if sees_all else completion)
    auditor = Auditor(vocab_size=VOCAB_SIZE, eos_token_ids=eos_token_ids)
    auditor.add(builder.build())
    return auditor.result([])


@pytest.mark.parametrize("title", FAULTS)
def test_the_learner_refuses_what_is_unfit_or_there_is_a_reason(title):
    fault, rows = FAULTS[title], good_rows()
    assert refusal(rows) is None
    places = fault.plant(rows) or fault.places
    refused = refusal(rows, **dict(fault.options))
    severity = next((check.severity for check in CHECKS if check.code == fault.code), Severity.WARNING)
    if severity is Severity.ERROR and fault.code not in STRICTER:
        assert refused is not None
        # With a prompt for each row, its group is the row.
        assert any(f"{'group' if 'prompt' in title else 'row'} {row}" in refused for row, _ in places)
    elif severity is Severity.WARNING:
        assert refused is None


def test_every_reason_is_needed():
    """Each code that is said to be stricter is one that the learner lets through."""
    passed = set()
    for fault in FAULTS.values():
        rows = good_rows()
        fault.plant(rows)
        if refusal(rows, **dict(fault.options)) is None:
            passed.add(fault.code)
    assert set(STRICTER) <= passed


def replaced(values, random, value):
    values = list(values)
    if values:
        values[random.integers(len(values))] = value
    return values


def mutated(row, random):
    """A row with something done to it that may be wrong, or may be not."""
    token, size = int(random.integers(-1, VOCAB_SIZE + 1)), len(row.token_ids)
    support = [int(one) for one in random.integers(-1, VOCAB_SIZE + 1, random.integers(0, 4))]
    place = int(random.integers(size))
    drawn_alone = [*row.supports[:place], row.token_ids[place : place + 1], *row.supports[place + 1 :]]
    value = float(random.choice([0.0, 5e-4, 2e-3, 0.5, -0.5, -2e-3, np.nan, np.inf, -np.inf, -30.0]))
    edits = (
        {"token_ids": replaced(row.token_ids, random, token)},
        {"supports": replaced(row.supports, random, support)},
        {"supports": drawn_alone},
        {"logprobs": replaced(row.logprobs, random, value)},
        {"logprobs": row.logprobs[: random.integers(size)]},
        {"supports": row.supports[: random.integers(size)]},
        {"supports": None},
        {"logprobs": None},
        {"logprobs": replaced(row.logprobs, random, None)},
        {"supports": replaced(row.supports, random, None)},
        {"supports": replaced(row.supports, random, sorted(random.permutation(VOCAB_SIZE).tolist()))},
        {"token_ids": replaced(row.token_ids, random, 8)},
        {"temperature": float(random.choice([0.0, 0.5]))},
        {"token_ids": [], "supports": [], "logprobs": []},
        {"prompt_ids": replaced(row.prompt_ids, random, token)},
        {"prompt_ids": row.prompt_ids[: random.integers(2)]},
        {"more_params": {"allowed_token_ids": random.permutation(VOCAB_SIZE)[: random.integers(1, 300)].tolist()}},
        {"more_params": {"presence_penalty": 0.5}},
        {"more_params": {"min_tokens": int(random.integers(2))}},
        {},
    )
    return dataclasses.replace(row, **edits[random.integers(len(edits))])


def test_nothing_that_the_learner_refuses_is_called_fit():
    random = np.random.default_rng(0)
    clean = good_rows(num_prompts=2, group_size=1, length=6)
    num_refused = num_taken = 0
    for _ in range(160):
        rows = [mutated(clean[0], random), clean[1]]
        if random.random() < 0.5 and None not in (rows[0].supports, rows[0].logprobs) and rows[0].token_ids:
            rows[0] = mutated(rows[0], random)
        loss_mask = None
        if random.random() < 0.3:
            loss_mask = [random.random(len(row.token_ids)) < 0.7 for row in rows]
            loss_mask = [flags.tolist() for flags in loss_mask]
        eos = (8,) if random.random() < 0.5 else ()
        refused = refusal(rows, eos, loss_mask)
        result = audited(rows, eos, loss_mask)
        num_refused, num_taken = num_refused + (refused is not None), num_taken + (refused is None)
        # A row that trains nothing may have anything for its log-probabilities, or nothing, but for the learner's call.
        assert refused is None or not result.is_fit, (refused, rows, loss_mask, result.findings)
    assert num_refused > 40
    assert num_taken > 20
