"""Clients that ask again, and clients that leave."""

import pytest

from sim.cluster.check import checker
from sim.cluster.incidents import Leave, Restart, play
from sim.cluster.settings import ClientSettings
from sim.cluster.simulated_request import Fate
from sim.measurement.measures import ttft_of
from tests.sim.made import arrival, arrivals, cluster


def played(incidents, given, **fields):
    requests = []
    one = cluster(given, ended=requests.append, **fields)
    play(incidents, one)
    one.run(checker(one))
    return sorted(requests, key=lambda request: request.sequence), one


def test_pauses_double():
    clients = ClientSettings(pause_s=0.5)
    assert [clients.pause_before_s(retry) for retry in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert clients.pause_before_s(1_000) == 0.5 * 2**30


def test_what_a_dying_pod_had_is_sent_again_and_completes():
    """It is one request, and its time counts from its first sending."""
    given = list(arrivals(150, rate=15.0, output=(100, 200)))
    incidents = [Restart(at_s=3, pods=(0, 1), startup_s=2)]
    without, _ = played(incidents, given, pods=3)
    failed = [request.sequence for request in without if request.fate is Fate.FAILED]
    assert failed
    requests, one = played(incidents, given, pods=3, clients=ClientSettings(retries=5, pause_s=0.2))
    assert [request.fate for request in requests] == [Fate.COMPLETE] * 150
    again = [request for request in requests if request.retries]
    assert one.clients.retried == sum(request.retries for request in again)
    assert {request.sequence for request in again} & set(failed)
    for request in again:
        assert request.routed_at - request.arrived_at > 0.2
        first_s = request.first_token_at + 0.0005 - request.arrived_at
        assert ttft_of(request) == pytest.approx(first_s)
    assert [policy.open_requests for policy in one.pickers.policies] == [0]


def test_retries_end():
    """Nobody is there any more: each is refused as often as it is sent, with longer pauses."""
    given = [arrival(time_s=5.0)]
    clients = ClientSettings(retries=2, pause_s=1.0)
    (request,), one = played([Leave(at_s=1)], given, clients=clients, network_delay_s=0.0)
    assert (request.fate, request.status, request.retries) == (Fate.REFUSED, 503, 2)
    assert request.ended_at == pytest.approx(8.0)
    assert one.clients.fates[Fate.REFUSED] == 1


def test_a_request_that_is_wrong_is_not_sent_again():
    (request,), _ = played([], [arrival(prompt_tokens=10**6)], clients=ClientSettings(retries=3))
    assert (request.fate, request.status, request.retries) == (Fate.FAILED, 400, 0)


def test_a_client_leaves_at_its_timeout_whether_it_is_answered_or_waits_to_ask_again():
    """What it had in an engine ends; who pauses before a retry leaves too."""
    given = [arrival(0, output_tokens=5_000), arrival(1, output_tokens=2)]
    (long, short), one = played([], given, clients=ClientSettings(timeout_s=3.0), pods=1)
    assert (long.fate, short.fate) == (Fate.ABORTED, Fate.COMPLETE)
    assert long.ended_at == pytest.approx(3.0)
    assert not one.pods[0].requests
    clients = ClientSettings(retries=9, pause_s=2.0, timeout_s=3.0)
    (refused,), _ = played([Leave(at_s=1)], [arrival(time_s=5.0)], clients=clients)
    assert (refused.fate, refused.retries) == (Fate.ABORTED, 2)
    assert refused.ended_at == pytest.approx(8.0)
