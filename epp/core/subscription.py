"""One endpoint's KV events, from its socket to the scheduler, without I/O.

A shell tells what happens to the socket and does what is returned; the simulator does the same with a
pipe. Frames that are to be applied wait here until there is time for them (`work`), so that ten thousand
that were asked for again do not hold the loop. While any wait, the stream does not count as live.
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
"""Of the engine, of which one call of `work` takes note: one to two milliseconds."""

_NAMES: Final[dict[type[Event], str]] = {Stored: "stored", Removed: "removed", Cleared: "cleared"}


class Subscription:
    """What a rank of the endpoint in `slot` says, for the indexes of a scheduler that hear engines."""

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
        """`replays`: it can be asked for old frames; `snapshots`: for all that it holds.

        `read`: what a payload tells; a simulated one has our keys already.
        """
        self.slot: Final = slot
        self.rank: Final = rank
        self.replays: Final = replays
        self._read_payload = read
        self.stream = KVEventStream(replays=replays, snapshots=snapshots, now=now)
        self.faults: Counter[Fault] = Counter()
        """Events and payloads that are not known, by their reason."""
        self._events: dict[type[Event], int] = dict.fromkeys(_NAMES, 0)
        self.unreadable = 0
        """Messages that are none of KV events."""
        self.waiting_bytes = 0
        """Of frames that are not taken note of yet; those that are asked for again left out."""
        self.blocks_heard = 0
        """Of the engine, stored and removed."""
        self.engine_clock_s: Seconds | None = None
        """When the last frame was sent, since 1970 by the engine's clock; None: none was read."""
        self._scheduler = scheduler
        self._waiting: deque[Apply | Forget | Event | Batch | BlocksChanged] = deque()
        self._noted = self.stream.last
        self._told = (StreamState.NONE, False)
        self._index = next(iter(scheduler.hearing.values()), None)
        self._say_state(now)

    @property
    def events(self) -> Counter[str]:
        """How many are known, by type."""
        told = self._events.items()
        return Counter({_NAMES[kind]: count for kind, count in told if count})

    @property
    def state(self) -> StreamState:
        """How much counts what it says: not more than was taken note of."""
        state = self.stream.state
        return StreamState.REPLAYING if self._waiting and state is StreamState.LIVE else state

    @property
    def complete(self) -> bool:
        return self.stream.complete

    @property
    def noted(self) -> int | None:
        """The number of a frame up to which note was taken of all; None: of none."""
        last = self._noted if self._waiting else self.stream.last
        return None if last is None or last < 0 else last

    # What happens to the socket.

    def connected(self, now: Seconds) -> list[Asked]:
        """Frames come from now on."""
        self.stream.connected(now)
        return self._act()

    def disconnected(self, now: Seconds) -> list[Asked]:
        """None comes any more."""
        self.stream.disconnected(now)
        return self._act()

    def received(self, sequence: int, payload: bytes, now: Seconds) -> list[Asked]:
        """A live frame came."""
        self.stream.received(sequence, payload, now)
        return self._act()

    def replayed(self, sequence: int, payload: bytes, now: Seconds) -> None:
        """A frame that was asked for came."""
        self.stream.replayed(sequence, payload, now)

    def replay_ended(self, now: Seconds, *, marked: bool) -> list[Asked]:
        """The end marker came, or nothing for too long."""
        self.stream.replay_ended(now, marked=marked)
        return self._act()

    def snapshot(self, epoch: str, resume: int, payloads: list[bytes], now: Seconds) -> list[Asked]:
        """All that is held came; frames go on with `resume`."""
        self.stream.snapshot(epoch, resume, payloads, now)
        return self._act()

    def heartbeat(
        self, epoch: str, sequence: int, interval_s: Seconds, now: Seconds
    ) -> list[Asked]:
        """The source is there."""
        self.stream.heartbeat(epoch, sequence, interval_s, now)
        return self._act()

    # What the shell does now and then.

    def watch(self, now: Seconds) -> list[Asked]:
        """Compare with what the pool knows; a few times a second."""
        scheduler = self._scheduler
        index = next(iter(scheduler.hearing.values()), None)
        if index is not self._index:
            # It was opened anew, and knows nothing.
            self._index = index
            self._told = (StreamState.NONE, False)
            self.stream.unbalanced(now)
        columns = scheduler.pool.columns
        slot = self.slot
        computed = columns.cache_queried_tokens.item(slot) - columns.cache_hit_tokens.item(slot)
        self.stream.watched(
            scheduler.lives.get(slot, 0), columns.observed_at_s.item(slot), computed, now
        )
        asked = self._act()
        self._say_state(now)
        return asked

    @property
    def works(self) -> bool:
        """Something waits for `work`."""
        return bool(self._waiting)

    def read(self) -> None:
        """Read the payload that `work` would read first.

        Who has several to read does so before any `work`: each goes faster without the other between.
        """
        waiting = self._waiting
        if waiting and isinstance(first := waiting[0], Apply):
            waiting[0] = self._read_waiting(first)

    def work(self, now: Seconds, *, blocks_max: int = BLOCKS_PER_WORK) -> list[Asked]:
        """Take note of what waits, of about `blocks_max` blocks."""
        waiting = self._waiting
        left = blocks_max
        asked: list[Asked] = []
        while waiting and left > 0:
            first = waiting.popleft()
            if isinstance(first, Apply):
                first = self._read_waiting(first)
            if isinstance(first, Batch):
                events, work = self._open(first, left, now)
                # A frame without events is work too.
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
        """The endpoint left, or is not to be heard any more."""
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
                # What waits is of the same past.
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
        """The events of `batch`, and the work that they are; nothing, where they are to wait."""
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
        """`first`, and those of the events that wait that are to be heard with it; the work that they are."""
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
        """Whether what was told so far does not add up."""
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
        """Tell the scheduler, if it is another."""
        known = (self.state, self.complete)
        if known != self._told:
            self._told = known
            state, complete = known
            changed = StreamChanged(self.slot, state, complete=complete, rank=self.rank)
            self._scheduler.take(changed, now)


def _blocks_of(event: Event) -> int:
    return 0 if isinstance(event, Cleared) else len(event.hashes)
