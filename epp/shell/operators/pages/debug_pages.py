"""Serve the debug pages with the picker's state and recent decisions.

The pages are /debug/config, /debug/endpoints, /debug/decisions, /debug/explain, /debug/indexes,
/debug/tokens and /debug/peers. They are plain text, mostly tables, or JSON with `?format=json` or a
matching Accept header. No part of a prompt is shown.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web

from epp.configuration.config import PickerConfig
from epp.configuration.describing import config_hash, describe
from epp.configuration.explaining import explain
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.index import IndexStanding
from epp.core.types import Endpoint, RefusalReason, Seconds, Stage
from epp.journal.decision_record import TEXT_CHARACTERS_MAX
from epp.journal.records import READY
from epp.shell.engines.endpoint_pages import PagesRow
from epp.shell.engines.first_tokens import FirstTokens
from epp.shell.engines.kv_event_source import SourceRow
from epp.shell.operators.decisions.decision_rows import Row, iso
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.explanation import explanation
from epp.shell.operators.decisions.recent_decisions import RecentDecisions, Wanted
from epp.shell.operators.pages.bearer_token import BearerToken
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from epp.shell.operators.pages.page_queue import PageQueue, in_turns
from epp.shell.operators.pages.text_table import cell, table_in_turns
from epp.shell.peers.state import PeerRow

PAGES: Final = {
    "/debug/config": "configuration in force, with hash and generation",
    "/debug/endpoints": "endpoints with state, its reason and start, metrics and requests in flight",
    "/debug/decisions": (
        "last decisions and refusals; ?n= ?request_id= ?endpoint= ?model= ?refused="
    ),
    "/debug/explain": "why a request was routed to its endpoint; ?request_id= ?endpoint= (why not this one)",
    "/debug/indexes": "affinity indexes with type, source of information, entries, bytes and hits",
    "/debug/tokens": "backend for tokens of prompts, its results, and each tokenizer or renderer",
    "/debug/peers": "replicas that share state: connection, last message, bytes, dropped frames",
}
"""Description of each debug page, by path."""
SHOWN: Final = 50
SHOWN_MAX: Final = 1_000
EXPLAINED_MAX: Final = 5
"""Maximum number of requests with the same id that /debug/explain shows, newest first. It is
limited because clients choose ids.
"""
_COLUMNS: Final = (
    *("at", "number", "request_id", "model", "path", "priority", "endpoint", "address"),
    *("prompt_tokens", "matched", "ready", "candidates", "eliminated", "refused", "status"),
    "scores",
)
"""Columns of the table of decisions on the page /debug/decisions."""


class DebugPages:
    """The routes of the debug pages for the metrics server."""

    def __init__(  # noqa: PLR0913, PLR0917 - the sources of all pages
        self,
        scheduler: Scheduler,
        recent: RecentDecisions,
        config: Callable[[], tuple[PickerConfig, int]],
        states: EndpointStates,
        peers: Callable[[], Sequence[PeerRow]] = tuple,
        first_tokens: Callable[[Seconds], Mapping[str, FirstTokens]] = lambda _: {},
        kv_events: Callable[[Endpoint], SourceRow | None] = lambda _: None,
        tokens: Callable[[], dict[str, Any]] = dict,
        pages: Callable[[Endpoint], PagesRow | None] = lambda _: None,
    ) -> None:
        """Create the debug pages with the functions that return their content.

        - `config` returns the configuration in force and its generation.
        - `peers` returns one row for each other replica.
        - `first_tokens` returns the engines' times to first token by endpoint id.
        - `kv_events` returns the state of an endpoint's KV events.
        - `tokens` returns the state of the token backend.
        - `pages` returns the content of an endpoint's model and GPU pages.
        """
        self._pages = pages
        self._tokens = tokens
        self._first_tokens = first_tokens
        self._kv_events = kv_events
        self._scheduler = scheduler
        self._recent = recent
        self._config = config
        self._states = states
        self._peers = peers

    def routes(self, queue: PageQueue, token: BearerToken | None = None) -> list[web.RouteDef]:
        """Return the routes of the debug pages. Pages are created in `queue` and require `token`,
        if it is not None.
        """
        pages = (
            self._config_page,
            self._endpoints_page,
            self._decisions_page,
            self._explain_page,
            self._indexes_page,
            self._tokens_page,
            self._peers_page,
        )
        made = [queue.queued(page) for page in pages]
        # The token is checked first, so that requests without it take no place in the queue.
        return [
            web.get(path, token.guarded(page) if token else page)
            for path, page in zip(PAGES, made, strict=True)
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
        failed = f"\nplugins that failed\n{await table_in_turns(failing)}" if failing else ""
        return web.Response(text=f"generation     {generation}\n{explain(config)}{failed}")

    async def _endpoints_page(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        tokens = self._first_tokens(now)
        rows = endpoint_rows(
            self._scheduler, self._states, now, tokens, self._kv_events, self._pages
        )
        if _wants_json(request):
            return await _json_rows("endpoints", rows)
        for row in rows:
            del row["labels"]
        return web.Response(text=await table_in_turns(rows))

    async def _decisions_page(self, request: web.Request) -> web.Response:
        count, wanted = _question(request)
        rows = await self._recent.rows(count, wanted)
        if _wants_json(request):
            return await _json_rows("decisions", rows)
        staged = any("route" in row for row in rows)
        flat = (_flat(row, staged=staged) for row in rows)
        return web.Response(text=await table_in_turns(flat))

    async def _explain_page(self, request: web.Request) -> web.Response:
        query = request.query
        if set(query) - {"request_id", "endpoint", "format"} or not query.get("request_id"):
            sentence = "expected ?request_id=, optionally with endpoint and format\n"
            raise web.HTTPBadRequest(text=sentence)
        wanted = Wanted(request_id=query["request_id"])
        rows = await self._recent.rows(EXPLAINED_MAX, wanted, query.get("endpoint", ""))
        for row in rows:
            self._add_overdue(row)
        status = 200 if rows else 404
        if _wants_json(request):
            return _json({"decisions": rows, "kept_since": self._kept_since()}, status)
        if rows:
            return web.Response(text="\n".join(map(explanation, rows)))
        return web.Response(status=404, text=self._not_kept(query["request_id"]))

    def _add_overdue(self, row: Row) -> None:
        """Add the number of overdue prefills of the row's pair of endpoints, if there are any."""
        if Stage.PREFILL not in row:
            return
        names = row[Stage.PREFILL]["endpoint"], row["endpoint"]
        scheduler = self._scheduler
        for pair, count in scheduler.state.overdue_prefills.by_pair.items():
            if tuple(scheduler.pool.endpoint_in(slot).name for slot in pair) == names:
                row["overdue"] = {
                    "prefills": count,
                    "deadline_s": scheduler.settings.stages.prefill_deadline_s,
                }

    def _kept_since(self) -> str | None:
        oldest_s = self._recent.oldest_at_s
        return None if oldest_s is None else iso(oldest_s)

    def _not_kept(self, request_id: str) -> str:
        since = self._kept_since()
        kept = f"since {since}" if since else "so far"
        return (
            f"no request {cell(request_id[:TEXT_CHARACTERS_MAX])} was decided or refused by this "
            f"picker {kept}; older records are dropped, and other replicas have their own\n"
        )

    async def _indexes_page(self, request: web.Request) -> web.Response:
        rows = [_index_row(standing) for standing in self._scheduler.indexes.standings()]
        if _wants_json(request):
            return _json({"indexes": rows})
        for row in rows:
            row["lookups"] = ", ".join(f"{n} {found}" for found, n in row["lookups"].items())
        return web.Response(text=await table_in_turns(rows))

    async def _tokens_page(self, request: web.Request) -> web.Response:
        told = self._tokens()
        if _wants_json(request):
            return _json(told)
        lists = {name: rows for name, rows in told.items() if isinstance(rows, list)}
        lines = [
            f"{name:<14} {_told(value)}\n" for name, value in told.items() if name not in lists
        ]
        for name, rows in lists.items():
            if rows:
                lines.append(f"\n{name}\n{await table_in_turns(rows)}")
        return web.Response(text="".join(lines))

    async def _peers_page(self, request: web.Request) -> web.Response:
        rows = [_peer_row(peer) for peer in self._peers()]
        if _wants_json(request):
            return _json({"peers": rows})
        return web.Response(text=await table_in_turns(rows))


