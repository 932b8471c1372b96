"""The learned room of an endpoint, and the sentence that explains it."""

import math

import pytest

from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.core.flow.rooms import (
    KV_FULL,
    OUTRANKED_FACTOR,
    QUEUE_MIN,
    SLOTS_ASSUMED,
    Lead,
    RoomOf,
)
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings
from epp.core.knowledge.inflight import ARRIVAL_S_PER_TOKEN
from epp.core.types import AdapterReport, EndpointMetrics
from tests.builders import endpoint, request
from tests.core.protocol.test_flow_queue import scheduler_settings

FAIR = FlowSettings(default_band=BandSettings(fairness=Fairness.TOKENS))


class Learned:
    """The room of one endpoint as its pages come every 0.2 s."""

    def __init__(self):
        self.scheduler = Scheduler(scheduler_settings(flow=FAIR), seed=1)
        self.scheduler.take(PoolReplaced([endpoint()]), 0.0)
        self.now = 0.0
        self.interval_s = 0.2
        self.page()

    def page(self, running=0.0, waiting=0.0, usage=0.0, **fields):
        self.now += self.interval_s
        metrics = EndpointMetrics(
            running_requests=running,
            waiting_requests=waiting,
            kv_cache_usage=usage,
            block_size_tokens=16,
            blocks_total=10_000,
            **fields,
        )
        self.scheduler.take(PageScraped(0, metrics), self.now)

    def queue_for_slots(self, running=16, pages=4, usage=0.0, **fields):
        """Let pages show that as many requests run, none computes its prompt, and others wait."""
        for _ in range(pages):
            self.page(running, 2, usage, first_outputs_total=running, answers_total=0, **fields)

    @property
    def room(self):
        ((_, candidates),) = self.scheduler.admission.of_stages(request(), self.now)
        (room,) = self.scheduler.state.gate.rooms.of(candidates)
        return room

    def has_room(self, after_s=0.0, **fields):
        return self.scheduler.admission.has_room(request(**fields), self.now + after_s)

    def compete(self):
        """Let two flows compete, and the endpoint be full for a while."""
        gate = self.scheduler.state.gate
        gate.rivalry.met("a", 0, self.now)
        gate.rivalry.met("b", 0, self.now)
        gate.look_again()
        assert gate.rivalry.is_alone(request(), self.now) is False
        gate.rivalry.holding = True

    def send(self, **fields):
        return self.scheduler.schedule(request(**fields), self.now)


def test_the_default_of_the_engine_is_assumed_first():
    room = Learned().room
    assert (room.slots, room.queue, room.load) == (SLOTS_ASSUMED, QUEUE_MIN, 0.0)


def test_a_queue_while_no_prompt_is_computed_shows_the_slots():
    learned = Learned()
    learned.queue_for_slots(pages=3)
    assert learned.room.slots == SLOTS_ASSUMED
    learned.queue_for_slots(pages=1)
    assert learned.room.slots == 16


def test_a_queue_while_as_many_requests_begin_as_end_shows_the_slots():
    learned = Learned()
    for begun in range(16, 20):
        learned.page(running=16, waiting=2, first_outputs_total=begun)
    assert learned.room.slots == 16


def test_a_queue_behind_a_long_prompt_shows_no_slots():
    learned = Learned()
    for _ in range(10):
        learned.page(running=16, waiting=2, first_outputs_total=15, answers_total=0)
    assert learned.room.slots == SLOTS_ASSUMED


def test_a_queue_of_requests_that_wait_for_their_adapter_shows_no_slots():
    three = AdapterReport(active=frozenset("abc"), slots_max=2)
    learned = Learned()
    learned.queue_for_slots(adapters=three)
    assert learned.room.slots == SLOTS_ASSUMED
    learned.queue_for_slots(adapters=AdapterReport(active=frozenset("ab"), slots_max=2))
    assert learned.room.slots == 16


def test_a_queue_while_all_places_of_adapters_are_taken_shows_no_slots():
    learned = Learned()
    full = AdapterReport(gpu=frozenset("ab"), slots_max=2, resident_known=True)
    learned.queue_for_slots(adapters=full)
    assert learned.room.slots == SLOTS_ASSUMED


def test_a_queue_for_memory_shows_no_slots():
    learned = Learned()
    learned.queue_for_slots(usage=KV_FULL)
    assert learned.room.slots == SLOTS_ASSUMED


def test_fewer_running_requests_than_before_are_not_the_slots():
    learned = Learned()
    learned.page(running=20)
    learned.queue_for_slots(running=16)
    assert learned.room.slots == SLOTS_ASSUMED


