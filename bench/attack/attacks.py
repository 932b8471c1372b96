"""The attacks, each run by `python -m bench.attack.attacks NAME PICKER GATEWAY SECONDS POD...`.

An attacker is a process of its own that knows an address: the picker's, whose gRPC it speaks, or
Envoy's, whose HTTP it speaks. It goes on for so many seconds and prints one line: what it did.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping

import grpc
import grpc.aio
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from bench.attack import gateway as gw
from bench.hostile_bodies import ATTACKS as KINDS
from bench.hostile_bodies import MB

HELD_CLIENTS = 66
HELD_BYTES = 31 * 1024 * 1024
BURST = 4_000
CONNECTIONS = 4
SUBSET_ENTRIES = 400_000
MODELS = 4_000
PROMPT = b'{"model": "m", "prompt": "once upon a time"}'
ASK_S_MAX = 30.0
GONE = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)
"""How a call fails that the picker has ended."""


class Target:
    """Where to attack, and until when."""

    def __init__(self, picker: str, gateway: str, seconds: float, pods: list[int]) -> None:
        self.picker = picker
        self.gateway = gateway
        self.until_s = time.monotonic() + seconds
        self.pods = pods

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until_s


def _session() -> ClientSession:
    return ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=ASK_S_MAX))


async def _several(count: int, work: Callable[[int], Awaitable[int]]) -> int:
    """The sum of what `count` of them did."""
    return sum(await asyncio.gather(*(work(number) for number in range(count))))


async def _held(target: Target) -> str:
    """Bodies that do not end."""
    chunk = b" " * gw.CHUNK_BYTES
    pieces = HELD_BYTES // len(chunk)

    async def raw(_: int) -> int:
        async with gw.channel(target.picker) as opened:
            sent = 0
            while target.goes_on:
                call = opened.stream_stream(gw.PROCESS)(timeout=60)
                try:
                    await call.write(gw.headers())
                    for _ in range(pieces):
                        await call.write(gw.body(chunk, end=False))
                        sent += len(chunk)
                    await asyncio.wait_for(call.read(), max(0.1, target.until_s - time.monotonic()))
                except (*GONE, TimeoutError):
                    pass
                finally:
                    call.cancel()
                await asyncio.sleep(0.5)
            return sent

    async def http(_: int) -> int:
        sent = 0

        async def content() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(pieces):
                yield chunk
                sent += len(chunk)
            await asyncio.sleep(max(0.0, target.until_s - time.monotonic()))

        async with _session() as session:
            while target.goes_on:
                try:
                    url = f"{target.gateway}/v1/completions"
                    async with session.post(url, data=content()) as response:
                        await response.read()
                except (ClientError, TimeoutError, ConnectionError):
                    pass
                await asyncio.sleep(0.5)
        return sent

    sent = await _several(HELD_CLIENTS, http if target.gateway else raw)
    return f"{HELD_CLIENTS} clients, {sent / 1e6:,.0f} MB of unfinished bodies sent"


async def _bodies(target: Target) -> str:
    """One client, one body after the other, each of a kind that is dear to read."""
    # Half as many pieces as fit: most kinds are let in then, and cost the more.
    bodies = [
        (kind.path, kind.body(MB, max(1, kind.pieces_max(MB) // share)))
        for kind in KINDS
        for share in (1, 2, 8)
    ]
    sent = 0
    async with gw.channel(target.picker) as opened, _session() as session:
        for path, body in itertools.cycle(bodies):
            if not target.goes_on:
                break
            if target.gateway:
                try:
                    async with session.post(f"{target.gateway}{path}", data=body) as response:
                        await response.read()
                except (ClientError, TimeoutError):
                    pass
            else:
                await gw.ask(opened, body, timeout_s=ASK_S_MAX, path=path)
            sent += 1
    return f"{sent} bodies of 1 MB, {len(bodies)} kinds"


async def _pieces(target: Target) -> str:
    """Bodies in pieces of one byte, and of none."""

    async def drip(number: int) -> int:
        message = gw.body(b"" if number % 2 else b" ", end=False)
        sent = 0
        async with gw.channel(target.picker) as opened:
            while target.goes_on:
                call = opened.stream_stream(gw.PROCESS)(timeout=60)
                try:
                    await call.write(gw.headers())
                    while target.goes_on:
                        await call.write(message)
                        sent += 1
                except GONE:
                    pass
                finally:
                    call.cancel()
        return sent

    return f"{await _several(CONNECTIONS, drip):,} messages"


async def _page(target: Target) -> str:
    """A pod whose metrics page is none."""
    url = f"http://127.0.0.1:{target.pods[0]}/page"
    share_s = (target.until_s - time.monotonic()) / 3
    async with _session() as session:
        for kind in ("series", "adapters", "drip", "usual"):
            async with session.post(f"{url}/{kind}") as response:
                await response.read()
            if kind != "usual":
                await asyncio.sleep(share_s)
    return "90,000 series, 500,000 adapters, one byte a chunk"


async def _resets(target: Target) -> str:
    """Streams that are reset as soon as they are open."""

    async def reset(_: int) -> int:
        sent = 0
        message = gw.headers()
        async with gw.channel(target.picker) as opened:
            process = opened.stream_stream(gw.PROCESS)
            while target.goes_on:
                call = process()
                try:
                    await call.write(message)
                except GONE:
                    pass
                finally:
                    call.cancel()
                sent += 1
        return sent

    return f"{await _several(CONNECTIONS, reset):,} resets"


async def _burst(target: Target) -> str:
    """Ordinary requests, all at once; here those who ask are innocent too."""
    lost: dict[str, int] = {}
    asked = 0
    while target.goes_on:
        if target.gateway:
            async with _session() as session:
                told = await asyncio.gather(*(_post(session, target) for _ in range(BURST)))
        else:
            opened = [gw.channel(target.picker) for _ in range(CONNECTIONS)]
            told = await asyncio.gather(
                *(
                    gw.ask(opened[number % CONNECTIONS], PROMPT, timeout_s=ASK_S_MAX)
                    for number in range(BURST)
                )
            )
            for one in opened:
                await one.close()
        asked += BURST
        for problem in filter(None, told):
            lost[problem] = lost.get(problem, 0) + 1
        await asyncio.sleep(1.0)
    why = ", ".join(f"{count} {problem}" for problem, count in lost.items())
    return f"{sum(lost.values())} of {asked:,} lost{': ' if why else ''}{why}"


async def _post(session: ClientSession, target: Target) -> str:
    try:
        async with session.post(f"{target.gateway}/v1/completions", data=PROMPT) as response:
            await response.read()
            return "" if response.status == 200 else f"got {response.status}"
    except (ClientError, TimeoutError) as error:
        return type(error).__name__


async def _subset(target: Target) -> str:
    """A hint that names 400,000 addresses."""
    entries = (f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:80" for n in range(SUBSET_ENTRIES))
    message = gw.headers(subset=",".join(entries))
    sent = 0
    async with gw.channel(target.picker) as opened:
        while target.goes_on:
            call = opened.stream_stream(gw.PROCESS)(timeout=ASK_S_MAX)
            try:
                await call.write(message)
                await call.write(gw.body(PROMPT))
                await call.read()
            except GONE:
                pass
            finally:
                call.cancel()
            sent += 1
    return f"{sent} hints"


async def _models(target: Target) -> str:
    """Every request for another model, and somebody who reads the metrics."""
    names = itertools.cycle(range(MODELS))
    sent = 0

    async def ask(_: int) -> int:
        sent = 0
        async with gw.channel(target.picker) as opened, _session() as session:
            while target.goes_on:
                body = PROMPT.replace(b'"m"', b'"%s-%d"' % (b"m" * 200, next(names)))
                if target.gateway:
                    try:
                        url = f"{target.gateway}/v1/completions"
                        async with session.post(url, data=body) as response:
                            await response.read()
                    except (ClientError, TimeoutError):
                        pass
                else:
                    await gw.ask(opened, body, timeout_s=ASK_S_MAX)
                sent += 1
        return sent

    sent = await _several(8, ask)
    return f"{sent:,} requests for {MODELS:,} models"


ATTACKS: Mapping[str, Callable[[Target], Coroutine[object, object, str]]] = {
    "held": _held,
    "bodies": _bodies,
    "pieces": _pieces,
    "page": _page,
    "resets": _resets,
    "burst": _burst,
    "subset": _subset,
    "models": _models,
}
RAW_ONLY = frozenset({"pieces", "resets", "subset"})
"""What a client of Envoy cannot do to the picker: it speaks gRPC, or metadata."""


if __name__ == "__main__":
    name, picker, gateway, seconds, *pods = sys.argv[1:]
    where = Target(picker, gateway, float(seconds), [int(pod) for pod in pods])
    print(asyncio.run(ATTACKS[name](where)), flush=True)
