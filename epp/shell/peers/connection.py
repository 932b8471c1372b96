"""One connection between replicas: a non-blocking socket and its work in a beat of the pump.

    server        "HMT" | version u8 | has a secret u8 | nonce, 32 bytes
    client        the nonce hashed with a key of the secret, 32 bytes
    both          a handshake of TLS 1.3 if there is a secret
    both          messages, each: length u32, little-endian | kind u8 | frame

The answer to the nonce is a cheap gate: it keeps strangers from everything that takes more time
than a hash. TLS then authenticates the peer. Whatever the peer does, each method takes bounded time
and raises nothing. A connection that cannot continue has a `problem`. Only `close` releases the
file descriptor, so that a selector never sees another file with the same number.
"""

import hmac
import secrets
import socket
import ssl
import struct
from enum import StrEnum
from typing import Final, TypeAlias

from epp.core.peers.frames import FRAME_BYTES_MAX
from epp.core.types import Seconds
from epp.shell.peers.secret import Identity, answer_to, origin_of

VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 1 + FRAME_BYTES_MAX
SENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum number of bytes queued for one peer: seconds of its live traffic, or a part of a
snapshot.
"""
READ_BYTES: Final = 64 * 1024
READS_PER_MESSAGE_MAX: Final = 32
"""Maximum number of reads from the socket for one message; TLS returns at most 16 KB at a time."""
WRITE_BYTES: Final = 64 * 1024
NONCE_BYTES: Final = 32
ANSWER_BYTES: Final = 32

_MAGIC: Final = b"HMT"
_GREETING: Final = struct.Struct(f"<3sBB{NONCE_BYTES}s")
_LENGTH: Final = struct.Struct("<I")
_NOT_NOW: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_Socket: TypeAlias = socket.socket


class Problem(StrEnum):
    """The reason why a connection between replicas failed or ended."""

    LOST = "lost"
    """The peer closed the connection, or disappeared."""
    REFUSED = "refused"
    """The connection ended because the peer could not be reached."""
    VERSION = "version"
    """The connection ended because the peer has another version or is not a replica."""
    SECRET = "secret"  # noqa: S105  a word
    """The connection ended because the peer does not know the secret, only one side has a secret,
    or the peer did not authenticate in time.
    """
    HANDSHAKE = "handshake"
    """The TLS handshake failed. A client that came so far knows the secret; a server may not."""
    MESSAGE = "message"
    """The connection ended because the peer sent a message that is invalid or too long."""
    CLOSED = "closed"
    """This process closed the connection to the peer."""


class Stage(StrEnum):
    """The progress of establishing a connection between replicas: gate, TLS handshake, then
    open.
    """

    CONNECTING = "connecting"
    GATE = "gate"
    TLS = "tls"
    OPEN = "open"


class Connection:
    """A connection to one peer. Call `advance` until the stage is `OPEN`; then use `send`, `flush`
    and `read`, and finally `close`.
    """

    def __init__(self, plain: _Socket, identity: Identity, *, serving: bool, now: Seconds) -> None:
        """Create a connection on the socket `plain`, which is connected if `serving`, else still
        connecting. This object closes the socket.
        """
        self.began_at_s = now
        self.stage = Stage.GATE if serving else Stage.CONNECTING
        self.problem: Problem | None = None
        self.origin = b""
        """Origin (8-byte id) in the peer's certificate, or b"" without a secret or before the TLS
        handshake.
        """
        self._identity = identity
        self._serving = serving
        self._nonce = b""
        self._socket: _Socket = plain
        self._incoming = bytearray()
        self._outgoing = bytearray()
        if serving:
            self._nonce = secrets.token_bytes(NONCE_BYTES)
            has_secret = identity.serving is not None
            self._outgoing += _GREETING.pack(_MAGIC, VERSION, has_secret, self._nonce)
            self.flush()

    def fileno(self) -> int:
        """Return the connection's file descriptor, as a selector needs it."""
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes queued for the peer and not sent yet."""
        return len(self._outgoing)

    def close(self) -> None:
        """Close the connection to the peer immediately and discard the data queued for it."""
        self.fail(Problem.CLOSED)
        self._socket.close()

    def fail(self, problem: Problem) -> None:
        """Record `problem`, if it is the connection's first one, and stop using the connection. Its
        file descriptor stays open until `close`.
        """
        if self.problem is None:
            self.problem = problem

    # The methods below establish the connection.

    def advance(self) -> None:
        """Continue to establish the connection, as far as received data allows. A failure is
        recorded in `problem`.
        """
        if self.problem is not None:
            return
        try:
            if self.stage is Stage.CONNECTING:
                self._connected()
            if self.stage is Stage.GATE:
                self.flush()
                if self._serving:
                    self._verify()
                else:
                    self._answer()
            if self.stage is Stage.TLS:
                self._shake_hands()
        except _NOT_NOW:
            pass
        except ssl.SSLError:
            self.fail(Problem.HANDSHAKE)
        except OSError:
            self.fail(Problem.LOST)

    def _connected(self) -> None:
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.fail(Problem.REFUSED)
            return
        try:
            self._socket.getpeername()
        except OSError:
            # The connection is still being established.
            return
        self.stage = Stage.GATE

    def _verify(self) -> None:
        """Check, as the server, whether the client's answer proves that it knows the secret. If so,
        go on with TLS; else record the problem.
        """
        answer = self._exactly(ANSWER_BYTES)
        if answer is None:
            return
        if hmac.compare_digest(answer, answer_to(self._nonce, self._identity.gate_key)):
            self._begin_tls(self._identity.serving)
        else:
            self.fail(Problem.SECRET)

    def _answer(self) -> None:
        """Send, as the client, the proof that this process knows the secret, and go on with TLS.
        Record a problem if the server's greeting does not fit.
        """
        greeting = self._exactly(_GREETING.size)
        if greeting is None:
            return
        magic, version, has_secret, nonce = _GREETING.unpack(greeting)
        if magic != _MAGIC or version != VERSION:
            self.fail(Problem.VERSION)
        elif bool(has_secret) != (self._identity.asking is not None):
            self.fail(Problem.SECRET)
        else:
            self._outgoing += answer_to(nonce, self._identity.gate_key)
            self.flush()
            if self._outgoing:
                # A new socket that cannot accept 32 bytes is unusable.
                self.fail(Problem.LOST)
            if self.problem is None:
                self._begin_tls(self._identity.asking)

    def _exactly(self, count: int) -> bytes | None:
        """Return exactly the first `count` received bytes, or None if some of them are still
        missing or the peer closed the connection, which is recorded.
        """
        came = self._socket.recv(count - len(self._incoming))
        if not came:
            self.fail(Problem.LOST)
            return None
        self._incoming += came
        if len(self._incoming) < count:
            return None
        whole = bytes(self._incoming)
        self._incoming.clear()
        return whole

    def _begin_tls(self, context: ssl.SSLContext | None) -> None:
        if context is None:
            self.stage = Stage.OPEN
            return
        self._socket = context.wrap_socket(
            self._socket, server_side=self._serving, do_handshake_on_connect=False
        )
        self.stage = Stage.TLS

    def _shake_hands(self) -> None:
        assert isinstance(self._socket, ssl.SSLSocket), "a secret is configured"
        self._socket.do_handshake()
        certificate = self._socket.getpeercert(binary_form=True)
        assert certificate is not None, "TLS requires a certificate"
        self.origin = origin_of(certificate)
        self.stage = Stage.OPEN

    # The methods below use the open connection.

    def send(self, kind: int, frame: bytes) -> bool:
        """Queue a message for the peer, and send it immediately if nothing else is queued.

        Return False if it was not queued: the queue is full, the message is too long, or the
        connection is not open.
        """
        if self.problem is not None or self.stage is not Stage.OPEN:
            return False
        length = 1 + len(frame)
        if length > MESSAGE_BYTES_MAX:
            # The peer would close the connection.
            return False
        waits = len(self._outgoing)
        if waits + length > SENT_BYTES_MAX:
            return False
        self._outgoing += _LENGTH.pack(length)
        self._outgoing.append(kind)
        self._outgoing += frame
        if not waits:
            self.flush()
        return True

    def flush(self) -> None:
        """Send as many queued bytes as the socket accepts. A failure is recorded in `problem`."""
        while self._outgoing and self.problem is None:
            try:
                # TLS requires the same bytes again after an attempt that failed.
                sent = self._socket.send(bytes(self._outgoing[:WRITE_BYTES]))
            except _NOT_NOW:
                return
            except OSError:
                self.fail(Problem.LOST)
                return
            del self._outgoing[:sent]

    def waiting(self) -> bool:
        """Return True if a complete message, or an invalid one, is in the receive buffer."""
        incoming = self._incoming
        if len(incoming) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(incoming)
        return len(incoming) >= _LENGTH.size + length or not 1 <= length <= MESSAGE_BYTES_MAX

    def read(self) -> bytes | None:
        """Return the next received message, starting with the byte of its kind, or None if none is
        complete.
        """
        if self.stage is not Stage.OPEN:
            return None
        for _ in range(READS_PER_MESSAGE_MAX):
            if self.waiting() or not self._receive():
                break
        return self._first() if self.waiting() else None

    def _receive(self) -> bool:
        """Read the data that the socket has received. Return True if there was any. The end of the
        connection is recorded in `problem`.
        """
        if self.problem is not None:
            return False
        try:
            came = self._socket.recv(READ_BYTES)
        except _NOT_NOW:
            return False
        except OSError:
            came = b""
        if not came:
            self.fail(Problem.LOST)
        self._incoming += came
        return bool(came)

    def _first(self) -> bytes | None:
        (length,) = _LENGTH.unpack_from(self._incoming)
        if not 1 <= length <= MESSAGE_BYTES_MAX:
            self._incoming.clear()
            self.fail(Problem.MESSAGE)
            return None
        end = _LENGTH.size + length
        message = bytes(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        return message
