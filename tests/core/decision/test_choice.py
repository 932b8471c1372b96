"""One profile chooses among candidates: the four steps, and what a second profile borrows."""

from random import Random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from epp.core.abilities import Abilities
from epp.core.decision.choice import Choice, ProfileState, Staleness, choose
from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.profile import NamedFilter, SchedulingProfile, WeightedScorer
from epp.core.failures import PluginFailures
from epp.core.types import Refusal, RefusalReason
from epp.plugins.pickers import MaxScore, UniformRandom
from epp.plugins.scorers import ActiveRequests, Queue
from tests.builders import candidates, request

N = 4


class Keep(Struct, frozen=True):
    """A filter that keeps the slots that it is given."""

    slots: tuple[int, ...]
    type_name: ClassVar[str] = "keep"
    abilities: ClassVar[Abilities] = Abilities()

    def keep(self, request, candidates, /):
        return np.isin(candidates.slot, self.slots)


class Shed(Keep, frozen=True):
    abilities: ClassVar[Abilities] = Abilities(sheds_load=True)


class Broken(Struct, frozen=True):
    """A plugin of every kind that raises."""

    type_name: ClassVar[str] = "broken"
    abilities: ClassVar[Abilities] = Abilities()

    def score(self, request, candidates, /):
        raise RuntimeError

    keep = score


def profile(*, keep=(), picker=None, scorers=None):
    scorers = scorers or (
        WeightedScorer("queue", Queue(), 2.0),
        WeightedScorer("active", ActiveRequests(), 1.0),
    )
    filters = tuple(NamedFilter(f"filter-{at}", plugin) for at, plugin in enumerate(keep))
    return SchedulingProfile(
        name="p",
        filters=filters,
        scorers=scorers,
        picker_name="picker",
        picker=picker or MaxScore(),
    )


def state_of(made, *, seed=1, acting=None):
    return ProfileState(
        random=Random(seed),
        failures=PluginFailures(),
        kept_scores=KeptScores.of(made.scorers, acting.scorers if acting else ()),
        filters_alike=acting is not None and acting.filters == made.filters,
    )


def summary(choice):
    """All of a choice that can be compared."""
    if isinstance(choice, Refusal):
        return choice
    dropped = {name: slots.tolist() for name, slots in choice.dropped.items()}
    scored = choice.scored
    return (
        choice.ranked.slot.tolist(),
        dropped,
        scored.total.tolist(),
        scored.scores.tolist(),
        choice.picked,
        choice.sound,
    )


columns = st.lists(st.integers(0, 5), min_size=N, max_size=N)
kept = st.sets(st.integers(0, N - 1)).map(lambda slots: Keep(tuple(sorted(slots))))
stale = st.none() | st.lists(st.booleans(), min_size=N, max_size=N)


def staleness_of(unreachable):
    return None if unreachable is None else Staleness(2.0, np.array(unreachable))


@settings(max_examples=60, deadline=None)
@given(
    waiting=columns,
    inflight=columns,
    ages=st.lists(st.sampled_from((0.0, 3.0)), min_size=N, max_size=N),
    keep=st.lists(kept, max_size=2),
    unreachable=stale,
    rotation=st.integers(0, 9),
    dice=st.booleans(),
)
def test_a_choice_depends_on_its_arguments_alone(
    waiting, inflight, ages, keep, unreachable, rotation, dice
):
    """The same arguments and an equal state give the same choice, and the candidates stay."""
    made = profile(keep=keep, picker=UniformRandom() if dice else None)
    pool = candidates(
        waiting_requests=waiting,
        inflight_requests=inflight,
        metrics_age_s=ages,
        saturated=[False] * N,
    )
    state = state_of(made)
    before = [*pool.waiting_requests, *pool.inflight_requests, *pool.metrics_age_s]
    args = (made, request(), pool, state, rotation, staleness_of(unreachable))
    first = choose(*args)
    args = (made, request(), pool, state_of(made), rotation, staleness_of(unreachable))
    assert summary(choose(*args)) == summary(first)
    assert [*pool.waiting_requests, *pool.inflight_requests, *pool.metrics_age_s] == before
    left = set(range(N)).intersection(*(one.slots for one in keep))
    if not left:
        assert isinstance(first, Refusal)
        return
    assert first.offered is pool
    assert set(first.ranked.slot.tolist()) <= left
    assert first.slot in first.ranked.slot
    gone = set().union(*(slots.tolist() for slots in first.dropped.values()))
    assert gone.isdisjoint(first.ranked.slot.tolist())
    assert gone | set(first.ranked.slot.tolist()) == set(range(N))


