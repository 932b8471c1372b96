"""ZeroMQ between replicas: one socket that is bound, and one connection to each of the others.

What a replica has to say goes to each peer over the connection that it opened itself; what that
peer answers comes back on it. So every peer has a queue of its own in both directions, bounded by
ZeroMQ's high-water marks: where one is full a frame is dropped and counted, and nobody waits.

Nothing is read when it comes but once a beat: waking up the event loop for a frame costs several
times what the frame does, and a beat is as long as frames are gathered for anyhow.

A message is one part: a byte that says of which kind it is (`Kind`), then the frame.
"""

import errno
import struct
from collections.abc import Iterable
from typing import Final, TypeAlias, cast

import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from epp.configuration.flags import IpAddress
from epp.core.peers.frames import FRAME_BYTES_MAX, ORIGIN_BYTES
from epp.core.types import Seconds
from epp.shell.peers.admission import DOMAIN, Admission, plain_host
from epp.shell.peers.carrier import KINDS, Kind, Message, Source
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.secret import CurveKeys
from epp.shell.peers.state import PeerRow, Traffic
from epp.shell.starting import EVERYWHERE, cannot_listen

PEERS_MAX: Final = 64
CONNECTIONS_MAX: Final = 4 * PEERS_MAX
"""To our port, of anybody: each is a file that is open, and waits up to `_HANDSHAKE_MS`."""
SENT_FRAMES_MAX: Final = 64
"""That wait for one peer: a second and more of what is sent live, a few of a snapshot."""
RECEIVED_FRAMES_MAX: Final = 8
"""That wait of one peer, each of at most a megabyte. What is more waits at the peer."""
HELLO_S: Final[Seconds] = 1.0
SILENCE_S: Final[Seconds] = 4.0
"""A peer that has not answered for so long is not sent to, until it does."""
CONNECT_AGAIN_S: Final[Seconds] = 5.0
"""A peer that does not answer for so long gets a new socket: after a refusal, or where one of two
has a secret and the other none, ZeroMQ's own would never try again."""
REFUSAL_S: Final[Seconds] = 1.0
"""For how long nobody can connect once there were too many."""
EVENTS_PER_BEAT_MAX: Final = 512
_HANDSHAKE_MS: Final = 5_000
_HEARTBEAT_MS: Final = 2_000
_HEARTBEAT_TIMEOUT_MS: Final = 6_000
"""After it a peer whose machine is gone, or whose process is stopped, is connected to anew."""
_RECONNECT_MS: Final = 100
_RECONNECT_MS_MAX: Final = 5_000
_LINGER_MS: Final = 200
"""What is not sent by then is not."""

_MESSAGE_BYTES_MAX: Final = 1 + FRAME_BYTES_MAX
_HELLO: Final = struct.Struct(f"<{ORIGIN_BYTES}sd")
"""Origin, and for how many seconds its sender has been warm; 0: it is not."""

_Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
_Socket: TypeAlias = "zmq.Socket[bytes]"


