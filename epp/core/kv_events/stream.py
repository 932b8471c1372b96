"""One endpoint's stream of KV events without I/O: what is missing, what is to be asked for, what counts.

A shell tells what happens to its socket (`connected`, `received`, `replayed`, ...) and what the pool
knows of the process (`watched`); it takes `actions` after each and does them in their order. Nothing
here raises because of what an engine sends, and nothing waits: while frames are asked for again, new
ones are held, in bounds.

**The protocol has no epoch.** Frames are counted from 0 by each process of an engine, so a process that
restarted and is already beyond our last number looks as if frames had been lost. What was missed is
therefore grafted on the old picture only once a scrape that is newer than the gap has shown the same
process; else everything is forgotten and asked for from 0.

**A number may be damaged.** A frame whose number is further ahead of the last than any engine could
have come is left out like a frame that never came. If the next one is too far ahead as well, its
numbers are those of another process, and everything is forgotten.

**It has no snapshot.** An engine keeps its last frames, 10,000 mostly. Who asks for all and gets less
knows some blocks that are held and none that are not: `complete` is false, and stays so. Where an
engine has snapshots, with an epoch, the number with which its frames go on, and a heartbeat, `snapshot`
and `heartbeat` take the place of all that is guessed here.
"""

import math
from collections import deque
from enum import StrEnum
from typing import Final, TypeAlias

import xxhash
from msgspec import Struct

from epp.core.types import Seconds

