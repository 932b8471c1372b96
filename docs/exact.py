"""Measure the figures of docs/kv-events.md: `python -m docs.exact`, about twenty minutes of one
core.

The same generated traffic is routed with different prefix indexes: one learns from the picker's
decisions, another from KV events. Everything else is equal: the default scorer, the pods and the
times. The figures of each run go to docs/exact.json, cell by cell. Existing cells are not measured
again, so another arm costs only its own column. `python -m docs.reference` makes the tables of the
page.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from docs.row_lines import row_lines
from epp.configuration.config import DEFAULT_CONFIG, DEFAULT_SOURCE
from sim.cluster.kv_events import KVEventSettings
from sim.cluster.peering import PeerSettings
from sim.cluster.policies import PolicySource
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.jobs import Crew, Result
from sim.experiments.run import RunSettings
from sim.measurement.intervals import Estimate, Varied, estimated
from sim.measurement.measures import mean, percentile, rounded
from sim.output import progress_bar, write_whole
from sim.reports.report import markdown_table, seconds, share
from sim.traces.capture import CaptureWriter
from sim.traces.lengths import around
from sim.traces.workloads import Adapters, OpenLoad, SharedPrefix, Stage, Workload, arrivals

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "exact.json"
SEEDS: Final = 3
PODS: Final = 4
CACHE_TOKENS: Final = 60_000
"""Size of each pod's KV cache in tokens; it is small, because the traffic is short."""
PREFIX_TOKENS: Final = 3_000
RATE_PER_S: Final = 28.0
DURATION_S: Final = 30.0
WARM_UP_S: Final = 8.0
PEER_DELAY_S: Final = 0.005
LEARNING_DURATION_S: Final = 200.0
LEARNING_WARM_UP_S: Final = 80.0
"""Start of the measured part, in seconds, of runs with a corrected estimate; `LEARNING_DURATION_S`
is their length. The correction works in windows of at least 20 s: three of them end before the
measured part, six within it.
"""


class Arm(Struct, frozen=True, kw_only=True):
    """One column of the tables: a configuration whose prefix index learns from decisions or from KV
    events.
    """

    name: str
    config: str
    told: bool = False
    """True if engines send KV events to the pickers."""

    @property
    def policy(self) -> PolicySource:
        return PolicySource(name=self.name, text=self.config, source=DEFAULT_SOURCE)


APPROXIMATE: Final = Arm(name="approximate", config=DEFAULT_CONFIG)
CORRECTED: Final = Arm(
    name="corrected", config=(FOLDER / "examples" / "corrected.yaml").read_text(encoding="utf-8")
)
EXACT: Final = Arm(
    name="exact", config=(FOLDER / "examples" / "exact.yaml").read_text(encoding="utf-8"), told=True
)
ARMS: Final = (APPROXIMATE, EXACT)
"""Arms of the tables without a corrected estimate; the first is the reference."""
LEARNING_ARMS: Final = (APPROXIMATE, CORRECTED, EXACT)
"""Arms of the table with a corrected estimate; their runs are longer, so that the estimate can
learn.
"""


class Condition(Struct, frozen=True, kw_only=True):
    """The conditions of a run: one row of a table."""

    pressure: float = 1.2
    """Total size of all prefixes, relative to the caches of all pods."""
    pickers: int = 4
    peers: bool = True
    """True if pickers share their decisions with each other."""
    adapters: int = 0
    """Number of adapters among which the prefixes are divided evenly; 0 if all requests use the
    base model.
    """
    delay_s: float = 0.01
    loss: float = 0.0
    """Share of the KV-event frames that are lost; `delay_s` is the delay of the others."""
    told_times: float = 1.0
    """Cache size that pods report to pickers, relative to the real one."""
    duration_s: float = DURATION_S
    warm_up_s: float = WARM_UP_S

    def of(self, arm: Arm) -> "Condition":
        """Return this condition without the settings that have no effect on `arm`: those of KV
        events.
        """
        return self if arm.told else replace(self, delay_s=0.0, loss=0.0)

    def workload(self) -> Workload:
        """Return the workload: requests with prefixes of skewed popularity, like those of tenants."""
        prefixes = round(self.pressure * PODS * CACHE_TOKENS / PREFIX_TOKENS)
        names = tuple((f"adapter-{number}", 1.0) for number in range(self.adapters))
        return Workload(
            content=SharedPrefix(
                groups=prefixes // max(1, self.adapters),
                prompts_per_group=1_000,
                system_tokens=PREFIX_TOKENS,
                question=around(300),
                output=around(100),
                skew=0.6,
            ),
            load=OpenLoad(stages=(Stage(rate_per_s=RATE_PER_S, duration_s=self.duration_s),)),
            adapters=Adapters(weights=names),
        )

    def cluster(self, arm: Arm) -> ClusterSettings:
        """Return the settings of the pods and pickers for `arm`."""
        kind = PodKind.of(find_profile(DEFAULT_PROFILE), max_loras=self.adapters)
        blocks = CACHE_TOKENS // kind.engine.block_size_tokens + 1
        engine = replace(kind.engine, blocks_total=blocks)
        kind = replace(kind, engine=engine, advertised_blocks=round(self.told_times * blocks))
        return ClusterSettings(
            pods=(kind,) * PODS,
            replicas=self.pickers,
            peers=PeerSettings(delay_s=PEER_DELAY_S) if self.peers and self.pickers > 1 else None,
            kv_events=KVEventSettings(delay_s=self.delay_s, loss=self.loss) if arm.told else None,
        )


