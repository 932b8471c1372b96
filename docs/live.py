"""Measure the default `firstTokenWeight` against 0 behind a real Envoy: `python -m docs.live`.

Each run starts four `sim serve` pods, `epp serve` and Envoy, and sends one workload through them: the
traffic of the demo, or interactive chat. The two weights take turns, so that both see the same machine,
and each pair of runs has a seed of its own. The client measures all figures. They go to docs/live.json,
and `python -m docs.reference` makes the table of docs/scoring.md from them.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from docs.row_lines import row_lines
from epp.core.types import Seconds
from epp.plugins.added_time import AddedTime
from epp.plugins.strategy import config_of, step
from sim.demo.arm import BLOCK_SIZE_TOKENS, HOMING, Arm, DemoError, DemoPods, find_envoy
from sim.demo.client import RequestOutcome, drive
from sim.demo.workload import WorkloadSettings, conversations
from sim.drive.driver import Driven, Driver, DriveSettings
from sim.engine.profiles import find_profile
from sim.experiments.leaderboard.cases import CASES
from sim.output import write_whole
from sim.reports.report import markdown_table
from sim.traces.arrival import Arrival

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "live.json"
RUNS: Final = 3
DEMO: Final = "demo"
CHAT: Final = "interactive-chat"
REQUESTS_MAX: Final = 200_000
STRETCH: Final = 1.5
"""Factor by which the times between conversations are longer than in the leaderboard's case, so
that 4 conversations begin per second instead of 6.

Six per second overload four pods after some minutes. The case does not last that long, because it
has only 400 requests.
"""
CHUNK_TOKENS: Final = 50
"""Tokens in each chunk of an answer to the chat, so that chunks do not fill the machine."""
BEFORE: Final = 0.0


class LiveRun(Struct, frozen=True, kw_only=True):
    """The figures of one run of a workload with one value of `firstTokenWeight`, as its client
    measured them.
    """

    workload: str
    weight: float
    seed: int
    requests: int
    errors: int
    ttft_p90_s: Seconds
    ttft_p99_s: Seconds
    e2e_mean_s: Seconds


Latencies = list[tuple[Seconds, Seconds, str]]
"""Time to first token, duration and error of each request."""


def read() -> list[LiveRun]:
    """Return the content of docs/live.json: the runs of the last measurement."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[LiveRun])


def table() -> str:
    """Return a table that compares both weights: for each workload the means over the runs, and the ratio of each pair."""
    rows = [
        ["traffic", "runs", "requests", "figure", "weight 0", "default", "ratio", "of each pair"]
    ]
    told = read()
    for workload in dict.fromkeys(run.workload for run in told):
        runs = [run for run in told if run.workload == workload]
        before = [run for run in runs if run.weight == BEFORE]
        after = [run for run in runs if run.weight != BEFORE]
        for name, label in (
            ("ttft_p90_s", "TTFT p90"),
            ("ttft_p99_s", "TTFT p99"),
            ("e2e_mean_s", "mean E2E"),
        ):
            pairs = [
                (getattr(a, name), getattr(b, name)) for a, b in zip(before, after, strict=True)
            ]
            first, second = mean(a for a, _ in pairs), mean(b for _, b in pairs)
            each = ", ".join(f"{b / a:.2f}" for a, b in pairs)
            requests = f"{sum(run.requests for run in runs):,}"
            shown = [f"{first:.3f} s", f"{second:.3f} s", f"{second / first:.3f}", each]
            rows.append([workload, str(len(pairs)), requests, label, *shown])
    return markdown_table(rows)


async def run_demo(seed: int, gateway: str) -> Latencies:
    """Send the demo's conversations, and return the times and the error of each request."""
    outcomes: list[RequestOutcome] = []
    workload = conversations(WorkloadSettings(), seed)
    await drive(gateway, find_profile(DemoPods().profile).model, workload, outcomes.append)
    return [(one.ttft_s, one.duration_s, one.error) for one in outcomes]


