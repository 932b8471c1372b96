import math
from random import Random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from epp.core.abilities import Abilities
from epp.core.decision.profile import (
    NamedFilter,
    SchedulingProfile,
    WeightedScorer,
    fill_unknown,
)
from epp.core.failures import PluginFailures
from epp.core.parameters import Parameters
from tests.builders import candidates, request


class Fixed(Parameters, frozen=True):
    """Scores what it is told."""

    type_name: ClassVar[str] = "fixed"
    scores: tuple[float, ...] | None

    def score(self, request, candidates, /):
        return None if self.scores is None else np.array(self.scores, dtype=np.float64)


class KeepAt(Parameters, frozen=True):
    """Keeps the slots it is told."""

    type_name: ClassVar[str] = "keep-at"
    abilities: ClassVar[Abilities] = Abilities()
    slots: tuple[int, ...]

    def keep(self, request, candidates, /):
        return np.isin(candidates.slot, self.slots)


class ShedAll(Parameters, frozen=True):
    """Keeps nobody, for load."""

    type_name: ClassVar[str] = "shed-all"
    abilities: ClassVar[Abilities] = Abilities(sheds_load=True)

    def keep(self, request, candidates, /):
        return np.zeros(len(candidates), dtype=np.bool_)


class Last(Parameters, frozen=True):
    """Picks the last."""

    type_name: ClassVar[str] = "last"

    def pick(self, scores, candidates, random, rotation, /):
        return np.array([len(scores) - 1])


def profile(scorers=(), filters=(), picker=None):
    return SchedulingProfile(
        name="default",
        filters=tuple(NamedFilter(name, plugin) for name, plugin in filters),
        scorers=tuple(
            WeightedScorer(f"scorer-{row}", Fixed(scores=tuple(scores)), weight)
            for row, (scores, weight) in enumerate(scorers)
        ),
        picker_name="last",
        picker=picker or Last(),
    )


def totals(*scorers):
    n = len(scorers[0][0])
    return profile(scorers).score(request(), candidates(n), PluginFailures()).total.tolist()


def test_scores_are_weighed_and_added_up():
    """Not divided by the sum of the weights."""
    assert totals(([0.0, 0.5, 1.0], 3.0), ([1.0, 1.0, 0.0], 2.0)) == [2.0, 3.5, 3.0]


def test_the_parts_are_kept_in_the_order_of_the_profile():
    """`parts[i, j]` is the weighted score of candidate j by scorer i."""
    scored = profile([([0.25, 1.0], 2.0), ([0.5, 0.0], 1.0)]).score(
        request(), candidates(2), PluginFailures()
    )
    assert scored.parts.tolist() == [[0.5, 2.0], [0.5, 0.0]]


def test_none_is_unknown_for_all():
    """Everybody gets 0.5, as where all are NaN."""
    weighted = WeightedScorer("scorer", Fixed(scores=None), 2.0)
    scored = structs.replace(profile(), scorers=(weighted,)).score(
        request(), candidates(3), PluginFailures()
    )
    assert scored.total.tolist() == [1.0, 1.0, 1.0]
    assert scored.parts_of(1) == [1.0]


def test_a_score_out_of_bounds_is_clamped():
    """No scorer can outvote its weight."""
    assert totals(([-3.0, 0.5, 7.0, math.inf, -math.inf], 2.0)) == [0.0, 1.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([math.nan, 0.2, 0.9, 0.4], 0.4),
        ([math.nan, 0.2, 0.4], 0.3),
        ([math.nan, 1.0, math.nan], 1.0),
        ([math.nan, 5.0, 0.0], 0.5),
        ([math.nan, math.nan], 0.5),
    ],
)
def test_the_unknown_get_the_median_of_the_known(scores, expected):
    """After clamping; 0.5 when nobody is known."""
    total = totals((scores, 1.0))
    assert total[0] == pytest.approx(expected)
    assert not any(math.isnan(value) for value in total)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.just(math.nan), st.floats(0, 1)), min_size=1, max_size=9))
def test_filling_the_unknown_leaves_the_known(scores):
    """In place; and the median is numpy's."""
    filled = np.array(scores)
    fill_unknown(filled)
    known = [score for score in scores if not math.isnan(score)]
    middle = float(np.median(known)) if known else 0.5
    assert filled.tolist() == [middle if math.isnan(score) else score for score in scores]


