"""Calls of the queue by the event loop: once for several events, in time, and again after a failure."""

import asyncio
from collections import Counter

import pytest
import structlog

from epp.shell.gateway.queue_waker import RETRY_S, TASK, QueueWaker
from tests.envoy.rig import until


class Pump:
    """A queue whose first `failures` calls fail."""

    def __init__(self, failures=0):
        self.failures = failures
        self.calls = []

    def __call__(self, now):
        self.calls.append(now)
        if len(self.calls) <= self.failures:
            raise ZeroDivisionError


async def test_several_events_cause_one_call():
    pump = Pump()
    waker = QueueWaker(pump)
    for _ in range(3):
        waker.soon()
    await until(lambda: pump.calls, "a call")
    await asyncio.sleep(0)
    assert len(pump.calls) == 1


async def test_a_later_time_replaces_the_earlier_one():
    pump = Pump()
    waker = QueueWaker(pump, clock=lambda: 5.0)
    waker.at(1_000.0)
    waker.at(5.0)
    await until(lambda: pump.calls, "a call")
    waker.at(None)
    assert pump.calls == [5.0]


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_failed_call_is_counted_logged_and_repeated(failures):
    """The series exists before the first failure, so that an increase is seen."""
    pump, counts, clock = Pump(failures), Counter(), iter([0.0, 0.0, RETRY_S, RETRY_S])
    waker = QueueWaker(pump, lambda: next(clock), lambda task, times: counts.update({task: times}))
    assert counts == {TASK: 0}
    with structlog.testing.capture_logs() as logs:
        waker.soon()
        await until(lambda: len(pump.calls) == 1 + failures, "the calls")
    assert counts == {TASK: failures}
    assert [line["event"] for line in logs] == ["the queue failed, it is called again"] * failures
