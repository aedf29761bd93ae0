import re
from xml.etree import ElementTree

import numpy as np
import pytest

from train.report_series import Chart, Line
from train.report_svg import PLOT, curves, heat_map, log_ticks, nice_ticks

NAN = float("nan")


def line(y, **rest):
    return Line("a <b>", np.arange(len(y), dtype=np.float64), np.array(y, np.float64), **rest)


def drawn(chart):
    """The corners of each stretch of the lines."""
    picture = ElementTree.fromstring(curves(chart))
    return [
        np.array([corner.split(",") for corner in node.get("points").split()], np.float64)
        for node in picture.iter("polyline")
        if node.get("class").startswith("line")
    ]


def test_points_lie_where_their_values_say_and_break_where_there_are_none():
    """Of 0 to 4 upwards, with room of 4 % above; 0 lies on the axis."""
    chart = Chart("loss", (line([0, 1, NAN, 4]),))
    left, right = drawn(chart)
    across = (PLOT["right"] - PLOT["left"]) / 3
    up = (PLOT["bottom"] - PLOT["top"]) / 4.16
    expected = [[PLOT["left"], PLOT["bottom"]], [PLOT["left"] + across, PLOT["bottom"] - up]]
    np.testing.assert_allclose(left, expected, atol=0.051)
    np.testing.assert_allclose(right, [[PLOT["right"], PLOT["bottom"] - 4 * up]], atol=0.051)


def test_a_logarithmic_axis_is_one_of_powers_and_zeros_lie_at_its_end():
    (found,) = drawn(Chart("norm", (line([1, 10, 100, 0]),), is_log=True))
    heights = found[:, 1]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)
    assert heights[3] == heights[0]
    (flat,) = drawn(Chart("zeros", (line([0, 0]),), is_log=True))
    assert (flat[:, 1] == PLOT["bottom"]).all()


@pytest.mark.parametrize("values", [[NAN, NAN], [0.0], [1e-30, 1e30], [1.0, 1.0 + 1e-9], [-3.0, -3.0], [5e-324]])
@pytest.mark.parametrize("is_log", [False, True])
def test_every_picture_is_well_formed_and_inside_its_frame(values, is_log):
    text = curves(Chart("<x>", (line(values, low=np.array(values), high=np.array(values)),), is_log=is_log))
    picture = ElementTree.fromstring(text)
    assert "nan" not in text
    assert "inf" not in text
    for node in picture.iter():
        for corner in re.findall(r"(-?[\d.]+),(-?[\d.]+)", node.get("points", "")):
            assert PLOT["left"] <= float(corner[0]) <= PLOT["right"]
            assert PLOT["top"] <= float(corner[1]) <= PLOT["bottom"]


def test_ticks_are_round():
    assert nice_ticks(0.0, 1.0, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert nice_ticks(-0.03, 0.04, 4) == [-0.02, 0, 0.02, 0.04]
    assert log_ticks(-2.5, 1.5) == [0.01, 0.1, 1, 10]
    assert log_ticks(0.1, 1.2) == [2, 5, 10]
    assert log_ticks(0.6, 0.9) == [4, 5, 6, 7]
    assert len(log_ticks(-12.0, 3.0)) <= 5


def test_ticks_beside_the_reference_are_differences():
    chart = Chart("ratio", (line([1 - 2e-7, 1 + 2e-7]),), reference=1.0)
    labels = [node.text for node in ElementTree.fromstring(curves(chart)).iter("text")]
    assert labels[:5] == ["1\u22122e-7", "1\u22121e-7", "1", "1+1e-7", "1+2e-7"]


def test_the_heat_map_darkens_with_the_share():
    text = heat_map("sizes", np.array([0.0, 9.0]), np.array([[1.0, 0.0], [0.25, 0.75]]), ["1", "2"])
    cells = {node.get("fill-opacity"): node.get("d") for node in ElementTree.fromstring(text).iter("path")}
    # Square roots of 1, 0.25 and 0.75, in steps of a twentieth.
    assert set(cells) == {"1.00", "0.50", "0.90"}
    height = (PLOT["bottom"] - PLOT["top"]) / 2
    assert cells["1.00"].startswith(f"M{PLOT['left']:g} {PLOT['bottom'] - height:g}")
    assert cells["0.90"].startswith(f"M{(PLOT['left'] + PLOT['right']) / 2:g} {PLOT['top']:g}")
