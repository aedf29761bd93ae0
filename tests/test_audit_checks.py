"""Checks one by one, on rows small enough to see through."""

import itertools

import numpy as np
import pytest

from jaxmask.audit.across import across_checks
from jaxmask.audit.check import Open
from jaxmask.audit.checks import CHECKS
from jaxmask.audit.logit_values import logit_values
from jaxmask.audit.support_checks import is_filling, repeated_ids
from tests.audit_blocks import block, details, found

GOOD = {"token_ids": [1, 5, 9], "supports": [[1, 2], [5], [4, 9]]}
HALF = float(np.log(0.5))


def test_codes_are_names_and_each_is_there_once():
    codes = [check.code for check in (*CHECKS, *across_checks())]
    assert len(codes) == len(set(codes))
    assert all(code == code.lower() and " " not in code for code in codes)
    assert all(check.title.endswith(".") and check.remedy for check in CHECKS)


def test_a_good_row_is_good():
    assert found(block(GOOD, vocab_size=10)) == []


def test_only_tokens_that_train_are_looked_at():
    bad = {"token_ids": [1, 5], "supports": [[2, 2], []], "logprobs": [7.0, None]}
    assert found(block(bad | {"loss_mask": [False, False]})) == [("nothing-trains", 0, -1)]
    # But the model reads all of them.
    assert ("token-outside-vocabulary", 0, 1) in found(block(bad | {"loss_mask": [False, False]}, vocab_size=5))


def test_without_a_vocabulary_ids_are_only_not_negative():
    row = {"token_ids": [10**6, -1], "supports": [[10**6], [-1, 3]]}
    assert found(block(row)) == [("token-outside-vocabulary", 0, 1)]


@pytest.mark.parametrize(
    ("supports", "code"),
    [
        # Late by one: the first support is a stranger. Early by one: the last is.
        ([[7, 8], [1, 2], [5], [4, 9], [3, 6]], "supports-shifted"),
        ([[5], [4, 9], [3, 6], [2, 7], [8]], "supports-shifted"),
        ([[2, 3], [6], [5, 10], [4, 7], [3]], "ids-off-by-one"),
        ([[0, 1], [4], [3, 8], [2, 5], [1]], None),
    ],
)
def test_displaced_supports_are_one_fault_of_a_row(supports, code):
    row = {"token_ids": [1, 5, 9, 3, 2], "supports": supports, "logprobs": [HALF, 0.0, HALF, HALF, 0.0]}
    wrong = found(block(row, GOOD))
    assert wrong == ([(code, 0, -1)] if code else [("ids-off-by-one", 0, -1)])


def test_two_tokens_outside_are_not_a_shift():
    row = {"token_ids": [1, 5, 9, 3], "supports": [[1, 2], [6, 7], [4, 8], [3, 4]]}
    assert found(block(row)) == [("sampled-outside", 0, 1), ("sampled-outside", 0, 2)]


def test_exchanged_supports_name_the_other_row_also_where_lengths_differ():
    other = {"token_ids": [20, 21], "supports": [[20, 22], [21, 23]]}
    swapped = block(GOOD | {"supports": other["supports"]}, other | {"supports": GOOD["supports"]})
    assert [one for one in found(swapped) if one[2] < 0][:2] == [
        ("supports-of-other-row", 0, -1),
        ("supports-of-other-row", 1, -1),
    ]
    assert details(swapped, "supports-of-other-row")[0] == "its tokens lie in the supports of row 1"


def test_supports_of_the_prompt_are_seen_with_its_length_and_without():
    supports = [[3, 4], [8, 9], *GOOD["supports"]]
    told = GOOD | {"supports": supports, "logprobs": [HALF, 0.0, HALF], "prompt_ids": [1, 2]}
    assert found(block(told)) == [("supports-of-prompt", 0, -1)]
    assert details(block(told), "supports-of-prompt") == ["5 supports for 3 tokens: 2 more in front"]
    long = {"token_ids": [1, 5, 9, 3, 2], "supports": [[3, 4], [8, 6], [1, 2], [5, 7], [4, 9], [3, 2], [2, 8]]}
    assert found(block(long | {"logprobs": [HALF] * 5})) == [("supports-of-prompt", 0, -1)]


