"""The fetch loop: one small task an endpoint that fetches its page, reads it and reports it.

A failed scrape changes nothing: the last values stay and age visibly. It is told to the owner by
kind, and the endpoint is asked less often until it answers again. One that refuses connections is
not: it costs next to nothing to ask, and it will be there from one instant to the next. An endpoint
whose page costs much of the loop is left alone in proportion: `loop_share`.

Where scraping is adaptive, an endpoint that has nothing to do is asked less often, until it is given
work: then it is asked when it would have been asked anyway.
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
"""What the loop's clock counts in. To wait for less is to ask it again and again: a third of all work."""
TOGETHER: Final = 8
"""So many endpoints are asked at one instant where intervals allow: what is done at once costs less
than one after the other, and eight pages hold the loop for a millisecond."""


IDLE_INTERVALS: Final = 5
"""So much less often an idle endpoint is asked, if its metrics may become as old as that."""


def interval_s_by_pool(endpoints: int) -> Seconds:
    """Design section 4: the cost is bounded, 4,000 endpoints cost no more of a core than 400."""
    return max(INTERVAL_S_MIN, INTERVAL_S_PER_ENDPOINT * endpoints)


def idle_interval_s(interval_s: Seconds, oldest_s: Seconds) -> Seconds:
    """Between two scrapes of an idle endpoint whose metrics count for nothing beyond `oldest_s`.

    At most half of that: a scrape in vain leaves time for another one.
    """
    return max(interval_s, min(IDLE_INTERVALS * interval_s, oldest_s / 2))


class ScrapeFailure(StrEnum):
    TIMEOUT = "timeout"
    REFUSED = "refused"
    """No connection, or it broke before an answer."""
    STATUS = "status"
    """Answered, but not with 200; redirects are not followed."""
    PAGE = "page"
    """Answered with something that is not a whole, readable page within the limits."""
    INTERNAL = "internal"
    """A bug on our side, contained to the one scrape."""

    @property
    def answered(self) -> bool:
        """There is somebody at the endpoint's address."""
        return self not in {ScrapeFailure.TIMEOUT, ScrapeFailure.REFUSED}


class _Target:
    """One endpoint that is being scraped, and how that goes."""

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
        """In a row, of those that make scrapes rarer."""
        self.idle = False
        """It had nothing to do when it was last scraped, and has been given nothing since."""
        self.problem: tuple[ScrapeFailure, str] | None = None
        """Why the last scrape failed; None if it did not."""
        self.due_s: Seconds = 0.0
        self.earliest_s: Seconds = 0.0
        """When the next scrape would be due without failures."""
        self.resting: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.tried = False
        """It was scraped, be it in vain."""
        self.trusted_otherwise = False
        """Its connection was made by certificates that do not count any more."""


class Scraper:
    """Keeps `observe` fed with the metrics of every endpoint that serves some.

    `observe(endpoint, metrics)` after each good scrape, `failed(endpoint, kind, sentence)` after
    each other one; `scraped(seconds)` is told how long a good one took. All run on the loop and must
    not block. `interval_s(endpoints)` is the mean time between two scrapes of an endpoint that
    answers. With `idle_oldest_s`, scraping is adaptive: an endpoint whose engine reports no work, and
    of which `busy` does not know better, is asked every `idle_interval_s`; `picked` ends that.
    `backoff_s_max` should be well below the age at which metrics are stale. `seed` is for
    the jitter alone. `clock` gives the CPU time of the loop's thread. `trust` and `interval_s_min` are
    those of `configure`.
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
        # Many silent endpoints must not take the turns of those that answer.
        self._retry_slots = asyncio.Semaphore(concurrency_max)
        self._targets: dict[str, _Target] = {}
        self._group: asyncio.TaskGroup | None = None
        self._trust = trust
        self._interval_s_min = interval_s_min
        self._tls: ssl.SSLContext | None = trust

    @property
    def interval_s(self) -> Seconds:
        """Mean time between two scrapes of one endpoint that answers."""
        return max(self._interval_s_min, self._interval_s(len(self._targets)))

    @property
    def passed(self) -> bool:
        """Every endpoint there is was asked once, whatever it answered."""
        return all(target.tried for target in self._targets.values())

    def configure(
        self, reader: PageReader, trust: ssl.SSLContext | None, interval_s_min: Seconds
    ) -> None:
        """Read pages with `reader`, and ask each endpoint so seldom, from the next one on.

        `trust`: whom to speak https with; None: whoever answers. With the next `replace`.
        """
        self._reader = reader
        self._interval_s_min = interval_s_min
        if trust is not None or self._trust is not None:
            self._trust = self._tls = trust
            for target in self._targets.values():
                target.trusted_otherwise = True

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """From now on the endpoints are these; what is on its way from others is dropped."""
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
        """`endpoint` has just served a request: if its scrapes fail, ask it again without back-off."""
        target = self._targets.get(endpoint.endpoint_id)
        if target is None or target.problem is None or target.resting is None:
            return
        target.due_s = min(target.due_s, target.earliest_s)
        _end(target.resting)

    def picked(self, endpoint: Endpoint) -> None:
        """`endpoint` is given work: ask it when one that is busy would be asked."""
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
        """Why the last scrape of `endpoint` failed, by kind and in a sentence; None if it did not."""
        target = self._targets.get(endpoint.endpoint_id)
        return None if target is None else target.problem

    async def run(self) -> None:
        """Scrape until cancelled. Owns every task and connection there is."""
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
            # Pods serve what certificate they like; what matters is that the page can be read.
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
        # Spread the start, or a thousand endpoints would be asked at one instant for ever.
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
        """Until the next scrape is due, which may come to be sooner meanwhile."""
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
        """Until the next scrape: doubled by each failure after the first, up to the cap."""
        interval_s = self.interval_s
        if target.idle and self._idle_oldest_s is not None:
            return self._jittered(idle_interval_s(interval_s, self._idle_oldest_s()))
        # 2**16 intervals are more than any cap.
        pause_s = interval_s * 2.0 ** min(max(target.failures - 1, 0), 16)
        return self._jittered(max(interval_s, min(pause_s, self._backoff_s_max)))

    def _aligned(self, due_s: Seconds) -> Seconds:
        """The nearest instant at which others are asked too; less far away than the jitter is wide."""
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
                target, ScrapeFailure.TIMEOUT, f"{url} gave no page within {self._timeout_s:g} s"
            )
        except OSError as problem:
            self._fail(target, ScrapeFailure.REFUSED, f"{url} cannot be reached: {problem}")
            if isinstance(problem, ConnectionRefusedError):
                target.failures = 0
        except BadResponseError as bad:
            self._fail(target, ScrapeFailure(bad.kind), f"{url} {bad}")
        except ExpositionError as problem:
            self._fail(target, ScrapeFailure.PAGE, f"{url} is not understood: {problem}")
        except Exception as bug:  # noqa: BLE001 - a task boundary: one page must not end the loop
            # Its text may quote the page.
            sentence = f"{url} was not scraped: {type(bug).__name__}"
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
    """The engine says so; one that does not tell, or sleeps and may wake, may have some."""
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
