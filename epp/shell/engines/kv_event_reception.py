"""The reception of KV-cache events from open connections: subscriptions, replays and the turns of
processing.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from epp.core.decision.scheduler import Scheduler
from epp.core.kv_events.stream import AskReplay
from epp.core.kv_events.zmtp import (
    SocketType,
    ZmtpConnection,
    ask_replay,
    read_live,
    read_replayed,
)
from epp.core.subscription import Asked, Subscription
from epp.core.types import Seconds
from epp.shell.engines.kv_event_places import Place, spelt
from epp.shell.engines.kv_event_source import Source, counts_of, name_of
from epp.shell.engines.kv_event_turns import Turns
from epp.shell.engines.zmtp_lines import ZmtpLines

CONNECT_S_MAX: Final[Seconds] = 5.0
REPLAYS_AT_ONCE_MAX: Final = 8
REPLAY_IDLE_S: Final[Seconds] = 2.0
REPLAY_S_MAX: Final[Seconds] = 120.0

_log = structlog.get_logger(__name__)


class Reception:
    """The reception of all KV-cache events of a picker. Other objects open and close the
    connections for live events; this one opens a connection for each replay.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], Seconds]) -> None:
        self.group: asyncio.TaskGroup | None = None
        """Owner of the tasks that request missed events, or None while no events are received."""
        self.gone: Counter[tuple[str, str]] = Counter()
        """Totals of the counters of all ended subscriptions to KV events, and of the connections
        and messages that closed servers rejected, by kind ("events", "faults", "streams") and name
        of the counter.
        """
        self.turns = Turns(clock, self._do)
        self._scheduler = scheduler
        self._clock = clock
        self._replays = asyncio.Semaphore(REPLAYS_AT_ONCE_MAX)

    # Subscriptions.

    def open_subscription(self, source: Source, place: Place) -> Subscription:
        """Close the subscription of the rank `source` if it has one, and return a new one for
        events from `place`.
        """
        self.end_subscription(source)
        source.subscription = Subscription(
            self._scheduler,
            source.slot,
            rank=source.rank,
            replays=place.replay_port is not None,
            now=self._clock(),
        )
        return source.subscription

    def end_subscription(self, source: Source) -> None:
        """End the subscription of the rank `source`, if it has one, and add its counts to the
        totals. The blocks that it reported are dropped if the slot still belongs to the endpoint.
        """
        subscription, source.subscription = source.subscription, None
        if subscription is None:
            return
        self.gone.update(counts_of(subscription))
        # The slot may belong to another endpoint now.
        if self._scheduler.pool.slot_of(source.endpoint) == source.slot:
            subscription.close(self._clock())

    def watch(self, source: Source, now: Seconds) -> None:
        """Watch the subscription of the rank `source` (`Subscription.watch`), start the replays
        that it requests, and log a warning when the rank begins to send no KV events although its
        engine works.

        Called a few times a second.
        """
        subscription = source.subscription
        if subscription is None:
            return
        self._do(source, subscription.watch(now))
        silent = subscription.stream.silent
        if silent is not source.named_silent:
            source.named_silent = silent
            if silent:
                _log.warning(
                    "endpoint sends no KV events although its engine works",
                    endpoint=name_of(source),
                    source=spelt(source.heard_at),
                )

    # Connections.

    def connected(self, source: Source, place: Place) -> None:
        """Start to receive events from `place` over the open connection of the rank `source`. The
        rank gets a new subscription if it has none, or if the old one assumes replays and `place`
        has none or the reverse.
        """
        subscription = source.subscription
        if subscription is None or subscription.replays is not (place.replay_port is not None):
            subscription = self.open_subscription(source, place)
        source.heard_at = place
        source.problem = ""
        self.turns.gather(source)
        self._do(source, subscription.connected(self._clock()))

    def message(self, source: Source, message: tuple[bytes, ...]) -> None:
        """Process a message from a connection that the picker opened to an engine. A message
        without live events is counted as unreadable.
        """
        subscription = source.subscription
        if subscription is None:
            return
        live = read_live(message)
        if live is None:
            subscription.unreadable += 1
            return
        self.received(source, *live)

    def received(self, source: Source, sequence: int, payload: bytes) -> None:
        """Process a frame of live events from the rank `source`, which must have a subscription."""
        assert source.subscription is not None, "the connection created the subscription"
        self._do(source, source.subscription.received(sequence, payload, self._clock()))

    def parted(self, source: Source, lines: ZmtpLines) -> None:
        """Record that the connection `lines` of the rank `source` has ended, and cancel a running
        replay. Do nothing if the rank uses another connection.
        """
        if source.lines is not lines:
            return
        source.lines = None
        if source.replay is not None:
            source.replay.cancel()
            source.replay = None
        if source.subscription is not None:
            self._do(source, source.subscription.disconnected(self._clock()))

    # Requests of subscriptions.

    def _do(self, source: Source, asked: Sequence[Asked]) -> None:
        """Start the replays that a subscription requests, each instead of a running one, and
        schedule the processing of received data.
        """
        place = source.heard_at
        for question in asked:
            if not isinstance(question, AskReplay) or place is None or self.group is None:
                continue
            if source.replay is not None:
                source.replay.cancel()
            source.replay = self.group.create_task(
                self._replay(source, place, question.first),
                name=f"KV events again {name_of(source)}",
            )
        self.turns.add(source)

    async def _replay(self, source: Source, place: Place, first: int) -> None:
        """Request the missed events again, from the sequence number `first` on. They are stored as
        they arrive and processed later, so that the engine need not wait. At most
        `REPLAYS_AT_ONCE_MAX` replays run at a time. A failure is logged, and the subscription is
        told whether the replay was complete.
        """
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
                endpoint=name_of(source),
                problem=type(error).__name__,
            )
        finally:
            if lines is not None:
                lines.end()
        source.replay = None
        if source.subscription is subscription:
            self._do(source, subscription.replay_ended(self._clock(), marked=marked))
