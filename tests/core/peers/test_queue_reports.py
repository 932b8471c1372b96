"""Pickers that tell each other about their queues, and the room that each takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Scheduler
from epp.core.flow.detectors import ConcurrencyDetector, ConcurrencyMode
from epp.core.flow.settings import FlowSettings
from epp.core.knowledge.inflight import Outcome
from epp.core.peers.exchange import HEARTBEAT_S, SILENT_S_MAX, PeerExchange
from epp.core.peers.frames import CHARGE, charges_of
from epp.core.types import EndpointMetrics
from tests.builders import endpoint, request
from tests.core.peers.test_exchange import settle
from tests.core.protocol.test_flow_queue import scheduler_settings

SLOTS = 16
PROMPT_TOKENS = 10
FLOW = FlowSettings()
COUNTED = FlowSettings(detector=ConcurrencyDetector(max_concurrency=SLOTS))
COUNTED_TOKENS = FlowSettings(
    detector=ConcurrencyDetector(
        concurrency_mode=ConcurrencyMode.TOKENS, max_token_concurrency=SLOTS * PROMPT_TOKENS
    )
)


class Pickers:
    """Pickers with queues over one endpoint with `SLOTS` slots, which is scraped each 0.2 s."""

    def __init__(self, count, flow=COUNTED):
        self.now = 0.0
        self.schedulers = [
            Scheduler(scheduler_settings(flow=flow), seed=number) for number in range(count)
        ]
        self.leases = []
        for scheduler in self.schedulers:
            scheduler.take(PoolReplaced([endpoint()]), 0.0)
        self.exchanges = [
            PeerExchange(scheduler, origin=bytes([number]) * 8, now=0.0, replicas=count)
            for number, scheduler in enumerate(self.schedulers)
        ]
        self.scrape()
        settle(0.0, *self.exchanges)

    def scrape(self, waiting=0.0):
        metrics = EndpointMetrics(
            running_requests=float(len(self.leases)),
            waiting_requests=waiting,
            kv_cache_usage=0.0,
            block_size_tokens=16,
            blocks_total=10_000,
        )
        for scheduler in self.schedulers:
            scheduler.take(PageScraped(0, metrics), self.now)

    def fill(self, number):
        """Send small requests by picker `number` while it sees room. Return how many."""
        scheduler, sent = self.schedulers[number], 0
        small = request(prompt_tokens=PROMPT_TOKENS)
        while scheduler.admission.has_room(small, self.now):
            self.leases.append((number, scheduler.schedule(small, self.now).lease))
            sent += 1
            assert sent < 1_000, "the room has no end"
        return sent

    def end(self, number):
        """End the oldest request of picker `number`."""
        position = next(at for at, (owner, _) in enumerate(self.leases) if owner == number)
        _, lease = self.leases.pop(position)
        self.schedulers[number].take(RequestEnded(lease, Outcome(status=200)), self.now)

    def tell(self, after_s=0.2):
        """Read a page, which confirms what peers report then."""
        self.now += after_s
        self.scrape()
        settle(self.now, *self.exchanges)

    def wait(self, number, waiting=1):
        self.schedulers[number].state.shares.waiting = waiting


@given(
    st.integers(1, 6),
    st.sampled_from([COUNTED, COUNTED_TOKENS]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_pickers_that_see_the_same_room_do_not_fill_it_several_times(count, flow, random):
    """None knows what the others send meanwhile. Each may send one request at least."""
    pickers = Pickers(count, flow)
    order = list(range(count))
    random.shuffle(order)
    sent = [pickers.fill(number) for number in order]
    assert min(sent) >= 1
    assert sum(sent) <= SLOTS + count - 1
    for _ in range(6):
        pickers.tell()
        for number in order:
            pickers.fill(number)
    assert SLOTS <= len(pickers.leases) <= SLOTS + count - 1


def test_the_requests_of_a_peer_count_once():
    """They are on the page of the endpoint too, which is no other client's then."""
    pickers = Pickers(2, FLOW)
    for _ in range(10):
        pickers.schedulers[0].schedule(request(prompt_tokens=1), 0.0)
    pickers.leases = [(0, None)] * 10
    for _ in range(3):
        pickers.tell()
    assert [learned_room(pickers, number).requests for number in (0, 1)] == [10, 10]


