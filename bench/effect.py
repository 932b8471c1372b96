"""Proof that a fault injected by a test harness took effect.

A harness that breaks a part on purpose measures nothing if the part is not broken. Each fault of
`make chaos`, `make attack`, `make soak` and `make night` therefore observes its effect directly at
the broken part and calls `require_effect`. A run whose fault has no effect fails and writes no
figure. The proofs here serve several harnesses; the others are in their harness.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from aiohttp import ClientSession, ClientTimeout
from prometheus_client.parser import text_string_to_metric_families

from epp.core.types import Seconds

OBSERVED_S_MAX: Final = 10.0
"""Maximum time in seconds to wait for an effect that needs time, such as the next write
to a disk.
"""
SIGNAL_S_MAX: Final = 2.0
"""Maximum time in seconds to wait until the kernel has stopped a process."""
POLL_S: Final = 0.1


class NoEffectError(Exception):
    """The error of a fault that was injected although the broken part behaves as before."""


def require_effect(happened: bool, fault: str, *, observed: str, expected: str) -> None:
    """Raise `NoEffectError` unless the effect of `fault` has `happened`.

    `observed` and `expected` describe the effect at the broken part, with units.
    """
    if not happened:
        raise NoEffectError(
            f"{fault}: the fault did not take effect: observed {observed}, expected {expected}"
        )


@contextlib.contextmanager
def effects_alone() -> Iterator[None]:
    """Raise a `NoEffectError` from a task group in the context unchanged, without the exception
    group around it.
    """
    problems: Sequence[BaseException] = ()
    try:
        yield
    except* NoEffectError as group:
        problems = group.exceptions
    if problems:
        raise problems[0]


class Effect(Protocol):
    """Protocol of a proof that a fault takes effect at one part.

    `before` is called while the part is healthy, `during` just after the fault was injected.
    `during` raises `NoEffectError` if the part behaves as before.
    """

    async def before(self) -> None: ...
    async def during(self) -> None: ...


class ClosedPort:
    """Proof that no process listens at `port` after a fault."""

    def __init__(self, what: str, port: int, s_max: Seconds = OBSERVED_S_MAX) -> None:
        self._what = what
        self._port = port
        self._s_max = s_max

    async def before(self) -> None:
        """Raise `AssertionError` unless a process listens at the port while it is healthy."""
        assert await listens(self._port), f"the healthy {self._what} does not listen"

    async def during(self) -> None:
        """Raise `NoEffectError` unless connections to the port are refused, at the latest after
        `s_max`.
        """
        require_effect(
            await within(self._s_max, lambda: negated(listens(self._port))),
            f"{self._what} at port {self._port}",
            observed="a connection is accepted",
            expected="connections are refused",
        )


class StoppedProcess:
    """Proof that the kernel reports the process `pid` as stopped after SIGSTOP."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    async def before(self) -> None:
        """Raise `AssertionError` if the process is stopped already."""
        assert not is_stopped(self._pid), f"the healthy process {self._pid} is stopped"

    async def during(self) -> None:
        """Raise `NoEffectError` unless the process is stopped, at the latest after
        `SIGNAL_S_MAX`.
        """

        async def stopped() -> bool:
            return is_stopped(self._pid)

        require_effect(
            await within(SIGNAL_S_MAX, stopped),
            f"SIGSTOP to process {self._pid}",
            observed=f"process state {process_state(self._pid)!r}",
            expected="process state 'T'",
        )


def process_state(pid: int) -> str:
    """Return the kernel's one-letter state of the process `pid`, or "" if it has ended
    (proc(5)).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return ""
    # The name in parentheses before it may have spaces.
    return stat.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Return True if the process `pid` is stopped by a signal."""
    return process_state(pid) == "T"


async def listens(port: int) -> bool:
    """Return True if a connection to `port` of the loopback interface is accepted."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def negated(condition: Awaitable[bool]) -> bool:
    """Return True if the awaited `condition` is False."""
    return not await condition


async def within(s_max: Seconds, condition: Callable[[], Awaitable[bool]]) -> bool:
    """Return True if `condition` became true within `s_max` seconds; it is checked at
    least once.
    """
    until = time.monotonic() + s_max
    while not await condition():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(POLL_S)
    return True


async def metric(
    pages: str,
    name: str,
    labels: Mapping[str, str] | None = None,
    *,
    absent: float | None = None,
) -> float:
    """Return the sum of the metric `name` over all series that have `labels`, on the metrics page
    at the URL `pages`.

    If the page has no such series, return `absent`, or raise `KeyError` if that is None.
    """
    async with (
        ClientSession(timeout=ClientTimeout(total=OBSERVED_S_MAX)) as session,
        session.get(f"{pages}/metrics") as response,
    ):
        page = await response.text()
    wanted = (labels or {}).items()
    values = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and wanted <= sample.labels.items()
    ]
    if values:
        return sum(values)
    if absent is None:
        raise KeyError(name)
    return absent