class Figures(Struct, frozen=True, kw_only=True):
    """The figures of one run of an arm under a condition."""

    hit_rate: float | None
    ttft_mean_s: float | None
    ttft_p90_s: float | None
    off_tokens: float | None
    """Mean absolute error of the picker's estimates of cached tokens, in tokens."""


class Cell(Struct, frozen=True, kw_only=True):
    """The figures of one arm under one condition: one run for each seed."""

    arm: str
    condition: Condition
    runs: list[Figures]


class Measured(Struct, frozen=True, kw_only=True):
    """The content of docs/exact.json."""

    under: dict[str, float]
    """Common settings of the runs, with the default duration and warm-up of a condition. If they
    change, all figures are measured again.
    """
    cells: list[Cell]

    def of(self, arm: Arm, condition: Condition) -> list[Figures]:
        """Return the figures of `arm` under `condition` by seed. Raise `LookupError` if they were
        not measured.
        """
        wanted = (arm.name, condition.of(arm))
        for cell in self.cells:
            if (cell.arm, cell.condition) == wanted:
                return cell.runs
        raise LookupError(f"{RESULTS.name} has no {wanted}: run `python -m docs.exact`")


def under() -> dict[str, float]:
    """Return the common settings of the runs, with the default duration and warm-up of a condition,
    by name.
    """
    return {
        "pods": PODS,
        "cache_tokens": CACHE_TOKENS,
        "prefix_tokens": PREFIX_TOKENS,
        "rate_per_s": RATE_PER_S,
        "duration_s": DURATION_S,
        "warm_up_s": WARM_UP_S,
        "peer_delay_s": PEER_DELAY_S,
    }


PRESSURES: Final = (0.5, 1.2, 2.0)
_TOGETHER: Final = {
    (1, False): PRESSURES,
    (4, False): PRESSURES,
    (4, True): PRESSURES,
    (8, False): (1.2,),
    (8, True): (1.2,),
}
KNOWN: Final[Mapping[str, Condition]] = {
    f"{pressure:g} \N{MULTIPLICATION SIGN} | {pickers} | {_sharing}": Condition(
        pressure=pressure, pickers=pickers, peers=peers
    )
    for (pickers, peers), pressures in _TOGETHER.items()
    for pressure in pressures
    for _sharing in (("yes" if peers else "no") if pickers > 1 else "",)
}
"""Conditions of the table of cache sizes and pickers, by the first cells of their row: size of the
prefixes relative to the caches, number of pickers, and whether they share decisions.
"""
ALONE: Final = Condition(peers=False)
"""Four pickers that share nothing: the condition in which KV events improve hits."""
ADAPTERS: Final[Mapping[str, Condition]] = {
    "the model": ALONE,
    "16 adapters": replace(ALONE, adapters=16),
}
_TIMES: Final = "\N{MULTIPLICATION SIGN}"
_LEARNING: Final = Condition(
    peers=False, duration_s=LEARNING_DURATION_S, warm_up_s=LEARNING_WARM_UP_S
)
LEARNT: Final[Mapping[str, Condition]] = {
    f"0.5 {_TIMES} | the true size | 1 |": replace(_LEARNING, pressure=0.5, pickers=1),
    f"1.2 {_TIMES} | the true size | 1 |": replace(_LEARNING, pickers=1),
    f"2 {_TIMES} | the true size | 1 |": replace(_LEARNING, pressure=2.0, pickers=1),
    f"1.2 {_TIMES} | twice the size | 1 |": replace(_LEARNING, told_times=2.0, pickers=1),
    f"1.2 {_TIMES} | half the size | 1 |": replace(_LEARNING, told_times=0.5, pickers=1),
    f"1.2 {_TIMES} | the true size | 4 | yes": replace(_LEARNING, peers=True),
    f"1.2 {_TIMES} | twice the size | 4 | yes": replace(_LEARNING, peers=True, told_times=2.0),
    f"1.2 {_TIMES} | the true size | 4 | no": _LEARNING,
    f"1.2 {_TIMES} | the true size | 8 | no": replace(_LEARNING, pickers=8),
    f"1.2 {_TIMES}, of 16 adapters | the true size | 4 | no": replace(_LEARNING, adapters=16),
}
"""Conditions of the table of corrected estimates, by the first cells of their row: size of the
prefixes, cache size that pods report, number of pickers, and whether they share decisions.
"""
DELAYS: Final[Mapping[str, Condition]] = {
    **{
        f"{_delay}, no loss": replace(ALONE, delay_s=delay_s)
        for _delay, delay_s in (("10 ms", 0.01), ("1 s", 1.0), ("5 s", 5.0))
    },
    **{
        f"10 ms, {loss:.1%} of the frames lost": replace(ALONE, loss=loss)
        for loss in (0.001, 0.1, 0.5)
    },
}


