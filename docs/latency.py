"""Measure how well latencies are predicted in the simulator: `python -m docs.latency`.

Each of `CASES_SHOWN` runs with the default scorer and `predicted-latency-producer`, in a gateway
that shows answers to the picker. The table has the median relative error of the estimate alone, of
the regression, and of what the picker would have used, over the completed requests of a run and as
a mean over the seeds. It is printed and pasted into docs/scoring.md.
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from epp.configuration.config import DEFAULT_CONFIG
from epp.core.knowledge.latency import estimate_of
from sim.cluster.policies import PolicySource
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.experiments.leaderboard.cases import CASES
from sim.experiments.run import Run, RunSettings
from sim.reports.report import markdown_table
from sim.traces.capture import CaptureWriter

CASES_SHOWN: Final = (
    "interactive-chat",
    "multi-turn",
    "b2b-small",
    "summarisation",
    "slow-pod",
    "set-above",
)
CONFIG: Final = DEFAULT_CONFIG.replace(
    "plugins:\n", "plugins:\n- type: predicted-latency-producer\n", 1
)
POLICY: Final = PolicySource(name="predicting", text=CONFIG, source="docs/latency.py")
KINDS: Final = ("TTFT", "TPOT")


class Errors(Struct):
    """Relative errors of the predictions of one latency, TTFT or TPOT, in one run."""

    estimate: list[float]
    learned: list[float]
    used: list[float]
    """Errors of the predictions that were usable at the decision."""
    placed: int = 0

    def medians(self) -> tuple[float, float, float, float]:
        """Return the medians of `estimate`, `learned` and `used` (NaN if there are no errors), and
        the share of requests with a usable prediction.
        """
        shown = (
            median(one) if one else math.nan for one in (self.estimate, self.learned, self.used)
        )
        estimate, learned, used = shown
        return estimate, learned, used, len(self.used) / max(self.placed, 1)


def errors_in(case_name: str, seed: int, requests: int) -> dict[str, Errors]:
    """Return the errors of the predictions for the completed requests of one run, by kind. TPOT is
    compared for answers of at least two tokens.
    """
    case = CASES[case_name]
    found = {kind: Errors([], [], []) for kind in KINDS}
    cluster = replace(case.cluster(), response_chunks=True)

    def ended(request: SimulatedRequest) -> None:
        route, first_s = request.route, request.first_token_at
        if request.fate is not Fate.COMPLETE or route is None or first_s is None:
            return
        assert route.lease is not None
        decision, placed = route.decision, route.lease.latency
        assert decision is not None
        assert placed is not None
        assert request.routed_at is not None
        assert request.finished_at is not None
        candidates, at = decision.leg.candidates, decision.leg.picked
        seen_s = first_s + cluster.network_delay_s - request.routed_at
        used_s = candidates.predicted_ttft_s.item(at)
        _add(found["TTFT"], estimate_of(placed.ttft_features), placed.ttft_s, used_s, seen_s)
        assert request.engine is not None
        tokens = request.engine.generated_tokens
        if tokens >= 2 and request.finished_at > first_s:
            seen_s = (request.finished_at - first_s) / (tokens - 1)
            used_s = candidates.predicted_tpot_s.item(at)
            _add(found["TPOT"], estimate_of(placed.tpot_features), placed.tpot_s, used_s, seen_s)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{case_name}.jsonl"
        span_s = 0.0
        with path.open("wb") as file:
            writer = CaptureWriter(file, source=f"{case_name}, seed {seed}")
            for arrival in case.arrivals(seed, requests):
                writer.write_arrival(arrival)
                span_s = max(span_s, arrival.time_s)
        settings = RunSettings(
            trace=str(path),
            policy=POLICY,
            cluster=cluster,
            seed=seed,
            requests_max=requests,
            targets=case.targets,
            scenario=case.scenario(span_s),
        )
        Run(settings, [ended]).cluster.run()
    return found


def _add(errors: Errors, estimate_s: float, learned_s: float, used_s: float, seen_s: float) -> None:
    errors.placed += 1
    errors.estimate.append(abs(estimate_s - seen_s) / seen_s)
    errors.learned.append(abs(learned_s - seen_s) / seen_s)
    if not math.isnan(used_s):
        errors.used.append(abs(used_s - seen_s) / seen_s)


def table(cases: Sequence[str], seeds: range, requests: int) -> str:
    """Run each case with each seed, and return the table of the errors of predicted latencies in
    Markdown.
    """
    rows = []
    for case in cases:
        runs = [errors_in(case, seed, requests) for seed in seeds]
        for kind in KINDS:
            medians = zip(*(run[kind].medians() for run in runs), strict=True)
            rows.append([case, kind, *(f"{mean(values):.0%}" for values in medians)])
        print(rows[-2:], flush=True)
    head = ["case", "latency", "estimate", "regression", "used", "usable"]
    return markdown_table([head, *rows], text_columns=2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.latency", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES_SHOWN)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    given = parser.parse_args()
    print(table(given.cases, range(1, given.seeds + 1), given.requests))


if __name__ == "__main__":
    main()
