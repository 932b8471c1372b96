"""The learned room of an endpoint, and the sentence that explains it."""

import math

import pytest

from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.core.flow.rooms import QUEUE_MIN, SLOTS_ASSUMED, RoomOf
from epp.core.flow.settings import FlowSettings
from epp.core.types import EndpointMetrics
from tests.builders import endpoint, request
from tests.core.protocol.test_flow_queue import scheduler_settings


class Learned:
    """The room of one endpoint as its pages come every 0.2 s."""

    def __init__(self):
        self.scheduler = Scheduler(scheduler_settings(flow=FlowSettings()), seed=1)
        self.scheduler.take(PoolReplaced([endpoint()]), 0.0)
        self.now = 0.0
        self.page()

    def page(self, running=0.0, waiting=0.0, usage=0.0):
        self.now += 0.2
        metrics = EndpointMetrics(
            running_requests=running,
            waiting_requests=waiting,
            kv_cache_usage=usage,
            block_size_tokens=16,
            blocks_total=10_000,
        )
        self.scheduler.take(PageScraped(0, metrics), self.now)

    @property
    def room(self):
        ((_, candidates),) = self.scheduler.admission.of_stages(request(), self.now)
        (room,) = self.scheduler.state.gate.rooms.of(candidates)
        return room

    def send(self, **fields):
        return self.scheduler.schedule(request(**fields), self.now)


def test_the_default_of_the_engine_is_assumed_first():
    room = Learned().room
    assert (room.slots, room.queue, room.load) == (SLOTS_ASSUMED, QUEUE_MIN, 0.0)


def test_two_pages_with_a_queue_and_as_many_running_show_the_slots():
    learned = Learned()
    learned.page(running=16, waiting=3)
    assert learned.room.slots == SLOTS_ASSUMED
    learned.page(running=16, waiting=1)
    assert learned.room.slots == 16


def test_a_queue_while_the_batch_grows_shows_no_slots():
    """The requests wait for the prefill of others."""
    learned = Learned()
    for running in (4, 9, 17, 30):
        learned.page(running=running, waiting=20)
    assert learned.room.slots == SLOTS_ASSUMED


def test_slots_grow_again_if_all_run_without_a_queue():
    learned = Learned()
    for waiting in (1, 1, 0):
        learned.page(running=16, waiting=waiting)
    assert learned.room.slots == 21


def test_own_requests_count_before_the_next_page():
    learned = Learned()
    learned.page(running=16, waiting=1)
    learned.page(running=16, waiting=1)
    before = learned.room.more
    learned.send()
    assert learned.room.more == before - 1


def test_requests_of_other_clients_count_if_two_pages_show_them():
    learned = Learned()
    learned.page(running=7)
    assert learned.room.requests == 0
    learned.page(running=7)
    assert learned.room.requests == 7


def test_tokens_that_were_sent_use_the_cache_before_the_next_page():
    learned = Learned()
    learned.page(usage=0.5)
    learned.send(prompt_tokens=16_000)
    expected = 0.5 + (16_000 + 256) / 160_000
    assert learned.room.kv_share == pytest.approx(expected)


def test_prefill_tokens_are_limited_to_what_is_computed_between_two_pages():
    learned = Learned()
    assert learned.scheduler.admission.has_room(request(), learned.now)
    learned.send(prompt_tokens=100_000)
    assert learned.room.load > 1.0
    assert not learned.scheduler.admission.has_room(request(), learned.now)
    assert learned.scheduler.admission.has_room(request(), learned.now + 10.0), "they drain"


def test_a_long_prompt_is_placed_at_an_idle_endpoint():
    learned = Learned()
    assert learned.scheduler.admission.has_room(request(prompt_tokens=10**6), learned.now)


@pytest.mark.parametrize(
    ("room", "sentence"),
    [
        (
            {"requests": 14, "load": 0.7},
            "pod-3 has room for 2 more requests: 14 of 16 slots, 61 % of KV",
        ),
        ({"requests": 16, "load": 1.0}, "pod-3 is full: 16 of 16 slots, 61 % of KV"),
        (
            {"requests": 3, "load": 2.0},
            "pod-3 is full: 4000 of 2000 prefill tokens are pending, 3 of 16 slots, 61 % of KV",
        ),
        (
            {"requests": 3, "load": 1.2, "kv_share": 1.2},
            "pod-3 is full, because its requests will need its whole KV cache: 3 of 16 slots, 120 % of KV",
        ),
        ({"requests": 1, "load": 0.1, "kv_share": math.nan}, "pod-3 has room for 15 more requests: 1 of 16 slots"),
    ],
)  # fmt: skip
def test_one_sentence_says_what_there_is_room_for(room, sentence):
    usual = {
        "slots": 16,
        "queue": 0,
        "kv_share": 0.61,
        "prefill_tokens": 4000,
        "prefill_tokens_max": 2000,
    }
    assert RoomOf(**(usual | room)).sentence("pod-3") == sentence
