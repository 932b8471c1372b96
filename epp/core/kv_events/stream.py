"""The state machine of one rank's KV event stream, without I/O: gaps, requests and validity.

A shell reports what happens to its socket (`connected`, `received`, `replayed`, ...) and what the
pool knows of the process (`watched`). After each call, it takes `actions` and performs them in
order. Nothing here raises because of an engine's data, and nothing waits. While frames are
requested again, new ones are buffered, within bounds.

**The protocol has no epoch.** Each process of an engine counts its frames from 0. If a restarted
process is already beyond our last number, it looks as if frames were lost. Replayed frames are
therefore appended to the old state only after a scrape newer than the gap has shown the same
process. Otherwise everything is dropped and requested from 0.

**A number may be damaged.** A frame is ignored if its number is further ahead than any engine can
be. If the next frame is too far ahead as well, the numbers belong to another process, and
everything is dropped.

**The protocol has no snapshot.** An engine keeps its last frames, mostly 10,000. A replay that does
not start at 0 gives only some of the cached blocks; `complete` is then False, and stays so. Some
engines have snapshots, with an epoch, the number of the next frame, and a heartbeat. For these,
`snapshot` and `heartbeat` replace all guesses.
"""

import math
from collections import deque
from enum import StrEnum
from typing import Final, TypeAlias

import xxhash
from msgspec import Struct

from epp.core.types import Seconds

HELD_BYTES_MAX: Final = 32 * 1024 * 1024
"""Maximum size in bytes of the live frames of a KV event stream that are buffered during a replay.
If they exceed it, all are dropped.
"""
REPLAYED_BYTES_MAX: Final = 128 * 1024 * 1024
"""Maximum size in bytes of one replay of a KV event stream: 10,000 frames have 5 to 60 MB. The rest
is requested in the next replay.
"""
REPLAYED_FRAMES_MAX: Final = 1_000_000
ATTEMPTS_MAX: Final = 3
"""Maximum number of replays of a KV event stream in a row that bring no new frame. After them, all
blocks are dropped, the stream continues with the next frame that it has, and all frames are requested
again later.
"""
REPLAYS_MAX: Final = 6
REPLAYS_S: Final[Seconds] = 60.0
"""Time in seconds within which at most `REPLAYS_MAX` replays of a KV event stream start. The limit
exists because an engine sends no new frames during a replay.
"""
STALE_S: Final[Seconds] = 2.0
"""Time in seconds without a connection after which a KV event stream is stale."""
FORGOTTEN_S: Final[Seconds] = 10.0
"""Time in seconds for which a KV event stream is stale before its blocks are dropped."""
CONFIRMED_S_MAX: Final[Seconds] = 5.0
"""Longest time in seconds to wait, after a gap in the frames, for a scrape that shows the same
process of the engine. After it, the gap counts as a restart.
"""
SILENT_S: Final[Seconds] = 30.0
SILENT_TOKENS: Final = 2_048.0
"""Number of prompt tokens that an engine must have computed while it sent no frame for `SILENT_S`,
for its KV event stream to count as silent.
"""
HEARTBEATS_MISSED_MAX: Final = 3
GAP_FRAMES_MAX: Final = 100_000
"""Largest plausible number of missing frames in a gap of a KV event stream. vLLM sends one message
for each engine step that changes its cache, measured at most 40 a second. `STALE_S` plus
`FORGOTTEN_S` after a lost connection there is no last number to compare with. A hundred times that
rate gives less than half of this limit.
"""
RECENT_FRAMES: Final = 64
"""Number of frames applied last whose digests are stored. They distinguish a repeated frame from a
counter of frames that restarted.
"""


class StreamState(StrEnum):
    """The state of one rank's KV event stream."""

    NONE = "none"
    """The rank has no source of KV-cache events."""
    CONNECTING = "connecting"
    REPLAYING = "replaying"
    """Missing frames or a snapshot have been requested from the stream's source and are not applied
    yet, or received frames wait in a queue.
    """
    LIVE = "live"
    STALE = "stale"
    """The source of the stream is disconnected, sends nothing while its engine works, or sends no
    heartbeats any longer.
    """


class Apply(Struct, frozen=True, gc=False):
    """An action: apply the KV-cache events in `payload`."""

    payload: bytes


class Forget(Struct, frozen=True, gc=False):
    """An action: drop all blocks that the KV event stream reported so far."""


class AskReplay(Struct, frozen=True, gc=False):
    """An action: request all frames of the stream from number `first` on. An earlier request is no
    longer awaited.
    """

    first: int


class AskSnapshot(Struct, frozen=True, gc=False):
    """An action: request a snapshot of all cached blocks from the source of the KV event stream."""


Action: TypeAlias = Apply | Forget | AskReplay | AskSnapshot


