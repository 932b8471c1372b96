"""What the picker knows and did, for who asks it: /debug/config, /debug/endpoints, /debug/decisions.

Plain tables, or JSON for who accepts it or asks with `?format=json`. Nothing of a prompt is shown.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from aiohttp import hdrs, web
from msgspec import Struct

from epp.configuration.check_config import explain
from epp.configuration.config import PickerConfig, config_hash, describe
from epp.core.decision.profile import Scored
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.knowledge.candidates import Candidates, Floats, Ints
from epp.core.knowledge.pool import EndpointPool
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, Refusal

KEPT_MAX: Final = 100
"""Decisions and refusals that are kept: of 1,000 endpoints and 5 scorers about 6 MB of scores."""
SHOWN: Final = 50
"""Of them, unless `?n=` says otherwise."""
SCORES_SHOWN_MAX: Final = 8
"""Candidates of a decision that are shown, best first."""
_TEXT_CHARACTERS_MAX: Final = 256
"""What a client can write, a model name or a request id, is cut here."""

Row: TypeAlias = dict[str, Any]


class _Decided(Struct, frozen=True, gc=False):
    """What is kept of a decision: not its request, nor its lease.

    The score arrays are the decision's own. `members` are the pool's endpoints by slot as they were.
    """

    at_s: float
    number: int
    request_id: str
    model: str
    priority: int
    prompt_tokens: int
    endpoint: Endpoint
    fallbacks: tuple[Endpoint, ...]
    matched_blocks: int
    total_blocks: int
    ready: int
    eliminated: Mapping[str, int]
    picked: int
    slot: Ints
    members: tuple[Endpoint | None, ...]
    scorers: tuple[str, ...]
    scored: Scored

    def row(self) -> Row:
        order = np.argsort(-self.scored.total, kind="stable")[:SCORES_SHOWN_MAX].tolist()
        if self.picked not in order:
            order[-1] = self.picked
        return {
            "at": _iso(self.at_s),
            "number": self.number,
            "request_id": _sayable(self.request_id),
            "model": _sayable(self.model),
            "priority": self.priority,
            "endpoint": self.endpoint.name,
            "address": self.endpoint.address,
            "fallbacks": [endpoint.address for endpoint in self.fallbacks],
            "prompt_tokens": self.prompt_tokens,
            "matched_blocks": self.matched_blocks,
            "total_blocks": self.total_blocks,
            "ready": self.ready,
            "eliminated": dict(self.eliminated),
            "candidates": len(self.slot),
            "scores": [self._score(position) for position in order],
        }

    def _score(self, position: int) -> Row:
        member = self.members[int(self.slot[position])]
        parts = self.scored.parts_of(position)
        return {
            "endpoint": member.name if member is not None else "",
            "total": round(float(self.scored.total[position]), 4),
            "parts": {name: round(part, 4) for name, part in zip(self.scorers, parts, strict=True)},
        }


class _Refused(Struct, frozen=True, gc=False):
    """What is kept of a refusal: not its sentence, which may quote the client."""

    at_s: float
    request_id: str
    model: str
    priority: int
    refusal_reason: str
    status: int
    eliminated: Mapping[str, int]

    def row(self) -> Row:
        return {
            "at": _iso(self.at_s),
            "request_id": _sayable(self.request_id),
            "model": _sayable(self.model),
            "priority": self.priority,
            "refused": self.refusal_reason,
            "status": self.status,
            "eliminated": dict(self.eliminated),
        }


class RecentDecisions:
    """The last decisions and refusals. Keeping one costs about a microsecond; rows are made later."""

    def __init__(self, pool: EndpointPool, kept_max: int = KEPT_MAX) -> None:
        self._pool = pool
        self._kept: deque[_Decided | _Refused] = deque(maxlen=kept_max)
        self._members: tuple[Endpoint | None, ...] = ()
        self._generation = -1

    def decided(self, decision: Decision) -> None:
        """Keep what explains `decision`; the pool must not have changed since."""
        if self._pool.generation != self._generation:
            self._generation = self._pool.generation
            self._members = tuple(self._pool.columns.endpoints)
        request = decision.lease.request
        self._kept.append(
            _Decided(
                time.time(),
                decision.number,
                request.request_id[:_TEXT_CHARACTERS_MAX],
                request.model[:_TEXT_CHARACTERS_MAX],
                request.priority,
                request.prompt_tokens,
                decision.endpoint,
                decision.fallbacks,
                decision.matched_blocks,
                decision.total_blocks,
                decision.ready,
                decision.eliminated,
                decision.picked,
                decision.candidates.slot,
                self._members,
                decision.scorers,
                decision.scored,
            )
        )

    def refused(self, refusal: Refusal, request: InferenceRequest | None) -> None:
        """Keep why a request was refused; None: it was not understood."""
        self._kept.append(
            _Refused(
                time.time(),
                request.request_id[:_TEXT_CHARACTERS_MAX] if request else "",
                request.model[:_TEXT_CHARACTERS_MAX] if request else "",
                request.priority if request else 0,
                refusal.reason.value,
                refusal.status,
                refusal.eliminated,
            )
        )

    def rows(self, count: int) -> list[Row]:
        """The last `count`, newest first."""
        return [kept.row() for kept in islice(reversed(self._kept), count)]


class DebugPages:
    """Routes for the metrics server."""

    def __init__(
        self,
        scheduler: Scheduler,
        recent: RecentDecisions,
        config: Callable[[], tuple[PickerConfig, int]],
    ) -> None:
        """`config` gives what is in force, and its generation."""
        self._scheduler = scheduler
        self._recent = recent
        self._config = config

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/debug/config", self._config_page),
            web.get("/debug/endpoints", self._endpoints_page),
            web.get("/debug/decisions", self._decisions_page),
        ]

    async def _config_page(self, request: web.Request) -> web.Response:
        config, generation = self._config()
        failing = [
            {"plugin": one.name, "failures": one.failures, "last": one.what}
            for one in self._scheduler.failures
        ]
        if _wants_json(request):
            return _json(
                {
                    "source": config.source,
                    "hash": config_hash(config),
                    "generation": generation,
                    "failing_plugins": failing,
                    "config": describe(config),
                }
            )
        failed = f"\nplugins that failed\n{table(failing)}" if failing else ""
        return web.Response(text=f"generation     {generation}\n{explain(config)}{failed}")

    async def _endpoints_page(self, request: web.Request) -> web.Response:
        rows = endpoint_rows(self._scheduler, time.monotonic())
        if _wants_json(request):
            return _json({"endpoints": rows})
        for row in rows:
            del row["labels"]
        return web.Response(text=table(rows))

    async def _decisions_page(self, request: web.Request) -> web.Response:
        wanted = request.query.get("n", str(SHOWN))
        if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted[:9]) <= KEPT_MAX):
            raise web.HTTPBadRequest(text=f"n must be a number from 1 to {KEPT_MAX}\n")
        rows = self._recent.rows(int(wanted))
        if _wants_json(request):
            return _json({"decisions": rows})
        return web.Response(text=table([_flat(row) for row in rows]))


def endpoint_rows(scheduler: Scheduler, now: float) -> list[Row]:
    """A row an endpoint, by slot. None: not known."""
    pool = scheduler.pool
    standings = scheduler.standings(now)
    candidates = Candidates(
        pool.columns,
        np.array(list(standings), dtype=np.int64),
        now,
        affinities={},
        prefill_tokens_per_s=scheduler.settings.prefill_tokens_per_s,
    )
    columns: dict[str, Sequence[Any]] = {
        "name": [endpoint.name for endpoint in candidates.endpoints],
        "address": [endpoint.address for endpoint in candidates.endpoints],
        "state": list(standings.values()),
        "metrics_age_s": _rounded(candidates.metrics_age_s),
        "waiting": _rounded(candidates.waiting_requests),
        "running": _rounded(candidates.running_requests),
        "kv_cache_usage": _rounded(candidates.kv_cache_usage),
        "inflight_requests": candidates.inflight_requests.tolist(),
        "inflight_prefill_tokens": _rounded(candidates.inflight_prefill_tokens),
        "saturated": candidates.saturated.tolist(),
        "labels": [dict(labels) for labels in candidates.labels],
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def table(rows: Iterable[Row]) -> str:
    """`rows` under the names of their members, in aligned columns; "-" where there is nothing."""
    lines = [{name: _cell(value) for name, value in row.items()} for row in rows]
    names = list(dict.fromkeys(name for line in lines for name in line))
    if not names:
        return "none\n"
    widths = {name: max(len(name), *(len(line.get(name, "-")) for line in lines)) for name in names}
    head = {name: name for name in names}
    return "".join(
        "  ".join(line.get(name, "-").ljust(widths[name]) for name in names).rstrip() + "\n"
        for line in (head, *lines)
    )


def _flat(row: Row) -> Row:
    """The row of a decision or refusal for the table: the best two scores, with who has them."""
    flat = {name: value for name, value in row.items() if name not in {"fallbacks", "scores"}}
    if "scores" in row:
        flat["matched"] = f"{flat.pop('matched_blocks')}/{flat.pop('total_blocks')}"
        best = row["scores"][:2]
        flat["best"] = ", ".join(f"{score['endpoint']}={score['total']:g}" for score in best)
    flat["eliminated"] = ", ".join(f"{count} by {by}" for by, count in row["eliminated"].items())
    return flat


def _cell(value: Any) -> str:
    """One word or phrase; what a client wrote cannot steer a terminal or forge a line."""
    if value is None or value == "":
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


def _sayable(text: str) -> str:
    """`text` as UTF-8 can carry it: clients may send anything."""
    return text.encode("utf-8", "replace").decode()


def _rounded(column: Floats) -> list[float | None]:
    return [round(value, 3) if np.isfinite(value) else None for value in column.tolist()]


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


def _wants_json(request: web.Request) -> bool:
    wanted = request.query.get("format")
    if wanted is None:
        return "application/json" in request.headers.get(hdrs.ACCEPT, "")
    if wanted not in {"json", "text"}:
        raise web.HTTPBadRequest(text="format must be json or text\n")
    return wanted == "json"


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value) + b"\n", content_type="application/json")
