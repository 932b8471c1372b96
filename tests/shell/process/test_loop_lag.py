"""How late the loop is, as its histogram, its last minute and the clocks of requests have it."""

import asyncio
import time

import pytest

from epp.shell.process.event_loop import loop_factory
from epp.shell.process.loop_lag import BEAT_S, LATE_FROM_S, MISSED_MAX, WINDOW_S, LoopLag

LOOPS = [asyncio.new_event_loop, loop_factory() or asyncio.new_event_loop]


class Watched:
    """A loop whose beats run when the test says."""

    def __init__(self):
        self.told = []
        self.now_s = 100.0
        self.lag = LoopLag(self.told.extend, clock=lambda: self.now_s)
        self.lag._due_s = self.now_s + BEAT_S

    def beat(self, late_s):
        self.now_s = self.lag._due_s + late_s
        self.lag.beat(self.now_s)
        self.lag._due_s = self.now_s + BEAT_S


def test_a_late_beat_stands_for_those_that_it_made_miss():
    """So that the mean is what waits at any instant: half of what the loop stood still."""
    watched = Watched()
    watched.beat(10.5 * BEAT_S)
    assert watched.told == pytest.approx([(at + 0.5) * BEAT_S for at in range(10, -1, -1)])
    assert sum(watched.told) / len(watched.told) == pytest.approx(5.5 * BEAT_S)


def test_an_endless_stop_is_told_in_a_bounded_number_of_beats():
    watched = Watched()
    watched.beat(10 * MISSED_MAX * BEAT_S)
    assert len(watched.told) == MISSED_MAX + 1
    assert max(watched.told) == pytest.approx(10 * MISSED_MAX * BEAT_S)


def test_the_last_minute_forgets_what_is_older():
    watched = Watched()
    assert watched.lag.lately().most_s == 0.0
    watched.beat(1.0)
    watched.beat(0.0)
    lately = watched.lag.lately()
    assert lately.most_s == pytest.approx(1.0)
    assert lately.mean_s == pytest.approx(sum(watched.told) / len(watched.told))
    watched.now_s += WINDOW_S + 1
    watched.lag._due_s = watched.now_s
    watched.beat(0.0)
    assert watched.lag.lately().most_s == 0.0


def test_what_is_read_before_the_beat_that_is_overdue_has_waited_as_long():
    """Of asyncio's own loop; and of uvloop where a socket was ready while another one was served."""
    watched = Watched()
    due_s = watched.lag._due_s
    assert watched.lag.overdue_s(due_s) == watched.lag.overdue_s(due_s + LATE_FROM_S / 2) == 0.0
    assert watched.lag.overdue_s(due_s + 0.25) == pytest.approx(0.25)
    assert watched.lag.backlog_s(due_s + 0.25) == pytest.approx(0.125)


def test_what_a_thread_kept_has_waited_half_as_long_while_it_is_handed_out():
    """For a tenth of the time that the loop stood still, and no longer."""
    watched = Watched()
    watched.beat(0.25)
    assert watched.lag.backlog_s(watched.now_s + 0.02) == pytest.approx(0.145)
    assert watched.lag.backlog_s(watched.now_s + 0.026) < BEAT_S


async def _read_after_a_stop(lag, stops_in_a_read):
    """What `overdue_s` tells of data that came while the loop stood still, and of the next."""
    loop, found = asyncio.get_running_loop(), []
    read = asyncio.Event()

    class Reader(asyncio.Protocol):
        def data_received(self, data):
            if data == b"stop":
                time.sleep(5 * BEAT_S)
            else:
                found.append(lag.overdue_s(time.monotonic()))
                read.set()

    server = await loop.create_server(Reader, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    one, _ = await loop.create_connection(asyncio.Protocol, *address)
    other, _ = await loop.create_connection(asyncio.Protocol, *address)
    for stops in (True, False):
        await asyncio.sleep(2 * BEAT_S)
        read.clear()
        if stops and stops_in_a_read:
            one.write(b"stop")
        if stops and not stops_in_a_read:
            time.sleep(5 * BEAT_S)
        other.write(b"x")
        await read.wait()
    one.close()
    other.close()
    server.close()
    return found


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("stops_in_a_read", [True, False])
def test_on_a_real_loop_a_stop_is_seen_by_what_is_read_after_it(new_loop, stops_in_a_read):
    """Whichever of timers and sockets the loop looks at first."""
    told = []

    async def main():
        lag = LoopLag(told.extend)
        beating = asyncio.create_task(lag.run())
        found = await _read_after_a_stop(lag, stops_in_a_read)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        return found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        stopped, quick = runner.run(main())
    assert stopped > 2 * BEAT_S
    assert quick < stopped
    assert max(told) > 2 * BEAT_S
    assert sum(late > BEAT_S for late in told) >= 2, "the missed ones too"


async def test_beats_end_with_their_task():
    told = []
    lag = LoopLag(told.extend)
    beating = asyncio.create_task(lag.run())
    while not told:
        await asyncio.sleep(BEAT_S)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    count = len(told)
    await asyncio.sleep(3 * BEAT_S)
    assert len(told) == count
    assert lag.overdue_s(time.monotonic() + 1_000) == 0.0


async def test_a_listener_that_fails_does_not_end_the_beats():
    """It is ours, and the loop's handler of exceptions logs it."""
    told, problems = [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

    def fail_once(late):
        told.append(late)
        if len(told) == 1:
            raise ZeroDivisionError

    beating = asyncio.create_task(LoopLag(fail_once).run())
    while len(told) < 3:
        await asyncio.sleep(BEAT_S)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    assert [type(problem["exception"]) for problem in problems] == [ZeroDivisionError]
