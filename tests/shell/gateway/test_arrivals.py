"""When what was read late came."""

import socket
import time
from contextlib import closing
from itertools import pairwise

import pytest

from epp.shell.gateway.arrivals import arrivals, newest_data_age_s
from tests.envoy.rig import until
from tests.shell.gateway.test_http2 import HEADERS, Service, connected, framed
from tests.transports import carried


def test_streams_of_one_read_came_evenly_since_the_loop_looked():
    """The last of them when the kernel took in the newest bytes."""
    assert arrivals(4, 10.0, 1.0, 0.2) == pytest.approx([9.2, 9.4, 9.6, 9.8])
    assert arrivals(1, 10.0, 1.0, 0.2) == pytest.approx([9.8])
    assert arrivals(1, 10.0, 1.0, None) == pytest.approx([9.5])
    assert arrivals(3, 10.0, 1.0, None) == pytest.approx([9.25, 9.5, 9.75])


@pytest.mark.parametrize("age_s", [5.0, 1.0, 0.0, -1.0, None])
def test_nothing_came_before_the_loop_looked_or_after_it_was_read(age_s):
    """The kernel's clock ticks in whole milliseconds, or in ten of them."""
    found = arrivals(7, 10.0, 1.0, age_s)
    assert found == sorted(found)
    assert all(9.0 <= came_s <= 10.0 for came_s in found)


def test_the_kernel_tells_of_tcp_alone():
    assert newest_data_age_s(None) is None
    one, other = socket.socketpair()
    with closing(one), closing(other):
        assert newest_data_age_s(one) is None
    with socket.socket() as closed:
        pass
    assert newest_data_age_s(closed) is None


def test_a_connection_knows_when_its_newest_bytes_came():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with closing(ours), closing(theirs):
            ours.send(b"x")
            theirs.recv(1)
            age_s = newest_data_age_s(theirs)
            if age_s is None:
                pytest.skip("this kernel does not tell of TCP connections")
            time.sleep(0.1)
            assert newest_data_age_s(theirs) >= age_s + 0.05


class Late:
    """A loop that has not looked for a second."""

    def overdue_s(self, now):
        return 1.0

    def backlog_s(self, now):
        return 1.0


@pytest.mark.parametrize("streams", [1, 50])
async def test_each_stream_of_a_late_read_has_waited_its_own_time(streams):
    """All in one read; the kernel took in the last of them just before."""
    service = Service()
    transport = service.transport()
    transport.lag = Late()
    async with carried(transport) as port, connected(port) as client:
        for _ in range(streams):
            stream = client.engine.send_request(HEADERS)
            client.engine.send_data(stream, framed(b"x"))
        client.flush()
        await until(lambda: len(service.calls) == streams, "the streams")
        (connection,) = transport._connections
        waited_s = [connection.heard_at_s - call.wire.came_at_s for call in service.calls]
    assert min(waited_s) < 0.9
    if streams > 1:
        assert max(waited_s) > 0.5
        falls = sum(earlier > later for earlier, later in pairwise(waited_s))
        assert falls > streams / 2
