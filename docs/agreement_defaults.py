"""Measure the defaults of agreement: `python -m docs.agreement_defaults`.

Pickers that share nothing serve cases of the leaderboard with the default strategy, of which one
parameter, or the key of agreement, is changed at a time. The table has the share of prompt tokens that
pods had cached, and the mean E2E latency, as means over the seeds. It goes to docs/replicas.md by hand.
The measurement takes about three minutes on two idle cores.

No parameter says whether a session is the key. In these rows the plug-in gets another function for the
key, which takes sessions always or never.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import mean
from typing import Final
from unittest.mock import patch

from msgspec import Struct
from msgspec.structs import replace

from epp.configuration.config import DEFAULT_CONFIG
from epp.plugins import added_time
from epp.plugins.agreement import agreement_key
from epp.plugins.contract import Candidates, InferenceRequest, Ints
from sim.cluster.policies import PolicySource
from sim.experiments.leaderboard.cases import CASES
from sim.experiments.leaderboard.cell import Cell, inputs_of, run_cell
from sim.measurement.measures import figures_of
from sim.reports.report import markdown_table

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


def simulated(traffic: Traffic, variant: Variant, seed: int) -> Mapping[str, float]:
    """Return the figures of one run."""
    case = CASES[traffic.case]
    cell = Cell(
        case=replace(case, replicas=1 if variant.alone else traffic.pickers),
        policy=variant.policy,
        seed=seed,
        repetition=0,
        requests=traffic.requests,
    )
    with patch.object(added_time, "agreement_key", KEYS[variant.sessions]):
        return figures_of(run_cell(replace(cell, inputs=inputs_of(cell))).summary)


def table(traffic: Sequence[Traffic], variants: Sequence[Variant], workers: int) -> str:
    """Simulate each of `variants` with each of `traffic` in `workers` processes, and return the table
    of their figures in Markdown.
    """
    runs = list(product(traffic, variants, SEEDS))
    figures: dict[tuple[Traffic, Variant, int], Mapping[str, float]] = {}
    with ProcessPoolExecutor(workers) as pool:
        for run, found in zip(runs, pool.map(simulated, *zip(*runs, strict=True)), strict=True):
            figures[run] = found
            print(run[0], run[1].name, run[2], file=sys.stderr, flush=True)
    rows = []
    for variant in variants:
        row = [variant.name]
        for one in traffic:
            of = [figures[one, variant, seed] for seed in SEEDS]
            hit_rate, e2e_s = (mean(run[name] for run in of) for name in ("hit_rate", "e2e_mean_s"))
            row.append(f"{hit_rate:.1%}, {e2e_s:.3g} s")
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
