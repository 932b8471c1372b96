"""Latencies are learned from what the gateway shows of requests, and used in the next decision."""

import numpy as np
import pytest
from msgspec import structs

from epp.core.decision.inputs import (
    OutputStarted,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ServedBy,
)
from epp.core.decision.profile import SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.latency import OBSERVED_MIN, ExpectedLatency, LatencyPrediction
from epp.core.protocol.session import Exchange
from epp.core.protocol.usage import Usage
from epp.core.types import EndpointMetrics, Refusal
from epp.plugins import PICKERS
from epp.plugins.latency import Latency
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.explanation import explanation
from epp.shell.operators.decisions.recent_decisions import RecentDecisions, Wanted
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from tests.builders import endpoint, request


class Tenth:
    """Expects a tenth of a second for the first token and 10 ms for each other."""

    def expected_latency(self, request, candidates):
        parts = [np.full(len(candidates), part) for part in (0.0, 0.09, 0.01, 0.0)]
        return ExpectedLatency(*parts)


def scheduler_of(*, endpoints=2, latency=None, **fields):
    profile = SchedulingProfile(
        name="default",
        filters=(),
        scorers=(WeightedScorer("latency-scorer", Latency(), 1.0),),
        picker_name="max-score-picker",
        picker=PICKERS["max-score-picker"](),
    )
    latency = latency or LatencyPrediction(estimator=Tenth(), **fields)
    scheduler = Scheduler(SchedulerSettings(stages=Stages(decode=profile), latency=latency), seed=1)
    scheduler.take(PoolReplaced([endpoint(slot) for slot in range(endpoints)]), 0.0)
    for slot in range(endpoints):
        page = EndpointMetrics(waiting_requests=0.0, running_requests=1.0, kv_cache_usage=0.5)
        scheduler.take(PageScraped(slot, page), 0.0)
    return scheduler


def serve(scheduler, *, slow, stream=True, tokens=11, now=1.0):
    """Serve one request: the first token after `slow[slot]` seconds, the others 20 ms apart."""
    decision = scheduler.schedule(request(stream=stream), now)
    slot = decision.lease.slot
    first_s = now + slow[slot]
    scheduler.take(OutputStarted(decision.lease), first_s)
    outcome = Outcome(status=200, output_tokens=tokens)
    scheduler.take(RequestEnded(decision.lease, outcome), first_s + 0.02 * (tokens - 1))
    return slot


def test_the_slower_endpoint_receives_less():
    """At first both endpoints are predicted alike; the slow one is known after some answers."""
    scheduler = scheduler_of()
    slots = [serve(scheduler, slow=(0.1, 0.4)) for _ in range(200)]
    assert set(slots[:4]) == {0, 1}
    assert slots[-20:] == [0] * 20
    errors = scheduler.state.latency.errors_of(0)
    assert errors["ttft"].observed == errors["tpot"].observed > OBSERVED_MIN
    assert errors["ttft"].estimate == pytest.approx(0.0, abs=1e-6)
    # 20 ms were seen and 10 ms estimated.
    assert errors["tpot"].estimate == pytest.approx(0.5)
    assert errors["tpot"].learned < 0.1


@pytest.mark.parametrize(
    ("stream", "ending", "status", "tokens", "learned"),
    [
        (True, Ending.COMPLETE, 200, 11, (1, 1)),
        (True, Ending.COMPLETE, 200, 1, (1, 0)),
        (True, Ending.COMPLETE, 200, None, (1, 0)),
        (True, Ending.CLIENT_LEFT, 200, 11, (1, 0)),
        # The first chunk of an answer that is not streamed is its end.
        (False, Ending.COMPLETE, 200, 11, (0, 0)),
    ],
)
def test_only_streamed_answers_are_learned_from(stream, ending, status, tokens, learned):
    scheduler = scheduler_of(endpoints=1)
    decision = scheduler.schedule(request(stream=stream), 1.0)
    scheduler.take(OutputStarted(decision.lease), 1.1)
    scheduler.take(OutputStarted(decision.lease), 1.2)
    outcome = Outcome(ending=ending, status=status, output_tokens=tokens)
    scheduler.take(RequestEnded(decision.lease, outcome), 1.3)
    scheduler.take(RequestEnded(decision.lease, outcome), 1.4)
    errors = scheduler.state.latency.errors_of(0)
    assert (errors["ttft"].observed, errors["tpot"].observed) == learned


def test_a_request_that_another_endpoint_served_is_not_learned_from():
    scheduler = scheduler_of()
    decision = scheduler.schedule(request(stream=True), 1.0)
    other = next(one for _, one in scheduler.pool.endpoints() if one != decision.endpoint)
    scheduler.take(ServedBy(decision.lease, other.address), 1.0)
    scheduler.take(OutputStarted(decision.lease), 1.1)
    assert [scheduler.state.latency.errors_of(slot)["ttft"].observed for slot in (0, 1)] == [0, 0]


def test_an_endpoint_that_restarts_is_learned_anew():
    scheduler = scheduler_of(endpoints=1)
    for _ in range(OBSERVED_MIN):
        serve(scheduler, slow=(0.4,))
    scheduler.take(PoolReplaced([endpoint(0, incarnation="b")]), 2.0)
    assert scheduler.state.latency.errors_of(0)["ttft"].observed == 0


