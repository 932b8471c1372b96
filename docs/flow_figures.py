"""Measure what the queue does in overload: `python -m docs.flow_figures`.

Four pods of one profile serve three kinds of traffic, without the queue, with it, and with it and
several pickers. Sixteen pods serve the first two as well, with the queue and one picker. The
figures go to docs/flow-figures.json, from which `python -m docs.reference` makes the tables of
docs/flow-control.md and `python -m docs.diagrams` the picture.

1. `tenants`: a tenant sends ten times as many tokens as another one, and both together send one and
   a half times as much as the pods can serve.
2. `batch`: interactive requests beside batch requests that no client slows down.
3. `burst`: ten times the usual rate for five seconds.

The requests that the queue protects are also served alone, on the same pods and at the same times.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product, takewhile
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from docs.row_lines import row_lines
from epp.core.flow.rooms import QUEUE_MIN
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds
from epp.plugins.strategy import config_of, step
from sim.cluster.cluster import Cluster
from sim.cluster.peering import PeerSettings
from sim.cluster.policies import PolicySource
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.engine.profiles import find_profile
from sim.measurement.intervals import student_t
from sim.measurement.measures import tpot_of, ttft_of
from sim.output import write_whole
from sim.reports.report import markdown_table
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes, request_of
from sim.traces.standard import STANDARD
from sim.traces.workloads import OpenLoad, Workload, arrivals

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "flow-figures.json"
PROFILE: Final = "qwen3-32b-h100-tp2"
PODS: Final = 4
PODS_MANY: Final = 16
"""Number of pods of the larger pool, which gets more requests in proportion."""
BLOCK_TOKENS: Final = 64
SEEDS: Final = (11, 12, 13, 14, 15, 16)
"""Seeds with which no constant of the queue was chosen; those were chosen with 1 to 5."""
CONFIDENCE: Final = 0.95
DURATION_S: Final[Seconds] = 60.0
"""Time in seconds during which requests arrive."""
WARM_UP_S: Final[Seconds] = 10.0
"""Time in seconds from the start of the run after which arriving requests count in the figures."""
BURST_S: Final = (20.0, 25.0)
"""Time in seconds, from the start of the run, at which the burst begins and ends."""
SAMPLE_S: Final[Seconds] = 0.05
"""Interval in seconds at which the queues of the engines are counted."""
TTFT_TARGET_S: Final[Seconds] = 2.0
TPOT_TARGET_S: Final[Seconds] = 0.1
"""Targets of the TTFT and of the time per output token in seconds; goodput counts requests that
meet both.
"""
PICKERS: Final = (1, 2, 4)
PEER_DELAY_S: Final[Seconds] = 0.001
BIN_S: Final[Seconds] = 2.0
"""Width in seconds of the intervals of arrivals for which the picture shows the TTFT."""

ALONE: Final = "alone"
OFF: Final = "off"
ON: Final = "on"
ARMS: Final = (ALONE, OFF, ON)

_QUEUE: Final = (
    "featureGates: [flowControl]\n"
    "flowControl: {defaultPriorityBand: {fairnessPolicyRef: token-fairness-policy}}\n"
)


class Scenario(Struct, frozen=True, kw_only=True):
    """A kind of traffic, and the requests in it that the queue protects."""

    workload: str
    """Name of the standard workload whose requests are sent."""
    protected: Callable[[Arrival], bool]
    protects: str
    """Name of the protected requests in tables."""
    others: str
    """Name of the other requests in tables, or "" if there are none."""


def _is_small(arrival: Arrival) -> bool:
    return any(value == "small" for _, value in arrival.headers)


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "tenants": Scenario(
        workload="two-tenants",
        protected=_is_small,
        protects="small tenant",
        others="large tenant",
    ),
    "batch": Scenario(
        workload="chat-and-batch",
        protected=lambda arrival: arrival.priority > 0,
        protects="interactive",
        others="batch",
    ),
    "burst": Scenario(
        workload="one-burst", protected=lambda arrival: True, protects="all requests", others=""
    ),
}


class Run(Struct, frozen=True, kw_only=True):
    """One simulation of the queue in overload: its traffic, its arm, its number of pickers and its
    seed.
    """

    scenario: str
    arm: str
    """One of `ARMS`: only the protected requests are sent, or all of them without or with the queue."""
    pickers: int
    seed: int
    pods: int = PODS


class Row(Struct, frozen=True, kw_only=True):
    """The figures of one run; times are in seconds.

    Requests that arrive during the warm-up count only in `served_per_s`, `refused`, `failed` and
    the queues of the engines.
    """

    run: Run
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    """99th percentile of the TTFT of the protected requests; the two fields above are its median
    and its 90th percentile.
    """
    others_ttft_p90_s: float | None
    goodput_per_s: float
    """Number of requests per second, of all kinds, that arrived after the warm-up and met both
    targets.
    """
    served_per_s: float
    """Number of complete requests per second that ended from `WARM_UP_S` to `DURATION_S`."""
    queue_p99: float
    """99th percentile of the number of requests that waited in an engine, over pods and time."""
    queue_max: float
    refused: int
    """Number of requests of the run that were refused with 429."""
    failed: int
    """Number of requests of the run that ended with a status of 500 or more."""
    drained_s: float | None
    """Time in seconds from the end of the burst to the last first token of a request that arrived
    in the burst; None in other scenarios.
    """
    series: list[list[float]] = []
    """Arrival time in seconds and 90th percentile of the TTFT of protected requests, by intervals;
    only of the first seed with one picker and the smaller pool.
    """


# --- runs -----------------------------------------------------------------------------------------


def traffic(run: Run) -> Iterator[Arrival]:
    """Yield the requests of `run`; only the protected ones if its arm is `ALONE`."""
    scenario = SCENARIOS[run.scenario]
    drawn = arrivals(_scaled(STANDARD[scenario.workload], run.pods / PODS), run.seed)
    within = takewhile(lambda one: one.time_s < DURATION_S, drawn)
    sent = (one for one in within if run.arm != ALONE or scenario.protected(one))
    for index, one in enumerate(sent):
        yield replace(one, index=index)


def _scaled(workload: Workload, factor: float) -> Workload:
    """Return `workload` with `factor` times as many requests per second."""
    assert isinstance(workload.load, OpenLoad), "the scenarios have no closed load"
    stages = (replace(one, rate_per_s=factor * one.rate_per_s) for one in workload.load.stages)
    return replace(
        workload,
        load=replace(workload.load, stages=tuple(stages)),
        beside=tuple(_scaled(one, factor) for one in workload.beside),
    )


def source_of(arm: str) -> PolicySource:
    """Return the default strategy, with the queue for the arm `ON`."""
    text = config_of(step("added-time-scorer"))
    return PolicySource(name=arm, text=text + _QUEUE if arm == ON else text, source=arm)


class _Queues:
    """The numbers of requests that wait in the engines, counted at intervals."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.found: list[float] = []
        cluster.loop.after(WARM_UP_S, self._count)

    def _count(self) -> None:
        cluster = self._cluster
        now = cluster.loop.now
        for pod in cluster.pods.announced():
            page = pod.page(now)
            if page is not None:
                self.found.append(page.waiting_requests)
        if now < DURATION_S:
            cluster.loop.after(SAMPLE_S, self._count)


