"""Merge the live views of several pickers of one pool into one."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from msgspec import structs

from epp.core.protocol.flow_queue import FLOWS_SHOWN, WaitingFlow
from epp.shell.operators.journal import JournalSnapshot
from epp.shell.operators.live.live_view import (
    DECISIONS_SHOWN,
    ENDPOINTS_MAX,
    PREFILLS_MAX,
    Live,
    LiveBand,
    LiveEndpoint,
    LivePrefills,
)
from epp.shell.operators.pages.endpoint_rows import LIVE_INCOMPLETE

T = TypeVar("T")

_EVENT_STATES: Final = (
    "live",
    LIVE_INCOMPLETE,
    "replaying",
    "connecting",
    "silent",
    "stale",
    "none",
)
"""States of the KV events of an endpoint, from the best to the worst."""


def as_one(lives: Sequence[Live]) -> Live:
    """Return one view merged from the live views of different pickers; there must be at least one.

    The picker with the freshest metrics supplies the figures of an endpoint, with these exceptions:

    - An endpoint has the problem (not ready, full, slow or failing) that a picker has reported for
      the longest time, if there is one.
    - Its KV events have the worst state that any picker reports.
    - Its requests and prefill tokens in flight are the maximum, because pickers that share state
      count each other's.
    - Its room is that of the picker that estimates the highest load.
    - Its routed and failed requests and their tokens are the sums over all pickers, and its shares
      of cache hits are the means weighted by tokens.
    - Prefills in flight are the sums, because a picker counts only its own by pair.

    Waiting requests of all pickers are added up by priority and flow.

    The figures of the process are those with the greatest event-loop lag, and the capture is the
    sum of all.
    """
    newest = max(lives, key=lambda live: live.configuration.at_s)
    if len(lives) == 1:
        return newest
    decided = sum(live.decided for live in lives)
    by_name: dict[str, list[LiveEndpoint]] = {}
    for live in lives:
        for one in live.endpoints:
            by_name.setdefault(one.name, []).append(one)
    endpoints = [_endpoint(told, decided, len(lives)) for _, told in sorted(by_name.items())]
    if len(endpoints) > ENDPOINTS_MAX:
        endpoints.sort(key=lambda one: (not one.reason, -one.requests))
        endpoints = sorted(endpoints[:ENDPOINTS_MAX], key=lambda one: one.name)
    decisions = [one for live in lives for one in live.decisions]
    latest = max(lives, key=lambda live: live.process.lag_mean_s if live.process else -1.0)
    return structs.replace(
        newest,
        at_s=max(live.at_s for live in lives),
        window_s=max(live.window_s for live in lives),
        decided=decided,
        refused=_sums(live.refused for live in lives),
        unparsed_total=_sums(live.unparsed_total for live in lives),
        shed_total=sum(live.shed_total for live in lives),
        decided_total=sum(live.decided_total for live in lives),
        endpoints_total=max(live.endpoints_total for live in lives),
        endpoints_ready=min(live.endpoints_ready for live in lives),
        endpoints=endpoints,
        decisions=sorted(decisions, key=lambda one: one.at, reverse=True)[:DECISIONS_SHOWN],
        configuration_refused=next(
            (live.configuration_refused for live in lives if live.configuration_refused), None
        ),
        prefills=_prefills(lives),
        process=latest.process,
        process_at=latest.process_at,
        capture=_captures([live.capture for live in lives if live.capture]),
        queue=_queues([live.queue for live in lives if live.queue is not None]),
        evicted_total=sum(live.evicted_total for live in lives),
    )


def _prefills(lives: Sequence[Live]) -> list[LivePrefills]:
    """Return the prefills in flight of all pickers for the `PREFILLS_MAX` pairs of endpoints with
    most requests, most requests first.
    """
    summed: Counter[tuple[str, str]] = Counter()
    for live in lives:
        for one in live.prefills:
            summed[one.prefill, one.decode] += one.requests
    return [
        LivePrefills(prefill=prefill, decode=decode, requests=requests)
        for (prefill, decode), requests in summed.most_common(PREFILLS_MAX)
    ]


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of several counters by reason: of refused requests or of requests that were
    not parsed.
    """
    summed: Counter[str] = Counter()
    for one in counts:
        summed.update(one)
    return dict(summed)


def differences(lives: Sequence[Live]) -> str:
    """Return a phrase about pickers whose versions, configurations or pools differ, or "" if none
    differ.
    """
    found = []
    for what, values in (
        ("versions", {live.version for live in lives}),
        ("configurations", {live.configuration.hash for live in lives}),
        ("pools", {live.pool for live in lives}),
    ):
        if len(values) > 1:
            found.append(f"{len(values)} {what}")
    return f"they have {' and '.join(found)}" if found else ""