def test_what_is_learned_survives_a_configuration_with_the_same_estimator():
    estimator = Tenth()
    scheduler = scheduler_of(endpoints=1, latency=LatencyPrediction(estimator=estimator))
    serve(scheduler, slow=(0.4,))
    refusing = LatencyPrediction(estimator=estimator, refuses=True)
    scheduler.take(Reconfigured(structs.replace(scheduler.settings, latency=refusing)), 2.0)
    assert scheduler.state.latency.errors_of(0)["ttft"].observed == 1
    assert scheduler.state.latency.settings.refuses
    scheduler.take(Reconfigured(structs.replace(scheduler.settings, latency=None)), 2.0)
    assert scheduler.state.latency is None
    serve(scheduler, slow=(0.4,))


@pytest.mark.parametrize(
    ("tokens", "observed"), [(11, "0.05 s"), (None, "?"), (1, "?")], ids=["counted", "not", "one"]
)
async def test_a_decision_is_explained_with_predicted_and_observed_latencies(tokens, observed):
    """The time per output token needs the number of tokens, which --parse-response-usage reads."""
    scheduler = scheduler_of(endpoints=1)
    recent = RecentDecisions(scheduler.pool)
    for _ in range(100):
        serve(scheduler, slow=(0.4,))
    decision = scheduler.schedule(request(stream=True, request_id="mine"), 1.0)
    recent.decided(decision)
    exchange = Exchange(
        0.8,
        request=decision.lease.request,
        decision=decision,
        endpoint=decision.endpoint,
        first_output_at_s=1.5,
        usage=Usage(completion_tokens=tokens),
    )
    recent.completed(exchange, Outcome(status=200, output_tokens=tokens), 2.0)
    (row,) = await recent.rows(1, Wanted())
    lines = explanation(row).splitlines()
    assert row["latency"]["ttft"]["predicted_s"] == pytest.approx(0.4, rel=0.1)
    first, output = (line.strip() for line in lines if "median error" in line)
    assert first.startswith("predicted time to first token 0.399 s, observed 0.7 s; median error ")
    assert output.startswith("predicted time per output token 0.0")
    assert f" s, observed {observed}; median error " in output


async def test_without_prediction_nothing_is_explained_of_it():
    scheduler = scheduler_of(endpoints=1)
    scheduler.take(Reconfigured(structs.replace(scheduler.settings, latency=None)), 1.0)
    recent = RecentDecisions(scheduler.pool)
    recent.decided(scheduler.schedule(request(stream=True), 1.0))
    (row,) = await recent.rows(1, Wanted())
    assert "latency" not in row


async def test_an_unknown_error_is_explained_as_such():
    scheduler = scheduler_of(endpoints=1)
    recent = RecentDecisions(scheduler.pool)
    recent.decided(scheduler.schedule(request(stream=True), 1.0))
    (row,) = await recent.rows(1, Wanted())
    assert "predicted time to first token 0.1 s, observed ?; median error unknown" in explanation(
        row
    )


def test_the_page_of_endpoints_shows_the_errors():
    """A row names the prediction in use, and both errors once they are known. Without prediction it has no such column."""
    scheduler = scheduler_of(endpoints=1)
    (row,) = endpoint_rows(scheduler, EndpointStates(scheduler), 1.0)
    assert (row["ttft_prediction"], row["ttft_prediction_errors"]) == ("estimate", {})
    assert row["ttft_predicted_s"] is row["ttft_observed_s"] is None
    for _ in range(100):
        serve(scheduler, slow=(0.4,))
    (row,) = endpoint_rows(scheduler, EndpointStates(scheduler), 1.0)
    assert row["ttft_prediction"] == "learned"
    assert row["ttft_prediction_errors"]["estimate"] == pytest.approx(0.75)
    assert row["ttft_prediction_errors"]["learned"] < 0.1
    assert row["ttft_observed_s"] == pytest.approx(0.4)
    assert row["ttft_predicted_s"] == pytest.approx(0.4, rel=0.1)
    assert (row["tpot_predicted_s"], row["tpot_observed_s"]) == pytest.approx((0.02, 0.02), rel=0.1)
    scheduler.take(Reconfigured(structs.replace(scheduler.settings, latency=None)), 2.0)
    (row,) = endpoint_rows(scheduler, EndpointStates(scheduler), 1.0)
    assert "ttft_prediction" not in row


@pytest.mark.parametrize(("priority", "refused"), [(-1, True), (0, False)])
def test_only_sheddable_requests_are_refused_that_no_endpoint_can_serve_in_time(priority, refused):
    """With 429, once the error is known, and where requests are in flight at each endpoint."""
    scheduler = scheduler_of(endpoints=1, refuses=True)
    late = request(stream=True, priority=priority, headers={"x-llm-d-slo-ttft-ms": "50"})
    scheduler.schedule(request(stream=True), 1.0)
    assert isinstance(scheduler.schedule(late, 1.0), Decision)
    for _ in range(2 * OBSERVED_MIN):
        serve(scheduler, slow=(0.1,))
    answer = scheduler.schedule(late, 1.0)
    assert isinstance(answer, Refusal) == refused
    if isinstance(answer, Refusal):
        assert answer.status == 429
        assert "no endpoint is predicted to meet the SLO" in answer.message
    in_time = structs.replace(late, headers={"x-llm-d-slo-ttft-ms": "5000"})
    assert isinstance(scheduler.schedule(in_time, 1.0), Decision)
