"""Attack the picker, alone and behind the real Envoy, and measure other requests: `make attack`.

The command is `python -m bench.attack [NAME...] [--seconds S] [--alone | --envoy] [--queue]`. A probe sends
an ordinary completion 20 times a second beside each attack. A row shows the extent of the attack,
lost requests of the probe, the probe's 99th percentile before and during the attack, the picker's
maximum memory, its memory 3 s afterwards, and the time until the probe was served as before.

With `--queue`, requests wait in the picker while each pod has `ROOM` requests, tenants share by
tokens, the probe is one of them, and further attacks aim at the queue.

The exit code is 1 if a request of the probe or an innocent request of the attackers was lost. It is
also 1, without a table, if an attack had no effect at the attacked process.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench.attack import gateway as gw
from bench.attack.attacks import (
    ATTACKS,
    FLAGS,
    INVENTED_TENANTS,
    PROMPT,
    QUEUE_ONLY,
    RAW_ONLY,
)
from bench.attack.effects import Watch, require_reached
from bench.effect import NoEffectError
from bench.place import ROOT, Place, running
from bench.queueing import config_with_queue
from bench.termination import end_in_order
from epp.flags.serve import ServeFlags
from epp.flags.values import Transport

PROBES_PER_S = 20
BEFORE_S = 3.0
RECOVERED_S_MAX = 60.0
AFTER_S = 3.0
CALM_PROBES = 20
"""Number of consecutive requests of the probe, a client beside the attack, that show that the
picker has recovered: none of them fails, and at most one takes longer than twice the 99th percentile
before the attack.
"""
PROBE_S_MAX = 10.0
ROOM = 8
"""Number of requests at each pod from which on further ones wait in the picker, with `--queue`."""
TENANT = {"x-llm-d-inference-fairness-id": "probe"}
"""Header that names the tenant of the probe's requests. It has an effect only with `--queue`, and
only if tenants share the queue.
"""
PODS = 4


def _config(name: str) -> str:
    """Return the configuration with a queue for the attack `name`.

    No policy can share among tenants that clients invent. In attacks with such tenants, all requests
    share one queue, as by default.
    """
    if name in INVENTED_TENANTS:
        return config_with_queue(ROOM, "global-strict-fairness-policy")
    return config_with_queue(ROOM)


class Probed(Struct, frozen=True):
    asked_s: float
    took_s: float
    problem: str


class Row(Struct, frozen=True, kw_only=True):
    name: str
    did: str
    lost: list[str]
    """Problem of each lost request of the probe, a client beside the attack."""
    attackers_lost: list[str]
    """Problem of each innocent request of the attackers that was lost."""
    probes: int
    p99_before_s: float
    p99_during_s: float
    resident_max_bytes: int
    resident_after_bytes: int
    recovered_s: float | None


class Probe:
    """A client that sends ordinary requests at a fixed rate beside an attack, whatever happens to
    earlier ones.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.done: list[Probed] = []
        self.resident_bytes: list[tuple[float, int]] = []

    async def run(self) -> None:
        """Send `PROBES_PER_S` ordinary requests a second to the picker or to Envoy, and record the
        picker's memory, until cancelled.
        """
        timeout = ClientTimeout(total=PROBE_S_MAX)
        async with (
            gw.channel(self._place.picker) as opened,
            ClientSession(timeout=timeout) as session,
            asyncio.TaskGroup() as asking,
        ):
            due_s = time.monotonic()
            while True:
                due_s += 1 / PROBES_PER_S
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                self.resident_bytes.append((time.monotonic(), self._place.resident_bytes()))
                asking.create_task(
                    self._http(session) if self._place.gateway else self._raw(opened)
                )

    async def _raw(self, opened: grpc.aio.Channel) -> None:
        asked_s = time.monotonic()
        problem = await gw.ask(opened, PROMPT, timeout_s=PROBE_S_MAX, fields=TENANT)
        self.done.append(Probed(asked_s, time.monotonic() - asked_s, problem))

    async def _http(self, session: ClientSession) -> None:
        asked_s = time.monotonic()
        url = f"{self._place.gateway}/v1/completions"
        try:
            async with session.post(url, data=PROMPT, headers=TENANT) as response:
                await response.read()
                problem = "" if response.status == 200 else f"got {response.status}"
        except (ClientError, TimeoutError) as error:
            problem = type(error).__name__
        self.done.append(Probed(asked_s, time.monotonic() - asked_s, problem))

    def between(self, start_s: float, end_s: float) -> list[Probed]:
        return [one for one in self.done if start_s <= one.asked_s < end_s]


def _p99_s(probed: Sequence[Probed]) -> float:
    return sorted(one.took_s for one in probed)[int(len(probed) * 0.99)]


async def _attack(
    name: str, *, envoy: bool, seconds: float, transport: Transport, config: str
) -> Row:
    with tempfile.TemporaryDirectory(prefix="homing-attack-") as folder:
        flags = ("--transport", transport, *FLAGS.get(name, ()))
        async with running(
            Path(folder), pods=PODS, envoy=envoy, flags=flags, config=config
        ) as place:
            probe = Probe(place)
            probing = asyncio.create_task(probe.run())
            try:
                return await _under(probe, Watch(place, transport), name, seconds)
            finally:
                probing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await probing


