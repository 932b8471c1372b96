"""Pages are made one at a time, few wait, and rows leave the loop its turns."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from epp.shell.operators.pages.page_queue import ROWS_PER_TURN, WAITING_MAX, PageQueue, in_turns
from tests.turns import counted_turns

REQUEST = make_mocked_request("GET", "/page")


class Page:
    """Takes until it is let go, and notes how many of it are made at once."""

    def __init__(self):
        self.go = asyncio.Event()
        self.made = 0
        self.at_once = 0
        self.most = 0

    async def make(self, _):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await self.go.wait()
        self.at_once -= 1
        self.made += 1
        return web.Response(text="page")


async def test_pages_of_two_queues_are_made_one_at_a_time():
    """Who fills the one keeps nobody out of the other, and is told when to come again."""
    page, turn = Page(), asyncio.Lock()
    one, other = PageQueue(turn), PageQueue(turn)
    async with asyncio.TaskGroup() as tasks:
        waiting = [
            tasks.create_task(queue.queued(page.make)(REQUEST))
            for queue in (one, other)
            for _ in range(WAITING_MAX)
        ]
        while other.waiting < WAITING_MAX:
            await asyncio.sleep(0)
        refused = await one.queued(page.make)(REQUEST)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        page.go.set()
    assert {task.result().status for task in waiting} == {200}
    assert (page.made, page.most) == (2 * WAITING_MAX, 1)
    assert (one.waiting, other.waiting) == (0, 0)


@pytest.mark.parametrize("fault", [ValueError, asyncio.CancelledError])
async def test_a_page_that_fails_or_whose_reader_leaves_gives_its_turn_on(fault):
    async def fails(_):
        raise fault

    turn = asyncio.Lock()
    queue = PageQueue(turn)
    with pytest.raises(fault):
        await queue.queued(fails)(REQUEST)
    assert queue.waiting == 0
    assert not turn.locked()


async def test_the_loop_has_a_turn_after_few_rows():
    async with counted_turns() as turns:
        rows = [row async for row in in_turns(range(10 * ROWS_PER_TURN))]
    assert rows == list(range(10 * ROWS_PER_TURN))
    assert turns.count >= 9
