"""Conversion of the notes of a `CaptureWitness`, which may contain text of clients, to the events
of a journal. The module has no I/O and no thread.
"""

from msgspec import structs

from epp.core.journal.events import (
    Configured,
    Decided,
    Event,
    Heard,
    Note,
    Observed,
    Replaced,
    Seen,
    page_of,
    same_page,
    shape_of,
    told_of,
)
from epp.core.journal.lines import Salt
from epp.core.types import EndpointMetrics


class Transcript:
    """A converter of notes to events without text of clients. It also stores the state that each
    new segment repeats.
    """

    def __init__(self, salt: Salt) -> None:
        self._salt = salt
        self._configured: Configured | None = None
        self._replaced: Replaced | None = None
        self._observed: dict[int, Observed] = {}
        """Last successful scrape of each endpoint, as an event with its values, by slot."""
        self._scraped: dict[int, EndpointMetrics] = {}
        """Last scraped values of each endpoint before adapter names are hashed, by slot."""
        self.decisions = 0
        """Number of the decision that was recorded last, as the scheduler counts decisions."""

    def block_tokens(self, note: Note | None = None) -> int:
        """Return the number of tokens in a block of the requests that follow `note`; if `note` is
        None, of the requests that come now.
        """
        configured = note if isinstance(note, Configured) else self._configured
        return 64 if configured is None else configured.block_tokens

    def event(self, note: Note) -> Event:
        """Return the event for `note`, without text of clients. Call this in the order of the
        notes.
        """
        match note:
            case Decided(event, asked):
                self.decisions = event.decision or self.decisions
                return structs.replace(event, shape=shape_of(asked, self._salt))
            case Seen():
                return self._see(note)
            case Heard():
                return told_of(note, self._salt)
            case Configured():
                self._configured = note
            case Replaced():
                self._replaced = note
                for slot in self._observed.keys() - {member.slot for member in note.members}:
                    del self._observed[slot], self._scraped[slot]
        return note

    def context(self) -> list[Event]:
        """Return the events that repeat the present configuration, pool and metrics, for the
        beginning of a segment.
        """
        state = (self._configured, self._replaced, *self._observed.values())
        return [event for event in state if event is not None]

    def _see(self, seen: Seen) -> Observed:
        slot, metrics = seen.slot, seen.metrics
        before, last = self._scraped.get(slot), self._observed.get(slot)
        self._scraped[slot] = metrics
        if before is not None and last is not None and same_page(before, metrics):
            page = last.page
        else:
            page = page_of(metrics, self._salt)
        whole = self._observed[slot] = Observed(at_s=seen.at_s, slot=slot, page=page)
        if last is not None and last.page and page and same_page(last.page, page):
            return Observed(at_s=seen.at_s, slot=slot)
        return whole
