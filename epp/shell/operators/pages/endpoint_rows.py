"""Collect the state of each endpoint as rows for pages."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from epp.core.decision.scheduler import Scheduler
from epp.core.flow.detectors import RoomDetector
from epp.core.flow.gate import Gate
from epp.core.knowledge.candidates import Candidates, Floats
from epp.core.knowledge.fullness import FULL
from epp.core.kv_events.stream import StreamState
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, KvTransfers, Seconds
from epp.shell.engines.endpoint_pages import PagesRow
from epp.shell.engines.first_tokens import FirstTokens
from epp.shell.engines.kv_event_source import SourceRow
from epp.shell.operators.decisions.decision_rows import iso
from epp.shell.operators.decisions.endpoint_states import EndpointStates

LIVE_INCOMPLETE: Final = "live, incomplete"
"""State of an endpoint whose KV-cache events arrive, but whose index lacks earlier ones."""
_DIGITS: Final = 3
_OF_TRANSFERS: Final = ("ended", "ended_s", "failed", "expired")
"""Names of the values of `KvTransfers` that describe transfers instead of what they moved."""
_ANY_REQUEST: Final = InferenceRequest(request_id="")
"""Request of the usual priority, for the room of endpoints."""
_Row: TypeAlias = dict[str, Any]


def endpoint_rows(
    scheduler: Scheduler,
    states: EndpointStates,
    now: Seconds,
    first_tokens: Mapping[str, FirstTokens] | None = None,
    kv_events: Callable[[Endpoint], SourceRow | None] = lambda _: None,
    pages: Callable[[Endpoint], PagesRow | None] = lambda _: None,
) -> list[_Row]:
    """Determine the states of all endpoints at `now`, and return one row per endpoint, by slot;
    None means unknown.

    `first_tokens` has the engines' times to first token by endpoint id. `kv_events` returns the
    state of an endpoint's KV-cache events, and `pages` the content of its model and GPU pages; the
    columns of either are missing if no endpoint has them.
    """
    pool = scheduler.pool
    states.look(now)
    standings = scheduler.standings(now)
    candidates = Candidates(
        pool.columns,
        np.array(list(standings), dtype=np.int64),
        now,
        affinities={},
    )
    outliers = dict(scheduler.outliers.detected(now))
    slowness = scheduler.outliers.slowness()
    compared = [scheduler.accuracy.comparison(slot) for slot in standings]
    told = [states.of(endpoint) for endpoint in candidates.endpoints]
    columns: dict[str, Sequence[Any]] = {
        "name": [endpoint.name for endpoint in candidates.endpoints],
        "address": [endpoint.address for endpoint in candidates.endpoints],
        "state": [
            FULL if one.state == FULL else standing
            for one, standing in zip(told, standings.values(), strict=True)
        ],
        "since": [iso(one.since_s) for one in told],
        "metrics_age_s": _rounded(candidates.metrics_age_s),
        "waiting": _rounded(candidates.waiting_requests),
        "running": _rounded(candidates.running_requests),
        "kv_cache_usage": _rounded(candidates.kv_cache_usage),
        "engine_ttft_s": [_lately(first_tokens, each) for each in candidates.endpoints],
        "predicted_hits": [one and round(one.predicted, _DIGITS) for one in compared],
        "engine_hits": [one and round(one.engine, _DIGITS) for one in compared],
        "hit_counters": [scheduler.accuracy.verdict(slot).value for slot in standings],
        "inflight_requests": candidates.inflight_requests.tolist(),
        "inflight_prefill_tokens": _rounded(candidates.inflight_prefill_tokens),
        "saturated": candidates.saturated.tolist(),
        "slowness": [round(slowness[slot], 1) if slot in slowness else None for slot in standings],
        "outlier": [outliers[slot].cause if slot in outliers else None for slot in standings],
        "ejected": [slot in outliers and outliers[slot].ejected for slot in standings],
        "reason": [one.reason for one in told],
        "labels": [dict(labels) for labels in candidates.labels],
    }
    for name, shares in (
        ("predicted_hits_by_index", [one.indexes if one else {} for one in compared]),
        ("engine_hits_by_tier", [one.tiers if one else {} for one in compared]),
    ):
        if any(shares):
            columns[name] = [_named(each) for each in shares]
    if scheduler.state.latency is not None:
        errors = [scheduler.state.latency.errors_of(slot) for slot in standings]
        for latency in ("ttft", "tpot"):
            columns[f"{latency}_prediction"] = [one[latency].used for one in errors]
            columns[f"{latency}_prediction_errors"] = [
                {name: round(error, _DIGITS) for name, error in one[latency].told().items()}
                for one in errors
            ]
            columns[f"{latency}_predicted_s"] = [
                _number(one[latency].predicted_s) for one in errors
            ]
            columns[f"{latency}_observed_s"] = [_number(one[latency].observed_s) for one in errors]
    if scheduler.state.gate is not None:
        columns |= _rooms(scheduler.state.gate, candidates, now)
    sources = [kv_events(endpoint) for endpoint in candidates.endpoints]
    if any(sources):
        columns["kv_events"] = [source and _heard(source) for source in sources]
        columns["kv_events_problem"] = [source and (source.problem or None) for source in sources]
        columns["kv_events_source"] = [source and (source.place or None) for source in sources]
        columns["kv_events_lag_s"] = [source and _lag(source) for source in sources]
        columns["kv_events_sequence"] = [source and source.sequence for source in sources]
    overdue = [sum(scheduler.state.overdue_prefills.of(slot).values()) for slot in standings]
    if any(overdue):
        columns["overdue_prefills"] = overdue
    transfers = [pool.transfers(slot) for slot in standings]
    if any(transfers):
        for name in KvTransfers.__struct_fields__:
            columns[f"kv_transfers_{name}" if name in _OF_TRANSFERS else f"kv_{name}"] = [
                one and _number(getattr(one, name)) for one in transfers
            ]
        speeds = pool.columns.link_bytes_per_s
        columns["kv_link_bytes_per_s"] = [_number(speeds.item(slot)) for slot in standings]
    if pool.columns.attributes:
        told_of = {key: _rounded(candidates.attribute(key)) for key in pool.columns.attributes}
        columns["attributes"] = [
            {key: values[position] for key, values in told_of.items()}
            for position in range(len(candidates))
        ]
    listed = [pages(endpoint) for endpoint in candidates.endpoints]
    if any(listed):
        columns["models"] = [row and row.models and list(row.models) for row in listed]
        columns["page_problems"] = [row and list(row.problems) for row in listed]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _rooms(gate: Gate, candidates: Candidates, now: Seconds) -> dict[str, Sequence[Any]]:
    """Return the columns about the room of each endpoint: its load as a share of its room, and if
    the room is learned, the number of further requests and a sentence.
    """
    detector = gate.settings.detector
    if not isinstance(detector, RoomDetector):
        return {"room_load": _rounded(detector.load(candidates, gate.rooms, None))}
    rooms = gate.rooms.of(candidates, gate.lead(_ANY_REQUEST, now))
    return {
        "room_load": [_number(room.load) for room in rooms],
        "room_requests": [room.more for room in rooms],
        "room": [
            room.sentence(one.name) for room, one in zip(rooms, candidates.endpoints, strict=True)
        ],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, _DIGITS)


def _named(shares: Mapping[str, float]) -> dict[str, float] | None:
    """Return `shares` by name, rounded and without those that are 0, or None if all are 0."""
    return {name: round(share, _DIGITS) for name, share in shares.items() if share} or None


def _heard(source: SourceRow) -> str:
    """Return the state of an endpoint's KV-cache events in one or two words."""
    if source.silent:
        return "silent"
    if source.state is StreamState.LIVE and not source.complete:
        return LIVE_INCOMPLETE
    return source.state.value


def _lag(source: SourceRow) -> Seconds | None:
    return None if source.lag_s is None else round(source.lag_s, _DIGITS)


def _lately(first_tokens: Mapping[str, FirstTokens] | None, endpoint: Endpoint) -> Seconds | None:
    told = (first_tokens or {}).get(endpoint.endpoint_id)
    return None if told is None or told.lately_s is None else round(told.lately_s, _DIGITS)


def _rounded(column: Floats) -> list[float | None]:
    # Converting whole arrays is ten times faster than asking numpy about each number.
    known = zip(column.round(_DIGITS).tolist(), np.isfinite(column).tolist(), strict=True)
    return [value if finite else None for value, finite in known]
