"""A picker that scrapes a pod, done when somebody looks.

A page tells the state of its pod, which changes only when something happens to the pod. So nothing
is done at the instant of a scrape: before a pod changes, and before a picker decides, the scrapes
since are caught up with, and of several that nobody read in between only the last is done.
"""

from collections import deque
from random import Random
from typing import Final, TypeAlias

from epp.core.types import Endpoint, EndpointMetrics, Seconds
from sim.cluster.simulated_pod import SimulatedPod

SCRAPE_JITTER: Final = 0.1
"""As `epp/shell/engines/scrape` has it."""

Read: TypeAlias = tuple[Seconds, EndpointMetrics | None]
"""When the picker has read a page, and what it says; None: there was no connection."""


class Scraper:
    """One picker scraping one incarnation of one pod; the pod knows it until `stop`."""

    __slots__ = (
        "_delay_s", "_interval_s", "_jitter", "_pages", "_random", "endpoint", "next_at", "pod",
    )  # fmt: skip

    def __init__(
        self,
        pod: SimulatedPod,
        endpoint: Endpoint,
        random: Random,
        now: Seconds,
        *,
        interval_s: Seconds,
        delay_s: Seconds,
    ) -> None:
        """`interval_s` on average; a picker has read a page `delay_s` after the pod showed it."""
        self.pod = pod
        self.endpoint = endpoint
        self._random = random
        self._interval_s = interval_s
        self._delay_s = delay_s
        self._jitter = 1 - SCRAPE_JITTER + 2 * SCRAPE_JITTER * random.random()
        # Spread, as in production, or all pods would be asked at one instant.
        self.next_at: Seconds = now + random.random() * interval_s
        self._pages: deque[Read] = deque()
        """Scraped and not yet read, oldest first."""
        pod.scrapers.append(self)

    def stop(self) -> None:
        """Nobody asks this pod for this picker any more; what was not read is not read."""
        self.pod.scrapers.remove(self)

    def catch_up(self, now: Seconds) -> None:
        """Do the scrapes due before `now`; since the last of them the pod has not changed."""
        pod, at, delay_s = self.pod, self.next_at, self._delay_s
        interval_s, jitter, random = self._interval_s, self._jitter, self._random.random
        pages = self._pages
        replaced: Seconds | None = None
        while at < now:
            read_at = at + delay_s
            if not pod.alive:
                # Each refusal counts.
                pages.append((read_at, None))
            elif read_at <= now:
                replaced = at
            else:
                if replaced is not None:
                    self._keep(replaced)
                    replaced = None
                pages.append((read_at, pod.page(at)))
            at += interval_s * jitter
            jitter = 1 - SCRAPE_JITTER + 2 * SCRAPE_JITTER * random()
        if replaced is not None:
            self._keep(replaced)
        self.next_at = at
        self._jitter = jitter

    def read(self, now: Seconds) -> list[Read]:
        """What the picker has read by `now` and not been given: the last page, refusals after it."""
        if self.next_at < now:
            self.catch_up(now)
        pages = self._pages
        found: list[Read] = []
        while pages and pages[0][0] <= now:
            read = pages.popleft()
            if read[1] is not None:
                found.clear()
            found.append(read)
        return found

    def _keep(self, at: Seconds) -> None:
        """The page of `at`, in the place of all before: it is read before anybody looks."""
        self._pages.clear()
        self._pages.append((at + self._delay_s, self.pod.page(at)))
