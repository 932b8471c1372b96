"""Merging of generated sessions into one trace in order of time; only active sessions are in
memory.

Each turn of a session waits for the previous answer and then for its think time. A session may
branch: its child sessions begin when the answer to the turn that starts them is complete.
"""

import heapq
from collections.abc import Iterable, Iterator

from msgspec import Struct

from epp.core.types import Seconds
from sim.traces.arrival import Arrival


class Turn(Struct, frozen=True):
    """One generated request of a session."""

    parts: tuple[tuple[int, int], ...]
    """Parts of the prompt as (block id, tokens), all shareable, with at least one token in total.
    """
    output_tokens: int
    answer: int | None = None
    think_s: Seconds = 0.0
    adapter: str = ""
    session: str = ""
    number: int = 0
    """Position of the turn in its session, from 0."""
    children: tuple["Session", ...] = ()


class Session(Struct, kw_only=True):
    """A generated session: requests of which each waits for the previous answer."""

    turns: Iterator[Turn]
    start_s: Seconds = 0.0
    """Start time in seconds since the beginning of the trace. For a child session, the pause in
    seconds after the answer that starts it.
    """


class _Next(Struct):
    """The next turn of a session that is to be merged, with the index of the request for whose
    answer it waits (None if it does not wait).
    """

    session: Session
    turn: Turn
    after: int | None
    think_s: Seconds


def arrival_of(
    turn: Turn, *, index: int, time_s: Seconds, after: int | None, think_s: Seconds = 0.0
) -> Arrival:
    """Return the request of a turn as an arrival with the given index and time."""
    return Arrival(
        index=index,
        time_s=time_s,
        prompt_tokens=sum(tokens for _, tokens in turn.parts),
        output_tokens=turn.output_tokens,
        blocks=tuple(part for part, _ in turn.parts),
        lengths=tuple(tokens for _, tokens in turn.parts),
        answer=turn.answer,
        adapter=turn.adapter,
        session=turn.session,
        turn=turn.number,
        after=after,
        think_s=think_s,
    )


def merge(sessions: Iterable[Session], requests_max: int | None = None) -> Iterator[Arrival]:
    """Merge `sessions`, which are ordered by `start_s`, into at most `requests_max` arrivals in
    order of time.

    Arrival times are those that requests would have if answers took no time.
    """
    coming = iter(sessions)
    later = next(coming, None)
    heap: list[tuple[Seconds, int, _Next]] = []
    order = 0
    index = 0

    def begin(session: Session, at: Seconds, after: int | None, think_s: Seconds) -> None:
        nonlocal order
        turn = next(session.turns, None)
        if turn is not None:
            entry = _Next(session, turn, after, think_s)
            heapq.heappush(heap, (at, order, entry))
            order += 1

    while heap or later is not None:
        if later is not None and (not heap or later.start_s <= heap[0][0]):
            begin(later, later.start_s, None, 0.0)
            later = next(coming, None)
            continue
        if index == requests_max:
            return
        now, _, due = heapq.heappop(heap)
        turn, session = due.turn, due.session
        yield arrival_of(turn, index=index, time_s=now, after=due.after, think_s=due.think_s)
        following = next(session.turns, None)
        if following is not None:
            entry = _Next(session, following, index, following.think_s)
            heapq.heappush(heap, (now + following.think_s, order, entry))
            order += 1
        for child in turn.children:
            begin(child, now + child.start_s, index, child.start_s)
        index += 1
