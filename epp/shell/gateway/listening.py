"""Takes the ports that gRPC is served on."""

import socket

import grpc
import grpc.aio

from epp.shell.starting import cannot_listen


def listen(
    server: grpc.aio.Server, flag: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> None:
    """Take the `port` that `flag` names, on all interfaces. Raises `StartError` if it cannot be."""
    try:
        # gRPC would tell the reason on standard error only, and not as a log line.
        _try_port(port)
        if credentials is None:
            server.add_insecure_port(f"[::]:{port}")
        else:
            server.add_secure_port(f"[::]:{port}", credentials)
    except (OSError, RuntimeError) as error:
        raise cannot_listen(flag, port, error) from error


def _try_port(port: int) -> None:
    """Raises `OSError` if `port` cannot be listened on."""
    if socket.has_dualstack_ipv6():
        socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
    else:
        socket.create_server(("", port)).close()
