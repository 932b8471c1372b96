"""Takes the ports that gRPC is served on."""

import socket

import grpc
import grpc.aio

from epp.configuration.flags import IpAddress
from epp.shell.starting import EVERYWHERE, cannot_listen


def listen(
    server: grpc.aio.Server,
    flag: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
    *,
    address: IpAddress = EVERYWHERE,
) -> None:
    """Take the `port` that `flag` names, at `address`. Raises `StartError` if it cannot be."""
    try:
        # gRPC would tell the reason on standard error only, and not as a log line.
        _try_port(address, port)
        host = f"[{address}]" if ":" in address else address
        if credentials is None:
            server.add_insecure_port(f"{host}:{port}")
        else:
            server.add_secure_port(f"{host}:{port}", credentials)
    except (OSError, RuntimeError) as error:
        raise cannot_listen(flag, port, error, address) from error


def _try_port(address: IpAddress, port: int) -> None:
    """Raises `OSError` if `port` cannot be listened on."""
    if address == EVERYWHERE and not socket.has_dualstack_ipv6():
        socket.create_server(("", port)).close()
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    dualstack = address == EVERYWHERE
    socket.create_server((address, port), family=family, dualstack_ipv6=dualstack).close()
