import numpy as np
import pytest

from train.report_series import MAX_POINTS, bin_starts, charts, column, smooth

NAN = float("nan")


def lines_of(rows, title):
    found = [chart for of_one in charts(rows).values() for chart in of_one if chart.title == title]
    return {line.label: line for line in found[0].lines} if found else None


def test_short_runs_keep_every_point_and_long_ones_the_means_and_ends_of_bins():
    values = np.random.default_rng(0).normal(size=1000)
    rows = [{"step": step, "learning_rate": value} for step, value in enumerate(values.tolist())]
    few = lines_of(rows[:200], "Learning rate")["learning rate"]
    np.testing.assert_array_equal(few.y, values[:200])
    assert few.low is None
    many = lines_of(rows, "Learning rate")["learning rate"]
    bins = np.split(values, bin_starts(1000, MAX_POINTS)[1:])
    assert len(many.y) == len(bins) == MAX_POINTS
    np.testing.assert_allclose(many.y, [part.mean() for part in bins])
    np.testing.assert_array_equal(many.low, [part.min() for part in bins])
    np.testing.assert_array_equal(many.high, [part.max() for part in bins])
    np.testing.assert_allclose(many.x, [part.mean() for part in np.split(np.arange(1000.0), bin_starts(1000, 300)[1:])])


def test_the_running_mean_passes_over_what_is_not_finite():
    np.testing.assert_array_equal(smooth(np.array([1.0, NAN, 3.0])), [1.0, NAN, 3.0])
    values = np.where(np.arange(120) == 7, NAN, np.arange(120.0))
    smoothed = smooth(values)
    assert smoothed[7] == pytest.approx((5 + 6 + 8 + 9) / 4)
    assert smoothed[50] == pytest.approx(50)
    assert smoothed[0] == pytest.approx(1)
    assert np.isnan(smooth(np.full(3, NAN))).all()


def test_charts_hold_what_the_rows_have_and_nothing_else():
    rows = [{"step": step, "rewards/mean": 0.5, "rewards/num_failed": 0.0, "loss": None} for step in range(4)]
    rows[2] |= {"eval/pass@4": 0.75, "rewards/my_format": 0.25}
    found = {section: [chart.title for chart in of_one] for section, of_one in charts(rows).items()}
    assert found == {"Rewards": ["Reward", "Held-out evaluation", "Rewards by function"]}
    held_out = lines_of(rows, "Held-out evaluation")["pass@4"]
    assert (held_out.x.tolist(), held_out.y.tolist(), held_out.is_sparse) == ([2.0], [0.75], True)
    rows[1]["rewards/num_failed"] = 3.0
    assert lines_of(rows, "Rewards that failed")["failed"].y.tolist() == [0, 3, 0, 0]
    assert charts([{"step": 0}]) == {}


def test_values_that_are_not_finite_are_counted_and_not_drawn():
    rows = [{"step": step, "loss": value} for step, value in enumerate((0.5, NAN, float("inf"), 1.0))]
    (chart,) = charts(rows)["Optimisation"]
    assert chart.num_not_finite == 2
    np.testing.assert_array_equal(chart.lines[0].y, [0.5, NAN, NAN, 1.0])
    np.testing.assert_array_equal(column(rows, "missing"), [NAN] * 4)


def test_the_ratio_lies_in_a_band_of_its_deviation():
    rows = [{"step": step, "ratio/mean": 1.0, "ratio/std": 0.25} for step in range(2)]
    line = lines_of(rows, "Ratio, mean \u00b1 standard deviation")["ratio"]
    assert (line.low.tolist(), line.high.tolist()) == ([0.75] * 2, [1.25] * 2)
