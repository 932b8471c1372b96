"""Scrape metrics: one small task per endpoint fetches and parses the endpoint's metrics page and
reports the result.

A failed scrape changes no metric: the last values stay and their age grows. The failure is reported
by kind, and the endpoint is scraped less often until it answers again. An endpoint that refuses
connections is scraped as often as before, because that is cheap and it may start at any time. The
scrapes of an endpoint whose page takes much time of the event loop are delayed in proportion
(`loop_share`).

With adaptive scraping, an idle endpoint is scraped less often until it gets work. It is then
scraped at the time of the regular schedule.
"""

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from random import Random
from typing import Final

from epp.core.types import Endpoint, EndpointMetrics, Seconds
from epp.flags.serve import REFRESH_MIN_S, REFRESH_PER_ENDPOINT_S
from epp.shell.engines.exposition import ExpositionError, PageMemory, PageReader
from epp.shell.engines.loop_share import Account, LoopShare
from epp.shell.engines.page_client import BadResponseError, PageClient
from epp.shell.engines.trust import client_context
from epp.shell.supervision import Supervisor, forever

INTERVAL_S_MIN: Final = REFRESH_MIN_S
INTERVAL_S_PER_ENDPOINT: Final = REFRESH_PER_ENDPOINT_S
JITTER: Final = 0.1
BACKOFF_S_MAX: Final = 1.0
CLOCK_S: Final = 0.001
"""Resolution of the event loop's clock in seconds. Waiting for less would poll the clock
repeatedly, which took a third of all work.
"""
TOGETHER: Final = 8
"""Number of endpoints that are scraped at the same time if their intervals allow it. Simultaneous
scrapes take less time in total, and eight pages block the loop for a millisecond.
"""


IDLE_INTERVALS: Final = 5
"""Factor by which an idle endpoint is scraped less often than a busy one, unless its metrics would
become too old.
"""


def interval_s_by_pool(endpoints: int) -> Seconds:
    """Return the scrape interval in seconds for a pool of `endpoints` (design section 4).

    The cost is bounded: scraping 4,000 endpoints uses no more of a core than scraping 400.
    """
    return max(INTERVAL_S_MIN, INTERVAL_S_PER_ENDPOINT * endpoints)


def idle_interval_s(interval_s: Seconds, oldest_s: Seconds) -> Seconds:
    """Return the seconds between two scrapes of an idle endpoint, at least `interval_s`.

    Metrics older than `oldest_s` seconds are not used. If `interval_s` allows it, the result is at
    most half of that, so that a failed scrape leaves time for another one.
    """
    return max(interval_s, min(IDLE_INTERVALS * interval_s, oldest_s / 2))


class ScrapeFailure(StrEnum):
    """The kind of failure of one scrape of an endpoint's metrics page."""

    TIMEOUT = "timeout"
    REFUSED = "refused"
    """The connection to the endpoint failed, or broke with an error before the page was complete.
    """
    STATUS = "status"
    """The HTTP status of the endpoint's answer was not 200; redirects are not followed."""
    PAGE = "page"
    """The endpoint's answer was not a complete, readable metrics page within the limits."""
    INTERNAL = "internal"
    """A defect of the picker made one scrape fail."""

    @property
    def answered(self) -> bool:
        """True if this kind of failure shows that a server answered at the endpoint's address."""
        return self not in {ScrapeFailure.TIMEOUT, ScrapeFailure.REFUSED}


class _Target:
    """One endpoint to scrape, with the state of its scrapes."""

    __slots__ = (
        "account",
        "client",
        "due_s",
        "earliest_s",
        "endpoint",
        "failures",
        "idle",
        "memory",
        "problem",
        "resting",
        "task",
        "tried",
        "trusted_otherwise",
    )

    def __init__(self, endpoint: Endpoint, client: PageClient, account: Account) -> None:
        self.endpoint = endpoint
        self.client = client
        self.account = account
        self.memory = PageMemory()
        self.failures = 0
        """Number of consecutive failed scrapes that lengthen the pause before this endpoint's next
        scrape.
        """
        self.idle = False
        """True if scraping is adaptive, the endpoint was idle at its last scrape and it got no work
        since.
        """
        self.problem: tuple[ScrapeFailure, str] | None = None
        """Kind and sentence of the endpoint's last failure, or None if its last scrape succeeded or
        there was none.
        """
        self.due_s: Seconds = 0.0
        self.earliest_s: Seconds = 0.0
        """Time at which the next scrape of this endpoint would be due without back-off for failures
        and without the longer pause of an idle endpoint.
        """
        self.resting: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.tried = False
        """True once this endpoint was scraped, successfully or not."""
        self.trusted_otherwise = False
        """True if the connection to this endpoint verifies certificates with settings that are no
        longer in force.
        """


