"""What clients are told of why their request went where it went."""

import msgspec
import pytest

from epp.core.decision.explaining import HEADER_CHARACTERS_MAX, explained, explaining_headers
from epp.core.decision.profile import WeightedScorer
from epp.core.failures import PluginFailures
from epp.core.knowledge.ejection import Cause
from epp.core.knowledge.outliers import Outlier
from epp.plugins.added_time import AddedTime
from tests.shell.operators.decided import make_decision, with_leg
from tests.shell.operators.decisions.test_explanation import Told

SLOW = Outlier(cause=Cause.SLOW, slowness=3.4, failures=0, ejected=False)


def headers(decision, outliers=(), failures=None):
    noted = explained(decision.leg, dict(outliers))
    failures = PluginFailures() if failures is None else failures
    return explaining_headers(noted, failures)


def reason(*told, **more):
    return headers(*told, **more)["x-homing-reason"]


def test_what_clients_are_told_is_a_header():
    """One line of printable ASCII that ends somewhere, whatever endpoints and scorers are called."""
    decision = make_decision()
    named = with_leg(
        decision,
        endpoint=msgspec.structs.replace(decision.endpoint, name="pöd\r\nset-cookie: a=b"),
        scorers=("x\n" * 400, *decision.leg.scorers[1:]),
    )
    for told in headers(named).values():
        assert told.isascii()
        assert told.isprintable()
        assert len(told) <= HEADER_CHARACTERS_MAX
    assert headers(decision) == {
        "x-homing-endpoint": "prod/vllm-3",
        "x-homing-reason": "score 4.25, next 3.779, decided by prefix-cache-scorer, 3 of 10 blocks",
    }


def test_the_only_candidate_is_told_as_such():
    """There was no choice."""
    assert "the only candidate" in reason(make_decision(endpoints=1, picked=0))


def test_a_lone_scorer_of_costs_tells_seconds():
    """Its score is 1 whatever the difference; one bad pod stretches it, and not the seconds."""
    alone = (WeightedScorer("added-time-scorer", AddedTime(), 1.0),)
    told = [
        reason(Told(*alone, waiting=waiting).decide()) for waiting in ([0, 0], [0, 0, 100_000.0])
    ]
    assert told[0] == told[1], "a third that is overloaded changes nothing"
    first, second, *_, blocks = told[0].split(", ")
    assert first.startswith("added-time-scorer 0.1")
    assert first.endswith(" s")
    assert second == first.replace("added-time-scorer", "next"), "two that are idle cost the same"
    assert blocks == "0 of 9 blocks"


def test_beside_other_scorers_the_seconds_come_after_the_scores():
    """The sums decide, and are told first."""
    both = (
        WeightedScorer("added-time-scorer", AddedTime(), 1.0),
        Told().settings.profile.scorers[0],
    )
    told = reason(Told(*both).decide())
    assert told.startswith("score ")
    assert "added-time-scorer 0.1" in told


def test_candidates_that_are_slow_are_marked():
    """The chosen one, or the next best."""
    decision = make_decision()
    assert reason(decision, {3: SLOW}).startswith("score 4.25 (slow), next 3.779, ")
    second = decision.leg.runner_up
    assert ", next 3.779 (slow), " in reason(decision, {second: SLOW})


def test_a_cost_that_cannot_be_told_costs_itself_alone(monkeypatch):
    """A plugin that fails is counted; the scores are told."""

    def broken(*_):
        raise KeyError("secret")

    monkeypatch.setattr(AddedTime, "cost_parts", broken)
    failures = PluginFailures()
    told = reason(
        Told(WeightedScorer("added-time-scorer", AddedTime(), 1.0)).decide(), failures=failures
    )
    assert told.startswith("score 1, next 1, a tie, ")
    assert [one.name for one in failures] == ["added-time-scorer"]
    assert "secret" not in told


@pytest.mark.parametrize("endpoints", [1, 4])
def test_nothing_is_noted_that_nobody_tells(endpoints):
    """Without a scorer of costs the numbers are not looked up."""
    assert explained(make_decision(endpoints=endpoints, picked=0).account.leg, {}).numbers == ()
