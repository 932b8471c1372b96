"""Receive KV events: one connection per rank of an endpoint, and one more to replay missed events.

ZMTP is implemented by `core/kv_events/zmtp`, in this event loop and without threads. libzmq is not
used: it aborts the process on a failed invariant, hides disconnections, and drops messages of slow
readers. Received data is read from all connections together (`gathered_reads`), added to
subscriptions, and processed in turns of 3 ms with pauses of 4 ms. Engines that send without pause
therefore use at most three sevenths of the loop. A connection with too much unprocessed data is not
read, and its engine drops what it cannot send.

`kv_event_server` accepts engines that connect themselves; an endpoint uses one of the two ways at a
time. For these engines the number of ranks is configured, and each payload contains its rank. An
endpoint whose engine sends more ranks than configured is ignored, because the rank of its cached
blocks is unknown.

Without a configured port each endpoint is requested `GET /kv_event_sources`, which vLLM supports
since 0.31. For an engine that does not support it the usual port is tried. An engine may have
several ranks behind its address, each with its own connection. The endpoint is requested again when
a rank is missing or the engine restarted, because it may have fewer ranks then.
"""

import asyncio
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final

import msgspec
import structlog
from msgspec import Struct

from epp.core.address import address_of
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.exact_parameters import KvEventsConfig
from epp.core.knowledge.index import RANKS_MAX
from epp.core.kv_events.payload import rank_in
from epp.core.kv_events.stream import AskReplay, StreamState
from epp.core.kv_events.zmtp import (
    SocketType,
    ZmtpConnection,
    ask_replay,
    read_live,
    read_replayed,
)
from epp.core.subscription import Asked, Subscription
from epp.core.types import Endpoint, MetricsTarget, Seconds, pod_of, ranks_of
from epp.shell.engines.gathered_reads import GatheredReads
from epp.shell.engines.kv_event_server import KVEventServer, Turned
from epp.shell.engines.loop_share import LoopShare
from epp.shell.engines.page_client import BadResponseError, PageClient
from epp.shell.engines.zmtp_lines import ZmtpLines
from epp.shell.supervision import Supervisor, forever

DEFAULT_PORT: Final = 5557
"""Usual port of publishers."""
SOURCES_PATH: Final = "/kv_event_sources"
SOURCES_BYTES_MAX: Final = 64 * 1024
ASK_S_MAX: Final[Seconds] = 2.0
CONNECT_S_MAX: Final[Seconds] = 5.0
BACKOFF_S: Final[Seconds] = 0.5
BACKOFF_S_MAX: Final[Seconds] = 5.0
NO_SOURCE_S: Final[Seconds] = 30.0
"""Delay in seconds before an endpoint without source is requested again; shorter without an answer."""
TAKEN_OVER_S: Final[Seconds] = 5.0
"""Time in seconds after which a silent connection may be replaced by another of the same endpoint."""
TRIES_BEFORE_ASKING: Final = 3
"""Number of failed connections after which the endpoint is requested for its source again."""
REPLAYS_AT_ONCE_MAX: Final = 8
REPLAY_IDLE_S: Final[Seconds] = 2.0
REPLAY_S_MAX: Final[Seconds] = 120.0
WATCH_S: Final[Seconds] = 0.25
TURN_S: Final[Seconds] = 0.003
PAUSE_S: Final[Seconds] = 0.004
"""Pause in seconds before a turn; processing collected messages together takes less time."""
IDLE_PAUSE_S: Final[Seconds] = 0.016
"""Pause in seconds while nothing arrives."""
AT_ONCE_MAX: Final = 32
"""Number of endpoints from which one frame is decoded before any is processed."""
WAITING_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum unprocessed bytes of one endpoint; beyond it its connection is not read."""

_log = structlog.get_logger(__name__)


_WORST_FIRST: Final = (
    StreamState.NONE,
    StreamState.CONNECTING,
    StreamState.STALE,
    StreamState.REPLAYING,
    StreamState.LIVE,
)
_RANK: Final = re.compile(r"0|[1-9][0-9]{0,4}")


class Place(Struct, frozen=True):
    """The address where one rank of an endpoint publishes."""

    host: str
    port: int
    replay_port: int | None = None


class _Published(Struct, gc=False):
    """The source of one rank as reported by an engine."""

    endpoint: str | None = None
    replay_endpoint: str | None = None
    publisher: str | None = None
    enable_kv_cache_events: bool = True


class SourceRow(Struct, frozen=True, kw_only=True):
    """The reception of one endpoint's events, for operators; with several ranks the worst one."""

    endpoint: str
    state: StreamState
    complete: bool = False
    silent: bool = False
    problem: str = ""
    """Reason in words why no events are received; "" if they are, or soon will be."""
    place: str = ""
    """Address where it publishes, as far as known."""
    lag_s: Seconds | None = None
    """Age of the last frame in seconds, by the clocks of engine and picker."""
    sequence: int | None = None
    """Engine's sequence number up to which every frame was processed."""


