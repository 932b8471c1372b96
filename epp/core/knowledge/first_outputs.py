"""The number of this picker's requests at an endpoint that had their first output, from the counter
on the endpoint's metrics page.

Engines count the first tokens of all requests: `first_outputs_total` of a page. The increase since
the last page are first outputs, oldest requests first. Some of them are already known, because the
picker saw a chunk or the end of the answer. This class returns the rest, so that their prompts no
longer count as pending.

Other clients may use the endpoint, and their requests are in the same counter. Our share of the
increase is our share of all requests that pages show there. Any server may answer at the endpoint's
address, so a counter is not trusted if it falls, or stands still while answers come. A known first
output that the counter does not show by the second page is dropped.

The counter is not used if the endpoint reports LoRA adapters. Requests that wait for a slot or for
their adapter are overtaken by others and delay none of them. The weights of the scorers were chosen
without such requests.
"""

import math
from math import isnan
from typing import Final

from epp.core.types import EndpointMetrics, Seconds

PAGE_S_MAX: Final = 2.0
"""Longest time in seconds between two metrics pages for which the increase of the counter of first
outputs is used.
"""
UNSHOWN_MAX: Final = 4
"""Maximum number of first outputs that the picker saw and that the counter of only the next metrics
page may show, because answers arrive while a page is read.
"""
SILENT_MAX: Final = 4
"""Number of first outputs that the picker saw while the endpoint's counter of first outputs did not
increase. From this number on, the counter is not used.
"""
RISES_AFTER_FALL: Final = 16
"""Number of increases of the counter of first outputs after which it is used again, if its value
had fallen.
"""
RISE_MAX: Final = 1e9
"""Maximum increase of the counter of first outputs between two metrics pages; any excess is
ignored.
"""
PAGES_AVERAGED: Final = 16
"""Number of metrics pages over which this picker's share of an endpoint's requests is averaged."""
OTHERS_MIN: Final = 1.0
"""Average number of other clients' requests at an endpoint that its metrics pages must show before
this picker's share of the requests is used.

Requests of this picker that end between the reading of a page and now look like those of others. A
first output that is not attributed to this picker is never corrected.
"""
_KEPT: Final = 1.0 - 1.0 / PAGES_AVERAGED


class FirstOutputs:
    """The engine's counter of first outputs at one endpoint, since the endpoint started."""

    __slots__ = (
        *("_all", "_answers", "_count", "_doubted", "_known", "_late", "_ours", "_rest"),
        *("_silent", "_uncounted", "counted", "stepped", "to_come_max"),
    )

    def __init__(self) -> None:
        self.counted = False
        """True if the counter of first outputs is usable to determine which prompts have been
        computed.
        """
        self.stepped = False
        """True if the last metrics page counts more first outputs or answers than the page before it,
        so the engine ended a step in between.
        """
        self._answers = math.nan
        """Number of answers on the last metrics page."""
        self.to_come_max = math.inf
        """Upper bound of the number of requests at the endpoint, of all pickers, that had no first
        output when the last metrics page was read.
        """
        self._uncounted = math.inf
        """Running plus answered requests minus first outputs: the least value on the metrics pages
        since the endpoint was last idle, that page included; inf if unknown.
        """
        self._count = math.nan
        self._doubted = 0
        """Number of increases until the counter of first outputs, whose value fell, is used again.
        """
        self._known = 0
        """Number of first outputs that the picker saw or assumed since the last metrics page."""
        self._late = 0
        """Number of first outputs that the picker saw before the last metrics page was read, but
        that this page did not count.
        """
        self._silent = 0
        """Number of first outputs that the picker saw since the endpoint's counter last increased.
        """
        self._rest = 0.0
        """Fraction of a first output, 0 to 1, that is carried over after attributing this picker's
        share of the increases in whole requests.
        """
        self._ours = self._all = 0.0
        """Sums over the last metrics pages, of which older ones weigh less: this picker's requests
        at the endpoint, and all requests that the pages show there.
        """

    def known(self) -> None:
        """Count a first output of one of this picker's requests that the picker saw."""
        self._known += 1
        self._silent += 1

    def assumed(self) -> None:
        """Count a first output of one of this picker's requests that is assumed to have come."""
        self._known += 1

    def scraped(self, metrics: EndpointMetrics, inflight_requests: int, *, since_s: Seconds) -> int:
        """Return how many first outputs of this picker's requests the counter on this metrics page
        shows that the picker neither saw nor assumed; 0 if the counter is not usable.

        `inflight_requests` is the number of this picker's requests at the endpoint. `since_s` is
        the time since the last page, inf if there was none.
        """
        before = self._count
        count = self._count = metrics.first_outputs_total if metrics.adapters is None else math.nan
        # A first counter value of at most our requests in flight comes from a new engine, so all of
        # it is ours.
        new = since_s == math.inf and isnan(before) and 0.0 < count <= inflight_requests
        rise = count if new else count - before
        self.stepped = rise > 0.0 or metrics.answers_total > self._answers
        self._answers = metrics.answers_total
        self._bound(metrics)
        if not new and (isnan(rise) or since_s > PAGE_S_MAX):
            self.counted = False
            self._known = self._late = self._silent = 0
            self._rest = 0.0
            return 0
        there = metrics.running_requests + metrics.waiting_requests
        if 0.0 < there < math.inf:
            self._ours = self._ours * _KEPT + inflight_requests
            self._all = self._all * _KEPT + there
        if rise == 0.0 and not (self._known or self._late or self._doubted):
            # Most pages end here; the code below would give the same result.
            self.counted = self._silent < SILENT_MAX
            return 0
        if rise < 0.0:
            self._doubted = RISES_AFTER_FALL
        elif rise > 0.0:
            self._silent = 0
            self._doubted = max(0, self._doubted - 1)
        self.counted = not self._doubted and self._silent < SILENT_MAX
        # A page may contain infinity.
        counted = min(max(rise, 0.0), RISE_MAX)
        ours = self._rest + counted * self.share
        expected = self._known + self._late
        whole = int(min(ours, expected + inflight_requests))
        shown = min(expected, whole)
        self._late = min(self._known, expected - shown, UNSHOWN_MAX)
        self._known = 0
        self._rest = ours - whole if ours - whole < 1.0 else 0.0
        return whole - shown if self.counted else 0

    def _bound(self, metrics: EndpointMetrics) -> None:
        """Update `to_come_max`, the upper bound of requests without a first output.

        Running plus answered requests minus first outputs is the number of running requests without
        a first output, plus what the engine counted differently before. The least value since the
        engine was last idle stands for the latter; it is exact while the engine is idle.
        """
        running, waiting = metrics.running_requests, metrics.waiting_requests
        begun = running + metrics.answers_total - metrics.first_outputs_total
        # A page may show infinity.
        if not -math.inf < begun + waiting < math.inf:
            self.to_come_max = self._uncounted = math.inf
            return
        idle = running + waiting == 0.0
        self._uncounted = begun if idle else min(begun, self._uncounted)
        self.to_come_max = waiting + begun - self._uncounted

    @property
    def share(self) -> float:
        """Return this picker's share of the requests that the last metrics pages show at the
        endpoint, 0 to 1. It is 1 if they show too few requests of others.
        """
        if self._all - self._ours <= OTHERS_MIN * PAGES_AVERAGED:
            return 1.0
        return self._ours / self._all
