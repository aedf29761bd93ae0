import math

import numpy as np
import pytest

from train.rewards import worker


@pytest.fixture
def loaded(monkeypatch):
    functions = {}
    monkeypatch.setattr(worker, "_loaded", functions)
    return functions


def scores_of(function, loaded, num=2, **columns):
    loaded["f"] = function
    return worker.call("f", ["q"] * num, ["c"] * num, columns)


def raises(**arguments):
    raise SystemExit("no more")


@pytest.mark.parametrize(
    ("returned", "scores"),
    [
        ([1, True], [1.0, 1.0]),
        ((0.5, np.float32(0.25)), [0.5, 0.25]),
        (np.array([2, 3]), [2.0, 3.0]),
        ((value for value in [1.0, 2.0]), [1.0, 2.0]),
        ([1.0], "must return 2 floats, one per completion, it returned 1"),
        ([1.0] * 3, "returned 3"),
        (None, "it returned a NoneType"),
        (1.0, "it returned a float"),
        ("ab", "it returned a str"),
        ({0: 1.0, 1: 1.0}, "it returned a dict"),
        ([1.0, math.nan], "finite floats, one is nan"),
        ([1.0, -math.inf], "finite floats, one is -inf"),
        ([1.0, "1"], "finite floats, one is '1'"),
        ([1.0, None], "finite floats, one is None"),
        ([1.0, 1j], "finite floats, one is 1j"),
        ([1.0, [1.0]], "finite floats, one is [1.0]"),
        ([1.0, 10**400], "OverflowError"),
    ],
)
def test_what_is_returned_is_checked(returned, scores, loaded):
    found = scores_of(lambda **columns: returned, loaded)
    if isinstance(scores, str):
        assert scores in found
    else:
        assert found == scores
        assert all(type(score) is float for score in found)


def test_whatever_is_raised_comes_back_as_text(loaded):
    assert scores_of(raises, loaded) == "SystemExit: no more"

    def long(**columns):
        raise ValueError("x" * 10**6)

    assert len(scores_of(long, loaded)) == worker.MAX_ERROR_LENGTH


def test_functions_get_the_columns_that_they_name(loaded):
    def of_all(prompts, completions, **columns):
        return [len(columns), len(columns["answer"])]

    def of_one(completions, answer):
        return answer

    def of_none(prompts, completions):
        return [7, 7]

    columns = {"answer": [3, 4], "level": [0, 0]}
    assert scores_of(of_all, loaded, **columns) == [2, 2]
    assert scores_of(of_one, loaded, **columns) == [3, 4]
    assert scores_of(of_none, loaded, **columns) == [7, 7]
    assert worker.missing_columns(of_one, ["answer"]) is None
    assert worker.missing_columns(of_all, []) is None
    assert worker.missing_columns(of_none, []) is None
    assert worker.missing_columns(of_one, ["level"]) == "it takes answer; there are prompts, completions, level"


def test_functions_are_loaded_from_files_and_modules(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import beside\nN = 3\ndef f(completions): return [beside.N for _ in completions]\n")
    (tmp_path / "beside.py").write_text("N = 5\n")
    assert worker.load(f"{file}:f")(["a", "b"]) == [5, 5]
    assert worker.load("math:sqrt") is math.sqrt
    for target, reason in ((f"{file}:g", "no function 'g'"), (f"{file}:N", "no function 'N'")):
        with pytest.raises(ValueError, match=reason):
            worker.load(target)
    with pytest.raises(ValueError, match="there is no file"):
        worker.load(f"{tmp_path}/none.py:f")
    with pytest.raises(ModuleNotFoundError):
        worker.load("no_such_module:f")
