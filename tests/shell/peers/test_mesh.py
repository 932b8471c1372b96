"""Real sockets on loopback."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog

from epp.core.peers.frames import FRAME_BYTES_MAX
from epp.shell.peers import mesh as mesh_module
from epp.shell.peers.connection import SENT_BYTES_MAX, Connection
from epp.shell.peers.mesh import PEERS_MAX, Mesh
from epp.shell.peers.secret import stranger as no_secret
from epp.shell.peers.state import Traffic
from epp.shell.starting import StartError
from tests.envoy.rig import free_ports, until
from tests.shell.peers.rig import LOOPBACK, LOOPS, Picker, admitted, message, on, pickers, speaker

SECRET = b"a secret of more than thirty-two bytes"
OTHER_SECRET = b"another secret of more than thirty-two bytes"
KERNEL_BYTES_MAX = 6 * 2**20
"""Of one connection of loopback: the greatest buffers by /proc/sys/net/ipv4/tcp_wmem and tcp_rmem are
4 and 6 MB, of which half is room for frames."""
SECRETS = pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])


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
def test_a_frame_reaches_every_peer(loop, secret):
    """And nobody else, ourselves neither, though our own address is in the list."""

    async def scene():
        async with pickers(3, secret) as made:
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
async def test_a_peer_that_restarts_is_connected_to_again(secret):
    """On the same address, with another origin."""
    async with Picker(secret) as first:
        second = Picker(secret)
        async with second:
            first.knows(second)
            await told_when_up(first, second)
            port = second.mesh.port
        await until(lambda: not first.mesh.up, "the silence", timeout_s=20)
        async with Picker(secret, port=port) as again:
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
                assert picker.traffic.failures == {"silent": 1, "lost": 1}
        finally:
            other.kill()
            other.wait()

    on("asyncio", scene())


class Deaf:
    """A peer that connects in good order, answers hello once, and then never reads again."""

    def __init__(self):
        self._bound = socket.create_server(("127.0.0.1", 0))
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._bound.setblocking(False)
        self.port = self._bound.getsockname()[1]
        self._connection = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bound.close()
        if self._connection is not None:
            self._connection.close()

    def greet(self):
        """Answer the hello that is waiting; False: there is none yet."""
        if self._connection is None:
            try:
                accepted, _ = self._bound.accept()
            except BlockingIOError:
                return False
            accepted.setblocking(False)
            self._connection = Connection(accepted, no_secret(), serving=True, now=0.0)
        self._connection.advance()
        hello = self._connection.read()
        if hello is None:
            return False
        assert hello[:1] == b"H"
        return self._connection.send(hello[0], b"deafpeer" + bytes(8))


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
            # What waits here and what the kernel holds, no more.
            held = (len(frames) - dropped) * len(frames[0])
            assert held <= SENT_BYTES_MAX + KERNEL_BYTES_MAX
            assert picker.traffic.frames["sent", "dropped"] == dropped > 0


@contextlib.asynccontextmanager
async def flooding(port):
    """A thread that sends 10^5 tiny frames, as fast as they are taken."""
    async with speaker(port, origin=b"floodpee") as connected:

        def flood():
            with contextlib.suppress(OSError):
                connected.sendall(message(b"F") * 100_000)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            yield
        finally:
            connected.shutdown(socket.SHUT_RDWR)
            thread.join()


async def test_a_flood_waits_at_its_sender_and_others_are_heard():
    """10^5 tiny frames: no more are taken in a beat than may be, and each beat goes on."""
    async with pickers(2) as (picker, other):
        await until(lambda: all_answer((picker, other)), "each other")
        async with flooding(picker.mesh.port):
            beats = picker.exchange.beats
            await told(other, [picker], b"heard")
            heard_after = len(picker.exchange.received)
            await until(lambda: picker.exchange.beats > beats + 20, "beats")
            taken = len(picker.exchange.received)
            assert taken <= (picker.exchange.beats - beats + 2) * 256
            assert heard_after < 100_000
            assert picker.mesh.answering == 1


@pytest.mark.parametrize(
    "said",
    [b"?", b"P" * 100, b"E", b"N", b"H", b"H" * 30],
    ids=repr,
)
async def test_what_is_no_message_is_counted_and_no_more(said):
    """Whoever sends it; nothing of it reaches the exchange."""
    async with pickers(2) as (picker, other):
        await until(lambda: all_answer((picker, other)), "each other")
        async with speaker(picker.mesh.port) as connected:
            connected.sendall(message(said[:1], said[1:]))
            await until(lambda: picker.traffic.frames["received", "unreadable"] == 1, "the count")
        await told(other, [picker])
        assert picker.exchange.received == [b"hello"]


@pytest.mark.parametrize("length", [0, 1 + FRAME_BYTES_MAX + 1, 2**32 - 1])
async def test_a_length_that_no_message_has_ends_the_connection_that_it_comes_by(length):
    """And nothing else. A frame that is too long is not even tried by ourselves."""
    async with pickers(2) as (picker, other):
        await until(lambda: all_answer((picker, other)), "each other")
        async with speaker(picker.mesh.port, origin=b"longpeer") as connected:
            connected.sendall(message(b"F", b"before") + length.to_bytes(4, "little"))

            connected.setblocking(False)

            def closed():
                try:
                    return not connected.recv(1000)
                except BlockingIOError:
                    return False
                except ConnectionResetError:
                    return True

            await until(closed, "its end")
        other.exchange.told.append(bytes(2 * 2**20))
        await told(other, [picker], bytes(FRAME_BYTES_MAX))
        assert picker.exchange.received == [b"before", bytes(FRAME_BYTES_MAX)]
        assert other.traffic.frames["sent", "dropped"] == 1


@SECRETS
@pytest.mark.parametrize(
    "content",
    [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" * 500, bytes(range(256)) * 20, b"\x00", b"\xff", b""],
    ids=["HTTP", "ones", "noise", "zero", "one", "nothing"],
)
async def test_raw_bytes_on_the_port_disturb_nobody(content, secret, monkeypatch):
    """They are closed when the time of a handshake is over, at the latest."""
    monkeypatch.setattr(mesh_module, "NEWCOMER_S_MAX", 0.2)
    async with pickers(2, secret) as made:
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


@pytest.mark.parametrize("theirs", [OTHER_SECRET, None], ids=["another secret", "none"])
async def test_who_has_not_the_secret_is_never_connected(theirs):
    """It is counted, logged once a minute and no more; neither side hears a thing of the other."""
    with structlog.testing.capture_logs() as lines:
        async with pickers(2, SECRET) as made, Picker(theirs) as intruder:
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


@SECRETS
async def test_strangers_do_not_make_replicas_wait(secret):
    """Three hundred connections that say nothing, or nonsense, before the replicas come."""
    async with Picker(secret) as picker, contextlib.AsyncExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection(("127.0.0.1", picker.mesh.port)))
            for _ in range(300)
        ]
        for each in strangers[::2]:
            each.send(b"x" * 20)
        others = [await opened.enter_async_context(Picker(secret)) for _ in range(8)]
        for other in others:
            other.knows(picker)
        await until(lambda: all(other.mesh.answering for other in others), "all of them")
        for other in others:
            await told(other, [picker], other.exchange.origin)
        assert picker.traffic.failures["too many"] > 0


async def test_a_stranger_that_says_nothing_is_closed_in_time(monkeypatch):
    """However few they are."""
    monkeypatch.setattr(mesh_module, "NEWCOMER_S_MAX", 0.2)
    async with Picker(SECRET) as picker:
        with socket.create_connection(("127.0.0.1", picker.mesh.port)) as silent:
            silent.setblocking(False)
            greeting = []

            def closed():
                with contextlib.suppress(BlockingIOError):
                    greeting.append(silent.recv(100))
                return greeting[-1:] == [b""]

            await until(closed, "its end")
        assert picker.traffic.failures == {"handshake": 1}


async def test_a_replica_speaks_for_itself_alone():
    """In plaintext who came first has the name; who has it may come anew from its own address."""
    with structlog.testing.capture_logs() as lines:
        async with Picker() as picker, speaker(picker.mesh.port, origin=b"original") as first:
            first.sendall(message(b"F", b"by the first"))
            await until(lambda: picker.exchange.received, "its frame")
            async with speaker(picker.mesh.port, origin=b"original", host="127.0.0.2") as liar:
                liar.sendall(message(b"F", b"by a liar"))
                await until(lambda: picker.traffic.failures.get("origin"), "the refusal")
            async with speaker(picker.mesh.port, origin=b"original") as again:
                again.sendall(message(b"F", b"by the first again"))
                await until(lambda: b"by the first again" in picker.exchange.received, "its frame")
            # What a liar says is nobody's, which the exchange takes from nobody.
            told_by = dict(zip(picker.exchange.received, picker.exchange.origins, strict=True))
            assert told_by.pop(b"by a liar", b"") == b""
            assert told_by == {b"by the first": b"original", b"by the first again": b"original"}
    assert [line["address"] for line in lines if "uses the origin" in line["event"]] == [
        "127.0.0.2"
    ]


async def test_with_a_secret_an_origin_is_that_of_the_certificate():
    """Whatever a hello says: to pass for another takes its key."""
    async with pickers(2, SECRET) as (picker, other):
        await until(lambda: all_answer((picker, other)), "each other")
        await told(other, [picker])
        assert picker.exchange.origins == [other.identity.origin]
        other.mesh._origin = b"somebody"
        await until(lambda: picker.traffic.failures.get("origin"), "the refusal")


FLOODED = """
import asyncio, sys, time
from tests.shell.peers.rig import Picker