class KVEventsSnapshot(Struct, frozen=True, kw_only=True):
    """The reception of all endpoints' events, for metrics; counts are since the start."""

    states: Mapping[str, int]
    """Number of endpoints by state."""
    incomplete: int = 0
    """Number of live endpoints that did not report all cached blocks."""
    silent: int = 0
    events: Mapping[str, int]
    """Number of events by type."""
    faults: Mapping[str, int]
    """Number of unknown events and payloads by reason."""
    streams: Mapping[str, int]
    """Number of gaps, replays and similar, by kind."""


class _Source:
    """The source of one rank; the first rank represents the endpoint."""

    def __init__(
        self, endpoint: Endpoint, slot: int, *, rank: int = 0, first: "_Source | None" = None
    ) -> None:
        self.endpoint = endpoint
        self.slot = slot
        self.rank = rank
        self.first = first
        """Source of the first rank, or None if this is the first."""
        self.others: list[_Source] = []
        """Sources of the other ranks in order; only the first rank has them."""
        self.lives = 0
        """Number of restarts when the endpoint was last requested for its sources."""
        self.asking: asyncio.Task[None] | None = None
        """Task that requests the sources again."""
        self.subscription: Subscription | None = None
        self.place: Place | None = None
        """Address where the rank publishes, or None if unknown."""
        self.heard_at: Place | None = None
        """Address of the open connection `lines`, whichever side opened it."""
        self.problem = ""
        self.rank_said: int | None = None
        """Rank in the payloads of an engine that connected and should have one rank."""
        self.refused = ""
        """Reason why an engine that connects is ignored."""
        self.lines: ZmtpLines | None = None
        self.task: asyncio.Task[None] | None = None
        self.replay: asyncio.Task[None] | None = None
        self.named_silent = False

    @property
    def ranks(self) -> tuple["_Source", ...]:
        """All ranks of the endpoint; valid for the first rank."""
        return (self, *self.others)


