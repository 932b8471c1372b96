"""A shadow profile judges and acts on nothing; where it fails, it alone fails."""

from random import Random
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.abilities import Abilities
from epp.core.decision.inputs import PageScraped, PoolReplaced, Reconfigured, RequestEnded
from epp.core.decision.profile import NamedFilter, SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.shadow import AGREED, DIFFERED, FAILED, NOBODY
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Outcome
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.types import EndpointMetrics
from epp.plugins.pickers import MaxScore, UniformRandom
from epp.plugins.scorers import ActiveRequests, PrefixCache, Queue
from tests.builders import endpoint, request

INDEXES = {"approx-prefix-cache-producer": PrefixIndexSettings()}


class Broken(msgspec.Struct, frozen=True):
    """Raises, or answers what it may not."""

    type_name = "broken"
    answer: object = None
    abilities: ClassVar[Abilities] = Abilities()

    def score(self, request, candidates):
        return self._answer()

    keep = score

    def pick(self, scores, candidates, random, rotation):
        return self._answer()

    def _answer(self):
        if self.answer is None:
            raise RuntimeError("secret")
        return self.answer


class Nobody(msgspec.Struct, frozen=True):
    type_name = "nobody"
    abilities: ClassVar[Abilities] = Abilities(sheds_load=True)

    def keep(self, request, candidates):
        return np.zeros(len(candidates), dtype=np.bool_)


class Counting(msgspec.Struct, frozen=True):
    """Prefers who has little to do, and counts how often it is asked."""

    asked: list[int]
    type_name = "counting"
    abilities: ClassVar[Abilities] = Abilities()

    def score(self, request, candidates):
        self.asked.append(len(candidates))
        return 1.0 / (1.0 + candidates.inflight_requests)


class Without(msgspec.Struct, frozen=True):
    """Drops the first."""

    asked: list[int]
    type_name = "without"
    abilities: ClassVar[Abilities] = Abilities()

    def keep(self, request, candidates):
        self.asked.append(len(candidates))
        return np.arange(len(candidates)) > 0


def profile(name="acting", *, prefix=0.0, queue=0.0, active=0.0, **more):
    given = {
        "name": name,
        "filters": (),
        "scorers": (
            WeightedScorer("prefix", PrefixCache(), prefix),
            WeightedScorer("queue", Queue(), queue),
            WeightedScorer("active", ActiveRequests(), active),
        ),
        "picker_name": "picker",
        "picker": MaxScore(),
    }
    return SchedulingProfile(**(given | more))


def scheduler(shadow, *, acting=None, seed=1, endpoints=4):
    made = Scheduler(
        SchedulerSettings(
            stages=Stages(decode=acting or profile(prefix=3, queue=1)),
            indexes=INDEXES,
            prefix="approx-prefix-cache-producer",
            shadow=shadow,
        ),
        seed=seed,
    )
    made.take(PoolReplaced([endpoint(number) for number in range(endpoints)]), 0.0)
    for slot in range(endpoints):
        scrape(made, slot, 0)
    return made


def scrape(made, slot, waiting, now=0.0):
    found = EndpointMetrics(waiting_requests=waiting, running_requests=0.0, kv_cache_usage=0.0)
    made.take(PageScraped(slot, found), now)