def _index_row(standing: IndexStanding) -> Row:
    """Return the row of an index for /debug/indexes; None means unknown or without bound."""
    told = standing.measures
    return {
        "name": standing.name,
        "type": standing.type_name,
        "origin": standing.origin,
        "open": standing.is_open,
        "entries": None if told is None else told.entries,
        "memory_bytes": None if told is None else told.memory_bytes,
        "memory_max_bytes": standing.memory_max_bytes,
        "hits": None if told is None else told.hits,
        "lookups": {} if told is None else dict(told.lookups),
    }


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
    return cell(value)


def _peer_row(peer: PeerRow) -> Row:
    row: Row = msgspec.structs.asdict(peer)
    for name in ("connected_s", "heard_s"):
        row[name] = None if row[name] is None else round(row[name], 1)
    return row


def _question(request: web.Request) -> tuple[int, Wanted]:
    """Parse the query parameters of /debug/decisions: the number of rows and the selection. Raises
    `HTTPBadRequest` if one is invalid.
    """
    query = request.query
    known = ("n", "format", *Wanted.__struct_fields__)
    if unknown := [name for name in query if name not in known]:
        sentence = f"{cell(unknown[0])[:TEXT_CHARACTERS_MAX]} is not one of {', '.join(known)}\n"
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


