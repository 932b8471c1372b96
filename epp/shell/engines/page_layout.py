"""Where the pages of one endpoint have what is wanted, so that they need not be searched. Pure.

The exposition format demands that the series of a metric stand together below its `# TYPE` line,
and engines write that line before there is a series. An endpoint also keeps the order of its
metrics. So the heading of each wanted metric is looked for close to where the last page had it,
and series that are the same bytes as before are not read again. Of a histogram only the lines of its
sum and its count are wanted, which stand among those of its buckets: each is looked for by its labels,
close to where it was.

What is compared over half a minute or more is looked for on one page of `SELDOM_EVERY`, all of it on the
same one: the lines of histograms, and metrics that are named as `seldom`. On every page they would take
longer than all the rest.

It differs from reading the whole page in two ways. What is looked for seldom is seen some pages later.
And a metric that the page did not have when its
layout was taken, and a series that stands apart from the others of its metric, are seen when the
layout is taken anew: after `PAGES_MAX` pages, and at once when a heading is not near its place or
the page has grown by more than `GROWTH_BYTES_MAX`, as it does by a new metric.
"""

import re
from collections.abc import Collection, Mapping
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
SELDOM_EVERY: Final = 8
LINES_ALONE_MAX: Final = 64
"""Of one name: as many ranks or models as share an engine's page."""
_AFTER_NAME: Final = (b"{", b" ", b"\t")
_AFTER_SERIES: Final = (b"#", b"")
"""A comment, or the end of the page."""


def headings_of(names: bytes) -> re.Pattern[bytes]:
    """The `# TYPE` lines of the metrics that `names`, an expression, matches, up to their ends."""
    return re.compile(rb"\n# TYPE (" + names + rb") [^\n]*")


class _Metric:
    __slots__ = ("at", "heading", "name", "seldom", "text")

    def __init__(self, name: bytes, heading: bytes, at: int, text: bytes, *, seldom: bool) -> None:
        self.name = name
        self.seldom = seldom
        """It is looked for on one page of `SELDOM_EVERY`."""
        self.heading = heading
        """With the newlines before and after it."""
        self.at = at
        """Where the heading began on the last page."""
        self.text = text
        """Its series on the last page."""


class _Line(_Metric):
    """A series that stands alone: its heading is the line up to its value, its text the value."""

    __slots__ = ()

    @property
    def after_name(self) -> bytes:
        return self.heading[1 + len(self.name) :] + self.text


class PageLayout:
    """The headings of one page, which move with each page that `changed` reads by them."""

    __slots__ = ("_lines", "_metrics", "_page_bytes", "_pages_left")

    def __init__(self, metrics: list[_Metric], page_bytes: int) -> None:
        self._metrics = metrics
        self._lines = [metric for metric in metrics if isinstance(metric, _Line)]
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
        all_due = self._pages_left % SELDOM_EVERY == 0
        changed: dict[bytes, list[bytes]] = {}
        changed_lines: set[bytes] = set()
        moved = 0
        for metric in self._metrics:
            if metric.seldom and not all_due:
                metric.at += moved
                continue
            expected = metric.at + moved
            after = expected + len(metric.heading)
            at = page.find(metric.heading, max(expected - NEAR_BYTES, 0), after + NEAR_BYTES)
            if at < 0:
                return None
            moved = at - metric.at
            metric.at = at
            start = at + len(metric.heading)
            end = start + len(metric.text)
            if isinstance(metric, _Line):
                # Most often it is another value, and as long as the last one.
                if page[end : end + 1] != b"\n" or not page.startswith(metric.text, start):
                    metric.text = page[start : _end_of_line(page, start)]
                    changed_lines.add(metric.name)
                continue
            if page[end : end + 1] not in _AFTER_SERIES or not page.startswith(metric.text, start):
                series = _series(page, metric.name, start)
                if series is None:
                    return None
                changed[metric.name], metric.text = series
        for name in changed_lines:
            changed[name] = [line.after_name for line in self._lines if line.name == name]
        return changed


def layout_of(
    page: bytes,
    headings: re.Pattern[bytes],
    lines: Mapping[bytes, int],
    alone: Collection[bytes] = (),
    seldom: Collection[bytes] = (),
) -> PageLayout | None:
    """The layout of `page`, which has so many `lines` of each name that is wanted.

    `alone`: series that may stand among others; they are looked for as seldom as those of `seldom`.
    None: not all of them stand below the one heading of their metric, except those `alone`, the page
    begins with a heading, or there is too much to keep.
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
        opening = heading[0] + b"\n"
        metrics.append(_Metric(name, opening, heading.start(), text, seldom=name in seldom))
    for name, count in lines.items():
        if name in alone and name not in below:
            stand_alone = _lines_alone(page, name)
            kept_bytes += sum(len(line.heading) for line in stand_alone)
            if len(stand_alone) != count or kept_bytes > KEPT_BYTES_MAX:
                return None
            metrics += stand_alone
        elif below.get(name) != count:
            return None
    metrics.sort(key=lambda metric: metric.at)
    return PageLayout(metrics, len(page))


def _lines_alone(page: bytes, name: bytes) -> list[_Line]:
    """The series of `name`, wherever they stand; [] if one of them ends in a comment."""
    found: list[_Line] = []
    opening = b"\n" + name
    at = page.find(opening)
    while at >= 0:
        start = at + len(opening)
        end = _end_of_line(page, start)
        line = page[start:end]
        if line[:1] in _AFTER_NAME:
            labelled = line.startswith(b"{")
            labels = line.rfind(b"} ") + 2 if labelled else 1
            if b"#" in line or labels <= labelled or len(found) == LINES_ALONE_MAX:
                return []
            heading = page[at : start + labels]
            found.append(_Line(name, heading, at, line[labels:], seldom=True))
        at = page.find(opening, end)
    return found


def _end_of_line(page: bytes, at: int) -> int:
    end = page.find(b"\n", at)
    return len(page) if end < 0 else end


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
