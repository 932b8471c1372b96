"""Measure the default scorer's rule for the length of answers: `python -m docs.answer_lengths`.

The cases of the leaderboard run with the default strategy, in which the expected length is learned from
the engines, and with fixed lengths. Figures are ratios to a fixed length of 256 tokens: geometric means
over the cases of the means over the seeds, and the two cases that differ most in mean E2E. They go to
docs/scoring.md by hand. The measurement takes about two minutes on two idle cores.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import geometric_mean, mean
from typing import Final
from unittest.mock import patch

from msgspec.structs import replace

from epp.configuration.config import DEFAULT_CONFIG
from epp.core.knowledge.answer_lengths import AnswerLengths
from sim.cluster.policies import PolicySource
from sim.experiments.leaderboard.cases import CASES
from sim.experiments.leaderboard.cell import Cell, inputs_of, run_cell
from sim.measurement.measures import figures_of
from sim.reports.report import markdown_table

SEEDS: Final = (1, 2, 3)
REQUESTS: Final = 400
SCORER: Final = "- type: added-time-scorer\n"
LEARNED: Final = "learned"
FIXED: Final = (256, 128, 512)
"""Fixed lengths in tokens; the first is what the others are compared with."""
MEASURES: Final = {
    "E2E mean": "e2e_mean_s",
    "TTFT p90": "ttft_p90_s",
    "TTFT p99": "ttft_p99_s",
    "ITL p99": "itl_p99_s",
}


def policy_of(length: str) -> PolicySource:
    """Return the default strategy with `length` as limit of the expected length, if it is a number."""
    parameters = "" if length == LEARNED else f"  parameters: {{decodeTokens: {length}}}\n"
    text = DEFAULT_CONFIG.replace(SCORER, SCORER + parameters, 1)
    return PolicySource(name=f"answers {length}", text=text, source="docs/answer_lengths.py")


def simulated(case: str, length: str, seed: int) -> Mapping[str, float]:
    """Return the figures of one run. With a fixed length the counters of the engines are not read."""
    cell = Cell(
        case=CASES[case], policy=policy_of(length), seed=seed, repetition=0, requests=REQUESTS
    )
    cell = replace(cell, inputs=inputs_of(cell))
    if length == LEARNED:
        return figures_of(run_cell(cell).summary)
    with patch.object(AnswerLengths, "scraped", lambda *_: None):
        return figures_of(run_cell(cell).summary)


def tables(cases: Sequence[str], workers: int) -> str:
    """Simulate all runs in `workers` processes, and return two tables in Markdown: the geometric means
    of the ratios, and the cases with the lowest and the highest ratio of mean E2E.
    """
    lengths = (*map(str, FIXED), LEARNED)
    runs = list(product(cases, lengths, SEEDS))
    figures: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    with ProcessPoolExecutor(workers) as pool:
        for run, found in zip(runs, pool.map(simulated, *zip(*runs, strict=True)), strict=True):
            figures.setdefault(run[:2], []).append(found)
            print(*run, file=sys.stderr, flush=True)
    means = {
        key: {name: mean(run[measure] for run in of) for name, measure in MEASURES.items()}
        for key, of in figures.items()
    }
    first = lengths[0]
    ratios = {
        length: {
            case: {name: means[case, length][name] / means[case, first][name] for name in MEASURES}
            for case in cases
        }
        for length in lengths[1:]
    }
    overall = [
        [length, *(_geometric(of[case][name] for case in cases) for name in MEASURES)]
        for length, of in ratios.items()
    ]
    extremes = []
    for length, of in ratios.items():
        ordered = sorted(cases, key=lambda case: of[case]["E2E mean"])
        shown = (f"`{case}` {of[case]['E2E mean']:.3f}" for case in (ordered[0], ordered[-1]))
        extremes.append([length, *shown])
    head = [f"ratio to {first}", *MEASURES]
    return "\n\n".join(
        (
            markdown_table([head, *overall], text_columns=1),
            markdown_table([["E2E mean", "lowest", "highest"], *extremes], text_columns=3),
        )
    )


def _geometric(ratios: Iterable[float]) -> str:
    found = [ratio for ratio in ratios if not math.isnan(ratio)]
    return f"{geometric_mean(found):.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.answer_lengths", description=__doc__)
    parser.add_argument(
        "--cases", nargs="*", default=[name for name in CASES if CASES[name].workload]
    )
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    print(tables(given.cases, given.workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
