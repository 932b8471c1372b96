"""Receive KV-cache events: over one connection per rank of an endpoint, and one more to replay
missed events.

ZMTP is implemented by `core/kv_events/zmtp`, in this event loop and without threads. libzmq is not
used: it aborts the process on a failed invariant, hides disconnections, and drops messages of slow
readers.

This module decides where to connect. The others do the rest:

- `kv_event_places`: the addresses that an engine lists.
- `kv_event_source`: the state of one rank, and its row for operators.
- `kv_event_reception`: subscriptions, open connections and replays.
- `kv_event_turns`: the processing of received data, in turns of bounded length.
- `kv_event_server`: engines that connect themselves.

Events of an endpoint arrive in one of two ways at a time: the picker connects to the engine, or the
engine connects to the picker. For engines that connect, the number of ranks is configured, and each
payload contains its rank. If one rank is configured and an engine sends several, its endpoint is
ignored, because the rank of its cached blocks is unknown. If several are configured, payloads of
further ranks are rejected.

To connect without a configured port, the picker requests `GET /kv_event_sources` from each
endpoint, which vLLM supports since 0.31. With an engine that does not support it, the usual port is
tried. An engine may have several ranks behind its address, each with its own connection. The picker
repeats the request when a rank is missing or the engine restarted, because it may have fewer ranks
then.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final

from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.exact_parameters import KvEventsConfig
from epp.core.kv_events.payload import rank_in
from epp.core.kv_events.stream import StreamState
from epp.core.kv_events.zmtp import SocketType, ZmtpConnection
from epp.core.subscription import Subscription
from epp.core.types import Endpoint, MetricsTarget, Seconds, pod_of, ranks_of
from epp.shell.engines.kv_event_places import Place, places_of, spelt, unusable
from epp.shell.engines.kv_event_reception import CONNECT_S_MAX, Reception
from epp.shell.engines.kv_event_server import KVEventServer, Rejection
from epp.shell.engines.kv_event_source import (
    KVEventsSnapshot,
    Source,
    SourceRow,
    counts_of,
    name_of,
    same_process,
)
from epp.shell.engines.loop_share import LoopShare
from epp.shell.engines.page_client import BadResponseError, PageClient
from epp.shell.engines.zmtp_lines import ZmtpLines
from epp.shell.supervision import Supervisor, forever

DEFAULT_PORT: Final = 5557
"""Port at which engines usually publish KV-cache events."""
SOURCES_PATH: Final = "/kv_event_sources"
SOURCES_BYTES_MAX: Final = 64 * 1024
ASK_S_MAX: Final[Seconds] = 2.0
BACKOFF_S: Final[Seconds] = 0.5
BACKOFF_S_MAX: Final[Seconds] = 5.0
NO_SOURCE_S: Final[Seconds] = 30.0
"""Delay in seconds before an endpoint whose engine publishes no events is asked again. If the
endpoint did not answer, the delay is shorter.
"""
TAKEN_OVER_S: Final[Seconds] = 5.0
"""Time in seconds without events after which an engine's connection may be replaced by another
connection for the same rank of the endpoint.
"""
TRIES_BEFORE_ASKING: Final = 3
"""Number of consecutive failures to connect to a rank after which the endpoint is asked again where
it publishes.
"""
WATCH_S: Final[Seconds] = 0.25


class KVEventListener:
    """A receiver of the KV-cache events of every endpoint. It is active while an index needs these
    events.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        seed: int,
        supervisor: Supervisor | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
        wall_clock: Callable[[], Seconds] = time.time,
    ) -> None:
        """Create the receiver of KV-cache events. `seed` determines only random delays."""
        self._scheduler = scheduler
        self._supervisor = supervisor or Supervisor()
        self._clock = clock
        self._wall_clock = wall_clock
        self._random = Random(f"{seed}:kv-events")  # noqa: S311  jitter, not secrets
        self._settings: KvEventsConfig | None = None
        self._ranks_chosen = False
        """True if a plugin selects data-parallel ranks, so that events of engines with several
        ranks behind one endpoint are usable.
        """
        self._endpoints: Sequence[Endpoint] = ()
        self._ranks: Mapping[str, int] = {}
        """Position of an endpoint among the endpoints of its pod, by endpoint id; 0 is the
        first.
        """
        self._pods: Mapping[tuple[str, str], int] = Counter()
        """Number of endpoints of each pod."""
        self._sources: dict[str, Source] = {}
        self._group: asyncio.TaskGroup | None = None
        self._reception = Reception(scheduler, clock)
        self._share = LoopShare(time.thread_time)
        self.server: KVEventServer | None = None
        """Server to which engines connect, or None if the configuration has none."""
        self._server_task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        """Event that is set while an index receives KV-cache events from engines."""

    # The methods below handle the pool.

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints whose KV events are received, and apply the event settings of the
        scheduler's current configuration.

        The scheduler must already know these endpoints and the configuration.
        """
        self._endpoints = endpoints
        self._ranks = ranks_of(endpoints)
        self._pods = Counter(map(pod_of, endpoints))
        self._configure()
        self._replace_sources(endpoints)
        if self.server is not None:
            self.server.replace(source.endpoint for source in self._sources.values())
        self._start()

    def _configure(self) -> None:
        """Read from the scheduler's configuration the event settings, and whether a plugin selects
        ranks. If either changed, drop all sources, which `_replace_sources` creates again, and
        replace the server to which engines connect.
        """
        names = self._scheduler.indexes.hearing
        configured: Any = next((self._scheduler.settings.indexes[name] for name in names), None)
        settings = None if configured is None else configured.kv_events_config
        responders = self._scheduler.settings.profile.responders
        chosen = any(one.plugin.abilities.chooses_ranks for one in responders)
        if (settings, chosen) != (self._settings, self._ranks_chosen):
            self._settings, self._ranks_chosen = settings, chosen
            self._drop_all()
            self._close_server()
            if settings is not None and settings.binds is not None:
                self.server = KVEventServer(
                    self,
                    *settings.binds,
                    topic=settings.topic_filter.encode(),
                    ranks=_ranks_that_connect(settings),
                    clock=self._clock,
                )
        if settings is None:
            self._wanted.clear()
        else:
            self._wanted.set()

    def _replace_sources(self, endpoints: Sequence[Endpoint]) -> None:
        """Keep the event source of each endpoint whose engine is still the same process, create one
        for each other endpoint in the pool, and drop the rest. If no events are configured, drop
        all.
        """
        settings = self._settings
        before, self._sources = self._sources, {}
        if settings is not None and (settings.discover_pods or settings.binds is not None):
            for endpoint in endpoints:
                slot = self._scheduler.pool.slot_of(endpoint)
                if slot is None:
                    continue
                known = before.get(endpoint.endpoint_id)
                if known is not None and same_process(known, endpoint, slot):
                    del before[endpoint.endpoint_id]
                    for source in known.ranks:
                        source.endpoint = endpoint
                    self._sources[endpoint.endpoint_id] = known
                else:
                    self._sources[endpoint.endpoint_id] = self._new_source(endpoint, slot, settings)
        for gone in before.values():
            self._drop(gone)

    def rows(self) -> list[SourceRow]:
        """Return one row for operators for each endpoint whose KV-cache events are wanted."""
        return [self._row(source) for source in self._sources.values()]

    def row_of(self, endpoint: Endpoint) -> SourceRow | None:
        """Return the row of `endpoint` for operators, or None if its KV-cache events are not
        wanted.
        """
        source = self._sources.get(endpoint.endpoint_id)
        return None if source is None else self._row(source)

    def _row(self, source: Source) -> SourceRow:
        unconnected = ""
        if self.server is not None:
            unconnected = self.server.problem or f"has not connected to port {self.server.port}"
        return source.worst_row(self._wall_clock(), unconnected)

    def snapshot(self) -> KVEventsSnapshot | None:
        """Return the totals of received KV-cache events for metrics, or None if no index receives
        events from engines.
        """
        if self._settings is None:
            return None
        rows = self.rows()
        totals = self._reception.gone.copy()
        for _, subscription in self.subscriptions():
            totals.update(counts_of(subscription))
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
        """Return the event subscriptions that exist, each with its endpoint; at most one for each
        rank.
        """
        return [
            (source.endpoint, source.subscription)
            for source in self._every_rank()
            if source.subscription is not None
        ]

    def _every_rank(self) -> Iterator[Source]:
        for source in self._sources.values():
            yield from source.ranks

    async def run(self) -> None:
        """Receive KV-cache events until cancelled. This method owns all tasks and connections."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = self._reception.group = group
                self.replace(self._endpoints)
                group.create_task(
                    self._supervisor.keep("watch KV events", self._watch), name="watch KV events"
                )
                await forever()
        finally:
            self._group = self._reception.group = None
            self._drop_all()
            self._close_server()
            self._reception.turns.close()
            self._settings = None

    # The methods below handle engines that connect.

    def engine_connected(self, endpoint_id: str, lines: ZmtpLines) -> None:
        """Use the new connection `lines` for an endpoint before any message arrives, because no
        other endpoint has the same IP address.

        It is not used if the endpoint has several ranks, because only a message names the rank. Nor
        is it used if the endpoint's messages are ignored or another connection is in use.
        """
        source = self._sources.get(endpoint_id)
        if source is not None and not source.others and not source.refused:
            self._take_in(source, lines)

    def engine_said(
        self, endpoint_id: str, lines: ZmtpLines, sequence: int, payload: bytes
    ) -> Rejection | None:
        """Process a message from an engine. Return the reason if the message is rejected, else
        None.

        If it is accepted, the connection `lines` belongs to the endpoint from now on.
        """
        first = self._sources.get(endpoint_id)
        if first is None:
            return Rejection.TAKEN
        source = self._rank_of_payload(first, payload)
        if isinstance(source, Rejection):
            return source
        if not self._take_in(source, lines):
            return Rejection.TAKEN
        self._reception.received(source, sequence, payload)
        return None

    def _rank_of_payload(self, first: Source, payload: bytes) -> Source | Rejection:
        """Return the source of the rank that `payload` names, or the reason why the payload is
        rejected. If one rank is configured and the engine sends a second one, ignore the endpoint
        until its engine restarts, and end its connection and subscription.
        """
        rank = rank_in(payload)
        if first.refused:
            return Rejection.RANK
        if first.others:
            if self._settings is None or self._settings.discover_pods:
                # These ranks are received where they publish.
                return Rejection.TAKEN
            known = rank is not None and rank < len(first.ranks)
            return first.ranks[rank or 0] if known else Rejection.RANK
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
        self._reception.end_subscription(first)
        return Rejection.RANK

    def _take_in(self, source: Source, lines: ZmtpLines) -> bool:
        """Use the connection `lines`, which an engine opened, for the rank `source`, and end an
        earlier one.

        Return False if another connection is in use for this rank, events are no longer wanted, or
        the connection has ended.
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
        self._reception.connected(source, self._place_of_connecting(source, port, self._settings))
        return True

    def _place_of_connecting(self, source: Source, port: int, settings: KvEventsConfig) -> Place:
        """Return the address of an engine that connects from `port`. Its replay port is the
        configured one plus the endpoint's position in its pod and the rank, or None if none is
        configured.
        """
        replay = settings.pod_discovery_config.replay_socket_port
        rank = self._ranks[source.endpoint.endpoint_id] + source.rank
        return Place(source.endpoint.host, port, None if replay is None else replay + rank)

    def _new_source(self, endpoint: Endpoint, slot: int, settings: KvEventsConfig) -> Source:
        """Return the event source of an endpoint's first rank. If engines connect and several ranks
        are configured, it contains the sources of the other ranks, and each rank has a
        subscription. If several ranks are unusable, it contains the reason instead, and messages of
        the endpoint are ignored.
        """
        first = Source(endpoint, slot)
        ranks = _ranks_that_connect(settings)
        if ranks == 1:
            return first
        why = unusable(ranks, self._pods[pod_of(endpoint)], ranks_chosen=self._ranks_chosen)
        if why:
            first.refused = first.problem = f"dataParallelSize is {why}"
            return first
        first.others = [Source(endpoint, slot, rank=rank, first=first) for rank in range(1, ranks)]
        for source in first.ranks:
            # All cached blocks of an endpoint are known only once every rank is received.
            self._reception.open_subscription(
                source, self._place_of_connecting(source, 0, settings)
            )
        return first

    def engine_parted(self, lines: ZmtpLines, why: str) -> None:
        """Record that an engine's connection `lines` has ended; `why` is the reason."""
        for source in self._every_rank():
            if source.lines is lines:
                source.problem = source.refused or f"{spelt(source.heard_at)} {why}"
                self._reception.parted(source, lines)

    def _close_server(self) -> None:
        if self._server_task is not None:
            self._server_task.cancel()
            self._server_task = None
        if self.server is not None:
            turned = self.server.turned
            self._reception.gone.update(
                {("faults", why.value): count for why, count in turned.items()}
            )
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
                name = name_of(source)
                follow = partial(self._follow, source)
                source.task = self._group.create_task(
                    self._supervisor.keep("hear KV events", follow, of=name),
                    name=f"KV events {name}",
                )

    def _drop_all(self) -> None:
        for source in self._sources.values():
            self._drop(source)
        self._sources = {}

    def _drop(self, source: Source) -> None:
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
        self._reception.end_subscription(source)

    async def _follow(self, source: Source) -> None:
        """Find where the rank of `source` publishes its events, receive them, and reconnect after a
        failure.
        """
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

    def _ask_anew(self, source: Source) -> None:
        """Ask the endpoint of `source` again where its ranks publish, in a task that repeats until
        there is an answer.
        """
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

    async def _find(self, source: Source) -> bool:
        """Determine where the ranks of `source` publish their events, and use these addresses.

        Return False if that is still unknown, because the endpoint was unreachable or, with several
        known ranks, gave an invalid answer.
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

    def _places_from(self, source: Source, port: int) -> tuple[Place, ...] | str:
        """Return the addresses of the endpoint's ranks if ports are assigned by convention, or a
        text that says why they are unusable. The pod's first rank has `port`, and each further rank
        the next port.
        """
        assert self._settings is not None, "the reception of events is configured"
        discovery = self._settings.pod_discovery_config
        ranks, endpoints = discovery.data_parallel_size, self._pods[pod_of(source.endpoint)]
        why = unusable(ranks, endpoints, ranks_chosen=self._ranks_chosen) if ranks > 1 else ""
        if why:
            return f"dataParallelSize is {why}"
        replay = discovery.replay_socket_port
        first = self._ranks[source.endpoint.endpoint_id]
        return tuple(
            Place(source.endpoint.host, port + rank, None if replay is None else replay + rank)
            for rank in range(first, first + ranks)
        )

    def _settle(self, source: Source, found: tuple[Place, ...] | str, said_by: str) -> None:
        """Use the addresses `found` for the ranks of an endpoint, and drop ranks that are missing
        there.

        If `found` is a text, it is the reason why there are none.
        """
        places = () if isinstance(found, str) else found
        kept = max(0, len(places) - 1)
        for gone in source.others[kept:]:
            self._drop(gone)
        del source.others[kept:]
        for rank in range(len(source.others) + 1, len(places)):
            other = Source(source.endpoint, source.slot, rank=rank, first=source)
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
                self._reception.open_subscription(one, place)
        self._start()

    async def _hear(self, source: Source, place: Place) -> bool:
        """Receive the events of the rank `source` from `place` until the connection ends. Return
        False if the connection or its handshake failed.
        """
        topic = b"" if self._settings is None else self._settings.topic_filter.encode()
        zmtp = ZmtpConnection(SocketType.SUB, topic=topic)
        lines: ZmtpLines | None = None
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                _, lines = await asyncio.get_running_loop().create_connection(
                    lambda: ZmtpLines(zmtp, partial(self._reception.message, source)),
                    place.host,
                    place.port,
                )
                if source.lines is not None:
                    # The engine has connected by itself meanwhile.
                    return True
                source.lines = lines
                await lines.ready
            if source.lines is lines:
                self._reception.connected(source, place)
            why = await lines.closed
            source.problem = f"{spelt(place)} {why}"
        except (OSError, TimeoutError) as error:
            # A ZMTP error has a sentence; an error of the system is described by its type.
            what = str(error) if type(error) is ConnectionError else type(error).__name__
            source.problem = f"{spelt(place)} cannot be received: {what}"
            return False
        finally:
            if lines is not None:
                lines.end()
                self._reception.parted(source, lines)
        return True

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
                self._reception.watch(source, now)


def _ranks_that_connect(settings: KvEventsConfig) -> int:
    """Return the number of ranks per endpoint whose engines connect to the picker. It is 1 if the
    picker connects to the engines.
    """
    return 1 if settings.discover_pods else settings.pod_discovery_config.data_parallel_size
