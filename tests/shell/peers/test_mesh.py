"""Real sockets on loopback."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog
import zmq

from epp.core.peers.frames import FRAME_BYTES_MAX
from epp.shell.peers import mesh as mesh_module
from epp.shell.peers.carrier import Kind
from epp.shell.peers.mesh import (
    PEERS_MAX,
    RECEIVED_FRAMES_MAX,
    SENT_FRAMES_MAX,
    Mesh,
    address_of,
    host_of,
)
from epp.shell.peers.secret import keys_of
from epp.shell.peers.state import Traffic
from epp.shell.starting import StartError
from tests.envoy.rig import free_ports, until
from tests.shell.peers.rig import LOOPBACK, LOOPS, Picker, on, pickers, stranger

KEYS = keys_of(b"a secret of more than thirty-two bytes")
OTHER_KEYS = keys_of(b"another secret of more than thirty-two bytes")
SECRETS = pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "encrypted"])


def all_answer(made):
    return all(picker.mesh.answering == len(made) - 1 for picker in made)


async def told(sender, receivers, frame=b"hello"):
    """`sender` says `frame`, and every one of `receivers` gets it."""
    sender.exchange.told.append(frame)
    await until(
        lambda: all(frame in each.exchange.received for each in receivers), "the frame everywhere"
    )


@SECRETS
@pytest.mark.parametrize("loop", LOOPS)
def test_a_frame_reaches_every_peer(loop, keys):
    """And nobody else, ourselves neither, though our own address is in the list."""

    async def scene():
        async with pickers(3, keys) as made:
            await until(lambda: all_answer(made), "each other")
            for number, picker in enumerate(made):
                frame = bytes((number,)) * 10_000
                await told(picker, [other for other in made if other is not picker], frame)
                assert frame not in picker.exchange.received
            assert [len(picker.exchange.received) for picker in made] == [2, 2, 2]
            sent = [picker.traffic.frames["sent", "sent"] for picker in made]
            assert sent == [2, 2, 2]
            assert all(picker.traffic.frames["sent", "dropped"] == 0 for picker in made)
            assert all(picker.traffic.bytes_sent > 20_000 for picker in made)

    on(loop, scene())


async def test_our_own_address_is_left_out_by_our_own_origin():
    """Whatever its address is called; and it comes back when it is somebody else's."""
    async with Picker() as picker:
        picker.mesh.connect({picker.address})
        await until(lambda: picker.mesh.known == 0, "ourselves to be noticed")
        picker.mesh.connect({picker.address})
        assert picker.mesh.known == 0
        # Told that nobody is there, we forget what was ours.
        picker.mesh.connect(set())
        picker.mesh.connect({picker.address})
        assert picker.mesh.known == 1


async def test_discovery_changes():
    """Who joins is connected to, who left is not sent to any more; others notice nothing."""
    async with pickers(2) as (first, second), Picker() as third:
        await until(lambda: all_answer((first, second)), "each other")
        first.knows(second, third)
        await until(lambda: first.mesh.answering == 2, "the third")
        (kept, _) = first.mesh.rows(time.monotonic())
        await told(first, [second, third])
        first.knows(third)
        assert first.mesh.known == 1
        await told(first, [third], b"only for you")
        assert b"only for you" not in second.exchange.received
        assert kept.connected_s is not None
        assert third.traffic.failures == {}


async def test_there_are_never_more_peers_than_there_may_be():
    """Whatever discovery finds."""
    async with Picker() as picker:
        picker.mesh.connect({f"127.0.0.1:{port}" for port in range(1, 200)})
        assert picker.mesh.known == PEERS_MAX


@SECRETS
async def test_a_peer_that_restarts_is_connected_to_again(keys):
    """On the same address, with another origin."""
    async with Picker(keys) as first:
        second = Picker(keys)
        async with second:
            first.knows(second)
            await told_when_up(first, second)
            port = second.mesh.port
        await until(lambda: not first.mesh.up, "the silence", timeout_s=20)
        async with Picker(keys, port=port) as again:
            await told_when_up(first, again)
            (row,) = first.mesh.rows(time.monotonic())
            assert row.origin == again.exchange.origin.hex()[:8]


