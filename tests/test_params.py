import warnings

import jaxtyping
import numpy as np
import pytest

from jaxmask import SamplingParams
from jaxmask.params import LOGPROBS_MODES, check_count, check_integer, check_integers, check_logprobs_mode


@pytest.fixture(autouse=True)
def _callers_may_pass_anything():
    """These tests pass what a client may send; the type checks of the test run would refuse it before ours see it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("presence_penalty", -2.1, "presence_penalty must be in [-2, 2], got -2.1."),
        ("presence_penalty", NAN, "presence_penalty must be in [-2, 2], got nan."),
        ("frequency_penalty", 2.1, "frequency_penalty must be in [-2, 2], got 2.1."),
        ("frequency_penalty", NAN, "frequency_penalty must be in [-2, 2], got nan."),
        ("repetition_penalty", 0.0, "repetition_penalty must be greater than zero, got 0.0."),
        ("repetition_penalty", -1, "repetition_penalty must be greater than zero, got -1.0."),
        ("repetition_penalty", NAN, "repetition_penalty must be a finite number, got nan."),
        ("repetition_penalty", INF, "repetition_penalty must be a finite number, got inf."),
        ("temperature", -0.1, "temperature must be in [0, 2], got -0.1."),
        ("temperature", 2.1, "temperature must be in [0, 2], got 2.1."),
        ("temperature", NAN, "temperature must be a finite number, got nan."),
        ("temperature", INF, "temperature must be a finite number, got inf."),
        ("top_p", 0.0, "top_p must be in (0, 1], got 0.0."),
        ("top_p", -0.1, "top_p must be in (0, 1], got -0.1."),
        ("top_p", 1.5, "top_p must be in (0, 1], got 1.5."),
        ("top_p", NAN, "top_p must be in (0, 1], got nan."),
        ("top_k", -2, "top_k must be 0 (disable), or at least 1, got -2."),
        ("top_k", 1.5, "top_k must be an integer, got float 1.5."),
        ("top_k", NAN, "top_k must be an integer, got float nan."),
        ("top_k", "5", "top_k must be an integer, got str '5'."),
        ("min_p", -0.1, "min_p must be in [0, 1], got -0.1."),
        ("min_p", 1.1, "min_p must be in [0, 1], got 1.1."),
        ("min_p", NAN, "min_p must be in [0, 1], got nan."),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0."),
        ("max_tokens", -1, "max_tokens must be at least 1, got -1."),
        ("max_tokens", 1.5, "max_tokens must be an integer, got float 1.5."),
        ("min_tokens", -1, "min_tokens must be greater than or equal to 0, got -1."),
        ("min_tokens", 17, "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ("logprobs", -2, "logprobs must be non-negative or -1, got -2."),
        ("prompt_logprobs", -2, "prompt_logprobs must be non-negative or -1, got -2."),
        ("logprobs", 1.5, "logprobs must be an integer, got float 1.5."),
        ("n", 0, "n must be in [1, 16384], got 0."),
        ("n", 100_000, "n must be in [1, 16384], got 100000."),
        ("n", "3", "n must be an integer, got str '3'."),
        ("seed", 2**64, f"seed must be in [{-(2**63)}, {2**64 - 1}], got {2**64}."),
        ("seed", 1.0, "seed must be an integer, got float 1.0."),
        ("stop", "", "stop must hold strings and cannot contain an empty string. Got stop=''."),
        ("stop", ["a", ""], "stop must hold strings and cannot contain an empty string. Got stop=['a', '']."),
        ("stop", [5], "stop must hold strings and cannot contain an empty string. Got stop=[5]."),
        ("stop", 5, "stop must hold strings and cannot contain an empty string. Got stop=5."),
        ("stop_token_ids", ["2"], "stop_token_ids must contain only integers, got ['2']."),
        ("stop_token_ids", [1.5], "stop_token_ids must contain only integers, got [1.5]."),
        ("stop_token_ids", [True], "stop_token_ids must contain only integers, got [True]."),
        ("stop_token_ids", 5, "stop_token_ids must contain only integers, got 5."),
        ("allowed_token_ids", [], "allowed_token_ids is not None and empty!"),
        ("allowed_token_ids", [None], "allowed_token_ids must contain only integers, got [None]."),
        ("allowed_token_ids", 5, "allowed_token_ids must contain only integers, got 5."),
        ("logit_bias", {"abc": 1.0}, "logit_bias keys must be token ids, got 'abc'."),
        ("logit_bias", {1.5: 1.0}, "logit_bias keys must be token ids, got 1.5."),
        ("logit_bias", {True: 1.0}, "logit_bias keys must be token ids, got True."),
        ("logit_bias", {3: NAN}, "logit_bias of token_id 3 must be a number, got nan."),
        ("logit_bias", {3: "x"}, "logit_bias must be a number, got 'x'."),
        ("logit_bias", [3], "logit_bias must map token ids to numbers, got [3]."),
        ("bad_words", [""], "bad_words cannot contain an empty string. Got bad_words=['']."),
        ("bad_words", [[]], "bad_words cannot contain an empty string. Got bad_words=[[]]."),
        ("bad_words", [[1.5]], "bad_words must contain only integers, got [1.5]."),
        ("bad_words", [5], "bad_words must hold strings or token id lists, got [5]."),
        ("bad_words", "word", "bad_words must hold strings or token id lists, got 'word'."),
        ("include_stop_str_in_output", 1, "include_stop_str_in_output must be True or False, got 1."),
        ("skip_special_tokens", None, "skip_special_tokens must be True or False, got None."),
        ("detokenize", "no", "detokenize must be True or False, got 'no'."),
    ],
)
def test_refused_values_are_named(field, value, message):
    """The texts are vLLM's where it has one. P62."""
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert str(error.value) == message


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


