"""Ten minutes of ordinary load through the real Envoy while everything changes: `make soak`.

The command is `python -m bench.soak [--minutes M] [--rate-per-s R]`. Pods are killed and return,
their metrics pages become invalid, and the configuration and the endpoints file are replaced by
valid and invalid ones, while requests continue. Losses are split by cause. An empty 500 or a
refusal is the picker's fault; 502, 503 and 504 of Envoy and broken answers belong to pods that died
during a request.

The exit code is 1 if the picker lost a request, if its memory grew by 3 % or more after the first
minute, or if it still counts a request or a stream when all have ended. It is also 1, without
figures, if a change had no effect at the changed part.

With `--peers`, the command instead soaks three pickers that are killed and frozen, for an hour:
`bench/soak_peers`.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from aiohttp import ClientError, ClientSession
from prometheus_client.parser import text_string_to_metric_families

from bench import soak_peers
from bench.effect import (
    OBSERVED_S_MAX,
    ClosedPort,
    NoEffectError,
    effects_alone,
    metric,
    require_effect,
    within,
)
from bench.place import PAGE, PAGES, Place, client_session, running, write_endpoints
from bench.soak_peers import fault, prompts
from bench.termination import end_in_order
from epp.flags.serve import ServeFlags
from epp.flags.values import Transport
from epp.plugins.strategy import config_of, step

PODS = 6
CONVERSATIONS = 400
PROMPT_WORDS = 300
GROWTH_MAX = 0.03
WARM_S = 60.0
ASK_S_MAX = 30.0
SETTLE_S_MAX = 20.0
"""Seconds after the last answer until requests and streams that the picker still counts are
reported as stuck.
"""
TRUE_PAGE = PAGE.format(waiting=0).encode()
_OPEN = {
    "homing_inflight_requests": "requests in flight by the picker's count",
    "homing_extproc_streams_inflight": "ext_proc streams open",
}
"""Gauges of the picker that must be 0 once all load has ended: name -> description of a
remainder.
"""


def _config(prefix_weight: float) -> str:
    """Return a configuration whose prefix scorer has the weight `prefix_weight`."""
    return config_of(
        step("prefix-cache-scorer", prefix_weight),
        step("queue-scorer"),
        step("active-request-scorer"),
    )


class Soak:
    """The state of a soak test: the load, the changes, and the results so far."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.told: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()
        self.resident: list[tuple[float, int]] = []
        self._random = Random(seed)
        self._prompts = prompts(self._random, CONVERSATIONS, PROMPT_WORDS)

    async def ask(self, session: ClientSession) -> None:
        """Send one request through Envoy, and count its result: served, or lost and whose fault
        that was.
        """
        prompt = self._random.choice(self._prompts)
        url = f"{self.place.gateway}/v1/completions"
        headers = {"x-takes-s": f"{self._random.expovariate(1 / 0.1):.3f}"}
        try:
            async with session.post(
                url, json={"model": "m", "prompt": prompt}, headers=headers
            ) as response:
                text = await response.text()
                self.told[fault(response.status, text)] += 1
        except (ClientError, TimeoutError) as error:
            self.told[f"pods: {type(error).__name__}"] += 1

    async def every(self, mean_s: float, name: str, change: Callable[[], Awaitable[None]]) -> None:
        """Call `change` about every `mean_s` seconds, and count the calls under `name`, until
        cancelled.
        """
        while True:
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * mean_s)
            await change()
            self.changes[name] += 1

    async def kill(self) -> None:
        """Kill a random pod and start it again three seconds later.

        Raise `NoEffectError` if the port still accepts connections after the kill.
        """
        port = self._random.choice(self.place.pods.ports)
        await self.place.pods.kill(port)
        await ClosedPort("killed pod", port).during()
        await asyncio.sleep(3.0)
        await self.place.pods.start(port)

    async def turn(self, session: ClientSession) -> None:
        """Replace the metrics page of a random pod for five seconds by one that no real engine
        serves. Stop early if another change has killed the pod.
        """
        port = self._random.choice(self.place.pods.ports)
        for kind, wait_s in ((self._random.choice(list(PAGES)), 5.0), ("usual", 0.0)):
            try:
                async with session.post(f"http://127.0.0.1:{port}/page/{kind}") as response:
                    await response.read()
                if kind != "usual":
                    await _require_other_page(session, port, kind)
            except ClientError:
                # Another change has killed the pod meanwhile.
                return
            await asyncio.sleep(wait_s)

    async def reconfigure(self) -> None:
        """Replace the configuration by one with another weight, or, at a quarter of the calls, by
        an invalid document.

        Do nothing if the file has the same text already. Raise `NoEffectError` if the picker does
        not count the reload.
        """
        text = _config(self._random.randint(1, 5))
        good = self._random.random() < 0.75
        text = text if good else text[:-40]
        if text == self.place.config_file.read_text():
            return
        before = await self._reloads(good)
        self.place.config_file.write_text(text)

        async def counted() -> bool:
            return await self._reloads(good) > before

        require_effect(
            await within(OBSERVED_S_MAX, counted),
            "configuration written",
            observed="the picker counts no more reloads",
            expected=f"one more {'successful' if good else 'failed'} reload",
        )

    async def rearrange(self) -> None:
        """Remove one endpoint from the endpoints file for three seconds, or, at a quarter of the
        calls, make the file invalid.

        Raise `NoEffectError` if the picker does not react.
        """
        file, ports = self.place.endpoints_file, self.place.pods.ports
        if self._random.random() < 0.25:
            refused = self._refused_endpoints()
            file.write_text("endpoints: [")

            async def effective() -> bool:
                return self._refused_endpoints() > refused
        else:
            write_endpoints(file, self._random.sample(ports, len(ports) - 1))

            async def effective() -> bool:
                return await self._known_endpoints() == len(ports) - 1

        require_effect(
            await within(OBSERVED_S_MAX, effective),
            "endpoints file written",
            observed="the picker neither knows one endpoint less nor logs that it refused the file",
            expected="one of the two",
        )
        await asyncio.sleep(3.0)
        write_endpoints(file, ports)

    async def _reloads(self, good: bool) -> float:
        """Return the number of configurations that the picker has applied (`good`) or rejected
        since its start.
        """
        labels = {"result": "success" if good else "failure"}
        name = "homing_config_reloads_total"
        return await metric(self.place.pages, name, labels, absent=0.0)

    async def _known_endpoints(self) -> int:
        """Return the number of endpoints that the picker knows."""
        async with (
            ClientSession() as session,
            session.get(f"{self.place.pages}/debug/endpoints?format=json") as response,
        ):
            return len((await response.json())["endpoints"])

    def _refused_endpoints(self) -> int:
        """Return how many lines of the picker's log say that it rejected the endpoints file."""
        log = self.place.folder / "epp.log"
        return log.read_text().count("endpoints rejected")

    async def weigh(self) -> None:
        self.resident.append((time.monotonic(), self.place.resident_bytes()))


