"""Proofs that the attacks of `bench.attack.attacks` reached the picker, or the pod they go through.

An attacker counts what it sent. A proof compares that with what the attacked process counted by
itself: the metrics page of the picker, read once a second while the attack runs, or the metrics
page of the pod that was changed. The kernel counts the connections of the picker, because the
transport grpcio does not.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct, field
from prometheus_client.parser import text_string_to_metric_families

from bench.attack.attacks import IDLE_CONNECTIONS, ZERO_WINDOWS
from bench.effect import require_effect
from bench.place import Place
from epp.flags.values import Transport

READ_S: Final = 1.0
TIMEOUT_S: Final = 10.0
PAGE_BYTES: Final = 4_096
"""Number of bytes read from a pod's metrics page.

A true page is shorter; a hostile one differs within it.
"""
_STREAMS: Final = "homing_extproc_streams_total"
_FAILED: Final = f"{_STREAMS}, not OK"
_HELD: Final = "homing_held_body_bytes"
_HELD_MAX: Final = "homing_held_body_bytes_max"
_MESSAGES: Final = "homing_extproc_messages_total"
_CONNECTIONS: Final = "connections at the picker"
_TCP_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED: Final = "01"
_CUT: Final = "homing_extproc_connections_cut_total"
_WAITED: Final = "homing_flow_wait_seconds_count"
_REFUSALS: Final = "homing_refusals_total"


class Watch(Struct):
    """The metrics and connections of the attacked picker, and the page of one pod, as read so far."""

    place: Place
    transport: Transport = Transport.NGH2
    first: dict[str, float] = field(default_factory=dict)
    """Value of each metric of the picker before the attack, summed over its series."""
    last: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    pod_pages: set[bytes] = field(default_factory=set)
    """First bytes of each different metrics page that the first pod served."""

    def rise(self, name: str) -> float:
        """Return the increase of the counter `name` since the attack began."""
        return self.last.get(name, 0.0) - self.first.get(name, 0.0)

    def peak(self, name: str) -> float:
        """Return the difference between the highest value of the gauge `name` and its value before
        the attack.
        """
        return self.highest.get(name, 0.0) - self.first.get(name, 0.0)

    async def begin(self) -> None:
        """Read the picker's metrics and the pod's page once, before the attack."""
        await self.read()
        self.first = dict(self.last)

    async def run(self) -> None:
        """Read the picker's metrics and the pod's page about once a second, until cancelled."""
        while True:
            await asyncio.sleep(READ_S)
            await self.read()

    async def read(self) -> None:
        """Read the picker's metrics and number of connections, and the beginning of the first pod's
        page. Leave out a page that does not answer.
        """
        self._take({_CONNECTIONS: float(connections_at(int(self.place.picker.rpartition(":")[2])))})
        # A process under attack may answer late; the next read counts.
        async with ClientSession(timeout=ClientTimeout(total=TIMEOUT_S)) as session:
            with suppress(ClientError, TimeoutError):
                async with session.get(f"{self.place.pages}/metrics") as response:
                    self._take(_sums(await response.text()))
            with suppress(ClientError, TimeoutError):
                url = f"http://127.0.0.1:{self.place.pods.ports[0]}/metrics"
                async with session.get(url) as response:
                    self.pod_pages.add(await response.content.read(PAGE_BYTES))

    def _take(self, values: Mapping[str, float]) -> None:
        self.last |= values
        for name, value in values.items():
            self.highest[name] = max(value, self.highest.get(name, value))


def _sums(page: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if sample.name == _STREAMS and sample.labels["code"] != "OK":
                sums[_FAILED] = sums.get(_FAILED, 0.0) + sample.value
    return sums


def connections_at(port: int) -> int:
    """Return the number of established connections whose local port is `port`, by the kernel's
    tables of sockets (proc_pid_net(5)).
    """
    rows: list[str] = []
    for table in _TCP_TABLES:
        # A machine without IPv6 has no table for it.
        with suppress(FileNotFoundError):
            rows += Path(table).read_text().splitlines()[1:]
    local = f":{port:04X}"
    fields = (row.split() for row in rows)
    return sum(one[1].endswith(local) and one[3] == _ESTABLISHED for one in fields)


def require_reached(watch: Watch, name: str, done: int, probes: int) -> None:
    """Raise `NoEffectError` unless the attack `name` reached the picker or the pod.

    The attacker sent `done` units. `probes` requests of others fell into the same time.
    """
    require_effect(
        done > 0, f"attack {name}", observed="an attacker that sent nothing", expected="an attack"
    )
    what, observed, expected = PROOFS[name](watch, done, probes)
    require_effect(
        observed >= expected,
        f"attack {name}",
        observed=f"{observed:,.0f} {what}",
        expected=f"at least {expected:,.0f}",
    )


def _streams(watch: Watch, done: int, probes: int) -> tuple[str, float, float]:
    return "streams at the picker", watch.rise(_STREAMS), probes / 2 + done / 2


def _waited(watch: Watch, done: int, _: int) -> tuple[str, float, float]:
    waited = watch.rise(_WAITED) + watch.rise(_REFUSALS)
    return "requests that waited in the queue, or were refused", waited, done / 2


def _refused(watch: Watch, done: int, _: int) -> tuple[str, float, float]:
    refused = watch.rise(_REFUSALS) + watch.rise(_FAILED)
    return "requests refused by the picker, or ended with an error", refused, done / 2


def _ended(watch: Watch, done: int, _: int) -> tuple[str, float, float]:
    if watch.transport is Transport.GRPCIO:  # it ends such connections, and counts none
        return "more connections at the picker", watch.peak(_CONNECTIONS), 1
    return "connections cut by the picker", watch.rise(_CUT), done / 2


PROOFS: Final[Mapping[str, Callable[[Watch, int, int], tuple[str, float, float]]]] = {
    "held": lambda watch, *_: (
        "bytes of unfinished bodies at the picker at once",
        watch.peak(_HELD),
        watch.last.get(_HELD_MAX, math.inf) / 2,
    ),
    "bodies": _streams,
    "encoded": _streams,
    "pieces": lambda watch, done, _: (
        "messages at the picker",
        watch.rise(_MESSAGES),
        done / 2,
    ),
    "page": lambda watch, done, _: (
        "different metrics pages of the attacked pod",
        len(watch.pod_pages),
        2,
    ),
    "resets": _streams,
    "burst": _streams,
    "subset": _refused,
    "models": _streams,
    "refusals": _refused,
    "tiny": lambda watch, *_: ("more connections at the picker", watch.peak(_CONNECTIONS), 1),
    # They may be over before the next page is read: the picker closes a connection that sends so many
    # PINGs. So they are counted when they have ended, and the attacker counts those without any data.
    "windows": lambda watch, done, _: (
        "streams at the picker of which the client got no answer",
        min(watch.rise(_STREAMS), done),
        ZERO_WINDOWS / 2,
    ),
    "idle": lambda watch, *_: (
        "more connections at the picker, those included that it cut",
        watch.peak(_CONNECTIONS) + watch.rise(_CUT),
        IDLE_CONNECTIONS / 2,
    ),
    "continuations": _ended,
    "headers": _waited,
    "waiters": _waited,
}
