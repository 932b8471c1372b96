import asyncio
import contextlib
import socket

import structlog

from epp.shell.peers.addresses import Addresses, resolve
from tests.envoy.rig import until


@contextlib.asynccontextmanager
async def looking_up(targets, answers):
    """`Addresses` of `targets`; `answers` has lists of addresses or errors by name."""
    found = []

    async def answer(name):
        await asyncio.sleep(0)
        answer = answers[name]
        if isinstance(answer, OSError):
            raise answer
        return answer

    addresses = Addresses(targets, found.append, resolve=answer, poll_s=0.01)
    task = asyncio.create_task(addresses.run())
    try:
        yield found, task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_names_are_looked_up_again_and_again():
    """What is told is all addresses of all names, once for each change."""
    answers = {"a": ["10.0.0.1", "10.0.0.2"], "b": ["fd00::1"]}
    async with looking_up([("a", 9004), ("b", 7), ("10.9.9.9", 1)], answers) as (found, _):
        first = {"10.0.0.1:9004", "10.0.0.2:9004", "[fd00::1]:7", "10.9.9.9:1"}
        await until(lambda: found == [first], "the first answers")
        answers["a"] = ["10.0.0.2"]
        await until(lambda: found[1:] == [first - {"10.0.0.1:9004"}], "the change")


async def test_a_name_that_cannot_be_looked_up_keeps_its_addresses():
    """It is said once; a name that is gone has none."""
    answers = {"a": ["10.0.0.1"]}
    with structlog.testing.capture_logs() as lines:
        async with looking_up([("a", 1)], answers) as (found, task):
            await until(lambda: found, "the answer")
            answers["a"] = socket.gaierror(socket.EAI_AGAIN, "try again")
            await until(lambda: lines, "the line")
            assert found == [{"10.0.0.1:1"}]
            answers["a"] = socket.gaierror(socket.EAI_NONAME, "no such name")
            await until(lambda: found == [{"10.0.0.1:1"}, set()], "its end")
            answers["a"] = ["10.0.0.3"]
            await until(lambda: found[2:] == [{"10.0.0.3:1"}], "its return")
            assert not task.done()
    assert [line["problem"] for line in lines] == ["try again", "no such name"]


async def test_what_is_no_name_is_not_looked_up():
    """The addresses are told, and that is all; the task rests until it is cancelled."""
    async with looking_up([("127.0.0.1", 5), ("::1", 6)], {}) as (found, task):
        await until(lambda: found == [{"127.0.0.1:5", "[::1]:6"}], "the addresses")
        assert not task.done()


async def test_nobody_is_found_is_told_too():
    """Who waits for it need not wait any longer."""
    gone = socket.gaierror(socket.EAI_NONAME, "no such name")
    async with looking_up([("a", 1)], {"a": gone}) as (found, _):
        await until(lambda: found == [set()], "nobody")


async def test_this_machine_knows_itself():
    """The resolver of the system."""
    assert "127.0.0.1" in await resolve("localhost")
