"""Indexes that count what is in flight hear of the end of each request once, however it ends."""

from typing import ClassVar

import msgspec
import pytest

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.abilities import Abilities
from epp.core.decision.inputs import PoolReplaced, RequestEnded, ServedBy, Tick
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.affinity import SessionIndexSettings
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Ending, Outcome
from tests.builders import affinity, endpoint, request


class Heard:
    """An index that notes what it is told of slots."""

    def __init__(self):
        self.told = []
        self.fails = False

    def match(self, request, slots, now) -> Affinity:
        return affinity([0] * slots)

    def record(self, request, slot, now):
        self.told.append(("record", slot))

        return len(self.told)

    def retract(self, request, slot, recorded, now):
        assert self.told[recorded - 1] == ("record", slot)
        self.told.append(("retract", slot))

    def release(self, request, slot, recorded, now):
        assert self.told[recorded - 1] == ("record", slot)
        self.told.append(("release", slot))
        if self.fails:
            raise RuntimeError

    def forget(self, slot):
        self.told.append(("forget", slot))

    def expire(self, now):
        pass

    def resize(self, slot, blocks_total, block_size_tokens):
        pass


class HeardSettings(msgspec.Struct, frozen=True):
    index: Heard

    abilities: ClassVar = Abilities(counts_inflight=True)

    def open(self):
        return self.index

    def adopt(self, index):
        return index is self.index


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def scheduler(heard):
    settings = build_settings(default_config(plugin_tables()))
    settings = msgspec.structs.replace(settings, indexes={"heard": HeardSettings(heard)}, prefix="")
    scheduler = Scheduler(settings, seed=1)
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1)]), 0.0)
    return scheduler


def test_a_request_that_ends_is_released_where_it_was(scheduler, heard):
    """Not twice."""
    lease = scheduler.schedule(request(), 0.0).lease
    slot = lease.slot
    scheduler.take(RequestEnded(lease, Outcome(status=200)), 1.0)
    scheduler.take(RequestEnded(lease, Outcome(status=200)), 2.0)
    assert heard.told == [("record", slot), ("release", slot)]


def test_a_request_of_which_nothing_more_is_heard_is_released_when_its_lease_ends(scheduler, heard):
    """By the clock."""
    lease = scheduler.schedule(request(), 0.0).lease
    slot = lease.slot
    scheduler.take(RequestEnded(lease, Outcome(ending=Ending.UNSEEN)), 1.0)
    assert heard.told == [("record", slot)]
    scheduler.take(Tick(), 1_000.0)
    assert heard.told == [("record", slot), ("release", slot)]


def test_a_request_that_moved_is_released_where_it_ended(scheduler, heard):
    """What was retracted needs no release."""
    lease = scheduler.schedule(request(), 0.0).lease
    before = lease.slot
    scheduler.take(ServedBy(lease, endpoint(1 - before).address), 0.5)
    scheduler.take(RequestEnded(lease, Outcome(status=200)), 1.0)
    after = 1 - before
    assert heard.told == [
        ("record", before), ("retract", before), ("record", after), ("release", after),
    ]  # fmt: skip


def test_a_request_that_moved_out_of_the_pool_is_taken_back_and_not_released(scheduler, heard):
    """Retracting ended it."""
    lease = scheduler.schedule(request(), 0.0).lease
    slot = lease.slot
    scheduler.take(ServedBy(lease, "192.0.2.1:80"), 0.5)
    assert heard.told == [("record", slot), ("retract", slot)]


def test_a_session_stays_where_it_was_when_the_gateway_goes_to_a_stranger():
    """Only what the request itself had told is taken back."""
    settings = msgspec.structs.replace(
        build_settings(default_config(plugin_tables())),
        indexes={"session-id-producer": SessionIndexSettings()},
        prefix="",
    )
    scheduler = Scheduler(settings, seed=1)
    scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    index = scheduler.indexes["session-id-producer"]
    for now in (0.0, 1.0):
        lease = scheduler.schedule(request(session_id="s"), now).lease
    scheduler.take(ServedBy(lease, "192.0.2.1:80"), 1.5)
    assert index.match(request(session_id="s"), 1, 2.0).matched.tolist() == [1]


def test_what_was_at_an_endpoint_that_left_is_not_released(scheduler, heard):
    """Who comes into its slot has nothing to do with it."""
    lease = scheduler.schedule(request(), 0.0).lease
    slot = lease.slot
    scheduler.take(PoolReplaced([endpoint(1 - slot)]), 1.0)
    scheduler.take(RequestEnded(lease, Outcome(status=200)), 2.0)
    assert heard.told == [("record", slot), ("forget", slot)]


def test_an_index_that_fails_to_release_costs_nothing_else(scheduler, heard):
    """It is counted, and the lease is given back."""
    heard.fails = True
    lease = scheduler.schedule(request(), 0.0).lease
    scheduler.take(RequestEnded(lease, Outcome(status=200)), 1.0)
    assert scheduler.ledger.open_leases == 0
    assert [(one.name, one.failures) for one in scheduler.failures] == [("heard", 1)]
    assert "release raised RuntimeError" in next(iter(scheduler.failures)).what
