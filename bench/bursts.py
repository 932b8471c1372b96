"""Behaviour of the picker under overload: many streams at once, and rapid resets beside a few
innocent requests.

`python -m bench.bursts` prints the table. The server is a process with the picker's options on the
loopback interface. A burst opens its streams at once on `CONNECTIONS` connections and waits for
every answer, `BURST_WAIT_MAX_S` at most; a stream without one is lost. During the resets, a
connection of its own sends `PROBES_PER_S` requests a second, as it does before them. Its delays are
compared within one run, so other work of the machine matters little.
"""

import asyncio
import contextlib
import time

from bench.decision import Chats
from bench.gateway_messages import body_messages, headers_message
from bench.loopback import served
from bench.raw_http2 import RawConnection

CONNECTIONS = 4
BURSTS = (2_000, 4_000)
BURST_WAIT_MAX_S = 60.0
RESETS_PER_S = (5_000, 8_000)
RESETS_S = 4.0
PROBES_PER_S = 20
PROBE_WAIT_MAX_S = 30.0
_TICK_S = 0.005


def request() -> tuple[bytes, ...]:
    """Return the gateway's messages of the request phase of a small chat in full duplex."""
    return headers_message(), body_messages(Chats(400, 5).body())[0]


async def burst(port: int, streams: int, messages: tuple[bytes, ...]) -> int:
    """Open `streams` streams with `messages` at once at the picker, and return how many have no
    answer or have not ended after `BURST_WAIT_MAX_S`.
    """
    connections = [await RawConnection.open(port) for _ in range(CONNECTIONS)]
    try:
        opened = [c.open_streams(streams // CONNECTIONS, messages) for c in connections]
        pairs = list(zip(connections, opened, strict=True))
        with contextlib.suppress(TimeoutError):
            await asyncio.gather(*(c.all_ended(each, BURST_WAIT_MAX_S) for c, each in pairs))
        return sum(c.lost(each) for c, each in pairs)
    finally:
        for connection in connections:
            await connection.close()


class Probe:
    """A gateway that sends requests at a fixed rate beside an attack.

    `delays_s` are the delays of the answers it received, `lost` is the number of requests without
    an answer.
    """

    def __init__(self, port: int, messages: tuple[bytes, ...]) -> None:
        self._port = port
        self._messages = messages
        self.delays_s: list[float] = []
        self.lost = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Send `PROBES_PER_S` requests a second until `stop` is set, then wait for the answers to
        the open ones.
        """
        connection = await RawConnection.open(self._port)
        asking = set()
        while not stop.is_set():
            asking.add(asyncio.create_task(self._ask(connection)))
            await asyncio.sleep(1 / PROBES_PER_S)
        await asyncio.gather(*asking)
        await connection.close()

    async def _ask(self, connection: RawConnection) -> None:
        started_s = time.monotonic()
        streams = connection.open_streams(1, self._messages)
        with contextlib.suppress(TimeoutError):
            await connection.all_ended(streams, PROBE_WAIT_MAX_S)
        if connection.lost(streams):
            self.lost += 1
        else:
            self.delays_s.append(time.monotonic() - started_s)

    def quantile_s(self, share: float) -> float:
        """Return the delay in seconds that a share `share` of the answers did not exceed."""
        delays_s = sorted(self.delays_s)
        return delays_s[min(len(delays_s) - 1, int(share * len(delays_s)))]


async def probed(port: int, messages: tuple[bytes, ...], duration_s: float) -> Probe:
    """Return a probe that has sent requests to the picker at `port` for `duration_s` seconds, with
    the results of its requests.
    """
    probe, stop = Probe(port, messages), asyncio.Event()
    asyncio.get_running_loop().call_later(duration_s, stop.set)
    await probe.run(stop)
    return probe


async def rapid_resets(port: int, per_s: int, duration_s: float) -> int:
    """Open and reset `per_s` streams a second on `CONNECTIONS` connections for `duration_s`;
    replace closed connections.

    Return the number of connections that the picker closed.
    """
    connections = [await RawConnection.open(port) for _ in range(CONNECTIONS)]
    sent = cuts = 0
    started_s = time.monotonic()
    while (elapsed_s := time.monotonic() - started_s) < duration_s:
        each = (int(per_s * elapsed_s) - sent) // CONNECTIONS
        sent += each * CONNECTIONS
        for number, connection in enumerate(connections):
            if connection.closed:
                cuts += 1
                await connection.close()
                connections[number] = await RawConnection.open(port)
            with contextlib.suppress(OSError):
                connections[number].open_and_reset(each)
        await asyncio.sleep(_TICK_S)
    for connection in connections:
        await connection.close()
    return cuts


async def _measure(port: int) -> list[tuple[str, str]]:
    messages = request()
    rows = []
    for streams in BURSTS:
        lost = await burst(port, streams, messages)
        what = f"burst of {streams:,} streams on {CONNECTIONS} connections: lost"
        rows.append((what, f"{lost:,}"))
    for per_s in RESETS_PER_S:
        before = await probed(port, messages, RESETS_S / 2)
        _, during = await asyncio.gather(
            rapid_resets(port, per_s, RESETS_S), probed(port, messages, RESETS_S)
        )
        ratio = during.quantile_s(0.99) / before.quantile_s(0.99)
        what = f"rapid reset, {per_s:,} streams/s on {CONNECTIONS} connections: "
        asked = len(during.delays_s) + during.lost
        rows.append((what + "innocents lost", f"{during.lost} of {asked}"))
        rows.append((what + "p99 of innocents during : before", f"{ratio:.1f}"))
    return rows


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) about lost streams and delays under overload."""
    with served() as server:
        return asyncio.run(_measure(server.recv()))


if __name__ == "__main__":
    for what, figure in run():
        print(f"{what:85} {figure:>10}")