async def told_when_up(first, second):
    await until(lambda: first.mesh.up, "the peer", timeout_s=20)
    await told(first, [second], os.urandom(8))


def test_frames_are_exchanged_between_processes(monkeypatch):
    """And one that is killed is away, without an error."""
    monkeypatch.setattr(mesh_module, "SILENCE_S", 1.5)
    own, port = free_ports(2)

    async def scene():
        other = subprocess.Popen(
            [sys.executable, "-m", "tests.shell.peers.echo", str(port), str(own)],
            cwd=Path(__file__).parents[3],
        )
        try:
            async with Picker(port=own) as picker:
                picker.mesh.connect({f"127.0.0.1:{port}"})
                await until(lambda: picker.mesh.up, "the other process", timeout_s=30)

                def told_and_heard():
                    # Until its own connection is there it tells nobody.
                    picker.exchange.told.append(b"are you there")
                    return b"ereht uoy era" in picker.exchange.received

                await until(told_and_heard, "its voice", timeout_s=30)
                # It has not gone but does not take a thing.
                other.send_signal(signal.SIGSTOP)
                await until(lambda: not picker.mesh.up, "its silence", timeout_s=20)
                other.send_signal(signal.SIGCONT)
                await until(lambda: picker.mesh.up, "its voice", timeout_s=30)
                other.kill()
                await until(lambda: not picker.mesh.up, "its silence", timeout_s=20)
                assert picker.traffic.failures["silent"] == 2
        finally:
            other.kill()
            other.wait()

    on("asyncio", scene())


class Deaf:
    """A peer that connects in good order, answers hello once, and then never reads again."""

    def __init__(self):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvhwm = 1
        self.socket.rcvbuf = 4096
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def greet(self):
        """Answer the hello that is waiting; False: there is none yet."""
        try:
            name, message = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        assert message[0] == Kind.HELLO
        answer = message[:1] + b"deafpeer" + bytes(8)
        self.socket.send_multipart([name, answer])
        return True


async def test_a_peer_that_never_reads_costs_nothing(monkeypatch):
    """Its queue is bounded, what does not fit is counted, and the others are told everything."""
    monkeypatch.setattr(mesh_module, "SILENCE_S", 3600.0)
    with Deaf() as deaf:
        async with pickers(2) as (picker, other):
            picker.mesh.connect({other.address, f"127.0.0.1:{deaf.port}"})
            await until(deaf.greet, "its hello")
            await until(lambda: picker.mesh.answering == 2, "both peers")
            frames = [number.to_bytes(4, "big") * 25_000 for number in range(250)]
            for frame in frames:
                # As much as a beat may take; the other one takes 100 KB a beat.
                picker.exchange.told.append(frame)
                beats = picker.exchange.beats
                await until(lambda beats=beats: picker.exchange.beats > beats, "a beat")
            await until(lambda: len(other.exchange.received) == len(frames), "all frames")
            assert other.exchange.received == frames
            rows = {row.address: row for row in picker.mesh.rows(time.monotonic())}
            dropped = rows[f"127.0.0.1:{deaf.port}"].dropped
            assert rows[other.address].dropped == 0
            # What ZeroMQ and the kernel hold, no more.
            assert len(frames) - dropped <= 4 * SENT_FRAMES_MAX
            assert picker.traffic.frames["sent", "dropped"] == dropped > 0


async def test_a_flood_waits_at_its_sender_and_others_are_heard():
    """10^5 tiny frames: no more are taken in a beat than may be, and each beat goes on."""
    async with pickers(2) as (picker, other):
        await until(lambda: all_answer((picker, other)), "each other")
        with stranger() as socket:
            socket.sndhwm = 0
            socket.connect(f"tcp://{picker.address}")
            for _ in range(100_000):
                socket.send(b"F")
            beats = picker.exchange.beats
            await told(other, [picker], b"heard")
            heard_after = len(picker.exchange.received)
            await until(lambda: picker.exchange.beats > beats + 20, "beats")
            taken = len(picker.exchange.received)
            assert taken <= (picker.exchange.beats - beats + 2) * 256
            assert heard_after < 100_000
            assert picker.mesh.answering == 1


