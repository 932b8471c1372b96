"""A plugin that fails costs only what it adds, and is counted by its name."""

import subprocess
import sys
from asyncio import CancelledError
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import pytest
from msgspec import field, structs

from epp.core.abilities import Abilities
from epp.core.decision.failures import Interrupted, PluginFailures
from epp.core.decision.inputs import (
    OutputStarted,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ServedBy,
    Tick,
)
from epp.core.decision.profile import NamedFilter, SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.affinity import SessionIndexSettings
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.index import Held
from epp.core.knowledge.inflight import Outcome
from epp.core.parameters import Parameters
from epp.core.types import EndpointMetrics
from epp.plugins.pickers import MaxScore
from tests.builders import candidates, endpoint, request

ROOT = Path(__file__).parents[3]
SECRET = "what the client said"


def explode(*_):
    raise KeyError(SECRET)


class Answers(Parameters, frozen=True):
    """A plugin of every kind that does what it is told."""

    type_name: ClassVar[str] = "answers"
    abilities: ClassVar[Abilities] = Abilities()
    does: object

    def score(self, request, candidates, /):
        return self.does(candidates)

    keep = score

    def pick(self, scores, candidates, random, rotation, /):
        return self.does(scores)


def returns(value):
    return lambda _: value


def writes_slot(pool):
    pool.slot[0] = 7
    return np.ones(len(pool), dtype=np.bool_)


def takes_slot(pool):
    pool.slot = pool.slot[:1]
    return np.ones(len(pool), dtype=np.bool_)


def told(failures):
    """Name, how often and what, of who failed."""
    return [(one.name, one.failures, one.what) for one in failures]


def profile(filters=(), scorers=(), picker=None):
    return SchedulingProfile(
        name="default",
        filters=tuple(NamedFilter(f"filter-{n}", plugin) for n, plugin in enumerate(filters)),
        scorers=tuple(
            WeightedScorer(f"scorer-{n}", plugin, 2.0) for n, plugin in enumerate(scorers)
        ),
        picker_name="picker",
        picker=picker or MaxScore(),
    )


N = 3
HERE = "decision/test_failures.py"

