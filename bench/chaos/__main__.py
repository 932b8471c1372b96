"""Measure the cost of each fault for clients, in ten minutes: `make chaos`.

The command is `python -m bench.chaos [NAME...] [--seconds S] [--rate-per-s R [--light]] [--write
FILE | --queue]`. Five simulated pods, two pickers with the default configuration and the Envoy of `epp
envoy-config` are real processes, new for each fault. Ordinary requests are sent at a fixed rate,
three of four streamed, for some seconds without the fault and for S seconds with it; the times to
first token of both are compared.

With `--queue`, requests wait in the pickers while each pod has `ROOM` requests.

The exit code is 1 if a fault that should lose no request loses one. It is also 1, without a table,
if a fault has no effect at the part that it should break.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Final

from msgspec import Struct, structs
from rich.console import Console
from rich.progress import track

from bench.chaos.faults import CASES, Case, NotPlayedError
from bench.chaos.load import LIGHT, Asked, Load, Traffic
from bench.chaos.stage import PODS, Edit, Routed, Stage, staged
from bench.effect import NoEffectError
from bench.queueing import config_with_queue
from bench.termination import end_in_order
from epp.core.types import Seconds

WARM_S: Final = 3.0
BEFORE_S: Final = 8.0
ROOM: Final = 4
"""Number of requests at each pod from which on further ones wait in the pickers, with `--queue`.
Without a fault, each pod has
more than half as many.
"""
LOST_BY_NONE: Final = frozenset(
    {
        "picker-leaves",
        "pickers-parted",
        "api-server-away",
        "valkey-away",
        "disk-full",
        "exporter-away",
    }
)
MARKS: Final = ("<!-- chaos, by `make chaos` -->", "<!-- end of chaos -->")
"""Lines of a page between which `--write` puts the table."""
_HEAD: Final = (
    "fault",
    "requests",
    "lost, by status",
    "last lost after",
    "to the bad pod after the first second",
    "TTFT p50",
    "TTFT p90",
)


class Row(Struct, kw_only=True):
    """The cost of one fault for clients, as a row of the table."""

    case: Case
    not_played: str = ""
    sent: int = 0
    lost: Mapping[str, int] = {}
    """Number of lost requests, by the HTTP status of the answer or by the reason why there is no
    status.

    Requests sent in the `BEFORE_S` seconds before the fault count too, because the fault may hit
    them while they run.
    """
    last_lost_s: float = 0.0
    """Seconds from the beginning of the fault until the last lost request was sent; negative if it
    was sent before the fault, 0 if none was lost.
    """
    bad_share: float | None = None
    """Share of the requests sent after the first second of the fault that were routed to the faulty
    pod, or None if the fault affects no pod.
    """
    ttft_before_s: Sequence[float] = ()
    ttft_during_s: Sequence[float] = ()


async def play(
    name: str,
    *,
    seconds: float,
    traffic: Traffic,
    seed: int,
    edit: Edit | None = None,
    queue: bool = False,
) -> Row:
    """Start all processes, inject the fault `name` under load, and return its cost. Requests wait
    in the pickers if `queue` is True.

    If this machine cannot inject the fault, the row only has the reason. Raise `NoEffectError` if
    the fault has no effect.
    """
    case = CASES[name]
    port_index = Random(f"{seed}:pod").randrange(PODS)
    with tempfile.TemporaryDirectory(prefix="homing-chaos-") as folder:
        try:
            async with (
                case.set(Path(folder)) as setting,
                staged(
                    Path(folder),
                    flags=(*setting.flags, *(_queueing(Path(folder)) if queue else ())),
                    environment=setting.environment,
                    peers=setting.peers,
                    pool=setting.pool,
                    edit=edit,
                ) as stage,
            ):
                port = stage.pods.ports[port_index]
                load = Load(stage.gateway, traffic, seed)
                effect = setting.effect(stage, port)
                async with load.running():
                    await asyncio.sleep(WARM_S)
                    before_at = time.monotonic()
                    await effect.before()
                    await _until(before_at + BEFORE_S)
                    async with setting.happen(stage, port):
                        began_at = time.monotonic()
                        await effect.during()
                        await _until(began_at + max(seconds, case.seconds_min))
                        load.stop()
                        await load.ended()
        except NotPlayedError as reason:
            return Row(case=case, not_played=str(reason))
        before = [one for one in load.asked if before_at <= one.sent_at < began_at]
        during = [one for one in load.asked if one.sent_at >= began_at]
        # Requests in progress at the fault are its victims too.
        hurt = [one for one in before if one.lost] + [one for one in during if one.lost]
        return Row(
            case=case,
            sent=len(during),
            lost=Counter(one.lost for one in hurt),
            last_lost_s=max((one.sent_at - began_at for one in hurt), default=0.0),
            bad_share=_share_of(port, stage, during, began_at) if case.of_pod else None,
            ttft_before_s=_ttfts_s(before),
            ttft_during_s=_ttfts_s(during),
        )


def _queueing(folder: Path) -> tuple[str, ...]:
    file = folder / "config.yaml"
    file.write_text(config_with_queue(ROOM))
    return ("--config-file", str(file))


async def _until(at: Seconds) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))


def _share_of(port: int, stage: Stage, during: Sequence[Asked], began_at: float) -> float:
    routed = stage.routed()
    late = [one.number for one in during if one.sent_at >= began_at + 1.0]
    bad = sum(routed.get(number, Routed()).destination == f"127.0.0.1:{port}" for number in late)
    return bad / max(1, len(late))


def _ttfts_s(asked: Sequence[Asked]) -> list[float]:
    return sorted(one.ttft_s for one in asked if one.ttft_s)


def cells(row: Row) -> tuple[str, ...]:
    """Return the texts of the table's row for one fault."""
    if row.not_played:
        return (row.case.what, f"not played: {row.not_played}", "", "", "", "", "")
    # A number and a status side by side would read as one.
    lost = ", ".join(f"{count} × {status}" for status, count in sorted(row.lost.items()))  # noqa: RUF001
    return (
        row.case.what,
        f"{row.sent:,}",
        lost or "0",
        f"{max(0.0, row.last_lost_s):.1f} s" if row.lost else "",
        "" if row.bad_share is None else f"{row.bad_share:.1%}",
        _compared(row, 0.5),
        _compared(row, 0.9),
    )


