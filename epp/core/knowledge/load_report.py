"""Parser of the load that an engine reports in a response header. It has no I/O.

vLLM adds `endpoint-load-metrics` to answers that are not streamed, if the request asked for it:
    TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=2.0
    JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 2.0}}

With several data-parallel ranks behind one address, the report covers one of them. The next scrape
covers all.
"""

import math
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct, field

LOAD_REPORT_HEADER: Final = "endpoint-load-metrics"
LOAD_REPORT_REQUEST_HEADER: Final = "endpoint-load-metrics-format"
LOAD_REPORT_FORMAT: Final = "TEXT"
LENGTH_MAX: Final = 1_024
"""Maximum length in characters of a load-report header: ten times what vLLM sends."""
_VALUE_MAX: Final = 1e15
_NUMBER_LENGTH_MAX: Final = 32
_PREFIX: Final = "named_metrics."


class LoadReport(Struct, frozen=True, kw_only=True):
    """The values of one load report of an engine. A value that is missing, negative or too large is
    NaN.
    """

    waiting_requests: float = math.nan
    running_requests: float = math.nan
    kv_cache_usage: float = math.nan
    """Share of the engine's KV cache in use, from 0 to 1; a larger reported value becomes 1."""


class _Document(Struct):
    named_metrics: dict[str, float] = field(default_factory=dict)


_JSON: Final = msgspec.json.Decoder(_Document)


def read_load_report(text: str) -> LoadReport | None:
    """Return the load report in the value of a response header. Return None if the value is
    malformed, too long, or has no valid load value.
    """
    if len(text) > LENGTH_MAX:
        return None
    kind, _, rest = text.strip().partition(" ")
    try:
        match kind.upper():
            case "TEXT":
                named = dict(_pairs(rest))
            case "JSON":
                named = _JSON.decode(rest).named_metrics
            case _:
                return None
    except (ValueError, msgspec.DecodeError):
        return None
    report = LoadReport(
        waiting_requests=_count(named.get("num_requests_waiting")),
        running_requests=_count(named.get("num_requests_running")),
        kv_cache_usage=min(_count(named.get("kv_cache_usage_perc")), 1.0),
    )
    told = (report.waiting_requests, report.running_requests, report.kv_cache_usage)
    return None if all(math.isnan(value) for value in told) else report


def _pairs(text: str) -> Iterable[tuple[str, float]]:
    """Yield (name without the prefix `named_metrics.`, value) of each entry of a load report in the
    TEXT format that has this prefix. Raises `ValueError` for a malformed number.
    """
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if not name.startswith(_PREFIX):
            continue  # a value of another engine, such as cpu_utilization
        if len(number) > _NUMBER_LENGTH_MAX or "_" in number:
            raise ValueError(
                f"expected a number of at most {_NUMBER_LENGTH_MAX} characters without `_`, got "
                f"{len(number)} characters"
            )
        yield name.removeprefix(_PREFIX), float(number)


def _count(value: float | None) -> float:
    """Return `value`, one value of a load report, or NaN if it is missing, negative or too large."""
    return value if value is not None and 0 <= value <= _VALUE_MAX else math.nan
