"""Measurement of requests that several pods serve: routes, legs, and transfers of KV blocks."""

from array import array
from typing import Final

import numpy as np

from epp.core.decision.account import Route
from epp.core.types import Seconds
from sim.cluster.handovers import Handover, HandoverTotals
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.measurement.measures import Floats, PodLoad, distribution, pod_load, ttft_of
from sim.measurement.summaries import StageSummary

_PARTS: Final = ("prefill_s", "reservation_s", "transfer_s", "other_s")


class StageMeasures:
    """A collector of the measurements of stages in one run.

    Each request is added when it ends; a completed one with a prefill leg takes 40 bytes.
    """

    def __init__(self) -> None:
        self._routes: dict[str, int] = {}
        self._refusals: dict[str, int] = {}
        self._legs = 0
        self._columns = {name: array("d") for name in ("arrived_s", *_PARTS)}
        self._pods: dict[str, PodLoad] = {}

    def add(self, request: SimulatedRequest) -> None:
        """Add the route, the refusal and the prefill leg of `request`, which has ended, to the
        figures of the stages.
        """
        handover, refusal = request.handover, request.refusal
        if refusal is not None and refusal.stage is not None:
            stage = refusal.stage.value
            self._refusals[stage] = self._refusals.get(stage, 0) + 1
        if request.route is not None:
            route = _route_of(request)
            self._routes[route] = self._routes.get(route, 0) + 1
        if handover is None or handover.prefilled_at is None:
            return
        self._legs += 1
        load = self._pods.setdefault(handover.pod.name, PodLoad())
        load.requests += 1
        load.prompt_tokens += request.arrival.prompt_tokens
        load.cached_tokens += handover.cached_tokens
        if request.fate is Fate.COMPLETE:
            self._add_parts(request, handover)

    def summary(self, totals: HandoverTotals, warm_up_s: Seconds) -> StageSummary:
        """Return the figures of the stages. Times exclude requests that arrived in the warm-up."""
        # numpy rejects an empty buffer.
        read = np.frombuffer if self._columns["arrived_s"] else np.array
        columns: dict[str, Floats] = {name: read(values) for name, values in self._columns.items()}
        steady = columns["arrived_s"] >= warm_up_s
        return StageSummary(
            routes=dict(sorted(self._routes.items())),
            refusals=dict(sorted(self._refusals.items())),
            prefill_legs=self._legs,
            **{name: distribution(columns[name][steady]) for name in _PARTS},
            transfers=totals.transfers,
            transferred_tokens=totals.tokens,
            transferred_bytes=int(totals.size_bytes),
            leases_expired=totals.leases_expired,
            prefill_pods={name: pod_load(load) for name, load in sorted(self._pods.items())},
        )

    def _add_parts(self, request: SimulatedRequest, handover: Handover) -> None:
        """Add the parts of the time to first token of a completed request with a prefill leg."""
        assert handover.prefilled_at is not None
        assert handover.reserved_at is not None
        assert handover.decode_since is not None
        assert handover.received_at is not None
        assert request.routed_at is not None
        prefill_s = handover.prefilled_at - request.routed_at
        reservation_s = handover.reserved_at - handover.decode_since
        transfer_s = handover.received_at - handover.reserved_at
        other_s = ttft_of(request) - prefill_s - reservation_s - transfer_s
        values = (request.arrived_at, prefill_s, reservation_s, transfer_s, other_s)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)


def _route_of(request: SimulatedRequest) -> str:
    """Return the name of the route of a placed request, such as `prefill-decode`: that of its
    decision or, for a policy without stages, `decode-only` or `prefill-decode`.
    """
    assert request.route is not None
    decision = request.route.decision
    route = None if decision is None else decision.account.route
    if route is not None:
        return route.value
    return Route.DECODE_ONLY.value if request.handover is None else Route.PREFILL_DECODE.value
