"""Collect the current state of a picker for `epp top` and the page /live.

The state is computed on request, at most once in `LOOK_S` seconds, from data that are recorded
anyway.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct, field

from epp import __version__
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.pool import Standing
from epp.core.protocol.flow_queue import FlowQueue, WaitingFlow
from epp.core.types import Endpoint, Seconds
from epp.journal.records import Applied, RefusedDocument
from epp.shell.engines.first_tokens import FirstTokens
from epp.shell.engines.kv_event_source import SourceRow
from epp.shell.operators.decisions.configuration_changes import ConfigurationChanges
from epp.shell.operators.decisions.decision_rows import Row
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.recent_decisions import (
    EndpointSums,
    RecentDecisions,
    RecentSums,
    Wanted,
)
from epp.shell.operators.journal import JournalSnapshot
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from epp.shell.process.own_process import ProcessLately

LOOK_S: Final = 1.0
WINDOW_S: Final = 60.0
RECORDS_MAX: Final = 10_000
"""Maximum number of records of decisions that the live view adds up. Adding them up takes about 20
ms in all, in parts between which the event loop runs.
"""
ENDPOINTS_MAX: Final = 200
"""Maximum number of endpoints in the live view. Endpoints with a problem take precedence, then
those with most requests.
"""
DECISIONS_SHOWN: Final = 12
PREFILLS_MAX: Final = 64
"""Maximum number of pairs of endpoints whose prefills in flight the live view has."""


class LiveLatency(Struct, frozen=True):
    """Predicted and observed latency of an endpoint in the live view: medians of its last requests;
    fields are None if unknown.
    """

    used: str
    """Source of the predictions that decisions use: "estimate", "learned" or "none"."""
    predicted_s: Seconds | None
    observed_s: Seconds | None
    error: float | None
    """Median relative error of the predicted latency, by the better of the sources `estimate` and
    `learned`.
    """


class LiveBand(Struct, frozen=True, kw_only=True):
    """The waiting requests of one priority in the live view."""

    priority: int
    requests: int
    flows: int
    oldest_wait_s: Seconds
    most: list[WaitingFlow]
    """The flows with the most waiting requests of this priority, most first."""


class LiveEndpoint(Struct, frozen=True, kw_only=True):
    """The state of one endpoint in the live view; fields are None if unknown."""

    name: str
    address: str
    state: str
    slowness: float | None
    """Durations of the endpoint's requests relative to expectation, as a multiple of the pool's
    median.
    """
    outlier: str | None
    """"slow" or "failing" if the endpoint is an outlier, else None."""
    ejected: bool
    since: str
    """Time since which the endpoint has its state, or its problem as an outlier, in ISO 8601."""
    reason: str
    """Reason why the endpoint is not ready, slow, failing, ejected or full; "" if it has no
    problem.
    """
    metrics_age_s: float | None
    waiting: float | None
    running: float | None
    kv_cache_usage: float | None
    inflight_requests: int
    inflight_prefill_tokens: float | None
    requests: int
    """Number of requests within the window of the live view for which this endpoint was chosen, or
    used by the gateway instead of the chosen one; a request counts only for the endpoint that the
    gateway used, as far as known. All counts and shares of requests below are of the same window.
    """
    share: float
    """The endpoint's share of all requests that were routed within the window of the live view,
    from 0 to 1.
    """
    failed: int
    prompt_tokens: int = 0
    """Number of prompt tokens of the endpoint's requests within the window of the live view;
    `predicted_hits` is a share of it.
    """
    compared_prompt_tokens: int = 0
    """Number of prompt tokens of those requests to the endpoint whose response reported its cached
    tokens; `compared_hits` and `actual_hits` are shares of it.
    """
    predicted_hits: float | None
    """Share of prompt tokens that were estimated as cached at the endpoint, from 0 to 1."""
    compared_hits: float | None
    """Share of prompt tokens that were estimated as cached at the endpoint, for only those requests
    whose response reported its cached tokens. Compare it with `actual_hits`.
    """
    actual_hits: float | None
    """Share of prompt tokens that were cached at the endpoint, for those requests whose response
    reported it.
    """
    engine_ttft_s: Seconds | None = None
    """Mean time to first token in the last minute, in seconds, as measured by the endpoint's engine
    for all its requests.
    """
    kv_events: str | None = None
    """State of the endpoint's KV-cache events, such as "live", "replaying" or "silent", or None if
    no index needs them.
    """
    kv_events_problem: str | None = None
    """Reason why no KV-cache events are received from the endpoint, or None."""
    engine_hits: float | None = None
    """Share of prompt tokens that the engine found in its prefix cache, by its own counters over
    some minutes and for all its clients.
    """
    room_load: float | None = None
    """Load of the endpoint as a share of its room, by which the queue judges; full from 1 on."""
    room_requests: int | None = None
    """Number of further requests for which the engine's slots and its queue are estimated to
    suffice; None also if the queue judges by other limits.
    """
    latencies: dict[str, LiveLatency] = field(default_factory=dict)
    """Predicted and observed latencies by "ttft" and "tpot"; empty if none are predicted."""


class LiveScore(Struct, frozen=True, kw_only=True):
    """The score of one candidate of a decision in the live view."""

    endpoint: str
    total: float
    parts: dict[str, float]
    state: str = "ready"
    """State of the candidate at the time of the decision."""
    cost: float | None = None
    """Cost of the candidate by the first scorer with costs, or None if there is none or it is
    unknown.
    """
    unit: str = ""
    """Unit of the candidate's `cost`, such as "s"."""


