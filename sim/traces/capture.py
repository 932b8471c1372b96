"""Homing's own capture format: requests with the ids of shared text, without the text itself.

A capture file has JSON lines: a header with format, version and block size, then one object for
each request. docs/capture-format.md describes the format.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import BinaryIO, Final

import msgspec

from epp.core.journal.lines import (
    FORMAT_NAME,
    VERSION,
    CaptureHeader,
    CaptureLine,
    Salt,
    pack_blocks,
)
from epp.core.knowledge.latency import Slo
from epp.core.prompt.blocks import HASH_BYTES
from sim.traces.arrival import Arrival, FieldError
from sim.traces.blocks import check_block_tokens, check_blocks, check_ids
from sim.traces.headers import headers_of
from sim.traces.reading import LineFormat, Parse, ReadOptions
from sim.traces.standard import Drawing
from sim.traces.workloads import Generated


class GeneratedHeader(CaptureHeader, kw_only=True, omit_defaults=True):
    """The first line of a capture file, with the parameters of generated traffic."""

    workload: Drawing | None = None
    """Parameters from which the requests were generated; None if the requests were recorded."""


def unpack_blocks(packed: bytes) -> tuple[int, ...]:
    """Return the block ids in the bytes of a capture line.

    Raises `FieldError` if the length is not a multiple of 8 bytes.
    """
    if len(packed) % HASH_BYTES:
        raise FieldError(
            "blocks", f"Expected {HASH_BYTES} bytes for each block, got {len(packed)} bytes"
        )
    words = array("Q", packed)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)


class CaptureWriter:
    """A writer of a capture file, one request after the other. The caller closes the file."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        block_tokens: int = 64,
        source: str = "",
        workload: Drawing | None = None,
    ) -> None:
        """Create the writer of a capture, and write the header line to `file`."""
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        self._block_tokens = block_tokens
        self._places = array("q")
        """Number of the line in the new capture (from 0, without the header), by index of the arrival in
        the original trace; -1 if it was not written.
        """
        self.lines = 0
        header = GeneratedHeader(
            format=FORMAT_NAME,
            version=VERSION,
            block_tokens=block_tokens,
            source=source,
            workload=workload,
        )
        # Format and version are never omitted, because they have no defaults.
        self._file.write(self._encode(header) + b"\n")

    def write(self, line: CaptureLine) -> None:
        """Append the line of one request to the capture file."""
        self._file.write(self._encode(line) + b"\n")
        self.lines += 1

    def write_arrival(self, arrival: Arrival, salt: Salt | None = None) -> None:
        """Append an arrival to the capture.

        `after` becomes a line number of the new capture, or None if that request was not written.
        The arrival time is rounded to microseconds. `salt` replaces ids, session names, cache salts and
        header values by keyed hashes, except the latencies that clients ask for in headers.
        """
        blocks: Iterable[int] = arrival.blocks
        answer = arrival.answer
        if salt is not None:
            blocks = map(salt.block, blocks)
            answer = None if answer is None else salt.block(answer)
        same_size = not arrival.lengths and arrival.block_tokens == self._block_tokens
        line = CaptureLine(
            time_s=round(arrival.time_s, 6),
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            # A limit of zero is valid but generates nothing, so captures do not have it.
            output_tokens_max=arrival.output_tokens_max or None,
            model=arrival.model,
            adapter=arrival.adapter,
            cache_salt=salt.name(arrival.cache_salt) if salt else arrival.cache_salt,
            session=salt.name(arrival.session) if salt else arrival.session,
            turn=arrival.turn,
            priority=arrival.priority,
            headers=_headers(arrival, salt),
            after=self._place(arrival.after),
            think_s=arrival.think_s,
            answer=answer,
        )
        if same_size:
            line.blocks = pack_blocks(blocks)
        else:
            lengths = (tokens for _, tokens in arrival.spans())
            line.parts = tuple(zip(blocks, lengths, strict=False))
        self._remember(arrival.index)
        self.write(line)

    def _place(self, index: int | None) -> int | None:
        if index is None or index >= len(self._places) or self._places[index] < 0:
            return None
        return self._places[index]

    def _remember(self, index: int) -> None:
        missing = index + 1 - len(self._places)
        if missing > 0:
            self._places.extend([-1] * missing)
        self._places[index] = self.lines


def _headers(arrival: Arrival, salt: Salt | None) -> dict[str, str]:
    """Return the headers of `arrival` with keyed hashes as values if there is a salt. The latencies
    that a client asks for stay as they are, because the simulated picker reads these numbers.
    """
    given = dict(arrival.headers)
    if salt is None:
        return given
    return {name: salt.name(value) for name, value in given.items()} | Slo.in_headers(
        given
    ).headers()


def _header(first: bytes) -> GeneratedHeader:
    header = msgspec.json.decode(first, type=GeneratedHeader)
    if header.format != FORMAT_NAME or header.version != VERSION:
        raise FieldError(
            "version",
            f"Expected {FORMAT_NAME} version {VERSION}, got {header.format} {header.version}",
        )
    return header


def _generated(first: bytes) -> Generated | None:
    drawing = _header(first).workload
    return None if drawing is None else drawing.generated()


def _capture(first: bytes, options: ReadOptions) -> Parse:
    header = _header(first)
    check_block_tokens(header.block_tokens)
    decode = msgspec.json.Decoder(CaptureLine).decode

    def parse(index: int, text: bytes) -> Arrival:
        line = decode(text)
        blocks = unpack_blocks(line.blocks)
        lengths: tuple[int, ...] = ()
        if line.parts:
            if blocks:
                raise FieldError("parts", "Expected either parts or blocks, got both")
            blocks = tuple(block for block, _ in line.parts)
            check_ids(blocks, "parts")
            lengths = tuple(tokens for _, tokens in line.parts)
            if sum(lengths) > line.prompt_tokens:
                raise FieldError("parts", f"Expected at most {line.prompt_tokens} tokens in parts")
        elif blocks:
            check_blocks(blocks, line.prompt_tokens, header.block_tokens, "blocks")
        if line.answer is not None:
            check_ids((line.answer,), "answer")
        if line.after is not None and line.after >= index:
            raise FieldError("after", f"Expected an earlier line than {index}, got {line.after}")
        return Arrival(
            index=index,
            time_s=line.time_s,
            prompt_tokens=line.prompt_tokens,
            output_tokens=max(1, line.output_tokens),
            output_tokens_max=line.output_tokens_max,
            blocks=blocks,
            block_tokens=header.block_tokens if blocks and not lengths else 0,
            lengths=lengths,
            answer=line.answer,
            model=line.model,
            adapter=line.adapter,
            cache_salt=line.cache_salt,
            session=line.session,
            turn=line.turn,
            priority=line.priority,
            headers=headers_of(line.headers) if line.headers else (),
            after=line.after,
            think_s=line.think_s,
        )

    return parse


CAPTURE: Final = LineFormat(
    name="capture",
    recognises=lambda line: FORMAT_NAME.encode() in line,
    parser=_capture,
    has_header=True,
    generated=_generated,
)
