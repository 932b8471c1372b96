"""What a picker does now: the data of `epp top` and of the page /live.

Made when it is asked for, at most once in `LOOK_S` however many ask, of what is kept anyhow.
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
from epp.core.types import Endpoint, Seconds
from epp.shell.engines.first_tokens import FirstTokens
from epp.shell.engines.kv_events import SourceRow
from epp.shell.operators.capture import CaptureSnapshot
from epp.shell.operators.decisions.configuration_changes import (
    Applied,
    ConfigurationChanges,
    RefusedDocument,
)
from epp.shell.operators.decisions.decision_rows import Row
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.recent_decisions import (
    Lately,
    LatelyThere,
    RecentDecisions,
    Wanted,
)
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from epp.shell.process.own_process import ProcessLately

LOOK_S: Final = 1.0
WINDOW_S: Final = 60.0
RECORDS_MAX: Final = 10_000
"""That are added up at a look: some 20 ms, in turns with the requests."""
ENDPOINTS_MAX: Final = 200
"""Of a larger pool those are shown that are not ready, or have the most requests."""
DECISIONS_SHOWN: Final = 12


class LiveEndpoint(Struct, frozen=True, kw_only=True):
    """One endpoint; what is None is not known."""

    name: str
    address: str
    state: str
    slowness: float | None
    """Times the pool's median of what requests take beside what is to be expected."""
    outlier: str | None
    """"slow" or "failing"."""
    ejected: bool
    since: str
    """When it came into this state, as ISO 8601."""
    reason: str
    """Why it is not ready, or slow, failing or ejected; "": nothing speaks against it."""
    metrics_age_s: float | None
    waiting: float | None
    running: float | None
    kv_cache_usage: float | None
    inflight_requests: int
    inflight_prefill_tokens: float | None
    requests: int
    """In the window, as all that follows."""
    share: float
    """Of all requests, 0 to 1."""
    failed: int
    prompt_tokens: int = 0
    """Of which `predicted_hits` is a share."""
    compared_prompt_tokens: int = 0
    """Of which `compared_hits` and `actual_hits` are shares."""
    predicted_hits: float | None
    """Share of the prompt tokens that were believed to be cached there, 0 to 1."""
    compared_hits: float | None
    """The same of those requests whose answers told what was cached; beside `actual_hits`."""
    actual_hits: float | None
    """Share of their prompt tokens that was."""
    engine_ttft_s: Seconds | None = None
    """Mean time to first token in the last minute, by the engine's own clock."""
    kv_events: str | None = None
    """How its KV events are heard, "live" or what is wrong with them; None: nobody is to hear them."""
    kv_events_problem: str | None = None
    """Why they are not heard."""
    engine_hits: float | None = None
    """Share of the prompt tokens of all that it served, by the engine's own counters."""


class LiveScore(Struct, frozen=True, kw_only=True):
    """The score of one candidate."""

    endpoint: str
    total: float
    parts: dict[str, float]
    state: str = "ready"
    """Of the endpoint then."""
    cost: float | None = None
    """What the first scorer of costs went by; None: there is none, or it cannot say."""
    unit: str = ""
    """Of `cost`."""


class LiveDecision(Struct, frozen=True, kw_only=True):
    """One decision or refusal."""

    at: str
    request_id: str
    model: str
    refused: str | None = None
    """The reason; then there are no scores."""
    status: int | None = None
    """Of the response; None: none was seen yet."""
    score: LiveScore | None = None
    runner_up: LiveScore | None = None
    decided_by: list[str] = field(default_factory=list)
    """Scorers, or of one alone that goes by a cost the parts of that."""
    matched_blocks: int = 0
    total_blocks: int = 0
    served_by: str | None = None
    """The gateway went there instead."""


class Live(Struct, frozen=True, kw_only=True):
    """What is seen at one look."""

    version: str
    at_s: float
    """By the clock of the day."""
    pool: str
    window_s: float
    """What is summed up is of so many seconds: fewer than asked for where more were not kept."""
    decided: int
    refused: dict[str, int]
    """In the window, by reason."""
    shed_total: int
    """Streams that were turned away unread since the start."""
    unparsed_total: dict[str, int] = field(default_factory=dict)
    """Requests whose body was not fully understood since the start, by reason."""
    decided_total: int
    endpoints_total: int
    endpoints_ready: int
    endpoints: list[LiveEndpoint]
    """By name."""
    decisions: list[LiveDecision]
    """Newest first."""
    configuration: Applied
    configuration_refused: RefusedDocument | None
    process: ProcessLately | None = None
    """None: a picker of an earlier version."""
    process_at: str = ""
    """Where the picker is whose process that is, of several; "": there is one."""
    capture: CaptureSnapshot | None = None
    """None: nothing is captured."""


class LiveView:
    """Looks at a picker for whoever watches."""

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
        capture: Callable[[], CaptureSnapshot | None] = lambda: None,
        kv_events: Callable[[Endpoint], SourceRow | None] = lambda _: None,
    ) -> None:
        """`pool`: its name; "": it has none. `first_tokens` by endpoint id."""
        self._first_tokens = first_tokens
        self._capture = capture
        self._kv_events = kv_events
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
        """A `Live` as JSON, not older than `LOOK_S`."""
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
            process=self._process(),
            capture=self._capture(),
        )


def _worth(row: Row, lately: Lately) -> tuple[bool, int]:
    """The least is worth showing first."""
    there = lately.endpoints.get(row["name"])
    quiet = row["state"] == Standing.READY and row["outlier"] is None
    return quiet, -(there.requests if there else 0)


def _endpoint(row: Row, lately: Lately) -> LiveEndpoint:
    there = lately.endpoints.get(row["name"]) or LatelyThere()
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
    )


def _decided_by(row: Row) -> list[str]:
    told = [cost["decided_by"] for cost in row["costs"] if "failed" not in cost]
    alone = len(row["score"]["parts"]) == 1 and told and told[0]
    decided: list[str] = told[0] if alone else row["decided_by"]
    return decided
