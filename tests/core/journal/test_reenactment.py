"""What was captured is decided again: the same, and if it is not, it is said why."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from epp.core.decision.inputs import (
    EventsHeard,
    EventsVoided,
    PageScraped,
    ServedBy,
    StreamChanged,
)
from epp.core.decision.scheduler import Decision
from epp.core.journal.events import Learnt, Lost, Opened, Scheduled, Streamed, Told, Voided
from epp.core.journal.reenactment import Difference, Reenactment
from epp.core.knowledge import hit_accuracy
from epp.core.kv_events.payload import Cleared, Removed, Stored
from epp.core.kv_events.stream import StreamState
from epp.core.moment import Moment
from epp.core.types import ApiKind, EndpointMetrics
from epp.journal.frames import frame_of, record_of_frame
from tests.builders import request
from tests.core.journal.traffic import Live, document, settings_of

PICKERS = ("max-score-picker", "random-picker", "weighted-random-picker")


def read(live):
    """Return the events as they come from a file."""
    return [record_of_frame(frame_of(event)) for event in live.events]


def done_again(events, of=settings_of):
    again = Reenactment(of)
    for event in events:
        again.feed(event)
    return again


def shapes(events):
    return [event.shape for event in events if isinstance(event, Scheduled)]


def reshaped(events, **fields):
    """Return the events with other requests."""
    return [
        replace(event, shape=replace(event.shape, **fields))
        if isinstance(event, Scheduled)
        else event
        for event in events
    ]


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(PICKERS))
def test_every_decision_is_the_same_again(seed, picker):
    """Dice, restarts, refusals, moves, reloads and dead endpoints included."""
    live = Live(document(picker=picker), seed=seed)
    live.run(150)
    live.configure(document(picker=picker, weight=7))
    live.run(100)
    result = done_again(read(live)).result
    assert result.decisions == len(live.decisions) == 250
    assert result.same == result.decisions, result.first
    assert result.caveats() == []


PREDICTING = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: added-time-scorer
- type: latency-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: latency-scorer}
  - {pluginRef: max-score-picker}
"""


class Limiting(Live):
    """A picker that predicts latencies, and clients that ask for limits."""

    def ask(self, **fields):
        limits_ms = self.random.choice([{}, {"ttft": 33.3}, {"ttft": 250, "tpot": 12.345678}])
        headers = {f"x-llm-d-slo-{name}-ms": str(limit) for name, limit in limits_ms.items()}
        return super().ask(headers=headers | {"x-secret": "of a client"}, stream=True, **fields)


def test_the_latencies_that_clients_ask_for_decide_again():
    """They are in the journal as numbers, and other headers are not."""
    live = Limiting(PREDICTING)
    live.run(200)
    events = read(live)
    assert {(shape.ttft_slo_s, shape.tpot_slo_s) for shape in shapes(events)} == {
        (None, None),
        (33.3 / 1000.0, None),
        (0.25, 12.345678 / 1000.0),
    }
    assert "of a client" not in repr(events)
    result = done_again(events).result
    assert result.same == result.decisions == 200, result.first
    without = done_again(reshaped(events, ttft_slo_s=None, tpot_slo_s=None)).result
    assert without.same < without.decisions


class Counting(Live):
    """Whose engines count, and find less than is believed."""

    def scrape(self):
        sent = len(self.decisions)
        page = EndpointMetrics(
            waiting_requests=0.0,
            cache_queried_tokens=1_000.0 * sent,
            cache_hit_tokens=100.0 * sent,
            ttft_count=float(sent),
        )
        for slot, _ in self.scheduler.pool.endpoints():
            self.scheduler.take(PageScraped(slot, page), self.now)