def test_pages_in_quick_succession_show_no_slots():
    """All of them may be read during one pass of the engine."""
    learned = Learned()
    learned.interval_s = 0.01
    learned.queue_for_slots(pages=10)
    assert learned.room.slots == SLOTS_ASSUMED


def test_a_queue_while_the_batch_grows_shows_no_slots():
    """The requests wait for the prefill of others."""
    learned = Learned()
    for running in (4, 9, 17, 30):
        learned.page(running=running, waiting=20)
    assert learned.room.slots == SLOTS_ASSUMED


def test_slots_are_forgotten_if_more_requests_run():
    learned = Learned()
    learned.queue_for_slots()
    learned.page(running=17)
    assert learned.room.slots == SLOTS_ASSUMED


def test_slots_that_are_used_without_a_queue_stay():
    learned = Learned()
    learned.queue_for_slots()
    learned.page(running=16)
    assert learned.room.slots == 16


def test_assumed_slots_grow_if_more_requests_run():
    learned = Learned()
    learned.page(running=400)
    assert learned.room.slots == 500


def test_own_requests_count_before_the_next_page():
    learned = Learned()
    learned.queue_for_slots()
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


def test_prompts_that_wait_in_the_engine_will_need_its_cache():
    learned = Learned()
    learned.send(prompt_tokens=100_000)
    learned.page(usage=0.2)
    assert learned.room.kv_share == pytest.approx(0.2 + 100_000 / 160_000, abs=0.05)


def test_prefill_tokens_are_limited_while_flows_compete():
    learned = Learned()
    learned.compete()
    assert learned.has_room()
    learned.send(prompt_tokens=100_000)
    assert learned.room.load > 1.0
    assert not learned.has_room()
    assert learned.has_room(after_s=10.0), "they drain"


def test_a_long_prompt_is_sent_earlier_because_it_takes_longer_to_arrive():
    learned = Learned()
    learned.page()
    learned.compete()
    learned.send(prompt_tokens=12_000)
    lead_s = learned.interval_s / 2.0
    longer_s = (learned.room.prefill_tokens / learned.room.prefill_tokens_max - 1.0) * lead_s
    assert not learned.has_room()
    assert not learned.has_room(prompt_tokens=int(0.9 * longer_s / ARRIVAL_S_PER_TOKEN))
    assert learned.has_room(prompt_tokens=int(1.1 * longer_s / ARRIVAL_S_PER_TOKEN))


def test_prefill_tokens_are_not_limited_while_nobody_competes():
    learned = Learned()
    learned.send(prompt_tokens=100_000)
    assert learned.has_room()
    learned.send(prompt_tokens=100_000)
    assert not learned.has_room(), "both prompts do not fit into the KV cache"


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


def test_a_part_of_the_cache_stays_free_for_higher_priorities():
    learned = Learned()
    rivalry = learned.scheduler.state.gate.rivalry
    learned.page(usage=0.97)
    assert learned.has_room(priority=0)
    rivalry.met("", 1, learned.now)
    rivalry.met("", 0, learned.now)
    learned.scheduler.state.gate.look_again()
    rivalry.holding = True
    assert not learned.has_room(priority=0)
    assert learned.has_room(priority=1)


@pytest.mark.parametrize(("pickers", "usage"), [(1, 0.951), (3, 0.851), (5, 0.751), (50, 0.751)])
def test_each_picker_keeps_a_part_of_the_cache_free(pickers, usage):
    """Pickers send at once what each has seen room for."""
    learned = Learned()
    learned.scheduler.state.shares.pickers = pickers
    rivalry = learned.scheduler.state.gate.rivalry
    rivalry.met("", 1, learned.now)
    rivalry.met("", 0, learned.now)
    rivalry.holding = True
    for used, room in ((usage - 0.002, True), (usage, False)):
        learned.page(usage=used)
        learned.scheduler.state.gate.look_again()
        assert learned.has_room(prompt_tokens=1) is room
        assert learned.has_room(priority=1, prompt_tokens=1)


@pytest.mark.parametrize(("pickers", "factor"), [(1, 1.0), (2, OUTRANKED_FACTOR)])
def test_several_pickers_send_fewer_prompts_of_lower_priority(pickers, factor):
    learned = Learned()
    learned.scheduler.state.shares.pickers = pickers
    gate = learned.scheduler.state.gate
    ((_, candidates),) = learned.scheduler.admission.of_stages(request(), learned.now)
    (usual,) = gate.rooms.of(candidates, Lead())
    (outranked,) = gate.rooms.of(candidates, Lead(outranked=True))
    assert outranked.prefill_tokens_max == pytest.approx(factor * usual.prefill_tokens_max)
