"""A simulated picker's scrapes of a pod's metrics page, computed on demand.

A page shows the state of its pod, which changes only with an event of the pod. Therefore nothing is
done at the time of a scrape. Before a pod changes, and before a picker decides, all scrapes since
the last change are computed. Of several pages that the picker would have read in between, only the
last one is computed. Pickers that compare consecutive pages then compare pages that are further
apart.
"""

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Final, TypeAlias

from msgspec import Struct

from epp.core.types import Endpoint, EndpointMetrics, Seconds
from sim.cluster.simulated_pod import SimulatedPod
from sim.cluster.windows import Duration, Instant, Numbers, Share, check_window

SCRAPE_JITTER: Final = 0.1
SCRAPE_TIMEOUT_S: Final = 1.0
"""Timeout of a scrape in seconds. This constant and `SCRAPE_JITTER` have the values of
`epp/shell/engines/scrape`.
"""
_LEAST: Final = 1 - SCRAPE_JITTER
_SPREAD: Final = 2 * SCRAPE_JITTER
"""Width of the random part of the pause between two scrapes. A pause is the interval times the sum
of `_LEAST` and a random share of `_SPREAD`.
"""

Read: TypeAlias = tuple[Seconds, EndpointMetrics | None]
"""Result of a scrape: the time when the picker reads the page, and the page, or None if there was
no answer.
"""


class ScrapeTrouble(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A period from `from_s` to `to_s` in which scrapes of metrics pages get no answer, or a late
    one.

    The picker gives up a scrape that takes `SCRAPE_TIMEOUT_S` or more after that time, and starts
    the next one no earlier. If several periods overlap, the one with the greatest loss applies.
    """

    from_s: Instant
    to_s: Instant
    loss: Share = 0.0
    """Share of the scrapes that get no answer during the period."""
    more_s: Duration = 0.0
    """Additional time in seconds until an answer arrives. The page shows the pod's state at the
    time of the request.
    """
    pods: Numbers = ()
    pickers: Numbers = ()

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)
        if not (self.loss or self.more_s):
            raise ValueError("expected loss or more_s above 0, got 0 for both")

    def concerns(self, picker: int, pod: int) -> bool:
        """Return whether the trouble affects the scrapes of pod number `pod` by picker number
        `picker`.
        """
        return (not self.pickers or picker in self.pickers) and (not self.pods or pod in self.pods)


class Scraper:
    """The scrapes of one incarnation of one pod by one picker. The pod calls the scraper before it
    changes, until `stop`.
    """

    __slots__ = (
        "_delay_s", "_interval_s", "_jitter", "_pages", "_random", "_random_loss",
        "_troubles", "endpoint", "next_at", "pod",
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
        troubles: Sequence[ScrapeTrouble] = (),
    ) -> None:
        """Start scraping `pod`. `interval_s` is the mean interval between scrapes; the picker reads
        a page `delay_s` seconds after the scrape.
        """
        self.pod = pod
        self.endpoint = endpoint
        self._random = random
        self._interval_s = interval_s
        self._delay_s = delay_s
        self._troubles = troubles
        # Random numbers for losses are separate, so that they do not change the jitter.
        self._random_loss = Random(random.getrandbits(64)) if troubles else random
        self._jitter = _LEAST + _SPREAD * random.random()
        # Scrapes are spread as in production, so that not all pods are scraped at the same time.
        self.next_at: Seconds = now + random.random() * interval_s
        self._pages: deque[Read] = deque()
        """Results of scrapes that the picker has not read yet, oldest first."""
        pod.scrapers.append(self)

    def stop(self) -> None:
        """Stop scraping the pod. Pages that the picker has not read are dropped."""
        self.pod.scrapers.remove(self)

    def catch_up(self, now: Seconds) -> None:
        """Compute the scrapes that were due before `now`. The pod must not have changed since the
        last computed scrape.
        """
        pod, at, delay_s = self.pod, self.next_at, self._delay_s
        interval_s, jitter, random = self._interval_s, self._jitter, self._random.random
        pages, troubles, alive = self._pages, self._troubles, pod.alive
        replaced: Seconds | None = None
        while at < now:
            read_at = at + delay_s
            trouble = self._trouble_at(at) if troubles else None
            if trouble is not None and alive:
                if replaced is not None:
                    self._keep(replaced)
                    replaced = None
                at += self._ask_in_trouble(trouble, at, interval_s * jitter)
                jitter = _LEAST + _SPREAD * random()
                continue
            if not alive:
                # Each refused connection counts.
                pages.append((read_at, None))
            elif read_at <= now:
                replaced = at
            else:
                if replaced is not None:
                    self._keep(replaced)
                    replaced = None
                pages.append((read_at, pod.page(at)))
            at += interval_s * jitter
            jitter = _LEAST + _SPREAD * random()
        if replaced is not None:
            self._keep(replaced)
        self.next_at = at
        self._jitter = jitter

    def read(self, now: Seconds) -> Sequence[Read]:
        """Return the results of scrapes that the picker has read by `now` and that were not
        returned before: the last page, and failed scrapes after it.
        """
        if self.next_at < now:
            self.catch_up(now)
        pages = self._pages
        if not pages or pages[0][0] > now:
            return ()
        found = [pages.popleft()]
        while pages and pages[0][0] <= now:
            read = pages.popleft()
            if read[1] is not None:
                found.clear()
            found.append(read)
        return found

    def _trouble_at(self, at: Seconds) -> ScrapeTrouble | None:
        """Return the scrape trouble in effect at the time `at`, or None if there is none."""
        found = [trouble for trouble in self._troubles if trouble.from_s <= at < trouble.to_s]
        return max(found, key=lambda trouble: (trouble.loss, trouble.more_s), default=None)

    def _ask_in_trouble(self, trouble: ScrapeTrouble, at: Seconds, pause_s: Seconds) -> Seconds:
        """Scrape the pod at the time `at` under `trouble`, and return the time in seconds until the
        next scrape. `pause_s` is the usual pause.
        """
        takes_s = self._delay_s + trouble.more_s
        if takes_s < SCRAPE_TIMEOUT_S and self._random_loss.random() >= trouble.loss:
            self._pages.append((at + takes_s, self.pod.page(at)))
            return max(takes_s, pause_s)
        self._pages.append((at + SCRAPE_TIMEOUT_S, None))
        return max(SCRAPE_TIMEOUT_S, pause_s)

    def _keep(self, at: Seconds) -> None:
        """Replace all unread results of scrapes by the page of the scrape at the time `at`. Nothing
        looks at the replaced ones before the picker reads this page.
        """
        self._pages.clear()
        self._pages.append((at + self._delay_s, self.pod.page(at)))