def test_corrections_by_engines_are_the_same_again(monkeypatch):
    monkeypatch.setattr(hit_accuracy, "WINDOW_S_MIN", 1.0)
    producer = (
        "- type: approx-prefix-cache-producer\n"
        "  parameters: {correctByEngine: true, autoTune: false, lruCapacityPerServer: 100}\n"
    )
    live = Counting(document().replace("plugins:\n", "plugins:\n" + producer, 1))
    live.begin(1)
    live.now = 0.1
    for _ in range(3):
        live.run(100, endpoints=1)
    again = done_again(read(live))
    (was,), (now,) = (
        [index.capacity_blocks(0) for index in scheduler.indexes.values()]
        for scheduler in (live.scheduler, again.scheduler)
    )
    assert was == now < 100
    assert again.result.same == again.result.decisions == 300
    sizes = [dict(one.accuracy.models()) for one in (live.scheduler, again.scheduler)]
    assert sizes[0] == sizes[1]


def test_the_same_state_is_reached():
    """What is in flight at the end is what was."""
    live = Live(document())
    live.run(200)
    again = done_again(read(live))
    for name in ("inflight_requests", "unreported_requests", "prefill_backlog_tokens"):
        was = getattr(live.scheduler.pool.columns, name).tolist()
        assert getattr(again.scheduler.pool.columns, name).tolist() == was
    assert again.scheduler.ledger.open_leases == live.scheduler.ledger.open_leases


def test_several_prompts_and_a_subset_are_the_same_again():
    """Each prompt has its chain; what the gateway allowed is told by slot."""
    live = Live(document())
    live.begin(4)
    for number in range(40):
        live.now += 0.1
        live.scrape()
        prompts = tuple(b"%d" % ((number + at) % 5) * 900 for at in range(3))
        allowed = ("192.168.1.2", "192.168.1.3:8000", "no such") if number % 2 else None
        live.ask(prompts=prompts, prompt_tokens=675, subset=allowed)
    result = done_again(read(live)).result
    assert (result.decisions, result.same) == (40, 40)


def test_other_weights_would_have_decided_otherwise():
    """Each decision is judged by what the live picker knew, so differences do not add up."""
    live = Live(document(weight=2))
    live.run(300)
    events = read(live)

    def without_queues(configured):
        return settings_of(replace(configured, document=document(weight=0)))

    result = done_again(events, without_queues).result
    assert result.decisions == 300
    assert 0 < result.changed < 200
    assert set(result.differences) == {Difference.CHOICE}
    assert len(result.first) == 10


def test_a_request_that_only_one_refused_is_told_as_that():
    """Not as a difference between the endpoints that were ready."""
    live = Live(document())
    live.begin(2)
    live.scrape()
    live.ask(priority=0)
    refused = [
        replace(event, slot=-1, decision=0, refused="rejected-no-endpoints")
        if isinstance(event, Scheduled)
        else event
        for event in read(live)
    ]
    assert done_again(refused).result.differences == {Difference.REFUSAL: 1}


def test_a_missing_past_is_named():
    """In the second segment alone, pool and pages are there, and the index is empty."""
    live = Live(document())
    live.run(200)
    live.events.clear()
    live.begin_segment()
    live.run(100)
    result = done_again(read(live)).result
    assert result.decisions == 100
    assert result.begins_late
    assert Difference.KNOWLEDGE in result.differences
    assert any("index begins empty" in sentence for sentence in result.caveats())


def test_a_gap_between_segments_is_not_a_late_beginning():
    """The capture begins with the picker; only its second segment is missing."""
    live = Live(document())
    live.run(50)
    first = len(read(live))
    for _ in range(2):
        live.begin_segment()
        live.run(50)
    events = read(live)
    third = max(at for at, event in enumerate(events) if isinstance(event, Opened))
    again = done_again([*events[:first], *events[third:]]).result
    assert (again.gaps, again.begins_late) == (1, False)
    assert "1 segments are missing" in again.caveats()


def test_what_is_missing_is_counted():
    """A request without its shape, records that were dropped, and records of peers."""
    live = Live(document())
    live.run(50)
    events = read(live)
    place = next(at for at, event in enumerate(events) if getattr(event, "request", -1) == 7)
    events[place] = replace(events[place], shape=None)
    again = done_again([*events, Lost(events=3), Learnt(records=2)])
    told = " / ".join(again.result.caveats())
    assert "1 decisions are left out" in told
    assert "3 events are missing" in told
    assert "2 records shared by peers" in told