@pytest.mark.parametrize(
    "message",
    [[b""], [b"?"], [b"F", b"F"], [b"", b"F"], [b"P" * 100], [b"E"], [b"N"], [b"H"], [b"H" * 30]],
    ids=repr,
)
async def test_what_is_no_message_is_counted_and_no_more(message):
    """Whoever sends it; nothing of it reaches the exchange."""
    async with pickers(2) as (picker, other):
        await until(lambda: all_answer((picker, other)), "each other")
        with stranger() as socket:
            socket.connect(f"tcp://{picker.address}")
            socket.send_multipart(message)
            await until(lambda: picker.traffic.frames["received", "unreadable"] == 1, "the count")
        await told(other, [picker])
        assert picker.exchange.received == [b"hello"]


async def test_a_frame_of_two_megabytes_ends_the_connection_that_it_comes_by():
    """And nothing else. One that is sent by ourselves is not even tried."""
    async with pickers(2) as (picker, other):
        await until(lambda: all_answer((picker, other)), "each other")
        with stranger() as socket:
            socket.connect(f"tcp://{picker.address}")
            socket.send(b"F" + bytes(2 * 2**20))

            def after():
                # What waits behind it goes down with the connection.
                socket.send(b"F after")
                return b" after" in picker.exchange.received

            await until(after, "a frame after it")
            picker.exchange.received.clear()
        other.exchange.told.append(bytes(2 * 2**20))
        await told(other, [picker], bytes(FRAME_BYTES_MAX))
        lengths = {len(frame) for frame in picker.exchange.received}
        assert lengths <= {FRAME_BYTES_MAX, len(b" after")}
        assert other.traffic.frames["sent", "dropped"] == 1


@SECRETS
@pytest.mark.parametrize(
    "content",
    [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" * 500, bytes(range(256)) * 20, b"\x00", b"\xff", b""],
    ids=["HTTP", "ones", "noise", "zero", "one", "nothing"],
)
async def test_raw_bytes_on_the_port_disturb_nobody(content, keys, monkeypatch):
    """They are closed when the time of a handshake is over, at the latest."""
    monkeypatch.setattr(mesh_module, "_HANDSHAKE_MS", 200)
    async with pickers(2, keys) as made:
        picker, other = made
        await until(lambda: all_answer(made), "each other")
        reader, writer = await asyncio.open_connection("127.0.0.1", picker.mesh.port)
        writer.write(content)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1_000):
                pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await told(other, [picker])
        assert picker.exchange.received == [b"hello"]


@pytest.mark.parametrize("theirs", [OTHER_KEYS, None], ids=["another secret", "none"])
async def test_who_has_not_the_secret_is_never_connected(theirs):
    """It is counted, logged once a minute and no more; neither side hears a thing of the other."""
    with structlog.testing.capture_logs() as lines:
        async with pickers(2, KEYS) as made, Picker(theirs) as intruder:
            picker, other = made
            await until(lambda: all_answer(made), "each other")
            intruder.knows(picker)
            picker.mesh.connect({other.address, intruder.address})
            await until(lambda: picker.traffic.failures.get("handshake", 0) > 2, "failures")
            intruder.exchange.told.append(b"let me in")
            await told(other, [picker])
            assert intruder.mesh.answering == 0
            assert picker.mesh.answering == 1
            assert picker.exchange.received == [b"hello"]
            assert intruder.exchange.received == []
    about = [line for line in lines if "handshake" in line["event"] and line["times"] == 1]
    assert len(about) <= 2, "one of each replica"
    assert all("secret of" not in str(line) for line in lines)


async def test_who_knows_only_the_public_key_is_refused():
    """A server of CurveZMQ lets in anybody who knows that, were he not asked for his own."""
    with structlog.testing.capture_logs() as lines:
        async with Picker(KEYS) as picker:
            with stranger() as socket:
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.curve_serverkey = KEYS.public
                socket.connect(f"tcp://{picker.address}")
                socket.send(b"F let me in")
                await until(lambda: picker.traffic.failures.get("refused"), "the refusal")
                assert picker.exchange.received == []
    assert [line["event"] for line in lines] == ["a connection of a stranger was refused"]


