"""Invariants that must hold after every event of a simulation run, one function each. They raise
AssertionError for a violation.

`sim replay --check` and the tests check all of them. The checks look at the complete state, so a
run takes many times as long.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from epp.core.types import Seconds
from sim.cluster.cluster import Cluster
from sim.engine.engine import Engine
from sim.engine.request import EngineRequest


def no_block_used_twice(cluster: Cluster) -> None:
    """Check in each pod's engine that the reference count of each KV block equals the number of
    requests that use it, and that no request is both running and waiting.
    """
    for pod in cluster.pods:
        pod.engine.check()


def free_and_used_are_all(cluster: Cluster) -> None:
    """Check that the free and the used KV blocks of each rank add up to all its blocks except the
    reserved one.
    """
    for pod in cluster.pods:
        for rank in pod.ranks:
            pool = rank.pool
            assert pool.blocks_free >= 0, f"{pod.name}: {pool.blocks_free} free blocks"
            holdings = [request.holding for request in rank.holders()]
            used = sum(holding.blocks for holding in holdings) - pool.duplicate_blocks
            both = pool.blocks_free + used
            assert both == pool.blocks_usable, f"{pod.name}: {both} of {pool.blocks_usable} blocks"


def no_request_lost(cluster: Cluster) -> None:
    """Check that each request that arrived is in progress or has ended exactly once, and that each
    pod's engine has the requests that the pod serves and no others, except those that are leaving.
    """
    clients = cluster.clients
    ended = sum(clients.fates.values())
    under_way = len(clients.requests)
    assert clients.arrived == ended + under_way, (
        f"{clients.arrived} requests arrived, {ended} ended, {under_way} are under way"
    )
    for pod in cluster.pods:
        if not pod.alive:
            assert not pod.requests, f"{pod.name} is dead and has {len(pod.requests)} requests"
            continue
        inside = Counter(
            request.request_id
            for rank in pod.ranks
            for request in (*rank.running, *rank.waiting, *_decode_legs(rank))
            if not request.gone
        )
        assert not inside or max(inside.values()) == 1, f"{pod.name} has a request twice"
        known = set(pod.requests)
        assert set(inside) <= known | pod.leaving, f"{pod.name} runs requests without a client"
        # A request without an engine is at the sidecar.
        finishing = {
            key
            for key, request in pod.requests.items()
            if request.engine is None or request.engine.finished
        }
        assert known - finishing <= set(inside), f"{pod.name} has lost a request"


def _decode_legs(rank: Engine) -> tuple[EngineRequest, ...]:
    """Return the decode legs on a data-parallel rank that have KV blocks and do not compute yet."""
    return () if rank.legs is None else (*rank.legs.fetching, *rank.legs.fetched)


def leases_return_to_zero(cluster: Cluster) -> None:
    """Check that each picker has one open lease for each request that it routed and that has not
    ended, and counts nothing in flight if it has none.

    Requests are excepted if the gateway reported an endpoint that the picker does not know.
    """
    routed = [
        request.policy
        for request in cluster.clients.requests.values()
        if request.route is not None
        and not (request.passed_over and request.route.lease and request.route.lease.slot < 0)
    ]
    for replica, policy in enumerate(cluster.pickers.policies):
        told = policy.open_requests
        given = sum(one is policy for one in routed)
        assert told == given, f"picker {replica} has {told} open leases for {given} requests"
        if told:
            continue
        counts = policy.inflight_counts()
        assert not any(counts), f"picker {replica} counts {counts} requests in flight, has none"


class TimeNeverRunsBack:
    """A check that simulated time never decreases from one event to the next."""

    def __init__(self) -> None:
        self._latest_s: Seconds = 0.0

    def __call__(self, cluster: Cluster) -> None:
        now = cluster.loop.now
        assert now >= self._latest_s, f"time went back from {self._latest_s} s to {now} s"
        self._latest_s = now


CHECKS: Final = (
    no_block_used_twice,
    free_and_used_are_all,
    no_request_lost,
    leases_return_to_zero,
)


def checker(cluster: Cluster) -> Callable[[], None]:
    """Return a function that checks all invariants of `cluster`, to be called after each event."""
    checks = (*CHECKS, TimeNeverRunsBack())

    def check() -> None:
        for one in checks:
            one(cluster)

    return check
