import math
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec import structs

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.abilities import Abilities
from epp.core.decision.inputs import (
    LoadReported,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ScrapeFailed,
    Tick,
)
from epp.core.decision.kept_scores import (
    MODEL_LENGTH_MAX,
    MODELS_MAX,
    SETS_MAX,
    KeptScores,
)
from epp.core.decision.profile import SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.parameters import Parameters
from epp.core.types import EndpointMetrics, Refusal
from epp.plugins import SCORERS
from epp.plugins.pickers import MaxScore
from tests.builders import endpoint, lora, request, resident

MODELS = ("base", "sql", "chat")


class Asked(Parameters, frozen=True):
    """Counts how often it is asked, in the list that it is given."""

    type_name: ClassVar[str] = "asked"
    abilities: ClassVar[Abilities] = Abilities(reads=("waiting_requests",))
    calls: list[int]

    def score(self, request, candidates, /):
        self.calls.append(len(candidates))
        return candidates.waiting_requests / 10.0


class AskedByModel(Asked, frozen=True):
    abilities: ClassVar[Abilities] = Abilities(reads=("adapter_state", "model"))

    def score(self, request, candidates, /):
        self.calls.append(len(candidates))
        return candidates.adapter_state.active(request.model).astype(np.float64)


class AskedAlways(Parameters, frozen=True):
    """Says nothing of what it reads."""

    type_name: ClassVar[str] = "asked-always"
    calls: list[int]

    def score(self, request, candidates, /):
        self.calls.append(len(candidates))
        return candidates.waiting_requests / 10.0


def pool_with(plugin, endpoints=3):
    """A scheduler with one scorer, whose endpoints wait for 0, 1, 2, ... requests."""
    profile = SchedulingProfile(
        name="default",
        filters=(),
        scorers=(WeightedScorer("one", plugin, 1.0),),
        picker_name="max-score-picker",
        picker=MaxScore(),
    )
    # Endpoints that were never scraped are candidates too.
    settings = SchedulerSettings(stages=Stages(decode=profile), metrics_staleness_s=math.inf)
    scheduler = Scheduler(settings, seed=1)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(endpoints)]), 0.0)
    scrape(scheduler)
    return scheduler


def scrape(scheduler, now=0.0, **fields):
    """The same for every endpoint in `fields`; it waits for as many requests as its slot says."""
    for slot, _ in scheduler.pool.endpoints():
        told = {"waiting_requests": float(slot)} | fields
        scheduler.take(PageScraped(slot, EndpointMetrics(**told)), now)


def first_scores(decision):
    return decision.leg.scored.scores[0].tolist()


def test_a_scorer_of_scraped_columns_is_asked_once_a_change():
    """Not at every request, and not after a scrape that tells the same."""
    calls = []
    scheduler = pool_with(Asked(calls=calls))
    scores = [first_scores(scheduler.schedule(request(), 0.0)) for _ in range(5)]
    scrape(scheduler, now=0.2, running_requests=7.0, kv_cache_usage=0.5)
    scores.append(first_scores(scheduler.schedule(request(), 0.2)))
    assert scores == [[0.0, 0.1, 0.2]] * 6
    assert calls == [3]

    scheduler.take(PageScraped(1, EndpointMetrics(waiting_requests=9.0)), 0.4)
    scores = [first_scores(scheduler.schedule(request(), 0.4)) for _ in range(5)]
    assert scores == [[0.0, 0.9, 0.2]] * 5
    assert calls == [3, 3]


def test_what_an_engine_reports_in_a_response_changes_the_scores():
    """As a scrape does."""
    scheduler = pool_with(Asked(calls=[]))
    decision = scheduler.schedule(request(), 0.0)
    assert first_scores(decision) == [0.0, 0.1, 0.2]
    slot = decision.lease.slot
    scheduler.take(LoadReported(decision.lease, "TEXT named_metrics.num_requests_waiting=9.0"), 0.0)
    assert scheduler.state.load_reports == 1
    assert first_scores(scheduler.schedule(request(), 0.0))[slot] == 0.9


def test_a_scorer_that_does_not_say_what_it_reads_is_asked_at_every_request():
    """As if nothing were kept."""
    calls = []
    scheduler = pool_with(AskedAlways(calls=calls))
    for _ in range(5):
        scheduler.schedule(request(), 0.0)
    assert calls == [3] * 5