def _captures(told: Sequence[JournalSnapshot]) -> JournalSnapshot | None:
    """Return the capture counters of all pickers added up, or None if no picker captures."""
    if not told:
        return None
    dropped: Counter[str] = Counter()
    for one in told:
        dropped.update(one.dropped)
    return JournalSnapshot(
        requests=sum(one.requests for one in told),
        events=sum(one.events for one in told),
        dropped=dict(dropped),
        write_errors=sum(one.write_errors for one in told),
        bytes=sum(one.bytes for one in told),
    )


def _queues(queues: Sequence[Sequence[LiveBand]]) -> list[LiveBand] | None:
    """Return the bands of all pickers added up, highest priority first, or None if no picker has a
    queue. The number of flows is the maximum, because pickers share flows.
    """
    if not queues:
        return None
    by_priority: dict[int, list[LiveBand]] = {}
    for band in (band for bands in queues for band in bands):
        by_priority.setdefault(band.priority, []).append(band)
    return [
        LiveBand(
            priority=priority,
            requests=sum(band.requests for band in bands),
            flows=max(band.flows for band in bands),
            oldest_wait_s=max(band.oldest_wait_s for band in bands),
            most=_flows([flow for band in bands for flow in band.most]),
        )
        for priority, bands in sorted(by_priority.items(), reverse=True)
    ]


def _flows(told: Sequence[WaitingFlow]) -> list[WaitingFlow]:
    """Return the waiting flows of several pickers added up: the `FLOWS_SHOWN` flows with most
    requests, most requests first.
    """
    requests: Counter[str] = Counter()
    oldest_s: dict[str, float] = {}
    for one in told:
        requests[one.flow] += one.requests
        oldest_s[one.flow] = max(oldest_s.get(one.flow, 0.0), one.oldest_wait_s)
    return [
        WaitingFlow(flow, count, oldest_s[flow])
        for flow, count in requests.most_common(FLOWS_SHOWN)
    ]


def _endpoint(told: Sequence[LiveEndpoint], decided: int, pickers: int) -> LiveEndpoint:
    """Return one view of an endpoint, merged from the views of the pickers that know it.

    `decided` is the number of decisions of all `pickers` pickers.
    """
    freshest = min(told, key=lambda one: (one.metrics_age_s is None, one.metrics_age_s or 0.0))
    against = sorted((one for one in told if one.reason), key=lambda one: one.since)
    if against:
        worst = against[0]
        reason = worst.reason
        if len(against) < pickers:
            reason += f"; {len(against)} of {pickers} pickers report this"
    else:
        worst, reason = freshest, ""
    heard = [one for one in told if one.kv_events is not None] or [freshest]
    unheard = max(heard, key=lambda one: _badness(one.kv_events))
    fullest = max(told, key=lambda one: one.room_load or 0.0)
    requests = sum(one.requests for one in told)
    return structs.replace(
        freshest,
        state=worst.state,
        slowness=worst.slowness,
        outlier=worst.outlier,
        ejected=worst.ejected,
        since=worst.since,
        reason=reason,
        kv_events=unheard.kv_events,
        kv_events_problem=unheard.kv_events_problem,
        room_load=fullest.room_load,
        room_requests=fullest.room_requests,
        inflight_requests=max(one.inflight_requests for one in told),
        inflight_prefill_tokens=max(
            (tokens for one in told if (tokens := one.inflight_prefill_tokens) is not None),
            default=None,
        ),
        requests=requests,
        share=requests / decided if decided else 0.0,
        failed=sum(one.failed for one in told),
        prompt_tokens=sum(one.prompt_tokens for one in told),
        compared_prompt_tokens=sum(one.compared_prompt_tokens for one in told),
        predicted_hits=_mean((one.predicted_hits, one.prompt_tokens) for one in told),
        compared_hits=_mean((one.compared_hits, one.compared_prompt_tokens) for one in told),
        actual_hits=_mean((one.actual_hits, one.compared_prompt_tokens) for one in told),
    )


def _badness(state: str | None) -> int:
    """Return the position of `state` in `_EVENT_STATES`. A state that is not in it counts as
    worst.
    """
    return _EVENT_STATES.index(state) if state in _EVENT_STATES else len(_EVENT_STATES)


def _mean(shares: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the mean of shares weighted by their prompt tokens, or None if no share is known or
    there are no tokens.
    """
    known = [(share, tokens) for share, tokens in shares if share is not None]
    total = sum(tokens for _, tokens in known)
    return sum(share * tokens for share, tokens in known) / total if total else None
