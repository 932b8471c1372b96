"""The command of `make demo`: send the same conversations through Envoy, by round robin and by
Homing.

Exit codes: 0 done, 1 an error anywhere, 2 the packaged Envoy does not run on this machine (or a
wrong command line), 128 plus the number of the signal if it was interrupted (130 for Ctrl-C).
"""

import argparse
import asyncio
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from sim.demo.arm import (
    BLOCK_SIZE_TOKENS,
    CACHE_SHARE,
    HOMING,
    PODS,
    PROFILE,
    ROUND_ROBIN,
    Arm,
    ArmResult,
    DemoError,
    cache_blocks,
    find_envoy,
)
from sim.demo.client import RequestOutcome
from sim.demo.report import SCHEMA, Summary, milliseconds, render_report, summarise, title_of
from sim.demo.workload import Conversation, WorkloadSettings, conversations, requests_in
from sim.engine.profiles import find_profile


class Options(Struct, frozen=True, kw_only=True):
    """Values of the demo's command line."""

    seed: int
    out: Path
    workload: WorkloadSettings


async def run_demo(options: Options, console: Console) -> int:
    """Run both arms of the demo, print the table, write the files, and return the exit code."""
    workload = conversations(options.workload, options.seed)
    total = requests_in(workload)
    console.print(
        f"The demo sends the same {total} requests twice through a real Envoy to {PODS} simulated "
        f"pods: by round robin, then by Homing. It takes at most three minutes; seed {options.seed}.",
        highlight=False,
    )
    envoy = find_envoy()
    results: dict[str, ArmResult] = {}
    with (
        tempfile.TemporaryDirectory(prefix="homing-demo-") as folder,
        Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=console,
        ) as progress,
    ):
        for name in (ROUND_ROBIN, HOMING):
            task = progress.add_task(title_of(name), total=total)
            arm = Arm(name, envoy=envoy, seed=options.seed, folder=Path(folder))
            results[name] = await arm.run(workload, partial(_advance, progress, task))
    summary = Summary(
        schema=SCHEMA,
        seed=options.seed,
        arms={
            name: summarise(result.outcomes, result.requests_per_pod)
            for name, result in results.items()
        },
    )
    console.print(_table(summary))
    page = render_report(
        summary,
        {name: result.outcomes for name, result in results.items()},
        _conditions(options, workload),
    )
    written = _write_results(options.out, summary, page)
    console.print("\n".join(f"wrote {path}" for path in written), highlight=False)
    return _verdict(results, total, console)


def _advance(progress: Progress, task: TaskID, _: RequestOutcome) -> None:
    progress.advance(task)


def _verdict(results: dict[str, ArmResult], total: int, console: Console) -> int:
    """Return exit code 0 if every request was answered and counted by a pod, else print the problem
    and return 1.
    """
    code = 0
    for name, result in results.items():
        wrong = [outcome.error for outcome in result.outcomes if outcome.error]
        if wrong:
            console.print(
                f"{title_of(name)}: {len(wrong)} requests failed, the first: {wrong[0]}",
                style="red",
                markup=False,
            )
            code = 1
        served = sum(result.requests_per_pod)
        if not wrong and not len(result.outcomes) == served == total:
            console.print(
                f"{title_of(name)}: expected {total} requests, sent {len(result.outcomes)}, "
                f"counted by the pods {served}",
                style="red",
            )
            code = 1
    return code


def _table(summary: Summary) -> Table:
    table = Table("")
    for heading in ("TTFT p50", "TTFT p90", "prefix hits", "requests a pod", "errors"):
        table.add_column(heading, justify="right")
    for name, numbers in summary.arms.items():
        table.add_row(
            title_of(name),
            milliseconds(numbers.ttft_ms["p50"]),
            milliseconds(numbers.ttft_ms["p90"]),
            f"{numbers.prefix_hit_rate:.1%}",
            " ".join(str(count) for count in numbers.requests_per_pod),
            str(numbers.errors),
        )
    return table


