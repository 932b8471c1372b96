"""One connection between replicas: a socket that never blocks, and what is done with it in a beat.

    who serves    "HMT" | version u8 | has a secret u8 | nonce, 32 bytes
    who asks      the nonce hashed with a key of the secret, 32 bytes
    both          a handshake of TLS 1.3, where there is a secret
    both          messages, each: length u32, little-endian | kind u8 | frame

The answer to the nonce is a gate and not the lock: it keeps strangers from everything that costs
more than a hash, before TLS verifies who is there. Whatever the other side does, a call here takes
bounded time and raises nothing: a connection that cannot go on has a `problem`,
and only `close` gives its file back, so that a selector never meets another under its number.
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
"""That wait for one peer: seconds of what is sent live, a part of a snapshot."""
READ_BYTES: Final = 64 * 1024
READS_PER_MESSAGE_MAX: Final = 32
"""TLS gives at most 16 KB at a time, whoever dribbles less."""
WRITE_BYTES: Final = 64 * 1024
NONCE_BYTES: Final = 32
ANSWER_BYTES: Final = 32

_MAGIC: Final = b"HMT"
_GREETING: Final = struct.Struct(f"<3sBB{NONCE_BYTES}s")
_LENGTH: Final = struct.Struct("<I")
_NOT_NOW: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_Socket: TypeAlias = socket.socket


class Problem(StrEnum):
    """Why a connection ended."""

    LOST = "lost"
    """The other side closed it, or is gone."""
    REFUSED = "refused"
    """It could not be reached."""
    VERSION = "version"
    """What answers is of another version, or no replica."""
    SECRET = "secret"  # noqa: S105  a word
    """It does not know our secret, or one of us has none."""
    HANDSHAKE = "handshake"
    """TLS failed although it knows the secret."""
    MESSAGE = "message"
    """It sent what is no message, or one that is longer than any may be."""
    CLOSED = "closed"
    """By ourselves."""


class Stage(StrEnum):
    """How far a connection has come."""

    CONNECTING = "connecting"
    GATE = "gate"
    TLS = "tls"
    OPEN = "open"


class Connection:
    """`advance` until it is `OPEN`; then `send` and `flush`, `read`. `close` in the end."""

    def __init__(self, plain: _Socket, identity: Identity, *, serving: bool, now: Seconds) -> None:
        """`plain`: connected where `serving`, else being connected; closed by this object."""
        self.began_at_s = now
        self.stage = Stage.GATE if serving else Stage.CONNECTING
        self.problem: Problem | None = None
        self.origin = b""
        """Of the other side, as its certificate says; b"" where there is no secret."""
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
        """For a selector."""
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        """That wait here."""
        return len(self._outgoing)

    def close(self) -> None:
        """At once; what waits is not sent."""
        self.fail(Problem.CLOSED)
        self._socket.close()

    def fail(self, problem: Problem) -> None:
        """It cannot go on, by the first problem that is told; its file stays open until `close`."""
        if self.problem is None:
            self.problem = problem

    # Until it is open.

    def advance(self) -> None:
        """Go on with the handshake as far as what came allows."""
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
            # Not yet.
            return
        self.stage = Stage.GATE

    def _verify(self) -> None:
        """Of the side that serves: whether the other knows the secret."""
        answer = self._exactly(ANSWER_BYTES)
        if answer is None:
            return
        if hmac.compare_digest(answer, answer_to(self._nonce, self._identity.gate_key)):
            self._begin_tls(self._identity.serving)
        else:
            self.fail(Problem.SECRET)

    def _answer(self) -> None:
        """Of the side that asks: show that we know the secret."""
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
                # 32 bytes that find no room are no beginning.
                self.fail(Problem.LOST)
            if self.problem is None:
                self._begin_tls(self._identity.asking)

    def _exactly(self, count: int) -> bytes | None:
        """The first `count` bytes that come, and not one that follows; None: not all are there."""
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
        assert isinstance(self._socket, ssl.SSLSocket), "there is a secret"
        self._socket.do_handshake()
        certificate = self._socket.getpeercert(binary_form=True)
        assert certificate is not None, "one was required"
        self.origin = origin_of(certificate)
        self.stage = Stage.OPEN

    # Once it is open.

    def send(self, kind: int, frame: bytes) -> bool:
        """Whether there was room for it; it is sent at once if nothing waits, else by `flush`."""
        if self.problem is not None or self.stage is not Stage.OPEN:
            return False
        length = 1 + len(frame)
        if length > MESSAGE_BYTES_MAX:
            # The other side would close the connection.
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
        """Send what waits, as much as is taken without waiting."""
        while self._outgoing and self.problem is None:
            try:
                # TLS wants to see the same bytes again where it could not send them.
                sent = self._socket.send(bytes(self._outgoing[:WRITE_BYTES]))
            except _NOT_NOW:
                return
            except OSError:
                self.fail(Problem.LOST)
                return
            del self._outgoing[:sent]

    def waiting(self) -> bool:
        """A whole message has come that was not read, or what is none."""
        incoming = self._incoming
        if len(incoming) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(incoming)
        return len(incoming) >= _LENGTH.size + length or not 1 <= length <= MESSAGE_BYTES_MAX

    def read(self) -> bytes | None:
        """The next message, the kind first; None: none has come in whole, or there is a `problem`."""
        if self.stage is not Stage.OPEN:
            return None
        for _ in range(READS_PER_MESSAGE_MAX):
            if self.waiting() or not self._receive():
                break
        return self._first() if self.waiting() else None

    def _receive(self) -> bool:
        """Take in what has come; whether there was anything."""
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
