import numpy as np
import pytest

from jaxmask.svg import linear_scale, log_ticks, nice_ticks, place, short_number


def test_a_scale_is_linear_and_may_be_turned_round():
    scale = linear_scale(1.0, 3.0, 100.0, 20.0)
    assert scale(np.array([1.0, 2.0, 3.0])).tolist() == [100.0, 60.0, 20.0]


@pytest.mark.parametrize(
    ("low", "high", "num", "ticks"),
    [
        (0.0, 1.0, 5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 0.31, 4, [0.0, 0.1, 0.2, 0.3]),
        (3.0, 97.0, 4, [50.0]),
    ],
)
def test_ticks_are_round(low, high, num, ticks):
    assert nice_ticks(low, high, num) == ticks


def test_ticks_of_logarithms():
    assert log_ticks(0.0, 3.0) == [1.0, 10.0, 100.0, 1000.0]
    # Fewer than two powers of ten: what lies between.
    assert log_ticks(0.1, 0.9) == [2.0, 4.0, 6.0]
    assert log_ticks(-0.1, 1.1) == [1.0, 10.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.05, "0.05"), (12500.0, "12.5k"), (3e-7, "3e-7"), (2e6, "2e6"), (1000.0, "1000")],
)
def test_numbers_are_short(value, text):
    assert short_number(value) == text


def test_places_are_to_a_tenth():
    assert [place(value) for value in (3.0, 2.349, -0.04)] == ["3", "2.3", "-0"]
