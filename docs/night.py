"""Plays the night of docs/night.md and writes it: `python -m docs.night`, some six minutes.

Five simulated pods, two pickers and the Envoy of `epp envoy-config`, real processes all of them, under
an open loop of requests. What the page shows is what the commands printed; a command that does not
name the culprit, or takes a minute, ends the night.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bench.chaos.load import Load, Traffic
from bench.chaos.pods import CRAWL, Fault
from bench.chaos.stage import Picker, Stage, staged
from bench.termination import end_in_order
from docs.walkthrough import Walk
from epp.plugins.strategies import STRATEGIES
from epp.plugins.strategy import config_of, step
from sim.engine.profiles import DEFAULT_PROFILE, find_profile

FOLDER: Final = Path(__file__).parent
ANSWER_S_MAX: Final = 60.0
WRITTEN_S: Final = 7.0
"""What the picker knows is in its files after five seconds."""
STRETCH_S: Final = 40.0
"""Of each part of the night. What commands compare is a little less, for they see whole seconds."""
FROZEN_S: Final = 0.25
THAWED_S: Final = 0.1
ORDINARY: Final = Traffic()
CARELESS: Final = config_of(step("prefix-cache-scorer", 1))
"""The change of the evening: only what is cached counts."""
MODEL: Final = find_profile(DEFAULT_PROFILE).model


class Night:
    """The stage, the page, and the commands that are asked of it."""

    def __init__(self, walk: Walk, stage: Stage, config: Path) -> None:
        self.walk = walk
        self.stage = stage
        self._config = config

    async def say(self, *lines: str) -> None:
        """Prose: a sentence a line."""
        self.walk.say(*lines)

    async def answers(self, command: str, *expected: str) -> str:
        """What `command` prints, which is on the page with how long it took.

        Raises `SystemExit` if it takes a minute, or `expected` is not in it.
        """
        began_at = time.monotonic()
        told = await asyncio.to_thread(self.walk.run, command)
        took_s = time.monotonic() - began_at
        missing = [text for text in expected if text not in told]
        if missing or took_s > ANSWER_S_MAX:
            raise SystemExit(f"`{command}` took {took_s:.1f} s, without {missing}:\n{told}")
        self.walk.say(f"It took {took_s:.1f} s.")
        return told

    async def configure(self, text: str) -> None:
        """Somebody edits the ConfigMap; waits until both pickers have read it."""
        beside = self._config.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._config)
        await asyncio.sleep(WRITTEN_S)

    @contextlib.asynccontextmanager
    async def asked(self, traffic: Traffic, seed: int) -> AsyncIterator[None]:
        """Requests all the while."""
        load = Load(self.stage.gateway, traffic, seed)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            yield
            load.stop()

    @contextlib.asynccontextmanager
    async def broken(self, port: int, fault: Fault) -> AsyncIterator[None]:
        """The pod at `port` has `fault`."""
        await self.stage.tell(port, fault)
        try:
            yield
        finally:
            await self.stage.tell(port, Fault.NONE)


@contextlib.asynccontextmanager
async def stuttering(picker: Picker) -> AsyncIterator[None]:
    """`picker` stands still for most of the time, as one that gets no CPU."""

    async def stutter() -> None:
        while True:
            picker.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(FROZEN_S)
            finally:
                picker.signal(signal.SIGCONT)
            await asyncio.sleep(THAWED_S)

    task = asyncio.create_task(stutter(), name="stutter")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _now() -> str:
    return f"{datetime.now(UTC):%H:%M:%S}"


async def _play(night: Night) -> None:
    """The whole night, in order."""
    async with night.asked(ORDINARY, seed=1):
        await asyncio.sleep(STRETCH_S)
        await _why_there(night)
        await _which_pod(night)
        await _is_it_the_picker(night)
        await _last_nights_change(night)
        await _doubled_by_a_pod(night)
    await _doubled_by_traffic(night)


async def _why_there(night: Night) -> None:
    other = night.stage.pods.ports[0]
    await night.say(
        "## Why did it go there?",
        "",
        "A client complains of one request and has the id that stood on its answer.",
    )
    await asyncio.to_thread(
        night.walk.run,
        f"curl -s $GATEWAY/v1/completions -H 'x-request-id: complaint-1' -H 'content-type: application/json' "
        f'-d \'{{"model": "{MODEL}", "prompt": "Where does this go?", "max_tokens": 4}}\' -o answer.json',
    )
    await night.answers(
        f"epp explain complaint-1 --endpoint pod-{other} --url $PICKERS", "went to", "pod-"
    )


async def _which_pod(night: Night) -> None:
    port = night.stage.pods.ports[1]
    began = _now()
    async with night.broken(port, Fault.FAILS_FAST):
        await asyncio.sleep(STRETCH_S / 2)
        await night.say(
            "## Which pod, and since when?",
            "",
            f"Some clients get a 500. (At {began} pod-{port} began to answer every request with one, within 17 ms, "
            "its metrics page idle and healthy.)",
        )
        await night.answers("epp top --once --url $PICKERS", f"pod-{port} ejected since")
    # Until trials have shown that it serves again.
    await asyncio.sleep(STRETCH_S)


async def _is_it_the_picker(night: Night) -> None:
    async with stuttering(night.stage.pickers[1]):
        await asyncio.sleep(STRETCH_S)
        await night.say(
            "## Is it the picker?",
            "",
            "Everything feels slow. "
            f"(The second picker stands still for {FROZEN_S * 1e3:.0f} of every {(FROZEN_S + THAWED_S) * 1e3:.0f} ms.)",
        )
        late = urlsplit(night.stage.pickers[1].pages).netloc
        await night.answers("epp top --once --url $PICKERS", f"in a minute, at {late}")
    await asyncio.sleep(STRETCH_S / 2)


async def _last_nights_change(night: Night) -> None:
    await asyncio.sleep(STRETCH_S / 2)
    await night.configure(CARELESS)
    await asyncio.sleep(STRETCH_S)
    await night.say(
        "## What did last night's change do?",
        "",
        "Somebody wrote into the ConfigMap that only what is cached counts.",
    )
    await night.answers(
        f"epp changes --dir $DECISIONS --window {STRETCH_S:.0f}s", "prefix-cache-scorer: added"
    )
    await night.configure(STRATEGIES["homing"].config)
    await asyncio.sleep(STRETCH_S)


async def _doubled_by_a_pod(night: Night) -> None:
    port = night.stage.pods.ports[2]
    began = _now()
    async with night.broken(port, Fault.CRAWLS):
        await asyncio.sleep(STRETCH_S + WRITTEN_S)
        await night.say(
            f"## Why did the TTFT double at {began}?",
            "",
            f"First by a pod: it has become {CRAWL:.0f} times as slow, as one does whose GPU is throttled. (It is pod-{port}.)",
        )
        await night.answers(
            f"epp changes --dir $DECISIONS --at {began} --window {STRETCH_S:.0f}s",
            f"pod-{port}",
            "requests take",
        )
    await asyncio.sleep(STRETCH_S)


async def _doubled_by_traffic(night: Night) -> None:
    began = _now()
    longer = Traffic(system_words=3000, tenants=400)
    async with night.asked(longer, seed=2):
        await asyncio.sleep(STRETCH_S + WRITTEN_S)
        await night.say(
            f"Then, at {began}, by the traffic: as many requests, of prompts that nobody has asked before and that are longer.",
        )
        await night.answers(
            f"epp changes --dir $DECISIONS --at {began} --window {STRETCH_S:.0f}s", "prompt tokens"
        )


async def _night(folder: Path, out: Path) -> None:
    config, decisions = folder / "config.yaml", folder / "decisions"
    config.write_text(STRATEGIES["homing"].config)
    decisions.mkdir()
    flags = (
        *("--config-file", str(config), "--decisions-dir", str(decisions)),
        "--parse-response-usage",
    )
    shown = ("--response-body-mode", "STREAMED")
    async with staged(folder, flags=flags, gateway_flags=shown) as stage:
        walk = Walk(
            folder,
            f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            GATEWAY=stage.gateway,
            PICKERS=",".join(picker.pages for picker in stage.pickers),
            DECISIONS=str(decisions),
        )
        walk.say(
            "# Three in the morning",
            "",
            "Five questions, each answered by one command, on a pool in which what they ask about really happened.",
            "Pickers, Envoy, HTTP and time are real, the five pods are simulated; two replicas of the picker share the requests, "
            f"{ORDINARY.rate_per_s:.0f} a second, under the default configuration.",
            "This page is written by `python -m docs.night`: what stands under a command is what it printed, "
            "and it is not written if a command does not name the culprit.",
        )
        walk.say(
            "In a cluster the commands run in the picker's own pod: [how](operate.md#where-commands-run). "
            "Here `$PICKERS` holds the addresses of both, and `$DECISIONS` is the folder that both keep decisions in.",
        )
        await _play(Night(walk, stage, config))
        (out / "night.md").write_text("\n".join(walk.page).rstrip() + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the page is written."""
    parser = argparse.ArgumentParser(prog="python -m docs.night")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the page")
    options = parser.parse_args(arguments)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="homing-night-") as folder:
        asyncio.run(_night(Path(folder), options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
