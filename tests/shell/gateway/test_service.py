import asyncio
import contextlib
import socket

import pytest

from epp.flags.command_lines import parse_serve
from epp.flags.values import IpAddress
from epp.shell.gateway.service import _connection_age_max_s, _listen
from epp.shell.starting import StartError
from tests.envoy.rig import free_ports
from tests.transports import TRANSPORTS, transport_of


@pytest.fixture(params=TRANSPORTS)
async def transport(request):
    return transport_of(request.param, {})


@pytest.mark.parametrize(
    ("age", "drain", "expected"),
    [
        ("30m", "30s", 15.0),
        ("30m", "20s", 10.0),
        ("30m", "5m", 15.0),
        ("5s", "30s", 5.0),
        ("0s", "30s", 15.0),
        ("30m", "0s", 1800.0),
        ("0s", "0s", None),
        ("30m", "1s", 2.0),
    ],
)
def test_with_grpcio_connections_end_within_a_drain_and_at_their_age(age, drain, expected):
    """It has no other way to tell a gateway that it is to leave."""
    flags = parse_serve(
        ["--endpoints-file=x", f"--connection-age-max={age}", f"--drain-timeout={drain}"], {}
    )
    assert _connection_age_max_s(flags) == expected


ANYWHERE = IpAddress("::")


async def test_a_port_that_is_taken_is_told_by_its_flag(transport):
    """In the words of the system; a free one is listened on."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"^--grpc-port {port} cannot be .*already in use$"):
            await _listen(transport, "--grpc-port", port, ANYWHERE)
    await _listen(transport, "--grpc-port", port, ANYWHERE)
    await transport.stop(None)


@pytest.mark.parametrize(
    ("address", "reached"),
    [("127.0.0.1", {"127.0.0.1"}), ("::1", {"::1"}), ("::", {"127.0.0.1", "::1", "127.0.0.2"})],
)
async def test_a_port_is_taken_at_its_address_only(address, reached, transport):
    """At :: everywhere."""
    (port,) = free_ports(1)
    await _listen(transport, "--grpc-port", port, IpAddress(address))
    await transport.start()
    found = set()
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        with contextlib.suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            found.add(host)
    assert found == reached
    await transport.stop(None)


async def test_an_address_that_is_not_ours_is_told(transport):
    """In one sentence, with the address."""
    with pytest.raises(StartError, match=r"^--a 1234 at 192.0.2.1 cannot be .*requested address$"):
        await _listen(transport, "--a", 1234, IpAddress("192.0.2.1"))
    await transport.stop(None)
