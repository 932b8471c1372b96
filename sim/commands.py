"""`sim`: flags to values, values to one command; the exit code is what the command returns.

0 done, 1 it could not be done (one sentence on stderr), 2 the command line is wrong.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from epp import __version__
from epp.configuration.config import ConfigError
from epp.configuration.document import nearest
from sim.cluster.cluster import ClusterSettingsError
from sim.cluster.policies import PolicyNameError
from sim.engine import calibrate
from sim.engine.engine import EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, ProfileError, find_profile
from sim.experiments import compare, replay, replicas, sweep
from sim.experiments.executors import ExecutorError
from sim.experiments.jobs import JobError
from sim.experiments.leaderboard import command as leaderboard
from sim.experiments.scenario_file import ScenarioError
from sim.output import OutputError
from sim.pods.pods import PodSettings
from sim.pods.server import PodAddress, listen, serve, write_endpoints
from sim.sentences import sentence_of
from sim.traces import command as trace_command
from sim.traces.arrival import TraceError
from sim.truth import validate

_PODS_MAX: Final = 1000


def run(arguments: Sequence[str] | None) -> int:
    """Run one command of the simulator."""
    parser: argparse.ArgumentParser = _Parser(
        prog="sim", description="Simulated vLLM pods for the endpoint picker.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"sim {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    trace_command.add_parser(commands)
    replay.add_parser(commands)
    compare.add_parser(commands)
    sweep.add_parser(commands)
    replicas.add_parser(commands)
    leaderboard.add_parser(commands)
    calibrate.add_parser(commands)
    validate.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except BrokenPipeError:
        raise  # nobody reads the output any more: no problem of the command
    except (PolicyNameError, ClusterSettingsError) as problem:
        return _fail(str(problem), code=2)
    except (
        TraceError, ProfileError, ScenarioError, ConfigError, OutputError, JobError, ExecutorError, OSError,
    ) as problem:  # fmt: skip
        return _fail(sentence_of(problem), code=1)
    return code


class _Parser(argparse.ArgumentParser):
    """Says what a misspelt flag or command may have meant; its commands are parsed by it too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown flags where they stand; argparse first misses what they leave unsaid."""
        arguments = list(sys.argv[1:] if args is None else args)
        for argument in arguments:
            name = argument.partition("=")[0]
            if argument == "--" or (self._subparsers and not argument.startswith("-")):
                break  # what follows are no flags, or those of a command
            if name.startswith("--") and name not in self._option_string_actions:
                self.error(f"unknown flag {name}{nearest(name, self._option_string_actions)}")
        return super().parse_known_args(arguments, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = nearest(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="simulated vLLM pods as real HTTP servers, in real time",
        description="Serve simulated vLLM pods over HTTP until SIGINT or SIGTERM.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pods", type=_between(1, _PODS_MAX), default=1, metavar="N", help="how many pods")
    add("--host", default="127.0.0.1", help="ip address to listen on")
    add(
        "--port",
        type=_between(0, 65535),
        default=8000,
        metavar="P",
        help="port of the first pod, the others follow; 0: free ports",
    )
    add(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="NAME",
        help="model and GPU: a built-in profile, FILE.toml or FILE.toml:NAME",
    )
    add("--model", metavar="NAME", help="served model name (default: the profile's)")
    add("--lora", action="append", default=[], metavar="NAME", help="an adapter; repeatable")
    add("--max-loras", type=_between(0, 10_000), default=4, metavar="N", help="adapter slots")
    add("--blocks", type=_between(2, 10_000_000), metavar="N", help="KV blocks (default: profile)")
    add("--block-size", type=_between(1, 4096), default=16, metavar="TOKENS", help="KV block")
    add("--max-num-seqs", type=_between(1, 100_000), metavar="N", help="default: profile")
    add("--max-num-batched-tokens", type=_between(1, 10_000_000), metavar="N", help="same")
    add(
        "--max-num-queued-reqs",
        type=_between(0, 10_000_000),
        default=0,
        metavar="N",
        help="unfinished requests of a pod before it answers 503; 0: no limit",
    )
    add("--speed", type=_speed, default=1.0, metavar="X", help="time runs X times as fast")
    add("--seed", type=int, default=1, help="decides the answers")
    add("--endpoints-out", type=Path, metavar="FILE", help="write the file epp serve reads")
    add("--json", action="store_true", help="print the addresses as JSON")
    add("--log-format", choices=("console", "json"), default="console", help="logs on stderr")
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    _configure_logs(options.log_format)
    try:
        profile = find_profile(options.profile)
        engine = EngineSettings(
            blocks_total=options.blocks or profile.kv_tokens // options.block_size + 1,
            block_size_tokens=options.block_size,
            max_num_seqs=options.max_num_seqs or profile.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens or profile.max_num_batched_tokens,
            max_loras=options.max_loras,
        )
    except ValueError as problem:
        return _fail(str(problem), code=2)
    settings = PodSettings(
        profile=profile,
        engine=engine,
        model=options.model or profile.model,
        adapters=tuple(dict.fromkeys(options.lora)),
        speed=options.speed,
        seed=options.seed,
        max_num_queued_reqs=options.max_num_queued_reqs,
    )
    if settings.model in settings.adapters:
        return _fail(f"--lora {settings.model} is the name of the model.", code=2)
    if settings.adapters and not options.max_loras:
        return _fail("--lora needs --max-loras of at least 1.", code=2)

    code = 0

    def ready(addresses: Sequence[PodAddress]) -> None:
        if options.endpoints_out is not None:
            write_endpoints(options.endpoints_out, addresses)
        print(_announcement(settings.model, addresses, as_json=options.json), flush=True)

    try:
        asyncio.run(serve(settings, listen(options.host, options.port, options.pods), ready))
    except* OSError as problems:
        code = _fail(str(problems.exceptions[0]), code=1)
    return code


def _announcement(model: str, addresses: Sequence[PodAddress], *, as_json: bool) -> str:
    if as_json:
        pods = [
            {"name": pod.name, "address": pod.address, "port": pod.port, "url": pod.url}
            for pod in addresses
        ]
        return json.dumps({"model": model, "pods": pods})
    return f"{model} on " + " ".join(pod.url for pod in addresses)


def _configure_logs(log_format: str) -> None:
    renderer = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _fail(sentence: str, *, code: int) -> int:
    print(f"sim: {sentence}", file=sys.stderr)
    return code


class _between:  # noqa: N801 - argparse shows the name of the converter
    """An integer in a closed range, for argparse."""

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest = lowest
        self._highest = highest

    def __call__(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = self._lowest - 1
        if not self._lowest <= number <= self._highest:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not an integer from {self._lowest} to {self._highest}"
            )
        return number


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 10000")
    return speed