@settings(max_examples=60, deadline=None)
@given(
    waiting=columns,
    inflight=columns,
    filters=st.tuples(st.booleans(), st.booleans()),
    common=st.booleans(),
    unreachable=stale,
)
def test_what_a_second_profile_borrows_is_what_it_would_have_computed(
    waiting, inflight, filters, common, unreachable
):
    """With and without the acting choice, it chooses the same."""
    shared = Keep((0, 1, 2))
    scorer = WeightedScorer("queue", Queue(), 1.0)
    acting = profile(keep=[shared] * filters[0], scorers=(scorer,))
    plugin = scorer.plugin if common else Queue()
    second = profile(
        keep=[shared] * filters[1],
        scorers=(WeightedScorer("q", plugin, 3.0), WeightedScorer("a", ActiveRequests(), 1.0)),
    )
    pool = candidates(waiting_requests=waiting, inflight_requests=inflight)
    fresh = staleness_of(unreachable)
    acted = choose(acting, request(), pool, state_of(acting), 1, fresh)
    state = state_of(second, acting=acting)
    borrowed = choose(second, request(), pool, state, 1, fresh, acted)
    computed = choose(second, request(), pool, state_of(second), 1, fresh)
    assert summary(borrowed) == summary(computed)


@pytest.mark.parametrize(("filter_type", "status"), [(Keep, 503), (Shed, 429)])
def test_a_profile_that_leaves_none_refuses_with_its_reason(filter_type, status):
    made = profile(keep=[Keep((0, 1)), filter_type(())])
    refusal = choose(made, request(), candidates(N), state_of(made), 0)
    assert isinstance(refusal, Refusal)
    assert refusal.status == status
    saturated = refusal.reason is RefusalReason.SATURATED
    assert saturated == (status == 429)
    assert refusal.message == (
        "no endpoint is left: 0 of 4 after dropping 2 by filter-0, 2 by filter-1"
    )
    assert refusal.eliminated == {"filter-0": 2, "filter-1": 2}


@pytest.mark.parametrize(
    ("ages", "unreachable", "ranked", "dropped"),
    [
        ([0, 9, 0, 9], [], [0, 2], {"stale-metrics": [1, 3]}),
        ([9, 9, 9, 9], [], [0, 1, 2, 3], {}),
        ([0, 9, 0, 9], [0, 3], [2], {"stale-metrics": [1], "unreachable": [0, 3]}),
        ([9, 9, 9, 9], [0], [1, 2, 3], {"unreachable": [0]}),
        ([0, 9, 9, 9], [0], [1, 2, 3], {"unreachable": [0]}),
        ([0, 0, 9, 9], [0, 1, 2, 3], [0, 1, 2, 3], {}),
    ],
)
def test_fresh_metrics_come_first_and_someone_is_always_left(ages, unreachable, ranked, dropped):
    made = profile()
    staleness = Staleness(2.0, np.isin(np.arange(N), unreachable))
    pool = candidates(metrics_age_s=ages)
    choice = choose(made, request(), pool, state_of(made), 0, staleness)
    assert choice.ranked.slot.tolist() == ranked
    assert {name: slots.tolist() for name, slots in choice.dropped.items()} == dropped


def test_a_choice_is_sound_unless_a_plugin_of_its_profile_failed():
    broken = profile(keep=[Broken()])
    state = state_of(broken)
    pool = candidates(N)
    assert not choose(broken, request(), pool, state, 0).sound
    assert state.failures.so_far == 1
    sound = profile()
    state.kept_scores = None
    assert choose(sound, request(), pool, state, 0).sound, "earlier failures do not count"


@given(
    total=columns, picked=st.permutations(range(N)), taken=st.integers(1, N), most=st.integers(1, 6)
)
def test_fallbacks_are_the_other_choices_and_then_the_best(total, picked, taken, most):
    pool = candidates(waiting_requests=[float(one) for one in total])
    made = profile(scorers=(WeightedScorer("queue", Queue(), 1.0),))
    found = choose(made, request(), pool, state_of(made), 0)
    chosen = list(picked[:taken])
    choice = Choice(pool, pool, {}, found.scored, chosen, True, request(), chosen[0], 0, 0, 0)
    slots = choice.fallbacks(most)
    assert len(slots) == min(most, N - 1)
    assert len({choice.slot, *slots}) == len(slots) + 1
    assert slots[: taken - 1] == picked[1:taken][:most]
    rest = [found.scored.total[slot] for slot in slots[taken - 1 :]]
    assert rest == sorted(rest, reverse=True)
