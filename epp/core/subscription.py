"""One endpoint's KV-cache events on the way from its socket to the scheduler, without I/O.

A shell reports what happens to the socket and performs the actions that are returned. The simulator
does the same with a pipe. Frames to apply are queued here until `work` is called, so that ten
thousand replayed frames do not block the event loop. The stream does not count as live while frames
are queued.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from epp.core.decision.inputs import BlocksChanged, EventsHeard, EventsVoided, StreamChanged
from epp.core.decision.scheduler import Scheduler
from epp.core.kv_events.payload import (
    Batch,
    Cleared,
    Event,
    Fault,
    Removed,
    Stored,
    read_payload,
)
from epp.core.kv_events.stream import (
    Apply,
    AskReplay,
    AskSnapshot,
    Forget,
    KVEventStream,
    StreamState,
)
from epp.core.types import Seconds

Asked: TypeAlias = AskReplay | AskSnapshot
BLOCKS_PER_WORK: Final = 1_024
"""Number of blocks of the engine and of events, together, after which one call of `work` stops
applying events, which takes one to two milliseconds.
"""

_NAMES: Final[dict[type[Event], str]] = {Stored: "stored", Removed: "removed", Cleared: "cleared"}


class Subscription:
    """A subscription to the KV-cache events of one rank of the endpoint in `slot`, for indexes that
    receive such events.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        slot: int,
        *,
        rank: int = 0,
        replays: bool,
        snapshots: bool = False,
        read: Callable[[bytes], Batch | BlocksChanged] = read_payload,
        now: Seconds,
    ) -> None:
        """Subscribe to rank `rank` of the endpoint in `slot`.

        `replays` is True if the engine can send past frames again, `snapshots` if it can send all
        cached blocks. `read` decodes a payload; a simulated payload already holds the picker's own
        keys.
        """
        self.slot: Final = slot
        self.rank: Final = rank
        self.replays: Final = replays
        self._read_payload = read
        self.stream = KVEventStream(replays=replays, snapshots=snapshots, now=now)
        self.faults: Counter[Fault] = Counter()
        """Number of KV-cache events and payloads of the engine that could not be used, by reason.
        """
        self._events: dict[type[Event], int] = dict.fromkeys(_NAMES, 0)
        self.unreadable = 0
        """Number of messages of the engine that were not KV-cache events; the shell counts them."""
        self.waiting_bytes = 0
        """Size in bytes of the frames of KV-cache events that are queued for `work` and not decoded
        yet. Replayed frames that the stream still buffers do not count.
        """
        self.blocks_heard = 0
        """Number of blocks of the engine in the events for stored and removed blocks that were
        applied.
        """
        self.engine_clock_s: Seconds | None = None
        """Time at which the engine sent the last frame of KV-cache events that `work` began to
        apply, in seconds since 1970 by the engine's clock; None if no frame had a time.
        """
        self._scheduler = scheduler
        self._waiting: deque[Apply | Forget | Event | Batch | BlocksChanged] = deque()
        self._noted = self.stream.last
        self._told = (StreamState.NONE, False)
        self._index = next(iter(scheduler.indexes.hearing.values()), None)
        self._say_state(now)

    @property
    def events(self) -> Counter[str]:
        """Return the number of applied events by type: "stored", "removed" or "cleared"."""
        told = self._events.items()
        return Counter({_NAMES[kind]: count for kind, count in told if count})

    @property
    def state(self) -> StreamState:
        """Return the state of the event stream. While frames are queued, it is `REPLAYING` instead
        of `LIVE`.
        """
        state = self.stream.state
        return StreamState.REPLAYING if self._waiting and state is StreamState.LIVE else state

    @property
    def complete(self) -> bool:
        return self.stream.complete

    @property
    def noted(self) -> int | None:
        """Return the number of a frame up to which the events of all frames were applied: the last
        one if none is queued, else the last one when none was queued. None if there is none.
        """
        last = self._noted if self._waiting else self.stream.last
        return None if last is None or last < 0 else last

    # Events of the socket.

    def connected(self, now: Seconds) -> list[Asked]:
        """Record that the source of the KV-cache events is connected. Return the requests that the
        caller must send to it.
        """
        self.stream.connected(now)
        return self._act()

    def disconnected(self, now: Seconds) -> list[Asked]:
        """Record that the source of the KV-cache events is disconnected. Return the requests that
        the caller must send.
        """
        self.stream.disconnected(now)
        return self._act()

    def received(self, sequence: int, payload: bytes, now: Seconds) -> list[Asked]:
        """Process a live frame with number `sequence`. Return the requests that the caller must
        send to the source.
        """
        self.stream.received(sequence, payload, now)
        return self._act()

    def replayed(self, sequence: int, payload: bytes, now: Seconds) -> None:
        """Store a frame with number `sequence` of the replay that was requested from the engine. Do
        nothing if no replay is running.
        """
        self.stream.replayed(sequence, payload, now)

    def replay_ended(self, now: Seconds, *, marked: bool) -> list[Asked]:
        """End a replay of past frames. `marked` is True if its end marker came, False if it ended
        otherwise, such as by a timeout. Return the requests that the caller must send.
        """
        self.stream.replay_ended(now, marked=marked)
        return self._act()

    def snapshot(self, epoch: str, resume: int, payloads: list[bytes], now: Seconds) -> list[Asked]:
        """Process a snapshot of all cached blocks; the next live frame has number `resume`. Return
        the requests that the caller must send.
        """
        self.stream.snapshot(epoch, resume, payloads, now)
        return self._act()

    def heartbeat(
        self, epoch: str, sequence: int, interval_s: Seconds, now: Seconds
    ) -> list[Asked]:
        """Process a heartbeat of the source of the KV-cache events. Return the requests that the
        caller must send to it.
        """
        self.stream.heartbeat(epoch, sequence, interval_s, now)
        return self._act()

    # Periodic calls by the shell.

    def watch(self, now: Seconds) -> list[Asked]:
        """Compare the event stream with the pool's state of the endpoint, and report a changed
        state of the stream to the scheduler; call this a few times a second. Return the requests
        that the caller must send.
        """
        scheduler = self._scheduler
        index = next(iter(scheduler.indexes.hearing.values()), None)
        if index is not self._index:
            # The index was reset and is empty.
            self._index = index
            self._told = (StreamState.NONE, False)
            self.stream.unbalanced(now)
        columns = scheduler.pool.columns
        slot = self.slot
        computed = columns.cache_queried_tokens.item(slot) - columns.cache_hit_tokens.item(slot)
        self.stream.watched(
            scheduler.indexes.lives.get(slot, 0), columns.observed_at_s.item(slot), computed, now
        )
        asked = self._act()
        self._say_state(now)
        return asked

    @property
    def works(self) -> bool:
        """Return whether any frame of KV-cache events is queued for `work`, which must then be
        called.
        """
        return bool(self._waiting)

    def read(self) -> None:
        """Decode the first payload that is queued for `work`, without applying its events.

        A caller with several subscriptions calls this for all of them before it calls `work`,
        because each of the two loops is faster alone.
        """
        waiting = self._waiting
        if waiting and isinstance(first := waiting[0], Apply):
            waiting[0] = self._read_waiting(first)

    def work(self, now: Seconds, *, blocks_max: int = BLOCKS_PER_WORK) -> list[Asked]:
        """Apply queued frames with up to about `blocks_max` engine blocks. If events contradict
        each other, drop all blocks and queued frames. Return the requests that the caller must send
        to the source.
        """
        waiting = self._waiting
        left = blocks_max
        asked: list[Asked] = []
        while waiting and left > 0:
            first = waiting.popleft()
            if isinstance(first, Apply):
                first = self._read_waiting(first)
            if isinstance(first, Batch):
                events, work = self._open(first, left, now)
                # A frame without events counts as work too.
                left -= 1
            elif isinstance(first, Stored | Removed | Cleared):
                events, work = self._next_of(first, left)
            else:
                self._note(first, now)
                events, work = (), 1
            left -= work
            if events and self._hear(events, now):
                self._clear()
                self.stream.unbalanced(now)
                asked += self._act()
        if not waiting:
            self._noted = self.stream.last
        self._say_state(now)
        return asked

    def close(self, now: Seconds) -> None:
        """Drop all blocks that this subscription reported to the indexes, because the endpoint left
        or its events are no longer needed. Report the state `NONE` to the scheduler.
        """
        self._clear()
        self._scheduler.take(EventsVoided(self.slot, self.rank), now)
        gone = StreamChanged(self.slot, StreamState.NONE, complete=False, rank=self.rank)
        self._scheduler.take(gone, now)

    def _act(self) -> list[Asked]:
        asked: list[Asked] = []
        for action in self.stream.actions():
            if isinstance(action, Apply):
                self.waiting_bytes += len(action.payload)
                self._waiting.append(action)
            elif isinstance(action, Forget):
                # The queued frames belong to the same invalid past.
                self._clear()
                self._waiting.append(action)
            else:
                asked.append(action)
        return asked

    def _clear(self) -> None:
        self._waiting.clear()
        self.waiting_bytes = 0

    def _read_waiting(self, frame: Apply) -> Batch | BlocksChanged:
        self.waiting_bytes -= len(frame.payload)
        return self._read_payload(frame.payload)

    def _note(self, told: Forget | BlocksChanged, now: Seconds) -> None:
        if isinstance(told, Forget):
            self._scheduler.take(EventsVoided(self.slot, self.rank), now)
            return
        self.blocks_heard += sum(len(changed.keys) for changed in told.changes)
        self._scheduler.take(told, now)

    def _open(self, batch: Batch, left: int, now: Seconds) -> tuple[Sequence[Event], int]:
        """Return the events of `batch`, and the number of blocks and events in them. If this number
        exceeds `left`, queue the events instead and return ((), 0); do so as well if a removal was
        unreadable, after dropping all blocks. Faults are counted.
        """
        if batch.at_s:
            self.engine_clock_s = batch.at_s
        if batch.faults:
            self.faults.update(batch.faults)
            if batch.broken:
                self.stream.broken(now)
                self.stream.actions()
                self._waiting.extendleft(reversed(batch.events))
                self._waiting.appendleft(Forget())
                return (), 0
        work = batch.blocks + len(batch.events)
        if work <= left:
            self.blocks_heard += batch.blocks
            return batch.events, work
        self._waiting.extendleft(reversed(batch.events))
        return (), 0

    def _next_of(self, first: Event, left: int) -> tuple[Sequence[Event], int]:
        """Return `first` with the queued events to apply together with it, and the number of blocks
        and events in them, at most about `left`.
        """
        waiting = self._waiting
        events = [first]
        blocks = _blocks_of(first)
        while waiting and blocks + len(events) < left:
            then = waiting[0]
            if not isinstance(then, Stored | Removed):
                break
            waiting.popleft()
            events.append(then)
            blocks += _blocks_of(then)
        self.blocks_heard += blocks
        return events, blocks + len(events)

    def _hear(self, events: Sequence[Event], now: Seconds) -> bool:
        """Apply KV-cache events in the scheduler. Return whether they contradict the engine's
        earlier events.
        """
        for event in events:
            self._events[type(event)] += 1
        said = EventsHeard(self.slot, events, self.rank)
        heard = self._scheduler.take(said, now).heard
        if heard is None:
            return False
        if heard.faults:
            self.faults.update(heard.faults)
        return heard.unbalanced

    def _say_state(self, now: Seconds) -> None:
        """Report the state of the event stream to the scheduler if it changed since the last
        report.
        """
        known = (self.state, self.complete)
        if known != self._told:
            self._told = known
            state, complete = known
            changed = StreamChanged(self.slot, state, complete=complete, rank=self.rank)
            self._scheduler.take(changed, now)


def _blocks_of(event: Event) -> int:
    return 0 if isinstance(event, Cleared) else len(event.hashes)