async def _require_other_page(session: ClientSession, port: int, kind: str) -> None:
    """Raise `NoEffectError` unless the metrics page of the pod at `port` differs from the
    true one.
    """
    page = b""
    async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
        async for chunk in response.content.iter_any():
            page += chunk
            if len(page) > len(TRUE_PAGE):
                break
    require_effect(
        page != TRUE_PAGE,
        f"metrics page {kind}",
        observed="the true page",
        expected="another page",
    )


async def soak(minutes: float, rate_per_s: float, transport: str) -> int:
    """Run the soak test for `minutes`, print the results and return the exit code.

    Raise `NoEffectError` if a change has no effect at the changed part.
    """
    with tempfile.TemporaryDirectory(prefix="homing-soak-") as name:
        folder = Path(name)
        config = _config(3)
        flags = ("--transport", transport)
        async with running(folder, pods=PODS, envoy=True, config=config, flags=flags) as place:
            soaked = Soak(place, seed=1)
            with effects_alone():
                await _load(soaked, minutes * 60, rate_per_s)
            left = await _open_at_the_end(place)
            return _tell(soaked, left, folder / "epp.log")


async def _open_at_the_end(place: Place) -> dict[str, int]:
    """Return the values of the gauges `_OPEN`, by description, as soon as all are 0, or after
    `SETTLE_S_MAX`.
    """
    deadline_s = time.monotonic() + SETTLE_S_MAX
    async with ClientSession() as session:
        while True:
            async with session.get(f"{place.pages}/metrics") as response:
                left = open_on(await response.text())
            if not any(left.values()) or time.monotonic() > deadline_s:
                return left
            await asyncio.sleep(0.5)