def simulated(run: Run) -> Row:
    """Simulate one run of the queue in overload and return its figures."""
    settings = ClusterSettings(
        pods=(PodKind.of(find_profile(PROFILE)),) * run.pods,
        replicas=run.pickers,
        peers=PeerSettings(delay_s=PEER_DELAY_S) if run.pickers > 1 else None,
    )
    ended: list[SimulatedRequest] = []
    cluster = Cluster(
        settings,
        settings.opener(source_of(run.arm)),
        _parsed,
        list(traffic(run)),
        seed=run.seed,
        ended=ended.append,
    )
    queues = _Queues(cluster)
    cluster.run()
    return row_of(run, ended, queues.found)


def _parsed(arrival: Arrival, hashes: PromptHashes) -> InferenceRequest:
    return request_of(arrival, (BLOCK_TOKENS,), hashes)


def row_of(run: Run, ended: Sequence[SimulatedRequest], queues: Sequence[float]) -> Row:
    """Return the figures of one run from its requests that ended, and from the numbers of requests
    that waited in the engines.
    """
    scenario = SCENARIOS[run.scenario]
    counted = [one for one in ended if one.arrived_at >= WARM_UP_S]
    done = [one for one in counted if one.fate is Fate.COMPLETE]
    mine = [one for one in done if scenario.protected(one.arrival)]
    others = [one for one in done if not scenario.protected(one.arrival)]
    ttft_s = np.array([ttft_of(one) for one in mine])
    length_s = DURATION_S - WARM_UP_S
    in_time = sum(
        one.fate is Fate.COMPLETE and WARM_UP_S <= (one.ended_at or 0.0) < DURATION_S
        for one in ended
    )
    first_seed = run.seed == SEEDS[0] and run.pickers == 1 and run.pods == PODS
    return Row(
        run=run,
        ttft_p50_s=_percentile(ttft_s, 50),
        ttft_p90_s=_percentile(ttft_s, 90),
        ttft_p99_s=_percentile(ttft_s, 99),
        others_ttft_p90_s=(
            _percentile(np.array([ttft_of(one) for one in others]), 90) if others else None
        ),
        goodput_per_s=round(sum(map(_meets_targets, done)) / length_s, 4),
        served_per_s=round(in_time / length_s, 4),
        queue_p99=_percentile(np.array(queues), 99),
        queue_max=max(queues, default=0.0),
        refused=sum(one.fate is Fate.REFUSED and one.status == 429 for one in ended),
        failed=sum(one.status >= 500 for one in ended),
        drained_s=_drained_s(ended) if run.scenario == "burst" else None,
        series=_series(mine) if first_seed else [],
    )


