"""Metrics about the requests of each endpoint, which reveal a faulty endpoint.

A request becomes one row when it ends; rows are counted together. Each endpoint has sums and
counts, from which means and their median over the pool follow. Histograms of a thousand endpoints
would make the page many megabytes long.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct

from epp.core.types import Endpoint, Seconds
from epp.shell.operators.metrics.counting import Family, Number, Sum, Waiting

ENDPOINTS_MAX: Final = 1_000
"""Maximum number of endpoints that have metric series of their own."""
WAITING_MAX: Final = 256
"""Maximum number of ended requests that wait to be counted in the series of their endpoints."""
UNREACHED: Final = "unreached"
"""Value of the label for the status class of responses that the gateway sent because it could not
reach the endpoint.
"""
_NUMBERS: Final = 6

_Labels = tuple[str, str, str]
_Key = tuple[str, str]
"""Name and address of an endpoint, by which its series are found."""


class _Children(Struct):
    headers_s: Sum
    duration_s: Sum
    prompt_tokens: Number
    predicted_hit_tokens: Number


class EndpointSeries:
    """The metric series of the current endpoints; those of removed endpoints are dropped."""

    def __init__(
        self,
        sums: Mapping[str, Family[Sum]],
        numbers: Mapping[str, Family[Number]],
        labels_of: Callable[[str, str], _Labels],
    ) -> None:
        """Create the series of endpoints in the metrics `sums` and `numbers`, given by metric name.
        `labels_of` returns the labels for the name and address of an endpoint.
        """
        self._headers_s = sums["homing_per_endpoint_response_headers_seconds"]
        self._ttft_s = sums["homing_per_endpoint_ttft_seconds"]
        self._duration_s = sums["homing_per_endpoint_request_duration_seconds"]
        self._errors = numbers["homing_per_endpoint_error_total"]
        self._prompt_tokens = numbers["homing_per_endpoint_prompt_tokens_total"]
        self._hit_tokens = numbers["homing_per_endpoint_predicted_hit_tokens_total"]
        self._labels_of = labels_of
        self._present: dict[_Key, _Labels] = {}
        self._children: dict[_Labels, _Children] = {}
        self._waiting: Waiting[_Key] = Waiting(_NUMBERS)

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the endpoints that have series by the first `ENDPOINTS_MAX` of `endpoints`, and
        drop the series of all others.
        """
        self.fold()
        self._present = {}
        for endpoint in endpoints:
            if len(self._present) == ENDPOINTS_MAX:
                break
            key = endpoint.name, endpoint.address
            self._present[key] = self._labels_of(*key)
        there = set(self._present.values())
        for labels in [labels for labels in self._children if labels not in there]:
            del self._children[labels]
        for family in (
            *(self._headers_s, self._ttft_s, self._duration_s),
            *(self._errors, self._prompt_tokens, self._hit_tokens),
        ):
            family.retain(lambda values: values[:3] in there)

    def answered(
        self,
        endpoint: Endpoint,
        *,
        headers_s: Seconds | None,
        ttft_s: Seconds | None,
        duration_s: Seconds | None,
        status: int | None,
        by_gateway: bool,
        prompt_tokens: int,
        predicted_hit_tokens: int,
    ) -> None:
        """Record the end of a request at `endpoint`; an argument is None if it was not observed."""
        waiting = self._waiting.append(
            (endpoint.name, endpoint.address),
            math.nan if headers_s is None else headers_s,
            math.nan if ttft_s is None else ttft_s,
            math.nan if duration_s is None else duration_s,
            -1.0 if by_gateway and status is not None and status >= 500 else status or 0,
            prompt_tokens,
            predicted_hit_tokens,
        )
        if waiting >= WAITING_MAX:
            self.fold()

    def fold(self) -> None:
        """Add the recorded ends of requests to the series of their endpoints. Endpoints that were
        removed have none, nor have those beyond `ENDPOINTS_MAX`.
        """
        if not self._waiting:
            return
        keys, rows = self._waiting.take()
        for key, row in zip(keys, rows.tolist(), strict=True):
            labels = self._present.get(key)
            if labels is not None:
                self._count(labels, *row)

    def _count(
        self,
        labels: _Labels,
        headers_s: float,
        ttft_s: float,
        duration_s: float,
        status: float,
        prompt_tokens: float,
        predicted_hit_tokens: float,
    ) -> None:
        children = self._children.get(labels)
        if children is None:
            children = self._children[labels] = _Children(
                self._headers_s.labels(*labels),
                self._duration_s.labels(*labels),
                self._prompt_tokens.labels(*labels),
                self._hit_tokens.labels(*labels),
            )
        children.headers_s.observe(headers_s)
        children.duration_s.observe(duration_s)
        children.prompt_tokens.inc(prompt_tokens)
        children.predicted_hit_tokens.inc(predicted_hit_tokens)
        if not math.isnan(ttft_s):
            self._ttft_s.labels(*labels).observe(ttft_s)
        if status < 0.0 or status >= 400.0:
            self._errors.labels(*labels, _class_of(status)).inc()


def _class_of(status: float) -> str:
    if status < 0.0:
        return UNREACHED
    return "4xx" if status < 500.0 else "5xx"