def test_a_support_left_out_in_the_middle_says_where():
    row = GOOD | {"supports": [[1, 2], [4, 9]], "logprobs": [HALF, 0.0, HALF]}
    assert found(block(row)) == [("support-count", 0, -1)]
    assert details(block(row), "support-count") == ["2 supports for 3 tokens; from position 1 they do not fit"]


def test_ids_are_counted_twice_in_any_order():
    supports = [[3, 3], [5, 2, 5, 9, 5], [1, 2, 3], [3], []]
    assert repeated_ids(block({"token_ids": [3, 5, 1, 3, 0], "supports": supports})).tolist() == [1, 2, 0, 0, 0]


def test_what_fills_a_row_up_is_told_from_what_goes_on():
    given = block({"token_ids": [5, 6, 2, 2, 2], "supports": [[5], [6], [2], [2], [2]]}, eos_token_ids=(2,))
    assert is_filling(given).tolist() == [False, False, False, True, True]
    assert found(given) == [("filled-up", 0, -1)]
    goes_on = {"token_ids": [5, 2, 6, 2], "supports": [[5], [2], [6], [2]]}
    assert found(block(goes_on, eos_token_ids=(2,))) == [("trains-behind-stop", 0, 2)]
    ignoring = goes_on | {"setting": {"ignore_eos": True}}
    assert found(block(ignoring, eos_token_ids=(2,))) == []


def test_logits_give_the_values_of_the_modes():
    """Logits [2, 1, 0, -1] at temperature 0.5 and top-k 2, token 1: raw -1.4402, over the support -2.1269."""
    values = logit_values(
        np.array([[2.0, 1.0, 0.0, -1.0]]), np.array([1]), np.array([2]), np.array([0, 1]), np.array([0.5])
    )
    assert values.full_at_one[0] == pytest.approx(-1.4401896986, abs=1e-9)
    assert values.kept[0] == pytest.approx(-2.1269280110, abs=1e-9)
    assert values.kept_at_one[0] == pytest.approx(-1.3132616875, abs=1e-9)
    z = np.exp(np.array([4.0, 2.0, 0.0, -2.0]))
    assert values.kept_mass[0] == pytest.approx(z[:2].sum() / z.sum(), abs=1e-12)
    assert values.excess[0] == -1.0


def test_logits_of_any_kind_give_values_without_a_warning():
    """Warnings are errors here."""
    for logits in itertools.product([np.nan, np.inf, -np.inf, 1.0, 3e38], repeat=3):
        for size, temperature in itertools.product((1, 2, 3), (0.0, 0.7, np.nan)):
            values = logit_values(
                np.array([logits]), np.array([0]), np.array([size]), np.arange(size), np.array([temperature])
            )
            assert values.num_impossible[0] == (~np.isfinite(logits[:size])).sum()
            assert np.isfinite(values.kept[0]) or np.isnan(values.kept[0])


def of_logits(logprob, logits=(2.0, 1.0, 0.0), support=(0, 1, 2), temperature=0.5):
    logits = np.array([logits])
    row = {"token_ids": [0], "supports": [list(support)], "logprobs": [logprob], "logits": logits}
    return found(block(row | {"setting": {"temperature": temperature}}, vocab_size=logits.shape[1]))


@pytest.mark.parametrize(
    ("logprob", "code"),
    [
        (-0.1429316285, None),
        # log p / T in place of log softmax(z / T).
        (-0.8152119289, "temperature-on-logprob"),
        (-0.4076059644, "temperature-not-applied"),
        (-0.3, "logprob-differs"),
    ],
)
def test_mistakes_with_the_temperature_are_told_apart(logprob, code):
    # The values over all three ids, and one more that is left out.
    wrong = of_logits(logprob, logits=(2.0, 1.0, 0.0, -60.0))
    assert wrong == ([(code, 0, 0)] if code else [])


