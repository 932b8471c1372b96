"""Create pages one at a time with a bounded queue, so that readers cannot overload the event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final, TypeAlias, TypeVar

from aiohttp import hdrs, web

WAITING_MAX: Final = 8
"""Maximum number of requests in one queue of pages, including the one whose page is being created;
further requests get status 503.
"""
ROWS_PER_TURN: Final = 25
"""Number of table rows that are created at once, which blocks the event loop for about 1 ms."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class PageQueue:
    """A queue of pages to create, each while holding the lock `turn`. Several queues may share
    one lock: their pages are created one at a time, but a full queue does not block others.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self.waiting = 0
        """Number of requests whose page is being created or waits for that."""

    def queued(self, handler: Handler) -> Handler:
        """Wrap the HTTP `handler` so that it runs when it is its turn, or answers with status 503
        if the queue is full. The handler may wait only for turns of the event loop.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            if self.waiting >= WAITING_MAX:
                return web.Response(
                    status=503,
                    headers={hdrs.RETRY_AFTER: "1"},
                    text=f"{WAITING_MAX} requests already wait for a page, expected fewer at "
                    "once\n",
                )
            self.waiting += 1
            try:
                async with self._turn:
                    return await handler(request)
            finally:
                self.waiting -= 1

        return answer


async def in_turns(rows: Iterable[T]) -> AsyncIterator[T]:
    """Yield `rows` of a table; the event loop runs after every `ROWS_PER_TURN` rows."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % ROWS_PER_TURN == 0:
            await asyncio.sleep(0)
