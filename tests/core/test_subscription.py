"""Engines, publishers and subscriptions against each other, over a pipe that loses and repeats frames."""

from collections import deque
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import BlocksChanged, PageScraped, PoolReplaced, Tick
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.exact import ExactIndexSettings
from epp.core.knowledge.exact_parameters import TokenProcessorConfig
from epp.core.knowledge.index import EXACT
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import DEVICE, Fault
from epp.core.kv_events.stream import REPLAYS_MAX, REPLAYS_S, AskReplay, StreamState
from epp.core.subscription import Subscription
from epp.core.types import EndpointMetrics, MetricsTarget
from epp.testing.builders import loaded_adapters
from tests.builders import endpoint, request
from tests.core.kv_events.publisher import FakeEngine, FakePublisher

BLOCK = 16
INDEX = "precise-prefix-cache-producer"


def packed(tokens):
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def asked(tokens):
    return request(token_ids=(packed(tokens),))


def scheduler_of(pods=1):
    """Whose index engines tell."""
    made = build_settings(default_config(plugin_tables()))
    exact = ExactIndexSettings(
        token_processor_config=TokenProcessorConfig(block_size_tokens=BLOCK),
        speculative_indexing=False,
    )
    made = msgspec.structs.replace(
        made, indexes={INDEX: exact}, prefix=INDEX, joined=(INDEX,), block_tokens=BLOCK
    )
    scheduler = Scheduler(made, seed=1)
    pool = [endpoint(at, metrics=MetricsTarget(port=1)) for at in range(pods)]
    scheduler.take(PoolReplaced(pool), 0.0)
    return scheduler


class Pod:
    """One engine, what it publishes, and who listens."""

    def __init__(self, *, blocks=12, kept=10_000, replays=True, form="map"):
        self.engine = FakeEngine(blocks, BLOCK, form=form)
        self.publisher = FakePublisher(kept)
        self.scheduler = scheduler_of()
        self.now = 1.0
        self.process = 1.0
        self.subscription = Subscription(self.scheduler, 0, replays=replays, now=self.now)
        self.questions = deque()
        self.online = False
        self.scrape()

    # The engine's side.

    def serve(self, tokens, *, lost=False, **given):
        cached = self.engine.serve(tokens, **given)
        self.publish(lost=lost)
        return cached

    def publish(self, *, lost=False):
        if self.engine.events:
            frame = self.publisher.publish(self.engine.step())
            if self.online and not lost:
                self.ask(self.subscription.received(*frame, self.now))

    def restart(self, *, noticed=True):
        blocks, form = self.engine.blocks, self.engine.form
        self.engine = FakeEngine(blocks, BLOCK, form=form)
        self.publisher.restart()
        self.process += 1.0
        if noticed:
            self.cut()

    # Ours.

    def connect(self):
        self.online = True
        self.ask(self.subscription.connected(self.now))

    def cut(self):
        self.online = False
        self.questions.clear()
        self.ask(self.subscription.disconnected(self.now))

    def ask(self, questions):
        self.questions.extend(questions)

    def answer(self, *, cut_after=None):
        """Send what was asked for last, or the beginning of it."""
        while self.questions:
            asked_for = self.questions.popleft()
            assert isinstance(asked_for, AskReplay)
            frames = self.publisher.replay(asked_for.first)
            for frame in frames[:cut_after]:
                self.subscription.replayed(*frame, self.now)
            marked = cut_after is None or len(frames) <= cut_after
            self.ask(self.subscription.replay_ended(self.now, marked=marked))

    def scrape(self):
        self.now += 0.2
        page = EndpointMetrics(
            process_started_at_s=self.process,
            blocks_total=self.engine.blocks + 1,
            block_size_tokens=BLOCK,
        )
        self.scheduler.take(PageScraped(0, page), self.now)
        self.ask(self.subscription.watch(self.now))

    def work(self):
        while self.subscription.works:
            self.ask(self.subscription.work(self.now))

    def settle(self):
        """All that was asked is answered, and the process was seen."""
        if not self.online:
            self.connect()
        for _ in range(8):
            self.scrape()
            self.answer()
            self.work()
        assert not self.questions

    def believed(self, tokens):
        known = self.scheduler.indexes[INDEX].match(asked(tokens), 1, self.now)
        return int(known.matched[0]) * BLOCK

    @property
    def exact(self):
        return bool(self.scheduler.indexes[INDEX].match(asked([1]), 1, self.now).columns[EXACT][0])


def prompt(*parts):
    """Parts of forty tokens."""
    return [part * 100 + at for part in parts for at in range(40)]


def test_what_an_engine_holds_is_known():
    """From its first frame on."""
    pod = Pod()
    pod.connect()
    pod.answer()
    for parts in ((1, 2), (1, 3), (1, 2), (4, 4, 4), (1, 2, 5)):
        tokens = prompt(*parts)
        pod.work()
        assert pod.believed(tokens) == pod.serve(tokens)
    assert pod.subscription.state is StreamState.REPLAYING, "what came is not applied yet"
    pod.work()
    assert pod.subscription.state is StreamState.LIVE
    assert pod.exact