def cells() -> list[tuple[Arm, Condition]]:
    """Return all pairs of arm and condition that the tables need, each once."""
    wanted = [(EXACT, condition) for condition in DELAYS.values()]
    for conditions in (ADAPTERS, KNOWN):
        wanted += [(arm, one.of(arm)) for one, arm in product(conditions.values(), ARMS)]
    wanted += [(arm, one.of(arm)) for one, arm in product(LEARNT.values(), LEARNING_ARMS)]
    return [*dict.fromkeys(wanted)]


def measure(
    wanted: Sequence[tuple[Arm, Condition]], seeds: Sequence[int], *, workers: int = 1
) -> Iterator[Cell]:
    """Yield the figures of each wanted pair of arm and condition when its runs have ended.

    Each seed draws the same traffic for every arm.
    """
    with tempfile.TemporaryDirectory(prefix="docs-exact-") as name:
        folder = Path(name)
        traces: dict[tuple[Workload, int], str] = {}
        jobs: list[RunSettings] = []
        for (arm, condition), seed in product(wanted, seeds):
            workload = condition.workload()
            if (workload, seed) not in traces:
                traces[workload, seed] = _drawn(workload, seed, folder / f"{len(traces)}.jsonl")
            jobs.append(
                RunSettings(
                    trace=traces[workload, seed],
                    policy=arm.policy,
                    cluster=condition.cluster(arm),
                    seed=seed,
                    warm_up_s=condition.warm_up_s,
                )
            )
        found: dict[int, Figures] = {}
        with Crew(max(1, min(workers, len(jobs)))) as crew, progress_bar("exact") as bar:
            for number, result in bar.track(crew.results(jobs), total=len(jobs)):
                found[number] = _figures(result)
                at = number // len(seeds)
                of_cell = range(at * len(seeds), (at + 1) * len(seeds))
                if all(each in found for each in of_cell):
                    arm, condition = wanted[at]
                    runs = [found[each] for each in of_cell]
                    yield Cell(arm=arm.name, condition=condition, runs=runs)


def _drawn(workload: Workload, seed: int, path: Path) -> str:
    """Write the generated requests of `workload` with `seed` to the file `path`, and return its
    name.
    """
    with path.open("wb") as file:
        writer = CaptureWriter(file, source=f"docs/exact.py, seed {seed}")
        for arrival in arrivals(workload, seed):
            writer.write_arrival(arrival)
    return str(path)


def _figures(result: Result) -> Figures:
    series = result.series
    return Figures(
        hit_rate=rounded(float(series.cached_tokens.sum()) / float(series.prompt_tokens.sum())),
        ttft_mean_s=rounded(mean(series.ttft_s)),
        ttft_p90_s=rounded(percentile(series.ttft_s, 90)),
        off_tokens=result.summary.prediction.mean_absolute_error_tokens,
    )


# --- tables ---------------------------------------------------------------------------------------


def known_table(measured: Measured) -> str:
    """Return the table of hits and TTFT by size of the prefixes and number of pickers."""
    head = ["prefixes, relative to all caches", "pickers", "sharing"]
    return _compared(measured, head, KNOWN, ARMS)


