"""Digests of decisions, to be compared between two commits: one line each, name and digest.

`python -m tests.decision_comparison [--trace FILE]` plays every golden script, the recording of the
real engine, the parity of simulator and server over gRPC, a busy pool under every picker, every
built-in configuration with faults, moved requests and clients that leave, and the whole of the
trace; all for one seed. A change that only simplifies leaves every line as it was.
"""

import argparse
import asyncio
import contextlib
import gzip
import hashlib
import io
import json
import tempfile
from pathlib import Path

from sim.__main__ import main as simulate
from sim.cluster.built_in import configurations
from sim.truth.validate import RECORDINGS
from tests.decision_digest import decision_digest
from tests.sim.made import arrivals
from tests.sim.truth.test_truth import Replay
from tests.test_determinism import PICKERS
from tests.test_golden import GOLDEN, transcript
from tests.test_parity import WEIGHTED_RANDOM, decisions_of_both, policy_source

SEED = 7
PARITY_REQUESTS = 300
TRIED_REQUESTS = 240
TROUBLE = (
    *("--pods", "4", "--abort-share", "0.1", "--abort-after", "0.5", "--response-chunks"),
    *("--fallback-endpoints-max", "2", "--faults-per-hour", "2000"),
)


def digest(content):
    """Return sixteen hexadecimal digits, which are enough to tell two contents apart."""
    return hashlib.sha256(content).hexdigest()[:16]


def goldens():
    """Yield the name and transcript of each golden script: all that it makes the scheduler do."""
    for path in sorted(GOLDEN.glob("*.txt")):
        yield f"golden {path.stem}", transcript(path.read_text()).encode()


def truth():
    """Yield the cached tokens of each request of the recording and the engine's cache events."""
    replay = Replay(RECORDINGS / "vllm-0.32-cpu")
    told = [[request.cached_tokens for request in replay.requests], repr(replay.pool.events)]
    yield "truth", json.dumps(told).encode()


def parity():
    """Yield the decisions of the server that real bodies reach, and those of the simulator."""
    configurations = {"default": policy_source("default").text, "weighted random": WEIGHTED_RANDOM}
    for name, text in configurations.items():

        async def both(text=text):
            with tempfile.TemporaryDirectory() as folder:
                pairs = decisions_of_both(Path(folder), text, PARITY_REQUESTS)
                return [(told(one), told(other)) async for one, other in pairs]

        # The server logs to where it is started from.
        with contextlib.redirect_stdout(io.StringIO()):
            pairs = asyncio.run(both())
        assert len(pairs) == PARITY_REQUESTS
        for position, side in enumerate(("simulator", "server")):
            lines = [pair[position] for pair in pairs]
            yield f"parity {name}, {side}", json.dumps(lines).encode()


def told(decision):
    """Return the parts of a decision that say where a request goes, and why."""
    return [
        decision.number,
        decision.endpoint.name,
        decision.leg.matched_blocks,
        decision.leg.total_blocks,
        decision.leg.ready,
        decision.leg.scored.parts.tolist(),
    ]


def replayed(name, trace, *flags):
    """Return all lines of the decisions that `sim replay` writes, as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        arguments = [str(trace), "--out", str(out), "--seed", str(SEED), "--no-ceilings"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = simulate(["replay", *arguments, "--config", name, *flags])
        assert not code, f"sim replay ends with {code} for {name}"
        return (out / "decisions.jsonl").read_bytes()


def built_in():
    """Yield decisions under `TROUBLE`: of every built-in configuration and of three pickers."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl.gz"
        lines = [{"format": "homing-capture", "version": 1, "block_tokens": 64}]
        lines += [
            {
                "time_s": one.time_s,
                "prompt_tokens": one.prompt_tokens,
                "output_tokens": one.output_tokens,
                "parts": [[block, 64] for block in one.blocks],
                "session": one.session,
            }
            for one in arrivals(TRIED_REQUESTS, rate=40.0, groups=12)
        ]
        trace.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in lines).encode()))
        for name in configurations():
            yield f"trouble {name}", replayed(name, trace, *TROUBLE)
        for replicas in ("heard", "unheard"):
            peers = () if replicas == "unheard" else ("--peer-delay", "0.01", "--peer-loss", "0.1")
            flags = ("--replicas", "3", *peers, *TROUBLE)
            yield f"three pickers, {replicas}", replayed("homing", trace, *flags)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="an hour of traffic, e.g. of Mooncake")
    arguments = parser.parse_args()
    for part in (goldens, truth, parity, built_in):
        for name, content in part():
            print(f"{digest(content)}  {name}", flush=True)
    for picker in PICKERS:
        print(f"{decision_digest(SEED, picker)[1][:16]}  busy pool {picker}", flush=True)
    if arguments.trace is not None:
        for name in ("default", "homing"):
            print(f"{digest(replayed(name, arguments.trace))}  trace {name}", flush=True)


if __name__ == "__main__":
    main()
