"""The sockets on which a simulated pod publishes KV events: one for new frames, one for replays of
old frames.

`epp/core/kv_events/zmtp` implements the protocol ZMTP, for these servers as well as for pickers.
Frames that a slow subscriber does not read are dropped for this subscriber only, as in ZeroMQ. A
replay is written as fast as the peer reads it.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, cast

from msgspec import Struct

from epp.core.kv_events.zmtp import (
    REPLAY_ENDED,
    Message,
    SocketType,
    ZmtpConnection,
    ZmtpError,
    live_message,
    read_asked,
    read_subscription,
    replayed_message,
)
from sim.pods.kv_events import FRAMES_KEPT_MAX, KVEvents

CONNECTIONS_MAX: Final = 256
"""Maximum number of connections to each of the two sockets for KV events; further connections are
closed.
"""
UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Size in bytes of the data that waits to be sent to one subscriber above which new frames of KV
events are dropped for this subscriber.
"""
TOPICS_MAX: Final = 64
TOPIC_BYTES_MAX: Final = 1_024
REPLAYS_WAITING_MAX: Final = 64
"""Maximum number of replays of KV events for which one peer waits; its connection is closed if it
requests more.
"""
_HIGH_WATER_MARK: Final = 100_000
"""Queue length that the answer of `/kv_event_sources` contains; vLLM's queues are not modelled."""


class KVEventSource(Struct, frozen=True, kw_only=True):
    """The ports and the topic with which one rank of a pod publishes KV events."""

    port: int
    replay_port: int
    topic: str

    def config(self) -> dict[str, Any]:
        """Return the entry of this rank in the answer of `GET /kv_event_sources`, in vLLM's form."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "buffer_steps": FRAMES_KEPT_MAX,
            "hwm": _HIGH_WATER_MARK,
            "max_queue_size": _HIGH_WATER_MARK,
            "topic": self.topic,
        }


class _Peer(asyncio.Protocol):
    """One ZMTP connection of a subscriber to a simulated pod; `peers` are all connections to the
    same socket.
    """

    socket_type: SocketType

    def __init__(self, peers: "set[_Peer]") -> None:
        self._peers = peers
        self._zmtp = ZmtpConnection(self.socket_type)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, but not the base class.
        self._transport = cast("asyncio.Transport", transport)
        if len(self._peers) >= CONNECTIONS_MAX:
            self._transport.abort()
            return
        self._peers.add(self)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._peers.discard(self)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._zmtp.feed(data)
        except ZmtpError:
            self.close()
            return
        self._flush()
        for message in messages:
            self.receive(message)

    def receive(self, message: Message) -> None:
        """Handle a message that the subscriber at this connection has sent: a subscription, or the
        request for a replay.
        """
        raise NotImplementedError

    def send(self, message: Message) -> None:
        self._zmtp.send(message)
        self._flush()

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def gone(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        if self._transport is not None and not self.gone:
            self._transport.write(self._zmtp.to_send())


class _Subscriber(_Peer):
    """A connection that receives each new frame of KV events whose topic begins with one that the
    connection has subscribed to. A frame is dropped while more than `UNSENT_BYTES_MAX` are unsent.
    """

    socket_type = SocketType.PUB

    def __init__(self, peers: set[_Peer]) -> None:
        super().__init__(peers)
        self._topics: set[bytes] = set()

    def receive(self, message: Message) -> None:
        found = read_subscription(message)
        if found is None or len(found[1]) > TOPIC_BYTES_MAX:
            self.close()
            return
        wanted, topic = found
        if not wanted:
            self._topics.discard(topic)
        elif len(self._topics) < TOPICS_MAX:
            self._topics.add(topic)

    def publish(self, message: Message) -> None:
        wanted = message[0].startswith(tuple(self._topics)) if self._topics else False
        if wanted and self.unsent_bytes <= UNSENT_BYTES_MAX:
            self.send(message)


class _ReplayPeer(_Peer):
    """A connection that receives replays of old frames of KV events, one replay after another."""

    socket_type = SocketType.ROUTER

    def __init__(self, peers: set[_Peer], events: KVEvents, topic: bytes) -> None:
        super().__init__(peers)
        self._events = events
        self._topic = topic
        self._asked: deque[int] = deque()
        self._answer: Iterator[Message] | None = None
        self._paused = False

    def receive(self, message: Message) -> None:
        first = read_asked(message)
        if first is None or len(self._asked) >= REPLAYS_WAITING_MAX:
            self.close()
            return
        self._asked.append(first)
        self._go_on()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._go_on()

    def _go_on(self) -> None:
        while not self._paused and not self.gone:
            if self._answer is None:
                if not self._asked:
                    return
                self._answer = self._frames_from(self._asked.popleft())
            message = next(self._answer, None)
            if message is None:
                self._answer = None
            else:
                self.send(message)

    def _frames_from(self, first: int) -> Iterator[Message]:
        for number, payload in self._events.kept_from(first):
            yield replayed_message(self._topic, number, payload)
        yield REPLAY_ENDED


@contextlib.asynccontextmanager
async def publishing(
    events: KVEvents, live: socket.socket, replay: socket.socket, topic: str
) -> AsyncIterator[KVEventSource]:
    """Publish `events` to connections at the socket `live`, and replay old events at the socket
    `replay`, until the context ends. Yields the ports and the topic.
    """
    loop = asyncio.get_running_loop()
    encoded = topic.encode()
    subscribers: set[_Peer] = set()
    replay_peers: set[_Peer] = set()

    def send(number: int, payload: bytes) -> None:
        message = live_message(encoded, number, payload)
        for peer in tuple(subscribers):
            cast("_Subscriber", peer).publish(message)

    servers = [
        await loop.create_server(lambda: _Subscriber(subscribers), sock=live),
        await loop.create_server(lambda: _ReplayPeer(replay_peers, events, encoded), sock=replay),
    ]
    events.send = send
    try:
        yield KVEventSource(
            port=live.getsockname()[1], replay_port=replay.getsockname()[1], topic=topic
        )
    finally:
        events.send = None
        for server in servers:
            server.close()
        for peer in (*subscribers, *replay_peers):
            peer.close()
