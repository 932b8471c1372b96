"""The lines of a capture, made from the records of a witness. Pure, without a thread.

The line of a request is written when it ends, because the length of its answer is known only then.
It is written at most `BEHIND_MAX` requests late, so that readers need not look far back.
"""

from typing import Final

import msgspec
from msgspec import Struct, structs

from epp.core.capture.events import (
    EVENTS_FORMAT,
    EVENTS_VERSION,
    Asked,
    Configured,
    Decided,
    Ended,
    Event,
    FirstOutput,
    Heard,
    Note,
    Observed,
    Opened,
    Replaced,
    Rescheduled,
    Seen,
    page_of,
    same_page,
    told_of,
)
from epp.core.capture.lines import (
    FORMAT_NAME,
    VERSION,
    CaptureHeader,
    CaptureLine,
    Salt,
    packed_chain,
)
from epp.core.knowledge.inflight import (
    OUTPUT_TOKENS_ESTIMATE,
    SECONDS_PER_OUTPUT_TOKEN_ESTIMATE,
)
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import EndpointMetrics, Seconds

BEHIND_MAX: Final = 8_000
"""Maximum delay of a line in requests. Readers sort lines that are at most 10,000 out of order."""
_PROMPT_TOKENS_MAX: Final = 10_000_000
_FAILED_FROM: Final = 400
"""Lowest status of a response without an answer."""


class Origin(Struct, frozen=True, kw_only=True):
    """The captured process."""

    name: str
    seed: int
    share: float
    unix_s: float
    """Offset from its clock to the time since 1970."""


