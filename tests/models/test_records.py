import dataclasses
from typing import Literal

import pytest

from models.records import from_values


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int


@dataclasses.dataclass(frozen=True)
class Record:
    rate: float
    count: int = 1
    name: str | None = None
    places: tuple[int, ...] = ()
    is_on: bool = False
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None


def test_lists_become_tuples_and_integers_pass_for_floats():
    values = {"rate": 2, "places": [1, 2], "kind": "b", "name": None, "inner": Inner(3)}
    assert from_values(Record, values) == Record(2, 1, None, (1, 2), False, "b", Inner(3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": "2"}, "rate must be of type float, got '2'"),
        ({"rate": True}, "rate must be of type float, got True"),
        ({"rate": 1.0, "count": 2.0}, "count must be of type int, got 2.0"),
        ({"rate": 1.0, "count": True}, "count must be of type int, got True"),
        ({"rate": 1.0, "name": 3}, r"name must be of type str \| None, got 3"),
        ({"rate": 1.0, "places": [1, "2"]}, r"places must be of type tuple\[int, ...\], got \(1, '2'\)"),
        ({"rate": 1.0, "places": 1}, "places must be of type"),
        ({"rate": 1.0, "is_on": 1}, "is_on must be of type bool, got 1"),
        ({"rate": 1.0, "inner": {"size": 1}}, "inner must be of type"),
        ({"rate": 1.0, "colour": 1}, r"unknown fields \['colour'\] of Record; allowed are \['count'"),
        ({}, "Record does not fit: .*rate"),
    ],
)
def test_what_does_not_fit_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        from_values(Record, values)
