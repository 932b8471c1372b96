"""A thread of a task: it ends with it, and what hangs is not waited for."""

import asyncio
import threading

import pytest
from structlog.testing import capture_logs

from epp.shell.files.writing_thread import beside_the_loop


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_it_is_told_to_stop_and_waited_for():
    """What it does at its end is done when the task is over."""
    stopping, done = threading.Event(), []

    def work():
        stopping.wait(30)
        done.append("the end")

    task = asyncio.create_task(beside_the_loop("files", work, stopping, 20.0))
    await asyncio.sleep(0)
    await cancelled(task)
    assert done == ["the end"]


async def test_a_thread_that_ended_ends_no_task():
    """It has told why; the picker goes on."""
    started = threading.Event()
    task = asyncio.create_task(beside_the_loop("files", started.set, threading.Event(), 20.0))
    await asyncio.to_thread(started.wait, 20)
    await asyncio.sleep(0)
    assert not task.done()
    await cancelled(task)


async def test_one_that_hangs_is_left():
    """With a line that says what is not written."""
    hangs = threading.Event()
    task = asyncio.create_task(
        beside_the_loop("files", lambda: hangs.wait(30), threading.Event(), 0.05)
    )
    await asyncio.sleep(0)
    try:
        with capture_logs() as lines:
            await cancelled(task)
        assert [line["event"] for line in lines] == [
            "the last records of files were not written because the disk takes too long"
        ]
    finally:
        hangs.set()
