"""What speaks against each endpoint, and since when."""

import pytest

from epp.core.decision.inputs import PageScraped, PoolReplaced, ScrapeFailed
from epp.core.knowledge.ejection import Cause
from epp.core.knowledge.outliers import Outlier
from epp.core.types import EndpointMetrics
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from tests.builders import endpoint
from tests.test_hermetic import pods


class Watched:
    """A pool of three, scraped at 10.0 s, at 1,000 s by the clock of the day."""

    def __init__(self):
        self.scheduler = pods((0, 0.1), (0, 0.1), (0, 0.1))
        self.clock_s = 1_000.0
        self.told = []
        self.states = EndpointStates(
            self.scheduler,
            lambda _: ("refused", "nobody is there"),
            lambda states: self.told.append(dict(states)),
            clock=lambda: self.clock_s,
        )
        for slot in range(3):
            self.scheduler.take(PageScraped(slot, EndpointMetrics()), 10.0)
        self.found = {}
        self.scheduler.outliers.detected = lambda _: iter(self.found.items())

    def look(self, after_s=1.0):
        self.clock_s += after_s
        self.states.look(10.5)
        pool = self.scheduler.pool
        return {at.name: self.states.of(at) for _, at in pool.endpoints()}


@pytest.fixture
def watched():
    return Watched()


def test_a_state_begins_when_it_is_first_seen(watched):
    """And stays that old while it lasts, whatever else is said of it."""
    assert {one.state for one in watched.look().values()} == {"ready"}
    assert watched.told == []
    watched.found = {1: outlier(Cause.SLOW, slowness=3.4)}
    slow = watched.look()["pod-1"]
    assert (slow.state, slow.since_s) == ("slow", 1_002.0)
    assert slow.reason == "requests take 3.4 times the median of the pool"
    watched.found = {1: outlier(Cause.SLOW, slowness=5.0)}
    still = watched.look()["pod-1"]
    assert still.since_s == 1_002.0
    assert "5.0 times" in still.reason
    watched.found = {1: outlier(Cause.SLOW, slowness=5.0, ejected=True)}
    assert watched.look()["pod-1"].state == "ejected"
    watched.found = {}
    back = watched.look()["pod-1"]
    assert (back.state, back.reason, back.since_s) == ("ready", "", 1_005.0)
    states = [{name: one.state for name, one in told.items()} for told in watched.told]
    assert states == [{"pod-1": "slow"}, {"pod-1": "ejected"}, {}]


def test_what_keeps_it_from_being_ready_counts_first(watched):
    """With why its last scrape failed; errors in a row beside it are not told."""
    watched.found = {2: outlier(Cause.FAILING, failures=7)}
    assert watched.look()["pod-2"].reason == "7 errors in a row"
    for _ in range(2):
        watched.scheduler.take(ScrapeFailed(slot=2, answered=False), 0.0)
    found = watched.look()["pod-2"]
    assert found.state == "unreachable"
    assert found.reason == ("scrapes fail to connect or get no answer: refused, nobody is there")


def test_who_leaves_is_forgotten_and_who_is_not_known_is_ready(watched):
    """Nothing grows with pods that come and go."""
    watched.found = {1: outlier(Cause.SLOW, slowness=3.4)}
    watched.look()
    watched.found = {}
    watched.scheduler.take(PoolReplaced([endpoint(0)]), 10.4)
    assert set(watched.look()) == {"pod-0"}
    assert watched.told[-1] == {}
    stranger = watched.states.of(endpoint(9))
    assert (stranger.state, stranger.since_s) == ("ready", watched.clock_s)


def outlier(cause, *, slowness=float("nan"), failures=0, ejected=False):
    return Outlier(cause=cause, slowness=slowness, failures=failures, ejected=ejected)


def test_a_full_endpoint_is_shown_as_full_unless_it_is_ejected_or_not_ready(watched):
    """With what it gets at the moment, which changes nothing of its age."""
    watched.scheduler.full.refused(1, 10.0, 5.0, 10.0)
    full = watched.look()["pod-1"]
    assert (full.state, full.since_s) == ("full", 1_001.0)
    assert full.reason == "it refused requests because it is full, and gets none for some seconds"
    watched.scheduler.full.refused(1, 10.1, 0.0, 10.4)
    single = watched.look()["pod-1"]
    assert single.reason == "it refused requests because it is full, and gets single ones as a test"
    assert single.since_s == 1_001.0
    watched.found = {1: outlier(Cause.SLOW, slowness=3.4)}
    assert watched.look()["pod-1"].state == "full"
    watched.found = {1: outlier(Cause.SLOW, slowness=3.4, ejected=True)}
    assert watched.look()["pod-1"].state == "ejected"
    watched.found = {}
    watched.scheduler.full.served(1, 10.6)
    assert watched.look()["pod-1"].state == "ready"


def test_pages_show_a_full_endpoint(watched):
    """In the row of `/debug/endpoints`, from which `/live` and `epp top` read it."""
    watched.scheduler.full.refused(1, 10.0, 5.0, 10.0)
    rows = endpoint_rows(watched.scheduler, watched.states, 10.5)
    assert [row["state"] for row in rows] == ["ready", "full", "ready"]
    assert rows[1]["reason"].startswith("it refused requests")
