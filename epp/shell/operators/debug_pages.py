"""What the picker knows and did, for who asks it: /debug/config, /debug/endpoints, /debug/decisions,
/debug/peers.

Plain tables, or JSON for who accepts it or asks with `?format=json`. Nothing of a prompt is shown.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from aiohttp import hdrs, web
from msgspec import Struct

from epp.configuration.check_config import explain
from epp.configuration.config import PickerConfig, config_hash, describe
from epp.core.decision.profile import Scored
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.knowledge.candidates import Candidates, Floats
from epp.core.knowledge.pool import EndpointPool
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, Refusal, RefusalReason
from epp.shell.operators.bearer_token import BearerToken
from epp.shell.operators.record_ring import RecordRing
from epp.shell.peers.state import PeerRow

PAGES: Final = {
    "/debug/config": "the configuration in force, its hash and generation",
    "/debug/endpoints": "each endpoint: ready or why not, its metrics, what is in flight",
    "/debug/decisions": (
        "the last decisions and refusals; ?n= ?request_id= ?endpoint= ?model= ?refused="
    ),
    "/debug/peers": "each replica that is shared with: since when, last heard, bytes, dropped",
}
"""Plain tables, or JSON with ?format=json."""
ROWS_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of decisions and refusals, some 280 bytes each: at 100 a second two and a half minutes."""
SCORES_BYTES_MAX: Final = 1024 * 1024
"""Of all candidates' scores, which the newest decisions have besides."""
_MEMBERSHIPS_MAX: Final = 64
"""Lists of endpoints of which all candidates' scores can be told; each is as long as the pool."""
SHOWN: Final = 50
SHOWN_MAX: Final = 1_000
SCORES_SHOWN_MAX: Final = 8
"""Candidates of a decision that are shown, best first."""
_ROWS_PER_TURN: Final = 500
"""Rows that are looked through before the event loop gets its turn: well below 1 ms."""
_COLUMNS: Final = (
    *("at", "number", "request_id", "model", "path", "priority", "endpoint", "address"),
    *("prompt_tokens", "matched", "ready", "candidates", "eliminated", "refused", "status"),
    "scores",
)
"""Of the table of decisions."""
_TEXT_CHARACTERS_MAX: Final = 256
"""What a client can write, a model name or a request id, is cut here."""

Row: TypeAlias = dict[str, Any]
_Members: TypeAlias = tuple[Endpoint | None, ...]
"""By slot."""


class _Decided(Struct, frozen=True, gc=False, array_like=True, tag="d"):
    """What is kept of a decision: not its request, nor its lease."""

    at_s: float
    number: int
    request_id: str
    model: str
    priority: int
    prompt_tokens: int
    endpoint: str
    address: str
    fallbacks: tuple[str, ...]
    matched_blocks: int
    total_blocks: int
    ready: int
    eliminated: Mapping[str, int]
    candidates: int
    scorers: tuple[str, ...]
    parts: list[float]
    """Of the chosen endpoint's score, in the order of `scorers`."""
    scores_at: int
    """Where all candidates' are kept as long as there is room."""

    def row(self, scores: list[Row] | None) -> Row:
        """`scores`: of the best candidates; None: not known any more."""
        chosen = _score(self.endpoint, sum(self.parts), self.parts, self.scorers)
        return {
            "at": _iso(self.at_s),
            "number": self.number,
            "request_id": self.request_id,
            "model": self.model,
            "priority": self.priority,
            "endpoint": self.endpoint,
            "address": self.address,
            "fallbacks": list(self.fallbacks),
            "prompt_tokens": self.prompt_tokens,
            "matched_blocks": self.matched_blocks,
            "total_blocks": self.total_blocks,
            "ready": self.ready,
            "eliminated": dict(self.eliminated),
            "candidates": self.candidates,
            "scores": scores or [chosen],
        }


class _Refused(Struct, frozen=True, gc=False, array_like=True, tag="r"):
    """What is kept of a refusal: not its sentence, which may quote the client."""

    at_s: float
    request_id: str
    model: str
    path: str
    priority: int
    reason: str
    status: int
    eliminated: Mapping[str, int]

    def row(self, _: list[Row] | None) -> Row:
        return {
            "at": _iso(self.at_s),
            "request_id": self.request_id,
            "model": self.model,
            "path": self.path,
            "priority": self.priority,
            "refused": self.reason,
            "status": self.status,
            "eliminated": dict(self.eliminated),
        }