def test_events_before_any_configuration_are_lost():
    """Nothing can be decided by them."""
    live = Live(document())
    live.run(10)
    events = read(live)
    again = done_again(events[2:])
    assert again.scheduler is None
    assert again.result.lost == len(events) - 2


@pytest.mark.parametrize(("tokens", "changed"), [(128, False), (96, True)])
def test_an_index_of_longer_blocks_reads_every_so_many_hashes(tokens, changed):
    """Chained hashes of 64 tokens hold those of 128; of 96 they do not, and that is said."""
    live = Live(document())
    live.begin(3)
    live.scrape()
    for _ in range(2):
        live.ask(prompts=(b"x" * 64 * 4 * 8,), prompt_tokens=512, model="base")
    events = read(live)

    def longer(configured):
        index = f"plugins:\n- type: approx-prefix-cache-producer\n  parameters: {{blockSizeTokens: {tokens}}}"
        text = configured.document.replace("plugins:", index, 1)
        return settings_of(replace(configured, document=text))

    again = done_again(events, longer)
    assert again.result.coarse is changed
    held = again.scheduler.indexes["approx-prefix-cache-producer"]
    assert held.entries == (0 if changed else 4)


def test_a_share_takes_whole_conversations():
    """All turns or none, and about as many as were asked for."""
    live = Live(document(), share=0.3)
    live.begin(3)
    live.scrape()
    for turn in range(3):
        for user in range(200):
            live.ask(session_id=f"user {user}", prompts=(b"turn %d " % turn * 100,))
    events = read(live)
    sessions = {}
    for shape in shapes(events):
        sessions[shape.session] = sessions.get(shape.session, 0) + 1
    assert set(sessions.values()) == {3}
    assert 35 < len(sessions) < 85
    assert done_again(events).result.share == 0.3


def test_without_a_session_the_conversation_stays_together():
    """The opening is the same at each turn, though the first block is everybody's."""
    live = Live(document(), share=0.5)
    live.begin(3)
    live.scrape()
    system = b"s" * 900
    prompts = [(system + b"%d" % user * 50) for user in range(80)]
    taken = [
        {
            live.witness._sample.takes("", live_request(prompt + b"more " * 40 * turn), 256)
            for turn in range(3)
        }
        for prompt in prompts
    ]
    assert all(len(one) == 1 for one in taken)


def live_request(prompt):
    return request(api=ApiKind.COMPLETIONS, prompts=(prompt,))


def test_a_witness_that_fails_costs_no_decision():
    """It is told of once, and nothing more is told to it."""
    live = Live(document())
    live.run(20)
    told = []
    live.witness._witness_failed = told.append

    def broken(note):
        raise OSError("no")

    live.witness._tell = broken
    live.run(30)
    assert [type(error) for error in told] == [OSError]
    assert len(live.decisions) == 50
    assert all(isinstance(one, Decision) for one in live.decisions[20:25])
    assert not live.witness._numbers


def engines_tell(text):
    """The same document, whose index engines tell."""
    told = "{tokenProcessorConfig: {blockSizeTokens: 64}, speculativeIndexing: false}"
    producer = f"- {{type: precise-prefix-cache-producer, parameters: {told}}}\n"
    return text.replace("- type: prefix-cache-scorer\n", f"{producer}- type: prefix-cache-scorer\n")


