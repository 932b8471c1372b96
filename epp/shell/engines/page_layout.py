"""Where the pages of one endpoint have what is wanted, so that they need not be searched. Pure.

The exposition format demands that the series of a metric stand together below its `# TYPE` line,
and engines write that line before there is a series. An endpoint also keeps the order of its
metrics. So the heading of each wanted metric is looked for close to where the last page had it,
and series that are the same bytes as before are not read again.

It differs from reading the whole page in one way. A metric that the page did not have when its
layout was taken, and a series that stands apart from the others of its metric, are seen when the
layout is taken anew: after `PAGES_MAX` pages, and at once when a heading is not near its place or
the page has grown by more than `GROWTH_BYTES_MAX`, as it does by a new metric.
"""

import re
from collections.abc import Mapping
from typing import Final

NEAR_BYTES: Final = 256
"""How far a heading may be from where it is expected, either way: lines between two headings grow
and shrink by some digits."""
GROWTH_BYTES_MAX: Final = 48
"""From one page to the next. Less than heading and series of a metric of any engine have together."""
PAGES_MAX: Final = 64
"""How many pages are read by one layout."""
KEPT_BYTES_MAX: Final = 32 * 1024
"""Of wanted series of one page; a page with more of them is always read whole."""
_AFTER_NAME: Final = (b"{", b" ", b"\t")
_AFTER_SERIES: Final = (b"#", b"")
"""A comment, or the end of the page."""


def headings_of(names: bytes) -> re.Pattern[bytes]:
    """The `# TYPE` lines of the metrics that `names`, an expression, matches, up to their ends."""
    return re.compile(rb"\n# TYPE (" + names + rb") [^\n]*")


class _Metric:
    __slots__ = ("at", "heading", "name", "text")

    def __init__(self, name: bytes, heading: bytes, at: int, text: bytes) -> None:
        self.name = name
        self.heading = heading
        """With the newlines before and after it."""
        self.at = at
        """Where the heading began on the last page."""
        self.text = text
        """Its series on the last page."""


class PageLayout:
    """The headings of one page, which move with each page that `changed` reads by them."""

    __slots__ = ("_metrics", "_page_bytes", "_pages_left")

    def __init__(self, metrics: list[_Metric], page_bytes: int) -> None:
        self._metrics = metrics
        self._page_bytes = page_bytes
        self._pages_left = PAGES_MAX

    def changed(self, page: bytes) -> dict[bytes, list[bytes]] | None:
        """Metrics whose lines are not those of the last page -> what follows the name on each line.

        None: the page is laid out in another way, or it is time to look. Take its layout anew.
        """
        if not self._pages_left or len(page) > self._page_bytes + GROWTH_BYTES_MAX:
            return None
        self._pages_left -= 1
        self._page_bytes = len(page)
        changed: dict[bytes, list[bytes]] = {}
        moved = 0
        for metric in self._metrics:
            expected = metric.at + moved
            after = expected + len(metric.heading)
            at = page.find(metric.heading, max(expected - NEAR_BYTES, 0), after + NEAR_BYTES)
            if at < 0:
                return None
            moved = at - metric.at
            metric.at = at
            start = at + len(metric.heading)
            end = start + len(metric.text)
            if page[end : end + 1] not in _AFTER_SERIES or not page.startswith(metric.text, start):
                series = _series(page, metric.name, start)
                if series is None:
                    return None
                changed[metric.name], metric.text = series
        return changed


def layout_of(
    page: bytes, headings: re.Pattern[bytes], lines: Mapping[bytes, int]
) -> PageLayout | None:
    """The layout of `page`, which has so many `lines` of each name that is wanted.

    None: not all of them stand below the one heading of their metric, the page begins with a
    heading, or there is too much to keep.
    """
    if page.startswith(b"# TYPE "):
        return None
    metrics: list[_Metric] = []
    below: dict[bytes, int] = {}
    kept_bytes = 0
    for heading in headings.finditer(page):
        name = heading[1]
        series = _series(page, name, heading.end() + 1)
        if name in below or series is None:
            return None
        samples, text = series
        below[name] = len(samples)
        kept_bytes += len(text)
        if kept_bytes > KEPT_BYTES_MAX:
            return None
        metrics.append(_Metric(name, heading[0] + b"\n", heading.start(), text))
    if any(below.get(name) != count for name, count in lines.items()):
        return None
    return PageLayout(metrics, len(page))


def _series(page: bytes, name: bytes, at: int) -> tuple[list[bytes], bytes] | None:
    """What follows `name` on each of its lines from `at` on, and the text of the lines.

    None: there is too much to keep.
    """
    first = at
    lines: list[bytes] = []
    while page.startswith(name, at) and page[(rest := at + len(name)) : rest + 1] in _AFTER_NAME:
        end = page.find(b"\n", rest)
        if end < 0:
            end = len(page)
        lines.append(page[rest:end])
        at = end + 1
        if at - first > KEPT_BYTES_MAX:
            return None
    return lines, page[first:at]
