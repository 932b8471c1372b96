import socket

import grpc.aio
import pytest

from epp.shell.gateway.listening import listen
from epp.shell.starting import StartError


async def test_a_port_that_is_taken_is_told_by_its_flag():
    """In the words of the system; a free one is listened on."""
    server = grpc.aio.server()
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"^--grpc-port {port} cannot be .*already in use$"):
            listen(server, "--grpc-port", port)
    listen(server, "--grpc-port", port)
    await server.stop(None)