def test_prompts_are_as_long_again_as_their_ids_said():
    """Of few bytes a token and of many, and of prompts whose tokens nobody found out."""
    live = Live(engines_tell(document()))
    live.begin(3)
    for slot in range(3):
        live.scheduler.take(StreamChanged(slot, StreamState.LIVE, complete=True), live.now)
    for number in range(60):
        live.now += 0.1
        ids = struct.pack("<350I", *[number % 7] * 350)
        text = bytes([number % 7]) * 350 * (2, 4, 9)[number % 3]
        found = (ids,) if number % 5 else ()
        decision = live.ask(
            prompts=(text,),
            prompt_tokens=len(text) // 4,
            moment=Moment(token_ids=found),
            model="base",
            priority=0,
        )
        stored = Stored(
            hashes=[1_000 * number + at for at in range(5)],
            tokens=ids[: 5 * 64 * 4],
            block_tokens=64,
        )
        live.scheduler.take(EventsHeard(decision.lease.slot, (stored,)), live.now)
        if number % 4 == 3:
            other = live.endpoint((decision.lease.slot + 1) % 3)
            live.scheduler.take(ServedBy(decision.lease, other.address), live.now)
    events = read(live)
    told = {(shape.prompt_tokens, shape.known_tokens) for shape in shapes(events)}
    assert told == {(175, 350), (350, 0), (787, 350), (175, 0), (787, 0)}
    again = done_again(events)
    assert (again.result.decisions, again.result.same) == (60, 60), again.result.first
    columns, those = live.scheduler.pool.columns, again.scheduler.pool.columns
    assert those.inflight_context_tokens.tolist() == columns.inflight_context_tokens.tolist()
    backlogs = those.prefill_backlog_tokens.tolist(), columns.prefill_backlog_tokens.tolist()
    assert backlogs[0] == backlogs[1]


def test_what_engines_said_is_done_again():
    """In keys that no token can be told from; without it the index would know nothing."""
    live = Live(engines_tell(document()))
    live.begin(3)
    for slot in range(3):
        for rank in range(slot + 1):
            told = StreamChanged(slot, StreamState.LIVE, complete=True, rank=rank)
            live.scheduler.take(told, live.now)
    matched = 0
    for number in range(80):
        live.now += 0.1
        live.scrape()
        ids = struct.pack("<350I", *[number % 7] * 350)
        decision = live.ask(api=ApiKind.TOKENS, prompts=(ids,), prompt_tokens=350, priority=0)
        matched += decision.leg.matched_blocks
        hashes = [1_000 * number + at for at in range(5)]
        stored = Stored(hashes=hashes, tokens=ids[: 5 * 64 * 4], block_tokens=64)
        slot = number % 3
        live.scheduler.take(EventsHeard(slot, (stored,), number % (slot + 1)), live.now)
        if number % 5 == 4:
            gone = Removed([1_000 * (number - 3) + 4, 1_000 * (number - 3) + 3])
            slot = (number - 3) % 3
            live.scheduler.take(EventsHeard(slot, (gone,), (number - 3) % (slot + 1)), live.now)
        if number % 20 == 19:
            live.scheduler.take(EventsHeard(1, (Cleared(),), rank=1), live.now)
        if number % 30 == 29:
            live.scheduler.take(EventsVoided(2, rank=2), live.now)
    assert matched > 50
    events = read(live)
    result = done_again(events).result
    assert (result.decisions, result.same) == (80, 80), result.first
    told = {type(event) for event in events}
    assert {Told, Streamed, Voided} <= told
    looked_up = [bool(shape.token_chains) for shape in shapes(events)]
    # Adapters are served there: a name is another until an engine holds what was asked under it.
    assert 0 < looked_up.count(False) < 5
    without = [event for event in events if not isinstance(event, Told)]
    assert Difference.KNOWLEDGE in done_again(without).result.differences


def test_where_an_image_went_is_done_again():
    """By hashes that nobody can look up; without them the index would know nothing."""
    text = document().replace(
        "- type: queue-scorer\n", "- type: queue-scorer\n- type: mm-embeddings-cache-scorer\n"
    )
    text = text.replace(
        "  - {pluginRef: queue",
        "  - {pluginRef: mm-embeddings-cache-scorer, weight: 9}\n  - {pluginRef: queue",
    )
    live = Live(text)
    live.begin(4)
    for number in range(60):
        live.now += 0.1
        live.scrape()
        shown = b"image_url\xfa%032x\xfd" % (number * number % 7 << 96)
        live.ask(api=ApiKind.CHAT, prompts=(shown + b"what is it?\xf8",), priority=0)
    events = read(live)
    result = done_again(events).result
    assert (result.decisions, result.same) == (60, 60), result.first
    assert {len(shape.media) for shape in shapes(events)} == {8}
    assert done_again(reshaped(events, media=b"")).result.changed > 10
