"""Measure the defaults of agreement: `python -m docs.agreement_defaults`.

Pickers that share nothing serve cases of the leaderboard with the default strategy, of which one
parameter, or the key of agreement, is changed at a time. The table has the share of prompt tokens that
pods had cached, and the mean E2E latency, as means over the seeds. It goes to docs/replicas.md by hand.
The measurement takes about ten minutes on two idle cores.

No parameter says whether a session is the key. In these rows the plug-in gets another function for the
key, which takes sessions always or never.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Final
from unittest.mock import patch

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from epp.configuration.config import DEFAULT_CONFIG
from epp.plugins import added_time
from epp.plugins.agreement import agreement_key
from epp.plugins.contract import Candidates, InferenceRequest, Ints
from sim.cluster.policies import PolicySource
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.experiments.leaderboard.cases import CASES
from sim.experiments.run import Run, RunSettings
from sim.reports.report import markdown_table
from sim.traces.capture import CaptureWriter

SEEDS: Final = (1, 2, 3)
SCORER: Final = "- type: added-time-scorer\n"


class Traffic(Struct, frozen=True):
    """A case of the leaderboard: how many of its requests arrive, and how many pickers serve them."""

    case: str
    requests: int
    pickers: int

    def __str__(self) -> str:
        return f"`{self.case}`, {self.requests:,}"


class Variant(Struct, frozen=True, kw_only=True):
    """A row of the table: the default strategy with one change."""

    name: str
    parameters: str = ""
    """Parameters of the scorer that differ from the default, as the inside of a YAML mapping."""
    sessions: str = ""
    """"always" or "never": whether a session is the key of agreement; "" for the default rule."""
    alone: bool = False
    """True if a single picker serves all requests."""

    @property
    def policy(self) -> PolicySource:
        changed = f"{SCORER}  parameters: {{{self.parameters}}}\n" if self.parameters else SCORER
        text = DEFAULT_CONFIG.replace(SCORER, changed, 1)
        return PolicySource(name=self.name, text=text, source="docs/agreement_defaults.py")


class Cell(Struct, frozen=True):
    """One simulated run."""

    traffic: Traffic
    variant: Variant
    seed: int


class Figures(Struct, frozen=True):
    """The hit rate and the mean E2E latency in seconds of the completed requests of one run."""

    hit_rate: float
    e2e_s: float


TRAFFIC: Final = (
    Traffic("b2b", 1_000, 4),
    Traffic("multi-turn", 1_000, 4),
    Traffic("agent-tree", 1_000, 4),
    Traffic("pickers-4", 400, 4),
    Traffic("pickers-4", 2_000, 4),
    Traffic("pickers-held", 400, 3),
    Traffic("pickers-held", 2_000, 3),
)
VARIANTS: Final = (
    Variant(name="one picker", alone=True),
    Variant(name="the defaults"),
    Variant(name="the session always", sessions="always"),
    Variant(name="the session never", sessions="never"),
    *(
        Variant(name=f"`agreementBelow` {value}", parameters=f"agreementBelow: {value}")
        for value in (0.5, 0.9, 1)
    ),
    *(
        Variant(name=f"`agreementKeyTokens` {value:,}", parameters=f"agreementKeyTokens: {value}")
        for value in (256, 512, 2_048, 4_096)
    ),
)


def _always(
    request: InferenceRequest,
    candidates: Candidates,
    matched_blocks: Ints,
    *,
    key_tokens: int,
    session: str,
) -> int | None:
    returning = replace(request, moment=replace(request.moment, sessions_return=True))
    return agreement_key(
        returning, candidates, matched_blocks, key_tokens=key_tokens, session=session
    )


def _never(
    request: InferenceRequest,
    candidates: Candidates,
    matched_blocks: Ints,
    *,
    key_tokens: int,
    session: str,
) -> int | None:
    return agreement_key(request, candidates, matched_blocks, key_tokens=key_tokens, session="")


KEYS: Final[dict[str, Callable[..., int | None]]] = {
    "": agreement_key,
    "always": _always,
    "never": _never,
}


def simulated(cell: Cell) -> Figures:
    """Simulate `cell` and return its figures."""
    case = CASES[cell.traffic.case]
    pickers = 1 if cell.variant.alone else cell.traffic.pickers
    ended: list[SimulatedRequest] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with path.open("wb") as file:
            writer = CaptureWriter(file, source=cell.traffic.case)
            for arrival in case.arrivals(cell.seed, cell.traffic.requests):
                writer.write_arrival(arrival)
        settings = RunSettings(
            trace=str(path),
            policy=cell.variant.policy,
            cluster=replace(case.cluster(), replicas=pickers),
            seed=cell.seed,
            requests_max=cell.traffic.requests,
            targets=case.targets,
        )
        with patch.object(added_time, "agreement_key", KEYS[cell.variant.sessions]):
            Run(settings, [ended.append]).run()
    done = [request for request in ended if request.fate is Fate.COMPLETE]
    return Figures(
        hit_rate=sum(one.cached_tokens for one in done)
        / sum(one.arrival.prompt_tokens for one in done),
        e2e_s=float(np.mean([(one.ended_at or math.nan) - one.arrived_at for one in done])),
    )


def table(traffic: Sequence[Traffic], variants: Sequence[Variant], workers: int) -> str:
    """Simulate each of `variants` with each of `traffic` in `workers` processes, and return the table
    of their figures in Markdown.
    """
    cells = [Cell(*one) for one in product(traffic, variants, SEEDS)]
    figures: dict[Cell, Figures] = {}
    with ProcessPoolExecutor(workers) as pool:
        for cell, found in zip(cells, pool.map(simulated, cells), strict=True):
            figures[cell] = found
            print(cell.traffic, cell.variant.name, cell.seed, found, file=sys.stderr, flush=True)
    rows = []
    for variant in variants:
        row = [variant.name]
        for one in traffic:
            of = [figures[Cell(one, variant, seed)] for seed in SEEDS]
            hit_rate = np.mean([run.hit_rate for run in of])
            row.append(f"{hit_rate:.1%}, {np.mean([run.e2e_s for run in of]):.3g} s")
        rows.append(row)
    return markdown_table([["", *map(str, traffic)], *rows], text_columns=1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.agreement_defaults", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    print(table(TRAFFIC, VARIANTS, given.workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