class Link:
    """The connection that we opened to one peer."""

    def __init__(self, address: str, socket: _Socket) -> None:
        self.address = address
        self.socket = socket
        self.origin = b""
        self.warm_s: Seconds = 0.0
        """For how long the peer had been warm when it last answered; 0: it is not."""
        self.heard_at_s: Seconds | None = None
        self.up_since_s: Seconds | None = None
        """None: it does not answer."""
        self.connected_at_s: Seconds | None = None
        """When it got its socket, or stopped to answer; None: it is yet to be looked at."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.dropped = 0


class Guest(Struct, frozen=True):
    """A connection that a peer opened to us, by the name that ZeroMQ gave it."""

    name: bytes


class Mesh:
    """`open`, `connect` and `beat` as often as wanted, then `close`. Not a call of it waits."""

    def __init__(
        self,
        origin: bytes,
        traffic: Traffic,
        *,
        address: IpAddress,
        port: int,
        keys: CurveKeys | None,
        complaints: Complaints | None = None,
    ) -> None:
        """`keys`: None for plaintext. `port` 0: any that is free, then `port` says which."""
        assert len(origin) == ORIGIN_BYTES
        self.port = port
        self._origin = origin
        self._traffic = traffic
        self._address = address
        self._keys = keys
        self._complaints = complaints or Complaints()
        self._context: _Context | None = None
        self._links: dict[str, Link] = {}
        self._ourselves: set[str] = set()
        """Addresses that answered with our own origin."""
        self._open_connections = 0
        self._bound_to = ""
        self._bind_at_s: Seconds | None = None
        """When to listen again; None: we do."""
        self._hello_at_s: Seconds = 0.0
        self.warm_since_s: Seconds | None = None
        """Since when we know what peers know, and can tell; set from outside."""

    def __repr__(self) -> str:
        return f"<Mesh [{len(self.up)} of {len(self._links)} peers answer]>"

    # Its life.

    def open(self) -> None:
        """Take the port. Raises `StartError`."""
        self._context = context = zmq.Context()
        self._admission = Admission(context, self._keys)
        self._bound = self._socket(zmq.ROUTER)
        # What cannot be sent is told, not dropped in silence.
        self._bound.router_mandatory = True
        if self._keys is not None:
            self._bound.curve_server = True
        self._events = self._bound.get_monitor_socket(zmq.EVENT_ALL)
        # Its writer is ZeroMQ's own thread, which must never wait for us.
        self._events.rcvhwm = 0
        host = "*" if self._address == EVERYWHERE else _bracketed(self._address)
        try:
            self._bound.bind(f"tcp://{host}:{self.port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            problem = OSError(error.errno, error.strerror)
            raise cannot_listen("--peer-port", self.port, problem, self._address) from error
        self._bound_to = self._bound.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self._bound_to.rpartition(":")[2])

    def close(self) -> None:
        """Give back the port; what waits to be sent has `_LINGER_MS`. `wait_closed` may wait for it."""
        if self._context is None:
            return
        for link in self._links.values():
            link.socket.close(_LINGER_MS)
        self._links.clear()
        self._bound.disable_monitor()
        self._events.close()
        self._bound.close(_LINGER_MS)
        self._admission.close()

    def wait_closed(self) -> None:
        """Wait until nothing is left to be sent; for a thread."""
        context, self._context = self._context, None
        if context is not None:
            context.term()

    # Who the peers are.

    def connect(self, addresses: Iterable[str]) -> None:
        """The peers are now those at `addresses`, "ip:port" each; the first `PEERS_MAX` in order."""
        found = set(addresses)
        self._ourselves &= found
        wanted = sorted(found - self._ourselves)
        chosen = wanted[:PEERS_MAX]
        for address in self._links.keys() - set(chosen):
            self._links.pop(address).socket.close(0)
        for address in chosen:
            if address not in self._links:
                self._links[address] = Link(address, self._connected(address))
        hosts = (plain_host(host_of(address)) for address in wanted)
        self._admission.hosts = frozenset(str(host) for host in hosts if host is not None)

    @property
    def known(self) -> int:
        """Peers, whether they answer or not."""
        return len(self._links)

    @property
    def answering(self) -> int:
        return len(self.up)

    @property
    def up(self) -> list[Link]:
        """Those that answer."""
        return [link for link in self._links.values() if link.up_since_s is not None]

    def rows(self, now: Seconds) -> list[PeerRow]:
        return [
            PeerRow(
                address=link.address,
                origin=link.origin.hex()[:8],
                connected_s=None if link.up_since_s is None else now - link.up_since_s,
                heard_s=None if link.heard_at_s is None else now - link.heard_at_s,
                bytes_sent=link.bytes_sent,
                bytes_received=link.bytes_received,
                dropped=link.dropped,
            )
            for link in self._links.values()
        ]

    # Frames.

    def send(self, frame: bytes) -> None:
        """To every peer that answers."""
        message = bytes((Kind.FRAME,)) + frame
        for link in self._links.values():
            if link.up_since_s is not None:
                self._send_counted(link, message)

    def answer(self, source: Source, kind: Kind, frame: bytes = b"") -> bool:
        """To one peer; False: its queue is full, or it is gone."""
        message = bytes((kind,)) + frame
        if isinstance(source, Link):
            return self._send_counted(source, message)
        assert isinstance(source, Guest), "it came from here"
        if len(message) > _MESSAGE_BYTES_MAX:
            self._traffic.dropped()
            return True
        try:
            self._bound.send_multipart([source.name, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in {errno.EAGAIN, errno.EHOSTUNREACH}:
                raise
            return False
        self._traffic.bytes_sent += len(message)
        if kind is not Kind.HELLO:
            self._traffic.frames["sent", "sent"] += 1
        return True

    def receive(
        self, messages_max: int, paused: Source | None = None
    ) -> tuple[list[Message], bool]:
        """What has come, at most `messages_max` of it, and whether there may be more.

        ZeroMQ takes of each peer in turn. Of `paused` nothing is read.
        """
        found: list[Message] = []
        left = messages_max
        while left and _readable(self._bound):
            left -= 1
            name, *parts = self._bound.recv_multipart()
            self._take(Guest(name), parts, found)
        for link in self._links.values():
            while link is not paused and left and _readable(link.socket):
                left -= 1
                self._take(link, link.socket.recv_multipart(), found)
        return found, not left

    # Once a beat.

    def beat(self, now: Seconds) -> None:
        """Let in who may come, greet, and notice who fell silent."""
        for address in self._admission.answer():
            self._traffic.failed("refused")
            self._complaints.say("a connection of a stranger was refused", now, address=address)
        self._count_connections(now)
        if now >= self._hello_at_s:
            self._hello_at_s = now + HELLO_S
            hello = self.hello(now)
            for link in self._links.values():
                self._send(link, hello)
                self._look_at(link, now)

    def hello(self, now: Seconds) -> bytes:
        """The message that says who we are and for how long we have been warm."""
        warm_s = 0.0 if self.warm_since_s is None else max(now - self.warm_since_s, 1e-3)
        return bytes((Kind.HELLO,)) + _HELLO.pack(self._origin, warm_s)

    def greeted(self, message: Message, now: Seconds) -> None:
        """Somebody said hello: answer, or, if it is the answer, know that the peer is there."""
        source = message.source
        if len(message.frame) != _HELLO.size:
            self._traffic.unreadable()
            return
        if not isinstance(source, Link):
            self.answer(source, Kind.HELLO, self.hello(now)[1:])
            return
        origin, warm_s = _HELLO.unpack(message.frame)
        if origin == self._origin:
            self._ourselves.add(source.address)
            self._links.pop(source.address).socket.close(0)
            return
        source.origin, source.warm_s, source.heard_at_s = origin, warm_s, now
        if source.up_since_s is None:
            source.up_since_s = now

    # The rest is how.

    def _socket(self, kind: int) -> _Socket:
        assert self._context is not None, "it is open"
        socket = self._context.socket(kind)
        socket.ipv6 = True
        socket.linger = 0
        socket.maxmsgsize = _MESSAGE_BYTES_MAX
        socket.sndhwm = SENT_FRAMES_MAX
        socket.rcvhwm = RECEIVED_FRAMES_MAX
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        socket.zap_domain = DOMAIN.encode()
        if self._keys is not None:
            socket.curve_publickey = self._keys.public
            socket.curve_secretkey = self._keys.secret
        return socket

    def _look_at(self, link: Link, now: Seconds) -> None:
        """Notice who fell silent, and try anew who has been for long."""
        if link.up_since_s is not None:
            if now - (link.heard_at_s or 0.0) > SILENCE_S:
                link.up_since_s, link.connected_at_s = None, now
                self._traffic.failed("silent")
        elif link.connected_at_s is None:
            link.connected_at_s = now
        elif now - link.connected_at_s > CONNECT_AGAIN_S:
            link.socket.close(0)
            link.socket, link.connected_at_s = self._connected(link.address), now

    def _connected(self, address: str) -> _Socket:
        socket = self._socket(zmq.DEALER)
        # Without it frames would gather for a peer that is not there, and reach it when it is.
        socket.immediate = True
        socket.reconnect_ivl = _RECONNECT_MS
        socket.reconnect_ivl_max = _RECONNECT_MS_MAX
        if self._keys is not None:
            socket.curve_serverkey = self._keys.public
        socket.connect(f"tcp://{address}")
        return socket

    def _send(self, link: Link, message: bytes) -> bool:
        if len(message) > _MESSAGE_BYTES_MAX:
            # The peer would close the connection.
            return False
        try:
            link.socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        link.bytes_sent += len(message)
        self._traffic.bytes_sent += len(message)
        return True

    def _send_counted(self, link: Link, message: bytes) -> bool:
        if self._send(link, message):
            self._traffic.frames["sent", "sent"] += 1
            return True
        link.dropped += 1
        self._traffic.dropped()
        return False

    def _take(self, source: Source, parts: list[bytes], found: list[Message]) -> None:
        """One message, if it is one."""
        kind = KINDS.get(parts[0][0]) if len(parts) == 1 and parts[0] else None
        if kind is None:
            self._traffic.unreadable()
            return
        (message,) = parts
        if isinstance(source, Link):
            source.bytes_received += len(message)
        if kind is Kind.HELLO:
            self._traffic.bytes_received += len(message)
        else:
            self._traffic.received(len(message))
        found.append(Message(source, kind, message[1:]))

    def _count_connections(self, now: Seconds) -> None:
        """Look at what ZeroMQ tells of its connections, and keep them few."""
        if self._bind_at_s is not None and now >= self._bind_at_s:
            self._listen_again(now)
        for _ in range(EVENTS_PER_BEAT_MAX):
            if not _readable(self._events):
                break
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            if event == zmq.EVENT_ACCEPTED:
                self._open_connections += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self._open_connections = max(0, self._open_connections - 1)
            elif event in _HANDSHAKE_FAILED:
                self._traffic.failed("handshake")
                self._complaints.say(
                    "a connection to --peer-port failed its handshake: it has another secret, or "
                    "none, or is no replica",
                    now,
                )
        if self._open_connections > CONNECTIONS_MAX and self._bind_at_s is None:
            # There is no way to close one of them; those of peers will be back.
            self._traffic.failed("too many")
            self._complaints.say("too many connections to --peer-port, all are closed", now)
            self._bound.unbind(self._bound_to)
            self._open_connections = 0
            self._bind_at_s = now + REFUSAL_S

    def _listen_again(self, now: Seconds) -> None:
        try:
            self._bound.bind(self._bound_to)
        except zmq.ZMQError as error:
            self._complaints.say("--peer-port cannot be had again", now, problem=error.strerror)
            self._bind_at_s = now + REFUSAL_S
            return
        self._open_connections = 0
        self._bind_at_s = None


def _readable(socket: _Socket) -> bool:
    return bool(cast("int", socket.get(zmq.EVENTS)) & zmq.POLLIN)


# A failure of AUTH is a refusal of our own, which `Admission` tells.
_HANDSHAKE_FAILED: Final = frozenset(
    {
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    }
)


def host_of(address: str) -> str:
    """Of "ip:port", IPv6 in brackets, without them."""
    return address.rpartition(":")[0].strip("[]")


def address_of(host: str, port: int) -> str:
    """As "ip:port", IPv6 in brackets."""
    return f"{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
