"""A plugin that fails costs only what it adds, and is counted by its name."""

import subprocess
import sys
from asyncio import CancelledError
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from epp.core.abilities import Abilities
from epp.core.decision.inputs import (
    PoolReplaced,
)
from epp.core.decision.profile import NamedFilter, SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.failures import Interrupted, PluginFailures
from epp.core.parameters import Parameters
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
HERE = "core/test_failures.py"

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
        stages=Stages(
            decode=profile(
                scorers=[Marks(headers=headers), Marks(headers=lambda: {"x-good": "é \udcff\t!"})]
            )
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
    made = Scheduler(SchedulerSettings(stages=Stages(decode=profile(scorers=marking))), seed=1)
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
from tests.core import test_failures as here
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
settings = here.SchedulerSettings(stages=here.Stages(decode=here.profile([wrong], [wrong], wrong)))
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
        (returns(7), "session_of returned int, expected str"),
    ],
)
def test_a_session_that_cannot_be_told_is_none(does, what):
    """The decision stands, and the failure is counted by the scorer's name."""
    scheduler = Scheduler(
        SchedulerSettings(stages=Stages(decode=profile(scorers=[NamesSessions(does)]))), seed=1
    )
    scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    for _ in range(2):
        assert isinstance(scheduler.schedule(request(), 0.0), Decision)
    [(name, failures, said)] = told(scheduler.failures)
    assert (name, failures) == ("scorer-0", 2)
    assert said.startswith(what)
    assert SECRET not in said