def _percentile(values: np.ndarray, rank: float) -> float:
    return round(float(np.percentile(values, rank)), 5)


def _meets_targets(request: SimulatedRequest) -> bool:
    # The TPOT of an answer of one token is unknown.
    return ttft_of(request) <= TTFT_TARGET_S and not tpot_of(request) > TPOT_TARGET_S


def _drained_s(ended: Sequence[SimulatedRequest]) -> Seconds:
    begin_s, end_s = BURST_S
    firsts = [
        one.first_token_at
        for one in ended
        if begin_s <= one.arrived_at < end_s and one.first_token_at is not None
    ]
    return round(max(firsts) - end_s, 3)


def _series(requests: Sequence[SimulatedRequest]) -> list[list[float]]:
    by_bin: dict[int, list[float]] = {}
    for one in requests:
        by_bin.setdefault(int(one.arrived_at // BIN_S), []).append(ttft_of(one))
    return [
        [number * BIN_S, _percentile(np.array(found), 90)]
        for number, found in sorted(by_bin.items())
    ]


def planned_runs() -> list[Run]:
    """Return all runs, first those of the smaller pool and of the first seed. A burst has no requests
    that are protected from others, so it has no run alone and none in the larger pool.
    """
    small = [
        Run(scenario=scenario, arm=arm, pickers=pickers, seed=seed)
        for seed, scenario, arm, pickers in product(SEEDS, SCENARIOS, ARMS, PICKERS)
        if (arm == ON or pickers == 1) and not (arm == ALONE and scenario == "burst")
    ]
    large = [
        Run(scenario=scenario, arm=arm, pickers=1, seed=seed, pods=PODS_MANY)
        for seed, scenario, arm in product(SEEDS, ("tenants", "batch"), (ALONE, ON))
    ]
    return small + large


# --- tables ---------------------------------------------------------------------------------------


class Estimate(Struct, frozen=True):
    """A mean over the seeds with its 95 % interval."""

    value: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.half_width:.2f}"


def estimate_of(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, one for each seed, with its interval."""
    found = np.array(values)
    count = len(found)
    error = float(found.std(ddof=1)) / math.sqrt(count)
    return Estimate(float(found.mean()), student_t(CONFIDENCE, count - 1) * error)


def read() -> list[Row]:
    """Return the content of docs/flow-figures.json."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[Row])


def by_seed(
    rows: Sequence[Row], scenario: str, arm: str, figure: str, pickers: int = 1, pods: int = PODS
) -> list[float]:
    """Return one figure of the runs with these settings, in the order of their seeds."""
    found = {row.run: getattr(row, figure) for row in rows}
    settings = Run(scenario=scenario, arm=arm, pickers=pickers, seed=0, pods=pods)
    return [found[replace(settings, seed=seed)] for seed in SEEDS]


def ratio(
    rows: Sequence[Row],
    scenario: str,
    figure: str,
    one: tuple[str, int],
    to: tuple[str, int],
    pods: int = PODS,
) -> Estimate:
    """Return the mean ratio of a figure of two arms, each with a number of pickers. The seeds have
    equal traffic.
    """
    values = zip(
        by_seed(rows, scenario, one[0], figure, one[1], pods),
        by_seed(rows, scenario, to[0], figure, to[1], pods),
        strict=True,
    )
    return estimate_of([value / other for value, other in values])


# Limits of the targets.
ALONE_RATIO_TENANTS: Final = 1.5
ALONE_RATIO_BATCH: Final = 2.5
PICKERS_RATIO: Final = 1.1
SEVERAL: Final = 4

_COLUMNS: Final[Mapping[str, Callable[[float], str]]] = {
    "ttft_p50_s": lambda value: f"{value:.3g} s",
    "ttft_p90_s": lambda value: f"{value:.3g} s",
    "ttft_p99_s": lambda value: f"{value:.3g} s",
    "others_ttft_p90_s": lambda value: f"{value:.3g} s",
    "goodput_per_s": lambda value: f"{value:.2f}",
    "served_per_s": lambda value: f"{value:.1f}",
    "queue_p99": lambda value: f"{value:.0f}",
    "refused": lambda value: f"{value:.0f}",
    "drained_s": lambda value: f"{value:.1f} s",
}


def table(rows: Sequence[Row], scenario: str) -> str:
    """Return the Markdown table of one kind of traffic, with the means over the seeds for each arm
    and number of pickers.
    """
    known = SCENARIOS[scenario]
    shown = ["ttft_p50_s", "ttft_p90_s", "ttft_p99_s"]
    head = ["queue, pickers", *(f"{known.protects}: TTFT p{rank}" for rank in (50, 90, 99))]
    if known.others:
        shown.append("others_ttft_p90_s")
        head.append(f"{known.others}: TTFT p90")
    shown += ["goodput_per_s", "served_per_s", "queue_p99", "refused"]
    head += ["goodput, 1/s", "served, 1/s", "engine queue p99", "429"]
    if scenario == "burst":
        shown.append("drained_s")
        head.append("drained after")
    found = [head]
    for arm, pickers in arms_of(rows, scenario):
        cells = [f"{known.protects} alone" if arm == ALONE else f"{arm}, {pickers}"]
        for figure in shown:
            values = by_seed(rows, scenario, arm, figure, pickers)
            missing = any(value is None for value in values)
            cells.append("" if missing else _COLUMNS[figure](float(np.mean(values))))
        found.append(cells)
    return markdown_table(found)


def arms_of(rows: Sequence[Row], scenario: str) -> list[tuple[str, int]]:
    """Return the arms of a kind of traffic and their numbers of pickers, in order."""
    here = (row.run for row in rows if row.run.scenario == scenario and row.run.pods == PODS)
    known = {(run.arm, run.pickers) for run in here}
    return sorted(known, key=lambda one: (ARMS.index(one[0]), one[1]))


class Target(Struct, frozen=True, kw_only=True):
    """A figure that the queue must reach, and what was measured."""

    says: str
    wanted: str
    measured: str
    met: bool


def targets(rows: Sequence[Row]) -> list[Target]:
    """Return all targets of the queue in overload with what was measured."""
    one = (ON, 1)
    found = []
    for pods in (PODS, PODS_MANY):
        for scenario, figure, says, limit in (
            ("tenants", "ttft_p90_s", "small tenant, TTFT p90", ALONE_RATIO_TENANTS),
            ("batch", "ttft_p99_s", "interactive, TTFT p99", ALONE_RATIO_BATCH),
        ):
            measured = ratio(rows, scenario, figure, one, (ALONE, 1), pods)
            found.append(_at_most(f"{says}: on ÷ alone, {pods} pods", measured, limit))
        queue = estimate_of(by_seed(rows, "tenants", ON, "queue_p99", pods=pods))
        found.append(_at_most(f"two tenants, engine queue p99, {pods} pods", queue, QUEUE_MIN))
    for scenario in SCENARIOS:
        measured = ratio(rows, scenario, "goodput_per_s", one, (OFF, 1))
        says = f"{WORKLOADS[scenario]}, goodput: on ÷ off"
        found.append(
            Target(
                says=says,
                wanted="≥ 1, or 1 in the interval",
                measured=str(measured),
                met=measured.value + measured.half_width >= 1.0,
            )
        )
    failed = max(max(by_seed(rows, scenario, ON, "failed")) for scenario in SCENARIOS)
    found.append(Target(says="answers 5xx", wanted="0", measured=f"{failed:.0f}", met=failed == 0))
    several = (("tenants", "ttft_p90_s"), ("batch", "ttft_p99_s"), ("burst", "drained_s"))
    for scenario, figure in several:
        measured = ratio(rows, scenario, figure, (ON, SEVERAL), one)
        says = f"{WORKLOADS[scenario]}, {_NAMES[figure]}: {SEVERAL} pickers ÷ 1"
        found.append(_at_most(says, measured, PICKERS_RATIO))
    for scenario in SCENARIOS:
        measured = ratio(rows, scenario, "goodput_per_s", (ON, SEVERAL), one)
        says = f"{WORKLOADS[scenario]}, goodput: {SEVERAL} pickers ÷ 1"
        found.append(_at_least(says, measured, 0.9))
    return found


WORKLOADS: Final = {
    "tenants": "two tenants",
    "batch": "interactive and batch",
    "burst": "burst",
}
_NAMES: Final = {
    "ttft_p90_s": "small tenant's TTFT p90",
    "ttft_p99_s": "interactive TTFT p99",
    "drained_s": "time until drained",
}


def _at_most(says: str, measured: Estimate, limit: float) -> Target:
    return Target(
        says=says,
        wanted=f"≤ {limit:g}",
        measured=str(measured),
        met=measured.value <= limit,
    )


def _at_least(says: str, measured: Estimate, limit: float) -> Target:
    return Target(
        says=says,
        wanted=f"≥ {limit:g}",
        measured=str(measured),
        met=measured.value >= limit,
    )


def target_table(rows: Sequence[Row]) -> str:
    """Return the table of all targets."""
    found = [["figure", "target", "measured", "reached"]]
    for target in targets(rows):
        met = "yes" if target.met else "**no**"
        found.append([target.says, target.wanted, target.measured, met])
    return markdown_table(found)


# --- picture --------------------------------------------------------------------------------------

WIDTH: Final = 760
HEIGHT: Final = 250
PANEL_WIDTH: Final = 190
PANEL_HEIGHT: Final = 150
LEFT: Final = 52
TOP: Final = 36
APART: Final = 242
LEAST_S: Final = 0.03
MOST_S: Final = 100.0
COLOURS: Final = {ALONE: "#8a96a3", OFF: "#e0a030", ON: "#2f6fb0"}
STYLE: Final = (
    "text{font:12px sans-serif;fill:#4c5866}.page{fill:#fff}.frame{fill:none;stroke:#c5ccd3}"
    "polyline{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#c5ccd3}.page{fill:#1c2128}}"
)


def picture() -> str:
    """Return an SVG with the TTFT of the protected requests over their arrival time, one plot for
    each kind of traffic.
    """
    rows = read()
    panels = [
        _panel(rows, scenario, x=LEFT + APART * number) for number, scenario in enumerate(SCENARIOS)
    ]
    keys = [
        f'<rect x="{LEFT + 110 * number}" y="{HEIGHT - 16}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LEFT + 18 + 110 * number}" y="{HEIGHT - 6}">{_KEYS[arm]}</text>'
        for number, (arm, colour) in enumerate(COLOURS.items())
    ]
    label = "TTFT p90 of the protected requests by arrival time, with and without the queue"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}"><style>{STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>{"".join((*panels, *keys))}</svg>\n'
    )


