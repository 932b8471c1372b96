"""How pods end that are asked to, and what is counted and told of those that come and go."""

from msgspec.structs import replace

from sim.cluster.simulated_request import Fate
from tests.sim.made import arrivals, cluster, ran


def drained(at_s, grace_s, *, ended=None, output=(200, 400)):
    """The requests of a run in which pod 1 of three is drained, and the cluster."""
    requests = []
    one = cluster(arrivals(300, rate=10.0, output=output), pods=3, ended=requests.append)
    one.loop.at(at_s, lambda: one.pods.drain(one.pods[1], grace_s, ended))
    one.run()
    return requests, one


def test_a_drained_pod_ends_its_answers_and_is_gone():
    """Nothing that it had fails, and nothing comes after discovery has told."""
    requests, one = drained(4.0, 60.0)
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    of_it = [request for request in requests if request.pod is one.pods[1]]
    assert max(request.routed_at for request in of_it) <= 5.0
    assert max(request.ended_at for request in of_it) > 5.0
    assert not one.pods[1].alive


def test_who_asked_is_told_of_the_end_once():
    """At the end of the grace at the latest; what the pod still had has failed."""
    told = []
    requests, one = drained(4.0, 2.0, ended=lambda: told.append(True), output=(2_000, 2_000))
    assert told == [True]
    failed = [request for request in requests if request.fate is Fate.FAILED]
    assert failed
    assert {request.pod for request in failed} == {one.pods[1]}


def test_a_pod_that_died_meanwhile_does_not_end_again():
    """Nobody is told: whoever killed it says what follows."""
    told = []
    one = cluster(arrivals(100, rate=10.0, output=(200, 400)), pods=3)
    pod = one.pods[1]
    one.loop.at(4.0, lambda: one.pods.drain(pod, 60.0, lambda: told.append(True)))
    one.loop.at(4.5, one.pods.end, pod)
    one.loop.at(5.0, lambda: one.pods.drain(pod, 0.0, lambda: told.append(True)))
    one.run()
    assert told == []
    assert not pod.alive


def test_a_page_counts_what_its_engine_looked_up_and_found():
    """As that of a real engine does: each request once, when it is admitted and with its first token."""
    requests, one = ran(arrivals(200, rate=10.0), pods=2)
    for pod in one.pods:
        page = pod.page(one.loop.now)
        there = [request for request in requests if request.pod is pod]
        assert page.ttft_count == len(there) > 0
        assert page.cache_queried_tokens == sum(each.engine.prompt_tokens for each in there)
        assert page.cache_hit_tokens == sum(each.engine.cached_tokens for each in there) > 0


def test_a_new_process_counts_from_nothing():
    _, one = ran(arrivals(20, rate=10.0), pods=1)
    (pod,) = one.pods
    pod.die()
    pod.restart()
    page = pod.page(one.loop.now)
    assert (page.cache_queried_tokens, page.cache_hit_tokens, page.ttft_count) == (0.0, 0.0, 0.0)


def test_a_page_may_tell_of_more_blocks_than_there_are():
    """How full the cache is it tells of those that there are."""
    requests, one = ran(arrivals(40, rate=10.0), pods=2)
    usual = one.pods[0].page(one.loop.now)
    (kind, *_) = one.settings.pods
    assert usual.blocks_total == kind.engine.blocks_total
    more = replace(kind, advertised_blocks=2 * kind.engine.blocks_total)
    lied, other = ran(arrivals(40, rate=10.0), pods=(more, more))
    assert len(lied) == len(requests)
    page = other.pods[0].page(other.loop.now)
    assert page.blocks_total == 2 * usual.blocks_total