def test_learned_room_is_divided_between_pickers_that_wait():
    """The picker that has ten of the requests counts those that its peer may have as well."""
    pickers = Pickers(2, FLOW)
    pickers.wait(1)
    pickers.leases = [(0, pickers.schedulers[0].schedule(request(), 0.0).lease) for _ in range(10)]
    for _ in range(2):
        pickers.tell()
    assert [learned_room(pickers, number).requests for number in (0, 1)] == [20, 10]


def learned_room(pickers, number):
    scheduler = pickers.schedulers[number]
    ((_, candidates),) = scheduler.admission.of_stages(request(), pickers.now)
    (room,) = scheduler.state.gate.rooms.of(candidates)
    return room


@pytest.mark.parametrize("flow", [COUNTED, COUNTED_TOKENS], ids=["requests", "tokens"])
def test_a_picker_that_holds_all_room_leaves_it_to_a_peer_that_waits(flow):
    """Otherwise it would fill each place again that one of its requests leaves."""
    pickers = Pickers(2, flow)
    for _ in range(8):
        # It takes a part of the room that is left with each report.
        pickers.fill(0)
        pickers.tell()
    held = len(pickers.leases)
    assert held >= SLOTS
    pickers.wait(1)
    pickers.tell()
    for _ in range(held // 2 - 1):
        pickers.end(0)
        assert pickers.fill(0) == 0
        pickers.tell()
        assert pickers.fill(1) == 1
        pickers.tell()
    pickers.wait(1, 0)
    pickers.tell()
    pickers.end(0)
    assert pickers.fill(0) >= 1


@pytest.mark.parametrize("leaves", ["goodbye", "silence"])
def test_a_picker_has_all_room_and_limits_again_when_its_peer_is_gone(leaves):
    pickers = Pickers(2)
    one, other = pickers.exchanges
    shares = pickers.schedulers[0].state.shares
    pickers.wait(1)
    pickers.fill(1)
    pickers.tell()
    assert (shares.pickers, shares.pickers_waiting) == (2, 2)
    if leaves == "goodbye":
        one.receive(other.goodbye(pickers.now), pickers.now, other.origin)
    else:
        pickers.now += SILENT_S_MAX + HEARTBEAT_S
        one.tick(pickers.now)
    assert (shares.pickers, shares.pickers_waiting) == (1, 1)
    pickers.leases = []
    assert pickers.fill(0) == SLOTS


def test_a_peer_whose_request_ends_wakes_the_queue():
    """And a peer that reports nothing new does not."""
    pickers = Pickers(2)
    pickers.fill(0)
    pickers.tell(HEARTBEAT_S)
    pickers.tell(0.02)
    woken = []
    pickers.schedulers[1].changed = lambda: woken.append(pickers.now)
    settle(pickers.now, *pickers.exchanges)
    assert not woken
    pickers.end(0)
    settle(pickers.now, *pickers.exchanges)
    assert woken


def test_charges_of_one_picker_reach_the_queue_of_the_other():
    pickers = Pickers(2)
    first, second = (scheduler.state.shares for scheduler in pickers.schedulers)
    first.charge(7, 12.5)
    pickers.tell()
    assert second.take_fresh() == {7: 12.5}
    pickers.tell()
    assert second.take_fresh() == {}


def test_impossible_totals_are_ignored():
    totals = [(1, 5.0), (2, -1.0), (3, np.nan), (4, np.inf), (5, 1e13)]
    blob = np.array(totals, dtype=CHARGE).tobytes()
    assert charges_of(blob + b"rest") == {1: 5.0}


def test_a_picker_of_an_older_release_sends_no_charges():
    """Its frames end before them."""
    pickers = Pickers(2)
    frame = pickers.exchanges[0]._frame(0, 0.5, whole=True)
    older = structs.replace(frame, charges=b"", waits=False)
    assert pickers.exchanges[1]._queue.take(older)
    assert pickers.schedulers[1].state.shares.take_fresh() == {}