def _compared(row: Row, share: float) -> str:
    """Return a quantile of the time to first token with the fault, and its relative increase over
    that without, as text; "none" if one of them is not known.
    """
    if not row.ttft_before_s or not row.ttft_during_s:
        return "none"
    before, during = (
        times[int(len(times) * share)] for times in (row.ttft_before_s, row.ttft_during_s)
    )
    return f"{during * 1e3:.0f} ms ({during / before - 1:+.0%})"


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the table of faults in Markdown."""
    lines = [_HEAD, ("---",) * len(_HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between_marks(text: str, table: str, marks: tuple[str, str] = MARKS) -> str:
    """Return `text` with `table` between `marks`. Raise `ValueError` unless each mark occurs once."""
    begin, end = marks
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected {begin} and {end} once each")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"


def bare_gateway(document: dict[str, Any]) -> None:
    """Remove from Envoy's configuration `document` what `epp envoy-config` adds to survive the loss
    of a picker, so that Envoy's defaults apply.

    Health checks remain, one every 2 s.
    """
    static = document["static_resources"]
    connections = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    upgraded = (upgrade["filters"] for upgrade in connections["upgrade_configs"])
    for one in chain(connections["http_filters"], *upgraded):
        one["typed_config"].get("grpc_service", {}).pop("retry_policy", None)
    (pickers,) = (one for one in static["clusters"] if one["name"] == "ext_proc")
    del pickers["outlier_detection"], pickers["common_lb_config"]
    del pickers["circuit_breakers"]["thresholds"][0]["max_retries"]
    pickers["health_checks"][0].update(interval="2s", no_traffic_interval="2s")
    (http,) = pickers["typed_extension_protocol_options"].values()
    del http["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]


def main(arguments: Sequence[str]) -> int:
    """Run the faults, print the table, and write it if requested; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="duration of each fault in seconds (default 15)"
    )
    parser.add_argument("--rate-per-s", type=float, default=Traffic().rate_per_s)
    parser.add_argument(
        "--light",
        action="store_true",
        help="use short prompts and answers, for a hundred requests a second",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="Markdown page to write the table into"
    )
    parser.add_argument(
        "--bare-gateway",
        action="store_true",
        help="remove what `epp envoy-config` adds to survive the loss of a picker",
    )
    parser.add_argument("--queue", action="store_true", help="let requests wait in the pickers")
    options = parser.parse_args(arguments)
    if options.queue and options.write:
        parser.error("--write is for the table without --queue")
    unknown = sorted(set(options.names) - set(CASES))
    if unknown:
        parser.error(f"no fault {unknown[0]!r}, expected one of {', '.join(CASES)}")
    names = options.names or list(CASES)
    end_in_order()
    console = Console(stderr=True)
    rows = []
    traffic = structs.replace(LIGHT if options.light else Traffic(), rate_per_s=options.rate_per_s)
    for name in track(names, "Breaking things", console=console):
        playing = play(
            name,
            seconds=options.seconds,
            traffic=traffic,
            seed=options.seed,
            edit=bare_gateway if options.bare_gateway else None,
            queue=options.queue,
        )
        try:
            rows.append(asyncio.run(playing))
        except NoEffectError as problem:
            print(f"{name}: {problem}. No figure is written.", file=sys.stderr)
            return 1
        console.print(" | ".join(cells(rows[-1])), markup=False)
    table = as_markdown(rows)
    print(table)
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(write_between_marks(page, table), encoding="utf-8")
    wrong = [
        name for name, row in zip(names, rows, strict=True) if row.lost and name in LOST_BY_NONE
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