class _Scores(Struct, frozen=True, gc=False, array_like=True):
    """What is kept of the scores of n candidates: the decision's own arrays, as bytes."""

    generation: int
    """Of the pool whose slots these are."""
    picked: int
    slot: bytes
    """int64[n]"""
    total: bytes
    """float64[n]"""
    weights: bytes
    """float64[scorers]"""
    scores: bytes
    """float64[scorers, n]"""

    def rows(self, members: _Members, scorers: tuple[str, ...]) -> list[Row]:
        """The best, best first; the chosen one is always among them."""
        slot, total = np.frombuffer(self.slot, np.int64), np.frombuffer(self.total)
        order = np.argsort(-total, kind="stable")[:SCORES_SHOWN_MAX].tolist()
        if self.picked not in order:
            order[-1] = self.picked
        weights = np.frombuffer(self.weights)
        scores = np.frombuffer(self.scores).reshape(len(weights), len(total))
        scored = Scored(total, scores, weights)
        ranked = [(at, members[int(slot[at])]) for at in order]
        return [
            _score(member.name if member else "", float(total[at]), scored.parts_of(at), scorers)
            for at, member in ranked
        ]


def _score(name: str, total: float, parts: Sequence[float], scorers: tuple[str, ...]) -> Row:
    return {
        "endpoint": name,
        "total": round(total, 4),
        "parts": {scorer: round(part, 4) for scorer, part in zip(scorers, parts, strict=True)},
    }


class Wanted(Struct, frozen=True, kw_only=True):
    """Which decisions and refusals to show; "": any."""

    request_id: str = ""
    endpoint: str = ""
    """Name, with or without its namespace, or address."""
    model: str = ""
    refused: str = ""
    """"true", "false" or a reason."""

    def texts(self) -> tuple[bytes, ...]:
        """What the packed row must contain."""
        wanted = (self.request_id, self.endpoint, self.model)
        return tuple(_kept_text(text).encode() for text in wanted if text)

    def has(self, told: _Decided | _Refused) -> bool:
        if self.request_id and told.request_id != _kept_text(self.request_id):
            return False
        if self.model and told.model != _kept_text(self.model):
            return False
        if isinstance(told, _Refused):
            return not self.endpoint and self.refused in {"", "true", told.reason}
        names = {told.endpoint, told.endpoint.rpartition("/")[2], told.address}
        return self.refused in {"", "false"} and (not self.endpoint or self.endpoint in names)


class RecentDecisions:
    """The last decisions and refusals, as many as there is room for, some minutes of most traffic.

    Keeping one costs a few microseconds; rows are made when they are asked for.
    """

    def __init__(
        self,
        pool: EndpointPool,
        *,
        rows_bytes_max: int = ROWS_BYTES_MAX,
        scores_bytes_max: int = SCORES_BYTES_MAX,
    ) -> None:
        self._pool = pool
        self._rows = RecordRing(rows_bytes_max)
        self._scores = RecordRing(scores_bytes_max)
        self._memberships: dict[int, _Members] = {}
        """By the generation of the pool, oldest first."""
        self._generation = -1
        self._pack = msgspec.msgpack.Encoder().encode
        self._unpack = msgspec.msgpack.Decoder(_Decided | _Refused).decode
        self._unpack_scores = msgspec.msgpack.Decoder(_Scores).decode

    def __len__(self) -> int:
        return len(self._rows)

    def decided(self, decision: Decision, parts: list[float]) -> None:
        """Keep what explains `decision`; the pool must not have changed since.

        `parts` are what each scorer gave its endpoint.
        """
        if self._pool.generation != self._generation:
            self._generation = self._pool.generation
            self._memberships[self._generation] = tuple(self._pool.columns.endpoints)
            if len(self._memberships) > _MEMBERSHIPS_MAX:
                del self._memberships[next(iter(self._memberships))]
        request, endpoint, scored = decision.lease.request, decision.endpoint, decision.scored
        slot = decision.candidates.slot
        scores = _Scores(
            self._generation,
            decision.picked,
            slot.tobytes(),
            scored.total.tobytes(),
            scored.weights.tobytes(),
            scored.scores.tobytes(),
        )
        told = _Decided(
            time.time(),
            decision.number,
            _kept_text(request.request_id),
            _kept_text(request.model),
            request.priority,
            request.prompt_tokens,
            endpoint.name,
            endpoint.address,
            tuple([other.address for other in decision.fallbacks]) if decision.fallbacks else (),
            decision.matched_blocks,
            decision.total_blocks,
            decision.ready,
            decision.eliminated,
            len(slot),
            decision.scorers,
            parts,
            self._scores.append(self._pack(scores)),
        )
        self._rows.append(self._pack(told))

    def refused(
        self,
        refusal: Refusal,
        request: InferenceRequest | None,
        *,
        request_id: str = "",
        path: str = "",
    ) -> None:
        """Keep why a request was refused; None: it was not understood."""
        told = _Refused(
            time.time(),
            _kept_text(request.request_id if request else request_id),
            _kept_text(request.model) if request else "",
            _kept_text(path),
            request.priority if request else 0,
            refusal.reason.value,
            refusal.status,
            refusal.eliminated,
        )
        self._rows.append(self._pack(told))

    async def rows(self, count: int, wanted: Wanted) -> list[Row]:
        """The last `count` that are wanted, newest first."""
        found: list[Row] = []
        texts = wanted.texts()
        for looked_at, packed in enumerate(self._rows.newest_first(), 1):
            if all(text in packed for text in texts):
                told = self._unpack(packed)
                if wanted.has(told):
                    found.append(told.row(self._scores_of(told)))
                    if len(found) == count:
                        break
            if looked_at % _ROWS_PER_TURN == 0:
                await asyncio.sleep(0)
        return found

    def _scores_of(self, told: _Decided | _Refused) -> list[Row] | None:
        """Of the best candidates; None: not any more, or there are none."""
        if isinstance(told, _Refused):
            return None
        packed = self._scores.get(told.scores_at)
        if packed is None:
            return None
        scores = self._unpack_scores(packed)
        members = self._memberships.get(scores.generation)
        return None if members is None else scores.rows(members, told.scorers)