def test_log_probabilities_over_the_vocabulary_are_told_by_the_logits():
    # At the row's temperature, and at 1, as an engine's raw ones are.
    for raw in (-0.1429316285, -0.4076059644):
        assert of_logits(raw, support=(0, 1)) == [("logprob-not-over-support", 0, 0)]


def test_a_support_is_of_the_largest_logits_up_to_ties():
    lp = float(2 - np.logaddexp(2, 1))
    assert of_logits(lp, (2.0, 1.0, 1.0), (0, 2), 1.0) == []
    assert of_logits(float(2 - np.logaddexp(2, 1)), (2.0, 1.5, 1.0), (0, 2), 1.0) == [("support-not-largest", 0, 0)]
    assert of_logits(0.0, (2.0, -np.inf, 1.0), (0, 1), 1.0) == [("support-id-impossible", 0, 0)]


def test_raw_log_probabilities_leave_nothing_of_the_row_to_believe():
    row = {"token_ids": [1, 5], "supports": [[1, 2], [5]], "logprobs": [-0.8, -0.2], "full_logprobs": [-0.8, -0.2]}
    given = block(row)
    is_open = Open.of(given)
    for check in CHECKS:
        is_open.apply(check, given)
    assert is_open.logprobs.tolist() == [False, False]
    assert is_open.supports.tolist() == [True, True]
    assert found(given) == [("logprob-not-over-support", 0, 1)]


def test_kept_log_probabilities_below_one_all_over_a_row_are_raw():
    quarter = float(np.log(0.25))
    raw = GOOD | {"kept_logprobs": [[quarter] * 2, [quarter], [quarter] * 2], "logprobs": [quarter] * 3}
    assert {code for code, *_ in found(block(raw))} == {"logprob-not-over-support"}
    one_off = GOOD | {"kept_logprobs": [[HALF, -3.0], [0.0], [HALF, HALF]]}
    assert found(block(one_off)) == [("kept-sum", 0, 0)]


def test_log_probabilities_not_asked_for_are_no_fault_but_worth_a_word():
    bare = GOOD | {"logprobs": None}
    assert found(block(bare)) == [("logprob-missing", 0, -1)]
    unasked = bare | {"setting": {"asks_for_logprobs": False}}
    assert found(block(unasked)) == [("logprobs-not-asked-for", 0, -1)]


def test_less_than_top_p_is_said_where_nothing_else_filtered():
    row = {"token_ids": [1], "supports": [[1, 2]], "logprobs": [HALF], "full_logprobs": [HALF + float(np.log(0.8))]}
    top_p = {"top_p": 0.9, "top_k": 0, "min_p": 0.0}
    assert found(block(row | {"setting": top_p})) == [("mass-below-top-p", 0, 0)]
    assert found(block(row | {"setting": top_p | {"top_k": 2}})) == []
    assert found(block(row | {"setting": top_p | {"top_p": 0.79}})) == []


@pytest.mark.parametrize(
    ("shares", "setting", "code"),
    [
        # As probable as min-p asks for, and a little less.
        ((0.5, 0.25, 0.25), {"min_p": 0.5}, None),
        ((0.5, 0.26, 0.24), {"min_p": 0.5}, "support-past-filters"),
        # More than k ids are those that tie with the k-th, or too many.
        ((0.4, 0.3, 0.3), {"top_k": 2}, "wider-than-top-k"),
        ((0.4, 0.35, 0.25), {"top_k": 2}, "support-past-filters"),
        # 0.9 times the shares of the vocabulary: 0.72 of it stand above the last id.
        ((0.5, 0.3, 0.2), {"top_p": 0.75}, None),
        ((0.5, 0.3, 0.2), {"top_p": 0.7}, "support-past-filters"),
        ((0.5, 0.25, 0.25), {"top_p": 0.7}, None),
    ],
)
def test_ids_behind_the_filters_are_told_by_what_was_kept(shares, setting, code):
    kept = np.log(shares).tolist()
    row = {"token_ids": [1], "supports": [[1, 2, 3]], "logprobs": kept[:1], "kept_logprobs": [kept]}
    row |= {"full_logprobs": [kept[0] + float(np.log(0.9))], "setting": setting}
    assert found(block(row)) == ([(code, 0, 0)] if code else [])
    # The logits of a vocabulary in which a fourth id has the rest.
    of_logits = row | {"kept_logprobs": None, "full_logprobs": None}
    of_logits |= {"logits": np.log([[0.1 / 0.9 / 20, *shares, *[0.1 / 0.9 / 20] * 19]])}
    assert found(block(of_logits | {"setting": setting | {"temperature": 1.0}})) == ([(code, 0, 0)] if code else [])