def adapter_table(measured: Measured) -> str:
    """Return the table that compares prefixes of the base model with the same prefixes divided
    among adapters.
    """
    return _compared(measured, ["requests name"], ADAPTERS, ARMS)


def learnt_table(measured: Measured) -> str:
    """Return the table that compares the estimate, the corrected estimate and KV events."""
    head = ["prefixes, relative to all caches", "pods report", "pickers", "sharing"]
    return _compared(measured, head, LEARNT, LEARNING_ARMS)


def delay_table(measured: Measured) -> str:
    """Return the table of delayed and lost KV events; its first row has no KV events."""
    head = ["KV events", "hits", "TTFT mean", "TTFT p90", "error, tokens"]
    rows = [["none, approximate index", *_told(measured.of(APPROXIMATE, ALONE))]]
    rows += [[name, *_told(measured.of(EXACT, one))] for name, one in DELAYS.items()]
    return markdown_table([head, *rows])


def _told(runs: Sequence[Figures]) -> list[str]:
    return [
        share(_mean(runs, "hit_rate")),
        seconds(_mean(runs, "ttft_mean_s")),
        seconds(_mean(runs, "ttft_p90_s")),
        _tokens(_mean(runs, "off_tokens")),
    ]


def _compared(
    measured: Measured,
    names: Sequence[str],
    conditions: Mapping[str, Condition],
    arms: Sequence[Arm],
) -> str:
    """Return a table with a row for each condition: hits, TTFT and error of every arm.

    The rows also contain the difference in hits between each arm and the first one.
    """
    reference, *others = arms
    head = [*names, *(f"hits, {arm.name}" for arm in arms)]
    head += [f"{arm.name}: additional points" for arm in others]
    head += [f"TTFT mean, {arm.name}" for arm in arms]
    head += [f"error in tokens, {arm.name}" for arm in arms]
    rows = [head]
    for name, condition in conditions.items():
        runs = {arm: measured.of(arm, condition) for arm in arms}
        row = [part.strip() for part in name.split("|")]
        row += [share(_mean(runs[arm], "hit_rate")) for arm in arms]
        row += [_more(runs[reference], runs[arm]) for arm in others]
        row += [seconds(_mean(runs[arm], "ttft_mean_s")) for arm in arms]
        row += [_tokens(_mean(runs[arm], "off_tokens")) for arm in arms]
        rows.append(row)
    return markdown_table(rows)


def _more(reference: Sequence[Figures], other: Sequence[Figures]) -> str:
    """Return the hits of `other` minus those of `reference`, in percentage points, with the 95 %
    confidence interval.
    """
    found = hits_more(reference, other)
    if found.low is None or found.high is None:
        return f"{100 * found.value:+.1f}"
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def hits_more(reference: Sequence[Figures], other: Sequence[Figures]) -> Estimate:
    """Return the mean hit rate of `other` minus that of `reference`. Both arms have the same
    traffic, seed by seed.
    """
    differences = [
        (after.hit_rate or 0.0) - (before.hit_rate or 0.0)
        for before, after in zip(reference, other, strict=True)
    ]
    return estimated(differences, Varied(repetitions=len(differences), generated=True))


def _mean(runs: Sequence[Figures], name: str) -> float:
    values = [getattr(one, name) for one in runs]
    return float(sum(values)) / len(values)


def _tokens(value: float) -> str:
    return f"{value:,.0f}"


def read() -> Measured:
    """Return the content of docs/exact.json from the last measurement."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Measured)


def _write(measured: Measured) -> None:
    write_whole(RESULTS, row_lines(msgspec.to_builtins(measured)).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure missing figures and store them in docs/exact.json. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.exact", description=__doc__)
    parser.add_argument("--anew", action="store_true", help="measure stored figures again")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    options = parser.parse_args(arguments)
    wanted = cells()
    kept: dict[tuple[str, Condition], Cell] = {}
    if RESULTS.exists() and not options.anew and (before := read()).under == under():
        kept = {(cell.arm, cell.condition): cell for cell in before.cells}
    missing = [(arm, one) for arm, one in wanted if (arm.name, one) not in kept]
    if not missing:
        return 0
    for cell in measure(missing, range(1, SEEDS + 1), workers=options.workers):
        kept[cell.arm, cell.condition] = cell
        there = [key for arm, one in wanted if (key := (arm.name, one)) in kept]
        _write(Measured(under=under(), cells=[kept[key] for key in there]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