async def test_in_plaintext_only_known_addresses_are_let_in(monkeypatch):
    """A stranger gets no message in, however it is cut; who becomes known is let in."""
    async with pickers(2) as (picker, other):
        monkeypatch.setattr(mesh_module, "CONNECT_AGAIN_S", 1.5)
        known = picker.mesh._admission.admits
        monkeypatch.setattr(picker.mesh._admission, "admits", lambda *_: False)
        other.mesh.connect(set())
        other.knows(picker)
        await until(lambda: picker.traffic.failures.get("refused", 0) > 0, "the refusal")
        assert other.mesh.answering == 0
        monkeypatch.setattr(picker.mesh._admission, "admits", known)
        await until(lambda: other.mesh.answering == 1, "the peer", timeout_s=20)
        await told(other, [picker])


async def test_too_many_connections_are_all_closed_and_peers_come_back(monkeypatch):
    """So that strangers cannot use up the files that a process may open."""
    monkeypatch.setattr(mesh_module, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(mesh_module, "REFUSAL_S", 0.1)
    async with pickers(2) as made:
        picker, other = made
        await until(lambda: all_answer(made), "each other")
        with contextlib.ExitStack() as opened:
            strangers = [
                opened.enter_context(socket.create_connection(("127.0.0.1", picker.mesh.port)))
                for _ in range(12)
            ]
            await until(lambda: picker.traffic.failures.get("too many"), "the refusal")
            for each in strangers:
                each.setblocking(False)

            def closed():
                for each in strangers:
                    try:
                        while each.recv(100):
                            pass
                    except BlockingIOError:
                        return False
                    except OSError:
                        pass
                return True

            await until(closed, "their end")
        await until(lambda: all_answer(made), "each other again", timeout_s=20)

        def heard():
            # What was under way when all were closed is lost.
            other.exchange.told.append(b"hello")
            return picker.exchange.received

        await until(heard, "a frame")


async def test_what_is_not_sent_does_not_hold_up_the_end(monkeypatch):
    """However much waits, for whomever."""
    monkeypatch.setattr(mesh_module, "SILENCE_S", 3600.0)
    with Deaf() as deaf:
        picker = Picker()
        async with picker:
            picker.mesh.connect({f"127.0.0.1:{deaf.port}", "127.0.0.1:1"})
            await until(deaf.greet, "its hello")
            await until(lambda: picker.mesh.up, "the peer")
            for _ in range(100):
                picker.mesh.send(bytes(100_000))
            began_at_s = time.monotonic()
            await picker.stop()
            # A bound that fails, no measurement: what waits has 0.2 s.
            assert time.monotonic() - began_at_s < 5


def test_a_port_that_is_taken_is_one_sentence():
    """And leaves nothing open."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        mesh = Mesh(bytes(8), Traffic(), address=LOOPBACK, port=port, keys=None)
        with pytest.raises(
            StartError,
            match=rf"^--peer-port {port} at 127.0.0.1 cannot be listened on: Address already in use",
        ):
            mesh.open()
        mesh.wait_closed()


async def test_a_mesh_tells_what_it_is():
    """For a person with a debugger, and for the page of peers."""
    async with pickers(2) as (picker, other):
        # Our own address is in the list too, until we have heard ourselves there.
        await until(lambda: picker.mesh.answering == picker.mesh.known == 1, "the peer alone")
        assert repr(picker.mesh) == "<Mesh [1 of 1 peers answer]>"
        (row,) = picker.mesh.rows(time.monotonic())
        assert (row.address, row.origin) == (other.address, other.exchange.origin.hex()[:8])
        assert row.connected_s >= 0
        assert row.heard_s >= 0
        assert row.bytes_sent > 0
        assert row.bytes_received > 0


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [("10.0.0.1", 9004, "10.0.0.1:9004"), ("fe80::1", 1, "[fe80::1]:1")],
)
def test_addresses_have_brackets_where_they_need_them(host, port, address):
    assert address_of(host, port) == address
    assert host_of(address) == host


def test_what_waits_of_one_peer_is_two_megabytes():
    """The worst that a peer can make us hold, beside what it never finishes to send."""
    assert RECEIVED_FRAMES_MAX * FRAME_BYTES_MAX <= 2 * 2**20
