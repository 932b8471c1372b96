"""Play the incidents of docs/night.md with real processes, and write the page: `python -m
docs.night`, eight minutes.

Five simulated pods, two pickers and the Envoy of `epp envoy-config` are real processes under an
open loop of requests. The page shows the output of the commands. Each scene proves at the broken
part that its fault happened. The run fails, and writes no page, if a fault has no effect, or if a
command does not name the culprit or takes more than a minute.
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

from aiohttp import ClientSession
from msgspec import Struct

from bench.chaos.effects import OF_POD
from bench.chaos.load import Load, Traffic
from bench.chaos.pods import CRAWL, Fault
from bench.chaos.stage import Picker, Stage, staged
from bench.effect import NoEffectError, StoppedProcess, metric, require_effect
from bench.termination import end_in_order
from docs.walkthrough import Walk
from epp.core.types import Seconds
from epp.plugins.strategies import STRATEGIES
from epp.plugins.strategy import config_of, step
from sim.engine.profiles import DEFAULT_PROFILE, find_profile

FOLDER: Final = Path(__file__).parent
ANSWER_S_MAX: Final = 60.0
WRITTEN_S: Final = 7.0
"""Seconds after which a decision is certainly in the picker's files; writing them takes up to five."""
STRETCH_S: Final = 40.0
"""Duration in seconds of one wait in a scene of docs/night.md; a scene has one wait or several."""
FROZEN_S: Final = 0.25
THAWED_S: Final = 0.1
LONGER: Final = 8.0
"""Approximate length of the prompts in the last scene, relative to the usual length."""
ORDINARY: Final = Traffic()
CARELESS: Final = config_of(step("prefix-cache-scorer", 1))
"""Configuration of the changed ConfigMap in one scene: it considers only cached prefixes."""
MODEL: Final = find_profile(DEFAULT_PROFILE).model


class PromptTokens(Struct, frozen=True):
    """Counters of all pods since their start: prompt tokens and answered requests."""

    tokens: float
    requests: float

    def mean_since(self, before: "PromptTokens") -> float:
        """Return the mean prompt length in tokens of the requests that were answered after
        `before`.
        """
        return (self.tokens - before.tokens) / max(1.0, self.requests - before.requests)


class Night:
    """The running processes of the night, the page written so far, and functions that run commands
    for the page.
    """

    def __init__(
        self, walk: Walk, stage: Stage, config: Path, stretch_s: Seconds = STRETCH_S
    ) -> None:
        """Create a night whose scenes wait for about `stretch_s` seconds, once or several times
        each.
        """
        self.walk = walk
        self.stage = stage
        self.stretch_s = stretch_s
        self._config = config

    async def say(self, *lines: str) -> None:
        """Write lines of prose to the page, one sentence per line."""
        self.walk.say(*lines)

    async def answers(self, command: str, *expected: str) -> str:
        """Run `command`, write its output and its duration to the page, and return the output.

        Raise `SystemExit` if it takes more than a minute, or if its output lacks a text of
        `expected`.
        """
        began_at = time.monotonic()
        told = await asyncio.to_thread(self.walk.run, command)
        took_s = time.monotonic() - began_at
        missing = [text for text in expected if text not in told]
        if missing or took_s > ANSWER_S_MAX:
            raise SystemExit(f"`{command}` took {took_s:.1f} s, without {missing}:\n{told}")
        program = " ".join(command.split()[:2])
        self.walk.say(f"`{program}` took {took_s:.1f} s.")
        return told

    async def configure(self, text: str) -> None:
        """Write the pickers' configuration and wait until both pickers have recorded the change.

        Raise `NoEffectError` if a picker does not report a later generation.
        """
        before = await self._generations()
        beside = self._config.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._config)
        await asyncio.sleep(WRITTEN_S)
        after = await self._generations()
        require_effect(
            all(now > then for now, then in zip(after, before, strict=True)),
            "change of the configuration",
            observed=f"generations {after} at the pickers, {before} before",
            expected="a later generation at each picker",
        )

    async def _generations(self) -> list[int]:
        found = []
        async with ClientSession() as session:
            for picker in self.stage.pickers:
                url = f"{picker.pages}/debug/config?format=json"
                async with session.get(url) as response:
                    found.append(int((await response.json())["generation"]))
        return found

    @contextlib.asynccontextmanager
    async def broken(self, port: int, fault: Fault) -> AsyncIterator[None]:
        """Give the pod at `port` a fault during the context; a direct request to the pod proves it.

        Raise `NoEffectError` if the pod behaves as before.
        """
        effect = OF_POD[fault](port)
        await effect.before()
        await self.stage.tell(port, fault)
        try:
            await effect.during()
            yield
        finally:
            await self.stage.tell(port, Fault.NONE)

    async def prompt_tokens(self) -> PromptTokens:
        """Return the counters of prompt tokens and answered requests, summed over all pods."""
        pods = [f"http://127.0.0.1:{port}" for port in self.stage.pods.ports]
        name = "vllm:request_prompt_tokens"
        return PromptTokens(
            tokens=sum([await metric(pod, f"{name}_sum") for pod in pods]),
            requests=sum([await metric(pod, f"{name}_count") for pod in pods]),
        )