ENDS = (CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What ends a task, a generator or the process unless somebody catches it."""


def ends(kind):
    def end(*_):
        raise kind(SECRET)

    return end


RAISES = [
    *((ends(kind), f"raised {kind.__name__} at {HERE}:") for kind in ENDS),
    (explode, f"raised KeyError at {HERE}:"),
    (lambda *_: 1 / 0, f"raised ZeroDivisionError at {HERE}:"),
    (lambda _: np.ones(2) + np.ones(3), f"raised ValueError at {HERE}:"),
    (lambda: None, "raised TypeError at "),
]
FAULTY_MASKS = [
    *RAISES,
    (returns(None), "returned NoneType, expected bool[3]"),
    (returns([True, True, False]), "returned list, expected bool[3]"),
    (returns(True), "returned bool, expected bool[3]"),
    (returns(np.zeros(N, dtype=np.int64)), "returned int64[3], expected bool[3]"),
    (returns(np.zeros(2, dtype=np.bool_)), "returned bool[2], expected bool[3]"),
    (returns(np.zeros((N, 1), dtype=np.bool_)), "returned bool[3, 1], expected bool[3]"),
    (returns(np.zeros(N, dtype=object)), "returned object[3], expected bool[3]"),
    (returns(np.bool_(1)), "returned bool, expected bool[3]"),
    (writes_slot, "raised ValueError at "),
    (takes_slot, "raised AttributeError at "),
]  # fmt: skip
FAULTY_SCORES = [
    *RAISES,
    (returns([0.1, 0.2, 0.3]), "returned list, expected float64[3]"),
    (returns(0.5), "returned float, expected float64[3]"),
    (returns(np.float64(0.5)), "returned float64, expected float64[3]"),
    (returns(np.array(0.5)), "returned float64[], expected float64[3]"),
    (returns(np.ones(1)), "returned float64[1], expected float64[3]"),
    (returns(np.ones((N, N))), "returned float64[3, 3], expected float64[3]"),
    (returns(np.ones(N, dtype=np.int64)), "returned int64[3], expected float64[3]"),
    (returns(np.ones(N, dtype=np.complex128)), "returned complex128[3], expected float64[3]"),
    (returns(np.array(["a"] * N)), "returned str32[3], expected float64[3]"),
    (returns(np.array([0.1, None, "x"], dtype=object)), "returned object[3], expected float64[3]"),
    (returns(np.ma.masked_array(np.ones(N))), "returned MaskedArray, expected float64[3]"),
    (writes_slot, "raised ValueError at "),
    (takes_slot, "raised AttributeError at "),
]  # fmt: skip
FAULTY_PICKS = [
    *RAISES,
    (returns(None), "returned NoneType, expected int64[k]"),
    (returns(1), "returned int, expected int64[k]"),
    (returns([1]), "returned list, expected int64[k]"),
    (returns(np.array([1.0])), "returned float64[1], expected int64[k]"),
    (returns(np.array(1)), "returned int64[], expected int64[k]"),
    (returns(np.array([True, False, False])), "returned bool[3], expected int64[k]"),
    (returns(np.empty(0, dtype=np.int64)), "returned no position, expected at least one"),
    (returns(np.array([3])), "returned position 3, expected positions from 0 to 2"),
    (returns(np.array([-1])), "returned position -1, expected positions from 0 to 2"),
    (returns(np.array([0, 1, 0])), "returned a position twice, expected distinct positions"),
]  # fmt: skip


@pytest.mark.parametrize(("does", "what"), FAULTY_MASKS)
def test_a_filter_that_fails_keeps_everybody(does, what):
    """It is counted by its name, and those after it are asked."""
    keep_last = Answers(does=lambda pool: pool.slot == 2)
    failures = PluginFailures()
    kept = profile([Answers(does=does), keep_last]).filter(request(), candidates(N), failures)
    assert kept.candidates.slot.tolist() == [2]
    assert kept.eliminated == {"filter-1": 2}
    ((name, count, found),) = told(failures)
    assert (name, count) == ("filter-0", 1)
    assert found.startswith(f"keep {what}")


@pytest.mark.parametrize(("does", "what"), FAULTY_SCORES)
def test_to_a_scorer_that_fails_everybody_is_unknown(does, what):
    """It adds the same to each, the others decide."""
    good = Answers(does=returns(np.array([0.0, 1.0, 0.25])))
    failures = PluginFailures()
    scored = profile(scorers=[Answers(does=does), good]).score(request(), candidates(N), failures)
    assert scored.total.tolist() == [1.0, 3.0, 1.5]
    ((name, count, found),) = told(failures)
    assert (name, count) == ("scorer-0", 1)
    assert found.startswith(f"score {what}")


@pytest.mark.parametrize(("does", "what"), FAULTY_PICKS)
def test_in_place_of_a_picker_that_fails_the_highest_sum_is_taken(does, what):
    """In turn, where several tie for it; and the sums are as they were."""
    failures = PluginFailures()
    sums = np.array([0.5, 2.0, 2.0])
    broken = profile(picker=Answers(does=does))
    picked = [broken.pick(sums, candidates(N), Random(0), turn, failures) for turn in range(4)]
    assert [positions.tolist() for positions in picked] == [[1], [2], [1], [2]]
    assert sums.tolist() == [0.5, 2.0, 2.0]
    ((name, count, found),) = told(failures)
    assert (name, count) == ("picker", 4)
    assert found.startswith(f"pick {what}")


def test_nan_and_infinity_are_answers_of_a_scorer():
    """Unknown, and clamped: no failures."""
    failures = PluginFailures()
    scorer = Answers(does=returns(np.array([np.nan, np.inf, -np.inf])))
    scored = profile(scorers=[scorer]).score(request(), candidates(N), failures)
    assert scored.total.tolist() == [1.0, 2.0, 0.0]
    assert not len(failures)


def test_what_a_picker_does_to_the_sums_stays_with_it():
    """They explain the decision later."""

    def pick(sums):
        sums[:] = 9.0
        return np.array([0])

    sums = np.array([0.5, 2.0, 2.0])
    failures = PluginFailures()
    picker = profile(picker=Answers(does=pick))
    assert picker.pick(sums, candidates(N), Random(0), 0, failures).tolist() == [0]
    assert sums.tolist() == [0.5, 2.0, 2.0]
    assert not len(failures)


def test_a_picker_may_name_all_in_any_order():
    """Several positions are a destination and its fallbacks."""
    failures = PluginFailures()
    picker = profile(picker=Answers(does=returns(np.array([2, 0, 1]))))
    picked = picker.pick(np.ones(N), candidates(N), Random(0), 0, failures)
    assert picked.tolist() == [2, 0, 1]
    assert not len(failures)


def test_a_signal_passes_through_every_guard():
    """It is nobody's failure: who pressed Ctrl-C wants the process to end."""

    def interrupted(*_):
        raise Interrupted

    broken = Answers(does=interrupted)
    failures = PluginFailures()
    with pytest.raises(Interrupted):
        profile([broken]).filter(request(), candidates(N), failures)
    with pytest.raises(Interrupted):
        profile(scorers=[broken]).score(request(), candidates(N), failures)
    with pytest.raises(Interrupted):
        profile(picker=broken).pick(np.ones(N), candidates(N), Random(0), 0, failures)
    with pytest.raises(Interrupted):
        failures.call("index", "record", interrupted)
    with pytest.raises(Interrupted):
        scheduler(open=interrupted)
    assert not len(failures)


def test_nothing_of_a_message_is_kept():
    """Type and place tell where to look; a message may quote a prompt."""
    failures = PluginFailures()
    profile([Answers(does=explode)]).filter(request(), candidates(N), failures)
    assert SECRET not in repr(told(failures))


def test_the_line_of_the_plug_in_is_told_where_another_module_raised():
    """What numpy or the picker says is of no use without who asked it."""
    failures = PluginFailures()
    asks = Answers(does=lambda pool: np.full(3, 0.5) * candidates(pool))
    profile(scorers=[asks]).score(request(), candidates(N), failures)
    ((_, _, what),) = told(failures)
    assert what.startswith("score raised ")
    assert " at testing/builders.py:" in what
    assert f", called at {HERE}:" in what


# --- indexes ---


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
        profile=profile(scorers=[ByIndex()]),
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
            profile=profile(scorers=[ByIndex()]), indexes={"told": HeardSettings(does=does)}
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


# --- headers of the response, and of the request ---


class Marks(Parameters, frozen=True):
    type_name: ClassVar[str] = "marks"
    abilities: ClassVar[Abilities] = Abilities(marks_responses=True)
    headers: object

    def score(self, request, candidates, /):
        return None

    def response_headers(self, request, endpoint, served, /):
        return self.headers()


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        (explode, "raised KeyError at "),
        *((ends(kind), f"raised {kind.__name__} at ") for kind in ENDS),
        (lambda: None, "returned NoneType, expected a mapping"),
        (lambda: [("x-a", "b")], "returned list, expected a mapping"),
        (lambda: {"x-a": 1}, "returned a header str: int, expected str: str"),
        (lambda: {b"x-a": "b"}, "returned a header bytes: str, expected str: str"),
        (lambda: {"": "b"}, "returned a header with an invalid name"),
        (lambda: {":path": "b"}, "returned a header with an invalid name"),
        (lambda: {"x a": "b"}, "returned a header with an invalid name"),
        (
            lambda: {"x-a": "b\r\nx-evil: c"},
            "returned a header with an invalid character in its value",
        ),
        (lambda: {"x-a": "\x00"}, "returned a header with an invalid character in its value"),
        (lambda: {"x-a": "\ud800"}, "returned a header with an invalid character in its value"),
    ],
)
def test_headers_that_cannot_be_set_are_left_out(headers, what):
    """Those of the other plugins are set."""
    settings = SchedulerSettings(
        profile=profile(
            scorers=[Marks(headers=headers), Marks(headers=lambda: {"x-good": "é \udcff\t!"})]
        )
    )
    made = Scheduler(settings, seed=1)
    made.take(PoolReplaced([endpoint(0)]), 0.0)
    decision = made.schedule(request(), 1.0)
    assert decision.response_headers("") == {"x-good": "é \udcff\t!"}
    ((name, count, found),) = told(made.failures)
    assert (name, count) == ("scorer-0", 1)
    assert found.startswith(f"response_headers {what}")


