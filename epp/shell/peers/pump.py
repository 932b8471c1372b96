"""Move frames between the exchange of shared state and its carrier, in beats of bounded work.

Except during the warm start, receiving uses at most a fifth of the event loop's time, however much
peers send. Unread data waits in the bounded queues of the carrier and then at the sender.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from epp.core.peers.exchange import OUTGOING_INTERVAL_S, PeerExchange, Taken
from epp.core.types import Seconds
from epp.shell.peers.carrier import Carrier, Kind, Message
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.state import Traffic
from epp.shell.peers.warm_start import SnapshotServer, WarmStart

MESSAGES_PER_TURN_MAX: Final = 32
MESSAGES_PER_BEAT_MAX: Final = 256
"""Maximum number of messages that the pump receives per beat. This is 12,800 a second; 64 peers in
normal operation send at most half as many.
"""
TICK_S: Final[Seconds] = 1.0
PAUSE_SHARE: Final = 4.0
"""Pause after a turn of the pump, as a multiple of the turn's duration, if more work is left."""

_CHANGES: Final = {"heard": "a replica joined", "left": "a replica left"}


class Pump:
    """A pump that moves frames between the exchange and its carrier; run `run` as a task.

    An exception of the exchange is counted and ends only that turn.
    """

    def __init__(
        self,
        exchange: PeerExchange,
        carrier: Carrier,
        traffic: Traffic,
        complaints: Complaints,
        *,
        warm_start: WarmStart | None = None,
        server: SnapshotServer | None = None,
        beat_s: Seconds = OUTGOING_INTERVAL_S,
    ) -> None:
        """Create the pump. Without `warm_start` and `server`, no snapshots pass through the
        carrier.
        """
        self._exchange = exchange
        self._carrier = carrier
        self._traffic = traffic
        self._complaints = complaints
        self._warm_start = warm_start
        self._server = server
        self._beat_s = beat_s
        self._tick_at_s: Seconds = 0.0
        self.hurries = False
        """True during the warm start, while the picker does not serve yet, so that the pump works
        without pauses.
        """

    async def run(self) -> None:
        """Move frames between the exchange and its carrier in periodic beats until cancelled."""
        while True:
            began_at_s = time.monotonic()
            self._contained(self.beat, began_at_s)
            for _ in range(MESSAGES_PER_BEAT_MAX // MESSAGES_PER_TURN_MAX):
                turn_at_s = time.monotonic()
                if not self._contained(self.turn, turn_at_s):
                    break
                worked_s = time.monotonic() - turn_at_s
                await asyncio.sleep(0 if self.hurries else PAUSE_SHARE * worked_s)
                if time.monotonic() - began_at_s >= self._beat_s:
                    break
            await asyncio.sleep(max(0.0, self._beat_s - (time.monotonic() - began_at_s)))

    def last(self) -> None:
        """Send the last frames of the exchange, after `run` has ended."""
        self._contained(self._say_goodbye, time.monotonic())

    def _say_goodbye(self, now: Seconds) -> bool:
        self.beat(now)
        self._carrier.send(self._exchange.goodbye(now))
        return False

    def beat(self, now: Seconds) -> bool:
        """Do the carrier's periodic work and send the exchange's frames. Once a second, do also the
        exchange's periodic work and log changes of replicas.

        Always return False, because a beat leaves no work for later.
        """
        self._carrier.beat(now)
        for frame in self._exchange.outgoing(now):
            self._carrier.send(frame)
        if now >= self._tick_at_s:
            self._tick_at_s = now + TICK_S
            self._exchange.tick(now)
            self._tell_changes(now)
        return False

    def _tell_changes(self, now: Seconds) -> None:
        """Log which replicas joined, left or came back."""
        changes = self._exchange.changes
        if not changes:
            return
        addresses = {row.origin: row.address for row in self._carrier.rows(now)}
        for change in changes:
            origin = change.origin.hex()[:8]
            about = {"origin": origin, "address": addresses.get(origin, "")}
            silent_s = round(change.silent_s, 1)
            if change.kind == "lost":
                self._complaints.say(
                    "a replica is lost, it has sent nothing for some time",
                    now,
                    **about,
                    silent_s=silent_s,
                )
            elif change.kind == "returned":
                self._complaints.note("a replica is back", now, **about, silent_s=silent_s)
            else:
                self._complaints.note(_CHANGES[change.kind], now, **about)
        changes.clear()

    def turn(self, now: Seconds) -> bool:
        """Receive some frames and apply them to the shared state. Return True if more are left."""
        exchange = self._exchange
        # Snapshot frames are read only as fast as they are applied; live frames take precedence.
        behind = self._warm_start.asked if self._warm_start and exchange.pending() else None
        messages, more = self._carrier.receive(MESSAGES_PER_TURN_MAX, paused=behind)
        for message in messages:
            self._take(message, now)
        if exchange.pending():
            exchange.apply(now)
        return more or exchange.pending()

    def _take(self, message: Message, now: Seconds) -> None:
        source, kind = message.source, message.kind
        if kind is Kind.FRAME:
            taken = self._exchange.receive(message.frame, now, source.origin)
            self._traffic.took(taken)
            if taken is Taken.OTHER_VERSION:
                self._complaints.say(
                    "a replica uses another version; both decide independently",
                    now,
                )
        elif kind is Kind.HELLO:
            self._carrier.greeted(message, now)
        elif kind is Kind.SNAPSHOT_WANTED:
            if self._server is not None:
                self._server.wanted(source)
        elif self._warm_start is None or not self._warm_start.expects(source):
            self._traffic.unreadable()
        elif kind is Kind.SNAPSHOT_PART:
            self._warm_start.part(now)
            self._traffic.took(self._exchange.receive_snapshot_frame(message.frame, now, 0.0))
        else:
            self._warm_start.ended(kind)

    def _contained(self, step: Callable[[Seconds], bool], now: Seconds) -> bool:
        try:
            return step(now)
        except Exception:  # noqa: BLE001  The boundary of a task: a defect only loses the state of peers.
            self._traffic.failed("internal")
            self._complaints.say("exchange with peers failed", now, exc_info=True)
            return False