@pytest.mark.parametrize("form", ["map", "array"])
def test_any_frame_that_is_dropped_and_replayed_leaves_the_same(form):
    """And one that comes twice changes nothing."""
    dice = Random(3)
    prompts = [prompt(*(dice.randrange(5) for _ in range(dice.randint(1, 4)))) for _ in range(30)]
    for dropped in range(30):
        pod = Pod(form=form)
        pod.connect()
        pod.answer()
        for number, tokens in enumerate(prompts):
            pod.serve(tokens, lost=number == dropped)
            pod.work()
        pod.settle()
        if pod.publisher.kept:
            pod.ask(pod.subscription.received(*pod.publisher.kept[-1], pod.now))
        pod.publish()
        pod.work()
        for tokens in prompts:
            assert pod.believed(tokens) <= pod.engine.cached_tokens(tokens)
        pod.serve(prompt(6))
        pod.settle()
        for tokens in prompts:
            assert pod.believed(tokens) == pod.engine.cached_tokens(tokens)
        assert pod.exact


def test_an_engine_that_slept_is_forgotten():
    """It says that its cache is gone with its next request."""
    pod = Pod()
    pod.connect()
    pod.answer()
    pod.serve(prompt(1, 2))
    pod.work()
    assert pod.believed(prompt(1, 2)) == 64
    page = EndpointMetrics(process_started_at_s=pod.process, asleep=True)
    pod.scheduler.take(PageScraped(0, page), pod.now)
    assert pod.believed(prompt(1, 2)) == 0
    pod.engine.clear()
    pod.serve(prompt(1, 3))
    pod.work()
    pod.settle()
    assert pod.believed(prompt(1, 3)) == 64


def test_an_adapter_that_a_scrape_names_is_not_taken_for_its_model():
    """What the model holds is nothing to it, though no event has named it yet."""
    pod = Pod()
    pod.connect()
    pod.answer()
    pod.serve(prompt(1, 2))
    pod.work()
    page = EndpointMetrics(
        process_started_at_s=pod.process, adapters=loaded_adapters("sql", slots_max=2)
    )
    pod.scheduler.take(PageScraped(0, page), pod.now)
    given = request(token_ids=(packed(prompt(1, 2)),), model="sql")
    known = pod.scheduler.indexes[INDEX].match(given, 1, pod.now)
    assert (known.matched.tolist(), known.total) == ([0], 5)


def test_an_engine_that_was_cleared_is_forgotten():
    pod = Pod()
    pod.connect()
    pod.answer()
    pod.serve(prompt(1, 2))
    pod.engine.clear()
    pod.publish()
    pod.work()
    assert pod.believed(prompt(1, 2)) == 0
    assert pod.exact


def test_a_restart_that_looks_like_a_gap_is_found_by_its_scrape():
    """Its counter is beyond our last number when it is heard again."""
    pod = Pod()
    pod.connect()
    pod.answer()
    pod.serve(prompt(1, 2))
    pod.work()
    pod.restart(noticed=False)
    for part in range(5):
        pod.serve(prompt(part + 20), lost=True)
    pod.serve(prompt(7, 8))
    pod.answer()
    pod.work()
    pod.settle()
    assert pod.believed(prompt(1, 2)) == 0
    assert pod.believed(prompt(7, 8)) == pod.engine.cached_tokens(prompt(7, 8)) > 0
    assert pod.subscription.stream.counts.restarts >= 1


def test_who_loses_frames_all_the_time_is_not_taken_to_tell_all():
    """More often than it may be asked in a minute; after that all is told again, and counts."""
    pod = Pod(blocks=100)
    pod.connect()
    pod.answer()
    parts = range(2 * REPLAYS_MAX)
    for part in parts:
        pod.serve(prompt(part), lost=part % 2 == 0)
        pod.settle()
    assert not pod.exact
    assert pod.subscription.stream.counts.replays == REPLAYS_MAX
    assert all(
        pod.believed(prompt(part)) <= pod.engine.cached_tokens(prompt(part)) for part in parts
    )
    assert pod.believed(prompt(parts[-1])) > 0, "what it tells goes on to count"
    pod.now += REPLAYS_S
    pod.serve(prompt(50), lost=True)
    pod.serve(prompt(51))
    pod.settle()
    assert pod.exact
    for part in (*parts, 50, 51):
        assert pod.believed(prompt(part)) == pod.engine.cached_tokens(prompt(part)) == 32