def asked(made, text=b"x" * 2560, now=0.0):
    return made.schedule(request(prompts=(text,), prompt_tokens=len(text) // 4), now)


def outcome(decision):
    if not isinstance(decision, Decision):
        return decision.reason
    return decision.number, decision.endpoint.name, decision.leg.matched_blocks


def traffic(made, seed):
    """What was decided, in a busy pool."""
    dice, found, leases = Random(seed), [], []
    for step in range(60):
        now = step * 0.05
        if step % 4 == 0:
            for slot in range(4):
                scrape(made, slot, dice.randrange(4), now)
        found.append(outcome(decision := asked(made, b"%d" % dice.randrange(5) * 1500, now)))
        leases.append(decision.lease)
        if dice.random() < 0.8:
            made.take(
                RequestEnded(leases.pop(dice.randrange(len(leases))), Outcome(status=200)), now
            )
    return found


SHADOWS = {
    "other weights": profile("s", queue=5),
    "dice": profile("s", queue=1, picker=UniformRandom()),
    "a scorer that raises": profile("s", scorers=(WeightedScorer("b", Broken(), 1.0),)),
    "a scorer that lies": profile("s", scorers=(WeightedScorer("b", Broken(answer=7), 1.0),)),
    "a filter that raises": profile("s", queue=1, filters=(NamedFilter("b", Broken()),)),
    "a picker that raises": profile("s", queue=1, picker=Broken()),
    "a filter that leaves nobody": profile("s", queue=1, filters=(NamedFilter("n", Nobody()),)),
}


@pytest.mark.parametrize("name", SHADOWS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 100))
def test_no_decision_changes_whatever_the_shadow_is(name, seed):
    """With dice in both, too."""
    acting = profile(prefix=3, queue=1, picker=UniformRandom())
    alone = traffic(scheduler(None, acting=acting), seed)
    shadowed = scheduler(SHADOWS[name], acting=acting)
    assert traffic(shadowed, seed) == alone
    assert sum(shadowed.shadow_totals.verdicts.values()) == 60
    assert len(shadowed.failures) == 0


def test_it_is_told_where_it_would_have_gone_and_at_what_price():
    """The prefix is on a busy endpoint: the acting profile follows it, the shadow the queue."""
    made = scheduler(profile("s", queue=5))
    first = asked(made)
    holder = first.lease.slot
    for slot in range(4):
        scrape(made, slot, 5 if slot == holder else slot)
    verdict = asked(made).account.shadow
    assert verdict.verdict == DIFFERED
    assert verdict.endpoint.name == f"pod-{min(set(range(4)) - {holder})}"
    assert (verdict.live_uncached_tokens, verdict.uncached_tokens) == (0.0, 640.0)
    assert (verdict.live_inflight_requests, verdict.inflight_requests) == (1, 0)
    assert verdict.fields()["parts"]["queue"] == 5.0
    assert verdict.fields()["live_parts"]["queue"] == 0.0
    totals = made.shadow_totals
    assert totals.uncached_tokens - totals.live_uncached_tokens == 640.0
    assert totals.picks.total() == 2


def test_the_same_profile_always_agrees():
    """Ties are broken in the same turn."""
    same = profile("s", prefix=3, queue=1)
    made = scheduler(same)
    traffic(made, 1)
    assert made.shadow_totals.verdicts == {AGREED: 60, DIFFERED: 0, NOBODY: 0, FAILED: 0}


@pytest.mark.parametrize("name", [name for name in SHADOWS if "raises" in name or "lies" in name])
def test_a_plugin_that_fails_is_named_apart(name):
    """Under its own name, and without its message, which may quote a prompt."""
    made = scheduler(SHADOWS[name])
    assert asked(made).account.shadow.verdict == FAILED
    (failing,) = made.shadow_failures
    assert failing.name in {"b", "picker"}
    assert "secret" not in failing.what
    assert made.shadow_totals.verdicts[FAILED] == 1
    assert made.shadow_totals.picks.total() == 0


def test_filters_that_leave_nobody_are_no_failure():
    made = scheduler(SHADOWS["a filter that leaves nobody"])
    assert asked(made).account.shadow.verdict == NOBODY


def test_without_a_shadow_nothing_is_judged():
    """And with the next configuration it may come or go; what was counted stays."""
    made = scheduler(None)
    assert asked(made).account.shadow is None
    with_shadow = msgspec.structs.replace(made.settings, shadow=profile("s", queue=1))
    made.take(Reconfigured(with_shadow), 0.0)
    assert asked(made).account.shadow is not None
    made.take(Reconfigured(msgspec.structs.replace(with_shadow, shadow=None)), 0.0)
    assert asked(made).account.shadow is None
    assert made.shadow_totals.verdicts.total() == 1


def test_a_share_of_the_decisions_is_judged_and_none_changes():
    """By dice of its own, the same for the same seed; so many that it is no accident."""
    made = [scheduler(profile("s", queue=1), acting=profile("a", prefix=1)) for _ in range(2)]
    for one in made:
        one.take(Reconfigured(msgspec.structs.replace(one.settings, shadow_share=0.2)), 0.0)
    alone = scheduler(None, acting=profile("a", prefix=1))
    verdicts = [[asked(one) for _ in range(500)] for one in made]
    judged = [[decision.account.shadow is not None for decision in seen] for seen in verdicts]
    assert judged[0] == judged[1]
    # Three and a half deviations of a count of 500.
    assert 69 <= sum(judged[0]) <= 131
    assert made[0].shadow_totals.verdicts.total() == sum(judged[0])
    expected = [asked(alone).endpoint.name for _ in range(500)]
    assert [decision.endpoint.name for decision in verdicts[0]] == expected


def told(made, seed, weights, acting_filters, filters):
    """What a shadow told of each decision of some traffic."""
    acting, second = made
    shadow = profile("s", scorers=second(*weights), filters=filters)
    one = scheduler(shadow, acting=profile(scorers=acting(3, 1, 2), filters=acting_filters))
    verdicts = []
    judge = one.shadow.judge
    one.shadow.judge = lambda *given: verdicts.append(judge(*given)) or verdicts[-1]
    traffic(one, seed)
    return [verdict.fields() for verdict in verdicts]


def three(*plugins):
    names = "prefix", "queue", "active"
    return lambda *weights: tuple(map(WeightedScorer, names, plugins, weights))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1_000),
    weights=st.tuples(*[st.sampled_from((0.5, 1.0, 4.0))] * 3),
    common=st.sets(st.integers(0, 2)),
    filtered=st.tuples(st.booleans(), st.booleans()),
)
def test_what_it_takes_over_is_what_it_would_have_found(seed, weights, common, filtered):
    """Whichever of the plugins are the very same: with twins of them it tells the same."""
    plugins = PrefixCache(), Queue(), ActiveRequests()
    twins = PrefixCache(), Queue(), ActiveRequests()
    mixed = [plugins[row] if row in common else twins[row] for row in range(3)]
    without = NamedFilter("without", Without([]))
    filters = [(without,) if has else () for has in filtered]
    found = told((three(*plugins), three(*mixed)), seed, weights, *filters)
    apart = [(NamedFilter("without", Without([])),) if has else () for has in filtered]
    assert found == told((three(*plugins), three(*twins)), seed, weights, *apart)
    assert len(found) == 60


