"""The number of turns that an event loop gives to other tasks."""

import asyncio
from contextlib import asynccontextmanager


class Turns:
    """A count of the turns that a task got."""

    count = 0


@asynccontextmanager
async def counted_turns():
    """Count the turns that another task gets in the context."""
    turns = Turns()

    async def counting():
        while True:
            await asyncio.sleep(0)
            turns.count += 1

    task = asyncio.create_task(counting())
    try:
        yield turns
    finally:
        task.cancel()