def test_a_profile_without_scorers_prefers_nobody():
    """Then the picker alone decides."""
    assert profile().score(request(), candidates(3), PluginFailures()).total.tolist() == [
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_is_finite_and_not_negative(weight):
    """The sentence names the scorer and the weight."""
    with pytest.raises(ValueError, match=f"scorer-0 is {weight}; it must be finite and at least 0"):
        profile([([1.0], weight)])


def test_weights_that_are_all_0_are_refused():
    """One of them may be."""
    with pytest.raises(ValueError, match="all weights of profile default are 0"):
        profile([([1.0], 0.0), ([1.0], 0.0)])
    assert totals(([1.0], 0.0), ([1.0], 0.5)) == [0.5]


def test_filters_run_in_order_and_say_what_they_dropped():
    """Each counts what the ones before it had left; one that drops nobody is not mentioned."""
    filters = [
        ("first", KeepAt(slots=(0, 1, 2))),
        ("second", KeepAt(slots=(0, 1, 2, 3))),
        ("third", KeepAt(slots=(1, 2, 4))),
    ]
    kept = profile(filters=filters).filter(request(), candidates(5), PluginFailures())
    assert kept.candidates.slot.tolist() == [1, 2]
    assert kept.eliminated == {"first": 2, "third": 1}
    assert kept.shed_by == ""


def test_one_name_used_twice_is_counted_together():
    """A configuration may list a filter twice."""
    filters = [("same", KeepAt(slots=(0, 1, 2))), ("same", KeepAt(slots=(0,)))]
    assert profile(filters=filters).filter(
        request(), candidates(5), PluginFailures()
    ).eliminated == {"same": 4}


def test_filters_stop_when_nobody_is_left():
    """A filter is never called with no candidates."""
    filters = [("labels", KeepAt(slots=())), ("full", ShedAll())]
    kept = profile(filters=filters).filter(request(), candidates(2), PluginFailures())
    assert (len(kept.candidates), kept.eliminated, kept.shed_by) == (0, {"labels": 2}, "")


def test_a_filter_that_sheds_load_is_named():
    """So that the client is told to come back."""
    filters = [("labels", KeepAt(slots=(0,))), ("full", ShedAll())]
    kept = profile(filters=filters).filter(request(), candidates(2), PluginFailures())
    assert (kept.eliminated, kept.shed_by) == ({"labels": 1, "full": 1}, "full")


class Holds(Parameters, frozen=True):
    """Has everybody wait, or returns `found`."""

    type_name: ClassVar[str] = "holds"
    abilities: ClassVar[Abilities] = Abilities(holds_requests=True)
    found: object = True

    def keep(self, request, candidates, /):
        return np.ones(len(candidates), dtype=np.bool_)

    def holds(self, request, candidates, /):
        if self.found is None:
            raise ValueError
        return self.found


@pytest.mark.parametrize(
    ("filters", "held"),
    [
        ([], False),
        ([("all", KeepAt(slots=(0, 1)))], False),
        ([("line", Holds())], True),
        ([("line", Holds(found=np.True_))], True),
        ([("line", Holds(found=np.False_))], False),
        ([("open", Holds(found=False)), ("line", Holds())], True),
    ],
)
def test_any_filter_may_hold_a_request(filters, held):
    """Those that declare it are asked, and no others."""
    failures = PluginFailures()
    assert profile(filters=filters).holds(request(), candidates(2), failures) is held
    assert list(failures) == []


@pytest.mark.parametrize("found", [None, 1, np.ones(2, dtype=np.bool_)])
def test_a_filter_that_fails_holds_nobody(found):
    """It is counted by its name; the next is asked."""
    failures = PluginFailures()
    filters = [("line", Holds(found=found))]
    assert profile(filters=filters).holds(request(), candidates(2), failures) is False
    assert [(one.name, one.failures) for one in failures] == [("line", 1)]
    filters.append(("next", Holds()))
    assert profile(filters=filters).holds(request(), candidates(2), failures)


def test_a_filter_that_keeps_all_costs_no_copy():
    """The candidates go on as they came."""
    pool = candidates(2)
    assert (
        profile(filters=[("all", KeepAt(slots=(0, 1)))])
        .filter(request(), pool, PluginFailures())
        .candidates
        is pool
    )


def test_the_picker_picks_positions():
    """Among the candidates that are left, not slots."""
    pool = candidates(4).take(np.array([1, 3]))
    assert profile().pick(np.ones(2), pool, Random(0), 0, PluginFailures()).tolist() == [1]