def test_a_plugin_in_common_is_asked_once():
    """With other weights, or one more scorer; if the filters leave others, both are asked."""
    scored, filtered = [], []
    counting = WeightedScorer("counting", Counting(scored), 1.0)
    same = (NamedFilter("without", Without(filtered)),)
    weighty = (msgspec.structs.replace(counting, weight=5.0), WeightedScorer("queue", Queue(), 1.0))
    acting = profile(scorers=(counting,), filters=same)
    asked(scheduler(profile("s", scorers=weighty, filters=same), acting=acting))
    assert (scored, filtered) == ([3], [4])
    asked(scheduler(profile("s", scorers=weighty), acting=acting))
    assert (scored, filtered) == ([3, 3, 4], [4, 4])


def test_one_in_common_that_failed_is_asked_again_and_named_apart():
    broken = WeightedScorer("b", Broken(), 1.0)
    made = scheduler(profile("s", scorers=(broken,)), acting=profile(scorers=(broken,)))
    assert asked(made).account.shadow.verdict == FAILED
    assert [failing.failures for failing in (*made.failures, *made.shadow_failures)] == [1, 1]


def test_an_endpoint_that_left_is_not_counted_for_the_next_in_its_slot():
    made = scheduler(profile("s", queue=1), endpoints=1)
    asked(made)
    assert made.shadow_totals.picks == {0: 1}
    made.take(PoolReplaced([endpoint(9)]), 1.0)
    assert made.shadow_totals.picks[0] == 0
