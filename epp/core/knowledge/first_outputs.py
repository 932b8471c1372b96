"""How many of our requests at an endpoint have had their first output, by the counter on its page.

Engines count first tokens, all requests together: `first_outputs_total` of a page. What it has risen by since the
last page are first outputs, oldest requests first; of some we know already, because a chunk or the end
of an answer was seen. The rest are told here, so that their prompts need not be believed to wait.

Others may use the endpoint, whose requests are in the same counter: of what it has risen by, ours is
the share that our requests in flight are of all that pages show there. And a page is written by whoever
answers at the endpoint's address: a counter that stands still while answers come, or falls, is not gone
by, and what it has not shown with the second page is forgotten.

Nor is one where LoRA adapters are used. Requests that wait for a slot or for their adapter to be loaded
are passed by others, and hold up nobody; what scorers make of them was weighed without them.
"""

import math
from math import isnan
from typing import Final

from epp.core.types import EndpointMetrics, Seconds

PAGE_S_MAX: Final = 2.0
"""Of pages that are further apart nothing is learnt: what they tell is over."""
UNSHOWN_MAX: Final = 4
"""First outputs that we know of and that the next page may show: answers come while a page is read."""
SILENT_MAX: Final = 4
"""So many first outputs that we know of, and none that the counter does: it stands still."""
RISES_AFTER_FALL: Final = 16
"""Pages on which a counter that has fallen must rise before it is gone by again."""
RISE_MAX: Final = 1e9
"""Of more first outputs from page to page the rest is not looked at."""
PAGES_AVERAGED: Final = 16
"""For the share of the requests there that is ours."""
OTHERS_MIN: Final = 1.0
"""Requests of others that pages must show on average. Requests of ours that end between the reading of a
page and now look like requests of others, and a first output that is not taken for ours is never made up for."""
_KEPT: Final = 1.0 - 1.0 / PAGES_AVERAGED


class FirstOutputs:
    """Of one life of one endpoint."""

    __slots__ = (
        *("_all", "_count", "_doubted", "_known", "_late", "_ours", "_rest", "_silent", "counted"),
    )

    def __init__(self) -> None:
        self.counted = False
        """Its counter tells which prompts have been computed."""
        self._count = math.nan
        self._doubted = 0
        """Rises until a counter that fell is believed."""
        self._known = 0
        """First outputs that we know of since the last page."""
        self._late = 0
        """Those of the page before that the last one did not show."""
        self._silent = 0
        """First outputs that we know of since the counter rose last."""
        self._rest = 0.0
        """What is ours of a rise, less than a request."""
        self._ours = self._all = 0.0
        """Requests in flight: sums over the last pages, ours and what these showed."""

    def known(self) -> None:
        """One of ours has had its first output, and no page has told so."""
        self._known += 1
        self._silent += 1

    def assumed(self) -> None:
        """One of ours is taken to have had it."""
        self._known += 1

    def scraped(self, metrics: EndpointMetrics, inflight_requests: int, *, since_s: Seconds) -> int:
        """How many of ours have had it that we do not know of; of `inflight_requests`, ours there.

        `since_s`: how long the last page is ago; inf: there was none.
        """
        before = self._count
        count = self._count = metrics.first_outputs_total if metrics.adapters is None else math.nan
        # An engine that has counted no more than we have there was new when we came: all of it is ours.
        new = since_s == math.inf and isnan(before) and 0.0 < count <= inflight_requests
        rise = count if new else count - before
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
            # Most pages: all of what follows would come to this.
            self.counted = self._silent < SILENT_MAX
            return 0
        if rise < 0.0:
            self._doubted = RISES_AFTER_FALL
        elif rise > 0.0:
            self._silent = 0
            self._doubted = max(0, self._doubted - 1)
        self.counted = not self._doubted and self._silent < SILENT_MAX
        # A page may tell infinity.
        counted = min(max(rise, 0.0), RISE_MAX)
        ours = self._rest + counted * self._share()
        expected = self._known + self._late
        whole = int(min(ours, expected + inflight_requests))
        shown = min(expected, whole)
        self._late = min(self._known, expected - shown, UNSHOWN_MAX)
        self._known = 0
        self._rest = ours - whole if ours - whole < 1.0 else 0.0
        return whole - shown if self.counted else 0

    def _share(self) -> float:
        """Of the requests that the last pages showed, those of ours; 1 where they do not tell."""
        if self._all - self._ours <= OTHERS_MIN * PAGES_AVERAGED:
            return 1.0
        return self._ours / self._all
