"""A loop ends only when somebody asked for it; else it is counted, told of and started anew."""

import asyncio
import contextlib

import pytest
import structlog

from epp.shell.supervision import BACKOFF_S_MAX, ENDS_MAX, Supervisor, forever

EVENT = "background task ended unexpectedly, it is restarted"
ENDS = (ZeroDivisionError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
CLIENT = "canary-of-a-client"


class Counted:
    """A supervisor, and what it tells."""

    def __init__(self, **settings):
        self.ends = {}
        self.changes = []
        self.supervisor = Supervisor(self.count, self.changed, **({"backoff_s": 0.0} | settings))

    def count(self, name, ends):
        self.ends[name] = self.ends.get(name, 0) + ends

    def changed(self):
        self.changes.append(set(self.supervisor.broken))
        # What is broken shall be steady soon, and nothing before it.
        self.supervisor._steady_s = 0.0


class Ending:
    """A loop that does what it is told, each time one thing, and then runs."""

    def __init__(self, *does):
        self.does = list(does)
        self.runs = asyncio.Event()

    async def run(self):
        if self.does:
            does = self.does.pop(0)
            if does is not None:
                raise does(CLIENT)
            return
        self.runs.set()
        await forever()


@contextlib.asynccontextmanager
async def kept(counted, loop, **more):
    """In a group, as the picker has it; cancelled in the end, which the group waits for."""
    with structlog.testing.capture_logs() as lines:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(counted.supervisor.keep("a", loop, **more))
            yield task, lines
            task.cancel()


async def test_a_task_group_alone_forgets_who_was_cancelled_by_nobody():
    """Why there is a supervisor: no error, no word, and the others go on without it."""

    async def ends():
        raise asyncio.CancelledError

    async with asyncio.TaskGroup() as group:
        gone = group.create_task(ends())
        await asyncio.wait({gone})
    assert gone.cancelled()
    assert not gone.cancelling()


@pytest.mark.parametrize("does", [None, *ENDS])
async def test_one_that_ends_is_counted_told_of_and_started_anew(does):
    """However it ended; what an exception says is shown to nobody."""
    counted, loop = Counted(), Ending(does)
    async with kept(counted, loop.run, of="pod-1") as (task, lines):
        await loop.runs.wait()
        assert not task.done()
    assert counted.ends == {"a": 1}
    (line,) = lines
    how = "returned" if does is None else f"raised {does.__name__}"
    assert (line["event"], line["task"], line["of"], line["how"]) == (EVENT, "a", "pod-1", how)
    assert line["log_level"] == "error"
    assert CLIENT not in str({**line, "exc_info": ""})


async def test_one_that_is_cancelled_ends_without_a_word():
    """Whoever asked for it knows; and it is shown before it has ended once."""
    counted, loop = Counted(), Ending()
    async with kept(counted, loop.run) as (task, lines):
        await loop.runs.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
    assert lines == []
    assert counted.ends == {"a": 0}


async def test_one_that_is_cancelled_while_it_waits_to_start_anew_ends():
    counted, loop = Counted(backoff_s=1e6), Ending(OSError)
    async with kept(counted, loop.run) as (task, lines):
        while not lines:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
    assert not loop.runs.is_set()


async def test_what_fails_as_it_is_cancelled_ends_all_the_same():
    """A clean-up with a defect must not keep the picker from ending."""
    runs = asyncio.Event()

    async def loop():
        try:
            runs.set()
            await forever()
        finally:
            raise ZeroDivisionError

    counted = Counted()
    task = asyncio.create_task(counted.supervisor.keep("a", loop))
    await runs.wait()
    task.cancel()
    with pytest.raises(ZeroDivisionError):
        await task
    assert counted.ends == {"a": 0}


async def test_each_start_anew_waits_twice_as_long_up_to_a_bound(monkeypatch):
    waited = []

    async def sleep(pause_s):
        waited.append(pause_s)

    counted, loop = Counted(backoff_s=0.1), Ending(*[OSError] * 12)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        async with kept(counted, loop.run) as (_, lines):
            await loop.runs.wait()
    assert waited[:5] == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert max(waited) == waited[-1] == BACKOFF_S_MAX
    assert [line["again_in_s"] for line in lines] == waited[1:]


async def test_one_that_ran_for_long_begins_its_back_off_anew():
    """What happens once a day is no reason to wait for half a minute."""
    counted = Counted(steady_s=0.0)
    loop = Ending()

    async def steady_then_ends():
        # The timer of a steady run is due at once, and heard before the second turn.
        await asyncio.sleep(0.001)
        await loop.run()

    loop.does = [OSError] * (ENDS_MAX + 3)
    async with kept(counted, steady_then_ends, essential=True) as (_, lines):
        await loop.runs.wait()
    assert len({line["again_in_s"] for line in lines}) == 1
    assert counted.changes == []


@pytest.mark.parametrize("essential", [True, False])
async def test_an_essential_one_that_ends_again_and_again_is_broken_until_it_is_steady(essential):
    """Then the picker is not ready; a part that is not essential costs only what it adds."""
    counted = Counted()
    loop = Ending(*[OSError] * ENDS_MAX)
    async with kept(counted, loop.run, essential=essential):
        await loop.runs.wait()
        if essential:
            assert counted.changes[0] == {"a"}
            while counted.supervisor.broken:
                await asyncio.sleep(0.01)
    assert counted.changes == ([{"a"}, set()] if essential else [])
