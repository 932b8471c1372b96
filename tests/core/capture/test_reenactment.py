"""What was captured is decided again: the same, and if it is not, it is said why."""

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.capture.events import Event, Learnt, Lost, Streamed, Told, Voided
from epp.core.capture.lines import CaptureLine
from epp.core.capture.reenactment import Difference, Reenactment
from epp.core.decision.inputs import (
    EventsHeard,
    EventsVoided,
    PageScraped,
    ServedBy,
    StreamChanged,
)
from epp.core.decision.scheduler import Decision
from epp.core.knowledge import hit_accuracy
from epp.core.kv_events.payload import Cleared, Removed, Stored
from epp.core.kv_events.stream import StreamState
from epp.core.moment import Moment
from epp.core.types import ApiKind, EndpointMetrics
from tests.builders import request
from tests.core.capture.traffic import Live, document, settings_of

PICKERS = ("max-score-picker", "random-picker", "weighted-random-picker")


def read(transcript):
    """Events and lines by number, through the bytes."""
    transcript.finish()
    requests, events = transcript.take()
    lines = [msgspec.json.decode(line, type=CaptureLine) for line in requests.splitlines()[1:]]
    return (
        [msgspec.json.decode(line, type=Event) for line in events.splitlines()],
        {line.request: line for line in lines},
    )


def done_again(events, lines, of=settings_of):
    again = Reenactment(of)
    for event in events:
        again.feed(event, lines.get(getattr(event, "request", None)))
    return again


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(PICKERS))
def test_every_decision_is_the_same_again(seed, picker):
    """Dice, restarts, refusals, moves, reloads and dead endpoints included."""
    live = Live(document(picker=picker), seed=seed)
    live.run(150)
    live.configure(document(picker=picker, weight=7))
    live.run(100)
    result = done_again(*read(live.transcript)).result
    assert result.decisions == len(live.decisions) == 250
    assert result.same == result.decisions, result.first
    assert result.caveats() == []


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
    again = done_again(*read(live.transcript))
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
    again = done_again(*read(live.transcript))
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
    result = done_again(*read(live.transcript)).result
    assert (result.decisions, result.same) == (40, 40)


def test_other_weights_would_have_decided_otherwise():
    """Each decision is judged by what the live picker knew, so differences do not add up."""
    live = Live(document(weight=2))
    live.run(300)
    events, lines = read(live.transcript)

    def without_queues(configured):
        return settings_of(msgspec.structs.replace(configured, document=document(weight=0)))

    result = done_again(events, lines, without_queues).result
    assert result.decisions == 300
    assert 0 < result.changed < 200
    assert set(result.differences) == {Difference.CHOICE}
    assert len(result.first) == 10


def test_a_missing_past_is_named():
    """The second file alone: pool and pages are there, the index is empty."""
    live = Live(document())
    live.run(200)
    live.transcript.finish()
    live.transcript.take()
    live.transcript.begin_file(live.now)
    live.run(100)
    result = done_again(*read(live.transcript)).result
    assert result.decisions == 100
    assert result.begins_late
    assert Difference.KNOWLEDGE in result.differences
    assert any("index begins empty" in sentence for sentence in result.caveats())


def test_a_second_file_goes_on_where_the_first_ended():
    """What is repeated at its beginning is not done twice."""
    live = Live(document())
    live.run(120)
    first = live.transcript.take()
    live.transcript.begin_file(live.now)
    live.run(120)
    live.transcript.finish()
    second = live.transcript.take()
    events, lines = [], {}
    for requests, told in (first, second):
        events += [msgspec.json.decode(line, type=Event) for line in told.splitlines()]
        for line in requests.splitlines()[1:]:
            found = msgspec.json.decode(line, type=CaptureLine)
            lines[found.request] = found
    result = done_again(events, lines).result
    assert (result.decisions, result.same) == (240, 240)


def test_what_is_missing_is_counted():
    """A request without its line, events that were dropped, peers."""
    live = Live(document())
    live.run(50)
    events, lines = read(live.transcript)
    del lines[7]
    again = done_again([*events, Lost(events=3), Learnt(records=2)], lines)
    told = " / ".join(again.result.caveats())
    assert "1 decisions are left out" in told
    assert "3 events are missing" in told
    assert "2 records shared by peers" in told


def test_events_before_any_configuration_are_lost():
    """Nothing can be decided by them."""
    live = Live(document())
    live.run(10)
    events, lines = read(live.transcript)
    again = done_again(events[2:], lines)
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
    events, lines = read(live.transcript)

    def longer(configured):
        index = f"plugins:\n- type: approx-prefix-cache-producer\n  parameters: {{blockSizeTokens: {tokens}}}"
        text = configured.document.replace("plugins:", index, 1)
        return settings_of(msgspec.structs.replace(configured, document=text))

    again = done_again(events, lines, longer)
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
    events, lines = read(live.transcript)
    sessions = {}
    for line in lines.values():
        sessions[line.session] = sessions.get(line.session, 0) + 1
    assert set(sessions.values()) == {3}
    assert 35 < len(sessions) < 85
    assert done_again(events, lines).result.share == 0.3


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
    events, lines = read(live.transcript)
    told = {(line.prompt_tokens, line.known_tokens) for line in lines.values()}
    assert told == {(175, 350), (350, 0), (787, 350), (175, 0), (787, 0)}
    again = done_again(events, lines)
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
    events, lines = read(live.transcript)
    result = done_again(events, lines).result
    assert (result.decisions, result.same) == (80, 80), result.first
    told = {type(event) for event in events}
    assert {Told, Streamed, Voided} <= told
    looked_up = [bool(line.token_blocks) for line in lines.values()]
    # Adapters are served there: a name is another until an engine holds what was asked under it.
    assert 0 < looked_up.count(False) < 5
    without = [event for event in events if not isinstance(event, Told)]
    assert Difference.KNOWLEDGE in done_again(without, lines).result.differences


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
    events, lines = read(live.transcript)
    result = done_again(events, lines).result
    assert (result.decisions, result.same) == (60, 60), result.first
    assert {len(line.media) for line in lines.values()} == {8}
    for line in lines.values():
        line.media = b""
    assert done_again(events, lines).result.changed > 10
