"""Speed of the simulator for the Mooncake conversation hour, eight pods, and the default scheduler.

The hour is replayed alternately without decisions, with decisions, and with decisions and hit
ceilings, as `sim replay` does with `--no-decisions`, `--decisions --no-ceilings` and `--decisions`.
The cost of decisions and ceilings is a ratio of the least CPU times.
"""

import os
import resource
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from msgspec.structs import replace

from sim.cluster.built_in import DEFAULT_POLICY
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.replay import summary_of, write_run
from sim.experiments.request_files import DecisionFile, RequestTable
from sim.experiments.run import Run, RunSettings
from sim.output import DECISIONS, REQUESTS

_TRACE = "traces/mooncake_conversation.jsonl"
_TURNS = 8


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the speed of the simulator.

    The trace is looked up in the same folder as in the tests; without it, the only row says so.
    """
    beside = Path(__file__).parents[2] / "shared"
    trace = Path(os.environ.get("HOMING_SHARED", beside)) / _TRACE
    if not trace.is_file():
        return [("replay of the Mooncake conversation hour", f"not run: {trace} is not there")]
    settings = RunSettings(
        trace=str(trace),
        policy=policy_source(DEFAULT_POLICY),
        cluster=ClusterSettings(pods=(PodKind.of(find_profile(DEFAULT_PROFILE)),) * 8),
    )
    plain, told, ceilings = [], [], []
    for _ in range(_TURNS):
        plain.append(_replayed(settings, decisions=False))
        if len(plain) == 1:
            # Later runs have more in memory than one replay needs.
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        told.append(_replayed(settings, decisions=True))
        ceilings.append(_replayed(settings, decisions=True, ceilings=True))
    best = min(plain, key=lambda one: one.cpu_s)
    label = f"replay of {best.requests:,} requests over 8 pods, parquet and summary written"
    decisions, both = (min(one.cpu_s for one in turns) / best.cpu_s for turns in (told, ceilings))
    return [
        (label, f"{best.took_s:.1f} s ({best.cpu_s:.1f} s of processor time)"),
        ("the same, requests a second", f"{best.requests / best.took_s:,.0f}"),
        ("with decisions, in that without", f"{decisions:.2f}"),
        ("with decisions and hit ceilings, in that without", f"{both:.2f}"),
        ("peak memory of the process", f"{peak_mb:.0f} MB"),
    ]


class _Turn(NamedTuple):
    requests: int
    took_s: float
    cpu_s: float


def _replayed(settings: RunSettings, *, decisions: bool, ceilings: bool = False) -> _Turn:
    started_s, cpu_s = perf_counter(), process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = RequestTable(folder / REQUESTS)
        lines = DecisionFile(folder / DECISIONS) if decisions else None
        listeners = [table.add] if lines is None else [table.add, lines.add]
        one = Run(settings, listeners)
        one.run()
        table.close()
        summary = summary_of(one, complete=True)
        if lines is not None:
            lines.close()
        if ceilings:
            summary = replace(summary, ceilings=one.ceilings())
        write_run(folder, summary)
    took_s, cpu_s = perf_counter() - started_s, process_time() - cpu_s
    return _Turn(sum(one.measures.fates.values()), took_s, cpu_s)


if __name__ == "__main__":
    for what, cost in run():
        print(f"{what:80} {cost:>40}")