def test_a_hostile_payload_costs_a_fault_and_what_was_believed():
    """By its reason; the next frames count again."""
    pod = Pod()
    pod.connect()
    pod.answer()
    pod.serve(prompt(1, 2))
    pod.work()
    frame = pod.publisher.publish(b"\xc1garbage")
    pod.ask(pod.subscription.received(*frame, pod.now))
    pod.work()
    assert pod.subscription.faults == {Fault.NOT_A_BATCH: 1}
    assert pod.believed(prompt(1, 2)) == 0
    assert not pod.exact
    pod.serve(prompt(9, 9))
    pod.work()
    assert pod.believed(prompt(9, 9)) == 64


def test_what_waits_is_taken_note_of_bit_by_bit():
    """A loop has other things to do."""
    pod = Pod(blocks=1_000)
    pod.connect()
    pod.answer()
    for part in range(40):
        pod.serve(prompt(part, part))
    turns = 0
    while pod.subscription.works:
        assert pod.subscription.noted is None
        before = pod.subscription.blocks_heard
        pod.subscription.work(pod.now, blocks_max=10)
        assert pod.subscription.blocks_heard - before <= 20
        turns += 1
    assert turns > 15
    assert pod.subscription.noted == 39
    assert pod.believed(prompt(7, 7)) == 64


def test_events_that_name_no_blocks_are_work_too():
    """One message may have 65,536 of them."""
    subscription = Subscription(scheduler_of(), 0, replays=False, now=1.0)
    subscription.connected(1.0)
    stored = {
        "type": "BlockStored",
        "block_hashes": [],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": BLOCK,
    }
    subscription.received(0, msgspec.msgpack.encode([1.0, [stored] * 1_000, 0]), 1.0)
    turns = 0
    while subscription.works:
        before = subscription.events["stored"]
        subscription.work(1.0, blocks_max=64)
        assert subscription.events["stored"] - before <= 64
        turns += 1
    assert subscription.events == {"stored": 1_000}
    assert turns >= 1_000 // 64


def test_who_is_closed_holds_nothing():
    pod = Pod()
    pod.connect()
    pod.answer()
    pod.serve(prompt(1, 2))
    pod.work()
    pod.subscription.close(pod.now)
    assert pod.believed(prompt(1, 2)) == 0
    assert not pod.exact


class Pipe(RuleBasedStateMachine):
    """Whatever the pipe does: never more is believed than is held, once the process was seen."""

    def __init__(self):
        super().__init__()
        self.pod = Pod(kept=6)
        self.prompts = [prompt(1)]
        self.pod.connect()
        self.pod.answer()
        self.fresh = 100

    parts = st.lists(st.integers(0, 3), min_size=1, max_size=4)

    @rule(parts=parts, lost=st.booleans(), twins=st.integers(1, 2))
    def serve(self, parts, lost, twins):
        tokens = prompt(*parts)
        self.prompts.append(tokens)
        self.pod.serve(tokens, lost=lost, twins=twins)

    @rule()
    def work(self):
        self.pod.work()

    @rule(cut_after=st.none() | st.integers(0, 4))
    def answer(self, cut_after):
        if self.pod.online:
            self.pod.answer(cut_after=cut_after)

    @rule()
    def scrape(self):
        self.pod.scrape()

    @rule()
    def tick(self):
        self.pod.scheduler.take(Tick(), self.pod.now)

    @rule()
    def cut(self):
        self.pod.cut()

    @rule(seconds=st.sampled_from([0.5, 5.0, 20.0]))
    def wait(self, seconds):
        self.pod.now += seconds

    @rule()
    def connect(self):
        if not self.pod.online:
            self.pod.connect()

    @rule()
    def restart(self):
        self.pod.restart()

    @rule()
    def clear(self):
        self.pod.engine.clear()
        self.pod.publish()

    @rule()
    def settle(self):
        """Now it is known whether all is known, and nothing is believed that is not held."""
        pod = self.pod
        for _ in range(2):
            # What was never there before is told.
            self.fresh += 1
            pod.serve(prompt(self.fresh))
            pod.now += 60.0
            pod.settle()
        for tokens in self.prompts:
            believed, held = pod.believed(tokens), pod.engine.cached_tokens(tokens)
            assert believed <= held
            if pod.exact:
                assert believed == held

    @invariant()
    def bounded(self):
        assert len(self.pod.subscription.stream._replay_times) <= 6


Pipe.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestPipe = Pipe.TestCase


def test_a_payload_may_have_our_keys_already():
    """As in simulated time; the stream is the same."""
    scheduler = scheduler_of()

    def read(payload):
        return BlocksChanged(0, [Changed(True, DEVICE, [*payload])], engine_block_tokens=BLOCK)

    heard = Subscription(scheduler, 0, replays=False, read=read, now=1.0)
    heard.connected(1.0)
    for number, payload in ((0, b"ab"), (1, b"c"), (1, b"c")):
        heard.received(number, payload, 1.0)
    heard.work(1.0)
    (index,) = scheduler.indexes.hearing.values()
    assert (index.entries, heard.blocks_heard, heard.state) == (3, 3, StreamState.LIVE)
