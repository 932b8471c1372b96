"""The command line of `sim serve`.

The server is imported only when the command runs, because importing HTTP and logging takes half a
second, which other commands such as `sim replay` should not pay.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Final

from sim.engine.features import add_feature_flag
from sim.engine.links import DEFAULT_LINK, LINKS, Link, LinkError, link_named, link_of
from sim.engine.profiles import DEFAULT_PROFILE
from sim.pods.roles import ROLES, roles_named

_PODS_MAX: Final = 1000
_EARLIER_LINK: Final = LINKS["ib-ndr400"]
"""Network whose set-up time applies with `--kv-bandwidth`."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `sim serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve simulated vLLM pods over HTTP, in real time",
        description="Serve simulated vLLM pods over HTTP until SIGINT or SIGTERM.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("Pods")
    number = group.add_mutually_exclusive_group()
    number.add_argument(
        "--pods", type=_between(1, _PODS_MAX), default=1, metavar="N", help="number of pods"
    )
    number.add_argument(
        "--roles",
        type=_roles,
        default=(),
        metavar="ROLE=N,...",
        help=f"number of pods of each role: {', '.join(ROLES)}; pods that decode have a sidecar "
        "(default: pods without a role)",
    )
    add = group.add_argument
    add("--host", default="127.0.0.1", help="IP address to listen on")
    add(
        "--port",
        type=_between(0, 65535),
        default=8000,
        metavar="P",
        help="port of the first pod, the others follow; 0 for free ports",
    )
    add(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="NAME",
        help="model and GPU: a built-in profile, FILE.toml or FILE.toml:NAME",
    )
    add(
        "--model",
        metavar="NAME",
        help="model name that clients request (default: that of the profile)",
    )
    engine = parser.add_argument_group("Engine")
    add_feature_flag(engine)
    add = engine.add_argument
    add(
        "--lora",
        action="append",
        default=[],
        metavar="NAME",
        help="name of a LoRA adapter that each pod serves; repeatable",
    )
    add(
        "--max-loras",
        type=_between(0, 10_000),
        default=4,
        metavar="N",
        help="maximum number of LoRA adapters in a batch of a pod; 0 turns LoRA off",
    )
    add(
        "--blocks",
        type=_between(2, 10_000_000),
        metavar="N",
        help="number of KV blocks of each pod or rank (default: the profile's KV cache)",
    )
    add("--block-size", type=_between(1, 4096), default=16, metavar="TOKENS",
        help="tokens per KV block")  # fmt: skip
    add("--max-num-seqs", type=_between(1, 100_000), metavar="N",
        help="maximum number of running requests in each pod or rank (default: the profile's)")  # fmt: skip
    add("--max-num-batched-tokens", type=_between(1, 10_000_000), metavar="N",
        help="maximum number of tokens in an engine step (default: the profile's)")  # fmt: skip
    add(
        "--max-num-queued-reqs",
        type=_between(0, 10_000_000),
        default=0,
        metavar="N",
        help="number of unfinished requests at which a pod rejects further ones with 503; 0 for no limit",
    )
    add("--kv-link", type=_link, default=DEFAULT_LINK, metavar="NAME|GB/S:S",
        help="network over which a pod with a role reads the KV blocks of another: "
        f"{', '.join(LINKS)}, or its bandwidth in GB/s and the set-up time of a transfer in "
        "seconds")  # fmt: skip
    add("--kv-bandwidth", dest="kv_link", type=_bandwidth, default=argparse.SUPPRESS,
        metavar="GB/S", help="earlier form of --kv-link: GB/S alone, with the set-up time of "
        f"{_EARLIER_LINK.name}")  # fmt: skip
    add("--stream-interval", type=_between(1, 10_000), default=1, metavar="TOKENS",
        help="tokens in each chunk of a streamed answer, as in vLLM; the first token is a chunk of its own")  # fmt: skip
    add(
        "--kv-events",
        type=_between(0, 65535),
        nargs="?",
        const=0,
        metavar="PORT",
        help="publish KV events; PORT is the first of one port for each pod or rank, followed by as many "
        "ports for replays of old events; without PORT, free ports are used, and "
        "GET /kv_event_sources reports them (default: no events)",
    )
    add = parser.add_argument_group("Simulation and output").add_argument
    add(
        "--speed",
        type=_positive,
        default=1.0,
        metavar="X",
        help="factor by which simulated time runs faster than real time",
    )
    add("--seed", type=int, default=1, help="random seed of the simulated answers")
    add("--endpoints-out", type=Path, metavar="FILE", help="write an endpoints file for epp serve")
    add("--json", action="store_true", help="print the addresses as JSON")
    add(
        "--log-format",
        choices=("console", "json"),
        default="console",
        help="format of the logs on stderr",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    code: int = import_module("sim.pods.serving").run(options)
    return code


class _between:  # noqa: N801 - argparse shows the name of the converter
    """An argparse type that accepts an integer from `lowest` to `highest`."""

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


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 10000")
    return number


def _link(text: str) -> Link:
    try:
        return link_named(text)
    except LinkError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _bandwidth(text: str) -> Link:
    return link_of(gigabytes_per_s=_positive(text), setup_s=_EARLIER_LINK.setup_s)


def _roles(text: str) -> tuple[str, ...]:
    try:
        return roles_named(text, pods_max=_PODS_MAX)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