def _flat(row: Row, *, staged: bool) -> Row:
    """Return a decision or refusal as a flat row for the table of /debug/decisions.

    All rows have the same columns. The route and the endpoints of the prefill and encode stages are
    columns if `staged` is true.
    """
    flat = {name: row.get(name) for name in _COLUMNS}
    if staged:
        flat["route"] = row.get("route")
        for stage in (Stage.PREFILL.value, Stage.ENCODE.value):
            flat[stage] = row[stage]["endpoint"] if stage in row else None
    flat["eliminated"] = ", ".join(f"{count} by {by}" for by, count in row["eliminated"].items())
    if "scores" in row:
        flat["matched"] = f"{row['matched_blocks']}/{row['total_blocks']}"
        # The chosen endpoint, and the best of the others.
        chosen_first = sorted(row["scores"], key=lambda score: score["endpoint"] != row["endpoint"])
        flat["scores"] = ", ".join(map(_spelt, chosen_first[:2]))
    return flat


def _spelt(score: Row) -> str:
    parts = " + ".join(f"{part:g} {scorer}" for scorer, part in score["parts"].items())
    mark = "" if score["state"] == READY else f" ({score['state']})"
    cost = f" ({score['cost']:.3g} {score['unit']})" if "cost" in score else ""
    return f"{score['endpoint']}{mark} {score['total']:g} = {parts or 0}{cost}"


def _wants_json(request: web.Request) -> bool:
    wanted = request.query.get("format")
    if wanted is None:
        return "application/json" in request.headers.get(hdrs.ACCEPT, "")
    if wanted not in {"json", "text"}:
        raise web.HTTPBadRequest(text="format must be json or text\n")
    return wanted == "json"


async def _json_rows(name: str, rows: Iterable[Row]) -> web.Response:
    """Encode `{name: rows}` as JSON; the event loop runs between groups of rows."""
    encoded = [msgspec.json.encode(row) async for row in in_turns(rows)]
    body = b'{"%b":[%b]}\n' % (name.encode(), b",".join(encoded))
    return web.Response(body=body, content_type="application/json")


def _json(value: Any, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value) + b"\n"
    return web.Response(status=status, body=body, content_type="application/json")
