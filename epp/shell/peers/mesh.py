"""Connections between replicas: one outgoing and one incoming connection per peer.

A replica sends its data over the connection that it opened, and answers come back on it. Each peer
has its own queue per direction, limited in bytes. If a queue is full, a new frame is dropped and
counted, and nothing blocks. Unread data waits in the kernel's buffers and then at the sender.

Data is read once per beat, not on arrival: waking the event loop for a frame takes several times as
long as the frame itself, and frames are collected for one beat anyway. Code in this module runs
only within calls from outside. Each call is limited in connections, messages and bytes.
"""

import errno
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from typing import Final

from epp.core.address import host_of, port_of
from epp.core.peers.frames import FRAME_BYTES_MAX, ORIGIN_BYTES
from epp.core.types import Seconds
from epp.flags.values import IpAddress
from epp.shell.peers.admission import (
    ACCEPTS_PER_BEAT_MAX,
    NEWCOMER_S_MAX,
    Admission,
    Newcomer,
    plain_host,
)
from epp.shell.peers.carrier import KINDS, Kind, Message, Source
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.connection import Connection, Problem, Stage
from epp.shell.peers.secret import Identity
from epp.shell.peers.state import PeerRow, Traffic
from epp.shell.starting import EVERYWHERE, cannot_listen

PEERS_MAX: Final = 64
GUESTS_MAX: Final = 2 * PEERS_MAX
"""Maximum number of incoming connections of replicas; when one more arrives, the connection with
the longest silence is closed.
"""
HANDSHAKES_PER_BEAT_MAX: Final = 8
"""Maximum number of TLS handshake steps of incoming connections per beat, each about 0.3 ms. Only
peers with the secret reach the TLS handshake.
"""
MESSAGES_PER_GUEST_MAX: Final = 8
"""Maximum number of messages that one call of `receive` reads from one connection."""
HELLO_S: Final[Seconds] = 1.0
SILENCE_S: Final[Seconds] = 4.0
"""Time in seconds after which a peer that does not answer counts as silent, so that no frames are
sent to it.
"""
GUEST_SILENCE_S: Final[Seconds] = 15.0
"""Time in seconds after which a silent incoming connection is closed; active peers send a hello
each second.
"""
CONNECT_AGAIN_S: Final[Seconds] = 5.0
"""Time in seconds after which an outgoing connection whose peer does not answer is closed and
opened again.
"""
STALL_S: Final[Seconds] = 0.5
"""Delay of a beat in seconds from which this process itself is assumed to have been stalled,
instead of its peers.
"""
BACKLOG: Final = 512
_RECONNECT_S: Final[Seconds] = 0.1
_RECONNECT_S_MAX: Final[Seconds] = 5.0
_LINGER_S: Final[Seconds] = 0.2
"""Maximum time in seconds for sending queued data at shutdown."""
_LINGER_POLL_S: Final[Seconds] = 0.005

_HELLO: Final = struct.Struct(f"<{ORIGIN_BYTES}sd")
"""Binary layout of a hello message: the sender's origin, and the seconds for which it has had the
state of its peers (has been warm), or 0 if it does not have it.
"""
_COMPLAINTS: Final = {
    Problem.VERSION: "a peer address answers with another version or is not a replica",
    Problem.SECRET: (
        "peer handshake failed: the secrets differ, one side has none, or the host is not a replica"
    ),
    Problem.HANDSHAKE: "peer handshake failed: the secrets differ",
    Problem.MESSAGE: "a replica sent an invalid message; its connection is closed",
}
"""Log messages for problems of connections that an operator can solve."""