class Transcript:
    """A writer that turns notes into lines, which `take` returns."""

    def __init__(self, origin: Origin, salt: Salt) -> None:
        self._origin = origin
        self._salt = salt
        self._encode = msgspec.json.Encoder().encode
        self._requests: list[bytes] = []
        self._events: list[bytes] = []
        self._pending_bytes = 0
        self._asked: dict[int, tuple[Seconds, CaptureLine]] = {}
        """Time and unfinished line of each open request by number, in the order of the numbers."""
        self._configured: Configured | None = None
        self._replaced: Replaced | None = None
        self._names: dict[int, str] = {}
        """Names of the endpoints by slot."""
        self._observed: dict[int, Observed] = {}
        """Last observation by slot, with its page."""
        self._told: dict[int, EndpointMetrics] = {}
        """Metrics page most recently written to this file, by slot."""
        self._scraped: dict[int, tuple[EndpointMetrics, EndpointMetrics]] = {}
        """Last page by slot, with its written form."""
        self._decisions = 0
        self._file = -1
        self.requests = 0
        """Number of request lines so far."""
        self.events = 0

    @property
    def block_tokens(self) -> int:
        """Return the block size in tokens of the requests that are noted now."""
        return 64 if self._configured is None else self._configured.block_tokens

    def begin_file(self, now: Seconds) -> int:
        """Start another file and return its number, from 0. Call `take` first for the previous
        lines.
        """
        self._file += 1
        self._told.clear()
        origin = self._origin
        header = CaptureHeader(
            format=FORMAT_NAME,
            version=VERSION,
            block_tokens=self.block_tokens,
            source=f"epp serve, {origin.name}, file {self._file}",
        )
        self._requests.append(self._encode(header) + b"\n")
        self._write(
            Opened(
                at_s=now,
                format=EVENTS_FORMAT,
                version=EVENTS_VERSION,
                origin=origin.name,
                file=self._file,
                seed=origin.seed,
                salt=self._salt.identity,
                share=origin.share,
                unix_s=origin.unix_s,
                decisions=self._decisions,
                configured=self._configured,
                replaced=self._replaced,
                observed=tuple(self._observed.values()),
            )
        )
        return self._file

    def changes_blocks(self, note: Note) -> bool:
        """Return whether requests after `note` have another block size, which requires another
        file.
        """
        return isinstance(note, Configured) and note.block_tokens != self.block_tokens

    def note(self, note: Note) -> None:
        """Add the lines of `note`."""
        match note:
            case Decided():
                self._decide(note)
                self._write(note.event)
            case Seen():
                self._see(note)
            case Heard():
                self._write(told_of(note, self._salt))
            case Ended():
                self._end(note)
                self._write(note.event)
            case _:
                self._remember(note)
                self._write(note)

    def finish(self) -> None:
        """Write the lines of requests that have not ended."""
        for number in tuple(self._asked):
            self._unfinished(number)

    @property
    def pending_bytes(self) -> int:
        """Return the length of the lines that `take` would return."""
        return self._pending_bytes

    def take(self) -> tuple[bytes, bytes]:
        """Return the lines of requests and of events since the last call."""
        taken = b"".join(self._requests), b"".join(self._events)
        self._requests.clear()
        self._events.clear()
        self._pending_bytes = 0
        return taken

    def _write(self, event: Event) -> None:
        line = self._encode(event) + b"\n"
        self._events.append(line)
        self._pending_bytes += len(line)
        self.events += 1

    def _remember(self, event: Event) -> None:
        match event:
            case Configured():
                self._configured = event
            case Replaced():
                self._replaced = event
                self._names = {member.slot: member.name for member in event.members}
                for slot in self._observed.keys() - self._names.keys():
                    del self._observed[slot]
                    self._told.pop(slot, None)
                    self._scraped.pop(slot, None)
            case FirstOutput(at_s=at_s, request=number) if number in self._asked:
                asked_at_s, line = self._asked[number]
                line.first_token_s = line.first_token_s or round(at_s - asked_at_s, 6)
            case Rescheduled(request=number, slot=slot) if number in self._asked:
                self._asked[number][1].endpoint = self._names.get(slot, "")

    def _see(self, seen: Seen) -> None:
        slot, metrics = seen.slot, seen.metrics
        before = self._scraped.get(slot)
        if before is not None and same_page(before[0], metrics):
            page = before[1]
        else:
            page = page_of(metrics, self._salt)
        self._scraped[slot] = metrics, page
        whole = Observed(at_s=seen.at_s, slot=slot, page=page)
        self._observed[slot] = whole
        told = self._told.get(slot)
        if told is not None and same_page(told, page):
            self._write(structs.replace(whole, page=None))
        else:
            self._told[slot] = page
            self._write(whole)

    def _decide(self, decided: Decided) -> None:
        event = decided.event
        line = self._line(decided.asked, event.at_s)
        line.request = event.request
        line.endpoint = decided.endpoint
        self._decisions = event.decision or self._decisions
        self._asked[event.request] = event.at_s, line
        if event.refused:
            self._unfinished(event.request)
        oldest = next(iter(self._asked), event.request)
        if event.request - oldest > BEHIND_MAX:
            self._unfinished(oldest)

    def _line(self, asked: Asked, at_s: Seconds) -> CaptureLine:
        salt = self._salt
        first, *others = [salt.blocks(packed_chain(chain)) for chain in asked.chains] or [b""]
        line = CaptureLine(
            time_s=round(at_s + self._origin.unix_s, 6),
            prompt_tokens=min(max(1, asked.prompt_tokens), _PROMPT_TOKENS_MAX),
            output_tokens=0,
            output_tokens_max=asked.output_tokens_max or None,
            model=salt.name(asked.model),
            cache_salt=salt.name(asked.cache_salt),
            session=salt.name(asked.session),
            priority=asked.priority,
            more=tuple(others),
            token_blocks=tuple(salt.blocks(packed_chain(chain)) for chain in asked.token_chains),
            known_tokens=0
            if asked.known_tokens == asked.prompt_tokens
            else min(asked.known_tokens, _PROMPT_TOKENS_MAX),
            media=salt.blocks(b"".join(item[:HASH_BYTES] for item in asked.media)),
        )
        blocks, size = len(first) // HASH_BYTES, self.block_tokens
        whole, rest = divmod(line.prompt_tokens, size)
        line.prompt_tokens = max(line.prompt_tokens, blocks * size)
        if blocks >= whole or whole + bool(rest) == blocks:
            line.blocks = first
        else:
            # If only a part of the prompt is hashed, the rest is unique, which only `parts` can
            # express.
            line.parts = tuple(
                (int.from_bytes(first[at : at + HASH_BYTES], "little"), size)
                for at in range(0, len(first), HASH_BYTES)
            )
        return line

    def _end(self, ended: Ended) -> None:
        event = ended.event
        if event.request not in self._asked:
            return
        asked_at_s, line = self._asked.pop(event.request)
        line.end_s = round(event.at_s - asked_at_s, 6)
        line.status = event.status
        line.cached_tokens = ended.cached_tokens
        if ended.output_tokens is not None:
            line.output_tokens = ended.output_tokens
        elif event.status is None or event.status < _FAILED_FROM:
            guess = round(line.end_s / SECONDS_PER_OUTPUT_TOKEN_ESTIMATE)
            _guess(line, max(1, guess))
        self._write_request(line)

    def _unfinished(self, number: int) -> None:
        _, line = self._asked.pop(number)
        if line.endpoint:
            _guess(line, OUTPUT_TOKENS_ESTIMATE)
        self._write_request(line)

    def _write_request(self, line: CaptureLine) -> None:
        encoded = self._encode(line) + b"\n"
        self._requests.append(encoded)
        self._pending_bytes += len(encoded)
        self.requests += 1


def _guess(line: CaptureLine, output_tokens: int) -> None:
    most = line.output_tokens_max or _PROMPT_TOKENS_MAX
    line.output_tokens = min(output_tokens, most)
    line.estimated = True
