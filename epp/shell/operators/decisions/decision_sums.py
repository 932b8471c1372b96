"""Sum up the decisions of a period: their number, destinations and outcomes."""

from array import array
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from epp.core.decision.decisive import decisive
from epp.journal.decision_record import predicted_at, served_at
from epp.journal.past import PastDecision, PastRefusal
from epp.shell.operators.decisions.decision_rows import weighted

FAILED_FROM: Final = 500
SAMPLES_MAX: Final = 500_000
"""Maximum number of samples of each latency in a period, per endpoint and for all endpoints; later
samples are only missing in the percentiles.
"""
_DIGITS: Final = 4
_Row: TypeAlias = dict[str, Any]


class Sums:
    """The sums over the decisions of a period, for one endpoint or for all of them."""

    def __init__(self) -> None:
        self.decided = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        """Number of prompt tokens that the picker estimated as cached at the endpoint that served
        them.
        """
        self.compared_tokens = 0
        """Number of prompt tokens of those requests whose response reported its cached tokens."""
        self.cached_tokens = 0
        self.first_output_s = array("f")
        self.headers_s = array("f")
        self.duration_s = array("f")

    def add(self, past: PastDecision) -> None:
        told, end = past.told, past.end
        self.decided += 1
        self.prompt_tokens += told.prompt_tokens
        self.predicted_tokens += predicted_at(told, past.served)
        if end is None:
            return
        self.failed += (end.status or 0) >= FAILED_FROM
        if end.cached_tokens is not None:
            self.compared_tokens += told.prompt_tokens
            self.cached_tokens += end.cached_tokens
        for samples, value in (
            (self.first_output_s, end.first_output_s),
            (self.headers_s, end.response_headers_s),
            (self.duration_s, end.duration_s),
        ):
            if value is not None and len(samples) < SAMPLES_MAX:
                samples.append(value)

    def row(self, decided: int) -> _Row:
        """Return the sums as a row, with their share of `decided`, the total number of decisions;
        unknown values are None.
        """
        return {
            "decided": self.decided,
            "share": _share(self.decided, decided),
            "failed": _share(self.failed, self.decided),
            "prompt_tokens": round(self.prompt_tokens / self.decided) if self.decided else None,
            "hits_predicted": _share(self.predicted_tokens, self.prompt_tokens),
            "hits_found": _share(self.cached_tokens, self.compared_tokens),
            "ttft_p50_s": percentile(self.first_output_s, 0.5),
            "ttft_p90_s": percentile(self.first_output_s, 0.9),
            "headers_p50_s": percentile(self.headers_s, 0.5),
            "duration_p50_s": percentile(self.duration_s, 0.5),
        }


class Stretch:
    """All sums over the decisions and refusals from `since_s` to `until_s`, in Unix time."""

    def __init__(self, since_s: float, until_s: float) -> None:
        self.since_s, self.until_s = since_s, until_s
        self.all = Sums()
        self.endpoints: dict[str, Sums] = {}
        self.refused: dict[str, int] = {}
        self.decided_by: dict[str, int] = {}
        """Number of decisions in which a scorer was one of the fewest that put the chosen endpoint
        above the runner-up, by that scorer's name.
        """

    def add(self, past: PastDecision | PastRefusal) -> None:
        """Add a recorded decision or refusal to the sums if it is within the period."""
        if not self.since_s <= past.at_s < self.until_s:
            return
        if isinstance(past, PastRefusal):
            self.refused[past.told.reason] = self.refused.get(past.told.reason, 0) + 1
            return
        told = past.told
        self.all.add(past)
        name = served_at(told, past.served)
        there = self.endpoints.get(name)
        if there is None:
            there = self.endpoints[name] = Sums()
        there.add(past)
        other = weighted(told.runner_up_scores, past.setting)
        if other and len(past.setting.scorers) == len(told.parts):
            for at in decisive(told.parts, other):
                name = past.setting.scorers[at]
                self.decided_by[name] = self.decided_by.get(name, 0) + 1

    def row(self) -> _Row:
        """Return the sums of the whole period as a row."""
        seconds = max(self.until_s - self.since_s, 1.0)
        decided = self.all.decided
        return self.all.row(decided) | {
            "decided_per_s": round(decided / seconds, 2),
            "refused": dict(self.refused),
            "decided_by": {name: _share(n, decided) for name, n in self.decided_by.items()},
            "endpoints": {name: one.row(decided) for name, one in sorted(self.endpoints.items())},
        }


def percentile(samples: "array[float]", share: float) -> float | None:
    """Return the sample that is greater than the given `share` (0 to 1) of all samples, rounded to
    some digits, or None without samples.
    """
    if not samples:
        return None
    ordered = sorted(samples)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], _DIGITS)


def in_words(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a row of sums as short texts by column."""
    return {
        "decisions": f"{row['decided']}",
        "share": percent(row["share"]),
        "failed": percent(row["failed"]),
        "prompt tokens": "-" if row["prompt_tokens"] is None else f"{row['prompt_tokens']}",
        "hits predicted": percent(row["hits_predicted"]),
        "hits found": percent(row["hits_found"]),
        "TTFT p50": seconds(row["ttft_p50_s"]),
        "TTFT p90": seconds(row["ttft_p90_s"]),
        "headers p50": seconds(row["headers_p50_s"]),
        "whole p50": seconds(row["duration_p50_s"]),
    }


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, _DIGITS) if whole else None