class Scraper:
    """A scraper that reports the metrics of every endpoint with a metrics target.

    - `observe(endpoint, metrics)` is called after each successful scrape.
    - `failed(endpoint, kind, sentence)` is called after each failed scrape.
    - `scraped(seconds)` is called with the duration of each successful scrape.

    These callbacks run in the loop and must not block. `interval_s(endpoints)` is the mean time
    between two scrapes of an endpoint that answers. With `idle_oldest_s` scraping is adaptive: an
    endpoint that is idle by its own report and by `busy` is scraped every `idle_interval_s` until
    `picked` is called. `backoff_s_max` should be well below the age at which metrics are stale.
    `seed` is used only for jitter. `clock` returns the CPU time of the loop's thread. `configure`
    explains `trust` and `interval_s_min`.
    """

    def __init__(  # noqa: PLR0913 - four listeners, seven limits, a trust and a clock
        self,
        observe: Callable[[Endpoint, EndpointMetrics], None],
        failed: Callable[[Endpoint, ScrapeFailure, str], None],
        *,
        reader: PageReader,
        seed: int,
        scraped: Callable[[Seconds], None] = lambda _: None,
        interval_s: Callable[[int], Seconds] = interval_s_by_pool,
        idle_oldest_s: Callable[[], Seconds] | None = None,
        busy: Callable[[Endpoint], bool] = lambda _: False,
        timeout_s: Seconds = 1.0,
        backoff_s_max: Seconds = BACKOFF_S_MAX,
        concurrency_max: int = 256,
        page_bytes_max: int = 4 * 1024 * 1024,
        clock: Callable[[], Seconds] = time.thread_time,
        supervisor: Supervisor | None = None,
        trust: ssl.SSLContext | None = None,
        interval_s_min: Seconds = 0.0,
    ) -> None:
        self._observe = observe
        self._failed = failed
        self._scraped = scraped
        self._reader = reader
        self._random = Random(f"{seed}:scrape")  # noqa: S311  jitter, not secrets
        self._interval_s = interval_s
        self._idle_oldest_s = idle_oldest_s
        self._busy = busy
        self._timeout_s = timeout_s
        self._backoff_s_max = backoff_s_max
        self._page_bytes_max = page_bytes_max
        self._loop_share = LoopShare(clock)
        self._supervisor = supervisor or Supervisor()
        self._slots = asyncio.Semaphore(concurrency_max)
        # Many silent endpoints must not take the slots of those that answer.
        self._retry_slots = asyncio.Semaphore(concurrency_max)
        self._targets: dict[str, _Target] = {}
        self._group: asyncio.TaskGroup | None = None
        self._trust = trust
        self._interval_s_min = interval_s_min
        self._tls: ssl.SSLContext | None = trust

    @property
    def interval_s(self) -> Seconds:
        """Mean time in seconds between two scrapes of an endpoint that answers, is not idle and has
        a page that is cheap to parse.
        """
        return max(self._interval_s_min, self._interval_s(len(self._targets)))

    @property
    def passed(self) -> bool:
        """True if every endpoint with a metrics target was scraped at least once, successfully or
        not.
        """
        return all(target.tried for target in self._targets.values())

    def configure(
        self, reader: PageReader, trust: ssl.SSLContext | None, interval_s_min: Seconds
    ) -> None:
        """Parse pages with `reader`, and scrape each endpoint at intervals of at least
        `interval_s_min` seconds, from the next scrape on.

        `trust` verifies https servers, or is None to accept every certificate. A change of `trust`
        takes effect with the next `replace`.
        """
        self._reader = reader
        self._interval_s_min = interval_s_min
        if trust is not None or self._trust is not None:
            self._trust = self._tls = trust
            for target in self._targets.values():
                target.trusted_otherwise = True

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the set of endpoints to scrape by those of `endpoints` that have a metrics
        target, and cancel the scrapes of all others.
        """
        before, self._targets = self._targets, {}
        for endpoint in endpoints:
            if endpoint.metrics is None:
                continue
            known = before.get(endpoint.endpoint_id)
            if (
                known is not None
                and _same_server(known.endpoint, endpoint)
                and not (known.trusted_otherwise and endpoint.metrics.scheme == "https")
            ):
                del before[endpoint.endpoint_id]
                known.endpoint = endpoint
                self._targets[endpoint.endpoint_id] = known
            else:
                self._targets[endpoint.endpoint_id] = self._target(endpoint)
        for gone in before.values():
            if gone.task is not None:
                gone.task.cancel()
        self._start()

    def answered(self, endpoint: Endpoint) -> None:
        """Scrape a failing `endpoint` at the next regular time, or at once if that has passed, and
        not after its back-off, because it has just served a request. If that scrape fails too, the
        back-off continues to grow.
        """
        target = self._targets.get(endpoint.endpoint_id)
        if target is None or target.problem is None or target.resting is None:
            return
        target.due_s = min(target.due_s, target.earliest_s)
        _end(target.resting)

    def picked(self, endpoint: Endpoint) -> None:
        """Scrape an idle `endpoint` at the regular interval again, because it got work."""
        target = self._targets.get(endpoint.endpoint_id)
        if target is None or not target.idle or target.resting is None:
            return
        target.idle = False
        late_s = max(asyncio.get_running_loop().time() - target.earliest_s, 0.0)
        next_s = target.earliest_s + math.ceil(late_s / self.interval_s) * self.interval_s
        if next_s < target.due_s:
            target.due_s = next_s
            _end(target.resting)

    def problem_of(self, endpoint: Endpoint) -> tuple[ScrapeFailure, str] | None:
        """Return kind and sentence of the endpoint's last failed scrape, or None if its last scrape
        succeeded or it is not scraped.
        """
        target = self._targets.get(endpoint.endpoint_id)
        return None if target is None else target.problem

    async def run(self) -> None:
        """Scrape the endpoints until cancelled. This method owns all tasks and connections."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._start()
                await forever()
        finally:
            self._group = None
            for target in self._targets.values():
                target.task = None

    def _target(self, endpoint: Endpoint) -> _Target:
        assert endpoint.metrics is not None
        if endpoint.metrics.scheme == "https" and self._tls is None:
            # Pods may use any certificate; only a readable page matters.
            self._tls = client_context("", insecure_skip_verify=True)
        account = self._loop_share.open()
        client = PageClient(
            endpoint,
            endpoint.metrics,
            page_bytes_max=self._page_bytes_max,
            tls=self._tls,
            account=account,
        )
        return _Target(endpoint, client, account)

    def _start(self) -> None:
        if self._group is None:
            return
        for target in self._targets.values():
            if target.task is None:
                name = target.endpoint.name
                follow = partial(self._follow, target)
                target.task = self._group.create_task(
                    self._supervisor.keep("scrape endpoint", follow, of=name), name=f"scrape {name}"
                )

    async def _follow(self, target: _Target) -> None:
        clock = asyncio.get_running_loop().time
        # The start is spread, or a thousand endpoints would always be scraped at the same time.
        target.due_s = target.earliest_s = clock() + self._random.random() * self.interval_s
        try:
            while True:
                await self._rest(target)
                async with self._slots if target.problem is None else self._retry_slots:
                    await self._scrape(target)
                pause_s = self._pause_s(target)
                least_s = target.account.settle(self.interval_s, self._backoff_s_max)
                if least_s > self.interval_s:
                    pause_s = max(pause_s, self._jittered(least_s))
                target.earliest_s = max(clock(), target.due_s + least_s)
                target.due_s = max(clock(), self._aligned(target.due_s + pause_s))
        finally:
            target.client.close()
            target.account.close()

    async def _rest(self, target: _Target) -> None:
        """Wait until the next scrape of `target`'s endpoint is due. That time may become earlier
        during the wait.
        """
        loop = asyncio.get_running_loop()
        while (left_s := target.due_s - loop.time()) > CLOCK_S:
            target.resting = loop.create_future()
            timer = loop.call_later(left_s, _end, target.resting)
            try:
                await target.resting
            finally:
                timer.cancel()
                target.resting = None

    def _pause_s(self, target: _Target) -> Seconds:
        """Return the pause in seconds before the target's next scrape. Each consecutive failure
        after the first doubles it, up to a maximum. The pause of an idle endpoint is longer if
        scraping is adaptive.
        """
        interval_s = self.interval_s
        if target.idle and self._idle_oldest_s is not None:
            return self._jittered(idle_interval_s(interval_s, self._idle_oldest_s()))
        # The interval times 2**16 exceeds every maximum.
        pause_s = interval_s * 2.0 ** min(max(target.failures - 1, 0), 16)
        return self._jittered(max(interval_s, min(pause_s, self._backoff_s_max)))

    def _aligned(self, due_s: Seconds) -> Seconds:
        """Return the multiple of a common time step that is nearest to `due_s`, so that several
        endpoints are scraped at the same time. It differs from `due_s` by less than the jitter.
        """
        interval_s = self.interval_s
        grid_s = interval_s * min(JITTER, TOGETHER / max(len(self._targets), 1))
        return round(due_s / grid_s) * grid_s

    def _jittered(self, pause_s: Seconds) -> Seconds:
        return pause_s * self._random.uniform(1 - JITTER, 1 + JITTER)

    async def _scrape(self, target: _Target) -> None:
        url = target.client.url
        clock = asyncio.get_running_loop().time
        started_s = clock()
        try:
            page = await target.client.fetch(self._timeout_s)
            with target.account:
                self._take(target, page)
        except TimeoutError:
            self._fail(
                target, ScrapeFailure.TIMEOUT, f"{url} sent no page within {self._timeout_s:g} s"
            )
        except OSError as problem:
            self._fail(target, ScrapeFailure.REFUSED, f"{url} cannot be reached: {problem}")
            if isinstance(problem, ConnectionRefusedError):
                target.failures = 0
        except BadResponseError as bad:
            self._fail(target, ScrapeFailure(bad.kind), f"{url} {bad}")
        except ExpositionError as problem:
            self._fail(target, ScrapeFailure.PAGE, f"{url} sent an invalid page: {problem}")
        except Exception as bug:  # noqa: BLE001 - a task boundary: one page must not end the loop
            # The text of the error may quote the page.
            sentence = f"{url} was not scraped because of a defect: {type(bug).__name__}"
            self._fail(target, ScrapeFailure.INTERNAL, sentence)
        else:
            target.failures = 0
            target.problem = None
            self._scraped(clock() - started_s)

    def _take(self, target: _Target, page: bytes) -> None:
        target.tried = True
        metrics = self._reader.read(page, target.endpoint.labels, target.memory)
        if self._is_current(target):
            self._observe(target.endpoint, metrics)
        target.idle = (
            self._idle_oldest_s is not None
            and _without_work(metrics)
            and not self._busy(target.endpoint)
        )

    def _fail(self, target: _Target, kind: ScrapeFailure, sentence: str) -> None:
        target.tried = True
        target.idle = False
        target.failures += 1
        target.problem = kind, sentence
        if self._is_current(target):
            self._failed(target.endpoint, kind, sentence)

    def _is_current(self, target: _Target) -> bool:
        return self._targets.get(target.endpoint.endpoint_id) is target


def _without_work(metrics: EndpointMetrics) -> bool:
    """Return True if the engine reports that it has no work. An engine that reports nothing or is
    in sleep mode may have some.
    """
    return metrics.waiting_requests == 0 == metrics.running_requests and not metrics.asleep


def _end(resting: asyncio.Future[None]) -> None:
    if not resting.done():
        resting.set_result(None)


def _same_server(one: Endpoint, other: Endpoint) -> bool:
    return (one.address, one.incarnation, one.metrics) == (
        other.address,
        other.incarnation,
        other.metrics,
    )
