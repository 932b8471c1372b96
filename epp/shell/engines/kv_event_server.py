"""Accept connections of engines that send KV events, on one port of the picker.

An engine that connects identifies itself only in the topic of its first message, which it can
choose freely. Its IP address is therefore decisive: a connection can only send events for an
endpoint at that address. If there are several endpoints, the topic `kv@IP:PORT@MODEL` selects one.
If an endpoint has several ranks, each payload contains the rank. Connections from an address
without endpoint are ignored, and so are, for a while, those from an address that sent many events
for other endpoints. Ignored connections stay open unread for the time of a handshake, because a
client whose connection closes reconnects at once.
"""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from typing import Final, Protocol

import structlog

from epp.core.address import host_of
from epp.core.knowledge.pool import canonical_address
from epp.core.kv_events.zmtp import Message, SocketType, ZmtpConnection, read_live
from epp.core.types import Endpoint, Seconds
from epp.shell.engines.zmtp_lines import ZmtpLines
from epp.shell.supervision import forever

HANDSHAKE_S_MAX: Final[Seconds] = 5.0
STRANGERS_MAX: Final = 256
"""Maximum number of connections from unknown addresses that stay open unread; further ones are
closed at once.
"""
UNKNOWN_MESSAGES_MAX: Final = 64
"""Maximum number of messages that the picker rejects from one connection before it closes the
connection. For example, it rejects a message whose topic names an endpoint with another IP address.
It is also the maximum number of topics that are remembered of one connection.
"""
UNHEARD_S: Final[Seconds] = 30.0
"""Time in seconds for which new connections from an IP address are ignored after the picker
rejected more than `UNKNOWN_MESSAGES_MAX` messages of one connection, the last one because it was
unreadable or for no endpoint at this address.
"""
LISTEN_AGAIN_S: Final[Seconds] = 5.0
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""TCP keep-alive options: seconds without traffic before a probe, seconds between probes, and
number of failed probes.

Some systems lack some of these options.
"""

_log = structlog.get_logger(__name__)


class Rejection(StrEnum):
    """The reason why the picker rejected a connection of an engine or a message on it."""

    STRANGER = "address of no endpoint"
    CONNECTIONS = "too many connections"
    TOPIC = "topic of no endpoint"
    LIE = "topic of another address"
    TAKEN = "endpoint that is heard already"
    RANK = "rank that is not told apart"


class KVEventReceiver(Protocol):
    """A receiver of the KV-cache events of engines that connect to the picker. Endpoints are
    identified by their id.
    """

    def engine_connected(self, endpoint_id: str, lines: ZmtpLines) -> None:
        """Use the new connection `lines` for an endpoint before any message arrives, because no
        other endpoint has the same IP address.
        """
        ...

    def engine_said(
        self, endpoint_id: str, lines: ZmtpLines, sequence: int, payload: bytes
    ) -> Rejection | None:
        """Process a message from an engine. Return the reason if the message is rejected, else
        None.

        If it is accepted, the connection `lines` belongs to the endpoint from now on.
        """
        ...

    def engine_parted(self, lines: ZmtpLines, why: str) -> None:
        """Record that an engine's connection `lines` has ended; `why` is the reason."""
        ...


