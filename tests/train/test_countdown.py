import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_tasks import answers_to, texts_of

from train.tasks import Countdown
from train.tasks.countdown import RIGHT_NUMBERS, WELL_FORMED
from train.tasks.expressions import END, SIGNS, read_expressions

# What the grammar says, in Python: it evaluates "*" first and then from the left, as expressions do there.
EXPRESSION = re.compile(r"(0|[1-9]\d*)([+*-](0|[1-9]\d*))*")
WIDTH = 9
compiled = jax.jit(read_expressions)


def ids_of(text):
    return [SIGNS.index(sign) for sign in text]


def oracle(text, given):
    """Whether a text is an expression with an end, uses the numbers, and its value."""
    body, end, _ = text.partition(".")
    if not end or not EXPRESSION.fullmatch(body):
        return False, False, 0
    numbers = [int(number) for number in re.findall(r"\d+", body)]
    return True, Counter(numbers) == Counter(given), int(eval(body))


def read(texts, given):
    token_ids = np.full((len(texts), WIDTH), END, np.int32)
    mask = np.zeros((len(texts), WIDTH), bool)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = ids_of(text)
        mask[row, : len(text)] = True
    return compiled(jnp.asarray(token_ids), jnp.asarray(mask), jnp.asarray(given, dtype=jnp.int32))


def check(texts, given):
    found = read(texts, given)
    is_well, uses, values = (np.asarray(leaf) for leaf in (found.is_well_formed, found.uses_numbers, found.value))
    for row, (text, numbers) in enumerate(zip(texts, given, strict=True)):
        is_well_formed, uses_numbers, value = oracle(text, numbers)
        assert is_well[row] == is_well_formed, text
        if is_well_formed:
            assert uses[row] == uses_numbers, (text, numbers)
            assert not uses_numbers or values[row] == value, text


def test_random_strings_are_read_as_python_reads_them():
    rng = np.random.default_rng(0)
    # Mostly signs of expressions, so that many are some; the cut leaves some without an end.
    likely = list("12340+-*...,>=")
    weights = np.array([12] * 4 + [2] + [9] * 3 + [3] * 3 + [0.3] * 3)
    drawn = rng.choice(likely, (4000, WIDTH), p=weights / weights.sum())
    texts = ["".join(row)[: rng.integers(0, WIDTH + 1)] for row in drawn]
    given = rng.integers(1, 5, (4000, 3)).tolist()
    check(texts, given)
    assert sum(oracle(text, numbers)[0] for text, numbers in zip(texts, given, strict=True)) > 400


def test_random_expressions_are_evaluated_as_python_does():
    rng = np.random.default_rng(1)
    given = rng.integers(1, 13, (4000, 3)).tolist()
    signs = rng.choice(list("+-*"), (4000, 2))
    texts = [f"{a}{x}{c}{y}{b}." for (a, b, c), (x, y) in zip(given, signs, strict=True)]
    texts = [text if len(text) <= WIDTH else "1." for text in texts]
    check(texts, given)
    assert sum(oracle(text, numbers)[1] for text, numbers in zip(texts, given, strict=True)) > 3000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3*7+2.", 1),
        ("2+3*7.", 1),
        ("2+7*3.=,>", 1),
        ("3*7-2.", RIGHT_NUMBERS),
        ("3+7*2.", RIGHT_NUMBERS),
        ("3*7.", WELL_FORMED),
        ("23.", WELL_FORMED),
        ("3*7+1+1.", WELL_FORMED),
        ("3*7+2+2-2", 0),
        ("3*7+2", 0),
        ("-2+3*7.", 0),
        ("3*7++2.", 0),
        ("03*7+2.", 0),
        ("3*7+2=.", 0),
        (".", 0),
        ("", 0),
        ("999999999", 0),
        ("9999999.", WELL_FORMED),
    ],
)
def test_rewards(text, value):
    rewards = answers_to(Countdown(), "3,7,2>23=", [text, text], width=WIDTH)
    np.testing.assert_allclose(rewards.values, [value] * 2, rtol=1e-6)
    assert rewards.is_exact.tolist() == [value == 1] * 2


def test_equal_numbers_are_each_used_once():
    given = [[4, 4, 2]] * 4
    found = read(["4*4+2.", "4+2.", "4*4*4+2.", "4+2+2."], given)
    assert found.is_well_formed.all()
    assert found.uses_numbers.tolist() == [True, False, False, False]


def reachable(numbers):
    """The values of all expressions over some numbers."""
    texts = {
        "".join(itertools.chain.from_iterable(zip(map(str, order), (*signs, ""), strict=True)))
        for order in itertools.permutations(numbers)
        for signs in itertools.product("+-*", repeat=len(numbers) - 1)
    }
    return {eval(text) for text in texts}


@pytest.mark.parametrize("task", [Countdown(), Countdown(num_numbers=4, max_number=99, max_target=999)])
def test_every_prompt_has_an_answer(task):
    is_sum = []
    for text in texts_of(task):
        assert re.fullmatch(r"(\d+,)+\d+>\d+=", text)
        *numbers, target = (int(number) for number in re.findall(r"\d+", text))
        assert len(numbers) == task.num_numbers
        assert all(1 <= number <= task.max_number for number in numbers)
        assert 1 <= target <= task.max_target
        assert target in reachable(numbers)
        is_sum.append(target == sum(numbers))
    assert np.mean(is_sum) < 0.4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_numbers": 1}, "num_numbers must be an integer in .2, 6., got 1"),
        ({"num_numbers": 2.5}, "num_numbers must be an integer"),
        ({"num_numbers": 6, "max_number": 99, "max_target": 999}, "max_number must be at most 35 with num_numbers=6"),
        ({"max_number": 0}, "max_number must be an integer in"),
        ({"max_target": 26}, "max_target must be an integer in .27, 1000000., got 26"),
    ],
)
def test_bad_ranges_are_refused(values, message, unchecked):
    with pytest.raises(ValueError, match=message):
        Countdown(**values)
