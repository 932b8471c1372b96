"""The fetch loop: one small task an endpoint that fetches its page, reads it and reports it.

A failed scrape changes nothing: the last values stay and age visibly. It is told to the owner by
kind, and the endpoint is asked less often until it answers again.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from enum import StrEnum
from random import Random
from typing import Final

from epp.configuration.flags import REFRESH_MIN_S, REFRESH_PER_ENDPOINT_S
from epp.core.types import Endpoint, EndpointMetrics, Seconds
from epp.shell.engines.exposition import ExpositionError, PageMemory, PageReader
from epp.shell.engines.page_client import BadResponseError, PageClient

INTERVAL_S_MIN: Final = REFRESH_MIN_S
INTERVAL_S_PER_ENDPOINT: Final = REFRESH_PER_ENDPOINT_S
JITTER: Final = 0.1


def interval_s_by_pool(endpoints: int) -> Seconds:
    """Design section 4: the cost is bounded, 4,000 endpoints cost no more of a core than 400."""
    return max(INTERVAL_S_MIN, INTERVAL_S_PER_ENDPOINT * endpoints)


class ScrapeFailure(StrEnum):
    TIMEOUT = "timeout"
    REFUSED = "refused"
    """No connection, or it broke before an answer."""
    STATUS = "status"
    """Answered, but not with 200; redirects are not followed."""
    PAGE = "page"
    """Answered with something that is not a whole, readable page within the limit."""
    INTERNAL = "internal"
    """A bug on our side, contained to the one scrape."""


class _Target:
    """One endpoint that is being scraped, and how that goes."""

    __slots__ = ("client", "endpoint", "failures", "memory", "task")

    def __init__(self, endpoint: Endpoint, client: PageClient) -> None:
        self.endpoint = endpoint
        self.client = client
        self.memory = PageMemory()
        self.failures = 0
        self.task: asyncio.Task[None] | None = None


class Scraper:
    """Keeps `observe` fed with the metrics of every endpoint that serves some.

    `observe(endpoint, metrics)` after each good scrape, `failed(endpoint, kind, sentence)` after
    each other one; `scraped(seconds)` is told how long a good one took. All run on the loop and must
    not block. `interval_s(endpoints)` is the mean time between two scrapes of an endpoint that
    answers. `seed` is for the jitter alone.
    """

    def __init__(  # noqa: PLR0913 - three listeners and five limits
        self,
        observe: Callable[[Endpoint, EndpointMetrics], None],
        failed: Callable[[Endpoint, ScrapeFailure, str], None],
        *,
        reader: PageReader,
        seed: int,
        scraped: Callable[[Seconds], None] = lambda _: None,
        interval_s: Callable[[int], Seconds] = interval_s_by_pool,
        timeout_s: Seconds = 1.0,
        backoff_s_max: Seconds = 5.0,
        concurrency_max: int = 256,
        page_bytes_max: int = 4 * 1024 * 1024,
    ) -> None:
        self._observe = observe
        self._failed = failed
        self._scraped = scraped
        self._reader = reader
        self._random = Random(f"{seed}:scrape")  # noqa: S311  jitter, not secrets
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._backoff_s_max = backoff_s_max
        self._page_bytes_max = page_bytes_max
        self._slots = asyncio.Semaphore(concurrency_max)
        self._targets: dict[str, _Target] = {}
        self._group: asyncio.TaskGroup | None = None
        self._tls: ssl.SSLContext | None = None

    @property
    def interval_s(self) -> Seconds:
        """Mean time between two scrapes of one endpoint that answers."""
        return self._interval_s(len(self._targets))

    def configure(self, reader: PageReader) -> None:
        """Read pages with `reader` from the next one on."""
        self._reader = reader

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """From now on the endpoints are these; what is on its way from others is dropped."""
        before, self._targets = self._targets, {}
        for endpoint in endpoints:
            if endpoint.metrics is None:
                continue
            known = before.get(endpoint.endpoint_id)
            if known is not None and _same_server(known.endpoint, endpoint):
                del before[endpoint.endpoint_id]
                known.endpoint = endpoint
                self._targets[endpoint.endpoint_id] = known
            else:
                self._targets[endpoint.endpoint_id] = self._target(endpoint)
        for gone in before.values():
            if gone.task is not None:
                gone.task.cancel()
        self._start()

    async def run(self) -> None:
        """Scrape until cancelled. Owns every task and connection there is."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._start()
                await asyncio.Event().wait()
        finally:
            self._group = None

    def _target(self, endpoint: Endpoint) -> _Target:
        assert endpoint.metrics is not None
        if endpoint.metrics.scheme == "https" and self._tls is None:
            # Pods serve what certificate they like; what matters is that the page can be read.
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE
        client = PageClient(
            endpoint, endpoint.metrics, page_bytes_max=self._page_bytes_max, tls=self._tls
        )
        return _Target(endpoint, client)

    def _start(self) -> None:
        if self._group is None:
            return
        for target in self._targets.values():
            if target.task is None:
                target.task = self._group.create_task(
                    self._follow(target), name=f"scrape {target.endpoint.name}"
                )

    async def _follow(self, target: _Target) -> None:
        clock = asyncio.get_running_loop().time
        # Spread the start, or a thousand endpoints would be asked at one instant for ever.
        due = clock() + self._random.random() * self.interval_s
        try:
            while True:
                await asyncio.sleep(due - clock())
                async with self._slots:
                    await self._scrape(target)
                due = max(clock(), due + self._pause_s(target.failures))
        finally:
            target.client.close()

    def _pause_s(self, failures: int) -> Seconds:
        """Until the next scrape: doubled by each failure after the first, up to the cap."""
        interval_s = self.interval_s
        # 2**16 intervals are more than any cap.
        pause_s = interval_s * 2.0 ** min(max(failures - 1, 0), 16)
        pause_s = max(interval_s, min(pause_s, self._backoff_s_max))
        return pause_s * self._random.uniform(1 - JITTER, 1 + JITTER)

    async def _scrape(self, target: _Target) -> None:
        url = target.client.url
        clock = asyncio.get_running_loop().time
        started_s = clock()
        try:
            page = await target.client.fetch(self._timeout_s)
            metrics = self._reader.read(page, target.endpoint.labels, target.memory)
        except TimeoutError:
            self._fail(
                target, ScrapeFailure.TIMEOUT, f"{url} gave no page within {self._timeout_s:g} s"
            )
        except OSError as problem:
            self._fail(target, ScrapeFailure.REFUSED, f"{url} cannot be reached: {problem}")
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
            self._scraped(clock() - started_s)
            if self._is_current(target):
                self._observe(target.endpoint, metrics)

    def _fail(self, target: _Target, kind: ScrapeFailure, sentence: str) -> None:
        target.failures += 1
        if self._is_current(target):
            self._failed(target.endpoint, kind, sentence)

    def _is_current(self, target: _Target) -> bool:
        return self._targets.get(target.endpoint.endpoint_id) is target


def _same_server(one: Endpoint, other: Endpoint) -> bool:
    return (one.address, one.incarnation, one.metrics) == (
        other.address,
        other.incarnation,
        other.metrics,
    )