@contextlib.asynccontextmanager
async def stuttering(picker: Picker) -> AsyncIterator[None]:
    """Stop the process of `picker` for most of the time during the context, as if it had no CPU.

    Raise `NoEffectError` on entry if the kernel does not report the process as stopped.
    """

    async def stutter() -> None:
        while True:
            picker.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(FROZEN_S)
            finally:
                picker.signal(signal.SIGCONT)
            await asyncio.sleep(THAWED_S)

    effect = StoppedProcess(picker.pid)
    await effect.before()
    task = asyncio.create_task(stutter(), name="stutter")
    try:
        await effect.during()
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _now() -> str:
    return f"{datetime.now(UTC):%H:%M:%S}"


async def play(night: Night) -> None:
    """Play all scenes of the night in order."""
    async with Load(night.stage.gateway, ORDINARY, seed=1).running():
        await asyncio.sleep(night.stretch_s)
        await why_there(night)
        await which_pod(night)
        # The pickers try the pod again until it serves its trial requests.
        await asyncio.sleep(night.stretch_s)
        await is_it_the_picker(night)
        await last_nights_change(night)
        await doubled_by_a_pod(night)
    await doubled_by_traffic(night)


async def why_there(night: Night) -> None:
    """Play the scene: ask why one request was routed to its endpoint."""
    other = night.stage.pods.ports[0]
    await night.say(
        "## Why did it go there?",
        "",
        "A client complains about one request and has the request id from the answer.",
    )
    await asyncio.to_thread(
        night.walk.run,
        f"curl -s $GATEWAY/v1/completions -H 'x-request-id: complaint-1' -H 'content-type: application/json' "
        f'-d \'{{"model": "{MODEL}", "prompt": "Where does this go?", "max_tokens": 4}}\' -o answer.json',
    )
    await night.answers(
        f"epp explain complaint-1 --endpoint pod-{other} --url $PICKERS", "routed to"
    )


async def which_pod(night: Night) -> None:
    """Play the scene: break one pod, and ask which pod fails."""
    port = night.stage.pods.ports[1]
    began = _now()
    async with night.broken(port, Fault.FAILS_FAST):
        await asyncio.sleep(night.stretch_s / 2)
        await night.say(
            "## Which pod, and since when?",
            "",
            f"The incident of this section: some clients get a 500. (At {began} pod-{port} began to answer every request with a 500, within 17 ms, "
            "while its metrics page looked idle and healthy.)",
        )
        await night.answers("epp top --once --url $PICKERS", f"pod-{port} ejected since")


async def is_it_the_picker(night: Night) -> None:
    """Play the scene: stop one picker again and again, and ask whether a picker is slow."""
    async with stuttering(night.stage.pickers[1]):
        await asyncio.sleep(night.stretch_s)
        await night.say(
            "## Is it the picker?",
            "",
            "The incident of this section: many requests are slow, at all pods. "
            f"(The second picker is stopped for {FROZEN_S * 1e3:.0f} of every {(FROZEN_S + THAWED_S) * 1e3:.0f} ms.)",
        )
        late = urlsplit(night.stage.pickers[1].pages).netloc
        await night.answers("epp top --once --url $PICKERS", f"in a minute, at {late}")
    await asyncio.sleep(night.stretch_s / 2)