class _Peer:
    """The state of one connection on which an engine sends KV-cache events."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.speaks_for: dict[bytes, str] = {}
        """Ids of the endpoints that the topics on this connection name, by topic."""
        self.unknown_messages = 0


class KVEventServer:
    """A server to which engines connect to send KV-cache events, on one address and port. `run`
    owns every connection.
    """

    def __init__(
        self,
        hears: KVEventReceiver,
        host: str,
        port: int,
        *,
        topic: bytes = b"",
        ranks: int = 1,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """Create the server for engines that connect to send KV-cache events.

        An empty `host` means all addresses. Topics must begin with `topic`. `ranks` is the number
        of data-parallel ranks per endpoint.
        """
        self.turned: Counter[Rejection] = Counter()
        self.problem = ""
        """Reason why the port for engines that send KV events cannot be opened, or "" if it is open
        or not tried yet.
        """
        self.port = port
        """Configured port to which engines connect to send KV events. If 0 is configured, the port
        that was selected, once the picker listens.
        """
        self._hears = hears
        self._host = host
        self._topic = topic
        self._ranks = ranks
        self._clock = clock
        self._endpoints: dict[str, dict[str, str]] = {}
        """Ids of endpoints, by the pod's address and then by the address with port."""
        self._peers: dict[ZmtpLines, _Peer] = {}
        self._strangers: set[ZmtpLines] = set()
        self._unheard_until_s: dict[str, Seconds] = {}
        """Time until which connections from an IP address are not read, by address."""

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the endpoints whose engines may connect, and close connections from addresses
        without endpoints. The topics on the other connections are resolved again.
        """
        self._endpoints = {}
        for endpoint in endpoints:
            address = canonical_address(endpoint.address)
            at_host = self._endpoints.setdefault(host_of(address), {})
            at_host[address] = endpoint.endpoint_id
        known = self._endpoints.keys()
        for lines, peer in list(self._peers.items()):
            peer.speaks_for.clear()
            if peer.host not in known:
                lines.end()
        self._unheard_until_s = {
            host: until_s for host, until_s in self._unheard_until_s.items() if host in known
        }

    async def run(self) -> None:
        """Accept connections of engines until cancelled. If the port cannot be opened, log a
        warning and try again every `LISTEN_AGAIN_S` seconds.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                server = await loop.create_server(self._protocol, self._host or None, self.port)
            except OSError as error:
                self.problem = f"port {self.port} cannot be opened: {type(error).__name__}"
                _log.warning("engines cannot connect to send KV events", problem=self.problem)
                await asyncio.sleep(LISTEN_AGAIN_S)
                continue
            self.problem = ""
            self.port = server.sockets[0].getsockname()[1]
            try:
                await forever()
            finally:
                server.close()
                for lines in (*self._peers, *self._strangers):
                    lines.end()

    def _protocol(self) -> ZmtpLines:
        zmtp = ZmtpConnection(SocketType.SUB, topic=self._topic)
        lines = ZmtpLines(zmtp, lambda message: self._came(lines, message), self._made)
        return lines

    def _made(self, lines: ZmtpLines) -> None:
        assert lines.transport is not None, "the connection has just been made"
        host = _host_of_peer(lines.transport)
        at_host = self._endpoints.get(host, {})
        until_s = self._unheard_until_s.get(host)
        if not at_host or (until_s is not None and self._clock() < until_s):
            self._keep_unread(lines)
            return
        connections = sum(peer.host == host for peer in self._peers.values())
        if connections > len(at_host) * self._ranks:
            # One connection more than ranks is allowed, because an engine may reconnect before the
            # end of the old connection is known.
            self.turned[Rejection.CONNECTIONS] += 1
            lines.end()
            return
        _enable_keepalive(lines.transport)
        self._peers[lines] = _Peer(host)
        deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S_MAX, _end_unready, lines)
        lines.ready.add_done_callback(partial(self._ready, lines, deadline))
        lines.closed.add_done_callback(partial(self._gone, lines))

    def _keep_unread(self, lines: ZmtpLines) -> None:
        self.turned[Rejection.STRANGER] += 1
        if len(self._strangers) >= STRANGERS_MAX:
            lines.end()
            return
        lines.read(on=False)
        self._strangers.add(lines)
        ending = asyncio.get_running_loop().call_later(HANDSHAKE_S_MAX, lines.end)

        def gone(_: asyncio.Future[str]) -> None:
            ending.cancel()
            self._strangers.discard(lines)

        lines.closed.add_done_callback(gone)

    def _ready(
        self, lines: ZmtpLines, deadline: asyncio.TimerHandle, ready: asyncio.Future[None]
    ) -> None:
        deadline.cancel()
        peer = self._peers.get(lines)
        if peer is None or ready.exception() is not None:
            return
        at_host = self._endpoints.get(peer.host, {})
        if len(at_host) == 1:
            # There is only one possible endpoint, even before the first message.
            self._hears.engine_connected(next(iter(at_host.values())), lines)

    def _gone(self, lines: ZmtpLines, why: asyncio.Future[str]) -> None:
        del self._peers[lines]
        self._hears.engine_parted(lines, why.result())

    def _came(self, lines: ZmtpLines, message: Message) -> None:
        peer = self._peers.get(lines)
        live = read_live(message)
        if peer is None or lines.closed.done():
            return
        if live is None:
            self._count_unknown(lines, peer, Rejection.TOPIC)
            return
        topic = message[0]
        endpoint_id = peer.speaks_for.get(topic)
        if endpoint_id is None:
            found = self._endpoint_of(peer.host, topic)
            if isinstance(found, Rejection):
                self._count_unknown(lines, peer, found)
                return
            endpoint_id = found
            if len(peer.speaks_for) >= UNKNOWN_MESSAGES_MAX:
                # The sender chooses the number of topics, so the memory of them is bounded.
                peer.speaks_for.clear()
            peer.speaks_for[topic] = endpoint_id
        why = self._hears.engine_said(endpoint_id, lines, *live)
        if why is None:
            return
        self.turned[why] += 1
        peer.unknown_messages += 1
        if peer.unknown_messages > UNKNOWN_MESSAGES_MAX:
            lines.end(
                f"sends events for an {why}"
                if why is Rejection.TAKEN
                else f"sends events for a {why}"
            )

    def _endpoint_of(self, host: str, topic: bytes) -> str | Rejection:
        """Return the id of the endpoint for which a message with `topic` from the IP address `host`
        is meant, or the reason why there is none.
        """
        at_host = self._endpoints.get(host, {})
        address = canonical_address(address_in(topic))
        if address in at_host:
            return at_host[address]
        if len(at_host) == 1 and address in ("", host):
            # The topic has no port and there is only one endpoint.
            return next(iter(at_host.values()))
        of_host = address in ("", host) or host_of(address) == host
        return Rejection.TOPIC if of_host else Rejection.LIE

    def _count_unknown(self, lines: ZmtpLines, peer: _Peer, why: Rejection) -> None:
        self.turned[why] += 1
        peer.unknown_messages += 1
        if peer.unknown_messages > UNKNOWN_MESSAGES_MAX:
            self._unheard_until_s[peer.host] = self._clock() + UNHEARD_S
            lines.end("sends events for other endpoints")


def address_in(topic: bytes) -> str:
    """Return the address in an event topic `kv@IP:PORT@MODEL`, with or without port, or "" if it
    has none.
    """
    kind, _, rest = topic.partition(b"@")
    if kind != b"kv":
        return ""
    return rest.partition(b"@")[0].decode("ascii", "replace")


def _host_of_peer(transport: asyncio.Transport) -> str:
    """Return the IP address of the engine that opened a connection, spelled as in endpoint
    addresses, or "" if it is unknown.
    """
    peer = transport.get_extra_info("peername")
    return canonical_address(str(peer[0]).removeprefix("::ffff:")).strip("[]") if peer else ""


def _enable_keepalive(transport: asyncio.Transport) -> None:
    """Enable TCP keep-alive probes on a connection of an engine, because the picker sends nothing
    on it and would not notice a vanished pod.
    """
    connected = transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _end_unready(lines: ZmtpLines) -> None:
    lines.end("did not complete the handshake in time")