class LiveDecision(Struct, frozen=True, kw_only=True):
    """A decision or refusal in the live view."""

    at: str
    request_id: str
    model: str
    refused: str | None = None
    """Reason why the request was refused, or None for a decision; a refusal has no scores."""
    status: int | None = None
    """HTTP status of the response or of the refusal, or None if no response was seen yet."""
    score: LiveScore | None = None
    runner_up: LiveScore | None = None
    decided_by: list[str] = field(default_factory=list)
    """Names of the scorers that decided, or of the parts of the cost if the profile has only one
    scorer.
    """
    matched_blocks: int = 0
    total_blocks: int = 0
    served_by: str | None = None
    """Address of the endpoint that the gateway used instead of the chosen one, or None."""
    route: str | None = None
    """Route of the request through its endpoints, or None if the configuration has one stage."""
    prefill: str | None = None
    """Name of the endpoint that prefills, or None if the endpoint in `score` does it."""
    encode: str | None = None
    """Name of the endpoint that encodes media, or None if the endpoint that prefills does it or
    nothing is encoded.
    """


class LivePrefills(Struct, frozen=True, kw_only=True):
    """The requests in flight whose prompt one endpoint computes for another, in the live view."""

    prefill: str
    """Name of the prefill endpoint of the pair."""
    decode: str
    """Name of the endpoint that receives the KV cache and decodes."""
    requests: int
    """Number of the picker's own latest requests for this pair of endpoints whose prefill has
    neither ended nor become overdue.
    """


class Live(Struct, frozen=True, kw_only=True):
    """The state of a picker at one time, as shown by `epp top` and the page /live."""

    version: str
    at_s: float
    """Unix time in seconds at which this state of the picker was collected."""
    pool: str
    window_s: float
    """Length in seconds of the window over which requests are counted; shorter than usual if older
    records were dropped or there are more than `RECORDS_MAX`.
    """
    decided: int
    refused: dict[str, int]
    """Number of refused requests in the window, by reason."""
    shed_total: int
    """Number of ext_proc streams that were rejected unread since the start."""
    unparsed_total: dict[str, int] = field(default_factory=dict)
    """Number of requests since the start whose body was not fully understood, by reason."""
    decided_total: int
    endpoints_total: int
    endpoints_ready: int
    endpoints: list[LiveEndpoint]
    """Endpoints in the order of their names, at most `ENDPOINTS_MAX`."""
    decisions: list[LiveDecision]
    """Most recent decisions and refusals, newest first, at most `DECISIONS_SHOWN`."""
    configuration: Applied
    configuration_refused: RefusedDocument | None
    prefills: list[LivePrefills] = field(default_factory=list)
    """Prefills in flight by pair of endpoints, most requests first; at most `PREFILLS_MAX` pairs."""
    process: ProcessLately | None = None
    """CPU, memory and event-loop lag of the picker's process, or None from a picker of an earlier
    version.
    """
    process_at: str = ""
    """Address of the picker to which `process` belongs; "" if there is only one picker."""
    capture: JournalSnapshot | None = None
    """Counts of the capture, or None if nothing is captured."""
    queue: list[LiveBand] | None = None
    """Bands with waiting requests, highest priority first, or None if the configuration lets no
    request wait.
    """
    evicted_total: int = 0
    """Number of running requests that the queue evicted since the start of the picker."""


