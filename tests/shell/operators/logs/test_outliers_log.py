"""What the log says of outliers: once when it changes, and a bounded number of lines."""

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.inflight import Outcome
from epp.shell.operators.logs import outliers_log
from epp.shell.operators.logs.outliers_log import AGAIN_S, LINES_MAX, OutliersLog
from tests.builders import endpoint, request


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Tells what `Rig.now` says."""
    monkeypatch.setattr(outliers_log.time, "monotonic", lambda: Rig.now)
    Rig.now = 0.0


class Rig:
    now = 0.0

    def __init__(self, count, *, ejects=False):
        settings = build_settings(default_config(plugin_tables()))
        ejection = OutlierEjection(enabled=ejects)
        self.scheduler = Scheduler(structs.replace(settings, ejection=ejection), seed=1)
        self.scheduler.take(PoolReplaced([endpoint(number) for number in range(count)]), 0.0)
        self.log = OutliersLog(self.scheduler)

    def answer(self, slot, status, times=1):
        for _ in range(times):
            lease = self.scheduler.ledger.open(
                request(), slot, matched_blocks=0, prefill_tokens=1.0, now=0.0
            )
            self.scheduler.take(RequestEnded(lease, Outcome(status=status)), 1.0)

    def lines(self, *, after_s=AGAIN_S):
        Rig.now += after_s
        with capture_logs() as lines:
            self.log.report()
        return lines


def test_an_outlier_is_told_once_and_again_when_it_is_none():
    rig = Rig(3)
    assert rig.lines() == []
    rig.answer(1, 500, 5)
    (line,) = rig.lines()
    assert line["endpoint"] == "pod-1"
    assert (line["cause"], line["failures_in_a_row"]) == ("failing", 5)
    assert line["log_level"] == "warning"
    rig.answer(1, 500, 50)
    assert rig.lines() == []
    rig.answer(1, 200)
    (line,) = rig.lines()
    assert (line["endpoint"], line["was"]) == ("pod-1", "failing")
    assert rig.lines() == []


def test_who_is_ejected_stays_told_until_it_is_back():
    """A late answer of before does not make it one of the others."""
    rig = Rig(3, ejects=True)
    rig.answer(1, 500, 5)
    (line,) = rig.lines()
    assert line["ejected"] is True
    rig.answer(1, 200)
    assert rig.lines() == []
    rig.scheduler.take(
        PoolReplaced([endpoint(number, incarnation="2") for number in range(3)]), Rig.now
    )
    (line,) = rig.lines()
    assert line["event"] == "endpoint is no longer an outlier"


def test_one_that_left_is_not_told_of():
    rig = Rig(3)
    rig.answer(1, 500, 5)
    assert len(rig.lines()) == 1
    rig.scheduler.take(PoolReplaced([endpoint(0), endpoint(2)]), 2.0)
    assert rig.lines() == []


def test_hundreds_at_once_are_a_few_lines():
    rig = Rig(50)
    for slot in range(50):
        rig.answer(slot, 500, 5)
    lines = rig.lines()
    assert len(lines) == LINES_MAX + 1
    assert lines[-1]["endpoints"] == 50 - LINES_MAX
    assert rig.lines() == []


def test_one_that_fails_and_recovers_all_the_time_is_a_line_a_minute():
    """What it is then is told, not what it was meanwhile."""
    rig = Rig(3)
    rig.answer(1, 500, 5)
    assert len(rig.lines()) == 1
    told = []
    for _ in range(120):
        rig.answer(1, 200)
        told += rig.lines(after_s=0.5)
        rig.answer(1, 500, 5)
        told += rig.lines(after_s=0.5)
    assert len(told) <= 2
    rig.lines()
    rig.answer(1, 200)
    (line,) = rig.lines()
    assert line["event"] == "endpoint is no longer an outlier"