_KEYS: Final = {ALONE: "alone", OFF: "queue off", ON: "queue on"}


def _panel(rows: Sequence[Row], scenario: str, *, x: int) -> str:
    """Return one plot, whose left edge is at `x`. The TTFT has a logarithmic axis."""
    bottom = TOP + PANEL_HEIGHT
    parts = [
        f'<rect x="{x}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" class="frame"/>',
        f'<text x="{x}" y="{TOP - 12}">{SCENARIOS[scenario].protects}: TTFT p90</text>',
        f'<text x="{x}" y="{bottom + 18}">0 s</text>',
        f'<text x="{x + PANEL_WIDTH - 60}" y="{bottom + 18}">arrival {DURATION_S:g} s</text>',
        *(
            f'<text x="{x - 40}" y="{_height(value) + 4:.0f}">{value:g} s</text>'
            for value in (0.1, 1.0, 10.0)
        ),
    ]
    for row in rows:
        if row.run.scenario != scenario or not row.series:
            continue
        points = " ".join(
            f"{x + at_s / DURATION_S * PANEL_WIDTH:.1f},{_height(ttft_s):.1f}"
            for at_s, ttft_s in row.series
        )
        parts.append(f'<polyline stroke="{COLOURS[row.run.arm]}" points="{points}"/>')
    return "".join(parts)


