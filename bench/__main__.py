"""The performance report (`python -m bench`), or the results of single benchmarks (`python -m bench
NAME...`).

The report plays whole requests against `epp serve` and against servers that do nothing
(`bench/report`). Each module NAME of this folder is one benchmark, whose results are rows (what,
how much); `bench/timing.py` says how times are measured. README.md in this folder explains the
numbers.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench.report.command import FOLDER, QUICK_ROUNDS, QUICK_SHARE, report
from bench.report.contestants import ContestantError
from bench.report.measuring import Plan
from bench.report.verdicts import ROUNDS_MIN
from bench.report.workloads import NAMES as WORKLOADS
from bench.timing import BATCHES

NAMES = (
    "decision",
    "calls",
    "loopback",
    "bursts",
    "scoring",
    "capture",
    "decision_history",
    "parse",
    "hostile_bodies",
    "index",
    "kv_events",
    "kv_streams",
    "corrections",
    "peers",
    "peer_transport",
    "process",
    "scrape",
    "hostile_pages",
    "metrics_page",
    "tokens",
    "reload",
    "replay",
    "million",
)
_WIDTH = 92


def machine() -> dict[str, object]:
    """Return the properties (CPU, Python version and others) of the machine on which the benchmarks
    run, by name.
    """
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    It is 0, except for the report: 1 if a server did not start, and 3 if the machine was busy.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(("all", *NAMES)))
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows to FILE, as JSON"
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure the report in only two short rounds"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="number of rounds of the report (default 5)"
    )
    parser.add_argument("--only", metavar="NAMES", help="workloads: " + ",".join(WORKLOADS))
    parser.add_argument(
        "--out", type=Path, default=FOLDER, metavar="DIR", help="folder of the report"
    )
    options = parser.parse_args(arguments)
    names = NAMES if options.names == ["all"] else options.names
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}, expected one of {', '.join(NAMES)}")
    if names:
        return _print_rows(names, options.json)
    only = tuple(options.only.split(",")) if options.only else WORKLOADS
    if set(only) - set(WORKLOADS) or (options.rounds is not None and options.rounds < 1):
        parser.error(
            f"--only must name some of {','.join(WORKLOADS)}, and --rounds must be 1 or more"
        )
    plan = Plan(
        rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS_MIN),
        duration_share=QUICK_SHARE if options.quick else 1.0,
        names=only,
    )
    try:
        return report(plan, options.out, machine() | {"rounds": plan.rounds})
    except ContestantError as error:
        print(error, file=sys.stderr)
        return 1


def _print_rows(names: Sequence[str], json_file: Path | None) -> int:
    """Print the rows (what, how much) of the benchmarks `names` as they arrive, and write them to
    `json_file` if it is given.

    Return the exit code 0.
    """
    where = machine() | {"times": f"CPU time, the best of {BATCHES} batches"}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    results: dict[str, dict[str, str]] = {}
    for name in names:
        print(f"\n{name}")
        results[name] = {}
        for what, figure in import_module(f"bench.{name}").run():
            results[name][what] = figure
            print(f"  {what:{_WIDTH}} {figure}", flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": where, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
