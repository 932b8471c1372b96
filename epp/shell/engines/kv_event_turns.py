"""The processing of received KV events in turns, so that engines use at most a part of the event
loop's time.

Received data is read from all connections together (`gathered_reads`), added to subscriptions, and
processed in turns of 3 ms with pauses of 4 ms. Engines that send without pause therefore use at
most about three sevenths of the loop's time. A connection with too much unprocessed data is not
read, and its engine drops what it cannot send.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from epp.core.subscription import Asked
from epp.core.types import Seconds
from epp.shell.engines.gathered_reads import GatheredReads
from epp.shell.engines.kv_event_source import Source

TURN_S: Final[Seconds] = 0.003
PAUSE_S: Final[Seconds] = 0.004
"""Pause in seconds before a turn that processes events. Processing messages collected over a pause
takes less time.
"""
IDLE_PAUSE_S: Final[Seconds] = 0.016
"""Longest pause in seconds between two turns while no KV-cache events arrive."""
AT_ONCE_MAX: Final = 32
"""Maximum number of ranks from which one frame of events is decoded before any of these frames is
processed.
"""
BLOCKS_MAX: Final = 256
"""Number of blocks of one rank, in the events that were processed, after which the next rank has
its turn.
"""
WAITING_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum number of unprocessed bytes of one rank's events. Above it the rank's connection is not
read.
"""


class Turns:
    """The turns in which the events of all connections of a picker are read and processed. `asked`
    is called with a rank's source and the replays that its subscription requests.
    """

    def __init__(
        self, clock: Callable[[], Seconds], asked: Callable[[Source, Sequence[Asked]], None]
    ) -> None:
        self.reads = GatheredReads(clock)
        self._clock = clock
        self._asked = asked
        self._busy: OrderedDict[Source, None] = OrderedDict()
        """Sources with unprocessed events, in the order of their turns."""
        self._turn: asyncio.Handle | None = None
        self._pause_s = PAUSE_S
        """Pause in seconds before the next turn in which events are processed."""

    def gather(self, source: Source) -> None:
        """Read the open connection of the rank `source` in turns from now on."""
        if source.lines is not None:
            source.lines.gather(self.reads)
            self._await_turn()

    def add(self, source: Source) -> None:
        """Schedule a turn for the rank `source` if its subscription has unprocessed events. Stop
        reading its connection if they have more than `WAITING_BYTES_MAX` bytes.
        """
        subscription = source.subscription
        if subscription is None or not subscription.works:
            return
        self._busy.setdefault(source)
        if source.lines is not None and subscription.waiting_bytes > WAITING_BYTES_MAX:
            source.lines.read(on=False)
        self._await_turn()

    def close(self) -> None:
        """Cancel the scheduled turns in which events are processed, and stop reading connections."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self.reads.close()

    def _await_turn(self) -> None:
        if self._turn is None:
            self._pause_s = PAUSE_S
            self._turn = asyncio.get_running_loop().call_later(PAUSE_S, self._work)

    def _work(self) -> None:
        try:
            self._take_turn(self._clock())
        finally:
            self._turn = None
            if self._busy or self.reads:
                self._turn = asyncio.get_running_loop().call_later(self._pause_s, self._work)

    def _take_turn(self, now: Seconds) -> None:
        """Read received data, then process the events of some endpoints at a time, for at most
        `TURN_S` seconds in all.
        """
        until_s = now + TURN_S
        # Reading takes at most half of the turn, so that a fast sender leaves time for processing.
        fetched = self.reads.fetch(now + TURN_S / 2)
        self._pause_s = PAUSE_S if fetched or self._busy else min(2 * self._pause_s, IDLE_PAUSE_S)
        while self._busy and self._clock() < until_s:
            some: list[Source] = []
            while self._busy and len(some) < AT_ONCE_MAX and self._clock() < until_s:
                source, _ = self._busy.popitem(last=False)
                if source.subscription is not None:
                    source.subscription.read()
                    some.append(source)
            for source in some:
                if self._clock() < until_s:
                    self._process(source)
                else:
                    self._busy[source] = None

    def _process(self, source: Source) -> None:
        """Process received events of one rank, with up to about `BLOCKS_MAX` blocks at a time.
        Resume reading its connection when half of `WAITING_BYTES_MAX` or less is left.
        """
        subscription = source.subscription
        if subscription is None:
            return
        asked = subscription.work(self._clock(), blocks_max=BLOCKS_MAX)
        if subscription.works:
            self._busy[source] = None
        if source.lines is not None and subscription.waiting_bytes <= WAITING_BYTES_MAX // 2:
            source.lines.read(on=True)
        if asked:
            self._asked(source, asked)