class MarksRequest(Marks, frozen=True):
    abilities: ClassVar[Abilities] = Abilities(marks_requests=True)
    own_headers: ClassVar[tuple[str, ...]] = ("x-a", "x-good")
    response_headers: ClassVar = None

    def request_headers(self, request, candidates, endpoint, /):
        return self.headers()


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        (explode, "raised KeyError at "),
        *((ends(kind), f"raised {kind.__name__} at ") for kind in ENDS),
        (lambda: None, "returned NoneType, expected a mapping"),
        (
            lambda: {"x-a": "b\r\nx-evil: c"},
            "returned a header with an invalid character in its value",
        ),
        (lambda: {"x-other": "b"}, "returned a header that is not in its own_headers"),
    ],
)
def test_headers_of_requests_that_cannot_be_set_are_left_out(headers, what):
    """As those of responses."""
    marking = [MarksRequest(headers=headers), MarksRequest(headers=lambda: {"x-good": "yes"})]
    made = Scheduler(SchedulerSettings(profile=profile(scorers=marking)), seed=1)
    made.take(PoolReplaced([endpoint(0)]), 0.0)
    decision = made.schedule(request(), 1.0)
    assert decision.request_headers() == {"x-good": "yes"}
    assert decision.own_request_headers == {"x-a", "x-good"}
    ((name, count, found),) = told(made.failures)
    assert (name, count) == ("scorer-0", 1)
    assert found.startswith(f"request_headers {what}")


