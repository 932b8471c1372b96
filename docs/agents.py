"""Measure the admission of agent sessions: `python -m docs.agents`.

Agents with growing histories and tool calls run on two pods, at several rates, with and without
`thunder-agent`. The table goes to docs/flow-control.md by hand. The measurement takes about two
minutes on two idle cores.

A session is one agent of a task; its completion time is the time from its first request to the end
of its last answer. The prefix hit rate is the share of all prompt tokens that the pods had cached.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds
from sim.cluster.cluster import Cluster
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.engine.profiles import find_profile
from sim.measurement.measures import ttft_of
from sim.reports.report import markdown_table
from sim.traces.arrival import Arrival
from sim.traces.lengths import Spread
from sim.traces.prompts import PromptHashes, request_of
from sim.traces.workloads import AgentTree, OpenLoad, Stage, Workload, arrivals

FOLDER: Final = Path(__file__).parent
PROFILE: Final = "llama-3.1-8b-h100-tp1"
PODS: Final = 2
BLOCK_TOKENS: Final = 64
SEEDS: Final = (1, 2, 3)
DURATION_S: Final[Seconds] = 300.0
RATES: Final = (0.05, 0.1, 0.2)
"""Tasks per second, each of which has three agents on average."""
CONFIGS: Final = ("default", str(FOLDER / "examples" / "flow-control" / "agents.yaml"))
AGENTS: Final = AgentTree(
    turns=Spread(type="lognormal", mean=15, std_dev=10, min=2, max=60),
    tool_result=Spread(type="lognormal", mean=1500, std_dev=1500, min=30, max=16_000),
    context_tokens_max=100_000,
)


class Run(Struct, frozen=True, kw_only=True):
    """One simulated run of agent sessions: its configuration, its rate of tasks and its seed."""

    config: str
    rate_per_s: float
    seed: int


class Figures(Struct, frozen=True, kw_only=True):
    """The figures of the agent sessions of one run, or their means over several runs."""

    sessions: float
    session_s: Seconds
    """Mean time in seconds from the first request of a session to the end of its last answer."""
    ttft_p90_s: Seconds
    hit_rate: float
    failed: float
    """Number of requests of the run that got no complete answer."""


def simulated(run: Run) -> Figures:
    """Simulate one run of agent sessions and return its figures."""
    load = OpenLoad(stages=(Stage(rate_per_s=run.rate_per_s, duration_s=DURATION_S),))
    settings = ClusterSettings(pods=(PodKind.of(find_profile(PROFILE)),) * PODS)
    ended: list[SimulatedRequest] = []
    Cluster(
        settings,
        settings.opener(policy_source(run.config)),
        _parsed,
        arrivals(Workload(content=AGENTS, load=load), run.seed),
        seed=run.seed,
        ended=ended.append,
    ).run()
    return figures_of(ended)


def figures_of(ended: Sequence[SimulatedRequest]) -> Figures:
    """Return the figures of the requests of one run. All but `failed` are figures of the requests
    with a complete answer.
    """
    done = [request for request in ended if request.fate is Fate.COMPLETE]
    sessions: dict[str, list[SimulatedRequest]] = defaultdict(list)
    for request in done:
        sessions[request.arrival.session].append(request)
    times_s = [
        max(one.ended_at or math.nan for one in turns) - min(one.arrived_at for one in turns)
        for turns in sessions.values()
    ]
    prompt_tokens = sum(one.arrival.prompt_tokens for one in done)
    return Figures(
        sessions=float(len(sessions)),
        session_s=float(np.mean(times_s)),
        ttft_p90_s=float(np.percentile([ttft_of(one) for one in done], 90)),
        hit_rate=sum(one.cached_tokens for one in done) / prompt_tokens,
        failed=float(len(ended) - len(done)),
    )


def mean_of(several: Sequence[Figures]) -> Figures:
    """Return the means of the figures of several runs."""
    names = Figures.__struct_fields__
    return Figures(
        **{name: float(np.mean([getattr(one, name) for one in several])) for name in names}
    )


def _parsed(arrival: Arrival, hashes: PromptHashes) -> InferenceRequest:
    return request_of(arrival, (BLOCK_TOKENS,), hashes)


def table(rates: Sequence[float], configs: Sequence[str], workers: int) -> str:
    """Simulate all runs of `rates` and `configs` in `workers` processes, and return the table of
    their figures in Markdown.
    """
    runs = [
        Run(config=config, rate_per_s=rate, seed=seed)
        for rate, config, seed in product(rates, configs, SEEDS)
    ]
    figures: dict[Run, Figures] = {}
    with ProcessPoolExecutor(workers) as pool:
        for run, found in zip(runs, pool.map(simulated, runs), strict=True):
            figures[run] = found
            print(run, found, file=sys.stderr, flush=True)
    rows = []
    for rate, config in product(rates, configs):
        of = mean_of([figures[Run(config=config, rate_per_s=rate, seed=seed)] for seed in SEEDS])
        rows.append(
            [
                f"{rate:g}",
                f"`{Path(config).stem}`",
                f"{of.sessions:.0f}",
                f"{of.session_s:.1f} s",
                f"{of.ttft_p90_s:.2f} s",
                f"{of.hit_rate:.2f}",
                f"{of.failed:g}",
            ]
        )
    head = [
        "tasks/s",
        "configuration",
        "sessions",
        "mean session",
        "TTFT p90",
        "hit rate",
        "failed",
    ]
    return markdown_table([head, *rows], text_columns=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="tasks per second")
    parser.add_argument("--configs", default=",".join(CONFIGS), help="configurations to compare")
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default: 2)")
    given = parser.parse_args()
    rates = [float(rate) for rate in given.rates.split(",")]
    print(table(rates, given.configs.split(","), given.workers))


if __name__ == "__main__":
    main()
