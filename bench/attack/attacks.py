"""The attacks: `python -m bench.attack.attacks NAME PICKER GATEWAY SECONDS POD...`.

An attacker is a process of its own that knows an address: the picker's, with which it speaks gRPC,
or Envoy's, with which it speaks HTTP. It runs for the given seconds, or for `refusals` until all
bytes are sent, at most `REFUSING_S_MAX`. It prints one line of JSON: what it did, and which of its
own innocent requests were lost, or that it had no effect.
"""

import asyncio
import contextlib
import gzip
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping

import grpc
import grpc.aio
from aiohttp import ClientError, ClientSession
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from bench.attack import gateway as gw
from bench.effect import NoEffectError, require_effect
from bench.hostile_bodies import ATTACKS as KINDS
from bench.hostile_bodies import MB
from bench.place import client_session
from bench.raw_http2 import (
    ACK,
    CANCEL,
    CONTINUATION,
    EXT_PROC,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawConnection,
    frame,
    grpc_message,
    header_block,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HELD_CLIENTS = 66
HELD_BYTES = 31 * 1024 * 1024
BURST = 4_000
CONNECTIONS = 4
SUBSET_ENTRIES = 400_000
MODELS = 4_000
REFUSED_BYTES = 2 * 2**30
"""Total number of bytes of refused bodies that the attack `refusals` sends: as many as the
flow-control window of a connection can hold.
"""
REFUSED_BODY_BYTES = 2**20
REFUSED_AT_ONCE = 16
REFUSING_S_MAX = 300.0
IDLE_CONNECTIONS = 1_024
ZERO_WINDOWS = 4_000
"""Number of streams that the attack `windows` opens, each with a flow-control window that never
opens.
"""
CONTINUATIONS = 10_000
FRAMES = 60_000
WATCH = header_block(
    method="POST",
    scheme="http",
    path="/grpc.health.v1.Health/Watch",
    authority="picker",
    te="trailers",
    content_type="application/grpc",
)
CROWD = 400
"""Number of clients of the attack `headers` on the queue, each with one request at a time."""
LONG_CROWD = 300
HELD_MAX = "64Mi"
"""Maximum total size of the bodies that the picker stores while its queue is attacked with long
bodies. The bodies of all clients at once are twice as large.
"""
LONG_BYTES = 450_000
ANSWER_S = 0.1
HOSTILE_TTLS = ("1ns", "9999999h", "-1s", "1e400s", "nonsense", "0s", "9" * 400 + "h")
HOSTILE_TARGETS = ("0", "1e308", "-1", "nan", "inf", "one", "9" * 400)
PROMPT = b'{"model": "m", "prompt": "once upon a time"}'
ASK_S_MAX = 30.0
GONE = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)
"""Exceptions of a gRPC call that the picker has ended."""


class Target:
    """The addresses that an attacker attacks, the time at which it stops, and its results."""

    def __init__(self, picker: str, gateway: str, seconds: float, pods: list[int]) -> None:
        self.picker = picker
        self.gateway = gateway
        self.until_s = time.monotonic() + seconds
        self.pods = pods
        self.done = 0
        """Extent of the attack as a number, for example of requests sent; 0 if it did nothing."""
        self.lost: list[str] = []
        """Sentences about the attacker's innocent requests that were lost."""

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until_s


async def _several(count: int, work: Callable[[int], Awaitable[int]]) -> int:
    """Run `work(number)` for `count` numbers concurrently, and return the sum of the results."""
    return sum(await asyncio.gather(*(work(number) for number in range(count))))


async def _held(target: Target) -> str:
    """Attack with request bodies that do not end; return a phrase about the extent."""
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

        async with client_session(ASK_S_MAX) as session:
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
    target.done = sent
    return f"{HELD_CLIENTS} clients, {sent / 1e6:,.0f} MB of unfinished bodies sent"


