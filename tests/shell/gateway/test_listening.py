import asyncio
import contextlib
import socket

import grpc.aio
import pytest

from epp.configuration.flags import IpAddress
from epp.shell.gateway.listening import listen
from epp.shell.starting import StartError
from tests.envoy.rig import free_ports


async def test_a_port_that_is_taken_is_told_by_its_flag():
    """In the words of the system; a free one is listened on."""
    server = grpc.aio.server()
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"^--grpc-port {port} cannot be .*already in use$"):
            listen(server, "--grpc-port", port)
    listen(server, "--grpc-port", port)
    await server.stop(None)


@pytest.mark.parametrize(
    ("address", "reached"),
    [("127.0.0.1", {"127.0.0.1"}), ("::1", {"::1"}), ("::", {"127.0.0.1", "::1", "127.0.0.2"})],
)
async def test_a_port_is_taken_at_its_address_only(address, reached):
    """At :: everywhere."""
    server = grpc.aio.server()
    (port,) = free_ports(1)
    listen(server, "--grpc-port", port, address=IpAddress(address))
    await server.start()
    found = set()
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        with contextlib.suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            found.add(host)
    assert found == reached
    await server.stop(None)


async def test_an_address_that_is_not_ours_is_told():
    """In one sentence, with the address."""
    server = grpc.aio.server()
    with pytest.raises(StartError, match=r"^--a 1234 at 192.0.2.1 cannot be .*requested address$"):
        listen(server, "--a", 1234, address=IpAddress("192.0.2.1"))
    await server.stop(None)
