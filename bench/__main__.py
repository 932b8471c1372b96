"""`python -m bench [NAME...] [--json FILE]`: run the benchmarks and print one table.

Each module NAME of this folder gives rows (what, how much). `bench/timing.py` tells how times are
taken.
"""

import argparse
import json
import os
import platform
import sys
from importlib import import_module
from pathlib import Path

from bench.timing import BATCHES

NAMES = (
    "decision",
    "loopback",
    "bursts",
    "scoring",
    "parse",
    "hostile_bodies",
    "index",
    "process",
    "scrape",
    "hostile_pages",
    "metrics_page",
    "reload",
    "replay",
    "million",
)
_WIDTH = 92


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
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
    """Print the rows as they come; 0."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}, expected one of {', '.join(NAMES)}")
    where = machine() | {"times": f"CPU time, the best of {BATCHES} batches"}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    results: dict[str, dict[str, str]] = {}
    for name in options.names or NAMES:
        print(f"\n{name}")
        results[name] = {}
        for what, figure in import_module(f"bench.{name}").run():
            results[name][what] = figure
            print(f"  {what:{_WIDTH}} {figure}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": where, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
