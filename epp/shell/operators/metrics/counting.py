"""Counters, gauges and histograms for one thread, rendered by prometheus_client.

The library's own types take a lock for every increment and search the bucket linearly. With fifteen
metrics per decision, that takes a third of the decision's time budget. The formats of pages and the
escaping are those of the library.

Events with many metrics are collected in rows (`Waiting`) and counted together, because a single
event would find its counters outside the processor's cache.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy import ndarray
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from epp.shell.operators.metrics.metric_table import MetricSpec

_NUMBER_BYTES: Final = 24
"""Maximum number of characters of a number on a metrics page, with the space before it and the line
break.
"""
_COUNT_BYTES: Final = 16
_FEW: Final = 32
"""Number of observed values below which they are sorted one by one into a histogram's buckets,
because an array operation would be slower.
"""

Column: TypeAlias = ndarray[tuple[int], np.dtype[np.float64]]
Rows: TypeAlias = ndarray[tuple[int, int], np.dtype[np.float64]]
Key = TypeVar("Key")


class Number:
    """The value of a counter or a gauge for one set of label values."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self._value += amount

    def dec(self) -> None:
        self._value -= 1.0

    def set(self, value: float) -> None:
        self._value = value

    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]:
        return [Sample(name, labels, self._value)]


class Distribution:
    """A histogram for one set of label values. `bounds` are ascending upper bounds without +Inf."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._exemplars: dict[int, Exemplar] = {}
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Column) -> None:
        """Observe all `values` in the histogram. Many values are added up before they are added to
        the sum, so that the sum is rounded only once.
        """
        if len(values) < _FEW:
            for value in values.tolist():
                self.observe(value)
            return
        found = np.bincount(np.searchsorted(self._bounds, values))
        for bucket, count in enumerate(found.tolist()):
            self._counts[bucket] += count
        self._sum += float(values.sum())

    def exemplify(self, exemplar: Exemplar, *, grow: bool) -> bool:
        """Attach `exemplar` to the histogram bucket of its observed value, in place of the bucket's
        previous one.

        Without `grow` only an existing exemplar is replaced. Return True if the histogram has one
        more exemplar now.
        """
        bucket = bisect_left(self._bounds, exemplar.value)
        added = bucket not in self._exemplars
        if grow or not added:
            self._exemplars[bucket] = exemplar
        return grow and added

    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]:
        """Return the histogram's samples in the exposition format: cumulative buckets, then count
        and sum.
        """
        found: list[Sample] = []
        below = 0
        exemplars = self._exemplars
        for at, (bound, count) in enumerate(
            zip((*self._bounds, math.inf), self._counts, strict=True)
        ):
            below += count
            bucket = {**labels, "le": "+Inf" if bound == math.inf else str(bound)}
            found.append(Sample(f"{name}_bucket", bucket, float(below), exemplar=exemplars.get(at)))
        found.append(Sample(f"{name}_count", labels, float(below)))
        found.append(Sample(f"{name}_sum", labels, self._sum))
        return found


class Sum:
    """A sum and a count of observations, exported as a summary without quantiles."""

    __slots__ = ("_count", "_sum")

    def __init__(self) -> None:
        self._count = 0
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add an observed value to the sum and count; NaN means unknown and is ignored."""
        if not math.isnan(value):
            self._count += 1
            self._sum += value

    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]:
        return [
            Sample(f"{name}_count", labels, float(self._count)),
            Sample(f"{name}_sum", labels, self._sum),
        ]


class Waiting(Generic[Key]):
    """A list of events that wait to be counted in metrics. Each is a row with a key and `width`
    numbers.

    The list stores only the key and copies of the numbers. The caller limits the number of rows.
    """

    __slots__ = ("_keys", "_numbers", "_pack", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._pack = Struct(f"{width}d").pack
        self._keys: list[Key] = []
        self._numbers = bytearray()

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, key: Key, *numbers: float) -> int:
        """Add an event's row and return the number of waiting rows.

        Raises `struct.error` and adds nothing unless there are `width` numbers.
        """
        self._numbers += self._pack(*numbers)
        self._keys.append(key)
        return len(self._keys)

    def take(self) -> tuple[list[Key], Rows]:
        """Return all waiting rows, oldest first, and clear the list."""
        keys, rows = self._keys, np.frombuffer(self._numbers).reshape(-1, self._width)
        self._keys, self._numbers = [], bytearray()
        return keys, rows


Child = TypeVar("Child", bound=Number | Distribution | Sum)


class Family(Collector, Generic[Child]):
    """One metric of the table with its values by label values. It is a collector to register with
    prometheus_client.
    """

    def __init__(self, row: MetricSpec, make: Callable[[], Child]) -> None:
        self.row: Final = row
        self._make = make
        self._children: dict[tuple[str, ...], Child] = {}
        if not row.labels:
            self.labels()

    def labels(self, *values: str) -> Child:
        """Return the value (child) of this metric with the given label values, creating it if
        necessary.
        """
        assert len(values) == len(self.row.labels), f"{self.row.name} has labels {self.row.labels}"
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._make()
        return child

    def page_bytes(self, values: tuple[str, ...]) -> int:
        """Return an upper estimate of the bytes on a metrics page that a child with these label
        values takes.
        """
        row = self.row
        labels = 2 + sum(
            len(label) + 4 + len(value.encode()) + value.count('"') + value.count("\\")
            for label, value in zip(row.labels, values, strict=True)
        )
        if not row.buckets:
            return len(row.name) + labels + _NUMBER_BYTES
        # There is one line per bucket, +Inf, count and sum.
        line = len(row.name) + len("_bucket") + labels + _COUNT_BYTES
        bounds = sum(len(f'le="{bound}",') for bound in (*row.buckets, math.inf))
        return (len(row.buckets) + 3) * line + bounds + _NUMBER_BYTES

    def remove(self, *values: str) -> None:
        del self._children[values]

    def retain(self, stays: Callable[[tuple[str, ...]], bool]) -> None:
        """Remove the children of this metric for whose label values `stays` is false."""
        self._children = {
            values: child for values, child in self._children.items() if stays(values)
        }

    def clear(self) -> None:
        self._children.clear()

    def describe(self) -> Iterator[Metric]:
        """Return the metric for the registry, which detects duplicate names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        row = self.row
        family = Metric(row.name.removesuffix("_total"), row.help, row.kind)
        # The samples are created while the page is written, so that a family of a thousand children
        # can be written in slices. The library only iterates over them.
        family.samples = cast("list[Sample]", self)
        yield family

    def __iter__(self) -> Iterator[Sample]:
        names = self.row.labels
        # A copy is used because children may be added or removed between two samples.
        for values, child in tuple(self._children.items()):
            yield from child.samples(self.row.name, dict(zip(names, values, strict=True)))