class LiveView:
    """A collector of a picker's current state for `epp top` and /live."""

    def __init__(  # noqa: PLR0913, PLR0917  what a look is made of
        self,
        scheduler: Scheduler,
        recent: RecentDecisions,
        changes: ConfigurationChanges,
        states: EndpointStates,
        pool: str = "",
        clock: Callable[[], Seconds] = time.monotonic,
        process: Callable[[], ProcessLately | None] = lambda: None,
        first_tokens: Callable[[Seconds], Mapping[str, FirstTokens]] = lambda _: {},
        capture: Callable[[], JournalSnapshot | None] = lambda: None,
        kv_events: Callable[[Endpoint], SourceRow | None] = lambda _: None,
        queue: Callable[[], FlowQueue | None] = lambda: None,
    ) -> None:
        """Create the collector of the figures that `epp top` and `/live` show. `pool` is the pool's
        name, or "". `first_tokens` returns the engines' times to first token by endpoint id.
        """
        self._first_tokens = first_tokens
        self._capture = capture
        self._kv_events = kv_events
        self._queue = queue
        self._process = process
        self._scheduler = scheduler
        self._recent = recent
        self._changes = changes
        self._states = states
        self._pool = pool
        self._clock = clock
        self._looking = asyncio.Lock()
        self._seen = b""
        self._seen_at_s = -LOOK_S

    async def look(self) -> bytes:
        """Return the picker's state, a `Live`, as JSON that is at most `LOOK_S` seconds old."""
        async with self._looking:
            if self._clock() - self._seen_at_s >= LOOK_S:
                self._seen = msgspec.json.encode(await self._live())
                self._seen_at_s = self._clock()
            return self._seen

    async def _live(self) -> Live:
        lately = await self._recent.lately(WINDOW_S, RECORDS_MAX)
        decisions = await self._recent.rows(DECISIONS_SHOWN, Wanted())
        now = self._clock()
        told = (self._first_tokens(now), self._kv_events)
        rows = endpoint_rows(self._scheduler, self._states, now, *told)
        ready = sum(row["state"] == Standing.READY for row in rows)
        shown = sorted(rows, key=lambda row: _worth(row, lately))[:ENDPOINTS_MAX]
        shown.sort(key=lambda row: str(row["name"]))
        queue = self._queue()
        return Live(
            version=__version__,
            at_s=lately.until_s,
            pool=self._pool,
            window_s=lately.until_s - lately.since_s,
            decided=lately.decided,
            refused=lately.refused,
            shed_total=self._recent.shed,
            unparsed_total=dict(self._recent.unparsed),
            decided_total=self._scheduler.decisions,
            endpoints_total=len(rows),
            endpoints_ready=ready,
            endpoints=[_endpoint(row, lately) for row in shown],
            decisions=[_decision(row) for row in decisions],
            configuration=self._changes.applied,
            configuration_refused=self._changes.refused,
            prefills=self._prefills(),
            process=self._process(),
            capture=self._capture(),
            queue=None if queue is None else _bands(queue, now),
            evicted_total=0 if queue is None else queue.control.evictions.evicted.total(),
        )

    def _prefills(self) -> list[LivePrefills]:
        scheduler = self._scheduler
        pairs = scheduler.state.overdue_prefills.in_flight(scheduler.ledger)
        endpoint_in = scheduler.pool.endpoint_in
        return [
            LivePrefills(
                prefill=endpoint_in(prefill).name,
                decode=endpoint_in(decode).name,
                requests=requests,
            )
            for (prefill, decode), requests in pairs.most_common(PREFILLS_MAX)
        ]