def _height(ttft_s: float) -> float:
    share = math.log(max(ttft_s, LEAST_S) / LEAST_S) / math.log(MOST_S / LEAST_S)
    return TOP + PANEL_HEIGHT * (1.0 - min(share, 1.0))


def finished(file: Path) -> list[Row]:
    """Return the rows in a file of finished runs; none if it does not exist."""
    if not file.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in file.read_bytes().splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate all runs that the file of `--resume` lacks, and write docs/flow-figures.json. Return
    the exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m docs.flow_figures", description="measure what the queue does in overload"
    )
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default: 2)")
    resumed = "JSON lines of finished runs; runs that it has are not made again"
    parser.add_argument("--resume", type=Path, metavar="FILE", help=resumed)
    given = parser.parse_args(arguments)
    rows = [] if given.resume is None else finished(given.resume)
    known = {row.run for row in rows}
    runs = [run for run in planned_runs() if run not in known]
    with ProcessPoolExecutor(given.workers) as pool:
        for number, row in enumerate(pool.map(simulated, runs), 1):
            rows.append(row)
            if given.resume is not None:
                with given.resume.open("ab") as file:
                    file.write(msgspec.json.encode(row) + b"\n")
            print(f"{number} of {len(runs)} runs", file=sys.stderr, flush=True)
    write_whole(RESULTS, row_lines(msgspec.to_builtins(rows)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
