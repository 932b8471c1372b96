"""Remember where an endpoint's metrics pages have the wanted series, so that later pages need not
be searched.

In the exposition format the series of a metric stand together below its `# TYPE` line, and engines
write that line even without series. An endpoint also keeps the order of its metrics. The heading of
each wanted metric is therefore searched near its position on the last page, and unchanged series
are not parsed again. Of a histogram only the sum and count are wanted, which stand among the
buckets. Each of them is searched by its labels near its last position.

The metrics in `seldom`, which are compared over half a minute or more, are searched on one page of
`SELDOM_EVERY`, all on the same page. On every page they would take longer than all others.

The result differs in two ways from parsing the complete page. Series that are searched rarely are
updated some pages later. A metric that was missing when the layout was taken, or a series apart
from its metric, is noticed with the next layout. That is after `PAGES_MAX` pages, or at once if a
heading is not near its position or the page grew by more than `GROWTH_BYTES_MAX`, as it does with a
new metric. This module performs no I/O.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final

NEAR_BYTES: Final = 256
"""Maximum distance in bytes between the heading of a metric and the place where it is expected on
the next page. Lines between two headings grow and shrink by some digits.
"""
GROWTH_BYTES_MAX: Final = 48
"""Maximum growth of a metrics page in bytes with which its layout counts as unchanged. It is less
than the heading and series of any metric of an engine.
"""
PAGES_MAX: Final = 64
"""Number of metrics pages that are parsed with one layout before it is renewed."""
KEPT_BYTES_MAX: Final = 32 * 1024
"""Maximum size in bytes of the wanted series on a page for which a layout is remembered; a page
with more is always parsed completely.
"""
SELDOM_EVERY: Final = 8
LINES_ALONE_MAX: Final = 64
"""Maximum number of series of one name for which single lines are remembered, such as those of
ranks or models of one engine.
"""
_AFTER_NAME: Final = (b"{", b" ", b"\t")
_AFTER_SERIES: Final = (b"#", b"")
"""First byte after the series of a metric: that of a comment, or none at the end of the page."""


def headings_of(names: bytes) -> re.Pattern[bytes]:
    """Return the regular expression for the `# TYPE` lines of metrics that match `names`."""
    return re.compile(rb"\n# TYPE (" + names + rb") [^\n]*")


class _Metric:
    __slots__ = ("at", "heading", "name", "seldom", "text")

    def __init__(self, name: bytes, heading: bytes, at: int, text: bytes, *, seldom: bool) -> None:
        self.name = name
        self.seldom = seldom
        """True if the metric is searched only on one of `SELDOM_EVERY` pages."""
        self.heading = heading
        """The metric's `# TYPE` line, including the newlines before and after it."""
        self.at = at
        """Position of the metric's heading on the last page, estimated if it was not searched
        there.
        """
        self.text = text
        """Text of the metric's series on the last page on which it was searched."""


class _Line(_Metric):
    """A series that is searched by its own line. Its heading is the line up to the value, and its
    text the value.
    """

    __slots__ = ()

    @property
    def after_name(self) -> bytes:
        return self.heading[1 + len(self.name) :] + self.text


class PageLayout:
    """The headings of one metrics page, with positions that are updated by each page passed to
    `changed`.
    """

    __slots__ = ("_lines", "_metrics", "_page_bytes", "_pages_left")

    def __init__(self, metrics: list[_Metric], page_bytes: int) -> None:
        self._metrics = metrics
        self._lines = [metric for metric in metrics if isinstance(metric, _Line)]
        self._page_bytes = page_bytes
        self._pages_left = PAGES_MAX

    def changed(self, page: bytes) -> dict[bytes, list[bytes]] | None:
        """Return the lines, without the name, of each metric whose series changed since they were
        last searched, by name.

        Return None if the page has another layout or its layout must be renewed.
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
                # Usually the value changed and has the same length.
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
    """Return the layout of a metrics page, given the number of `lines` of each wanted name.

    `alone` contains series whose lines may stand among those of other series, and `seldom` those
    that are searched on one page of `SELDOM_EVERY`. Return None in these cases:

    - A wanted series is not below the one heading of its metric and not in `alone`.
    - The page begins with a heading.
    - The wanted series exceed a limit of what is remembered.
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
            stand_alone = _lines_alone(page, name, seldom=name in seldom)
            kept_bytes += sum(len(line.heading) for line in stand_alone)
            if len(stand_alone) != count or kept_bytes > KEPT_BYTES_MAX:
                return None
            metrics += stand_alone
        elif below.get(name) != count:
            return None
    metrics.sort(key=lambda metric: metric.at)
    return PageLayout(metrics, len(page))


def _lines_alone(page: bytes, name: bytes, *, seldom: bool) -> list[_Line]:
    """Return the lines of the series `name`, wherever they stand on the page, or [] if one contains
    a "#" or has no end of its labels, or if there are too many.
    """
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
            found.append(_Line(name, heading, at, line[labels:], seldom=seldom))
        at = page.find(opening, end)
    return found


def _end_of_line(page: bytes, at: int) -> int:
    end = page.find(b"\n", at)
    return len(page) if end < 0 else end


def _series(page: bytes, name: bytes, at: int) -> tuple[list[bytes], bytes] | None:
    """Return the part after `name` of each consecutive line with that name from `at` on, and the
    text of these lines.

    Return None if the text exceeds `KEPT_BYTES_MAX`.
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
