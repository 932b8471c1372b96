import asyncio
import math
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from epp.shell.gateway import envoy_admin
from epp.shell.gateway.envoy_admin import ACTIVE, LOOK_S, EnvoyAdmin


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Admin:
    """An admin interface on loopback: what it was asked, and what it answers."""

    def __init__(self):
        self.asked = []
        self.active = 0
        self.answer = None
        """In place of the right one; "silent": none at all."""

    async def serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head.split(b" HTTP/")[0].decode())
        if self.answer == "silent":
            await reader.read()
        elif self.answer is not None:
            writer.write(self.answer)
        else:
            body = b"OK\n"
            if b"/stats" in head:
                # Another of the same ending is not ours.
                body = f"http.readiness.x: 7\n{ACTIVE}: {self.active}\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        writer.close()


@asynccontextmanager
async def serving(admin):
    server = await asyncio.start_server(admin.serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
def clock():
    return Clock()


async def test_clients_are_sent_away_by_the_health_of_envoy():
    """Listeners stay open: who still comes by an old route is served."""
    admin = Admin()
    async with serving(admin) as port:
        await EnvoyAdmin(port).send_away()
    assert admin.asked == ["POST /healthcheck/fail"]


async def test_clients_are_called_back_by_a_picker_that_starts():
    """Without a word where nobody listens yet."""
    admin = Admin()
    async with serving(admin) as port:
        await EnvoyAdmin(port).call_back()
    assert admin.asked == ["POST /healthcheck/ok"]
    with capture_logs() as lines:
        await EnvoyAdmin(port).call_back()
    assert lines == []


async def test_it_is_idle_since_the_last_look_that_saw_a_request(clock):
    """And since it was sent away at the earliest."""
    admin = Admin()
    async with serving(admin) as port:
        envoy = EnvoyAdmin(port, clock)
        await envoy.send_away()
        clock.now += 3.0
        admin.active = 2
        assert await envoy.idle_for_s() == 0.0
        assert envoy.active_requests == 2
        admin.active = 0
        clock.now += 5.0
        assert await envoy.idle_for_s() == 5.0
        assert envoy.active_requests == 0


async def test_it_is_looked_at_now_and_then(clock):
    """However often somebody asks."""
    admin = Admin()
    async with serving(admin) as port:
        envoy = EnvoyAdmin(port, clock)
        for _ in range(5):
            await envoy.idle_for_s()
        assert len(admin.asked) == 1
        clock.now += LOOK_S
        await envoy.idle_for_s()
        assert len(admin.asked) == 2


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 404 Not Found\r\n\r\n", b"", b"nonsense", b"\xff" * 200_000, "silent"],
    ids=["404", "nothing", "no HTTP", "too much", "silence"],
)
async def test_an_envoy_that_does_not_answer_is_taken_for_gone_and_told_once(
    answer, clock, monkeypatch
):
    """Nobody waits for it; one that answers again is waited for."""
    monkeypatch.setattr(envoy_admin, "TIMEOUT_S", 0.1)
    admin = Admin()
    admin.answer = answer
    async with serving(admin) as port:
        envoy = EnvoyAdmin(port, clock)
        with capture_logs() as lines:
            for _ in range(3):
                clock.now += LOOK_S
                assert await envoy.idle_for_s() == math.inf
        assert len(lines) == 1
        assert lines[0]["port"] == port
        admin.answer = None
        admin.active = 1
        clock.now += LOOK_S
        assert await envoy.idle_for_s() == 0.0


async def test_where_nobody_listens_it_is_gone(clock):
    """As after a crash of its container."""
    async with serving(Admin()) as port:
        pass
    envoy = EnvoyAdmin(port, clock)
    await envoy.send_away()
    assert await envoy.idle_for_s() == math.inf