def test_results_are_checked_without_asserts():
    """`python -O` leaves those out."""
    program = """
from tests.core.decision import test_failures as here
assert False, "asserts are on"
"""
    run = subprocess.run(
        [sys.executable, "-O", "-c", program + OPTIMISED],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["filter-0", "scorer-0", "picker", "1"]


OPTIMISED = """
import numpy as np
wrong = here.Answers(does=lambda _: np.zeros(3, dtype=np.int8))
settings = here.SchedulerSettings(profile=here.profile([wrong], [wrong], wrong))
made = here.Scheduler(settings, seed=1)
made.take(here.PoolReplaced([here.endpoint(number) for number in range(3)]), 0.0)
decision = made.schedule(here.request(), 1.0)
print(*[one.name for one in made.failures], made.decisions)
"""


class NamesSessions(Answers, frozen=True):
    """A scorer to which everybody is alike and sessions matter, or so it says."""

    type_name: ClassVar[str] = "names-sessions"
    abilities: ClassVar[Abilities] = Abilities(goes_by_sessions=True)

    def score(self, request, candidates, /):
        return np.ones(len(candidates))

    def session_of(self, request, /):
        return self.does(request)


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (explode, f"session_of raised KeyError at {HERE}:"),
        *((ends(kind), f"session_of raised {kind.__name__} at {HERE}:") for kind in ENDS),
        (returns(7), "session_of raised AttributeError at "),
    ],
)
def test_a_session_that_cannot_be_told_is_none(does, what):
    """The decision stands, and the failure is counted by the scorer's name."""
    scheduler = Scheduler(SchedulerSettings(profile=profile(scorers=[NamesSessions(does)])), seed=1)
    scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    for _ in range(2):
        assert isinstance(scheduler.schedule(request(), 0.0), Decision)
    [(name, failures, said)] = told(scheduler.failures)
    assert (name, failures) == ("scorer-0", 2)
    assert said.startswith(what)
    assert SECRET not in said