class Link:
    """The outgoing connection to one peer, which is opened again after each failure."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.connection: Connection | None = None
        """The current connection to the peer, or None if there is none at the moment."""
        self.origin = b""
        self.warm_s: Seconds = 0.0
        """Seconds for which the peer had had the shared state (had been warm) when it last
        answered, or 0 if it did not have it.
        """
        self.heard_at_s: Seconds | None = None
        self.up_since_s: Seconds | None = None
        """Time since which the peer has been answering, or None if it does not answer."""
        self.waits_since_s: Seconds = 0.0
        """Time at which the connection was begun, or at which the peer became silent on it."""
        self.try_at_s: Seconds = 0.0
        self.pause_s: Seconds = _RECONNECT_S
        """Delay in seconds that follows the next failure of the connection; it doubles each time up
        to `_RECONNECT_S_MAX`.
        """
        self.polled = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.dropped = 0


class Guest:
    """An incoming connection from a peer."""

    def __init__(self, host: str, connection: Connection, now: Seconds) -> None:
        self.host = host
        self.connection = connection
        self.origin = connection.origin
        """The peer's origin (8-byte id), from its certificate or, in plaintext, from its first
        hello; b"" if unknown.
        """
        self.heard_at_s = now


class Mesh:
    """A carrier of frames over direct connections between replicas. No method except `wait_closed`
    blocks.

    Call `open`, then `connect` and `beat` repeatedly, and finally `close`.
    """

    def __init__(
        self,
        identity: Identity,
        traffic: Traffic,
        *,
        address: IpAddress,
        port: int,
        complaints: Complaints | None = None,
    ) -> None:
        """Create the carrier with its port closed. `port` 0 selects a free port, whose number
        `self.port` has after `open`.
        """
        self.port = port
        self._identity = identity
        self._origin = identity.origin
        self._traffic = traffic
        self._address = address
        self._complaints = complaints or Complaints()
        self._bound: socket.socket | None = None
        self._selector: selectors.BaseSelector | None = None
        self._admission = Admission(has_secret=identity.serving is not None)
        self._links: dict[str, Link] = {}
        self._guests: list[Guest] = []
        self._ending: list[Connection] = []
        """Closing connections that still have queued data to send."""
        self._ourselves: set[str] = set()
        """Addresses at which this process itself answered, as its own origin shows."""
        self._hello_at_s: Seconds = 0.0
        self._beaten_at_s: Seconds | None = None
        self._turn = 0
        self.warm_since_s: Seconds | None = None
        """Time since which this picker has the state of its peers and can share it with others, or
        None if it has none yet. The owner of the mesh sets it.
        """

    def __repr__(self) -> str:
        return f"<Mesh [{len(self.up)} of {len(self._links)} peers answer]>"

    # Methods that open and close the port.

    def open(self) -> None:
        """Listen on the port for peers. Raises `StartError`."""
        try:
            bound = _listening(self._address, self.port)
        except OSError as error:
            raise cannot_listen("--peer-port", self.port, error, self._address) from error
        bound.setblocking(False)
        self._bound = bound
        self._selector = selectors.DefaultSelector()
        self.port = bound.getsockname()[1]

    def close(self) -> None:
        """Release the port for peers and end all connections. Data that is still queued is sent by
        `wait_closed`, within `_LINGER_S` seconds.
        """
        if self._bound is None or self._selector is None:
            return
        self._selector.close()
        self._bound.close()
        self._bound = self._selector = None
        for newcomer in self._admission.newcomers:
            newcomer.connection.close()
        self._admission.newcomers.clear()
        for connection in self._connections():
            connection.flush()
            self._ending.append(connection)
        self._links.clear()
        self._guests.clear()

    def wait_closed(self) -> None:
        """Send the queued data of closing connections, for at most `_LINGER_S` seconds. It blocks,
        so call it in a thread.
        """
        ends_at_s = time.monotonic() + _LINGER_S
        while self._ending:
            over = time.monotonic() >= ends_at_s
            for connection in tuple(self._ending):
                connection.flush()
                if over or not connection.unsent_bytes or connection.problem is not None:
                    connection.close()
                    self._ending.remove(connection)
            if self._ending:
                time.sleep(_LINGER_POLL_S)

    # Methods about the set of peers.

    def connect(self, addresses: Iterable[str]) -> None:
        """Replace the set of peers by those at `addresses`, "ip:port" each. Addresses at which this
        process itself answered are left out. Of more than `PEERS_MAX`, the first ones in sorted
        order are used.
        """
        found = set(addresses)
        self._ourselves &= found
        wanted = sorted(found - self._ourselves)
        chosen = wanted[:PEERS_MAX]
        for address in self._links.keys() - set(chosen):
            self._drop(self._links.pop(address))
        for address in chosen:
            if address not in self._links:
                self._links[address] = Link(address)
        hosts = (plain_host(host_of(address)) for address in wanted)
        self._admission.hosts = frozenset(str(host) for host in hosts if host is not None)

    @property
    def known(self) -> int:
        """Number of known peers, including peers that do not answer."""
        return len(self._links)

    @property
    def answering(self) -> int:
        return len(self.up)

    @property
    def up(self) -> list[Link]:
        """Outgoing connections whose peers answer."""
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

    # Methods that transport frames.

    def send(self, frame: bytes) -> None:
        """Send `frame` over the connection to every peer that answers."""
        for link in self._links.values():
            if link.up_since_s is not None:
                self._send_counted(link, Kind.FRAME, frame)

    def answer(self, source: Source, kind: Kind, frame: bytes = b"") -> bool:
        """Send a message to the peer `source`. Return False if its queue is full or its connection
        is gone.

        For an incoming connection, a frame longer than `FRAME_BYTES_MAX` is dropped and counted,
        and True is returned.
        """
        if isinstance(source, Link):
            return self._send_counted(source, kind, frame)
        assert isinstance(source, Guest), "the source belongs to this mesh"
        if len(frame) > FRAME_BYTES_MAX:
            self._traffic.dropped()
            return True
        if not source.connection.send(kind, frame):
            return False
        self._traffic.bytes_sent += 1 + len(frame)
        if kind is not Kind.HELLO:
            self._traffic.frames["sent", "sent"] += 1
        return True

    def receive(
        self, messages_max: int, paused: Source | None = None
    ) -> tuple[list[Message], bool]:
        """Return at most `messages_max` received messages, and True if there may be more.

        Peers are read round robin, at most `MESSAGES_PER_GUEST_MAX` messages each. The source
        `paused` is not read.
        """
        ready = [each for each in self._readable() if each is not paused]
        self._turn += 1
        at = self._turn % len(ready) if ready else 0
        found: list[Message] = []
        more = False
        for source in (*ready[at:], *ready[:at]):
            share = min(MESSAGES_PER_GUEST_MAX, messages_max - len(found))
            if not self._read(source, share, found):
                more = True
        return found, more

    # Methods called once per beat.

    def beat(self, now: Seconds) -> None:
        """Do the periodic work: accept connections, continue handshakes, open connections to peers,
        send queued data and hello messages, and close connections of silent peers.
        """
        if self._bound is None:
            return
        self._forgive_stall(now)
        self._accept(now)
        self._advance(now)
        for connection in self._connections():
            if connection.unsent_bytes:
                connection.flush()
        greets = now >= self._hello_at_s
        if greets:
            self._hello_at_s = now + HELLO_S
        hello = self.hello(now)
        for link in self._links.values():
            self._tend(link, now)
            if greets and link.polled:
                self._send(link, Kind.HELLO, hello)
        for guest in tuple(self._guests):
            silent_s = now - guest.heard_at_s
            if guest.connection.problem is not None or silent_s > GUEST_SILENCE_S:
                self._leave(guest)

    def hello(self, now: Seconds) -> bytes:
        """Return a hello message with this process's origin and the seconds for which it has had
        the shared state, or 0 if it does not have it.
        """
        warm_s = 0.0 if self.warm_since_s is None else max(now - self.warm_since_s, 1e-3)
        return _HELLO.pack(self._origin, warm_s)

    def greeted(self, message: Message, now: Seconds) -> None:
        """Process a received hello. If it came from a peer's own connection, answer it; else record
        that the peer answered. Close a connection that turns out to lead to this process, or whose
        certificate has another origin.
        """
        source = message.source
        if len(message.frame) != _HELLO.size:
            self._traffic.unreadable()
            return
        origin, warm_s = _HELLO.unpack(message.frame)
        if isinstance(source, Guest):
            if self._is_own(source, origin):
                self.answer(source, Kind.HELLO, self.hello(now))
            return
        assert isinstance(source, Link), "the source belongs to this mesh"
        if source.connection is None:
            return
        if origin == self._origin:
            self._ourselves.add(source.address)
            self._drop(self._links.pop(source.address))
            return
        if source.connection.origin not in {b"", origin}:
            self._end(source, now)
            return
        source.origin, source.warm_s, source.heard_at_s = origin, warm_s, now
        source.pause_s = _RECONNECT_S
        if source.up_since_s is None:
            source.up_since_s = now

    # The methods below are internal.

    def _is_own(self, guest: Guest, origin: bytes) -> bool:
        """Return True if the incoming connection `guest` may use `origin` as its sender's id, and
        record that it does; else close it.

        With a secret the certificate determines the origin. Without one, the first connection owns
        the origin until it closes or the same host connects again.
        """
        if guest.origin == origin:
            return True
        namesake = next((each for each in self._guests if each.origin == origin), None)
        if guest.origin or (namesake is not None and namesake.host != guest.host):
            self._traffic.failed("origin")
            self._complaints.say(
                "a replica uses the origin of another one; its connection is closed",
                guest.heard_at_s,
                address=guest.host,
            )
            self._leave(guest)
            return False
        if namesake is not None:
            self._leave(namesake)
        guest.origin = origin
        return True

    def _connections(self) -> list[Connection]:
        ours = [link.connection for link in self._links.values() if link.connection is not None]
        return [*ours, *(guest.connection for guest in self._guests)]

    def _forgive_stall(self, now: Seconds) -> None:
        """Extend all deadlines of peers by the duration of a stall of this process, because it
        could not receive anything meanwhile.
        """
        if self._beaten_at_s is not None and (stalled_s := now - self._beaten_at_s) > STALL_S:
            for link in self._links.values():
                link.waits_since_s += stalled_s
                if link.heard_at_s is not None:
                    link.heard_at_s += stalled_s
            for guest in self._guests:
                guest.heard_at_s += stalled_s
            for newcomer in self._admission.newcomers:
                newcomer.connection.began_at_s += stalled_s
        self._beaten_at_s = now

    def _accept(self, now: Seconds) -> None:
        assert self._bound is not None, "the port is open"
        for _ in range(ACCEPTS_PER_BEAT_MAX):
            try:
                accepted, (host, *_) = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._traffic.failed("too many")
                self._complaints.say(
                    "no more connections to --peer-port can be accepted",
                    now,
                    problem=error.strerror,
                )
                return
            if not self._admission.admits(host):
                accepted.close()
                self._traffic.failed("refused")
                self._complaints.say("connection of an unknown host refused", now, address=host)
                continue
            _prepare(accepted)
            connection = Connection(accepted, self._identity, serving=True, now=now)
            gives_way = self._admission.add(Newcomer(host, connection))
            if gives_way is not None:
                gives_way.connection.close()
                self._traffic.failed("too many")
                self._complaints.say(
                    "too many unauthenticated connections to --peer-port",
                    now,
                    address=gives_way.host,
                )

    def _advance(self, now: Seconds) -> None:
        """Continue the handshakes of incoming connections, admit those that are complete, and close
        those that fail or take too long.
        """
        shaken = 0
        for newcomer in tuple(self._admission.newcomers):
            connection = newcomer.connection
            if connection.stage is Stage.TLS:
                if shaken == HANDSHAKES_PER_BEAT_MAX:
                    continue
                shaken += 1
            connection.advance()
            if connection.problem is None and connection.stage is Stage.OPEN:
                self._admission.remove(newcomer)
                self._welcome(newcomer, now)
            elif now - connection.began_at_s > NEWCOMER_S_MAX:
                connection.fail(Problem.SECRET)
            if connection.problem is not None:
                self._admission.remove(newcomer)
                connection.close()
                self._failed_handshake(connection.problem, newcomer.host, now)

    def _failed_handshake(self, problem: Problem, address: str, now: Seconds) -> None:
        if problem in _COMPLAINTS:
            self._traffic.failed("handshake")
            self._complaints.say(_COMPLAINTS[problem], now, address=address)

    def _welcome(self, newcomer: Newcomer, now: Seconds) -> None:
        assert self._selector is not None, "the mesh is open"
        guest = Guest(newcomer.host, newcomer.connection, now)
        if guest.origin:
            # The certificate proves that the earlier connection belongs to the same replica.
            for each in [each for each in self._guests if each.origin == guest.origin]:
                self._leave(each)
        if len(self._guests) == GUESTS_MAX:
            self._traffic.failed("too many")
            self._complaints.say("too many connections of replicas to --peer-port", now)
            self._leave(min(self._guests, key=lambda each: each.heard_at_s))
        self._guests.append(guest)
        self._selector.register(guest.connection, selectors.EVENT_READ, guest)

    def _leave(self, guest: Guest) -> None:
        """Close and remove the incoming connection `guest`."""
        self._guests.remove(guest)
        self._unpoll(guest.connection)
        guest.connection.close()

    def _unpoll(self, connection: Connection) -> None:
        """Unregister a connection from the selector before it is closed; afterwards the selector
        would have to search all connections.
        """
        if self._selector is not None:
            self._selector.unregister(connection)

    def _tend(self, link: Link, now: Seconds) -> None:
        """Maintain the outgoing connection of `link`: connect, detect a silent peer, and reconnect
        if the peer is gone or silent for long.
        """
        connection = link.connection
        if connection is None:
            if now >= link.try_at_s:
                self._begin(link, now)
            return
        if connection.stage is not Stage.OPEN:
            connection.advance()
        if connection.problem is not None:
            if not link.polled:
                self._failed_handshake(connection.problem, link.address, now)
            elif link.up_since_s is not None:
                self._traffic.failed("lost")
            self._end(link, now)
            return
        if connection.stage is Stage.OPEN and not link.polled:
            assert self._selector is not None, "the mesh is open"
            self._selector.register(connection, selectors.EVENT_READ, link)
            link.polled = True
            self._send(link, Kind.HELLO, self.hello(now))
        if link.up_since_s is not None:
            if now - (link.heard_at_s or 0.0) > SILENCE_S:
                link.up_since_s, link.waits_since_s = None, now
                self._traffic.failed("silent")
        elif now - link.waits_since_s > CONNECT_AGAIN_S:
            self._end(link, now)

    def _begin(self, link: Link, now: Seconds) -> None:
        host, port = host_of(link.address), port_of(link.address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            connecting = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._traffic.failed("too many")
            self._complaints.say(
                "no connection to a replica can be opened", now, problem=error.strerror
            )
            self._pause(link, now)
            return
        _prepare(connecting)
        link.connection = Connection(connecting, self._identity, serving=False, now=now)
        link.waits_since_s = now
        if connecting.connect_ex((host, port)) not in {0, errno.EINPROGRESS}:
            link.connection.fail(Problem.REFUSED)

    def _end(self, link: Link, now: Seconds) -> None:
        """Close the connection of `link`, and schedule the next attempt to connect."""
        self._drop(link)
        link.up_since_s = None
        self._pause(link, now)

    def _pause(self, link: Link, now: Seconds) -> None:
        link.try_at_s = now + link.pause_s
        link.pause_s = min(2 * link.pause_s, _RECONNECT_S_MAX)

    def _drop(self, link: Link) -> None:
        if link.connection is not None:
            if link.polled:
                self._unpoll(link.connection)
            link.connection.close()
        link.connection, link.polled = None, False

    def _send(self, link: Link, kind: Kind, frame: bytes) -> bool:
        if link.connection is None or not link.connection.send(kind, frame):
            return False
        link.bytes_sent += 1 + len(frame)
        self._traffic.bytes_sent += 1 + len(frame)
        return True

    def _send_counted(self, link: Link, kind: Kind, frame: bytes) -> bool:
        if self._send(link, kind, frame):
            self._traffic.frames["sent", "sent"] += 1
            return True
        link.dropped += 1
        self._traffic.dropped()
        return False

    def _readable(self) -> list[Link | Guest]:
        """Return the connections that have received data, in the socket or in a buffer."""
        if self._selector is None:
            return []
        found = {id(key.data): key.data for key, _ in self._selector.select(0)}
        everybody: list[Link | Guest] = [*self._links.values(), *self._guests]
        for each in everybody:
            if each.connection is not None and each.connection.waiting():
                found[id(each)] = each
        return list(found.values())

    def _read(self, source: Link | Guest, messages_max: int, found: list[Message]) -> bool:
        """Read at most `messages_max` messages of `source` into `found`. Return True if no more are
        left.
        """
        for _ in range(messages_max):
            message = None if source.connection is None else source.connection.read()
            if message is None:
                return True
            self._take(source, message, found)
        return False

    def _take(self, source: Link | Guest, message: bytes, found: list[Message]) -> None:
        """Append a received message to `found` if its kind is known, and count it; else count it as
        unreadable.
        """
        kind = KINDS.get(message[0])
        if kind is None:
            self._traffic.unreadable()
            return
        if isinstance(source, Link):
            source.bytes_received += len(message)
        else:
            source.heard_at_s = self._beaten_at_s or 0.0
        if kind is Kind.HELLO:
            self._traffic.bytes_received += len(message)
        else:
            self._traffic.received(len(message))
        found.append(Message(source, kind, message[1:]))


def _listening(address: IpAddress, port: int) -> socket.socket:
    """Return a socket that listens on `port` at `address`. Raises `OSError`."""
    if address != EVERYWHERE:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=BACKLOG)
    return socket.create_server(
        ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
    )


def _prepare(connected: socket.socket) -> None:
    connected.setblocking(False)
    # Nagle's algorithm is disabled because frames are already collected.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
