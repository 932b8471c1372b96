"""Further traffic of the same kind: new random draws of generated traffic, resamples of recorded.

A comparison on one trace is valid for that trace only. To estimate how far another hour may differ,
each repetition gets other traffic. A generated workload is drawn from another seed. A recorded one
is the only sample, so blocks of time are drawn from it with replacement (Efron's bootstrap in
Kuensch's form for series: Annals of Statistics 17, 1989):

- A block is all sessions that begin within `Blocks.block_s`, whole, so that neither bursts nor the
  reuse inside a session are cut. Requests of a session after the end of its block move with it.
- As many blocks as the trace has are drawn and placed end to end. Requests after the end of the
  trace move to its beginning (Politis and Romano's circle). Every recorded trace likewise begins
  with sessions that had started before the recording.
- If most blocks would be empty because sessions are longer than blocks, each block is one session,
  which keeps its time. An example is a closed loop whose lanes all begin at once.
- A block that is drawn twice stands for other users the second time: text that no other block has
  gets new ids, and sessions get new names. Text that blocks share, such as a system prompt, stays
  shared.

Sessions are those that the trace names, joined with those whose answers they wait for. If it names
none, a prompt continues an earlier session if it begins with all full blocks of a prompt at most
`SESSION_GAP_S` before it, and has at least one more full block.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from random import Random
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from epp.core.types import Seconds
from sim.traces.arrival import Arrival, TraceError
from sim.traces.reading import Trace, from_zero
from sim.traces.workloads import Generated

BLOCK_S: Final[Seconds] = 120.0
BLOCKS_MIN: Final = 20
"""Minimum number of blocks into which a recorded trace is cut for resampling; a short trace has
shorter blocks. With fewer, the random draws would hardly differ.
"""
BLOCKS_MAX: Final = 200
"""Maximum number of blocks into which a recorded trace is cut for resampling; a trace of days has
longer blocks.
"""
SESSION_GAP_S: Final[Seconds] = 900.0
HELD_MAX: Final = 10_000_000
"""Maximum number of requests plus prompt blocks of a recorded trace that is resampled in memory.
Each takes at most about 110 bytes, measured on Mooncake's conversation hour (12,031 requests with
288,500 blocks).
"""


DRAWN_MAX: Final = 1_000_000
"""Maximum number of requests plus prompt blocks in the cache of generated traffic, in total: about
110 MB.
"""
_Key = tuple[Generated, int, int, int | None]


class _Drawn:
    """A cache of generated traffic for runs that skip the first requests, because many runs use the
    same part.

    Generating everything before the evening of a day takes more than half as long as simulating the
    evening. A part above the size limit is not cached; the oldest parts are removed if the total is
    above it.
    """

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[list[Arrival], int]] = {}

    def of(self, key: _Key, draw: Callable[[], Iterator[Arrival]]) -> Iterator[Arrival]:
        """Return the arrivals that `draw` yields, from the cache if possible. They depend on `key`
        alone.
        """
        if key in self._kept:
            return iter(self._kept[key][0])
        drawn, held, size = draw(), [], 0
        for arrival in drawn:
            held.append(arrival)
            size += 1 + len(arrival.blocks)
            if size > DRAWN_MAX:
                return chain(held, drawn)
        self._kept[key] = held, size
        while sum(size for _, size in self._kept.values()) > DRAWN_MAX:
            del self._kept[next(iter(self._kept))]
        return iter(held)


_DRAWN: Final = _Drawn()


class Blocks(Struct, frozen=True, kw_only=True):
    """Number and length of the blocks of time (or sessions) into which a recorded trace is cut for
    resampling.
    """

    count: int
    block_s: Seconds
    """Length of each block in seconds; 0 if each block is one session."""

    def __str__(self) -> str:
        return (
            f"{self.count} blocks of {self.block_s:.4g} s"
            if self.block_s
            else f"{self.count} sessions"
        )


class Variation(Struct, kw_only=True):
    """The requests of one repetition of a simulation: the trace itself, a new random draw, or a
    resample.
    """

    arrivals: Iterator[Arrival]
    generated: bool = False
    """True if the requests are a new random draw of a generated workload; False in repetition 0,
    which is the trace itself.
    """
    blocks: Blocks | None = None
    """The blocks from which the requests were resampled, or None if they were not resampled."""


def varied(
    trace: Trace,
    repetition: int,
    *,
    seed: int,
    requests_max: int | None,
    requests_from: int = 0,
) -> Variation:
    """Return the traffic of one repetition. Repetition 0 is the trace itself. A later repetition is
    a new draw of a generated workload, by the workload's own seed plus the number of the repetition,
    or a resample of a recorded trace, which `seed` decides.

    The first `requests_from` requests are skipped, and at most `requests_max` of those that follow
    are used; None for all. Raises the errors of iterating over the trace, and `TraceError` if a
    recorded trace is too large to be resampled in memory.
    """

    def part(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        end = None if requests_max is None else requests_from + requests_max
        taken = islice(arrivals, requests_from, end)
        return from_zero(taken) if requests_from else taken

    if not repetition:
        return Variation(arrivals=part(trace))
    generated = trace.generated()
    if generated is not None:
        named = generated.seed
        drawn_from = trace.options.seed if named is None else named + repetition
        if requests_from:
            key = (generated, drawn_from, requests_from, requests_max)
            arrivals = _DRAWN.of(key, lambda: part(from_zero(generated.arrivals(drawn_from))))
            return Variation(arrivals=arrivals, generated=True)
        return Variation(arrivals=part(from_zero(generated.arrivals(drawn_from))), generated=True)
    given: list[Arrival] = []
    held = 0
    for arrival in part(trace):
        given.append(arrival)
        held += 1 + len(arrival.blocks)
        if held > HELD_MAX:
            raise TraceError(
                str(trace.path),
                0,
                "",
                f"Expected at most {HELD_MAX:,} requests and blocks to resample; the first "
                f"{len(given):,} requests have more; limit them with --requests",
            )
    blocks, arrivals = resampled(given, seed=seed)
    return Variation(arrivals=arrivals, blocks=blocks)


def resampled(given: Sequence[Arrival], *, seed: int) -> tuple[Blocks, Iterator[Arrival]]:
    """Draw blocks of time from the trace `given` with replacement, as many as it has.

    Return the blocks and the resampled requests. `given` is in order of time.
    """
    blocks, members = _cut(given)
    random = Random(f"{seed}:resample")
    drawn = [random.randrange(blocks.count) for _ in range(blocks.count)]
    return blocks, _laid(members, drawn, blocks, end_s=given[-1].time_s if given else 0.0)


def _cut(given: Sequence[Arrival]) -> tuple[Blocks, list[list[Arrival]]]:
    """Return the blocks into which the trace is cut, and the requests of each block in order."""
    sessions: dict[int, list[Arrival]] = {}
    for arrival, session in zip(given, sessions_of(given).values(), strict=True):
        sessions.setdefault(session, []).append(arrival)
    begins_s = [requests[0].time_s for requests in sessions.values()]
    # The span ends with the last session's start, because no new sessions arrive after it.
    span_s = max(begins_s, default=0.0)
    number = min(max(math.ceil(span_s / BLOCK_S), BLOCKS_MIN), BLOCKS_MAX)
    block_s = span_s / number
    members: list[list[Arrival]] = [[] for _ in range(number)]
    later = 0
    for time_s, requests in zip(begins_s, sessions.values(), strict=True):
        at = min(int(time_s / block_s), number - 1) if block_s else 0
        members[at].extend(requests)
        later += sum(1 for one in requests if one.time_s > (at + 1) * block_s)
    long_sessions = 2 * later > len(given)
    if not block_s or (long_sessions and 2 * sum(map(bool, members)) <= number):
        return Blocks(count=len(sessions), block_s=0.0), list(sessions.values())
    return Blocks(count=number, block_s=block_s), members


def sessions_of(given: Iterable[Arrival]) -> dict[int, int]:
    """Return the session of each request: maps its index to the index of the session's first
    request. `given` is in order of time.
    """
    first: dict[int, int] = {}
    by_name: dict[str, int] = {}
    by_end: dict[int, tuple[int, Seconds]] = {}
    """Session of the latest prompt that ended with a block, and its arrival time, by id of that
    block.
    """
    for arrival in given:
        session = arrival.index
        if arrival.after is not None and arrival.after in first:
            session = first[arrival.after]
        elif arrival.session:
            session = by_name.setdefault(arrival.session, session)
        else:
            session = _continued(arrival, by_end, session)
        if arrival.session:
            by_name.setdefault(arrival.session, session)
        first[arrival.index] = session
    return first


def _continued(arrival: Arrival, by_end: dict[int, tuple[int, Seconds]], otherwise: int) -> int:
    """Return the session (by its first request's index) of the longest earlier prompt with which
    this prompt begins and that is shorter by at least one full block, or `otherwise` if there is
    none at most `SESSION_GAP_S` before. Record that the session now ends with this prompt, and
    forget the ends that were looked up.
    """
    full = arrival.blocks[: sum(1 for _ in arrival.spans())]
    session = otherwise
    for end in reversed(full[:-1]):
        found = by_end.pop(end, None)
        if found is not None and arrival.time_s - found[1] <= SESSION_GAP_S:
            session = found[0]
            break
    if full:
        by_end[full[-1]] = (session, arrival.time_s)
    return session


def _laid(
    members: Sequence[Sequence[Arrival]], drawn: Sequence[int], blocks: Blocks, *, end_s: Seconds
) -> Iterator[Arrival]:
    """Yield the requests of the blocks `drawn`, end to end in order of time and with new indices.

    `end_s` is the time of the last request in the trace; a request that would come later moves to
    the beginning.
    """
    owner = _owners(members)
    fresh = (number for number in count(1) if number not in owner)
    copies = [0] * blocks.count
    moved: list[tuple[Seconds, int, int, Arrival]] = []
    for place, block in enumerate(drawn):
        shift_s = (place - block) * blocks.block_s
        copy = copies[block]
        copies[block] += 1
        renamed: dict[int, int] = {}
        for arrival in members[block]:
            time_s = arrival.time_s + shift_s
            if time_s > end_s:
                time_s %= end_s
            one = _as_copy(arrival, block, copy, owner, renamed, fresh) if copy else arrival
            moved.append((time_s, place, arrival.index, one))
    moved.sort(key=lambda entry: entry[:3])
    indices = {(place, index): number for number, (_, place, index, _) in enumerate(moved)}
    for number, (time_s, place, _, arrival) in enumerate(moved):
        after = None
        if arrival.after is not None:
            # A request that moved to the beginning no longer waits for an answer.
            after = indices.get((place, arrival.after))
            after = after if after is not None and after < number else None
        yield replace(arrival, index=number, time_s=time_s, after=after)


def _owners(members: Sequence[Sequence[Arrival]]) -> dict[int, int]:
    """Return the block in which a text occurs, by the text's id; -1 if it occurs in several blocks."""
    owner: dict[int, int] = {}
    for block, arrivals in enumerate(members):
        for arrival in arrivals:
            for text in arrival.blocks:
                if owner.setdefault(text, block) != block:
                    owner[text] = -1
            if arrival.answer is not None and owner.setdefault(arrival.answer, block) != block:
                owner[arrival.answer] = -1
    return owner


def _as_copy(
    arrival: Arrival,
    block: int,
    copy: int,
    owner: dict[int, int],
    renamed: dict[int, int],
    fresh: Iterator[int],
) -> Arrival:
    """Return the request of a repeated block as if another user sent it: with new ids for text of
    this block only, a new session name, and no raw body. All requests of one copy share `renamed`.
    """

    def other(text: int) -> int:
        if owner[text] != block:
            return text
        if text not in renamed:
            renamed[text] = next(fresh)
        return renamed[text]

    return replace(
        arrival,
        blocks=tuple(map(other, arrival.blocks)),
        answer=None if arrival.answer is None else other(arrival.answer),
        session=arrival.session and f"{arrival.session}~{copy}",
        # A header may name the session too.
        headers=tuple(
            (name, f"{value}~{copy}" if arrival.session and value == arrival.session else value)
            for name, value in arrival.headers
        ),
        # The raw bytes are those of the first copy, so they are dropped.
        path="",
        body=b"",
    )