async def last_nights_change(night: Night) -> None:
    """Play the scene: change the configuration, and ask what the change did."""
    await asyncio.sleep(night.stretch_s / 2)
    await night.configure(CARELESS)
    await asyncio.sleep(night.stretch_s)
    await night.say(
        "## What did last night's change do?",
        "",
        "The incident of this section: the configuration of both pickers was changed so that only cached prefixes count in their decisions.",
    )
    await night.answers(
        f"epp changes --dir $DECISIONS --window {night.stretch_s:.0f}s",
        "prefix-cache-scorer: added",
    )
    await night.configure(STRATEGIES["homing"].config)
    await asyncio.sleep(night.stretch_s)


async def doubled_by_a_pod(night: Night) -> None:
    """Play the scene: slow one pod down, and ask why the TTFT doubled."""
    port = night.stage.pods.ports[2]
    began = _now()
    async with night.broken(port, Fault.CRAWLS):
        await asyncio.sleep(night.stretch_s + WRITTEN_S)
        await night.say(
            f"## Why did the TTFT double at {began}?",
            "",
            f"The first cause of a doubled TTFT, at one pod: this pod became {CRAWL:.0f} times as slow, like a pod whose GPU is throttled. (The slow pod is pod-{port}.)",
        )
        await night.answers(
            f"epp changes --dir $DECISIONS --at {began} --window {night.stretch_s:.0f}s",
            f"pod-{port}",
            "requests take",
        )
    await asyncio.sleep(night.stretch_s)


async def doubled_by_traffic(night: Night) -> None:
    """Play the scene: send longer prompts, and ask why the TTFT doubled."""
    began = _now()
    before = await night.prompt_tokens()
    usual_tokens = before.mean_since(PromptTokens(0.0, 0.0))
    longer = Traffic(system_words=3000, tenants=400)
    async with Load(night.stage.gateway, longer, seed=2).running():
        await asyncio.sleep(night.stretch_s + WRITTEN_S)
        mean_tokens = (await night.prompt_tokens()).mean_since(before)
        require_effect(
            mean_tokens >= LONGER / 2 * usual_tokens,
            "longer prompts",
            observed=f"{mean_tokens:.0f} prompt tokens a request at the pods, {usual_tokens:.0f} before",
            expected=f"at least {LONGER / 2:g} times as many",
        )
        await night.say(
            f"The second cause of a doubled TTFT, at {began}: as many requests as before, with longer prompts that no pod has cached.",
        )
        await night.answers(
            f"epp changes --dir $DECISIONS --at {began} --window {night.stretch_s:.0f}s",
            "prompt tokens",
        )


@contextlib.asynccontextmanager
async def opened(folder: Path, stretch_s: Seconds = STRETCH_S) -> AsyncIterator[Night]:
    """Start pods, pickers and Envoy with files in `folder`, and yield the night; all processes end
    with the context.
    """
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
        yield Night(walk, stage, config, stretch_s)


async def _night(folder: Path, out: Path) -> None:
    async with opened(folder) as night:
        await night.say(
            "# Three in the morning",
            "",
            "One command answers each of five questions about a pool in trouble.",
            "This page is for operators: find your question among the headings and type the command of its section.",
            "",
            "Pickers, Envoy, HTTP and time are real on this page; the five pods are simulated. "
            f"Two replicas of the picker share {ORDINARY.rate_per_s:.0f} requests a second under the default configuration.",
            "`make night` writes this page from the output of the commands. "
            "`make night` first verifies the effect of each fault at the broken part, "
            "and writes no page if a fault has no effect, or if a command does not name the culprit.",
        )
        await night.say(
            "Run the commands of this page in the picker's own pod if the picker runs in a cluster ([where commands run](operate.md#where-commands-run)). "
            "`$PICKERS` contains the addresses of the two pickers on this page, and `$DECISIONS` is the folder of their decision history.",
        )
        await play(night)
        (out / "night.md").write_text("\n".join(night.walk.page).rstrip() + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the night and write its page. Return 0, or 1 if a fault had no effect."""
    parser = argparse.ArgumentParser(prog="python -m docs.night")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the page")
    options = parser.parse_args(arguments)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="homing-night-") as folder:
        try:
            asyncio.run(_night(Path(folder), options.out))
        except NoEffectError as problem:
            print(f"{problem}. No page is written.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