async def run_chat(seed: int, duration_s: Seconds, gateway: str) -> Latencies:
    """Send interactive chat for `duration_s` and return the requests that ended in this time.

    Raise `ValueError` if the driver did not send a request.
    """
    ended: list[Driven] = []
    models = {"": find_profile(CASES[CHAT].profile).model}
    driver = Driver(DriveSettings(url=gateway, models=models), ended.append)
    end = asyncio.get_running_loop().call_later(duration_s, driver.stop)
    await driver.run(_chat(seed, duration_s))
    end.cancel()
    if driver.not_sent or driver.unfit:
        raise ValueError(
            f"{driver.not_sent} requests were not sent, {driver.unfit} are unfit: expected none"
        )
    return [(one.answer.ttft_s, one.answer.duration_s, one.error) for one in ended]


def _chat(seed: int, duration_s: Seconds) -> Iterator[Arrival]:
    """Yield the arrivals of the leaderboard's case, `STRETCH` times as slow, that are due within
    `duration_s`.
    """
    coming = (
        replace(arrival, time_s=STRETCH * arrival.time_s)
        for arrival in CASES[CHAT].arrivals(seed, REQUESTS_MAX)
    )
    return takewhile(lambda arrival: arrival.time_s < duration_s, coming)


async def one_run(workload: str, weight: float, seed: int, chat_s: Seconds, envoy: Path) -> LiveRun:
    """Start pods, picker and Envoy, send one workload, stop everything, and return the figures.
    Raise `DemoError` if a program fails, or if no request has a whole answer.
    """
    case = CASES[CHAT]
    loads: dict[str, tuple[DemoPods, Callable[[str], Awaitable[Latencies]]]] = {
        DEMO: (DemoPods(), partial(run_demo, seed)),
        CHAT: (
            DemoPods(
                profile=case.profile,
                blocks=_blocks(case.profile),
                stream_interval_tokens=CHUNK_TOKENS,
            ),
            partial(run_chat, seed, chat_s),
        ),
    }
    pods, load = loads[workload]
    with tempfile.TemporaryDirectory(prefix="homing-live-") as name:
        folder = Path(name)
        document = folder / "picker.yaml"
        scorer = step("added-time-scorer", firstTokenWeight=weight)
        document.write_text(config_of(scorer), encoding="utf-8")
        arm = Arm(HOMING, envoy=envoy, seed=seed, folder=folder, pods=pods, document=document)
        told, _ = await arm.serve(load)
    whole = [(ttft_s, e2e_s) for ttft_s, e2e_s, error in told if not error]
    if not whole:
        raise DemoError(f"no request of {len(told)} has a whole answer; the first: {told[0][2]}")
    ttft_s, e2e_s = np.array(whole).T
    return LiveRun(
        workload=workload,
        weight=weight,
        seed=seed,
        requests=len(told),
        errors=len(told) - len(whole),
        ttft_p90_s=round(float(np.percentile(ttft_s, 90)), 4),
        ttft_p99_s=round(float(np.percentile(ttft_s, 99)), 4),
        e2e_mean_s=round(float(e2e_s.mean()), 4),
    )


def _blocks(profile: str) -> int:
    return find_profile(profile).kv_tokens // BLOCK_SIZE_TOKENS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all pairs of the two weights and store the figures in docs/live.json. Return 0, or 1 if a
    request failed.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.live", description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="pairs of runs of each workload")
    parser.add_argument(
        "--chat-minutes", type=float, default=60.0 / RUNS, help="duration of one run of the chat"
    )
    parser.add_argument("--workloads", default=f"{DEMO},{CHAT}", help="comma-separated")
    options = parser.parse_args(arguments)
    envoy = find_envoy()
    found: list[LiveRun] = []
    for workload in options.workloads.split(","):
        for seed in range(1, options.runs + 1):
            weights = (BEFORE, AddedTime().first_token_weight)
            for weight in weights if seed % 2 else weights[::-1]:
                run = one_run(workload, weight, seed, options.chat_minutes * 60.0, envoy)
                found.append(asyncio.run(run))
                print(msgspec.json.encode(found[-1]).decode(), flush=True)
    write_whole(RESULTS, row_lines(msgspec.to_builtins(found)).encode())
    return 1 if any(run.errors for run in found) else 0


if __name__ == "__main__":
    sys.exit(main())
