"""Where engines connect to with their KV events: one port of the picker for all of them.

An engine that connects does not say who it is before its first message, and then in the topic, which it
may choose. So who speaks is told by the address that it connects from: it speaks for an endpoint at that
address and for no other. The topic, `kv@IP:PORT@MODEL` as the field writes it, tells which, where there are
several; of several ranks behind one endpoint each payload tells which, and whoever hears them asks it. An address of which no endpoint is known is not listened to, and neither is one, for a while,
that spoke for others: its connections are kept, unread, as long as a handshake may take, because
whoever is closed at once comes back at once.
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
"""Connections that are kept unread; more are closed at once."""
UNKNOWN_MESSAGES_MAX: Final = 64
"""Of one connection, that are of no endpoint at its address; then its address is a stranger's."""
UNHEARD_S: Final[Seconds] = 30.0
"""For so long an address that spoke for others is a stranger's."""
LISTEN_AGAIN_S: Final[Seconds] = 5.0
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds without traffic until a peer is asked whether it is there, seconds between such questions, and
how many stay without an answer. Not every system has all."""

_log = structlog.get_logger(__name__)


class Turned(StrEnum):
    """Why something that came is not listened to."""

    STRANGER = "address of no endpoint"
    CONNECTIONS = "too many connections"
    TOPIC = "topic of no endpoint"
    LIE = "topic of another address"
    TAKEN = "endpoint that is heard already"
    RANK = "rank that is not told apart"


class Hears(Protocol):
    """What becomes of those who connected; endpoints are told by their identity."""

    def engine_connected(self, endpoint_id: str, lines: ZmtpLines) -> None:
        """Nobody else can speak on `lines`, on which nothing was said yet."""
        ...

    def engine_said(
        self, endpoint_id: str, lines: ZmtpLines, sequence: int, payload: bytes
    ) -> Turned | None:
        """Why it is not listened to; None: it is, and `lines` speak for the endpoint from now on."""
        ...

    def engine_parted(self, lines: ZmtpLines, why: str) -> None:
        """`lines` speak for nobody any more."""
        ...


class _Peer:
    """One connection."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.speaks_for: dict[bytes, str] = {}
        """Topic -> the endpoint that it names, of this address."""
        self.unknown_messages = 0


class KVEventServer:
    """Listens at one place; `run` owns every connection."""

    def __init__(
        self,
        hears: Hears,
        host: str,
        port: int,
        *,
        topic: bytes = b"",
        ranks: int = 1,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """`host`: "" is everywhere. `topic`: what topics must begin with. `ranks`: of an endpoint."""
        self.turned: Counter[Turned] = Counter()
        self.problem = ""
        """Why nobody can connect."""
        self.port = port
        """Once it is listened at, the one that 0 stood for."""
        self._hears = hears
        self._host = host
        self._topic = topic
        self._ranks = ranks
        self._clock = clock
        self._endpoints: dict[str, dict[str, str]] = {}
        """Address of a pod -> of each endpoint there, its address with the port -> its identity."""
        self._peers: dict[ZmtpLines, _Peer] = {}
        self._strangers: set[ZmtpLines] = set()
        self._unheard_until_s: dict[str, Seconds] = {}
        """Addresses that spoke for others."""

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """These may speak from now on."""
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
        """Listen until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                server = await loop.create_server(self._protocol, self._host or None, self.port)
            except OSError as error:
                self.problem = f"port {self.port} cannot be listened on: {type(error).__name__}"
                _log.warning("engines cannot connect with KV events", problem=self.problem)
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
        assert lines.transport is not None, "it has just been made"
        host = _host_of_peer(lines.transport)
        at_host = self._endpoints.get(host, {})
        until_s = self._unheard_until_s.get(host)
        if not at_host or (until_s is not None and self._clock() < until_s):
            self._keep_unread(lines)
            return
        connections = sum(peer.host == host for peer in self._peers.values())
        if connections > len(at_host) * self._ranks:
            # One more than there are ranks: an engine comes back before the old is known to be gone.
            self.turned[Turned.CONNECTIONS] += 1
            lines.end()
            return
        _ask_whether_it_is_there(lines.transport)
        self._peers[lines] = _Peer(host)
        deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S_MAX, _end_unready, lines)
        lines.ready.add_done_callback(partial(self._ready, lines, deadline))
        lines.closed.add_done_callback(partial(self._gone, lines))

    def _keep_unread(self, lines: ZmtpLines) -> None:
        self.turned[Turned.STRANGER] += 1
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
            # Nobody else can be meant, before it says anything.
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
            self._count_unknown(lines, peer, Turned.TOPIC)
            return
        topic = message[0]
        endpoint_id = peer.speaks_for.get(topic)
        if endpoint_id is None:
            found = self._endpoint_of(peer.host, topic)
            if isinstance(found, Turned):
                self._count_unknown(lines, peer, found)
                return
            endpoint_id = found
            if len(peer.speaks_for) >= UNKNOWN_MESSAGES_MAX:
                # Topics of one endpoint are as many as whoever sends them likes.
                peer.speaks_for.clear()
            peer.speaks_for[topic] = endpoint_id
        why = self._hears.engine_said(endpoint_id, lines, *live)
        if why is None:
            return
        self.turned[why] += 1
        peer.unknown_messages += 1
        if peer.unknown_messages > UNKNOWN_MESSAGES_MAX:
            lines.end(f"speaks for an {why}" if why is Turned.TAKEN else f"speaks for a {why}")

    def _endpoint_of(self, host: str, topic: bytes) -> str | Turned:
        """Whom a message of `topic` from `host` is of."""
        at_host = self._endpoints.get(host, {})
        address = canonical_address(address_in(topic))
        if address in at_host:
            return at_host[address]
        if len(at_host) == 1 and address in ("", host):
            # It names no port, and there is one endpoint.
            return next(iter(at_host.values()))
        of_host = address in ("", host) or host_of(address) == host
        return Turned.TOPIC if of_host else Turned.LIE

    def _count_unknown(self, lines: ZmtpLines, peer: _Peer, why: Turned) -> None:
        self.turned[why] += 1
        peer.unknown_messages += 1
        if peer.unknown_messages > UNKNOWN_MESSAGES_MAX:
            self._unheard_until_s[peer.host] = self._clock() + UNHEARD_S
            lines.end("speaks for others")


def address_in(topic: bytes) -> str:
    """The address in a topic as the field writes it, `kv@IP:PORT@MODEL`, with or without the port.

    "": it has none.
    """
    kind, _, rest = topic.partition(b"@")
    if kind != b"kv":
        return ""
    return rest.partition(b"@")[0].decode("ascii", "replace")


def _host_of_peer(transport: asyncio.Transport) -> str:
    """As addresses of endpoints have it."""
    peer = transport.get_extra_info("peername")
    return canonical_address(str(peer[0]).removeprefix("::ffff:")).strip("[]") if peer else ""


def _ask_whether_it_is_there(transport: asyncio.Transport) -> None:
    """We say nothing on it, so that the system has to notice a pod that is gone."""
    connected = transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _end_unready(lines: ZmtpLines) -> None:
    lines.end("did not say in time who it is")
