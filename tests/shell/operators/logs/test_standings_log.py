import asyncio

import pytest
import structlog

from epp.core.decision.inputs import PageScraped, PoolReplaced, ScrapeFailed
from epp.core.types import EndpointMetrics
from epp.shell.operators.logs.standings_log import LINES_MAX, StandingsLog
from tests.builders import endpoint
from tests.test_hermetic import pods

STALENESS_S = 2.0


class Watched:
    """A pool of three, scraped at 10.0 s, and the lines about it."""

    def __init__(self, endpoints=3):
        self.scheduler = pods(*[(0, 0.1)] * endpoints)
        self.log = StandingsLog(
            self.scheduler, lambda _: ("refused", "nobody is there"), staleness_s=STALENESS_S
        )
        self.scrape(10.0)

    def scrape(self, now, *, but=()):
        for slot, _ in self.scheduler.pool.endpoints():
            if slot not in but:
                self.scheduler.take(PageScraped(slot, EndpointMetrics()), now)

    def refuse(self, *slots):
        for slot in slots * 2:
            self.scheduler.take(ScrapeFailed(slot=slot, answered=False), 0.0)

    def look(self, now):
        with structlog.testing.capture_logs() as lines:
            self.log.look(now)
        return lines


@pytest.fixture
def watched():
    return Watched()


def test_each_transition_is_one_line_with_its_reason(watched):
    """None while nothing changes, and at the end for how long it was away."""
    assert watched.look(10.0) == []
    watched.refuse(1)
    (gone,) = watched.look(10.5)
    name = watched.scheduler.pool.columns.endpoints[1].name
    assert gone == {
        "event": "endpoint is unreachable",
        "log_level": "info",
        "endpoint": name,
        "was": "ready",
        "kind": "refused",
        "problem": "nobody is there",
    }
    watched.refuse(1)
    watched.scrape(11.0, but=[1])
    assert watched.look(11.0) == []
    watched.scheduler.take(ScrapeFailed(slot=1, answered=True), 0.0)
    watched.scrape(13.0, but=[1])
    (stale,) = watched.look(13.0)
    assert (stale["event"], stale["was"]) == ("endpoint is stale", "unreachable")
    watched.scrape(14.0)
    assert watched.look(14.0) == [
        {
            "event": "endpoint is ready again",
            "log_level": "info",
            "endpoint": name,
            "was": "stale",
            "for_s": 3.5,
        }
    ]
    assert watched.look(14.1) == []


def test_who_joins_restarts_or_leaves_is_no_line(watched):
    """Discovery tells of them; a restarted one is scraped in an instant."""
    pool = watched.scheduler.pool
    members = [at for _, at in pool.endpoints()]
    joined = endpoint(7, ready_after_s=5.0)
    watched.scheduler.take(PoolReplaced([*members, joined]), 10.0)
    assert watched.look(10.1) == []
    watched.scheduler.take(PageScraped(3, EndpointMetrics()), 10.2)
    assert watched.look(10.3) == []
    watched.refuse(3)
    assert len(watched.look(10.4)) == 1
    watched.scheduler.take(
        PoolReplaced([*members, endpoint(7, ready_after_s=5.0, incarnation="2")]), 10.5
    )
    assert watched.look(10.6) == []
    watched.scheduler.take(PageScraped(3, EndpointMetrics()), 10.7)
    (back,) = watched.look(10.8)
    assert back["event"] == "endpoint is ready again"
    watched.refuse(3)
    watched.scheduler.take(PoolReplaced(members), 10.9)
    assert watched.look(11.0) == []
    watched.scheduler.take(PoolReplaced([*members, joined]), 11.1)
    watched.scheduler.take(PageScraped(3, EndpointMetrics()), 11.2)
    assert watched.look(11.3) == []


def test_a_thousand_transitions_at_once_are_some_lines_and_a_number():
    """A partition must not flood the log."""
    watched = Watched(endpoints=LINES_MAX + 30)
    lines = watched.look(20.0)
    assert len(lines) == LINES_MAX + 1
    assert lines[-1]["event"] == "readiness changed for more endpoints than are logged"
    assert lines[-1]["endpoints"] == 30


async def test_it_looks_until_cancelled(watched, monkeypatch):
    """Some times while metrics become stale."""
    looks, slept = [], []

    async def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("epp.shell.operators.logs.standings_log.asyncio.sleep", sleep)
    monkeypatch.setattr(watched.log, "look", looks.append)
    with pytest.raises(asyncio.CancelledError):
        await watched.log.run()
    assert slept == [STALENESS_S / 8] * 3
    assert len(looks) == 2
