"""The requests of a journal as lines of the capture format: each request with its answer.

The line of a request follows when it ends, because the length of its answer is known only then. It
follows at most `BEHIND_MAX` requests late, so that readers need not look far back.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from epp.core.journal.events import (
    Completed,
    Configured,
    Event,
    FirstOutput,
    Opened,
    Replaced,
    Rescheduled,
    Scheduled,
    Shape,
)
from epp.core.journal.lines import CaptureLine
from epp.core.knowledge.inflight import (
    OUTPUT_TOKENS_ESTIMATE,
    SECONDS_PER_OUTPUT_TOKEN_ESTIMATE,
)
from epp.core.knowledge.latency import Slo
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import Seconds

BEHIND_MAX: Final = 8_000
"""Maximum number of later requests whose lines come before that of a request. Readers sort lines
that are at most 10,000 out of order.
"""
_OUTPUT_TOKENS_MAX: Final = 10_000_000
_FAILED_FROM: Final = 400
"""Lowest HTTP status of responses that count as failed. The answer tokens of a
failed request are not estimated.
"""


def request_lines(events: Iterable[Event]) -> Iterator[CaptureLine]:
    """Yield a line of the capture format for each request in the events of one process. A request
    whose `shape` is missing has none.
    """
    lines = _Lines()
    for event in events:
        yield from lines.feed(event)
    yield from lines.rest()


class _Lines:
    def __init__(self) -> None:
        self._unix_s: Seconds = 0.0
        self._block_tokens = 64
        self._names: dict[int, str] = {}
        """Name of the endpoint in each slot, by slot."""
        self._open: dict[int, tuple[Seconds, CaptureLine]] = {}
        """Arrival time and unfinished line of each request that has not ended, by number of the
        request, in ascending order.
        """

    def feed(self, event: Event) -> Iterator[CaptureLine]:
        match event:
            case Opened(unix_s=unix_s):
                self._unix_s = unix_s
            case Configured(block_tokens=block_tokens):
                if block_tokens != self._block_tokens:
                    yield from self.rest()
                self._block_tokens = block_tokens
            case Replaced(members=members):
                self._names = {member.slot: member.name for member in members}
            case Scheduled(shape=Shape() as shape):
                yield from self._scheduled(event, shape)
            case FirstOutput(at_s=at_s, request=number) if number in self._open:
                asked_at_s, line = self._open[number]
                line.first_token_s = line.first_token_s or round(at_s - asked_at_s, 6)
            case Rescheduled(request=number, slot=slot) if number in self._open:
                self._open[number][1].endpoint = self._names.get(slot, "")
            case Completed(request=number) if number in self._open:
                yield self._ended(event)

    def rest(self) -> Iterator[CaptureLine]:
        """Yield the unfinished capture line of each request whose end was not among the events so
        far, and forget these requests.
        """
        for number in tuple(self._open):
            yield self._unfinished(number)

    def _scheduled(self, event: Scheduled, shape: Shape) -> Iterator[CaptureLine]:
        line = request_line(shape, event.at_s + self._unix_s, self._block_tokens)
        line.request = event.request
        line.endpoint = self._names.get(event.slot, "")
        self._open[event.request] = event.at_s, line
        if event.refused:
            yield self._unfinished(event.request)
        oldest = next(iter(self._open), event.request)
        if event.request - oldest > BEHIND_MAX:
            yield self._unfinished(oldest)

    def _ended(self, event: Completed) -> CaptureLine:
        asked_at_s, line = self._open.pop(event.request)
        line.end_s = round(event.at_s - asked_at_s, 6)
        line.status = event.status
        line.cached_tokens = event.cached_tokens
        if event.output_tokens is not None:
            line.output_tokens = event.output_tokens
        elif event.status is None or event.status < _FAILED_FROM:
            guess = round(line.end_s / SECONDS_PER_OUTPUT_TOKEN_ESTIMATE)
            _guess(line, max(1, guess))
        return line

    def _unfinished(self, number: int) -> CaptureLine:
        _, line = self._open.pop(number)
        if line.endpoint:
            _guess(line, OUTPUT_TOKENS_ESTIMATE)
        return line


def request_line(shape: Shape, time_s: Seconds, block_tokens: int) -> CaptureLine:
    """Return the line of a request that arrived at `time_s` (Unix time) and has not been answered.
    `block_tokens` is the number of tokens in a block of `shape`. The prompt length of the line is at
    least that of its blocks.
    """
    first, *others = shape.chains or (b"",)
    line = CaptureLine(
        time_s=round(time_s, 6),
        prompt_tokens=shape.prompt_tokens,
        output_tokens=0,
        output_tokens_max=shape.output_tokens_max,
        model=shape.model,
        cache_salt=shape.cache_salt,
        session=shape.session,
        priority=shape.priority,
        more=tuple(others),
        token_blocks=shape.token_chains,
        known_tokens=shape.known_tokens,
        media=shape.media,
        headers=Slo(shape.ttft_slo_s, shape.tpot_slo_s).headers(),
    )
    blocks = len(first) // HASH_BYTES
    whole, rest = divmod(line.prompt_tokens, block_tokens)
    line.prompt_tokens = max(line.prompt_tokens, blocks * block_tokens)
    if blocks >= whole or whole + bool(rest) == blocks:
        line.blocks = first
    else:
        # If only a part of the prompt is hashed, the rest is unique, which only `parts` can
        # express.
        line.parts = tuple(
            (int.from_bytes(first[at : at + HASH_BYTES], "little"), block_tokens)
            for at in range(0, len(first), HASH_BYTES)
        )
    return line


def shape_of_line(line: CaptureLine) -> Shape:
    """Return the parts of the request in `line` that affect its placement."""
    slo = Slo.in_headers(line.headers)
    first = line.blocks or b"".join(block.to_bytes(HASH_BYTES, "little") for block, _ in line.parts)
    return Shape(
        model=line.model,
        cache_salt=line.cache_salt,
        session=line.session,
        prompt_tokens=line.prompt_tokens,
        output_tokens_max=line.output_tokens_max,
        priority=line.priority,
        chains=(first, *line.more),
        token_chains=line.token_blocks,
        media=line.media,
        known_tokens=line.known_tokens,
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
    )


def _guess(line: CaptureLine, output_tokens: int) -> None:
    most = line.output_tokens_max or _OUTPUT_TOKENS_MAX
    line.output_tokens = min(output_tokens, most)
    line.estimated = True
