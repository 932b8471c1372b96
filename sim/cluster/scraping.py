"""A picker that scrapes a pod, done when somebody looks.

A page tells the state of its pod, which changes only when something happens to the pod. So nothing
is done at the instant of a scrape: before a pod changes, and before a picker decides, the scrapes
since are caught up with, and of several that nobody read in between only the last is done. What
pickers learn from one page to the next they learn of pages that are further apart then.
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
"""Both: as `epp/shell/engines/scrape` has them."""
_LEAST: Final = 1 - SCRAPE_JITTER
_SPREAD: Final = 2 * SCRAPE_JITTER
"""A pause is so much of the interval, and a share of this besides."""

Read: TypeAlias = tuple[Seconds, EndpointMetrics | None]
"""When the picker has read a page, and what it says; None: there was no connection."""


class ScrapeTrouble(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From `from_s` to `to_s` scrapes get no answer, or get it later.

    One that takes `SCRAPE_TIMEOUT_S` or more is given up, and the next one waits for that. Of several
    troubles at once the one that loses most is in effect.
    """

    from_s: Instant
    to_s: Instant
    loss: Share = 0.0
    """Share of the scrapes that get no answer."""
    more_s: Duration = 0.0
    """How much longer an answer takes; it tells the state of the pod when it was asked."""
    pods: Numbers = ()
    pickers: Numbers = ()

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)
        if not (self.loss or self.more_s):
            raise ValueError("expected loss or more_s above 0: else nothing is wrong with scrapes")

    def concerns(self, picker: int, pod: int) -> bool:
        """Whether it is one of this picker's scrapes of this pod."""
        return (not self.pickers or picker in self.pickers) and (not self.pods or pod in self.pods)


class Scraper:
    """One picker scraping one incarnation of one pod; the pod knows it until `stop`."""

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
        """`interval_s` on average; a picker has read a page `delay_s` after the pod showed it."""
        self.pod = pod
        self.endpoint = endpoint
        self._random = random
        self._interval_s = interval_s
        self._delay_s = delay_s
        self._troubles = troubles
        # Draws for the losses must not move those for the jitter.
        self._random_loss = Random(random.getrandbits(64)) if troubles else random
        self._jitter = _LEAST + _SPREAD * random.random()
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
            jitter = _LEAST + _SPREAD * random()
        if replaced is not None:
            self._keep(replaced)
        self.next_at = at
        self._jitter = jitter

    def read(self, now: Seconds) -> Sequence[Read]:
        """What the picker has read by `now` and not been given: the last page, refusals after it."""
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
        """What is wrong with scrapes at `at`."""
        found = [trouble for trouble in self._troubles if trouble.from_s <= at < trouble.to_s]
        return max(found, key=lambda trouble: (trouble.loss, trouble.more_s), default=None)

    def _ask_in_trouble(self, trouble: ScrapeTrouble, at: Seconds, pause_s: Seconds) -> Seconds:
        """Do the scrape of `at`: how long until the next one."""
        takes_s = self._delay_s + trouble.more_s
        if takes_s < SCRAPE_TIMEOUT_S and self._random_loss.random() >= trouble.loss:
            self._pages.append((at + takes_s, self.pod.page(at)))
            return max(takes_s, pause_s)
        self._pages.append((at + SCRAPE_TIMEOUT_S, None))
        return max(SCRAPE_TIMEOUT_S, pause_s)

    def _keep(self, at: Seconds) -> None:
        """The page of `at`, in the place of all before: it is read before anybody looks."""
        self._pages.clear()
        self._pages.append((at + self._delay_s, self.pod.page(at)))
