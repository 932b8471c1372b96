"""The executor `ray://` against a Ray of one node, started here and reached through its client server.

No lock file has Ray: its version is that of somebody's cluster. With
`pip install 'homing-epp[sim,ray]'` beside the rest these tests run.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sim.experiments.executors import workers_at
from sim.experiments.jobs import JobError
from tests.envoy.rig import free_ports
from tests.sim.experiments.test_executors import doubled, halved
from tests.sim.experiments.test_replay import written
from tests.sim.experiments.test_size import SLO, SMALL, size

pytest.importorskip(
    "ray", reason="Ray is not installed: pip install 'homing-epp[sim,ray]' brings it"
)
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
STARTS_IN_S = 120


@pytest.fixture(scope="module")
def head():
    """The address of the client server."""
    # Its sockets lie there, and the path of a socket must be short.
    home = tempfile.mkdtemp(prefix="homing-ray-")
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
            "--node-ip-address=127.0.0.1", "--port=0", f"--ray-client-server-port={port}",
            "--include-dashboard=false", "--num-cpus=2", "--object-store-memory=100000000",
            "--disable-usage-stats", f"--temp-dir={home}",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
        env=os.environ | {"PYTHONPATH": ":".join([str(ROOT), *sys.path])},
    )  # fmt: skip
    try:
        for _ in range(STARTS_IN_S * 4):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"Ray ended with {process.wait(0.25)} before it listened")
        else:
            pytest.fail("Ray did not listen")
        yield f"127.0.0.1:{port}"
    finally:
        # It ends what it has started when it is asked to.
        process.terminate()
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            shutil.rmtree(home, ignore_errors=True)


def test_a_sizing_on_ray_is_the_same_to_the_digit(head, tmp_path, monkeypatch):
    """Every byte of what is told; its workers were started in another folder."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "busy.jsonl", 300, rate=60.0, groups=150, blocks=(20, 60))
    flags = ("busy.jsonl", *SLO, *SMALL, "--answer-only")
    assert size(*flags, "--out", "here") == 0
    assert size(*flags, "--executor", f"ray://{head}", "--out", "there") == 0
    for name in ("summary.json", "report.md", "report.html"):
        assert Path("here", name).read_bytes() == Path("there", name).read_bytes(), name


def test_what_fails_on_ray_is_told_in_its_own_sentence(head):
    """And the others go on."""
    with workers_at(f"ray://{head}", 1) as workers:
        found = dict(workers.outcomes(doubled, [1, -2, 3]))
        assert (found[0], str(found[1]), found[2]) == (2, "-2 is negative", 6)
        found = dict(workers.outcomes(halved, [0, 2]))
    assert isinstance(found[0], JobError)
    assert (str(found[0]), found[1]) == ("ZeroDivisionError: division by zero", 4)


def test_a_crew_on_ray_stops_when_it_is_told_to(head):
    """What it has not begun is left, and leaving does not wait."""
    with workers_at(f"ray://{head}", 1) as workers:
        outcomes = workers.outcomes(doubled, range(1_000))
        next(outcomes)
        workers.stop()
        assert list(outcomes) == []
