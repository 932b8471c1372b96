"""Operators see the route of a request and the endpoint of each stage."""

import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from epp.core.decision.inputs import ResponseStarted
from epp.core.journal.events import Responding
from epp.core.journal.witness import CaptureWitness, Sample
from epp.core.protocol.session import Exchange
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.operators.observation import Observation
from epp.shell.operators.traces.tracing import _destination
from tests.core.decision.staged import chat, pool_of


def exchange_of(decision):
    made = Exchange(0.0, request=decision.account.request)
    made.decision = decision
    return made


def test_a_line_of_the_log_has_the_route_and_both_endpoints():
    decision = pool_of(["prefill", "decode"]).schedule(chat(512), 0.1)
    with capture_logs() as lines:
        DecisionLog(structlog.get_logger(), level="debug").decided(decision)
    (line,) = lines
    assert (line["endpoint"], line["route"]) == ("pod-1", "prefill-decode")
    assert line["uncached_tokens"] == 512
    assert line["prefill"]["endpoint"] == "pod-0"
    assert line["prefill"]["eliminated"] == {"prefill-filter": 1}
    assert line["prefill"]["scores"][0]["endpoint"] == "pod-0"


def test_a_span_has_the_route_and_both_endpoints():
    decision = pool_of(["prefill", "decode"]).schedule(chat(512), 0.1)
    found = _destination(decision.account)
    assert found["homing.endpoint"] == "pod-1"
    assert found["homing.route"] == "prefill-decode"
    assert found["homing.prefill.endpoint"] == "pod-0"


def test_routes_and_refusals_are_counted_by_stage():
    registry = CollectorRegistry()
    telemetry = Telemetry(registry)
    observer = Observation(telemetry, DecisionLog(structlog.get_logger(), level="error"), None)
    made = pool_of(["prefill", "decode"])
    observer.decided(exchange_of(made.schedule(chat(), 0.1)))
    refusal = pool_of(["decode"]).schedule(chat(), 0.1)
    observer.refused(Exchange(0.0), refusal)
    telemetry.fold()

    def value(name, **labels):
        return registry.get_sample_value(name, labels)

    assert value("homing_routes_total", route="prefill-decode") == 1
    assert value("homing_stage_refusals_total", stage="prefill") == 1
    assert value("homing_refusals_total", reason="rejected-no-prefill-endpoints") == 1
    assert value("homing_filter_eliminated_total", filter="decode-filter") == 1


def test_the_end_of_a_prefill_is_captured():
    made = pool_of(["prefill", "decode"])
    notes = []
    made.witness = CaptureWitness(
        made, sample=Sample(1.0, 1), tell=notes.append, failed=raise_again
    )
    decision = made.schedule(chat(), 0.1)
    made.take(ResponseStarted(decision.lease), 0.2)
    assert notes[-1] == Responding(at_s=0.2, request=0)


def raise_again(error):
    raise error
