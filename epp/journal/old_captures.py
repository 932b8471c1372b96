"""Reading of captures that versions before the journal wrote: `requests-*.jsonl.gz` beside
`events-*.jsonl.gz`.

A pair of files contains JSON lines. The line of a request has what the journal has in the records
`Scheduled` and `Completed`, and follows at most `BEHIND_MAX` requests late.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct, structs

from epp.core.expectation import misfit
from epp.core.journal import events as of
from epp.core.journal.lines import FORMAT_NAME, CaptureLine
from epp.core.journal.requests import BEHIND_MAX, shape_of_line
from epp.journal.problem import JournalError

EVENTS_NAME: Final = re.compile(r"events-(\w+-[0-9a-f]+)-(\d+)\.jsonl\.gz", re.ASCII)
REQUESTS_NAME: Final = re.compile(r"requests-(\w+-[0-9a-f]+)-(\d+)\.jsonl\.gz", re.ASCII)
"""Regular expressions for the names of an old capture's files.

Their groups are the origin and the number of the file.
"""
_EVENTS_FORMAT: Final = "homing-events"
_EVENTS_VERSION: Final = 1
_LINE_BYTES_MAX: Final = 16 * 2**20


class _Opened(Struct, frozen=True, kw_only=True, tag_field="event", tag="opened"):
    """The first line of an old capture's file of events."""

    at_s: float = 0.0
    format: str
    version: int
    origin: str
    file: int
    seed: int
    salt: str
    share: float
    unix_s: float
    decisions: int = 0
    configured: of.Configured | None = None
    replaced: of.Replaced | None = None
    observed: tuple[of.Observed, ...] = ()


_Event: TypeAlias = _Opened | of.SchedulerEvent


class CapturedRequests:
    """The request lines of one picker process in an old capture, by the number of the request."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._lines = _request_lines(files)
        self._waiting: dict[int, CaptureLine] = {}
        self._latest = -1
        self._ended = False

    def find(self, number: int) -> CaptureLine | None:
        """Return the line of request `number`, or None if it is missing.

        Each line is returned once. The numbers of successive calls must increase, except by small
        differences.
        """
        while number not in self._waiting and not self._ended:
            if self._latest > number + 2 * BEHIND_MAX:
                break
            line = next(self._lines, None)
            if line is None:
                self._ended = True
            elif line.request is not None:
                self._waiting[line.request] = line
                self._latest = max(self._latest, line.request)
        return self._waiting.pop(number, None)


def capture_records(path: Path, requests: CapturedRequests) -> Iterator[of.Event]:
    """Yield the events of an old capture's file, each decision with its request.

    Raises `JournalError`.
    """
    decode = msgspec.json.Decoder(_Event).decode
    answered: dict[int, CaptureLine] = {}
    for number, line in enumerate(text_lines(path), 1):
        try:
            event: _Event = decode(line)
        except msgspec.DecodeError as error:
            raise JournalError(misfit(f"{path}:{number}", error, _Event)) from None
        match event:
            case _Opened():
                yield from _opening(event, path)
            case of.Scheduled(request=request):
                asked = requests.find(request)
                if asked is not None:
                    event = structs.replace(event, shape=shape_of_line(asked))
                    if not event.refused:
                        answered[request] = asked
                yield event
            case of.Completed(request=request) if request in answered:
                yield _with_usage(event, answered.pop(request))
            case _:
                yield event


def _opening(opened: _Opened, path: Path) -> Iterator[of.Event]:
    if (opened.format, opened.version) != (_EVENTS_FORMAT, _EVENTS_VERSION):
        raise JournalError(
            f"{path}: expected {_EVENTS_FORMAT} version {_EVENTS_VERSION}, got {opened.format} "
            f"{opened.version}"
        )
    context = [one for one in (opened.configured, opened.replaced, *opened.observed) if one]
    yield of.Opened(
        at_s=opened.at_s,
        level=of.Level.INPUTS,
        origin=opened.origin,
        segment=opened.file,
        began_s=opened.at_s + opened.unix_s,
        unix_s=opened.unix_s,
        context=len(context),
        seed=opened.seed,
        salt=opened.salt,
        share=opened.share,
        decisions=opened.decisions,
    )
    yield from context


def _with_usage(event: of.Completed, line: CaptureLine) -> of.Completed:
    counted = None if line.estimated else line.output_tokens
    return structs.replace(event, output_tokens=counted, cached_tokens=line.cached_tokens)


def text_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a gzip file, whose end may be missing.

    Raises `JournalError` for a line that is too long, and `OSError`.
    """
    with gzip.open(path) as file:
        try:
            while line := file.readline(_LINE_BYTES_MAX):
                if not line.endswith(b"\n"):
                    if len(line) == _LINE_BYTES_MAX:
                        raise JournalError(
                            f"{path}: expected lines of less than {_LINE_BYTES_MAX} bytes"
                        )
                    return
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile):
            # The writer was killed, or is still writing.
            return


def header_block_sizes(files: Iterable[Path]) -> set[int]:
    """Return the block sizes in tokens that the first lines of an old capture's request files name;
    64 for a line that names none.
    """
    headers = (next(text_lines(path), b"{}") for path in files)
    found = [msgspec.json.decode(header, type=dict) for header in headers]
    return {header.get("block_tokens", 64) for header in found if header}


def request_texts(files: Iterable[Path]) -> Iterator[bytes]:
    """Yield the unchanged lines of an old capture's request files, without the first line of each
    file.
    """
    for path in files:
        lines = text_lines(path)
        next(lines, None)
        yield from lines


def _request_lines(files: Sequence[Path]) -> Iterator[CaptureLine]:
    decode = msgspec.json.Decoder(CaptureLine).decode
    for path in files:
        for number, line in enumerate(text_lines(path), 1):
            if number == 1 and FORMAT_NAME.encode() in line:
                continue
            try:
                yield decode(line)
            except msgspec.DecodeError as error:
                raise JournalError(misfit(f"{path}:{number}", error, CaptureLine)) from None
