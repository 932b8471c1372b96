"""Charts: marks that tell a range and do not touch, axes that say what they measure."""

import re
from itertools import pairwise

import numpy as np
import pytest

from sim.reports.charts import (
    FULL,
    HALF,
    SMALL,
    STYLE,
    Axis,
    Dots,
    bar_chart,
    cdf_chart,
    line_chart,
    page,
)

TEXT_PX_MIN = 11
CARRIED_BYTES_MAX = 32_768
"""Script and style, which every page has."""


@pytest.mark.parametrize("high", [0.0071, 0.01, 0.05, 0.7, 6.0, 90.0, 4e4])
def test_a_logarithmic_axis_has_marks_enough_to_read_it(high):
    """Three at least, whatever the range; inside it, in order, and far enough apart for labels."""
    axis = Axis.over([0.006, high], logarithmic=True)
    marks = axis.marks()
    assert len(marks) >= 3
    assert marks == sorted(marks)
    assert axis.low <= marks[0] <= marks[-1] <= axis.high
    assert all(after - before > 0.1 for before, after in pairwise(map(axis.share, marks)))


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("high", [2.0, 7.0, 64.0])
def test_between_whole_numbers_nothing_is_marked(high, logarithmic):
    """One pod and a half is none."""
    marks = Axis.over([1.0, high], whole=True, logarithmic=logarithmic).marks()
    assert marks
    assert all(mark == round(mark) for mark in marks)


def test_points_are_marked_large_or_not_at_all():
    """What was found stands out, and a limit is a line."""
    axis = Axis.over([1.0, 5.0])
    points = [(1.0, 1.0), (5.0, 5.0)]
    drawn = line_chart(
        {"tried": points, "limit": points}, x=axis, y=axis, label="",
        dots=Dots(bare=("limit",), large={"tried": [(5.0, 5.0)]}),
    )  # fmt: skip
    tried, limit = drawn.split('data-name="limit"')
    radii = [float(one) for one in re.findall(r' r="([\d.]+)"', tried)]
    assert len(radii) == 2
    assert radii[1] > radii[0]
    assert "<circle" not in limit


def test_an_axis_with_a_title_tells_its_unit_once():
    """In the title; without one at every mark."""
    assert Axis.over([5.0], unit="s", title="time").told == "time (s)"
    assert Axis.over([5.0], unit="s", title="time").label(2.0) == "2"
    assert Axis.over([5.0], unit="s").label(2.0) == "2 s"
    assert Axis.over([5000.0]).label(2_500.0) == "2,500"


def test_a_distribution_says_what_its_axes_measure():
    """Time below, the share of requests beside it."""
    page = cdf_chart("TTFT", {"": np.array([0.1, 0.2, 4.0, np.nan])})
    assert ">time (s)<" in page
    assert ">share of requests (%)<" in page
    assert page.count('text-anchor="middle"') >= 4


@pytest.mark.parametrize(
    ("size", "place", "around"), [(HALF, "pair", 2 * 18 + 2), (SMALL, "pods", 0)]
)
def test_text_is_large_enough_where_a_chart_is_shown(size, place, around):
    """Also in the narrowest column that the page makes of it; a whole row is wider than that."""
    text_px = float(re.search(r"svg text { font-size: ([\d.]+)px", STYLE)[1])
    column_px = float(re.search(rf"\.{place} {{[^}}]*minmax\(min\(([\d.]+)px", STYLE)[1])
    assert text_px * (column_px - around) / size.width >= TEXT_PX_MIN
    axis = Axis.over([1.0, 5.0])
    drawn = line_chart({"": [(1.0, 1.0), (5.0, 5.0)]}, x=axis, y=axis, label="", size=size)
    assert f'viewBox="0 0 {size.width} {size.height}"' in drawn


def test_of_very_many_bars_only_some_are_named():
    """Labels of neighbours would cover each other."""
    values = {f"pod-{number}": float(number) for number in range(100)}
    drawn = bar_chart(values, y=Axis.over(list(values.values())), label="", size=FULL)
    assert drawn.count("<rect") == 100
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="\d+"', drawn)]
    assert 5 < len(places) < 20
    assert all(after - before > 40 for before, after in pairwise(places))


def test_what_every_page_carries_for_its_charts_is_small():
    """With nothing else on it."""
    assert len(page("", "", "").encode()) <= CARRIED_BYTES_MAX