def test_other_candidates_are_asked_about():
    """A subset has scores of its own; the same one again is known."""
    calls = []
    scheduler = pool_with(Asked(calls=calls))
    some = ("192.168.1.2:8000", "192.168.1.3:8000")
    for subset in (None, some, None, some):
        scheduler.schedule(request(subset=subset), 0.0)
    assert calls == [3, 2]


def test_an_endpoint_that_comes_goes_or_restarts_changes_the_scores():
    """Even in the slot of the one before it."""
    calls = []
    scheduler = pool_with(Asked(calls=calls))
    assert first_scores(scheduler.schedule(request(), 0.0)) == [0.0, 0.1, 0.2]
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1), endpoint(7)]), 1.0)
    assert first_scores(scheduler.schedule(request(), 1.0)) == [0.0, 0.1, 0.05]
    restarted = [endpoint(0), endpoint(1, incarnation="2"), endpoint(7)]
    scheduler.take(PoolReplaced(restarted), 2.0)
    assert first_scores(scheduler.schedule(request(), 2.0)) == [0.0, 0.0, 0.0]


def test_new_labels_change_the_scores():
    """A scorer may say that it reads them."""

    class Labelled(Parameters, frozen=True):
        type_name: ClassVar[str] = "labelled"
        abilities: ClassVar[Abilities] = Abilities(reads=("labels",))

        def score(self, request, candidates, /):
            return np.array([float(labels.get("fast", "0")) for labels in candidates.labels])

    scheduler = pool_with(Labelled(), endpoints=2)
    assert first_scores(scheduler.schedule(request(), 0.0)) == [0.0, 0.0]
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1, labels={"fast": "1"})]), 1.0)
    assert first_scores(scheduler.schedule(request(), 1.0)) == [0.0, 1.0]


def test_a_scorer_of_the_model_is_asked_once_a_model_and_change():
    """And again for all of them once the adapters change."""
    calls = []
    scheduler = pool_with(AskedByModel(calls=calls), endpoints=2)
    scheduler.take(PageScraped(1, EndpointMetrics(adapters=lora("sql", slots_max=2))), 0.0)

    def scores(*models):
        return [first_scores(scheduler.schedule(request(model=one), 0.0)) for one in models]

    assert scores("sql", "chat", "sql", "chat") == [[0.0, 1.0], [0.0, 0.0]] * 2
    assert calls == [2, 2]
    scheduler.take(PageScraped(0, EndpointMetrics(adapters=lora("chat", slots_max=2))), 0.0)
    assert scores("sql", "chat", "sql", "chat") == [[0.0, 1.0], [1.0, 0.0]] * 2
    assert calls == [2] * 4


def test_scores_are_kept_of_a_bounded_number_of_models():
    """A client may name any; the oldest are asked about again."""
    calls = []
    scheduler = pool_with(AskedByModel(calls=calls))
    for number in range(MODELS_MAX + 1):
        scheduler.schedule(request(model=str(number)), 0.0)
    assert len(calls) == MODELS_MAX + 1
    scheduler.schedule(request(model="1"), 0.0)
    assert len(calls) == MODELS_MAX + 1
    scheduler.schedule(request(model="0"), 0.0)
    assert len(calls) == MODELS_MAX + 2


def test_nothing_is_kept_of_a_long_name_of_a_model():
    """It is asked about once another model was."""
    calls = []
    scheduler = pool_with(AskedByModel(calls=calls))
    for model in ("m" * (MODEL_LENGTH_MAX + 1), "short") * 2:
        scheduler.schedule(request(model=model), 0.0)
    assert len(calls) == 3


def test_scores_are_kept_of_a_bounded_number_of_sets_of_candidates():
    """A gateway may name any subset; the least recently used are asked about again."""
    calls = []
    scheduler = pool_with(Asked(calls=calls), endpoints=SETS_MAX + 1)
    alone = [(f"192.168.1.{number + 1}:8000",) for number in range(SETS_MAX + 1)]
    for subset in (*alone[:SETS_MAX], alone[0], alone[SETS_MAX]):
        scheduler.schedule(request(subset=subset), 0.0)
    assert len(calls) == SETS_MAX + 1
    scheduler.schedule(request(subset=alone[0]), 0.0)
    assert len(calls) == SETS_MAX + 1
    scheduler.schedule(request(subset=alone[1]), 0.0)
    assert len(calls) == SETS_MAX + 2