def open_on(page: str) -> dict[str, int]:
    """Return the numbers of open requests and streams on a metrics page, all endpoints together, by
    description.

    Raise `KeyError` if the page does not contain them.
    """
    shown = {family.name: family.samples for family in text_string_to_metric_families(page)}
    return {what: int(sum(one.value for one in shown[gauge])) for gauge, what in _OPEN.items()}


async def _load(soak: Soak, lasts_s: float, rate_per_s: float) -> None:
    async with client_session(ASK_S_MAX) as session, asyncio.TaskGroup() as asking:
        changes = (
            (15.0, "pod killed", soak.kill),
            (11.0, "page", lambda: soak.turn(session)),
            (7.0, "configuration", soak.reconfigure),
            (9.0, "endpoints", soak.rearrange),
            (1.0, "weighed", soak.weigh),
        )
        changing = [
            asking.create_task(soak.every(mean_s, name, change)) for mean_s, name, change in changes
        ]
        started_s = time.monotonic()
        for number in itertools.count():
            due_s = started_s + number / rate_per_s
            if due_s > started_s + lasts_s:
                break
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            asking.create_task(soak.ask(session))
        for task in changing:
            task.cancel()
    for mean_s, name, _ in changes:
        # Each change comes at the latest after 1.5 times its mean, and takes some seconds.
        require_effect(
            soak.changes[name] > 0 or lasts_s < 2 * mean_s,
            f"change {name!r}",
            observed=f"no such change in {lasts_s:g} s",
            expected=f"one every {mean_s:g} s",
        )


def _tell(soak: Soak, left: Mapping[str, int], log: Path) -> int:
    started_s = soak.resident[0][0]
    warm = [count for at_s, count in soak.resident if at_s >= started_s + WARM_S]
    share = max(1, len(warm) // 10)
    growth = sum(warm[-share:]) / sum(warm[:share]) - 1 if warm else 0.0
    total = sum(soak.told.values())
    print(
        f"{total:,} requests; " + ", ".join(f"{what} {n} times" for what, n in soak.changes.items())
    )
    for what, count in sorted(soak.told.items()):
        print(f"  {what:40} {count:>8,}")
    mb = [count / 1e6 for _, count in soak.resident]
    print(f"  resident: {mb[0]:.0f} MB at first, {mb[-1]:.0f} MB at last, at most {max(mb):.0f} MB")
    print(f"  growth after the first minute: {growth:+.1%} (must be below {GROWTH_MAX:.0%})")
    for what, count in left.items():
        print(f"  {what} at the end: {count} (must be 0)")
    errors = Counter(
        line.partition('"event": "')[2].partition('"')[0]
        for line in log.read_text().splitlines()
        if '"level": "error"' in line
    )
    for event, count in errors.most_common(10):
        print(f"  logged {count} times: {event}")
    cost = sum(count for what, count in soak.told.items() if what.startswith("picker"))
    return 1 if cost or growth >= GROWTH_MAX or any(left.values()) else 0


def main(arguments: Sequence[str]) -> int:
    """Run the soak test that the command line names; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, help="duration in minutes (default 10, with --peers 60)"
    )
    parser.add_argument(
        "--peers", action="store_true", help="soak three pickers that are killed and frozen"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the faults, with --peers (default 1)"
    )
    parser.add_argument(
        "--json", type=Path, help="file for the results of --peers, as JSON (default stdout)"
    )
    parser.add_argument("--rate-per-s", type=float, default=100.0)
    parser.add_argument("--transport", choices=list(Transport), default=ServeFlags().transport)
    options = parser.parse_args(arguments)
    end_in_order()
    try:
        if options.peers:
            return soak_peers.run(options.minutes or 60.0, options.seed, options.json)
        soaking = soak(options.minutes or 10.0, options.rate_per_s, options.transport)
        return asyncio.run(soaking)
    except NoEffectError as problem:
        print(f"{problem}. No figure is printed.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
