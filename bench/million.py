"""Memory and time of `sim replay` for a million synthetic requests, which are read as they are
needed.

`python -m bench.million` prints the table. Each command runs in a process of its own, which reports
the peak of its resident set. The trace is replayed twice: its beginning, then all of it. The
additional memory of the second run is what a request leaves behind, of which 64 bytes are the
numbers for percentiles (`sim/measurement/measures.py`).
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time

from sim.__main__ import main
from sim.traces.formats import open_trace
from sim.traces.reading import ReadOptions

REQUESTS = 1_000_000
BEGINNING = 100_000
"""Number of requests in the replayed beginning of the trace: the smallest number for which `sim
replay` stores no decisions by default.
"""
RATE = 50
PODS = 8


def _measured(arguments: list[str]) -> dict[str, float]:
    """Run the command `sim` with `arguments` in this process.

    Return its wall and CPU seconds and its maximum memory in bytes.
    """
    started_s, cpu_s = perf_counter(), process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    assert code == 0, arguments
    status = Path("/proc/self/status").read_text().splitlines()
    # ru_maxrss would include the memory of this process before it ran another program.
    peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {
        "wall_s": perf_counter() - started_s,
        "cpu_s": process_time() - cpu_s,
        "peak_bytes": peak_kb * 1024,
    }


def _in_process(cache: Path, *arguments: object) -> dict[str, float]:
    """Run `sim` with `arguments` in a new process, which caches traces in `cache`.

    Return its wall and CPU seconds and its maximum memory in bytes.
    """
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "bench.million", *map(str, arguments)]
    answer = subprocess.run(
        command,
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    told: dict[str, float] = json.loads(answer.stdout)
    return told


def _shown(told: dict[str, float]) -> str:
    return (
        f"{told['wall_s']:.1f} s ({told['cpu_s']:.1f} s of processor time), "
        f"at most {told['peak_bytes'] / 2**20:.0f} MB"
    )


def _reading_cpu_s(trace: Path, kept_in: Path | str = "") -> float:
    """Return the CPU seconds of reading the trace in this process.

    If `kept_in` is given, it is a cache folder for the read trace.
    """
    cpu_s = process_time()
    for _ in open_trace(trace, ReadOptions(kept_in=str(kept_in))):
        pass
    return process_time() - cpu_s


def run() -> Iterator[tuple[str, str]]:
    """Yield rows (what, how much) with the memory and the time of the replay, each as soon as it is
    known.
    """
    yield "the rows below take together about", "12 minutes"
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "hot-spot.jsonl"
        counts = ("--requests", REQUESTS, "--rate", RATE)
        cache = Path(name) / "cache"
        told = _in_process(cache, "trace", "generate", "hot-spot", *counts, "--out", trace)
        size_mb = trace.stat().st_size / 2**20
        yield f"trace of {REQUESTS:,} requests generated, {size_mb:.0f} MB", _shown(told)
        lines_s = _reading_cpu_s(trace)
        keeping_s = _reading_cpu_s(trace, cache)
        kept_s = _reading_cpu_s(trace, cache)
        yield "reading it", f"{lines_s:.1f} s of processor time"
        yield "the same, and keeping it, in that of reading", f"{keeping_s / lines_s:.2f}"
        yield "reading what is kept, in that of reading", f"{kept_s / lines_s:.2f}"
        peaks = {}
        for requests in (BEGINNING, REQUESTS):
            out = Path(name) / f"{requests}"
            given = ("--requests", requests, "--pods", PODS, "--out", out)
            told = _in_process(cache, "replay", trace, *given)
            peaks[requests] = told["peak_bytes"]
            yield f"replay of {requests:,} of them over {PODS} pods", _shown(told)
            yield "the same, requests a second", f"{requests / told['wall_s']:,.0f}"
        grown = (peaks[REQUESTS] - peaks[BEGINNING]) / (REQUESTS - BEGINNING)
        yield "peak memory that a further request adds", f"{grown:.0f} bytes"


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(_measured(sys.argv[1:])))
    else:
        for what, figure in run():
            print(f"{what:80} {figure:>40}", flush=True)