async def _bodies(target: Target) -> str:
    """Attack with one body after the other from one client, each of a kind that is expensive to
    read; return a phrase about the extent.
    """
    # Half as many pieces as fit, because most kinds are then accepted and cost more.
    bodies = [
        (kind.path, kind.body(MB, max(1, kind.pieces_max(MB) // share)))
        for kind in KINDS
        for share in (1, 2, 8)
    ]
    sent = 0
    async with gw.channel(target.picker) as opened, client_session(ASK_S_MAX) as session:
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
    target.done = sent
    return f"{sent} bodies of 1 MB, {len(bodies)} kinds"


async def _encoded(target: Target) -> str:
    """Attack with compressed bodies: bombs of gzip and zstd, a truncated one, and one of many small
    frames.

    Return a phrase about the extent. Raises `NoEffectError` if a kind is never answered as
    expected.
    """
    zeros = bytes(REFUSED_BYTES // 20)
    hostile = {
        "gzip bomb": ("gzip", gzip.compress(zeros), 413),
        "zstd bomb": ("zstd", zstd.compress(zeros), 413),
        "truncated": ("zstd", zstd.compress(bytes(MB))[:-1], 200),
        "frames": ("zstd", zstd.compress(b"") * FRAMES, 200),
    }
    counted: Counter[str] = Counter()

    async def raw(opened: grpc.aio.Channel, encoding: str, content: bytes) -> int:
        call = opened.stream_stream(gw.PROCESS)(timeout=ASK_S_MAX)
        await call.write(gw.headers({"content-encoding": encoding}))
        for start in range(0, len(content), gw.CHUNK_BYTES):
            end = start + gw.CHUNK_BYTES
            await call.write(gw.body(content[start:end], end=end >= len(content)))
        answer = ProcessingResponse.FromString(await call.read())
        call.cancel()
        refused = answer.HasField("immediate_response")
        return int(answer.immediate_response.status.code) if refused else 200

    async def http(session: ClientSession, encoding: str, content: bytes) -> int:
        headers = {"content-encoding": encoding}
        url = f"{target.gateway}/v1/completions"
        async with session.post(url, data=content, headers=headers) as response:
            await response.read()
            return response.status

    async def client(_: int) -> int:
        sent = 0
        async with gw.channel(target.picker) as opened, client_session(ASK_S_MAX) as session:
            for name, (encoding, content, expected) in itertools.cycle(hostile.items()):
                if not target.goes_on:
                    break
                try:
                    asked = http(session, encoding, content) if target.gateway else None
                    status = await (asked or raw(opened, encoding, content))
                except (ClientError, TimeoutError, *GONE):
                    status = 0
                counted[name] += status == expected
                sent += 1
        return sent

    sent = await _several(CONNECTIONS, client)
    for name, (_, content, expected) in hostile.items():
        require_effect(
            counted[name] > 0,
            f"encoded bodies, {name}",
            observed=f"{counted[name]} of {sent} requests answered with {expected}",
            expected="at least 1",
        )
        assert len(content) < MB, "a hostile body is small"
    each = ", ".join(f"{count} {name}" for name, count in counted.items())
    target.done = sent
    return f"{sent} small bodies that decode to 107 MB, or to nothing: {each}"


async def _pieces(target: Target) -> str:
    """Attack with bodies in pieces of one byte or none; return a phrase about the extent."""

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

    target.done = await _several(CONNECTIONS, drip)
    return f"{target.done:,} messages"


async def _page(target: Target) -> str:
    """Attack with hostile metrics pages of a pod, one after the other, and restore the usual page;
    return a phrase about them.
    """
    url = f"http://127.0.0.1:{target.pods[0]}/page"
    share_s = (target.until_s - time.monotonic()) / 3
    async with client_session(ASK_S_MAX) as session:
        for kind in ("series", "adapters", "drip", "usual"):
            async with session.post(f"{url}/{kind}") as response:
                await response.read()
            if kind != "usual":
                await asyncio.sleep(share_s)
    target.done = 1
    return "90,000 series, 500,000 adapters, one byte a chunk"


async def _resets(target: Target) -> str:
    """Attack by resetting streams as soon as they are open; return a phrase about the extent."""

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

    target.done = await _several(CONNECTIONS, reset)
    return f"{target.done:,} resets"


async def _burst(target: Target) -> str:
    """Attack with `BURST` ordinary requests at once, again and again; return a phrase about those
    that were lost.

    All of these clients are innocent, so their lost requests are in `target.lost`.
    """
    asked = 0
    while target.goes_on:
        if target.gateway:
            async with client_session(ASK_S_MAX) as session:
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
        target.lost += filter(None, told)
        await asyncio.sleep(1.0)
    target.done = asked
    why = ", ".join(f"{count} {problem}" for problem, count in Counter(target.lost).items())
    return f"{len(target.lost)} of {asked:,} lost{': ' if why else ''}{why}"


async def _post(session: ClientSession, target: Target) -> str:
    try:
        async with session.post(f"{target.gateway}/v1/completions", data=PROMPT) as response:
            await response.read()
            return "" if response.status == 200 else f"got {response.status}"
    except (ClientError, TimeoutError) as error:
        return type(error).__name__


async def _subset(target: Target) -> str:
    """Attack with requests whose subset hint names 400,000 addresses; return a phrase about the
    extent.
    """
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
    target.done = sent
    return f"{sent} hints"


async def _headers(target: Target) -> str:
    """Attack the queue with headers that clients invent: a new tenant in each request, waits of any
    length, targets of any time and unknown objectives.

    Return a phrase about the extent.
    """
    numbers = itertools.count()

    def fields() -> dict[str, str]:
        number = next(numbers)
        return {
            "x-llm-d-inference-fairness-id": f"{number:x}" * 300,
            "x-llm-d-inference-objective": f"objective-{number}",
            "x-llm-d-inference-ttl": HOSTILE_TTLS[number % len(HOSTILE_TTLS)],
            "x-llm-d-slo-ttft-ms": HOSTILE_TARGETS[number % len(HOSTILE_TARGETS)],
        }

    target.done = await _crowd(target, CROWD, lambda _: PROMPT, fields)
    return f"{target.done:,} requests of as many tenants, {CROWD} at once"


async def _waiters(target: Target) -> str:
    """Attack the queue with more bodies of 450 KB than the picker may hold; return a phrase about the
    extent.
    """

    def body(number: int) -> bytes:
        return b'{"model": "m", "prompt": "%0*d"}' % (LONG_BYTES, number)

    target.done = await _crowd(target, LONG_CROWD, body, dict)
    return f"{target.done:,} bodies of 450 KB, {LONG_CROWD} at once"


async def _crowd(
    target: Target,
    clients: int,
    body: Callable[[int], bytes],
    fields: Callable[[], dict[str, str]],
) -> int:
    """Send requests of `clients` clients, each of which sends the next one when it has an answer.

    An answer takes `ANSWER_S` seconds. Return the number of requests.
    """
    opened = [gw.channel(target.picker) for _ in range(CONNECTIONS)]

    async def ask(number: int) -> int:
        sent = 0
        content = body(number)
        async with client_session(ASK_S_MAX) as session:
            while target.goes_on:
                if target.gateway:
                    await _post_slow(session, target, content, fields())
                else:
                    channel = opened[number % CONNECTIONS]
                    await gw.ask(
                        channel, content, timeout_s=ASK_S_MAX, fields=fields(), takes_s=ANSWER_S
                    )
                sent += 1
        return sent

    sent = await _several(clients, ask)
    for one in opened:
        await one.close()
    return sent


async def _post_slow(
    session: ClientSession, target: Target, content: bytes, fields: dict[str, str]
) -> None:
    url = f"{target.gateway}/v1/completions"
    headers = fields | {"x-takes-s": str(ANSWER_S)}
    try:
        async with session.post(url, data=content, headers=headers) as response:
            await response.read()
    except (ClientError, TimeoutError):
        pass


async def _models(target: Target) -> str:
    """Attack with another model name in every request, `MODELS` names in turn; return a phrase
    about the extent.
    """
    names = itertools.cycle(range(MODELS))
    sent = 0

    async def ask(_: int) -> int:
        sent = 0
        async with gw.channel(target.picker) as opened, client_session(ASK_S_MAX) as session:
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
    target.done = sent
    return f"{sent:,} requests for {MODELS:,} models"


async def _refusals(target: Target) -> str:
    """Attack with two gigabytes of bodies that are refused on arrival; return a phrase about the
    extent. Without Envoy, one connection to the picker is used at a time.

    The attack counts as a loss if fewer bytes are refused, at the latest after `REFUSING_S_MAX`.
    """
    if target.gateway:
        refused, connections = await _refused_http(target), 1
    else:
        refused, connections = await _refused_raw(target)
    target.done = refused // REFUSED_BODY_BYTES
    if refused < REFUSED_BYTES:
        target.lost.append(f"no more than {refused / 2**20:,.0f} MB went through")
    return f"{refused / 2**20:,.0f} MB of refused bodies, connections: {connections}"


async def _refused_raw(target: Target) -> tuple[int, int]:
    """Send bodies that the picker refuses, over HTTP/2 directly, until `REFUSED_BYTES` are sent,
    `REFUSING_S_MAX` is over or an innocent request is lost.

    Return the number of refused bytes and of used connections.
    """
    until_s = time.monotonic() + REFUSING_S_MAX
    sent = connections = 0
    while sent < REFUSED_BYTES and time.monotonic() < until_s and not target.lost:
        connection = await RawConnection.open(int(target.picker.rpartition(":")[2]))
        connections += 1
        # Settings arrive before any answer.
        (first,) = connection.open_streams(1, (gw.headers(), gw.body(PROMPT)))
        await connection.all_ended([first], ASK_S_MAX)
        refused = grpc_message(b"\xff")
        refused += bytes(min(connection.stream_window_bytes, REFUSED_BODY_BYTES) - len(refused))
        try:
            # A gateway reconnects when it is asked to leave, as grpcio does by age.
            while sent < REFUSED_BYTES and time.monotonic() < until_s and not connection.goaways:
                async with asyncio.timeout(ASK_S_MAX):
                    await _refuse(target, connection, refused)
                sent += len(refused) * REFUSED_AT_ONCE
        except (TimeoutError, ConnectionError) as error:
            if not connection.goaways:
                target.lost.append(f"stuck or cut behind refusals: {type(error).__name__}")
        await connection.close()
    return sent, connections


async def _refuse(target: Target, connection: RawConnection, refused: bytes) -> None:
    """Send a batch of streams that the picker refuses, and one innocent stream after them on the
    same connection. Record the innocent one if it is lost, unless the picker has sent a GOAWAY.
    """
    streams = connection.open_streams(REFUSED_AT_ONCE)
    for stream in streams:
        connection.pour(stream, refused, end=True)
    await connection.flushed()
    while connection.stuck and not connection.closed:
        await connection.changed()
    innocent = connection.open_streams(1, (gw.headers(), gw.body(PROMPT)))
    await connection.all_ended([*streams, *innocent], ASK_S_MAX)
    if not connection.goaways:
        target.lost += ["lost beside refusals"] * connection.lost(innocent)
    connection.answered.clear()
    connection.ended.clear()


async def _refused_http(target: Target) -> int:
    """Send bodies above `REFUSED_BODY_BYTES` through Envoy, which the picker refuses, and return
    the refused bytes: `REFUSED_BODY_BYTES` for each answer 413.
    """
    until_s = time.monotonic() + REFUSING_S_MAX
    body = bytes(3 * REFUSED_BODY_BYTES)
    refused = 0

    async def post(_: int) -> int:
        nonlocal refused
        async with client_session(ASK_S_MAX) as session:
            while refused < REFUSED_BYTES and time.monotonic() < until_s:
                try:
                    url = f"{target.gateway}/v1/completions"
                    async with session.post(url, data=body) as response:
                        await response.read()
                        refused += REFUSED_BODY_BYTES if response.status == 413 else 0
                except (ClientError, TimeoutError, ConnectionError):
                    # Envoy closes a connection on which a body still comes; what became of the
                    # request is not told then.
                    pass
        return 0

    await _several(CONNECTIONS, post)
    return refused


async def _tiny(target: Target) -> str:
    """Attack with thousands of messages in each frame, on streams that watch the picker's health
    without end; return a phrase about the extent.
    """
    payload = grpc_message(b"") * (1_000_000 // len(grpc_message(b"")))
    port = int(target.picker.rpartition(":")[2])

    async def on_one_connection() -> int:
        sent = 0
        connection = await RawConnection.open(port, WATCH)
        while target.goes_on and not connection.closed:
            (stream,) = connection.open_streams(1)
            # As much as its first window; a watch does not end by itself.
            part = payload[: connection.stream_window_bytes // 5 * 5]
            connection.pour(stream, part)
            try:
                await connection.flushed()
                while connection.stuck and not connection.closed:
                    await connection.changed()
                connection.write(frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big")))
            except ConnectionError:
                break
            sent += len(part) // 5
        await connection.close()
        return sent

    async def watch(_: int) -> int:
        sent = 0
        # The transport grpcio closes such a connection soon; an attacker comes again.
        while target.goes_on:
            sent += await on_one_connection()
        return sent

    target.done = await _several(CONNECTIONS, watch)
    return f"{target.done:,} messages of no bytes"


async def _windows(target: Target) -> str:
    """Attack with streams whose windows never open, and with PINGs and updates of the connection's
    window; return a phrase about the extent.
    """
    connection = await RawConnection.open(
        int(target.picker.rpartition(":")[2]), stream_window_bytes=0
    )
    for stream in connection.open_streams(ZERO_WINDOWS):
        connection.send_open(stream, (gw.headers(), gw.body(PROMPT)))
    frames = frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4, "big")) + frame(PING, 0, 0, bytes(8))
    sent = 0
    ends_s = asyncio.get_running_loop().time() + target.until_s - time.monotonic()
    while target.goes_on and not connection.closed:
        connection.write(frames * 100)
        sent += 200
        # The transport grpcio reads no more of such a connection, so the frames may never leave.
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout_at(ends_s):
                await connection.flushed()
        await asyncio.sleep(0)
    unanswered = ZERO_WINDOWS - len(connection.answered)
    await connection.close()
    target.done = unanswered
    return f"{unanswered:,} streams that got no answer, {sent:,} frames"


async def _idle(target: Target) -> str:
    """Attack with as many idle connections from one address as the picker allows from all addresses
    together, while new gateways connect from there.

    Return a phrase about the extent.
    """
    port = int(target.picker.rpartition(":")[2])
    held = [await RawConnection.open(port) for _ in range(IDLE_CONNECTIONS)]
    asked = 0
    while target.goes_on:
        async with gw.channel(target.picker) as opened:
            problem = await gw.ask(opened, PROMPT, timeout_s=ASK_S_MAX)
        asked += 1
        if problem:
            target.lost.append(f"new gateway: {problem}")
        await asyncio.sleep(0.05)
    left = sum(not connection.closed for connection in held)
    for connection in held:
        await connection.close()
    target.done = IDLE_CONNECTIONS
    return f"{IDLE_CONNECTIONS:,} idle connections, {left} left of them; {asked} new gateways"


async def _continuations(target: Target) -> str:
    """Attack with request headers that do not end; return a phrase about the extent."""
    port = int(target.picker.rpartition(":")[2])
    flood = frame(HEADERS, 0, 1, EXT_PROC) + frame(CONTINUATION, 0, 1) * CONTINUATIONS
    sent = 0
    while target.goes_on:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0) + flood)
            await writer.drain()
            while await reader.read(65_536):
                pass
        except ConnectionError:
            pass
        finally:
            writer.close()
        sent += 1
    target.done = sent
    return f"{sent:,} connections with {CONTINUATIONS:,} continuations each"


ATTACKS: Mapping[str, Callable[[Target], Coroutine[object, object, str]]] = {
    "held": _held,
    "bodies": _bodies,
    "encoded": _encoded,
    "pieces": _pieces,
    "page": _page,
    "resets": _resets,
    "burst": _burst,
    "subset": _subset,
    "models": _models,
    "refusals": _refusals,
    "tiny": _tiny,
    "windows": _windows,
    "idle": _idle,
    "continuations": _continuations,
    "headers": _headers,
    "waiters": _waiters,
}
INVENTED_TENANTS = frozenset({"headers"})
"""Names of attacks in which clients choose the tenants of their requests."""
QUEUE_ONLY = frozenset({"headers", "waiters"})
"""Names of attacks on the queue, which are run only if it is on."""
FLAGS: Mapping[str, tuple[str, ...]] = {
    "refusals": (f"--request-body-max-bytes={REFUSED_BODY_BYTES}",),
    "waiters": (f"--held-bodies-max-bytes={HELD_MAX}",),
}
"""Flags of `epp serve` during an attack, by attack: limits so small that the attack soon exceeds
them.
"""
RAW_ONLY = frozenset({"pieces", "resets", "subset", "tiny", "windows", "idle", "continuations"})
"""Names of attacks that a client of Envoy cannot make, because they need a connection to the picker
itself.
"""


if __name__ == "__main__":
    name, picker, gateway, seconds, *pods = sys.argv[1:]
    where = Target(picker, gateway, float(seconds), [int(pod) for pod in pods])
    try:
        did = asyncio.run(ATTACKS[name](where))
    except NoEffectError as problem:
        print(json.dumps({"without_effect": str(problem)}), flush=True)
    else:
        print(json.dumps({"did": did, "done": where.done, "lost": where.lost}), flush=True)
