"""Transport frames between replicas through Valkey or Redis: pub/sub and a key with a snapshot.

The data of one beat is usually one PUBLISH:

    origin, 8 bytes | frames, each: length u32 | bytes

Nothing is acknowledged. While the server is unavailable, each replica drops its frames and works
alone. After reconnecting the replica reads the snapshot again. The active replica with the least
origin writes the snapshot.
"""

import asyncio
import contextlib
import struct
import time
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from random import Random
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from msgspec import Struct

from epp.core.peers.exchange import PeerExchange
from epp.core.peers.frames import FRAME_BYTES_MAX, ORIGIN_BYTES
from epp.core.types import Seconds
from epp.flags.values import PEER_URL, is_peer_url
from epp.shell.peers import snapshots
from epp.shell.peers.carrier import Kind, Message, Source
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.secret import read_secret
from epp.shell.peers.state import PeerRow, Traffic
from epp.shell.starting import StartError

WAITING_FRAMES_MAX: Final = 1_024
"""Maximum number of frames queued per direction between this replica and the broker: some seconds
of traffic.
"""
WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
PAYLOAD_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
ORIGINS_MAX: Final = 1_024
SILENCE_S: Final[Seconds] = 4.0
"""Time in seconds after which a replica without messages no longer counts as active."""
SNAPSHOT_EVERY_S: Final[Seconds] = 30.0
SNAPSHOT_TTL_S: Final = 600
RECONNECT_S: Final = 0.5, 5.0
"""Bounds of the random delay in seconds before the picker reconnects to the broker."""
ANSWER_S_MAX: Final[Seconds] = 5.0
CONNECT_S_MAX: Final[Seconds] = 2.0
OPEN_S_MAX: Final[Seconds] = 10.0
"""Time limit in seconds to connect to the broker and read the snapshot from it."""
CLOSE_S_MAX: Final[Seconds] = 1.0
HELLO_S: Final[Seconds] = 1.0
"""Maximum time in seconds between two messages that the picker publishes; without frames it
publishes an empty message.
"""

_LENGTH: Final = struct.Struct("<I")
_SCHEMES: Final = {"redis": "valkey", "rediss": "valkeys"}

_log = structlog.get_logger(__name__)


def broker_url(url: str, url_file: str) -> str:
    """Return the URL of the broker from the flag or from the file, or "" if neither is given.
    Raises `StartError`.
    """
    if not url_file:
        return url
    text = read_secret(url_file, "--peer-url-file").decode("utf-8", "replace")
    if not is_peer_url(text):
        raise StartError(f"--peer-url-file {url_file}: expected {PEER_URL}")
    return text


class Waiting:
    """A bounded queue of frames to or from the broker that drops the oldest frame when it is
    full.
    """

    def __init__(self) -> None:
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def append(self, origin: bytes, frame: bytes) -> int:
        """Add a frame to the queue. Return the number of older frames dropped for it."""
        self._frames.append((origin, frame))
        self._bytes += len(frame)
        dropped = 0
        while len(self._frames) > WAITING_FRAMES_MAX or self._bytes > WAITING_BYTES_MAX:
            self.popleft()
            dropped += 1
        return dropped

    def popleft(self) -> tuple[bytes, bytes]:
        origin, frame = self._frames.popleft()
        self._bytes -= len(frame)
        return origin, frame

    @property
    def first_bytes(self) -> int:
        """Length in bytes of the first frame in this queue."""
        return len(self._frames[0][1])

    def clear(self) -> int:
        """Empty the queue and return the number of frames that were in it."""
        dropped = len(self._frames)
        self._frames.clear()
        self._bytes = 0
        return dropped


class Replica(Struct):
    """Another replica that sends messages through the broker; it is the `Message.source` of its
    messages.
    """

    origin: bytes
    since_s: Seconds
    heard_at_s: Seconds
    bytes_received: int = 0