async def _under(probe: Probe, watch: Watch, name: str, seconds: float) -> Row:
    place = watch.place
    await asyncio.sleep(1.0)
    before_s = time.monotonic()
    await asyncio.sleep(BEFORE_S)
    await watch.begin()
    started_s = time.monotonic()
    before = probe.between(before_s, started_s)
    watching = asyncio.create_task(watch.run(), name="watch")
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.attack.attacks", name, place.picker, place.gateway),
        *(str(seconds), *map(str, place.pods.ports)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        told, _ = await asyncio.wait_for(attacker.communicate(), seconds + 120)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    ended_s = time.monotonic()
    recovered_s = await _recovery(probe, ended_s, 2 * _p99_s(before))
    await asyncio.sleep(AFTER_S)
    during = probe.between(started_s, ended_s)
    since = [one for one in probe.done if one.asked_s >= started_s]
    assert attacker.returncode == 0, f"the attacker {name} failed, see above"
    attack = json.loads(told)
    if problem := attack.get("without_effect"):
        raise NoEffectError(problem)
    await watch.read()
    require_reached(watch, name, attack["done"], probes=len(during))
    return Row(
        name=name,
        did=attack["did"],
        lost=[one.problem for one in since if one.problem],
        attackers_lost=attack["lost"],
        probes=len(since),
        p99_before_s=_p99_s(before),
        p99_during_s=_p99_s(during),
        resident_max_bytes=max(count for _, count in probe.resident_bytes),
        resident_after_bytes=probe.resident_bytes[-1][1],
        recovered_s=recovered_s,
    )


async def _recovery(probe: Probe, since_s: float, calm_s: float) -> float | None:
    """Return the seconds from `since_s` to the first of `CALM_PROBES` consecutive requests of the
    probe of which none failed and at most one took longer than `calm_s`.

    None if there are none within `RECOVERED_S_MAX`.
    """
    while time.monotonic() < since_s + RECOVERED_S_MAX:
        await asyncio.sleep(0.1)
        after = [one for one in probe.done if one.asked_s >= since_s]
        for start in range(len(after) - CALM_PROBES + 1):
            row = after[start : start + CALM_PROBES]
            # One of them may meet a scrape, or another process.
            slow = sum(one.took_s > calm_s for one in row)
            if slow <= 1 and not any(one.problem for one in row):
                return row[0].asked_s - since_s
    return None


def _table(title: str) -> Table:
    table = Table(title=title)
    for column in ("attack", "what it did"):
        table.add_column(column)
    for column in ("lost", "p99 before", "during", "memory at most", "3 s after", "recovered in"):
        table.add_column(column, justify="right")
    return table


def _cells(row: Row) -> tuple[str, ...]:
    lost = f"{len(row.lost)} of {row.probes}"
    if row.attackers_lost:
        lost += f", {len(row.attackers_lost):,} of the attackers"
    why = [*row.lost, *row.attackers_lost][:1]
    return (
        row.name,
        row.did,
        f"{lost} ({why[0]})" if why else lost,
        f"{row.p99_before_s * 1e3:.0f} ms",
        f"{row.p99_during_s * 1e3:.0f} ms",
        f"{row.resident_max_bytes / 1e6:.0f} MB",
        f"{row.resident_after_bytes / 1e6:.0f} MB",
        "not" if row.recovered_s is None else f"{row.recovered_s:.1f} s",
    )


def main(arguments: Sequence[str]) -> int:
    """Run the attacks, and print a table for the picker alone and one for the picker behind Envoy,
    unless the command line selects one of them.

    Attacks in `RAW_ONLY` are left out behind Envoy, those in `QUEUE_ONLY` without `--queue`. Return
    1 if an innocent request was lost or an attack had no effect, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.attack", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="duration of each attack in seconds (default 6)"
    )
    parser.add_argument("--transport", choices=list(Transport), default=ServeFlags().transport)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--alone", action="store_true", help="attack the picker directly only")
    ways.add_argument("--envoy", action="store_true", help="attack behind Envoy only")
    parser.add_argument(
        "--queue", action="store_true", help="let requests wait in the picker, and attack the queue"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(ATTACKS))
    if unknown:
        parser.error(f"no attack {unknown[0]!r}, expected one of {', '.join(ATTACKS)}")
    names = [name for name in options.names or ATTACKS if options.queue or name not in QUEUE_ONLY]
    if not names:
        parser.error(f"{options.names[0]} is an attack on the queue; add --queue")
    end_in_order()
    console = Console(width=180)
    lost = 0
    for envoy in (False, True):
        if (options.envoy and not envoy) or (options.alone and envoy):
            continue
        way = "behind Envoy" if envoy else "the picker alone"
        with_queue = ", --queue" if options.queue else ""
        table = _table(f"{way}, --transport {options.transport}{with_queue}")
        for name in names:
            if envoy and name in RAW_ONLY:
                continue
            attacking = _attack(
                name,
                envoy=envoy,
                seconds=options.seconds,
                transport=Transport(options.transport),
                config=_config(name) if options.queue else "",
            )
            try:
                row = asyncio.run(attacking)
            except NoEffectError as problem:
                print(f"{way}: {problem}. No table is printed.", file=sys.stderr)
                return 1
            lost += len(row.lost) + len(row.attackers_lost)
            table.add_row(*_cells(row))
            print(" | ".join(_cells(row)), file=sys.stderr, flush=True)
        console.print(table)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