def _conditions(options: Options, workload: Sequence[Conversation]) -> list[tuple[str, str]]:
    shape = options.workload
    cache_tokens = cache_blocks() * BLOCK_SIZE_TOKENS
    return [
        ("Pods", f"{PODS} an arm, fresh, simulated: {PROFILE} ({find_profile(PROFILE).model})"),
        ("KV cache", f"{cache_tokens:,} tokens a pod, {CACHE_SHARE:.0%} of the real one"),
        (
            "Why so small",
            "cache and traffic are reduced together, so a minute stands for a longer time",
        ),
        ("Tenants", f"{shape.tenants}, system prompts of {shape.system_tokens:,} tokens (median)"),
        ("Conversations", f"{len(workload)}, {requests_in(workload)} requests"),
        ("Arrivals", f"Poisson, {shape.conversations_per_s:g}/s for {shape.arrival_window_s:g} s"),
        ("Turns", f"{shape.turns_min} to {shape.turns_max}, {shape.think_s_mean:g} s between them"),
        ("Question, answer", f"{shape.question_tokens} and {shape.answer_tokens} tokens (median)"),
        ("Gateway", "Envoy with the same bootstrap; round robin: a ROUND_ROBIN cluster, no picker"),
        ("Homing", "epp serve with its default profile"),
        ("Measured", "by the client, over all requests; caches are empty at the start of each arm"),
        ("Repeat with", "python -m sim.demo " + _arguments(options)),
    ]


def _arguments(options: Options) -> str:
    """Return the command-line arguments that repeat the demo with the same workload."""
    default, shape = WorkloadSettings(), options.workload
    words = [f"--seed {options.seed}"]
    if shape.arrival_window_s != default.arrival_window_s:
        words.append(f"--seconds {shape.arrival_window_s:g}")
    if shape.turns_max != default.turns_max:
        words.append(f"--turns-max {shape.turns_max}")
    return " ".join(words)


def _write_results(out: Path, summary: Summary, page: str) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    files = {out / "summary.json": content, out / "report.html": page.encode()}
    for path, text in files.items():
        beside = path.with_name(f".{path.name}.new")
        beside.write_bytes(text)
        beside.replace(path)
    return list(files)


def runs_here() -> bool:
    """Return whether the packaged Envoy can run on this machine."""
    return sys.platform == "linux" and platform.machine() in {"x86_64", "AMD64"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of `make demo` and return its exit code; the module's docstring lists the
    codes.
    """
    options = _parse(arguments)
    console = Console()
    if not runs_here():
        console.print("The demo needs Linux x86-64: the packaged Envoy is built for it only.")
        return 2
    try:
        return asyncio.run(_until_interrupted(options, console))
    except KeyboardInterrupt:
        return 130


async def _until_interrupted(options: Options, console: Console) -> int:
    """Run the demo and return its exit code. On the first SIGINT, SIGTERM or SIGHUP, stop all
    programs in order; ignore further signals.
    """
    demo = asyncio.ensure_future(run_demo(options, console))
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            demo.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await demo
    except asyncio.CancelledError:
        console.print("interrupted; all programs are stopped")
        return 128 + received[0]
    except (DemoError, OSError) as problem:
        console.print(f"demo: {problem}", style="red", markup=False, highlight=False)
        return 1


def _parse(arguments: Sequence[str] | None) -> Options:
    default = WorkloadSettings()
    parser = argparse.ArgumentParser(
        prog="python -m sim.demo",
        description="Round robin against Homing behind a real Envoy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results")
    parser.add_argument(
        "--seconds",
        type=float,
        default=default.arrival_window_s,
        help="seconds during which conversations arrive, in each arm",
    )
    parser.add_argument(
        "--turns-max",
        type=int,
        default=default.turns_max,
        help="maximum number of turns in a conversation",
    )
    given = parser.parse_args(arguments)
    if not 0 < given.seconds <= 3600:
        parser.error(f"--seconds is {given.seconds:g}; it must be above 0 and at most 3600")
    if not default.turns_min <= given.turns_max <= 100:
        parser.error(f"--turns-max is {given.turns_max}; it must be {default.turns_min} to 100")
    workload = msgspec.structs.replace(
        default, arrival_window_s=given.seconds, turns_max=given.turns_max
    )
    return Options(seed=given.seed, out=given.out, workload=workload)