class KVEventListener:
    """A receiver of the events of every endpoint, active while an index needs KV events."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        seed: int,
        supervisor: Supervisor | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
        wall_clock: Callable[[], Seconds] = time.time,
    ) -> None:
        """`seed` is used only for jitter."""
        self._scheduler = scheduler
        self._supervisor = supervisor or Supervisor()
        self._clock = clock
        self._wall_clock = wall_clock
        self._random = Random(f"{seed}:kv-events")  # noqa: S311  jitter, not secrets
        self._settings: KvEventsConfig | None = None
        self._ranks_chosen = False
        """True if a plugin selects ranks, so that engines with several ranks are usable."""
        self._endpoints: Sequence[Endpoint] = ()
        self._ranks: Mapping[str, int] = {}
        """Rank of an endpoint in its pod, by endpoint id."""
        self._pods: Mapping[tuple[str, str], int] = Counter()
        """Number of endpoints by pod."""
        self._sources: dict[str, _Source] = {}
        self._group: asyncio.TaskGroup | None = None
        self._replays = asyncio.Semaphore(REPLAYS_AT_ONCE_MAX)
        self._reads = GatheredReads(clock)
        self._share = LoopShare(time.thread_time)
        self._busy: OrderedDict[_Source, None] = OrderedDict()
        """Sources with unprocessed data, in the order of their turns."""
        self._turn: asyncio.Handle | None = None
        self._pause_s = PAUSE_S
        """Pause before the next turn in seconds."""
        self.server: KVEventServer | None = None
        """Server for engines that connect, or None."""
        self._server_task: asyncio.Task[None] | None = None
        self._gone: Counter[tuple[str, str]] = Counter()
        """Counts of closed subscriptions, by kind and name."""
        self._wanted = asyncio.Event()
        """Set while an index receives events from engines."""

    # The methods below handle the pool.

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints and apply the current configuration of the scheduler.

        The scheduler must know both already.
        """
        self._endpoints = endpoints
        self._ranks = ranks_of(endpoints)
        self._pods = Counter(map(pod_of, endpoints))
        names = self._scheduler.indexes.hearing
        configured: Any = next((self._scheduler.settings.indexes[name] for name in names), None)
        settings = None if configured is None else configured.kv_events_config
        responders = self._scheduler.settings.profile.responders
        chosen = any(one.plugin.abilities.chooses_ranks for one in responders)
        if (settings, chosen) != (self._settings, self._ranks_chosen):
            self._settings, self._ranks_chosen = settings, chosen
            for source in self._sources.values():
                self._drop(source)
            self._sources = {}
            self._close_server()
            if settings is not None and settings.binds is not None:
                topic = settings.topic_filter.encode()
                self.server = KVEventServer(
                    self,
                    *settings.binds,
                    topic=topic,
                    ranks=_ranks_that_connect(settings),
                    clock=self._clock,
                )
        self._wanted.clear()
        if settings is not None:
            self._wanted.set()
        before, self._sources = self._sources, {}
        if settings is not None and (settings.discover_pods or settings.binds is not None):
            for endpoint in endpoints:
                slot = self._scheduler.pool.slot_of(endpoint)
                if slot is None:
                    continue
                known = before.get(endpoint.endpoint_id)
                if known is not None and _same_process(known, endpoint, slot):
                    del before[endpoint.endpoint_id]
                    for source in known.ranks:
                        source.endpoint = endpoint
                    self._sources[endpoint.endpoint_id] = known
                else:
                    self._sources[endpoint.endpoint_id] = self._new_source(endpoint, slot, settings)
        for gone in before.values():
            self._drop(gone)
        if self.server is not None:
            self.server.replace(source.endpoint for source in self._sources.values())
        self._start()

    def rows(self) -> list[SourceRow]:
        """Return one row for each endpoint whose events are wanted."""
        return [self._worst_row(source) for source in self._sources.values()]

    def row_of(self, endpoint: Endpoint) -> SourceRow | None:
        """Return the row of `endpoint`, or None if its events are not wanted."""
        source = self._sources.get(endpoint.endpoint_id)
        return None if source is None else self._worst_row(source)

    def snapshot(self) -> KVEventsSnapshot | None:
        """Return the totals, or None if no index receives events from engines."""
        if self._settings is None:
            return None
        rows = self.rows()
        totals = self._gone.copy()
        for _, subscription in self.subscriptions():
            totals.update(_counts_of(subscription))
        if self.server is not None:
            turned = self.server.turned
            totals.update({("faults", why.value): count for why, count in turned.items()})
        kinds: dict[str, dict[str, int]] = {"events": {}, "faults": {}, "streams": {}}
        for (kind, name), count in totals.items():
            kinds[kind][name] = count
        return KVEventsSnapshot(
            states=dict.fromkeys(map(str, StreamState), 0)
            | Counter(str(row.state) for row in rows),
            incomplete=sum(row.state is StreamState.LIVE and not row.complete for row in rows),
            silent=sum(row.silent for row in rows),
            **kinds,
        )

    def subscriptions(self) -> list[tuple[Endpoint, Subscription]]:
        """Return the subscriptions of endpoints that have a source."""
        return [
            (source.endpoint, source.subscription)
            for source in self._every_rank()
            if source.subscription is not None
        ]

    def _every_rank(self) -> Iterator[_Source]:
        for source in self._sources.values():
            yield from source.ranks

    async def run(self) -> None:
        """Receive events until cancelled; this owns all tasks and connections."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self.replace(self._endpoints)
                group.create_task(
                    self._supervisor.keep("watch KV events", self._watch), name="watch KV events"
                )
                await forever()
        finally:
            self._group = None
            for source in self._sources.values():
                self._drop(source)
            self._sources = {}
            self._close_server()
            if self._turn is not None:
                self._turn.cancel()
                self._turn = None
            self._reads.close()
            self._settings = None

    # The methods below handle engines that connect.

    def engine_connected(self, endpoint_id: str, lines: ZmtpLines) -> None:
        """Use `lines` for the endpoint.

        Only this endpoint can use them, and nothing was received yet.
        """
        source = self._sources.get(endpoint_id)
        if source is not None and not source.others and not source.refused:
            self._take_in(source, lines)

    def engine_said(
        self, endpoint_id: str, lines: ZmtpLines, sequence: int, payload: bytes
    ) -> Turned | None:
        """Process a message. Return the reason if it is rejected, else None.

        If it is accepted, `lines` belong to the endpoint from now on.
        """
        first = self._sources.get(endpoint_id)
        if first is None:
            return Turned.TAKEN
        source = self._rank_that_says(first, payload)
        if isinstance(source, Turned):
            return source
        if not self._take_in(source, lines):
            return Turned.TAKEN
        assert source.subscription is not None, "the connection created the subscription"
        self._ask(source, source.subscription.received(sequence, payload, self._clock()))
        return None

    def _rank_that_says(self, first: _Source, payload: bytes) -> _Source | Turned:
        """Return the rank that sent `payload`, or the reason why it is rejected."""
        rank = rank_in(payload)
        if first.refused:
            return Turned.RANK
        if first.others:
            if self._settings is None or self._settings.discover_pods:
                # These ranks are received where they publish.
                return Turned.TAKEN
            known = rank is not None and rank < len(first.ranks)
            return first.ranks[rank or 0] if known else Turned.RANK
        if rank is None or rank == first.rank_said:
            return first
        if first.rank_said is None:
            first.rank_said = rank
            return first
        first.refused = first.problem = (
            f"connects with ranks {first.rank_said} and {rank}, but one rank is configured: "
            "declare a data-parallel-rank-producer, and the number of ranks in dataParallelSize"
        )
        if first.lines is not None:
            first.lines.end("is no longer used")
        self._end_subscription(first)
        return Turned.RANK

    def _take_in(self, source: _Source, lines: ZmtpLines) -> bool:
        """Use `lines` of an engine that connected for `source`.

        Return False if another connection is used.
        """
        if self._settings is None or lines.transport is None:
            return False
        if source.lines is lines:
            return True
        now, before = self._clock(), source.lines
        subscription = source.subscription
        if (
            before is not None
            and before.is_ready
            and subscription is not None
            # Later the other connection may be gone without notice.
            and now - subscription.stream.heard_at_s < TAKEN_OVER_S
        ):
            return False
        if before is not None:
            before.end("is no longer used: another connection serves the endpoint")
        port: int = lines.transport.get_extra_info("peername")[1]
        source.lines = lines
        self._connected(source, self._place_of_who_connects(source, port, self._settings))
        return True

    def _place_of_who_connects(self, source: _Source, port: int, settings: KvEventsConfig) -> Place:
        """Return the place of an engine that connects from `port`; it binds the replay port as
        usual.
        """
        replay = settings.pod_discovery_config.replay_socket_port
        rank = self._ranks[source.endpoint.endpoint_id] + source.rank
        return Place(source.endpoint.host, port, None if replay is None else replay + rank)

    def _new_source(self, endpoint: Endpoint, slot: int, settings: KvEventsConfig) -> _Source:
        """Return a source, with all ranks if their number is configured and engines connect."""
        first = _Source(endpoint, slot)
        ranks = _ranks_that_connect(settings)
        if ranks == 1:
            return first
        why = _unheard(ranks, self._pods[pod_of(endpoint)], ranks_chosen=self._ranks_chosen)
        if why:
            first.refused = first.problem = f"dataParallelSize is {why}"
            return first
        first.others = [_Source(endpoint, slot, rank=rank, first=first) for rank in range(1, ranks)]
        for source in first.ranks:
            # All cached blocks of an endpoint are known only once every rank is received.
            self._open_subscription(source, self._place_of_who_connects(source, 0, settings))
        return first

    def engine_parted(self, lines: ZmtpLines, why: str) -> None:
        """Record that the connection of `lines` has ended."""
        for source in self._every_rank():
            if source.lines is lines:
                source.problem = source.refused or f"{_spelt(source.heard_at)} {why}"
                self._parted(source, lines)

    def _close_server(self) -> None:
        if self._server_task is not None:
            self._server_task.cancel()
            self._server_task = None
        if self.server is not None:
            turned = self.server.turned
            self._gone.update({("faults", why.value): count for why, count in turned.items()})
            self.server = None

    # The methods below handle sources.

    def _start(self) -> None:
        if self._group is None:
            return
        if self.server is not None and self._server_task is None:
            self._server_task = self._group.create_task(
                self._supervisor.keep("listen for KV events", self.server.run),
                name="listen for KV events",
            )
        if self._settings is None or not self._settings.discover_pods:
            return
        for source in self._every_rank():
            if source.task is None:
                name = _name_of(source)
                follow = partial(self._follow, source)
                source.task = self._group.create_task(
                    self._supervisor.keep("hear KV events", follow, of=name),
                    name=f"KV events {name}",
                )

    def _drop(self, source: _Source) -> None:
        for other in source.others:
            self._drop(other)
        source.others = []
        for task in (source.task, source.replay, source.asking):
            if task is not None:
                task.cancel()
        source.task = source.replay = source.asking = None
        if source.lines is not None:
            source.lines.end()
            source.lines = None
        self._end_subscription(source)

    def _end_subscription(self, source: _Source) -> None:
        subscription, source.subscription = source.subscription, None
        if subscription is None:
            return
        self._gone.update(_counts_of(subscription))
        # The slot may belong to another endpoint now.
        if self._scheduler.pool.slot_of(source.endpoint) == source.slot:
            subscription.close(self._clock())

    async def _follow(self, source: _Source) -> None:
        """Find where a rank publishes, receive its events, and reconnect after a failure."""
        await asyncio.sleep(self._random.random() * BACKOFF_S)
        tries = 0
        while True:
            if source.lines is not None:
                # The engine has connected by itself.
                await asyncio.wait([source.lines.closed])
                await asyncio.sleep(self._jittered(BACKOFF_S_MAX))
                continue
            if source.place is None or tries >= TRIES_BEFORE_ASKING:
                tries = 0
                if source.first is not None:
                    # The rank may be gone, because the engine restarted with fewer ranks.
                    self._ask_anew(source.first)
                    await asyncio.sleep(self._jittered(BACKOFF_S_MAX))
                    answered = True
                else:
                    answered = await self._find(source)
                if source.place is None:
                    await asyncio.sleep(self._jittered(NO_SOURCE_S if answered else BACKOFF_S_MAX))
                    continue
            heard = await self._hear(source, source.place)
            tries = 0 if heard else tries + 1
            pause_s = min(BACKOFF_S * 2.0 ** min(tries, 10), BACKOFF_S_MAX)
            await asyncio.sleep(self._jittered(pause_s))

    def _jittered(self, pause_s: Seconds) -> Seconds:
        return pause_s * self._random.uniform(0.8, 1.2)

    def _ask_anew(self, source: _Source) -> None:
        """Request the sources of the endpoint again."""
        if self._group is None or (source.asking is not None and not source.asking.done()):
            return

        async def ask() -> None:
            while True:
                if await self._find(source):
                    return
                await asyncio.sleep(self._jittered(BACKOFF_S_MAX))

        source.asking = self._group.create_task(
            ask(), name=f"KV event sources {source.endpoint.name}"
        )

    async def _find(self, source: _Source) -> bool:
        """Determine where the ranks of `source` publish.

        Return False if the endpoint was unreachable.
        """
        assert self._settings is not None, "the reception of events is configured"
        discovery = self._settings.pod_discovery_config
        source.lives = self._scheduler.indexes.lives.get(source.slot, 0)
        host = source.endpoint.host
        rank = self._ranks[source.endpoint.endpoint_id]
        if discovery.socket_port is not None:
            self._settle(source, self._places_from(source, discovery.socket_port), "")
            return True
        target = MetricsTarget(port=source.endpoint.port, path=SOURCES_PATH)
        account = self._share.open()
        client = PageClient(
            source.endpoint, target, page_bytes_max=SOURCES_BYTES_MAX, tls=None, account=account
        )
        try:
            page = await client.fetch(ASK_S_MAX)
        except BadResponseError:
            if source.others:
                # The endpoint answered before, so something else answers while it starts.
                return False
            # This is vLLM before 0.31 or another engine.
            self._settle(source, self._places_from(source, DEFAULT_PORT), "")
            return True
        except OSError as error:
            source.problem = f"{client.url} cannot be reached: {type(error).__name__}"
            return False
        finally:
            client.close()
            account.close()
        endpoints = self._pods[pod_of(source.endpoint)]
        found = places_of(page, host, rank, endpoints, ranks_chosen=self._ranks_chosen)
        self._settle(source, found, f"{client.url} ")
        return True

    def _places_from(self, source: _Source, port: int) -> tuple[Place, ...] | str:
        """Return the configured places of the ranks; the first rank of the pod uses `port`."""
        assert self._settings is not None, "the reception of events is configured"
        discovery = self._settings.pod_discovery_config
        ranks, endpoints = discovery.data_parallel_size, self._pods[pod_of(source.endpoint)]
        why = _unheard(ranks, endpoints, ranks_chosen=self._ranks_chosen) if ranks > 1 else ""
        if why:
            return f"dataParallelSize is {why}"
        replay = discovery.replay_socket_port
        first = self._ranks[source.endpoint.endpoint_id]
        return tuple(
            Place(source.endpoint.host, port + rank, None if replay is None else replay + rank)
            for rank in range(first, first + ranks)
        )

    def _settle(self, source: _Source, found: tuple[Place, ...] | str, said_by: str) -> None:
        """Use the places that were found and drop missing ranks; a text is the reason why none was
        found.
        """
        places = () if isinstance(found, str) else found
        kept = max(0, len(places) - 1)
        for gone in source.others[kept:]:
            self._drop(gone)
        del source.others[kept:]
        for rank in range(len(source.others) + 1, len(places)):
            other = _Source(source.endpoint, source.slot, rank=rank, first=source)
            source.others.append(other)
        if isinstance(found, str):
            source.place, source.problem = None, f"{said_by}{found}"
            if source.lines is not None:
                source.lines.end("is no longer used")
            return
        for one, place in zip(source.ranks, places, strict=True):
            before, one.place = one.place, place
            if before not in (None, place) and one.lines is not None:
                one.lines.end("is no longer the address where its engine publishes")
            if len(places) > 1 and one.subscription is None:
                # All cached blocks of an endpoint are known only once every rank is received.
                self._open_subscription(one, place)
        self._start()

    async def _hear(self, source: _Source, place: Place) -> bool:
        """Receive events until the connection ends. Return True if it was established."""
        topic = b"" if self._settings is None else self._settings.topic_filter.encode()
        zmtp = ZmtpConnection(SocketType.SUB, topic=topic)
        lines: ZmtpLines | None = None
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                _, lines = await asyncio.get_running_loop().create_connection(
                    lambda: ZmtpLines(zmtp, partial(self._received, source)), place.host, place.port
                )
                if source.lines is not None:
                    # The engine has connected by itself meanwhile.
                    return True
                source.lines = lines
                await lines.ready
            if source.lines is lines:
                self._connected(source, place)
            why = await lines.closed
            source.problem = f"{_spelt(place)} {why}"
        except (OSError, TimeoutError) as error:
            # A ZMTP error has a sentence; an error of the system is described by its type.
            what = str(error) if type(error) is ConnectionError else type(error).__name__
            source.problem = f"{_spelt(place)} cannot be received: {what}"
            return False
        finally:
            if lines is not None:
                lines.end()
                self._parted(source, lines)
        return True

    def _connected(self, source: _Source, place: Place) -> None:
        """Start receiving from the open connection of `source`."""
        subscription = source.subscription
        if subscription is None or subscription.replays is not (place.replay_port is not None):
            subscription = self._open_subscription(source, place)
        source.heard_at = place
        source.problem = ""
        if source.lines is not None:
            source.lines.gather(self._reads)
            self._await_turn()
        self._ask(source, subscription.connected(self._clock()))

    def _open_subscription(self, source: _Source, place: Place) -> Subscription:
        """Replace the subscription of `source` by one for events from `place`."""
        self._end_subscription(source)
        source.subscription = Subscription(
            self._scheduler,
            source.slot,
            rank=source.rank,
            replays=place.replay_port is not None,
            now=self._clock(),
        )
        return source.subscription

    def _parted(self, source: _Source, lines: ZmtpLines) -> None:
        """Record that the connection of `lines` has ended."""
        if source.lines is not lines:
            return
        source.lines = None
        if source.replay is not None:
            source.replay.cancel()
            source.replay = None
        if source.subscription is not None:
            self._ask(source, source.subscription.disconnected(self._clock()))

    def _received(self, source: _Source, message: tuple[bytes, ...]) -> None:
        subscription = source.subscription
        if subscription is None:
            return
        live = read_live(message)
        if live is None:
            subscription.unreadable += 1
            return
        self._ask(source, subscription.received(*live, self._clock()))

    def _ask(self, source: _Source, asked: Sequence[Asked]) -> None:
        """Do what the subscription requests, and schedule the processing of received data."""
        place = source.heard_at
        for question in asked:
            if not isinstance(question, AskReplay) or place is None or self._group is None:
                continue
            if source.replay is not None:
                source.replay.cancel()
            source.replay = self._group.create_task(
                self._replay(source, place, question.first),
                name=f"KV events again {_name_of(source)}",
            )
        subscription = source.subscription
        if subscription is None or not subscription.works:
            return
        self._busy.setdefault(source)
        if source.lines is not None and subscription.waiting_bytes > WAITING_BYTES_MAX:
            source.lines.read(on=False)
        self._await_turn()

    def _await_turn(self) -> None:
        if self._turn is None:
            self._pause_s = PAUSE_S
            self._turn = asyncio.get_running_loop().call_later(PAUSE_S, self._work)

    def _work(self) -> None:
        try:
            self._take_turn(self._clock())
        finally:
            self._turn = None
            if self._busy or self._reads:
                self._turn = asyncio.get_running_loop().call_later(self._pause_s, self._work)

    def _take_turn(self, now: Seconds) -> None:
        """Read received data and process some endpoints at a time, for at most `TURN_S`."""
        until_s = now + TURN_S
        # Reading takes at most half of the turn, so that a fast sender leaves time for processing.
        fetched = self._reads.fetch(now + TURN_S / 2)
        self._pause_s = PAUSE_S if fetched or self._busy else min(2 * self._pause_s, IDLE_PAUSE_S)
        while self._busy and self._clock() < until_s:
            some: list[_Source] = []
            while self._busy and len(some) < AT_ONCE_MAX and self._clock() < until_s:
                source, _ = self._busy.popitem(last=False)
                if source.subscription is not None:
                    source.subscription.read()
                    some.append(source)
            for source in some:
                if self._clock() < until_s:
                    self._note(source)
                else:
                    self._busy[source] = None

    def _note(self, source: _Source) -> None:
        """Process received events of one endpoint, or a part of them if there are many."""
        subscription = source.subscription
        if subscription is None:
            return
        asked = subscription.work(self._clock(), blocks_max=256)
        if subscription.works:
            self._busy[source] = None
        if source.lines is not None and subscription.waiting_bytes <= WAITING_BYTES_MAX // 2:
            source.lines.read(on=True)
        if asked:
            self._ask(source, asked)

    async def _replay(self, source: _Source, place: Place, first: int) -> None:
        """Request missed events; they are collected first, so that the engine need not wait."""
        subscription = source.subscription
        if subscription is None or place.replay_port is None:
            return
        marked = False
        arrived = asyncio.Event()

        def heard(message: tuple[bytes, ...]) -> None:
            nonlocal marked
            found = read_replayed(message)
            if found is True:
                marked = True
            elif isinstance(found, tuple):
                subscription.replayed(*found, self._clock())
            arrived.set()

        lines: ZmtpLines | None = None
        try:
            async with self._replays, asyncio.timeout(REPLAY_S_MAX):
                async with asyncio.timeout(CONNECT_S_MAX):
                    _, lines = await asyncio.get_running_loop().create_connection(
                        lambda: ZmtpLines(ZmtpConnection(SocketType.DEALER), heard),
                        place.host,
                        place.replay_port,
                    )
                    await lines.ready
                lines.zmtp.send(ask_replay(first))
                lines.flush()
                while not marked and not lines.closed.done():
                    arrived.clear()
                    async with asyncio.timeout(REPLAY_IDLE_S):
                        await arrived.wait()
        except (OSError, TimeoutError) as error:
            _log.debug(
                "replay of KV events failed",
                endpoint=_name_of(source),
                problem=type(error).__name__,
            )
        finally:
            if lines is not None:
                lines.end()
        source.replay = None
        if source.subscription is subscription:
            self._ask(source, subscription.replay_ended(self._clock(), marked=marked))

    async def _watch(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(WATCH_S)
            now = self._clock()
            for source in self._sources.values():
                lives = self._scheduler.indexes.lives.get(source.slot, 0)
                if source.place is not None and lives != source.lives:
                    self._ask_anew(source)
                elif source.rank_said is not None and lives != source.lives:
                    # Another process may have another rank.
                    source.lives, source.rank_said = lives, None
                    if source.refused:
                        source.refused = source.problem = ""
            for source in self._every_rank():
                subscription = source.subscription
                if subscription is None:
                    continue
                self._ask(source, subscription.watch(now))
                silent = subscription.stream.silent
                if silent is not source.named_silent:
                    source.named_silent = silent
                    if silent:
                        _log.warning(
                            "no KV events although the engine works",
                            endpoint=_name_of(source),
                            source=_spelt(source.heard_at),
                        )

    def _worst_row(self, source: _Source) -> SourceRow:
        """Return the row of an endpoint; with several ranks that of the worst one."""
        if not source.others:
            return self._row(source)
        rows = [self._row(one) for one in source.ranks]
        rank, worst = min(enumerate(rows), key=lambda row: _WORST_FIRST.index(row[1].state))
        problem = worst.problem
        if not problem and worst.state is not StreamState.LIVE:
            problem = f"is {worst.state}"
        lags = [row.lag_s for row in rows if row.lag_s is not None]
        return msgspec.structs.replace(
            worst,
            complete=all(row.complete for row in rows),
            silent=any(row.silent for row in rows),
            problem=f"rank {rank} of {len(rows)}: {problem}" if problem else "",
            lag_s=max(lags, default=None),
        )

    def _row(self, source: _Source) -> SourceRow:
        subscription = source.subscription
        if subscription is None:
            problem = source.problem
            if self.server is not None and not problem:
                problem = self.server.problem or f"has not connected to port {self.server.port}"
            return SourceRow(
                endpoint=source.endpoint.name,
                state=StreamState.NONE,
                problem=problem,
                place=_spelt(source.place),
            )
        told_at_s = subscription.engine_clock_s
        heard = source.lines is not None and source.lines.is_ready
        return SourceRow(
            endpoint=source.endpoint.name,
            state=subscription.state,
            complete=subscription.complete,
            silent=subscription.stream.silent,
            problem="" if heard else source.problem,
            place=_spelt(source.heard_at),
            lag_s=None if told_at_s is None else self._wall_clock() - told_at_s,
            sequence=subscription.noted,
        )


def _ranks_that_connect(settings: KvEventsConfig) -> int:
    """Return the number of ranks per endpoint that connect; discovered engines do not connect."""
    return 1 if settings.discover_pods else settings.pod_discovery_config.data_parallel_size


def _counts_of(subscription: Subscription) -> dict[tuple[str, str], int]:
    streams = msgspec.structs.asdict(subscription.stream.counts)
    streams["unreadable"] = subscription.unreadable
    return {
        **{("events", name): count for name, count in subscription.events.items()},
        **{("faults", fault.value): count for fault, count in subscription.faults.items()},
        **{("streams", name): count for name, count in streams.items()},
    }


def places_of(
    page: bytes, host: str, rank: int, endpoints: int, *, ranks_chosen: bool
) -> tuple[Place, ...] | str:
    """Return where an engine publishes according to its answer `page`, or why that is unknown.

    The host of the endpoint is used, because the engine cannot know its address for this picker. If
    a pod has as many `endpoints` as the engine has ranks, the endpoint is `rank`. An engine with
    more ranks distributes requests among them. Its cached blocks are then useful only if a plugin
    selects the rank (`ranks_chosen`) and the engine is one endpoint.
    """
    try:
        ranks = msgspec.json.decode(page, type=dict[str, _Published])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "answered with something other than sources by rank"
    if len(ranks) > max(endpoints, 1):
        why = _unheard(len(ranks), endpoints, ranks_chosen=ranks_chosen)
        return f"lists {why}" if why else _places_of_all(ranks, host)
    config = ranks.get(str(rank))
    if config is None and len(ranks) == 1:
        config = next(iter(ranks.values()))
    if config is None:
        return f"lists no source of rank {rank}" if ranks else "lists no source"
    port = _port_of(config.endpoint)
    if not config.enable_kv_cache_events or config.publisher == "null" or port is None:
        return "lists no source that publishes to a TCP port"
    return (Place(host, port, _port_of(config.replay_endpoint)),)


def _unheard(ranks: int, endpoints: int, *, ranks_chosen: bool) -> str:
    """Return why an engine with more `ranks` than its pod has `endpoints` is unusable, or ""."""
    what = f"{ranks} ranks behind {endpoints} endpoint{'s' * (endpoints != 1)}"
    if endpoints > 1:
        return f"{what}, which the engine's own balancer selects: give each rank a port of its own"
    if not ranks_chosen:
        return (
            f"{what}, which the engine's own balancer selects: declare a "
            "data-parallel-rank-producer, or give each rank a port of its own"
        )
    return f"{what}, at most {RANKS_MAX} are supported" if ranks > RANKS_MAX else ""


def _places_of_all(ranks: Mapping[str, _Published], host: str) -> tuple[Place, ...] | str:
    """Return the places of an engine's ranks in order, or why they are unknown."""
    if not all(map(_RANK.fullmatch, ranks)):
        return "lists ranks that are not numbers"
    numbers = sorted(map(int, ranks))
    if numbers[-1] - numbers[0] != len(numbers) - 1:
        return "lists ranks that are not consecutive"
    places: list[Place] = []
    for number in numbers:
        config = ranks[str(number)]
        port = _port_of(config.endpoint)
        if not config.enable_kv_cache_events or config.publisher == "null" or port is None:
            return f"lists no source of rank {number} that publishes to a TCP port"
        places.append(Place(host, port, _port_of(config.replay_endpoint)))
    if len({place.port for place in places}) < len(places):
        return "lists one port for several ranks"
    return tuple(places)


def _port_of(endpoint: str | None) -> int | None:
    if endpoint is None or not endpoint.startswith("tcp://"):
        return None
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536 else None


def _same_process(known: _Source, endpoint: Endpoint, slot: int) -> bool:
    return (known.endpoint.address, known.endpoint.incarnation, known.slot) == (
        endpoint.address,
        endpoint.incarnation,
        slot,
    )


def _name_of(source: _Source) -> str:
    """Return the name for the log, with the rank if there are several."""
    several = source.first is not None or source.others
    return f"{source.endpoint.name} rank {source.rank}" if several else source.endpoint.name


def _spelt(place: Place | None) -> str:
    return "" if place is None else f"tcp://{address_of(place.host, place.port)}"
