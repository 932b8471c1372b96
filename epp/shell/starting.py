"""What can keep the picker from starting, each in one sentence: ports and files."""

import os
import socket

import grpc
import grpc.aio

from epp.shell.watch import FileWatcher


class StartError(Exception):
    """Why the picker cannot start: one sentence a line."""


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


def cannot_listen(flag: str, port: int, error: OSError | RuntimeError) -> StartError:
    """The error that says why `port` cannot be had."""
    number = error.errno if isinstance(error, OSError) else None
    why = os.strerror(number) if number else error
    return StartError(f"{flag} {port} cannot be listened on: {why}")


def first_read(watcher: FileWatcher, name: str) -> bytes:
    """The content of a file that must be there at start. Raises `StartError`."""
    try:
        return watcher.read()
    except OSError as error:
        raise StartError(f"{name} cannot be read: {error.strerror or error}") from error
