"""Protection against connections that only open streams and reset them.

A stream that is reset before its answer costs the picker nearly as much as a served one. gRPC for
Python can reject neither a stream nor a connection before that cost. Each connection therefore has
an allowance of such streams, which every answered stream refills. A gateway whose clients leave
early never exhausts it; a connection with nothing but resets is closed. A stream that the picker lets
wait for its answer does not count.
"""

import os
import socket
from collections import OrderedDict
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final
from urllib.parse import unquote

ALLOWANCE_MAX: Final = 500
"""Maximum number of consecutive streams that a connection may reset before the picker's first
answer on them.
"""
CONNECTIONS_MAX: Final = 10_000

_FILES: Final = Path("/proc/self/fd")


class Connections:
    """The remaining allowance of each connection to reset streams, by the connection's peer in
    gRPC's spelling. The number of entries is bounded.
    """

    def __init__(self) -> None:
        self._left: OrderedDict[str, int] = OrderedDict()

    def answered(self, peer: str) -> None:
        """Note that a stream on the connection of `peer` got an answer, and refill the connection's
        allowance.
        """
        self._left.pop(peer, None)

    def abandoned(self, peer: str) -> bool:
        """Note that a stream of `peer` was reset before an answer. Return True if the connection
        exceeds its allowance of resets, which then begins anew.
        """
        left = self._left.get(peer, ALLOWANCE_MAX) - 1
        if left < 0:
            del self._left[peer]
            return True
        self._left[peer] = left
        self._left.move_to_end(peer)
        if len(self._left) > CONNECTIONS_MAX:
            self._left.popitem(last=False)
        return False


def cut(peer: str) -> bool:
    """Shut down this process's TCP connection to `peer`. Return False if no such connection exists
    any more.

    gRPC does not expose its sockets, so the function searches the open files of the process. gRPC
    then sees that the peer has left and cleans up. Outside Linux the function finds no connection.
    """
    wanted = _address(peer)
    if wanted is None or not _FILES.is_dir():
        return False
    for file in _FILES.iterdir():
        # Another thread may close the file and reuse its number meanwhile, so a duplicate is used.
        with suppress(OSError):
            if not os.readlink(file).startswith("socket:"):  # noqa: PTH115  not a path
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as found:
                if found.family in _FAMILIES and _host_port(found.getpeername()) == wanted:
                    found.shutdown(socket.SHUT_RDWR)
                    return True
    return False


_FAMILIES: Final = frozenset({socket.AF_INET, socket.AF_INET6})


def _address(peer: str) -> tuple[str, int] | None:
    """Parse a gRPC peer, "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000", to its host and port;
    return None for other kinds of peers.
    """
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in {"ipv4", "ipv6"} or not port.isdigit():
        return None
    try:
        return _host_port((host.removeprefix("[").removesuffix("]"), int(port)))
    except ValueError:
        return None


def _host_port(name: tuple[str, int] | tuple[str, int, int, int]) -> tuple[str, int]:
    """Return the host and port of a socket address, with an IPv4-mapped IPv6 address as IPv4."""
    host = ip_address(name[0].partition("%")[0])
    if isinstance(host, IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return str(host), name[1]
