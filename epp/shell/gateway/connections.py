"""Cuts connections that only open streams and reset them.

A stream that is reset before it was answered costs the picker nearly as much as one that is served,
and gRPC for Python can refuse neither a stream nor a connection before that cost is paid. So each
connection has an allowance of such streams, which every answered one refills: a gateway whose
clients leave early never uses it up, and one that does nothing else loses its connection.
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
"""Streams in a row that a connection may reset before the first of them was answered."""
CONNECTIONS_MAX: Final = 10_000

_FILES: Final = Path("/proc/self/fd")


class Connections:
    """What is left of the allowance of each connection, by its gRPC peer; few are remembered."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, int] = OrderedDict()

    def answered(self, peer: str) -> None:
        """A stream of `peer` got an answer."""
        self._left.pop(peer, None)

    def abandoned(self, peer: str) -> bool:
        """A stream of `peer` was reset unanswered; true: it was one too many, once."""
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
    """Shut down the TCP connection of this process to `peer`; false: there is none (any more).

    gRPC keeps its sockets to itself, so it is looked for among the open files. What is shut down is
    the connection: gRPC sees the peer leave and cleans up. Outside Linux nothing is found.
    """
    wanted = _address(peer)
    if wanted is None or not _FILES.is_dir():
        return False
    for file in _FILES.iterdir():
        # A file may be closed, and its number taken by another, while we look: the copy is ours.
        with suppress(OSError):
            if not os.readlink(file).startswith("socket:"):  # noqa: PTH115  it is no path
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as found:
                if found.family in _FAMILIES and _host_port(found.getpeername()) == wanted:
                    found.shutdown(socket.SHUT_RDWR)
                    return True
    return False


_FAMILIES: Final = frozenset({socket.AF_INET, socket.AF_INET6})


def _address(peer: str) -> tuple[str, int] | None:
    """Of "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000"; None: it is no TCP peer."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in {"ipv4", "ipv6"} or not port.isdigit():
        return None
    try:
        return _host_port((host.removeprefix("[").removesuffix("]"), int(port)))
    except ValueError:
        return None


def _host_port(name: tuple[str, int] | tuple[str, int, int, int]) -> tuple[str, int]:
    """IPv4 in its own spelling also where the socket is one of IPv6."""
    host = ip_address(name[0].partition("%")[0])
    if isinstance(host, IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return str(host), name[1]