@pytest.mark.parametrize("field", NUMBERS + INTEGERS)
def test_a_bool_is_not_a_number(field):
    with pytest.raises(ValueError, match=f"{field} must be (a number|an integer)"):
        SamplingParams(**{field: True})


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["0.5", None, [0.5], 1j])
def test_only_real_numbers_are_numbers(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a number"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "accepted",
    [
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 1e-9},
        {"temperature": 2, "top_p": 1, "min_p": 1},
        {"temperature": 0, "min_p": 0, "top_p": 5e-324},
        {"top_k": -1},
        {"top_k": 10**9},
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"n": 16384, "seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"logprobs": -1, "prompt_logprobs": 0},
        {"temperature": np.float32(0.5), "top_k": np.int64(3)},
    ],
)
def test_the_ends_of_each_range_are_inside(accepted):
    params = SamplingParams(**accepted)
    for field, value in accepted.items():
        assert getattr(params, field) == value


def test_greedy_takes_one_sample():
    with pytest.raises(ValueError, match=r"^n must be 1 when using greedy sampling, got 2\.$"):
        SamplingParams(temperature=0.0, n=2)
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 0.0099])
def test_a_tiny_temperature_is_raised_with_a_warning(temperature):
    with pytest.warns(UserWarning, match=rf"temperature {temperature} is raised to 0\.01"):
        params = SamplingParams(temperature=temperature)
    assert params.temperature == 0.01
    assert not params.is_greedy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SamplingParams(temperature=0.01).temperature == 0.01


def test_canonical_forms():
    params = SamplingParams(
        stop="end",
        stop_token_ids=[np.int32(3), 4],
        logit_bias={"3": 1e9, 4: -250, 5: 0.5},
        bad_words=["word", [1, 2]],
        allowed_token_ids=(3, 4),
        seed=-1,
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {3: 100.0, 4: -100.0, 5: 0.5}
    assert params.bad_words == ("word", (1, 2))
    assert params.allowed_token_ids == (3, 4)
    assert params.seed is None
    assert SamplingParams().stop_token_ids == ()
    assert SamplingParams().allowed_token_ids is None


def test_stop_strings_need_text():
    """The text is vLLM's."""
    with pytest.raises(ValueError) as error:
        SamplingParams(stop="end", detokenize=False)
    assert str(error.value) == (
        "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
    )
    assert SamplingParams(stop=[], stop_token_ids=[3], detokenize=False).stop == ()


def test_log_prob_modes():
    assert LOGPROBS_MODES == ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")
    for mode in LOGPROBS_MODES:
        check_logprobs_mode(mode)
    with pytest.raises(ValueError, match=r"^logprobs_mode must be one of .*, got 'logprobs'\.$"):
        check_logprobs_mode("logprobs")


def test_numpy_integers_become_plain_ones():
    params = SamplingParams(seed=np.uint64(2**63 + 5), top_k=np.int32(5), n=np.int64(2))
    assert [type(value) for value in (params.seed, params.top_k, params.n)] == [int, int, int]
    assert params.seed == 2**63 + 5


@pytest.mark.parametrize("value", [True, np.bool_(True), 1.0, np.float32(1), "1", None, [1]])
def test_what_is_no_integer(value):
    message = f"size must be an integer, got {type(value).__name__} {value!r}."
    for check in (check_integer, check_count):
        with pytest.raises(ValueError) as error:
            check("size", value)
        assert str(error.value) == message
    with pytest.raises(ValueError) as error:
        check_integers("ids", [3, value])
    assert str(error.value) == f"ids must contain only integers, got {[3, value]!r}."


def test_integers_come_back_plain():
    for check in (check_integer, check_count):
        size = check("size", np.uint64(2**63 + 1))
        assert (type(size), size) == (int, 2**63 + 1)
    ids = check_integers("ids", np.array([3, -1], np.int16))
    assert (ids, {type(token_id) for token_id in ids}) == ((3, -1), {int})
    assert check_integers("ids", []) == ()
    assert check_integer("size", -3) == -3
    assert check_count("size", 1) == 1


@pytest.mark.parametrize("value", [0, -1, np.int32(-7)])
def test_a_count_is_at_least_one(value):
    with pytest.raises(ValueError, match=rf"^size must be at least 1, got {value}\.$"):
        check_count("size", value)