@pytest.mark.parametrize("found", [KeyError("what it says"), [1.0, 1.0, 1.0], np.ones(2)])
def test_a_scorer_that_fails_is_asked_and_counted_at_every_decision(found):
    """A failure is not kept; once it is over the scores count."""
    answers = [found, found, np.array([0.25, 0.5, 0.75])]

    class Failing(Parameters, frozen=True):
        type_name: ClassVar[str] = "failing"
        abilities: ClassVar[Abilities] = Abilities(reads=("waiting_requests",))

        def score(self, request, candidates, /):
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    scheduler = pool_with(Failing())
    seen = [first_scores(scheduler.schedule(request(), 0.0)) for _ in range(4)]
    assert seen == [[0.5] * 3, [0.5] * 3, [0.25, 0.5, 0.75], [0.25, 0.5, 0.75]]
    assert [(one.name, one.failures) for one in scheduler.failures] == [("one", 2)]


def test_what_is_kept_is_clamped_and_has_no_unknown():
    """The median of the known stands for it, as at the first decision; None is unknown for all."""

    class Fixed(Parameters, frozen=True):
        type_name: ClassVar[str] = "fixed"
        abilities: ClassVar[Abilities] = Abilities(reads=())
        scores: list[float] | None

        def score(self, request, candidates, /):
            return None if self.scores is None else np.array(self.scores)

    for given_scores, expected in (
        ([math.nan, 7.0, 0.5], [0.75, 1.0, 0.5]),
        (None, [0.5, 0.5, 0.5]),
    ):
        scheduler = pool_with(Fixed(scores=given_scores))
        assert [first_scores(scheduler.schedule(request(), 0.0)) for _ in range(3)] == [
            expected
        ] * 3


def test_nobody_sees_the_arrays_that_scores_are_kept_in():
    """Who writes on the scores of one decision changes no other."""
    calls = []
    scheduler = pool_with(Asked(calls=calls))
    decisions = [scheduler.schedule(request(), 0.0) for _ in range(3)]
    decisions[0].leg.scored.scores[:] = 9.0
    decisions[1].leg.scored.scores[:] = 9.0
    assert first_scores(decisions[2]) == [0.0, 0.1, 0.2]
    assert first_scores(scheduler.schedule(request(), 0.0)) == [0.0, 0.1, 0.2]
    assert calls == [3]


def test_another_configuration_keeps_nothing_of_the_one_before():
    """The same name may have other parameters."""
    calls = []
    scheduler = pool_with(Asked(calls=calls))
    scheduler.schedule(request(), 0.0)
    scheduler.take(Reconfigured(scheduler.settings), 0.0)
    scheduler.schedule(request(), 0.0)
    assert calls == [3, 3]


@pytest.mark.parametrize("reads", [None, ("inflight_requests",), ("waiting_requests", "headers")])
def test_a_scorer_that_reads_what_requests_change_is_asked_at_each(reads):
    """Whatever else it reads."""
    odd = type("Odd", (Asked,), {"abilities": Abilities(reads=reads)}, frozen=True)
    assert KeptScores.of([WeightedScorer("near", odd(calls=[]), 1.0)]) is None


# The oracle: the same scheduler, with scorers that do not say what they read.


class Unkept(Parameters, frozen=True):
    """`plugin`, asked at every request."""

    type_name: ClassVar[str] = "unkept"
    plugin: Any

    def score(self, request, candidates, /):
        return self.plugin.score(request, candidates)


class Moody(Parameters, frozen=True):
    """Fails in one way or another where many requests run."""

    type_name: ClassVar[str] = "moody"
    abilities: ClassVar[Abilities] = Abilities(reads=("running_requests", "labels", "model"))

    def score(self, request, candidates, /):
        running = candidates.running_requests
        if (running > 8).any():
            raise KeyError("many")
        if (running > 7).any():
            return running[:0]
        if len(candidates.labels[0]) == 1 and request.model == "sql":
            return None
        return running - 3.0


NEEDED = {
    "endpoint-attribute-scorer": (
        "{attributeKey: load, producer: me, algorithm: {type: linear_lower_is_better}}"
    ),
    "header-label-affinity-scorer": "{headerName: x-zone, labelKey: zone}",
}
CONFIG = (
    "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
    + "".join(
        f"- {{type: {name}, parameters: {NEEDED.get(name, '{}')}}}\n"
        for name in (*SCORERS, "lora-capacity-filter")
    )
    + "- {type: label-selector-filter, parameters: {matchLabels: {app: vllm}}}\n"
)


