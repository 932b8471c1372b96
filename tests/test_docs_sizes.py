"""The table and the picture that hold `sim size` to every number of pods."""

import xml.etree.ElementTree as ET

import msgspec

from docs.sizes import BEGIN, END, PAGE, PICTURE, Sized, picture, with_table
from sim.measurement.summaries import (
    CountSummary,
    DemandSummary,
    SizedSummary,
    SizeSummary,
    as_json,
)
from tests.sim.made import filled


def count(pods):
    return filled(CountSummary, pods=pods, runs=5, used=7.5 / pods)


def summary(trace, found, of_every):
    option = filled(
        SizedSummary,
        pods=found,
        counts=[count(7), count(8)],
        runs=16,
        every_count={"pods": of_every, "runs": 160, "counts": [count(at) for at in range(1, 33)]},
    )
    told = filled(
        SizeSummary,
        conditions={"trace": trace},
        options=[option],
        sized_for=filled(DemandSummary, requests=2_000),
    )
    return msgspec.json.decode(as_json(told), type=Sized)


FOUND = [summary("day.jsonl", 7, 8), summary("night.csv", None, None)]


def test_a_search_that_was_wrong_is_shown_to_be():
    """Both numbers stand beside each other, whatever they are."""
    told = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", FOUND)
    assert "| day.jsonl | 2,000 | 7 | 8 | 16 | 160 | 10.0% |" in told
    assert "| night.csv | 2,000 | none | none | 16 | 160 | 10.0% |" in told
    assert told.startswith("before\n")
    assert told.endswith("\nafter\n")
    assert "old" not in told


def test_the_picture_has_a_line_of_every_number_and_a_dot_for_each_that_was_tried():
    """Of each trace."""
    drawn = ET.fromstring(picture(FOUND))
    space = "{http://www.w3.org/2000/svg}"
    lines = [one.get("points") for one in drawn.iter(f"{space}polyline")]
    assert [line.count(" ") + 1 for line in lines if line.count(" ") > 3] == [32, 32]
    assert sum(1 for _ in drawn.iter(f"{space}circle")) == 2 * 2


def test_the_page_has_a_place_for_them():
    """Once; the picture that it shows is there."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert f"]({PICTURE.name})" in page
    assert PICTURE.exists()
