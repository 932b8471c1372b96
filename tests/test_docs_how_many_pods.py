"""The tables that hold answers of `sim size` to more traffic, more load and every number of pods."""

import msgspec
import pytest

from docs.how_many_pods import (
    CASES,
    DRAWS,
    LOADS,
    PAGE,
    Case,
    Fresh,
    Sized,
    draw_rows,
    load_rows,
    meets,
    with_table,
)
from sim.measurement.summaries import PartSummary, RunSummary, SizedSummary, SizeSummary, as_json
from tests.sim.made import filled

CASE = Case(generate="multi-turn --rate 4", slo="ttft-p90=1", pods_max=8)


def sized(found, of_every):
    option = filled(
        SizedSummary, pods=found, every_count={"pods": of_every, "runs": 40, "counts": []}
    )
    told = filled(SizeSummary, options=[option])
    return msgspec.json.decode(as_json(told), type=Sized)


def run(ttft_p90_s, busiest_s):
    part = {"requests": {"sent": 10, "complete": 10}, "ttft_s": {"p90": busiest_s}}
    return filled(
        RunSummary,
        requests={"sent": 100, "complete": 100},
        ttft_s={"p90": ttft_p90_s},
        busiest=filled(PartSummary, **part),
    )


def test_each_load_has_both_numbers():
    """Whatever they are."""
    rows = load_rows([CASE], [[sized(3, 3), sized(4, 5), sized(None, None)]])
    assert rows[1] == [
        "`multi-turn --rate 4`", "`ttft-p90=1`", "3", "4", "none", "3", "5", "none",
    ]  # fmt: skip
    assert len(rows[0]) == len(rows[1]) == 2 + 2 * len(LOADS)


@pytest.mark.parametrize(
    ("whole_s", "busiest_s", "expected"), [(0.9, 1.0, True), (0.9, 1.1, False), (1.1, 0.9, False)]
)
def test_a_draw_meets_an_slo_on_all_of_its_traffic_and_on_its_busiest_part(
    whole_s, busiest_s, expected
):
    """Either alone is not enough."""
    assert meets("ttft-p90=1", run(whole_s, busiest_s)) is expected


def test_the_draws_that_meet_it_are_counted():
    """Beside the number of draws."""
    assert draw_rows([Fresh(case=CASE, pods=3, met=19)])[1][2:] == ["3", str(DRAWS), "19"]


def test_the_page_has_a_place_for_both():
    """And both are filled, for every case."""
    page = PAGE.read_text(encoding="utf-8")
    for name in ("loads", "draws"):
        told = with_table(page, name, [["new"], ["row"]])
        assert told != page
        assert "| row |" in told
        assert told.count(f"<!-- end of {name} -->") == 1
    for case in CASES:
        assert f"| `{case.name}` |" in page
