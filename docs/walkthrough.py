"""Play the working day of docs/walkthrough.md with real processes, and write the page: `python -m
docs.walkthrough`.

`epp serve`, Envoy, HTTP and time are real; the pods are simulated. The page shows the real output
of the commands. The run takes half an hour, or less with `--minutes`, and uses the ports of
`PORTS`.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from bench.termination import end_in_order
from epp.plugins.strategy import config_of, step
from sim.output import TUNED
from sim.reports.report import seconds, share

FOLDER: Final = Path(__file__).parent
PORTS: Final = (8000, 8001, 8002, 8081, 9002, 9003, 9090)
PODS: Final = 3
MODEL: Final = "qwen3-32b"
PROFILE: Final = "qwen3-32b-h100-tp2"
GATEWAY: Final = "http://127.0.0.1:8081"
DEBUG: Final = "http://127.0.0.1:9090"
STARTS_S_MAX: Final = 60.0
RELOADS_S_MAX: Final = 30.0
POLL_S: Final = 0.2
MINUTES: Final = 10.0
"""Duration in minutes of the captured traffic, and of the traffic after the change that is compared
with it.
"""
TRIALS: Final = 40
SPACE: Final = """\
defaults = false
[[weights]]
plugin = "prefix-cache-scorer"
[[weights]]
plugin = "queue-scorer"
[[weights]]
plugin = "kv-cache-utilization-scorer"
"""
KINDS: Final = (("documents", 4, "hot-spot"), ("assistants", 7, "shared-prefix"))
"""Kinds of traffic, as (name, requests per second, workload of `sim trace generate`)."""
LINES_MAX: Final = 40
ERRORS_SHARE_MAX: Final = 0.05

GUESS: Final = config_of(
    step("prefix-cache-scorer", 1),
    step("queue-scorer", 6),
    step("kv-cache-utilization-scorer", 6),
)
"""Guessed first configuration, in which load counts twelve times as much as cached prefixes."""


class Walk:
    """One run of a walkthrough: its folder, programs in the background, and the page written so
    far.
    """

    def __init__(self, folder: Path, path: str, **variables: str) -> None:
        """Create a run in `folder`.

        Its commands are found in the directories of `path`, and get `variables` as further
        environment variables.
        """
        self.folder = folder
        self.page: list[str] = []
        told = {"PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
        self._environment = os.environ | told | variables

    def say(self, *lines: str) -> None:
        """Write lines of prose to the page, one sentence per line."""
        self.page += [*lines, ""]

    def show(self, text: str, language: str = "text") -> None:
        """Write a text to the page as a code block of at most 40 lines: the content of a file or
        the output of a program.
        """
        lines = text.rstrip().splitlines()
        if len(lines) > LINES_MAX:
            lines = [*lines[: LINES_MAX - 1], "..."]
        self.page += [f"```{language}", *lines, "```", ""]

    def run(self, command: str, *, shown: Callable[[str], str] | None = None) -> str:
        """Run `command`, write its output to the page as `shown` converts it, and return the
        unconverted output.

        Raise `SystemExit` if the command fails.
        """
        print(f"$ {command}", flush=True)
        done = subprocess.run(  # noqa: S602 - the commands are those of this file
            command, shell=True, cwd=self.folder, env=self._environment, text=True,
            executable="/bin/bash", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout.replace("\r", "\n"))
        if done.returncode:
            raise SystemExit(f"`{command}` ended with {done.returncode}:\n{told[-2000:]}")
        self.show("\n".join([f"$ {command}", (shown or str)(told).strip("\n")]))
        return done.stdout

    @contextlib.contextmanager
    def running(self, command: str, ready: str) -> Iterator[None]:
        """Run `command` in the background until the context ends. The context begins when the URL
        `ready` answers.

        Raise `SystemExit` if the URL does not answer within `STARTS_S_MAX`.
        """
        print(f"$ {command} &", flush=True)
        self.show(f"$ {command} &")
        log = self.folder / f"{command.split(maxsplit=1)[0]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S602 - as above
                command, shell=True, cwd=self.folder, env=self._environment, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            until(lambda: _answers(ready), STARTS_S_MAX, f"{ready} answers: {log}")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    """Play the walkthrough, write the page and its pictures, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m docs.walkthrough")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="minutes of captured traffic"
    )
    parser.add_argument("--trials", type=int, default=TRIALS, help="trials of sim tune")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the page")
    options = parser.parse_args(arguments)
    end_in_order()
    for port in PORTS:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                raise SystemExit(f"port {port} is in use; the run needs the ports {PORTS}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="homing-walk-") as folder:
        walk = Walk(Path(folder), path)
        _walk(walk, 60.0 * options.minutes, options.trials, options.out)
    (options.out / "walkthrough.md").write_text("\n".join(walk.page).rstrip() + "\n")
    return 0


def _walk(walk: Walk, captured_s: float, trials: int, out: Path) -> None:
    walk.say(
        "# A day with Homing",
        "",
        "This page goes from guessed weights to weights that were tested on captured traffic, in six main commands. "
        "Follow this page to tune Homing for traffic of your own.",
        "Picker, Envoy, HTTP and time are real on this page; the pods are simulated: three of Qwen3-32B on two H100s each.",
        "`make walkthrough` writes this page; each command is followed by its real output.",
    )
    with served(walk):
        drive_before(walk, captured_s)
        _look(walk, out)
        _tune(walk, trials)
        _shadow(walk, captured_s / 4)
        _apply(walk, captured_s)
    walk.say(
        "The capture contains no prompt and no user's name: [capture-format.md](capture-format.md).",
        "The page [simulator.md](simulator.md#tuning) explains what `sim tune` varies and how certain its result is.",
    )


@contextlib.contextmanager
def served(walk: Walk) -> Iterator[None]:
    """Start pods, picker and Envoy, and show their commands on the page.

    They end with the context.
    """
    walk.say("## A pool, a picker, a gateway")
    (walk.folder / "config.yaml").write_text(GUESS)
    walk.say(
        "The picker's first configuration is a guess: load counts twelve times as much as cached prefixes:"
    )
    walk.show(GUESS, "yaml")
    with contextlib.ExitStack() as stack:
        pods = f"sim serve --pods {PODS} --port 8000 --profile {PROFILE} --model {MODEL} --endpoints-out endpoints.yaml"
        stack.enter_context(walk.running(pods, "http://127.0.0.1:8002/health"))
        picker = (
            "epp serve --endpoints-file endpoints.yaml --config-file config.yaml "
            "--secure-serving=false --explain-headers --capture capture"
        )
        stack.enter_context(walk.running(picker, f"{DEBUG}/readyz"))
        walk.run("epp envoy-config --plaintext --listen-port 8081 --out envoy.yaml")
        envoy = "envoy --config-path envoy.yaml --concurrency 1 --log-level warning"
        stack.enter_context(walk.running(envoy, f"{GATEWAY}/v1/models"))
        yield


def drive_before(walk: Walk, captured_s: float) -> None:
    """Send both kinds of traffic for `captured_s` seconds while the picker captures it."""
    walk.say(
        "## Traffic",
        "",
        "Two kinds of traffic run at once: questions about documents, some of which are much more popular than others, "
        "and assistants with a long system prompt each.",
    )
    _drive(walk, "before", captured_s, seed=1)


def _drive(walk: Walk, when: str, duration_s: float, seed: int) -> None:
    drive(walk, when, duration_s, seed, url=GATEWAY, model=MODEL)


def drive(
    walk: Walk, when: str, duration_s: float, seed: int, *, url: str, model: str, before: str = ""
) -> None:
    """Send both kinds of traffic to the gateway at `url`. The results are in the folders
    documents-WHEN and assistants-WHEN.

    `before` is shell text that runs first, for instance one that sets a variable of `url`. Raise
    `SystemExit` if over 5 % of the requests fail.
    """
    for kind, rate, workload in KINDS:
        walk.run(
            f"sim trace generate {workload} --rate {rate} --duration {duration_s:g} --seed {seed} "
            f"--out {kind}-{when}.jsonl"
        )
    (first, *_), (second, *_) = KINDS
    walk.run(
        f"{before}"
        f"sim drive {first}-{when}.jsonl --url {url} --model {model} --out {first}-{when} > {first}.log 2>&1 &\n"
        f"sim drive {second}-{when}.jsonl --url {url} --model {model} --out {second}-{when}; wait",
        shown=without_bars,
    )
    for kind in (first, second):
        told = json.loads((walk.folder / f"{kind}-{when}" / "summary.json").read_text())["requests"]
        if told["errors"] > told["sent"] * ERRORS_SHARE_MAX:
            raise SystemExit(
                f"{told['errors']} of {told['sent']} requests of {kind} have no answer"
            )


def _look(walk: Walk, out: Path) -> None:
    walk.say("## What it looks like", "", "`epp top` shows the pool in a terminal:")
    walk.run("epp top --once")
    walk.say("The picker's page `http://127.0.0.1:9090/live` shows the pool in a browser:")
    _screenshot(f"{DEBUG}/live", out / "walkthrough-live.png")
    walk.page += ["![The live page of the picker](walkthrough-live.png)", ""]
    walk.say("`epp explain` says why the last request went to its pod:")
    row = _json("/debug/decisions?format=json&n=1")["decisions"][0]
    walk.run(f"epp explain {row['request_id']}")


def _tune(walk: Walk, trials: int) -> None:
    walk.say(
        "## Better weights, tried on what was captured",
        "",
        "`sim tune` replays the capture through the picker's own scheduler, tunes on the first half of "
        "the capture, and judges on the second half.",
        "`sim tune` reads a copy of the capture, because the picker continues to write it.",
    )
    walk.run("cp -r capture captured")
    (walk.folder / "space.toml").write_text(SPACE)
    walk.say("The file `space.toml` lets `sim tune` vary the weights of the three scorers only:")
    walk.show(SPACE, "toml")
    walk.run(
        f"sim tune captured --pods {PODS} --profile {PROFILE} --config config.yaml --space space.toml "
        f"--trials {trials} "
        "--out tuned",
        shown=without_bars,
    )
    found = walk.folder / "tuned" / TUNED
    if not found.exists():
        raise SystemExit("sim tune found no better configuration, so the page would show nothing")
    walk.show(found.read_text(), "yaml")


def _shadow(walk: Walk, driven_s: float) -> None:
    walk.say(
        "## First as a shadow",
        "",
        "The tuned configuration first runs as a shadow profile, which scores live traffic without acting on it.",
    )
    tuned = yaml.safe_load((walk.folder / "tuned" / TUNED).read_text())
    text = yaml.safe_dump(shadowed(yaml.safe_load(GUESS), tuned), sort_keys=False)
    generation = _generation()
    (walk.folder / "config.yaml").write_text(text)
    walk.show(text, "yaml")
    until(lambda: _generation() > generation, RELOADS_S_MAX, "the picker reads config.yaml")
    _drive(walk, "shadowed", driven_s, seed=2)
    walk.run(f"curl -s {DEBUG}/metrics | grep -E '^homing_shadow_(decisions|uncached)'")


def _apply(walk: Walk, driven_s: float) -> None:
    walk.say("## Then for real")
    walk.run(f"epp check-config tuned/{TUNED} --diff config.yaml")
    generation = _generation()
    walk.run(f"cp tuned/{TUNED} config.yaml")
    until(lambda: _generation() > generation, RELOADS_S_MAX, "the picker reads config.yaml")
    walk.say(
        "The same kinds of traffic run again after the change of the weights, for as long as before, from other random draws:"
    )
    _drive(walk, "after", driven_s, seed=3)
    walk.say("The table compares the clients' results before and after the change of the weights:")
    walk.page += [*comparison(walk.folder), ""]
    walk.say(
        "The documents and system prompts after the change differ from those before, so each was computed at least once in either run. "
        "`sim tune` instead judged by the second half of the capture, most of which was cached, and by both kinds of traffic together.",
    )
    walk.run("epp top --once")


def comparison(folder: Path) -> list[str]:
    """Return the lines of a table that compares the clients' results before and after the change."""
    head = "| traffic | weights | answered | TTFT p50 | TTFT p90 | E2E mean | cached |"
    rows = [head, "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for kind, *_ in KINDS:
        for when in ("before", "after"):
            told = json.loads((folder / f"{kind}-{when}" / "summary.json").read_text())
            rows.append(f"| {kind} | {when} | " + " | ".join(_figures(told)) + " |")
    return rows


def shadowed(live: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration `live` with the profile of `tuned` as its shadow profile.

    Plug-ins of both keep their parameters.
    """
    named = {plugin.get("name", plugin["type"]): plugin for plugin in tuned["plugins"]}
    renamed = {name: f"tuned-{name}" for name in named}
    (profile,) = tuned["schedulingProfiles"]
    return live | {
        "plugins": [
            *live["plugins"],
            *(plugin | {"name": renamed[name]} for name, plugin in named.items()),
        ],
        "shadow": {
            "name": "tuned",
            "plugins": [
                reference | {"pluginRef": renamed[reference["pluginRef"]]}
                for reference in profile["plugins"]
            ],
        },
    }


def _figures(told: Mapping[str, Any]) -> list[str]:
    requests = told["requests"]
    return [
        f"{requests['sent'] - requests['errors']:,} of {requests['sent']:,}",
        seconds(told["ttft_s"]["p50"]),
        seconds(told["ttft_s"]["p90"]),
        seconds(told["e2e_s"]["mean"]),
        share(told["hit_rate"]),
    ]


def without_bars(text: str) -> str:
    """Return the output of a command without the lines of progress bars."""
    return "\n".join(line for line in text.splitlines() if not re.search(r"[━╸╺]{5}", line))


def _generation() -> int:
    return int(_json("/debug/config?format=json")["generation"])


def _json(path: str) -> Any:
    with urllib.request.urlopen(f"{DEBUG}{path}", timeout=10.0) as answer:  # noqa: S310 - our own
        return json.load(answer)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:  # noqa: S310 - our own
            return bool(answer.status == 200)
    except OSError:
        return False


def until(true: Callable[[], bool], s_max: float, what: str) -> None:
    for _ in range(int(s_max / POLL_S)):
        if true():
            return
        time.sleep(POLL_S)
    raise SystemExit(f"waited {s_max:g} s in vain until {what}")


def _screenshot(url: str, to: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("chromium is not on PATH; install the Debian package chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(  # noqa: S603 - as above
            [chromium, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}",
             "--window-size=1200,1000", "--virtual-time-budget=4000", f"--screenshot={to}", url],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