HELD_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of live frames while others are asked for; of more all are forgotten."""
REPLAYED_BYTES_MAX: Final = 128 * 1024 * 1024
"""Of one replay: 10,000 frames have 5 to 60 MB. What is above is asked for in the next."""
REPLAYED_FRAMES_MAX: Final = 1_000_000
ATTEMPTS_MAX: Final = 3
"""Replays in a row that bring nothing."""
REPLAYS_MAX: Final = 6
REPLAYS_S: Final[Seconds] = 60.0
"""No more than `REPLAYS_MAX` replays begin in this time: while an engine sends one it sends nothing new."""
STALE_S: Final[Seconds] = 2.0
"""Without a connection."""
FORGOTTEN_S: Final[Seconds] = 10.0
"""A stream that is stale for so long says nothing any more."""
CONFIRMED_S_MAX: Final[Seconds] = 5.0
"""A gap behind which no scrape shows the process for so long is a restart."""
SILENT_S: Final[Seconds] = 30.0
SILENT_TOKENS: Final = 2_048.0
"""A source that sends nothing for `SILENT_S` while its engine computed so many prompt tokens is dead."""
HEARTBEATS_MISSED_MAX: Final = 3
GAP_FRAMES_MAX: Final = 100_000
"""Longest run of missing frames that is believed. vLLM sends one message for each engine step that changes
its cache, measured at most 40 a second, and `FORGOTTEN_S` after the connection is gone there is no last
number to compare with. A hundred times that rate makes less than half of this."""
RECENT_FRAMES: Final = 64
"""By whose digests a frame that comes twice is told from a counter that began anew."""


class StreamState(StrEnum):
    """How much a stream counts."""

    NONE = "none"
    """There is no source."""
    CONNECTING = "connecting"
    REPLAYING = "replaying"
    """It lacks frames, and has asked for them."""
    LIVE = "live"
    STALE = "stale"
    """Disconnected, or silent while the engine works."""


class Apply(Struct, frozen=True, gc=False):
    """What `payload` tells is so."""

    payload: bytes


class Forget(Struct, frozen=True, gc=False):
    """What the endpoint told so far does not hold."""


class AskReplay(Struct, frozen=True, gc=False):
    """Ask for all frames from `first` on; whatever was asked for before is not waited for."""

    first: int


class AskSnapshot(Struct, frozen=True, gc=False):
    """Ask for all that is held."""


Action: TypeAlias = Apply | Forget | AskReplay | AskSnapshot


class StreamCounts(Struct):
    """Since the stream was opened."""

    frames: int = 0
    """Applied."""
    duplicates: int = 0
    gaps: int = 0
    lost: int = 0
    """Frames that never came although the stream listened."""
    implausible: int = 0
    """Frames whose number is more than `GAP_FRAMES_MAX` ahead of the one before."""
    restarts: int = 0
    """Its counter began anew, or its process is another."""
    replays: int = 0
    replays_vain: int = 0
    overflows: int = 0
    """More came than can be held while others are asked for."""
    snapshots: int = 0


class _Frame(Struct, frozen=True, gc=False):
    sequence: int
    payload: bytes


class KVEventStream:
    """What is known of one source. `complete`: all that it holds was told, since its process began."""

    def __init__(self, *, replays: bool, snapshots: bool = False, now: Seconds) -> None:
        """`replays`: old frames can be asked for; `snapshots`: all that is held can be."""
        self.counts = StreamCounts()
        self.complete = False
        self.heard_at_s: Seconds = now
        """When the last frame or heartbeat came, or it was connected."""
        self.silent = False
        """It tells nothing while its engine works."""
        self._replays = replays
        self._snapshots = snapshots
        self._connected = False
        self._disconnected_at_s: Seconds = now
        self._last: int | None = None
        """The number of the last frame that counts; None: of none."""
        self._newest: int | None = None
        """The number of the last live frame that came, whether it counts yet or not."""
        self._doubted = False
        """The last live frame was left out because of its number."""
        self._epoch: str = ""
        self._heartbeat_s: Seconds = math.inf
        self._recent: deque[int] = deque(maxlen=RECENT_FRAMES)
        """Digests of frames and their numbers."""
        self._actions: list[Action] = []
        self._held: list[_Frame] = []
        self._held_bytes = 0
        self._asked: int | None = None
        """The first frame that was asked for; None: nothing is."""
        self._snapshot_asked = False
        self._replayed: list[_Frame] = []
        self._replayed_bytes = 0
        self._replay_ended = False
        self._marked = False
        """The last replay came to its end."""
        self._attempts = 0
        self._replay_times: deque[Seconds] = deque(maxlen=REPLAYS_MAX)
        self._owed = False
        """What is missing was not asked for, because of `REPLAYS_MAX`, or not answered."""
        self._confirm_after_s: Seconds = -math.inf
        """What is asked for is grafted once a scrape newer than this has shown the same process."""
        self._confirmed = True
        self._lives: int | None = None
        self._observed_at_s: Seconds = -math.inf
        self._stale_since_s: Seconds | None = None
        self._computed_tokens: float = math.nan
        """Of the engine when it was last heard."""

    @property
    def state(self) -> StreamState:
        if self._stale_since_s is not None:
            return StreamState.STALE
        if not self._connected:
            return StreamState.CONNECTING if self._last is None else StreamState.LIVE
        if self._waits:
            return StreamState.REPLAYING
        return StreamState.LIVE

    @property
    def last(self) -> int | None:
        """The number of the last frame that counts."""
        return self._last

    @property
    def waiting_bytes(self) -> int:
        """Of frames that are held until others come."""
        return self._held_bytes + self._replayed_bytes

    def actions(self) -> list[Action]:
        """What is to be done now, in this order, each once."""
        done, self._actions = self._actions, []
        return done

    # What happens to the socket.

    def connected(self, now: Seconds) -> None:
        """Frames come from now on; some may have been missed before."""
        self._connected = True
        self._heard(now)
        if self._snapshots:
            self._ask_snapshot()
        elif self._last is None:
            self._begin_anew(now)
        elif self._may_replay(now):
            self._ask_missing(self._last + 1, now)
        else:
            self._reset(now)

    def disconnected(self, now: Seconds) -> None:
        """No frame comes, and no answer."""
        if self._connected:
            self._connected = False
            self._disconnected_at_s = now
        self._stop_asking()

    def received(self, sequence: int, payload: bytes, now: Seconds) -> None:
        """A live frame came."""
        self._heard(now)
        if self._newest is not None and sequence - self._newest > GAP_FRAMES_MAX:
            self.counts.implausible += 1
            if not self._doubted:
                self._doubted = True
                return
            self.counts.restarts += 1
            self._reset(now)
        self._doubted = False
        self._newest = sequence
        frame = _Frame(sequence, payload)
        if self._waits:
            self._hold(frame, now)
        else:
            self._take(frame, now)

    def replayed(self, sequence: int, payload: bytes, now: Seconds) -> None:
        """A frame that was asked for came; one that nobody waits for does nothing."""
        if self._asked is None or self._replay_ended:
            return
        self._heard(now)
        if (
            self._replayed_bytes + len(payload) > REPLAYED_BYTES_MAX
            or len(self._replayed) >= REPLAYED_FRAMES_MAX
        ):
            self.replay_ended(now, marked=False)
            return
        self._replayed.append(_Frame(sequence, payload))
        self._replayed_bytes += len(payload)

    def replay_ended(self, now: Seconds, *, marked: bool) -> None:
        """The end marker came, or not `marked`, nothing for too long."""
        if self._asked is None or self._replay_ended:
            return
        self._replay_ended = True
        self._marked = marked
        self._graft(now)

    def snapshot(self, epoch: str, resume: int, payloads: list[bytes], now: Seconds) -> None:
        """All that is held, as events; frames go on with the number `resume`."""
        self._heard(now)
        self._snapshot_asked = False
        held = [frame for frame in self._held if frame.sequence >= resume]
        self._stop_asking()
        self.counts.snapshots += 1
        self._forget()
        self._epoch = epoch
        self._actions += [Apply(payload) for payload in payloads]
        self._last = resume - 1
        self.complete = True
        self._take_all(held, now)

    def heartbeat(self, epoch: str, sequence: int, interval_s: Seconds, now: Seconds) -> None:
        """The source is there; `sequence` is the number of its last frame."""
        self._heard(now)
        self._heartbeat_s = interval_s
        if self._snapshot_asked:
            return
        if epoch != self._epoch or self._last is None or sequence != self._last:
            self.counts.gaps += 1
            self._ask_snapshot()

    def broken(self, now: Seconds) -> None:
        """A payload that was applied could not be read, and may have said that blocks are gone."""
        self._actions.append(Forget())
        self.complete = False

    def unbalanced(self, now: Seconds) -> None:
        """What it told does not add up: begin anew."""
        self._reset(now)

    # What the pool knows.

    def watched(
        self, lives: int, observed_at_s: Seconds, computed_tokens: float, now: Seconds
    ) -> None:
        """`lives` changes whenever the process is another, as far as the pool knows.

        `observed_at_s`: of the last scrape; `computed_tokens`: prompt tokens, those cached left out,
        since the engine began. NaN: it does not tell.
        """
        if self._lives is None:
            self._lives = lives
        elif lives != self._lives:
            self._lives = lives
            self.counts.restarts += 1
            self._reset(now)
        self._observed_at_s = observed_at_s
        if self._asked is not None and not self._confirmed:
            if observed_at_s > self._confirm_after_s:
                self._confirmed = True
                self._graft(now)
            elif now - self._confirm_after_s > CONFIRMED_S_MAX:
                self.counts.restarts += 1
                self._reset(now)
        if (
            self._owed
            and self._connected
            and not self._waits
            and now - self._replay_times[-1] >= REPLAYS_S
        ):
            # What came meanwhile counts until there is an answer.
            self._ask(0, now)
        self._watch_silence(computed_tokens, now)
        self._watch_staleness(now)

    def _watch_silence(self, computed_tokens: float, now: Seconds) -> None:
        if math.isnan(self._computed_tokens) or computed_tokens < self._computed_tokens:
            self._computed_tokens = computed_tokens
        quiet_s = now - self.heard_at_s
        behind = computed_tokens - self._computed_tokens >= SILENT_TOKENS
        self.silent = quiet_s > SILENT_S and behind
        if quiet_s > HEARTBEATS_MISSED_MAX * self._heartbeat_s:
            self.silent = True

    def _watch_staleness(self, now: Seconds) -> None:
        away = not self._connected and now - self._disconnected_at_s > STALE_S
        if not (self.silent or away):
            self._stale_since_s = None
        elif self._stale_since_s is None:
            self._stale_since_s = now
        elif now - self._stale_since_s > FORGOTTEN_S and self._last is not None:
            self._stop_asking()
            self._forget()

    # Frames.

    @property
    def _waits(self) -> bool:
        return self._asked is not None or self._snapshot_asked

    def _heard(self, now: Seconds) -> None:
        self.heard_at_s = now
        self._computed_tokens = math.nan
        self.silent = False
        if self._connected:
            self._stale_since_s = None

    def _take(self, frame: _Frame, now: Seconds) -> None:
        """A frame while nothing is waited for."""
        sequence, last = frame.sequence, self._last
        if last is not None and sequence == last + 1:
            self._apply(frame)
        elif last is None:
            if sequence == 0:
                self._apply(frame)
            elif self._may_replay(now):
                self._ask(0, now)
                self._hold(frame, now)
            else:
                self.complete = False
                self._apply(frame)
        elif sequence > last:
            self._miss(frame, now)
        elif _digest(frame) in self._recent:
            self.counts.duplicates += 1
        else:
            self.counts.restarts += 1
            self._reset(now)
            if self._waits:
                self._hold(frame, now)
            else:
                self._take(frame, now)

    def _miss(self, frame: _Frame, now: Seconds) -> None:
        """Frames between the last and `frame` did not come."""
        assert self._last is not None, "there is a gap behind something"
        self.counts.gaps += 1
        if self._snapshots:
            self._ask_snapshot()
        elif self._may_replay(now):
            self._ask_missing(self._last + 1, now)
        else:
            self._count_lost(frame.sequence - self._last - 1)
            self._forget()
            self._apply(frame)
            return
        self._hold(frame, now)

    def _count_lost(self, frames: int) -> None:
        """Count missing frames, unless a damaged number pretends that there are so many."""
        if frames <= GAP_FRAMES_MAX:
            self.counts.lost += frames

    def _apply(self, frame: _Frame) -> None:
        self._last = frame.sequence
        # Before its first frame nothing was told, whether an engine could be asked for that or not.
        self.complete = self.complete or frame.sequence == 0
        self.counts.frames += 1
        self._recent.append(_digest(frame))
        self._actions.append(Apply(frame.payload))

    def _hold(self, frame: _Frame, now: Seconds) -> None:
        self._held.append(frame)
        self._held_bytes += len(frame.payload)
        if self._held_bytes > HELD_BYTES_MAX:
            self.counts.overflows += 1
            self._stop_asking()
            self._forget()

    # Asking for what is missing.

    def _may_replay(self, now: Seconds) -> bool:
        """Whether a replay can begin; one that cannot begin yet is owed."""
        times = self._replay_times
        if len(times) == REPLAYS_MAX and now - times[0] < REPLAYS_S:
            self._owed = True
            return False
        return self._replays

    def _begin_anew(self, now: Seconds) -> None:
        if self._snapshots:
            self._ask_snapshot()
        elif self._may_replay(now):
            self._ask(0, now)

    def _ask_missing(self, first: int, now: Seconds) -> None:
        """For what came since frame `first`; for all, where what came before is missing too."""
        if self._owed:
            self._ask(0, now)
        else:
            self._ask(first, now, confirm=True)

    def _ask_snapshot(self) -> None:
        self._stop_asking()
        self._snapshot_asked = True
        self._actions.append(AskSnapshot())

    def _ask(self, first: int, now: Seconds, *, confirm: bool = False) -> None:
        self._asked = first
        self._replayed = []
        self._replayed_bytes = 0
        self._replay_ended = False
        self._replay_times.append(now)
        self._owed = False
        self.counts.replays += 1
        if confirm:
            self._confirm_after_s = now
            self._confirmed = False
        elif first == 0:
            self._confirmed = True
        self._actions.append(AskReplay(first))

    def _stop_asking(self) -> None:
        self._asked = None
        self._snapshot_asked = False
        self._replayed = []
        self._replayed_bytes = 0
        self._replay_ended = False
        self._held = []
        self._held_bytes = 0
        self._attempts = 0
        self._confirmed = True

    def _reset(self, now: Seconds) -> None:
        """Another process, or a picture that is wrong: from 0. What is held meanwhile is of the old."""
        connected = self._connected
        self._stop_asking()
        self._forget()
        if connected:
            self._begin_anew(now)

    def _forget(self) -> None:
        self._last = self._newest = None
        self._recent.clear()
        self.complete = False
        self._actions.append(Forget())

    def _graft(self, now: Seconds) -> None:
        """Apply what was asked for, as far as it is without gaps, and what came meanwhile."""
        first = self._asked
        if first is None or not self._replay_ended or not self._confirmed:
            return
        frames = sorted(self._replayed, key=_sequence_of)
        held = self._held
        if first and frames and frames[0].sequence > first:
            # It does not keep what we lack.
            self._count_lost(frames[0].sequence - first)
            self._reset_with(held, now)
            return
        if first == 0 and self._last is not None:
            if not frames:
                self._ask_later()
                self._take_all(held, now)
                return
            self._forget()
        if first == 0:
            self.complete = frames[0].sequence == 0 if frames else self._marked
            self._last = frames[0].sequence - 1 if frames else -1
        applied = self._apply_run(frames)
        applied += self._apply_run(held)
        rest = [frame for frame in held if self._last is None or frame.sequence > self._last]
        if not rest:
            self._stop_asking()
            return
        self._attempts = 0 if applied else self._attempts + 1
        if self._attempts < ATTEMPTS_MAX and self._may_replay(now) and self._last is not None:
            self._held = rest
            self._held_bytes = sum(len(frame.payload) for frame in rest)
            # The same process still: it was confirmed for this gap.
            self._ask(self._last + 1, now)
            return
        self._ask_later()
        self._forget()
        self._apply(rest[0])
        self._take_all(rest[1:], now)

    def _ask_later(self) -> None:
        """What was asked for did not come."""
        self.counts.replays_vain += 1
        self._stop_asking()
        self._owed = True

    def _reset_with(self, held: list[_Frame], now: Seconds) -> None:
        """From 0, and what came meanwhile is of the same process and stays."""
        self._stop_asking()
        self._forget()
        if self._may_replay(now):
            self._ask(0, now)
            for frame in held:
                self._hold(frame, now)
        elif held:
            self._apply(held[0])
            self._take_all(held[1:], now)

    def _apply_run(self, frames: list[_Frame]) -> int:
        """Apply those of `frames` that follow without a gap; those that came before are skipped."""
        applied = 0
        for frame in frames:
            assert self._last is not None, "a run follows something"
            if frame.sequence == self._last + 1:
                self._apply(frame)
                applied += 1
            elif frame.sequence > self._last + 1:
                break
        return applied

    def _take_all(self, frames: list[_Frame], now: Seconds) -> None:
        for frame in frames:
            if self._waits:
                self._hold(frame, now)
            elif self._last is None or frame.sequence > self._last:
                self._take(frame, now)


def _digest(frame: _Frame) -> int:
    return xxhash.xxh64_intdigest(frame.payload, frame.sequence)


def _sequence_of(frame: _Frame) -> int:
    return frame.sequence
