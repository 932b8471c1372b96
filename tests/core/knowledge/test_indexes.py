"""A faulty index costs only what it would have contributed; the others do not notice it."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import field, structs

from epp.core.abilities import Abilities
from epp.core.decision.inputs import (
    OutputStarted,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ServedBy,
    Tick,
)
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.failures import Interrupted, PluginFailures
from epp.core.knowledge.affinity import SessionIndexSettings
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.hit_accuracy import Correction
from epp.core.knowledge.index import EventResult as Said
from epp.core.knowledge.index import Held, IndexMeasures
from epp.core.knowledge.indexes import Indexes, IndexesSettings
from epp.core.knowledge.inflight import Lease, Outcome
from epp.core.kv_events.stream import StreamState
from epp.core.parameters import Parameters
from epp.core.types import AdapterReport, EndpointMetrics
from tests.builders import endpoint, request
from tests.core.test_failures import ENDS, HERE, SECRET, ends, explode, profile, told

N = 3


class Index:
    """Knows that everything is in the last slot; raises or returns what it is told."""

    def __init__(self, does):
        self.does = does
        self.calls = []

    def _do(self, verb, otherwise=None):
        self.calls.append(verb)
        return self.does[verb]() if verb in self.does else otherwise

    def match(self, request, slots, now):
        matched = np.zeros(slots, dtype=np.int64)
        matched[-1:] = 1
        return self._do("match", Affinity(matched, 1))

    def record(self, request, slot, now):
        self._do("record")

    def retract(self, request, slot, recorded, now):
        self._do("retract")

    def forget(self, slot):
        self._do("forget")

    def expire(self, now):
        self._do("expire")

    def resize(self, slot, blocks_total, block_size_tokens):
        self._do("resize")


class IndexSettings(Parameters, frozen=True):
    type_name: ClassVar[str] = "last-slot-producer"
    does: dict[str, object] = field(default_factory=dict)

    abilities: ClassVar = Abilities()

    def open(self):
        return self.does["open"]() if "open" in self.does else Index(self.does)

    def adopt(self, index):
        return self.does["adopt"]() if "adopt" in self.does else True


class ByIndex(Parameters, frozen=True):
    """Prefers where the index says."""

    type_name: ClassVar[str] = "by-index"

    def score(self, request, candidates, /):
        return candidates.affinity("last-slot").matched.astype(np.float64)


def scheduler(**does):
    """Three endpoints, and an index beside one of ours."""
    settings = SchedulerSettings(
        stages=Stages(decode=profile(scorers=[ByIndex()])),
        indexes={"last-slot": IndexSettings(does=does), "session": SessionIndexSettings()},
    )
    made = Scheduler(settings, seed=1)
    made.take(PoolReplaced([endpoint(number) for number in range(N)]), 0.0)
    return made


def drive(made):
    """Every verb of a scheduler; who was chosen."""
    for slot in range(N):
        made.take(PageScraped(slot, EndpointMetrics(blocks_total=10, block_size_tokens=16)), 1.0)
    asked = [request(session_id="one") for _ in range(2)]
    first, second = (made.schedule(each, 1.0) for each in asked)
    made.take(ServedBy(first.lease, endpoint(1).address), 1.1)
    made.take(OutputStarted(first.lease), 1.2)
    for decision in (first, second):
        made.take(RequestEnded(decision.lease, Outcome()), 1.3)
    made.take(Reconfigured(made.settings), 1.4)
    made.take(Tick(), 1.5)
    made.take(PoolReplaced([endpoint(0), endpoint(1)]), 1.6)
    made.take(PoolReplaced([endpoint(number) for number in range(N)]), 1.7)
    last = made.schedule(request(session_id="one"), 1.8)
    return first.endpoint.name, last.endpoint.name


@pytest.mark.parametrize("kind", [KeyError, *ENDS])
@pytest.mark.parametrize(
    "verb", ["match", "record", "retract", "forget", "expire", "resize", "adopt", "open"]
)
def test_an_index_that_raises_costs_only_what_it_knows(verb, kind):
    """Every request is served, and the other index is told as ever."""
    made = scheduler(**{verb: ends(kind)})
    chosen = drive(made)
    assert chosen[0] == ("pod-0" if verb in {"match", "open"} else "pod-2")
    assert made.ledger.open_leases == 1
    assert len(made.indexes["session"]) == 1
    ((name, count, what),) = told(made.failures)
    assert name == "last-slot"
    assert count >= 1
    assert what.startswith(f"{verb} raised {kind.__name__} at {HERE}:")
    assert SECRET not in what


def test_an_index_is_told_the_size_of_a_cache_until_it_has_taken_it_and_when_it_may_have_forgotten():
    """Not by each of the many scrapes that say the same."""
    failing = [explode, explode]
    made = scheduler(resize=lambda: failing.pop()() if failing else None)

    def told_by(**page):
        calls = made.indexes["last-slot"].calls
        before = calls.count("resize")
        made.take(PageScraped(0, EndpointMetrics(**page)), 1.0)
        return calls.count("resize") - before

    page = {"blocks_total": 10, "block_size_tokens": 16}
    assert [told_by(**page) for _ in range(5)] == [1, 1, 1, 0, 0]
    assert [told_by(**(page | {"blocks_total": 20})) for _ in range(2)] == [1, 0]
    assert told_by() == 0
    made.take(Reconfigured(made.settings), 1.4)
    assert [told_by(**(page | {"process_started_at_s": 1.0})) for _ in range(2)] == [1, 0]
    assert told_by(**(page | {"process_started_at_s": 2.0})) == 1, "the engine has restarted"
    made.take(PoolReplaced([endpoint(1)]), 1.6)
    made.take(PoolReplaced([endpoint(number) for number in range(N)]), 1.7)
    assert told_by(**page) == 1, "another endpoint may have this slot"


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (None, "NoneType, expected Affinity"),
        (np.zeros(N, dtype=np.int64), "int64[3], expected Affinity"),
        (Affinity([0, 0, 0], 1), "an Affinity with matched = list, expected int64[3]"),
        (Affinity(np.zeros(N), 1), "an Affinity with matched = float64[3], expected int64[3]"),
        (
            Affinity(np.zeros(2, dtype=np.int64), 1),
            "an Affinity with matched = int64[2], expected int64[3]",
        ),
        (
            Affinity(np.zeros(N, dtype=np.int64), np.int64(1)),
            "an Affinity with total = int64, expected int of 0 or more",
        ),
        (
            Affinity(np.zeros(N, dtype=np.int64), -1),
            "an Affinity with total = int, expected int of 0 or more",
        ),
        (
            Affinity(np.zeros(N, dtype=np.int64), 1, most=np.int64(0)),
            "an Affinity with most = int64, expected int or None",
        ),
    ],
)
def test_an_index_that_answers_amiss_knows_nothing(found, fault):
    """All endpoints are alike to it."""
    made = scheduler(match=lambda: found)
    assert made.schedule(request(), 1.0).endpoint.name == "pod-0"
    ((name, count, what),) = told(made.failures)
    assert (name, count) == ("last-slot", 1)
    assert what == f"match returned {fault}"


def test_an_index_that_cannot_forget_starts_anew():
    """It would tell of an endpoint that is gone as if it were the next in its slot."""
    made = scheduler(forget=explode)
    before = made.indexes["last-slot"]
    made.take(PoolReplaced([endpoint(0), endpoint(1)]), 1.0)
    assert made.indexes["last-slot"] is not before
    assert list(made.indexes) == ["last-slot", "session"], "they match in the same order"


def test_an_index_that_cannot_adopt_starts_anew():
    made = scheduler(adopt=explode)
    before = made.indexes["last-slot"]
    assert made.take(Reconfigured(made.settings), 1.0).restarted == ("last-slot",)
    assert made.indexes["last-slot"] is not before


@pytest.mark.parametrize(
    ("opened", "what"),
    [
        (lambda: None, "NoneType, expected an index with match, record, retract"),
        (lambda: Affinity(np.zeros(1), 0), "Affinity, expected an index with match, record"),
    ],
)
def test_what_is_opened_must_be_an_index(opened, what):
    """Else nothing is remembered under its name."""
    made = scheduler(open=opened)
    assert list(made.indexes) == ["session"]
    assert isinstance(made.schedule(request(), 1.0), Decision)
    ((_, _, found),) = told(made.failures)
    assert found.startswith(f"open returned {what}")


def test_who_is_configured_no_more_is_forgotten():
    """So the ledger never has more rows than the document has plugins."""
    made = scheduler(match=explode)
    made.schedule(request(), 1.0)
    assert len(made.failures) == 1
    made.take(Reconfigured(made.settings), 1.1)
    assert [one.failures for one in made.failures] == [1], "configured still, and counted on"
    made.take(Reconfigured(structs.replace(made.settings, indexes={})), 1.2)
    assert not len(made.failures)


class Recording:
    """An index with every ability that notes what it is told, and fails as `faults` says.

    `faults` maps a verb to what it does instead of answering.
    """

    def __init__(self, calls, faults, scale):
        self.calls = calls
        self.faults = faults
        self.scale = scale

    @property
    def signature(self):
        return self._asked("signature", "recording")

    def _told(self, verb, *given):
        self.calls.append((verb, *given))
        if verb in self.faults:
            return self.faults[verb]()
        return None

    def _asked(self, verb, answer):
        return self.faults[verb]() if verb in self.faults else answer

    def match(self, request, slots, now):
        matched = self.scale * np.arange(slots, dtype=np.int64)
        return self._asked("match", Affinity(matched, slots))

    def record(self, request, slot, now, *, rank=None):
        self._told("record", slot, rank)
        return len(self.calls)

    def retract(self, request, slot, recorded, now):
        self._told("retract", slot, recorded)

    def release(self, request, slot, recorded, now):
        self._told("release", slot, recorded)

    def forget(self, slot):
        self._told("forget", slot)

    def expire(self, now):
        self._told("expire")

    def resize(self, slot, blocks_total, block_size_tokens):
        if "resize" in self.faults:
            self.faults["resize"]()

    def correct(self, correction):
        self._told("correct", correction.slot)

    def limit_memory(self, share):
        self._told("limit_memory", share)

    def measures(self):
        return self._asked("measures", IndexMeasures(entries=1, memory_bytes=1))

    def share(self, request):
        return self._asked("share", (b"12345678",))

    def learn(self, keys, slot, stamp, now):
        self._told("learn", slot)

    def shared_entries(self):
        yield 0, 0.0, (b"12345678",)
        yield self._asked("shared_entries", (1, 0.0, (b"12345678",)))

    def hear(self, slot, events, now, *, rank):
        self._told("hear", slot, rank)
        return Said()

    def set_stream(self, slot, state, *, complete, rank):
        self._told("set_stream", slot, state, complete, rank)

    def adapters_told(self, names):
        self._told("adapters_told", *sorted(names))

    def change(self, slot, changes, engine_block_tokens, *, rank):
        self._told("change", slot, rank)

    def clear(self, slot, *, rank):
        self._told("clear", slot, rank)

    def silence(self, slot, *, rank):
        self._told("silence", slot, rank)

    def ranks_at(self, slot):
        return self._asked("ranks_at", 2)

    def held_by_ranks(self, request, slot, now):
        return self._asked("held_by_ranks", [1, slot])

    def held(self, request, slot):
        return self._asked("held", Held(slot, 2, 64))


class RecordingSettings(Parameters, frozen=True):
    type_name: ClassVar[str] = "recording-producer"
    abilities: ClassVar = Abilities(
        shares=True,
        counts_inflight=True,
        corrected=True,
        limits_memory=True,
        measures=True,
        hears_engines=True,
    )
    calls: list
    faults: dict[str, object] = field(default_factory=dict)
    scale: int = 1
    block_tokens: int = 64
    memory_max_bytes: int = 1_000

    def open(self):
        if "open" in self.faults:
            self.faults["open"]()
        self.calls.append(("open",))
        return Recording(self.calls, self.faults, self.scale)

    def adopt(self, index):
        if "adopt" in self.faults:
            self.faults["adopt"]()
        return True


class Driven:
    """The indexes of a scheduler, driven step by step; notes what they answer together."""

    def __init__(self, by_name):
        self.failures = PluginFailures()
        self.indexes = Indexes(self.failures)
        self.settings = IndexesSettings(by_name, "first", ("first", "second"))
        self.answers = []
        self.leases = []
        self.indexes.configure(self.settings)

    def step(self, verb, slot, number):
        now = float(len(self.answers))
        answer = getattr(self, f"_{verb}")(slot, number, now)
        self.answers.append(answer)

    def _decide(self, slot, number, now):
        affinities = self.indexes.match(request(), N, now)
        lease = Lease(request(), slot, 0, 0, now, rank=number % 3 - 1)
        self.indexes.record(lease, now)
        self.leases.append(lease)
        together = self.indexes.join(affinities)
        at = self.indexes.matched_at(request(), slot, N, now)
        return [affinities[name].matched.tolist() for name in SOUND], together.matched.tolist(), at

    def _end(self, slot, number, now):
        if self.leases:
            lease = self.leases.pop(number % len(self.leases))
            self.indexes.release(lease, now)
            self.indexes.undo(lease, lease.slot, now, tuple(lease.recorded))

    def _page(self, slot, number, now):
        self.indexes.scraped(
            slot,
            EndpointMetrics(
                blocks_total=number + 1,
                block_size_tokens=16,
                asleep=number % 2 == 1,
                adapters=AdapterReport(slots_max=2, active=frozenset({"a"})),
            ),
        )
        self.indexes.correct(Correction(slot=slot, error=0.1, bytes_per_token=4.0))

    def _forget(self, slot, number, now):
        self.indexes.forget(slot)
        return dict(self.indexes.lives)

    def _tick(self, slot, number, now):
        self.indexes.expire(now)
        self.indexes.limit_memory(1.0 / (1 + number))
        return [(one.name, one.is_open) for one in self.indexes.standings() if one.name in SOUND]

    def _peers(self, slot, number, now):
        for name in SOUND:
            self.indexes.learn(name, (b"12345678",), slot, now, now)
        if "faulty" in self.indexes.shared:
            self.indexes.learn("faulty", (b"12345678",), slot, now, now)
        answers = [(self.indexes.share(name, request()), name) for name in SOUND]
        entries = [list(self.indexes.shared_entries(name)) for name in (*SOUND, "faulty")][:2]
        return answers, entries, [self.indexes.signatures()[name] for name in SOUND]

    def _events(self, slot, number, now):
        heard = self.indexes.hear(slot, (), now, rank=number)
        self.indexes.change(slot, (), 16, rank=number, cleared=number == 0)
        self.indexes.set_stream(slot, StreamState.LIVE, complete=True, rank=number)
        self.indexes.silence(slot, rank=number)
        return heard, self.indexes.held(request(), slot)

    def _ranks(self, slot, number, now):
        return self.indexes.tokens_by_rank(request(), slot, now), self.indexes.fewest_ranks([slot])

    def _configure(self, slot, number, now):
        return [name for name in self.indexes.configure(self.settings) if name in SOUND]


SOUND = ("first", "second")
STEPS = ("decide", "end", "page", "forget", "tick", "peers", "events", "ranks", "configure")
VERBS = (
    *("match", "record", "retract", "release", "forget", "expire", "resize", "limit_memory"),
    *(
        "measures",
        "signature",
        "share",
        "learn",
        "shared_entries",
        "hear",
        "set_stream",
        "adapters_told",
    ),
    *("change", "clear", "silence", "ranks_at", "held_by_ranks", "held", "open", "adopt"),
)
FAULTS = (explode, *map(ends, ENDS), lambda: "no answer that an index may give")


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    faults=st.dictionaries(st.sampled_from(VERBS), st.sampled_from(FAULTS))
    | st.sampled_from(FAULTS).map(lambda fault: dict.fromkeys(VERBS, fault) | {"open": bool}),
    at=st.integers(1, 2),
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, N - 1), st.integers(0, 2)), max_size=25
    ),
)
def test_the_other_indexes_do_not_notice_a_faulty_one(faults, at, steps):
    """They receive the same calls and give the same answers as without it, whatever it does."""
    alone = {name: [] for name in SOUND}
    beside = {name: [] for name in SOUND}
    settings = [(name, RecordingSettings(calls=calls)) for name, calls in beside.items()]
    settings.insert(at, ("faulty", RecordingSettings(calls=[], faults=faults, scale=9)))
    without = Driven({name: RecordingSettings(calls=calls) for name, calls in alone.items()})
    driven = Driven(dict(settings))
    for step in steps:
        without.step(*step)
        driven.step(*step)
    assert beside == alone
    assert driven.answers == without.answers
    assert {one.name for one in driven.failures} <= {"faulty"}
    assert not len(without.failures)


def test_what_an_index_recorded_before_it_was_opened_again_is_not_undone():
    """The new index does not know it, and has other requests."""
    calls = []
    settings = RecordingSettings(calls=calls, faults={"forget": explode})
    indexes = Indexes(PluginFailures())
    indexes.configure(IndexesSettings({"faulty": settings}))
    old, new = (Lease(request(), slot, 0, 0, 0.0) for slot in (0, 1))
    indexes.record(old, 0.0)
    indexes.forget(2)
    indexes.record(new, 1.0)
    calls.clear()
    for lease in (old, new):
        indexes.release(lease, 2.0)
        indexes.undo(lease, lease.slot, 2.0, ("faulty",))
    assert [(verb, slot) for verb, slot, _ in calls] == [("release", 1), ("retract", 1)]


def test_a_signal_passes_through_the_indexes():
    """It is no failure of an index: whoever presses Ctrl-C wants the process to end."""

    def interrupted():
        raise Interrupted

    with pytest.raises(Interrupted):
        scheduler(open=interrupted)


class Heard(Index):
    """Engines tell it, to no effect."""

    def hear(self, slot, events, now, *, rank):
        return None

    def set_stream(self, slot, state, *, complete, rank):
        pass

    def adapters_told(self, names):
        pass

    def change(self, slot, changes, engine_block_tokens, *, rank):
        pass

    def clear(self, slot, *, rank):
        pass

    silence = clear

    def ranks_at(self, slot):
        return self._do("ranks_at", 1)

    def held_by_ranks(self, request, slot, now):
        return self._do("held_by_ranks", [0])

    def held(self, request, slot):
        return self._do("held", Held(slot, 2, 64))


class HeardSettings(IndexSettings, frozen=True):
    abilities: ClassVar = Abilities(hears_engines=True)
    kv_events_config: ClassVar = None

    def open(self):
        return Heard(self.does)


@pytest.mark.parametrize("kind", [KeyError, *ENDS])
def test_what_an_engine_holds_is_not_known_where_the_index_fails(kind):
    """Nor of an endpoint that is gone, or restarted."""

    def opened(**does):
        settings = SchedulerSettings(
            stages=Stages(decode=profile(scorers=[ByIndex()])),
            indexes={"told": HeardSettings(does=does)},
        )
        made = Scheduler(settings, seed=1)
        made.take(PoolReplaced([endpoint(number) for number in range(N)]), 0.0)
        return made

    made = opened()
    assert made.held(request(), endpoint(2)) == Held(2, 2, 64)
    assert made.held(request(), endpoint(N)) is None
    assert made.held(request(), endpoint(2, incarnation="other")) is None
    made = opened(held=ends(kind))
    assert made.held(request(), endpoint(2)) is None
    ((name, _, what),) = told(made.failures)
    assert (name, what.startswith(f"held raised {kind.__name__}")) == ("told", True)