class DebugPages:
    """Routes for the metrics server."""

    def __init__(
        self,
        scheduler: Scheduler,
        recent: RecentDecisions,
        config: Callable[[], tuple[PickerConfig, int]],
        peers: Callable[[], Sequence[PeerRow]] = tuple,
    ) -> None:
        """`config` gives what is in force, and its generation; `peers` the other replicas."""
        self._scheduler = scheduler
        self._recent = recent
        self._config = config
        self._peers = peers

    def routes(self, token: BearerToken | None = None) -> list[web.RouteDef]:
        """`token`: without it nothing is shown; None: to everybody."""
        pages = (self._config_page, self._endpoints_page, self._decisions_page, self._peers_page)
        return [
            web.get(path, token.guarded(page) if token else page)
            for path, page in zip(PAGES, pages, strict=True)
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
        count, wanted = _question(request)
        rows = await self._recent.rows(count, wanted)
        if _wants_json(request):
            return _json({"decisions": rows})
        return web.Response(text=table([_flat(row) for row in rows]))

    async def _peers_page(self, request: web.Request) -> web.Response:
        rows = [_peer_row(peer) for peer in self._peers()]
        if _wants_json(request):
            return _json({"peers": rows})
        return web.Response(text=table(rows))


def _peer_row(peer: PeerRow) -> Row:
    row: Row = msgspec.structs.asdict(peer)
    for name in ("connected_s", "heard_s"):
        row[name] = None if row[name] is None else round(row[name], 1)
    return row


def _question(request: web.Request) -> tuple[int, Wanted]:
    """How many to show, and which. A question that is not understood must not look answered."""
    query = request.query
    known = ("n", "format", *Wanted.__struct_fields__)
    if unknown := [name for name in query if name not in known]:
        sentence = f"{_cell(unknown[0])[:_TEXT_CHARACTERS_MAX]} is not one of {', '.join(known)}\n"
        raise web.HTTPBadRequest(text=sentence)
    count = query.get("n", str(SHOWN))
    if not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= SHOWN_MAX):
        raise web.HTTPBadRequest(text=f"n must be a number from 1 to {SHOWN_MAX}\n")
    answers = ("true", "false", *RefusalReason)
    if query.get("refused", "true") not in answers:
        raise web.HTTPBadRequest(text=f"refused must be one of {', '.join(answers)}\n")
    return int(count), Wanted(
        **{name: query[name] for name in Wanted.__struct_fields__ if name in query}
    )


def endpoint_rows(scheduler: Scheduler, now: float) -> list[Row]:
    """A row an endpoint, by slot. None: not known."""
    pool = scheduler.pool
    standings = scheduler.standings(now)
    candidates = Candidates(
        pool.columns,
        np.array(list(standings), dtype=np.int64),
        now,
        affinities={},
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
    """The row of a decision or refusal for the table, whose columns are always the same."""
    flat = {name: row.get(name) for name in _COLUMNS}
    flat["eliminated"] = ", ".join(f"{count} by {by}" for by, count in row["eliminated"].items())
    if "scores" in row:
        flat["matched"] = f"{row['matched_blocks']}/{row['total_blocks']}"
        # The chosen one, and the best of the others.
        chosen_first = sorted(row["scores"], key=lambda score: score["endpoint"] != row["endpoint"])
        flat["scores"] = ", ".join(map(_spelt, chosen_first[:2]))
    return flat


def _spelt(score: Row) -> str:
    parts = " + ".join(f"{part:g} {scorer}" for scorer, part in score["parts"].items())
    return f"{score['endpoint']} {score['total']:g} = {parts or 0}"


def _cell(value: Any) -> str:
    """One word or phrase; what a client wrote cannot steer a terminal or forge a line."""
    if value is None or value == "":
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


def _kept_text(text: str) -> str:
    """Cut, and as UTF-8 can carry it: clients may send anything."""
    cut = text[:_TEXT_CHARACTERS_MAX]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()


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