def _bands(queue: FlowQueue, now: Seconds) -> list[LiveBand] | None:
    snapshot = queue.snapshot(now)
    if snapshot is None:
        return None
    flows = queue.waiting_flows(now)
    return [
        LiveBand(
            priority=band.priority,
            requests=band.requests,
            flows=band.flows,
            oldest_wait_s=band.oldest_wait_s,
            most=flows[band.priority],
        )
        for band in snapshot.bands
        if band.requests
    ]


def _latencies(row: Row) -> dict[str, LiveLatency]:
    return {
        name: LiveLatency(
            row[f"{name}_prediction"],
            row[f"{name}_predicted_s"],
            row[f"{name}_observed_s"],
            min(row[f"{name}_prediction_errors"].values(), default=None),
        )
        for name in ("ttft", "tpot")
        if f"{name}_prediction" in row
    }


def _worth(row: Row, lately: RecentSums) -> tuple[bool, int]:
    """Return a sort key for endpoints in the live view; those with the smallest keys are shown
    first.
    """
    there = lately.endpoints.get(row["name"])
    quiet = row["state"] == Standing.READY and row["outlier"] is None
    return quiet, -(there.requests if there else 0)


def _endpoint(row: Row, lately: RecentSums) -> LiveEndpoint:
    there = lately.endpoints.get(row["name"]) or EndpointSums()
    return LiveEndpoint(
        name=row["name"],
        address=row["address"],
        state=row["state"],
        slowness=row["slowness"],
        outlier=row["outlier"],
        ejected=row["ejected"],
        since=row["since"],
        reason=row["reason"],
        metrics_age_s=row["metrics_age_s"],
        waiting=row["waiting"],
        running=row["running"],
        kv_cache_usage=row["kv_cache_usage"],
        inflight_requests=row["inflight_requests"],
        inflight_prefill_tokens=row["inflight_prefill_tokens"],
        requests=there.requests,
        share=there.requests / lately.decided if lately.decided else 0.0,
        failed=there.failed,
        prompt_tokens=there.prompt_tokens,
        compared_prompt_tokens=there.compared_prompt_tokens,
        predicted_hits=_share(there.predicted_tokens, there.prompt_tokens),
        compared_hits=_share(there.compared_tokens, there.compared_prompt_tokens),
        actual_hits=_share(there.cached_tokens, there.compared_prompt_tokens),
        engine_ttft_s=row["engine_ttft_s"],
        kv_events=row.get("kv_events"),
        kv_events_problem=row.get("kv_events_problem"),
        engine_hits=row["engine_hits"],
        room_load=row.get("room_load"),
        room_requests=row.get("room_requests"),
        latencies=_latencies(row),
    )


def _share(part: int, whole: int) -> float | None:
    return min(1.0, part / whole) if whole else None


def _decision(row: Row) -> LiveDecision:
    if "refused" in row:
        return LiveDecision(
            at=row["at"],
            request_id=row["request_id"],
            model=row["model"],
            refused=row["refused"],
            status=row["status"],
        )
    outcome = row["outcome"] or {}
    runner_up = row["runner_up"]
    return LiveDecision(
        at=row["at"],
        request_id=row["request_id"],
        model=row["model"],
        status=outcome.get("status"),
        score=LiveScore(**row["score"]),
        runner_up=LiveScore(**runner_up) if runner_up else None,
        decided_by=_decided_by(row),
        matched_blocks=row["matched_blocks"],
        total_blocks=row["total_blocks"],
        served_by=outcome.get("served_by"),
        route=row.get("route"),
        prefill=row["prefill"]["endpoint"] if "prefill" in row else None,
        encode=row["encode"]["endpoint"] if "encode" in row else None,
    )


def _decided_by(row: Row) -> list[str]:
    told = [cost["decided_by"] for cost in row["costs"] if "failed" not in cost]
    alone = len(row["score"]["parts"]) == 1 and told and told[0]
    decided: list[str] = told[0] if alone else row["decided_by"]
    return decided
