"""Running requests that a simulated picker evicts for waiting ones of higher priority."""

from epp.core.types import RefusalReason
from epp.plugins.strategy import config_of, producer, step
from sim.cluster.policies import PolicySource
from sim.cluster.settings import ClientSettings
from sim.cluster.simulated_request import Fate
from tests.sim.made import arrival, ran

EVICTING = """
saturationDetector: {pluginRef: concurrency-detector}
featureGates: [flowControl]
flowControl: {enableEviction: true}
"""
LONG_TOKENS = 100_000
"""Prompt tokens whose prefill takes longer than the wait after which a request may be evicted."""


def policy(text=EVICTING):
    counted = producer("concurrency-detector", maxConcurrency=1)
    return PolicySource(
        name="evicting", text=config_of(counted, step("added-time-scorer")) + text, source="made"
    )


def sheddable(**fields):
    return arrival(0, priority=-1, **({"prompt_tokens": LONG_TOKENS} | fields))


def urgent(**fields):
    return arrival(1, time_s=0.5, priority=1, **fields)


def run(*given, text=EVICTING, **fields):
    (first, second), one = ran(given, policy=policy(text), pods=1, **fields)
    assert one.pickers.policies[0].open_requests == 0
    assert not any(pod.requests for pod in one.pods.announced())
    assert not one.pickers.queues[0].control.evictions
    return first, second, one


def test_a_request_without_a_first_token_makes_room_for_one_that_waited():
    evicted, served, one = run(sheddable(), urgent())
    assert (evicted.fate, evicted.status) == (Fate.REFUSED, 429)
    assert evicted.refusal.reason is RefusalReason.EVICTED
    assert evicted.first_token_at is None
    assert served.fate is Fate.COMPLETE
    assert served.routed_at + 1.0 <= evicted.ended_at < served.first_token_at
    assert one.gateway.evicted == 1


def test_the_engine_stops_computing_for_an_evicted_request():
    _, served, _ = run(sheddable(), urgent())
    alone, _ = ran([urgent()], pods=1)
    waited_s = 1.0
    took_s = served.first_token_at - served.arrived_at
    # The engine ends the step that runs, in which it computes a part of the long prompt.
    assert took_s < waited_s + 1.0 + alone[0].first_token_at - alone[0].arrived_at


def test_a_request_with_a_first_token_keeps_its_place():
    first, second, one = run(sheddable(prompt_tokens=128, output_tokens=500), urgent())
    assert first.fate is second.fate is Fate.COMPLETE
    assert second.first_token_at > first.finished_at
    assert one.gateway.evicted == 0


def test_nothing_is_evicted_without_the_setting():
    first, second, one = run(sheddable(), urgent(), text=EVICTING.replace("true", "false"))
    assert first.fate is second.fate is Fate.COMPLETE
    assert one.gateway.evicted == 0


def test_a_request_may_be_evicted_on_its_way_to_the_pod():
    """It does not reach the engine afterwards."""
    evicted, served, one = run(sheddable(), urgent(), network_delay_s=2.0)
    assert (evicted.fate, served.fate) == (Fate.REFUSED, Fate.COMPLETE)
    assert evicted.engine is None
    assert one.gateway.evicted == 1


def test_the_client_sends_an_evicted_request_again():
    """The earlier attempt does not reach the engine after the later one."""
    again, served, one = run(
        sheddable(), urgent(), network_delay_s=2.0, clients=ClientSettings(retries=3)
    )
    assert again.fate is served.fate is Fate.COMPLETE
    assert again.retries == one.gateway.evicted == 1


def test_a_client_may_leave_while_the_refusal_is_on_its_way():
    left, other, one = run(
        sheddable(), urgent(), network_delay_s=2.0, clients=ClientSettings(timeout_s=5.0)
    )
    assert left.fate is other.fate is Fate.ABORTED
    assert one.gateway.evicted == 1
