"""Hundreds of pods of a real InferencePool, ten a second of them new."""

import os

import pytest

from tests.chart.rendering import ROOT
from tests.cluster.conftest import ALONE
from tests.cluster.kwok import KWOK
from tests.cluster.many import MARKS, Measured, Picker, as_markdown, cores, late_s, measure
from tests.go_program import GoProgramError

LATE_S_MAX = 1.0
"""Half of what a deleted pod goes on for: engines that are later say nothing about the picker."""

BUSY_CORES_MIN = 0.5
"""A picker that is late by what it does itself takes more of a core."""


@pytest.fixture(scope="session")
def kwok():
    try:
        return KWOK.find(os.environ)
    except GoProgramError as error:
        pytest.skip(str(error))


@getattr(pytest.mark, ALONE)
@pytest.mark.parametrize("pods", [200, 1_000])
async def test_nothing_is_lost_while_pods_come_and_go(kwok, node, tmp_path, pods):
    """Three hundred of them in half a minute; afterwards the picker has what the API server has."""
    told = await measure(node, tmp_path, pods=pods)
    print(as_markdown([told]))
    assert told.shown == told.live
    assert len(told.live) == told.settled.known == told.settled.ready == pods
    assert told.settled.endpoints <= told.live, "series of pods that are gone"
    assert told.settled.inflight == 0
    assert told.settled.repairs == 0
    assert len(told.begun["first_page_s"]) == pods
    assert told.seen["gone"] == told.replaced == 300
    if (late := max(told.begun["loop_late_s"], told.seen["loop_late_s"])) > LATE_S_MAX:
        pytest.skip(f"engines were late by {late:.1f} s: this machine is too busy to serve them")
    if late_s(told.changing, 0.99) > LATE_S_MAX and cores(told.changing) < BUSY_CORES_MIN:
        pytest.skip("the picker waited for a core that others had: this machine is too busy")
    assert not told.lost, told.outcomes
    assert told.outcomes["200"] > 300


def picker(at_s, cpu_s, **lag):
    bounds = {"fast": 0.01, "slow": 0.1, "any": float("inf")}
    return Picker(
        at_s=at_s,
        cpu_s=cpu_s,
        resident_bytes=2e8,
        known=2,
        ready=2,
        inflight=0,
        repairs=0,
        lag={bounds[name]: beats for name, beats in lag.items()},
        series=10,
        endpoints=frozenset(),
    )


def test_what_lies_between_two_pages_is_counted():
    """Neither the CPU nor the lateness of before."""
    between = picker(10, 5, fast=100, slow=100, any=100), picker(20, 7, fast=198, slow=199, any=200)
    assert cores(between) == pytest.approx(0.2)
    assert late_s(between, 0.98) == 0.01
    assert late_s(between, 0.99) == 0.1
    assert late_s(between, 1.0) == float("inf")


def test_a_size_is_a_row():
    told = Measured(
        pods=1_000,
        replaced=300,
        outcomes={"200": 1_198, "503": 2},
        at_rest=(picker(0, 0, any=0), picker(10, 2, any=500)),
        changing=(picker(10, 2, slow=0, any=0), picker(20, 6, slow=500, any=500)),
        settled=picker(30, 7, any=1_500),
        begun={"first_page_s": [0.5]},
        seen={"first_page_s": [0.2, 0.4, 3.0], "late_s": [0.05]},
        live=frozenset(),
        shown=frozenset(),
    )
    row = as_markdown([told]).splitlines()[-1]
    assert row == (
        "| 1,000 | 300 | 1,200 | 2 | 20% of a core | 40% of a core | 200 MB | 200 MB | at most 100 ms "
        "| 0.40 s | 3.00 s | 50 ms |"
    )


def test_the_table_has_its_place():
    page = (ROOT / "docs/capacity.md").read_text()
    assert all(page.count(mark) == 1 for mark in MARKS)
