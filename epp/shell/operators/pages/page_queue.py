"""Pages are made one at a time, and few wait for their turn: what readers cost the event loop is
bounded, however many there are.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final, TypeAlias, TypeVar

from aiohttp import hdrs, web

WAITING_MAX: Final = 8
"""Whoever comes when this many wait is told 503."""
ROWS_PER_TURN: Final = 25
"""About 1 ms of a table, the longest that it keeps the event loop from deciding."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class PageQueue:
    """Those that wait to be made in a `turn`, which other queues may share: then pages of both are
    made one at a time, and whoever fills the one queue keeps nobody out of the other.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self.waiting = 0
        """Requests whose page is made or waits for that."""

    def queued(self, handler: Handler) -> Handler:
        """`handler` in its turn. It waits for nothing but turns of the loop: others wait for it."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if self.waiting >= WAITING_MAX:
                return web.Response(
                    status=503,
                    headers={hdrs.RETRY_AFTER: "1"},
                    text=f"{WAITING_MAX} requests wait for their page; expected fewer at once\n",
                )
            self.waiting += 1
            try:
                async with self._turn:
                    return await handler(request)
            finally:
                self.waiting -= 1

        return answer


async def in_turns(rows: Iterable[T]) -> AsyncIterator[T]:
    """`rows`; the event loop has a turn after every `ROWS_PER_TURN`."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % ROWS_PER_TURN == 0:
            await asyncio.sleep(0)