async def main():
    async with Picker() as picker:
        print(picker.mesh.port, flush=True)
        while True:
            # So long that heartbeats and deadlines of those who are gone fall due meanwhile.
            await asyncio.to_thread(sys.stdin.readline)
            time.sleep(5)
            print("awake", flush=True)

asyncio.run(main())
"""


def test_who_floods_and_leaves_while_we_stand_still_does_not_end_us():
    """Twenty connections whose input has stopped because nobody reads it, and then end at once."""
    with subprocess.Popen(
        [sys.executable, "-c", FLOODED],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            port = int(process.stdout.readline())
            with contextlib.ExitStack() as opened:
                flood = [
                    opened.enter_context(admitted(port, origin=b"flood%03d" % number))
                    for number in range(20)
                ]
                for each in flood:
                    each.setblocking(False)
                process.stdin.write("\n")
                process.stdin.flush()
                taken = 1
                while taken:
                    taken = sum(sent_now(each, message(b"F", b"x" * 2_000) * 100) for each in flood)
                for each in flood[::2]:
                    # It ends by a reset, the others in good order.
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes((1, *[0] * 7)))
            assert process.stdout.readline() == "awake\n"
            with admitted(port, origin=b"nextpeer") as after:
                assert after.recv(5, socket.MSG_WAITALL)[4:] == b"H"
            assert process.poll() is None
        finally:
            process.kill()


def sent_now(connected, content):
    """How much of `content` is taken without waiting."""
    try:
        return connected.send(content)
    except BlockingIOError:
        return 0


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
        mesh = Mesh(no_secret(), Traffic(), address=LOOPBACK, port=port)
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