class StreamCounts(Struct):
    """The numbers of frames, gaps and requests of one KV event stream since it was opened."""

    frames: int = 0
    """Number of frames of the stream whose events were applied."""
    duplicates: int = 0
    gaps: int = 0
    lost: int = 0
    """Number of frames of the stream that never came although it was subscribed. A gap of more than
    `GAP_FRAMES_MAX` frames does not count.
    """
    implausible: int = 0
    """Number of frames whose number was more than `GAP_FRAMES_MAX` above that of the previous
    frame, so that it is implausible.
    """
    restarts: int = 0
    """Number of times that the stream's state was reset because the engine restarted or was assumed
    to have restarted: its process changed, a frame that is no duplicate had an earlier number, two
    frames in a row had implausible numbers, or no scrape showed the same process in time after a
    gap or a reconnection.
    """
    replays: int = 0
    replays_vain: int = 0
    overflows: int = 0
    """Number of times that the buffer of live frames exceeded its limit during a replay, so that
    all were dropped.
    """
    snapshots: int = 0


class _Frame(Struct, frozen=True, gc=False):
    sequence: int
    payload: bytes


class KVEventStream:
    """The state of the event stream of one source, which is one rank. `complete` is True if the
    source reported all blocks cached since its process started.
    """

    def __init__(self, *, replays: bool, snapshots: bool = False, now: Seconds) -> None:
        """Start the state machine of a KV event stream. `replays` is True if past frames can be
        requested, `snapshots` if a snapshot of all cached blocks can be.
        """
        self.counts = StreamCounts()
        self.complete = False
        self.heard_at_s: Seconds = now
        """Time at which the last frame or heartbeat of the stream came, or at which its source was
        connected.
        """
        self.silent = False
        """True if the source of the stream sends nothing while its engine works, or no heartbeats
        any longer.
        """
        self._replays = replays
        self._snapshots = snapshots
        self._connected = False
        self._disconnected_at_s: Seconds = now
        self._last: int | None = None
        """Number of the frame of the stream after which the next one is expected: the last one that
        was applied or that a snapshot includes, or -1 before frame 0. None if it is unknown.
        """
        self._newest: int | None = None
        """Number of the last live frame that came, even if it is only buffered; None if there is
        none.
        """
        self._doubted = False
        """True if the last live frame was ignored because its number was implausible."""
        self._epoch: str = ""
        self._heartbeat_s: Seconds = math.inf
        self._recent: deque[int] = deque(maxlen=RECENT_FRAMES)
        """Digests of the frames that were applied last, each over the frame's content and number.
        """
        self._actions: list[Action] = []
        self._held: list[_Frame] = []
        self._held_bytes = 0
        self._asked: int | None = None
        """Number of the first frame that the running replay must bring, or None if no replay is
        running.
        """
        self._snapshot_asked = False
        self._replayed: list[_Frame] = []
        self._replayed_bytes = 0
        self._replay_ended = False
        self._marked = False
        """True if the last replay ended with its end marker, False if by a timeout."""
        self._attempts = 0
        self._replay_times: deque[Seconds] = deque(maxlen=REPLAYS_MAX)
        self._owed = False
        """True if missing frames must still be requested, because `REPLAYS_MAX` did not allow it or
        the request had no result.
        """
        self._confirm_after_s: Seconds = -math.inf
        """Time at which the missing frames were requested. Replayed frames are applied only after a
        later scrape has shown the same process.
        """
        self._confirmed = True
        self._lives: int | None = None
        self._observed_at_s: Seconds = -math.inf
        self._stale_since_s: Seconds | None = None
        self._computed_tokens: float = math.nan
        """The engine's counter of computed prompt tokens, over all requests, at the first scrape
        after the last frame or heartbeat, or at a later one that showed a lower value. NaN before
        that scrape, or if not reported.
        """

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
        """Return the number of the frame of the stream after which the next one is expected: the
        last one that was applied or that a snapshot includes, or -1 before frame 0. Return None if
        it is unknown.
        """
        return self._last

    @property
    def waiting_bytes(self) -> int:
        """Return the size in bytes of the frames that are buffered because earlier frames are
        missing.
        """
        return self._held_bytes + self._replayed_bytes

    def actions(self) -> list[Action]:
        """Return the actions that the caller must perform now, in order. Each is returned once."""
        done, self._actions = self._actions, []
        return done

    # Events of the socket.

    def connected(self, now: Seconds) -> None:
        """Record that the source of the stream is connected and sends frames from now on. Request a
        snapshot or the frames that may be missing, or drop all blocks if neither is possible now.
        """
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
        """Record that the source of the stream is disconnected, so that no frame or answer comes
        any longer. Buffered frames are dropped.
        """
        if self._connected:
            self._connected = False
            self._disconnected_at_s = now
        self._stop_asking()

    def received(self, sequence: int, payload: bytes, now: Seconds) -> None:
        """Process a live frame with number `sequence`: apply it, buffer it, or request the frames
        before it. A single frame with an implausible number is ignored; after two in a row,
        everything is reset.
        """
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
        """Store a replayed frame with number `sequence` until its replay ends, or end the replay if
        it is too large. Do nothing if no replay is running.
        """
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
        """End a replay. Its frames are applied now, or once a scrape has shown the same process.
        `marked` is True if its end marker came, False after a timeout.
        """
        if self._asked is None or self._replay_ended:
            return
        self._replay_ended = True
        self._marked = marked
        self._graft(now)

    def snapshot(self, epoch: str, resume: int, payloads: list[bytes], now: Seconds) -> None:
        """Replace all blocks by those of a snapshot, which consists of events. The next live frame
        has number `resume`.
        """
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
        """Process a heartbeat of the source. Request a snapshot, unless one is awaited, if its
        `epoch` is a new one, or if `sequence`, the number of the source's last frame, is not that
        of the last frame applied here.
        """
        self._heard(now)
        self._heartbeat_s = interval_s
        if self._snapshot_asked:
            return
        if epoch != self._epoch or self._last is None or sequence != self._last:
            self.counts.gaps += 1
            self._ask_snapshot()

    def broken(self, now: Seconds) -> None:
        """Drop all blocks of the stream, because a payload that may have contained removals was
        unreadable.
        """
        self._actions.append(Forget())
        self.complete = False

    def unbalanced(self, now: Seconds) -> None:
        """Drop all blocks, because the events contradict each other. If the source is connected,
        request all frames or a snapshot, as far as that is possible now.
        """
        self._reset(now)

    # Knowledge of the pool.

    def watched(
        self, lives: int, observed_at_s: Seconds, computed_tokens: float, now: Seconds
    ) -> None:
        """Compare the stream with what the pool knows of the engine's process; `lives` changes with
        every new process. This may drop all blocks, apply replayed frames, request frames, or make
        the stream stale.

        `observed_at_s` is the time of the last scrape. `computed_tokens` is the number of prompt
        tokens that the engine computed since it started, without cached ones; NaN if not reported.
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
            # The frames received meanwhile count until there is an answer.
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
        """Process a live frame while no replay is running: apply it, or request the frames before
        it. A repeated frame is only counted; any other frame with an earlier number resets the
        stream.
        """
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
        """Request the frames that are missing between the last applied frame and `frame`, or a
        snapshot if the source has snapshots, and keep `frame` until they come. If no request is
        possible, drop all blocks and continue with `frame`.
        """
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
        """Count `frames`, a number of missing frames, as lost. Do nothing if the number is
        implausible, because it then comes from a damaged frame number.
        """
        if frames <= GAP_FRAMES_MAX:
            self.counts.lost += frames

    def _apply(self, frame: _Frame) -> None:
        self._last = frame.sequence
        # No event precedes frame 0, so the state is complete from there on.
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

    # Requests for missing frames.

    def _may_replay(self, now: Seconds) -> bool:
        """Return whether a replay may start now. Return False if the source has no replays. Return
        False as well if `REPLAYS_MAX` forbids one now, and remember that it must be requested
        later.
        """
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
        """Request the frames of the stream from number `first` on, or all frames if earlier ones
        are missing as well.
        """
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
        """Drop all blocks, after a new process or a contradiction. If the source is connected,
        request all frames or a snapshot, as far as that is possible now. The buffered frames belong
        to the old state and are dropped.
        """
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
        """Apply the replayed frames up to the first gap, then the live frames that came meanwhile,
        once the replay has ended and the process is confirmed. If frames are still missing, request
        them, or drop all blocks and continue without them. If the engine no longer keeps the first
        missing frame, drop all blocks and request all frames.
        """
        first = self._asked
        if first is None or not self._replay_ended or not self._confirmed:
            return
        frames = sorted(self._replayed, key=_sequence_of)
        held = self._held
        if first and frames and frames[0].sequence > first:
            # The engine no longer keeps the missing frames.
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
            # The process is still the same, because it was confirmed for this gap.
            self._ask(self._last + 1, now)
            return
        self._ask_later()
        self._forget()
        self._apply(rest[0])
        self._take_all(rest[1:], now)

    def _ask_later(self) -> None:
        """Remember that the missing frames must be requested later, because this request did not
        bring them.
        """
        self.counts.replays_vain += 1
        self._stop_asking()
        self._owed = True

    def _reset_with(self, held: list[_Frame], now: Seconds) -> None:
        """Drop all blocks and request all frames again, but keep the buffered frames `held`, which
        are from the same process. If no replay may start now, continue with `held`.
        """
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
        """Apply those of `frames` that follow the last applied frame without a gap. Return how many
        were applied.
        """
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
