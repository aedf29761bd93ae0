import io

import pytest
from rich.console import Console

from train import display
from train.display import Display
from train.figures import sparkline

FULL = {
    "rewards/mean": 0.5, "rewards/std": 0.1, "rewards/exact": 0.25, "support/size_mean": 3.5,
    "support/size_median": 2.0, "support/size_p99": 40.0, "support/one_id_share": 0.46, "ratio/max_error": 2e-6,
    "ratio/mean": 1.0, "ratio/std": 1e-6, "entropy": 0.75, "kl": 0.01, "clip_fraction": 0.02,
    "tokens_per_second": 12345.0, "time/rollout": 3.0, "time/reward": 1.0, "time/update": 4.0,
    "rewards/num_failed": 2.0, "rewards/num_timeouts": 1.0,
}  # fmt: skip


def screen(terminal):
    return Console(file=io.StringIO(), width=120, force_terminal=terminal)


def shown(rows):
    """The text of the live view after the rows."""
    view = Display(screen(True), "sort [tiny]", num_iterations=4, sampling_mask=True)
    for step, row in enumerate(rows):
        view.update(step, row)
    console = screen(False)
    console.print(view._panel(len(rows), rows[-1]))
    return console.file.getvalue()


def test_the_live_view_shows_every_metric_that_is_there():
    text = shown([FULL | {"eval/greedy": 0.125, "ratio/max_error": 3e-5}, FULL | {"rewards/mean": 1.0}])
    for part in (
        "sort [tiny]",
        "2/4",
        f"1.000 \u00b1 0.100 in a group  {sparkline([0.5, 1.0])}",
        "25.0%",
        "greedy 12.5% (after 1)",
        "3.50 ids, median 2, 99th percentile 40, 46% of one id",
        "2.0e-06 now, 3.0e-05 worst",
        "0.750 nats",
        "1.00e-02 nats",
        "2.00% of tokens",
        "12,345 tokens/s",
        "rollout 38%, reward 12%, update 50%",
        "2 (1 too slow)",
    ):
        assert part in text


@pytest.mark.parametrize("row", [{}, {"rewards/mean": 0.5}, {"rewards/mean": float("nan"), "kl": None}])
def test_missing_metrics_are_left_out(row):
    text = shown([row])
    assert "1/4" in text
    assert all(name not in text for name in ("KL", "held out", "support size", "failed", "time "))


def test_a_ratio_that_was_not_a_number_stays_the_worst():
    text = shown([{"ratio/max_error": value} for value in (1e-6, float("nan"), 2e-6)])
    assert "2.0e-06 now, nan worst" in text


def test_without_a_terminal_there_is_a_line_every_ten_seconds_and_at_the_end(monkeypatch):
    now = iter([0.0, 5.0, 10.0, 19.0, 19.5])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(now))
    console = screen(False)
    with Display(console, "sort", num_iterations=5, sampling_mask=True) as view:
        for step in range(5):
            view.update(step, FULL if step else {})
    lines = console.file.getvalue().splitlines()
    assert [line.split("/")[0].strip() for line in lines[1:]] == ["1", "3", "5"]
    assert "reward 0.500  exact 0.250  support 3.50  one-id 0.46  max|ratio-1| 2.0e-06" in lines[2]
    assert lines[2].endswith("0:10 left")


def test_sparklines_reach_from_the_least_to_the_greatest():
    assert sparkline([0.0, float("nan"), 0.5, 1.0]) == "\u2581 \u2585\u2588"
    assert sparkline([2.0, 2.0]) == "\u2581\u2581"
    assert sparkline([float("nan")]) == " "
