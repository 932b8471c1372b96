"""Speed of the simulator: the Mooncake conversation hour, eight pods, the default scheduler."""

import os
import resource
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from sim.cluster.built_in import DEFAULT_POLICY
from sim.cluster.cluster import ClusterSettings
from sim.cluster.policies import policy_source
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.replay import summary_of, write_run
from sim.experiments.request_files import RequestTable
from sim.experiments.run import Run, RunSettings

_TRACE = "traces/mooncake_conversation.jsonl"


def run() -> list[tuple[str, str]]:
    """Rows of the table: what, how much. The trace is looked for as in the tests."""
    beside = Path(__file__).parents[2] / "shared"
    trace = Path(os.environ.get("HOMING_SHARED", beside)) / _TRACE
    if not trace.is_file():
        return [("replay of the Mooncake conversation hour", f"not run: {trace} is not there")]
    settings = RunSettings(
        trace=str(trace),
        policy=policy_source(DEFAULT_POLICY),
        cluster=ClusterSettings(pods=(PodKind.of(find_profile(DEFAULT_PROFILE)),) * 8),
    )
    started_s, cpu_s = perf_counter(), process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = RequestTable(folder / "requests.parquet")
        one = Run(settings, [table.add])
        one.run()
        table.close()
        write_run(folder, summary_of(one, complete=True))
    took_s, cpu_s = perf_counter() - started_s, process_time() - cpu_s
    requests = sum(one.measures.fates.values())
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    label = f"replay of {requests:,} requests over 8 pods, parquet and summary written"
    return [
        (label, f"{took_s:.1f} s ({cpu_s:.1f} s of processor time)"),
        ("the same, requests a second", f"{requests / took_s:,.0f}"),
        ("peak memory of the process", f"{peak_mb:.0f} MB"),
    ]


if __name__ == "__main__":
    for what, cost in run():
        print(f"{what:80} {cost:>40}")
