"""Memory of the whole picker process: `epp serve` with 100 endpoints and a full index.

`python -m bench.process` prints the row. A new process creates the picker as the command does and
fills its index: every endpoint has all blocks that it may have unless its engine reports less. The
picker serves for a short time before its memory is measured.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from bench.index import ENDPOINTS, fill, resident_bytes
from bench.place import free_ports
from epp.app.wiring import EndpointPicker
from epp.core.knowledge.prefix import PrefixIndex
from epp.flags.serve import ServeFlags
from epp.shell.process.event_loop import loop_factory

_SERVED_S = 2.0


async def _weigh(picker: EndpointPicker) -> int:
    stop = asyncio.Event()
    serving = asyncio.create_task(picker.serve(stop))
    await asyncio.sleep(_SERVED_S)
    resident = resident_bytes()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return resident


def full_picker() -> dict[str, int]:
    """Return the resident memory of a picker in this process in bytes, and the number of (block,
    endpoint) pairs in its index.
    """
    endpoints = [
        {"name": f"pod-{number}", "address": f"127.0.1.{number}", "port": 9, "metrics": False}
        for number in range(ENDPOINTS)
    ]
    ports = free_ports(3)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "endpoints.json"
        file.write_text(json.dumps({"endpoints": endpoints}))
        picker = EndpointPicker(
            ServeFlags(
                endpoints_file=str(file),
                grpc_port=ports[0],
                grpc_health_port=ports[1],
                metrics_port=ports[2],
                v=0,
            )
        )
        (index,) = picker.scheduler.indexes.values()
        assert isinstance(index, PrefixIndex)
        fill(index, ENDPOINTS, (32, 32), Random(1), time.monotonic())
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            resident = runner.run(_weigh(picker))
        return {"resident": resident, "pairs": index.entries}


def run() -> list[tuple[str, str]]:
    """Return a row (what, how much) with the memory of the picker process."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "bench.process", "full"]
    answer = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    told = json.loads(answer.stdout.splitlines()[-1])
    what = f"epp serve, {ENDPOINTS} endpoints, full index of {told['pairs'] / 1e6:.1f} M pairs"
    return [(f"{what}: resident set", f"{told['resident'] / 1e6:.0f} MB")]


if __name__ == "__main__":
    if sys.argv[1:2] == ["full"]:
        print(json.dumps(full_picker()))
    else:
        for what, figure in run():
            print(f"{what:80} {figure:>10}")
