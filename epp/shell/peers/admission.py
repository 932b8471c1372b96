"""Who may connect to --peer-port: by ZAP (https://rfc.zeromq.org/spec/27), before any message.

With a secret: who knows it, from wherever. Without: who connects from the address of a replica, or
from this machine. ZeroMQ holds any number of parts of one unfinished message in memory, whatever
its limits, so that strangers must not get as far as sending one.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

import zmq
from zmq.utils import z85

from epp.shell.peers.secret import CurveKeys

ANSWERS_PER_BEAT_MAX: Final = 64
DOMAIN: Final = "homing"
_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_ACCEPTED: Final = b"200", b"OK"
_REFUSED: Final = b"400", b"no replica of ours"


class Admission:
    """Asked by the sockets of `context` about each connection that would speak to them."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: CurveKeys | None) -> None:
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._key = None if keys is None else z85.decode(keys.public)
        self.hosts: frozenset[str] = frozenset()
        """Addresses of the replicas that are known."""

    def answer(self) -> list[str]:
        """Answer what is asked; the addresses of who was refused."""
        refused: list[str] = []
        for _ in range(ANSWERS_PER_BEAT_MAX):
            if not self._socket.poll(0, zmq.POLLIN):
                break
            asked = self._socket.recv_multipart()
            address = asked[3].decode("ascii", "replace")
            admitted = self.admits(address, asked[6:])
            if not admitted:
                refused.append(address)
            status, text = _ACCEPTED if admitted else _REFUSED
            self._socket.send_multipart([_VERSION, asked[1], status, text, b"", b""])
        return refused

    def admits(self, address: str, credentials: list[bytes]) -> bool:
        """Whether who connects from `address` and shows `credentials` is let in."""
        if self._key is not None:
            return credentials == [self._key]
        host = plain_host(address)
        return host is not None and (host.is_loopback or str(host) in self.hosts)

    def close(self) -> None:
        self._socket.close()


def plain_host(address: str) -> IPv4Address | IPv6Address | None:
    """The address without a zone, and IPv4 as IPv4; None: it is no IP address."""
    try:
        host = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return mapped or host
