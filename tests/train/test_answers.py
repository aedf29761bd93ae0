import time

import pytest

from train.rewards.answers import extract_answer, last_boxed, last_integer, last_number, plain_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 12 </answer>", "12"),
        ("<answer>1</answer> no, <answer>2\n3</answer> \\boxed{4}", "2\n3"),
        ("I write <answer> now: <answer>7</answer>", "7"),
        ("<answer>7", "<answer>7"),
        ("so \\boxed{\\frac{1}{2}} then", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("<think>\\boxed{9} <answer>9</answer></think> it is\n 8 \n\n", "8"),
        ("one\ntwo \n", "two"),
        ("", ""),
        (" \n ", ""),
        ("\u00e4\u2028\U0001f600", "\U0001f600"),
    ],
)
def test_answers_are_found(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7 + 5 = 12.", "12"),
        ("it costs $1,234.50 a year", "1,234.50"),
        ("3-4", "4"),
        ("x = -4", "-4"),
        ("1,2", "2"),
        (".5", ".5"),
        ("none", "none"),
        ("<answer>about 5</answer> 6", "about 5"),
    ],
)
def test_numbers_are_found_where_one_is_asked_for(text, answer):
    assert extract_answer(text, is_number=True) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("7 + 5 = 12.", "12"),
        ("5 - 9 = -4", "-4"),
        ("no number", None),
        ("", None),
        ("12\n13 or 14", "14"),
    ],
)
def test_the_last_integer(text, number):
    assert last_integer(text) == number
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("$1,000", "1000"),
        ("042", "42"),
        ("42.00", "42"),
        ("-0.0", "0"),
        ("+3.", "3"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("25%", "25"),
        ("x + 1", "x + 1"),
        ("", ""),
    ],
)
def test_numbers_are_written_in_one_way(text, plain):
    assert plain_number(text) == plain


def test_huge_completions_take_no_time():
    """Time grows with the length, not with its square: a megabyte of each in under 5 s on a busy machine."""
    start = time.process_time()
    for part in ("\\boxed{", "<answer>", "</answer>", "1,", "9", "<answer>1", "{", "</think>", "-"):
        text = part * (10**6 // len(part))
        extract_answer(text, is_number=True)
        last_boxed(text)
    assert time.process_time() - start < 5