def oracle_settings():
    base = build_settings(load_config(CONFIG, "c", plugin_tables()))
    moody = WeightedScorer("moody", Moody(), 1.5)
    profile = structs.replace(base.profile, scorers=(*base.profile.scorers, moody))
    unkept = tuple(
        structs.replace(scorer, plugin=Unkept(plugin=scorer.plugin)) for scorer in profile.scorers
    )
    return (
        structs.replace(base, stages=Stages(decode=profile)),
        structs.replace(base, stages=Stages(decode=structs.replace(profile, scorers=unkept))),
    )


KEEPING, FORGETFUL = oracle_settings()
REPORTS = (
    None,
    lora("sql", slots_max=1),
    lora("sql", "chat", slots_max=2),
    resident(gpu=("sql",), cpu=("chat",), slots_max=2),
    resident(gpu=("base", "chat"), active=("chat",), slots_max=2),
)
LABELS = ({"app": "vllm"}, {"app": "vllm", "zone": "a"}, {"app": "vllm", "zone": "b"})
PROMPTS = (b"", b"one " * 200, b"two " * 300)


def metrics(dice):
    return EndpointMetrics(
        waiting_requests=dice.choice([math.nan, 0.0, 0.0, 1.0, 3.0, 9.0]),
        attributes=dice.choice([{}, {}, {"load/me": 1.0}, {"load/me": 2.0}]),
        running_requests=dice.choice([math.nan, 0.0, 2.0, 5.0, 8.0, 9.0]),
        kv_cache_usage=dice.choice([math.nan, 0.0, 0.25, 1.0]),
        adapters=dice.choice(REPORTS),
        requests_total=dice.choice([None, None, 1.0, 2.0, 3.0]),
        asleep=dice.random() < 0.05,
    )


def endpoints(dice):
    return [
        endpoint(at, incarnation=dice.choice(["", "", "2"]), labels=dice.choice(LABELS))
        for at in dice.sample(range(8), dice.randint(3, 7))
    ]


def asked(dice):
    return request(
        model=dice.choice(MODELS),
        priority=dice.choice([0, 0, 0, -1]),
        subset=dice.choice([None] * 6 + [(endpoint(0).address, endpoint(1).address)]),
        prompts=(dice.choice(PROMPTS),),
    )


def changed(scheduler, settings, leases, dice, now):
    """Call one verb; return what it said."""
    present = [slot for slot, _ in scheduler.pool.endpoints()]
    verb = dice.choices(
        ["observe", "observe_failure", "complete", "replace", "configure"], [60, 5, 25, 6, 4]
    )[0]
    if verb == "observe":
        return scheduler.take(PageScraped(dice.choice(present), metrics(dice)), now)
    if verb == "observe_failure":
        return scheduler.take(
            ScrapeFailed(slot=dice.choice(present), answered=dice.random() < 0.5), 0.0
        )
    if verb == "replace":
        return scheduler.take(PoolReplaced(endpoints(dice)), now)
    if verb == "configure":
        return scheduler.take(Reconfigured(settings), now).restarted
    scheduler.take(Tick(), now)
    outcome = Outcome(ending=dice.choice(list(Ending)), status=dice.choice([None, 200, 503]))
    return scheduler.take(RequestEnded(leases.pop(0), outcome), now).set_aside if leases else None


def run(settings, seed):
    """All that a scheduler with `settings` says to a hundred changes, and requests after each."""
    dice = Random(seed)
    scheduler = Scheduler(settings, seed=3)
    now = 0.0
    scheduler.take(PoolReplaced(endpoints(dice)), now)
    leases = []
    for _ in range(100):
        now += dice.choice([0.0, 0.1, 0.1, 1.0])
        yield changed(scheduler, settings, leases, dice, now)
        for _ in range(dice.randint(0, 3)):
            decided = scheduler.schedule(asked(dice), now)
            yield [(one.name, one.failures, one.what) for one in scheduler.failures]
            if isinstance(decided, Refusal):
                yield decided
                continue
            leases.append(decided.lease)
            scored = decided.leg.scored
            yield (
                decided.number, decided.endpoint, decided.leg.picked, decided.leg.matched_blocks,
                decided.leg.ready, dict(decided.leg.eliminated), decided.leg.candidates.slot.tolist(),
                scored.total.tobytes(), scored.scores.tobytes(),
            )  # fmt: skip
            # Nobody minds what is done to what was handed out.
            scored.scores[:] = 7.0


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_changes_no_decision_no_score_and_no_count_of_failures(seed):
    """Whatever the verbs in between: a scheduler that asks every scorer every time says the same."""
    for kept, forgotten in zip(run(KEEPING, seed), run(FORGETFUL, seed), strict=True):
        assert kept == forgotten