def test_a_whole_vocabulary_is_no_tie_at_top_k():
    row = {"token_ids": [1], "supports": [[0, 1, 2]], "setting": {"top_k": 2}}
    tied = found(block(row, vocab_size=3))
    assert [code for code, *_ in tied] == ["wider-than-top-k", "support-is-vocabulary"]
    assert found(block(row | {"logprobs": [-0.7]}, vocab_size=3)) == [("support-past-filters", 0, 0)]
    greedy = row | {"logprobs": [-0.7], "setting": {"top_k": 1}}
    assert found(block(greedy)) == [("support-past-filters", 0, 0)]


def test_some_kept_log_probabilities_that_are_no_numbers_are_not_passed_over():
    row = {"token_ids": [1], "supports": [[1, 2]], "kept_logprobs": [[HALF, float("nan")]]}
    assert found(block(row)) == [("kept-sum", 0, 0)]
    assert found(block(row | {"full_logprobs": []})) == [("malformed-value", 0, -1)]


def test_equal_log_probabilities_of_both_kinds_are_said():
    row = {"token_ids": [1] * 4, "supports": [[0, 1]] * 4, "full_logprobs": [HALF] * 4}
    assert found(block(row, vocab_size=50)) == [("mass-always-one", 0, -1)]
    assert found(block(row, vocab_size=2))[-4:] == [("support-is-vocabulary", 0, place) for place in range(4)]
    likely = row | {"logprobs": [-1e-6] * 4, "full_logprobs": [-1e-6] * 4}
    assert found(block(likely, vocab_size=50)) == []


def test_an_empty_row_is_no_fault():
    assert found(block({"token_ids": [], "supports": []}, vocab_size=4)) == [("row-empty", 0, -1)]
    assert found(block({"token_ids": [], "supports": [[1]], "logprobs": []})) == [("support-count", 0, -1)]


def across(*blocks):
    checks = across_checks()
    seen = []
    for given in blocks:
        for check in checks:
            marks = Open.of(given).apply(check, given)
            seen += [(check.code, given.rows.names[row]) for row in marks.rows]
    return seen


def test_duplicates_are_found_across_blocks_but_not_likely_ones():
    unlikely = {"token_ids": [1] * 9, "supports": [list(range(9))] * 9}
    assert across(block(GOOD, unlikely), block(unlikely)) == [("duplicate-completion", "row 0")]
    assert across(block(GOOD, GOOD)) == []
    other = unlikely | {"logprobs": [-2.1] * 9}
    assert across(block(unlikely, other)) == []


def test_groups_are_of_one_policy_up_to_rounding():
    first = {"token_ids": [1], "supports": [[*range(20)]], "group": "a"}
    near, far = first | {"supports": [[*range(21)]]}, first | {"supports": [[*range(40)]]}
    assert across(block(first, near)) == []
    # The same number in the next block of a file is the same group.
    assert across(block(first), block(far)) == [("group-supports-differ", "row 0")]
    assert across(block(first, far)) == [("group-supports-differ", "row 1")]
    assert across(block(first, far | {"group": "b"})) == []
    cooler = far | {"setting": {"temperature": 0.5}}
    assert across(block(first, cooler)) == [("group-settings-differ", "row 1")]
