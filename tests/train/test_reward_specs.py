import pytest

from train.rewards.specs import RewardSpec, parse_rewards


@pytest.mark.parametrize(
    ("entry", "spec"),
    [
        ("answer", RewardSpec("answer", "answer", 1.0)),
        ("answer=0.5", RewardSpec("answer", "answer", 0.5)),
        ("package.module:short", RewardSpec("short", "package.module:short", 1.0)),
        ("a=b/my.py:short=-2", RewardSpec("short", "a=b/my.py:short", -2.0)),
        ("C:/my.py:short", RewardSpec("short", "C:/my.py:short", 1.0)),
    ],
)
def test_entries_are_read(entry, spec):
    assert parse_rewards([entry]) == (spec,)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([], "at least one function"),
        (["format"], "'format'"),
        ([""], "must each be"),
        ([":f"], "must each be"),
        (["m:"], "must each be"),
        (["m:f g"], "must each be"),
        (["answer=lots"], "finite numbers as weights, got 'answer=lots'"),
        (["answer=nan"], "finite numbers"),
        (["m:f=inf"], "finite numbers"),
        (["m:mean"], "must not be called"),
        (["m:answer"], "must not be called"),
        (["m:f", "other.py:f=2"], "names that differ, got 2 called 'f'"),
        (["answer", "answer=2"], "names that differ"),
    ],
)
def test_bad_entries_are_refused(entries, reason):
    with pytest.raises(ValueError, match=r"rewards must") as refused:
        parse_rewards(entries)
    assert reason in str(refused.value)