class Broker:
    """A carrier of frames through a broker (Valkey or Redis). Run `run` as a task and call
    `first_snapshot` at start.
    """

    def __init__(
        self,
        url: str,
        pool: str,
        exchange: PeerExchange,
        traffic: Traffic,
        complaints: Complaints,
        *,
        random: Random,
        snapshot_every_s: Seconds = SNAPSHOT_EVERY_S,
        reconnect_s: tuple[Seconds, Seconds] = RECONNECT_S,
    ) -> None:
        """Create the carrier that transports frames through the broker at `url`. Replicas with the
        same `pool` share state. Raises `StartError` if the client library is not installed.
        """
        try:
            self._library: Any = import_module("valkey.asyncio")
            self._retry: Any = import_module("valkey.asyncio.retry").Retry
            self._no_backoff: Any = import_module("valkey.backoff").NoBackoff
            self._errors: Any = import_module("valkey.exceptions").ValkeyError
        except ImportError as error:
            raise StartError(
                "--peer-url needs the extra `valkey`: pip install homing-epp[valkey]"
            ) from error
        scheme, _, rest = url.partition("://")
        self._url = f"{_SCHEMES.get(scheme, scheme)}://{rest}"
        self._where = urlsplit(url).hostname or ""
        self._channel = f"homing:{pool}:v1"
        self._key = f"homing:{pool}:snapshot"
        self._exchange = exchange
        self._traffic = traffic
        self._complaints = complaints
        self._random = random
        self._snapshot_every_s = snapshot_every_s
        self._reconnect_s = reconnect_s
        self._outgoing = Waiting()
        self._due = asyncio.Event()
        self._incoming = Waiting()
        self._replicas: dict[bytes, Replica] = {}
        self.connected = False
        self._tried = asyncio.Event()
        """Set once the first attempt to connect and to read the snapshot has ended, whether it
        succeeded or failed.
        """
        self._read_first = False
        self.outcomes = {"loaded": 0, "ignored": 0, "saved": 0, "failed": 0}
        """Number of the broker's snapshots that this picker handled, by outcome. "failed" means that
        a snapshot could not be created or written.
        """

    # The pump calls these methods.

    def send(self, frame: bytes) -> None:
        if len(frame) > FRAME_BYTES_MAX or not self.connected:
            self._traffic.dropped()
            return
        for _ in range(self._outgoing.append(self._exchange.origin, frame)):
            self._traffic.dropped()
        self._due.set()

    def receive(
        self, messages_max: int, paused: Source | None = None
    ) -> tuple[list[Message], bool]:
        found: list[Message] = []
        while self._incoming and len(found) < messages_max:
            origin, frame = self._incoming.popleft()
            replica = self._replicas.get(origin)
            if replica is not None:
                found.append(Message(replica, Kind.FRAME, frame))
        return found, bool(self._incoming)

    def beat(self, now: Seconds) -> None:
        for origin, replica in list(self._replicas.items()):
            if now - replica.heard_at_s > SILENCE_S:
                del self._replicas[origin]

    def greeted(self, message: Message, now: Seconds) -> None:
        raise AssertionError("a broker delivers no hello messages")

    @property
    def known(self) -> int:
        return len(self._replicas)

    @property
    def answering(self) -> int:
        return len(self._replicas)

    def rows(self, now: Seconds) -> list[PeerRow]:
        return [
            PeerRow(
                address=f"through {self._where}",
                origin=replica.origin.hex()[:8],
                connected_s=now - replica.since_s,
                heard_s=now - replica.heard_at_s,
                bytes_received=replica.bytes_received,
            )
            for replica in self._replicas.values()
        ]

    # Tasks run these methods.

    async def first_snapshot(self) -> bool:
        """Wait for the first attempt to read the broker's snapshot. Return True if it was read."""
        await self._tried.wait()
        return self._read_first

    async def run(self) -> None:
        """Keep a connection to the broker until cancelled; reconnect after every failure, which
        drops the queued frames.
        """
        while True:
            try:
                await self._connection()
            except (self._errors, OSError, TimeoutError) as error:
                self._away(type(error).__name__)
            except Exception:  # noqa: BLE001  The boundary of a task: it is retried.
                self._complaints.say(
                    "sharing state through a broker failed", time.monotonic(), exc_info=True
                )
                self._away("internal")
            finally:
                self._tried.set()
            await asyncio.sleep(self._random.uniform(*self._reconnect_s))

    def _away(self, problem: str) -> None:
        self._traffic.failed("broker")
        for _ in range(self._outgoing.clear()):
            self._traffic.dropped()
        self._replicas.clear()
        if self.connected or not self._tried.is_set():
            # The error's own text is not logged, because it may contain the URL.
            _log.warning(
                "broker unavailable, the picker decides without its peers",
                host=self._where,
                problem=problem,
            )
        self.connected = False

    async def _connection(self) -> None:
        """Connect to the broker and use the connection until it fails. Raises the error of the
        failure.
        """
        client = self._library.Valkey.from_url(
            self._url,
            socket_connect_timeout=CONNECT_S_MAX,
            socket_timeout=ANSWER_S_MAX,
            # This class retries by itself, without limit.
            retry=self._retry(self._no_backoff(), 0),
        )
        subscription = client.pubsub(ignore_subscribe_messages=True)
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                await subscription.subscribe(self._channel)
                # Subscribing before reading the snapshot ensures that no message between them is
                # missed.
                content = await self._fetch(client)
            self.connected = True
            _log.info("connected to the broker between replicas", host=self._where)
            await self._alive(client, subscription, content)
        finally:
            with contextlib.suppress(self._errors, OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S_MAX):
                    await subscription.aclose()
                    await client.aclose()

    async def _alive(self, client: Any, subscription: Any, content: bytes | None) -> None:
        """Run the tasks of one connection to the broker until the first of them fails."""
        # A task group is not used because before Python 3.13 it may lose a cancellation.
        tasks = [
            asyncio.create_task(self._listen(subscription), name="listen"),
            asyncio.create_task(self._publish(client), name="publish"),
            asyncio.create_task(self._keep_snapshot(client), name="keep snapshot"),
        ]
        try:
            self._read_first = await self._load(content)
            self._tried.set()
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            left, _ = await asyncio.wait(tasks, timeout=CLOSE_S_MAX)
            for task in left:
                if not task.cancelled():
                    # Retrieving the exception avoids a warning about it.
                    task.exception()

    async def _listen(self, subscription: Any) -> None:
        heard_at_s = time.monotonic()
        while True:
            message = await subscription.get_message(timeout=HELLO_S)
            _heed_cancellation()
            now = time.monotonic()
            if message is not None and message["type"] == "message":
                heard_at_s = now
                self._take(message["data"], now)
            elif now - heard_at_s > ANSWER_S_MAX:
                # Even the picker's own messages did not come back.
                raise TimeoutError

    def _take(self, payload: bytes, now: Seconds) -> None:
        """Queue the frames of a payload from the broker's channel, and note that their sender is
        active. The payload may come from any client with access to the channel.
        """
        if not ORIGIN_BYTES <= len(payload) <= PAYLOAD_BYTES_MAX:
            self._traffic.unreadable()
            return
        origin = payload[:ORIGIN_BYTES]
        if origin == self._exchange.origin:
            return
        replica = self._replicas.get(origin)
        if replica is None:
            if len(self._replicas) >= ORIGINS_MAX:
                self._traffic.unreadable()
                return
            replica = self._replicas[origin] = Replica(origin, now, now)
        replica.heard_at_s = now
        replica.bytes_received += len(payload)
        for frame in _frames(payload):
            if frame is None:
                self._traffic.unreadable()
                return
            self._traffic.received(len(frame))
            self._traffic.frames["received", "dropped"] += self._incoming.append(origin, frame)

    async def _publish(self, client: Any) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), HELLO_S)
            _heed_cancellation()
            self._due.clear()
            if not self._outgoing:
                # An empty message shows that the picker is active, and it also comes back to the
                # picker.
                await client.publish(self._channel, self._exchange.origin)
            while self._outgoing:
                payload, frames = self._payload()
                await client.publish(self._channel, payload)
                self._traffic.bytes_sent += len(payload)
                self._traffic.frames["sent", "sent"] += frames

    def _payload(self) -> tuple[bytes, int]:
        """Return the payload of a message with as many queued frames as fit, and the number of
        these frames.
        """
        parts = [self._exchange.origin]
        left = PAYLOAD_BYTES_MAX - ORIGIN_BYTES
        while self._outgoing:
            length = self._outgoing.first_bytes
            left -= _LENGTH.size + length
            if left < 0:
                break
            _, frame = self._outgoing.popleft()
            parts += (_LENGTH.pack(length), frame)
        return b"".join(parts), len(parts) // 2

    # The methods below handle the snapshot.

    async def _fetch(self, client: Any) -> bytes | None:
        """Return the snapshot stored in the broker, or None if it is missing or too large."""
        length = await client.strlen(self._key)
        if not length:
            return None
        if length > snapshots.SNAPSHOT_BYTES_MAX:
            self._ignore(f"the snapshot is larger than {snapshots.SNAPSHOT_BYTES_MAX} bytes")
            return None
        content: bytes | None = await client.get(self._key)
        return content

    async def _load(self, content: bytes | None) -> bool:
        if content is None:
            return False
        try:
            await snapshots.load(self._exchange, content, time.time())
        except snapshots.SnapshotError as error:
            self._ignore(str(error))
            return False
        self.outcomes["loaded"] += 1
        return True

    async def _keep_snapshot(self, client: Any) -> None:
        while True:
            await asyncio.sleep(self._snapshot_every_s)
            if min([self._exchange.origin, *self._replicas]) == self._exchange.origin:
                try:
                    await self._save(client)
                except Exception:
                    # The failure ends the connection, whose task logs it. It is only counted here.
                    self.outcomes["failed"] += 1
                    raise
                self.outcomes["saved"] += 1

    async def _save(self, client: Any) -> None:
        frames = await snapshots.gathered(self._exchange)
        content = await asyncio.to_thread(snapshots.pack, frames, time.time())
        await client.setex(self._key, SNAPSHOT_TTL_S, content)

    def _ignore(self, problem: str) -> None:
        self.outcomes["ignored"] += 1
        _log.warning(
            "snapshot of shared state in the broker ignored", key=self._key, problem=problem
        )


def _heed_cancellation() -> None:
    """Raise `CancelledError` if the task is being cancelled.

    The broker's client library may raise another error if its caller is cancelled while it fails.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _frames(payload: bytes) -> Iterator[bytes | None]:
    """Yield the frames in the payload of a broker's message, and finally None if the payload is
    truncated or a frame is too long.
    """
    at = ORIGIN_BYTES
    while at < len(payload):
        start = at + _LENGTH.size
        if start > len(payload):
            yield None
            return
        at = start + int(_LENGTH.unpack_from(payload, at)[0])
        if at > len(payload) or at - start > FRAME_BYTES_MAX:
            yield None
            return
        yield payload[start:at]
