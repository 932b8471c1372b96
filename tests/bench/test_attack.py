"""The short form of make attack, and an attack that does not reach the picker."""

import asyncio
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.attack.__main__ import CALM_PROBES, Probe, Probed, _recovery, main
from bench.attack.attacks import ATTACKS, Target
from bench.attack.effects import PROOFS, Watch, connections_at, require_reached
from bench.effect import NoEffectError
from bench.place import Place, Pods, free_ports
from tests.envoy.rig import ENVOY

SHORT = ("--seconds", "2")


@pytest.fixture(autouse=True)
def keeps_signals(monkeypatch):
    """The test's process keeps its own handler of SIGTERM."""
    monkeypatch.setattr("bench.attack.__main__.end_in_order", lambda: None)


def place_of(folder, *, pages=""):
    """Return a place whose picker has its metrics page at `pages`, and no gateway."""
    pods = Pods(folder, free_ports(1))
    (port,) = free_ports(1)
    picker = f"127.0.0.1:{port}"
    return Place(folder=folder, picker=picker, gateway="", pages=pages, pods=pods, picker_pid=0)


def test_every_attack_has_a_proof():
    assert set(PROOFS) == set(ATTACKS)


def test_nobody_innocent_is_lost_beside_resets_at_the_picker(capsys):
    """A real picker: the attack reaches it, the probes are served, and it recovers."""
    assert main(["resets", "--alone", *SHORT]) == 0
    told = capsys.readouterr().out
    assert "resets" in told
    assert "0 of" in told


@pytest.mark.parametrize("name", ["tiny", "windows"])
def test_attacks_on_connections_end_and_are_proved_with_grpcio(name, capsys):
    assert main([name, "--alone", "--transport", "grpcio", *SHORT]) == 0
    assert name in capsys.readouterr().out


async def test_the_kernel_counts_the_connections_of_a_port():
    """The count contains the server's ends of open connections, over IPv4 and IPv6."""
    (port,) = free_ports(1)
    assert connections_at(port) == 0
    ends = asyncio.Event()

    async def served(_, writer):
        await ends.wait()
        writer.close()

    async with await asyncio.start_server(served, ["127.0.0.1", "::1"], port):
        hosts = ("127.0.0.1", "127.0.0.1", "::1")
        opened = [await asyncio.open_connection(host, port) for host in hosts]
        assert connections_at(port) == 3
        ends.set()
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
def test_nobody_innocent_is_lost_beside_invented_models_behind_envoy(capsys):
    assert main(["models", "--envoy", *SHORT]) == 0
    assert "requests for 4,000 models" in " ".join(capsys.readouterr().out.split())


def test_an_attack_that_sends_nothing_prints_no_table(capsys, monkeypatch):
    """The attacker counts requests, and its target is a picker that it never reaches."""
    monkeypatch.setitem(PROOFS, "resets", lambda *_: ("streams at the picker", 3.0, 100.0))
    assert main(["resets", "--alone", *SHORT]) == 1
    told = capsys.readouterr()
    assert "attack resets: the fault did not take effect: observed 3 streams" in told.err
    assert told.out == ""


def test_held_bodies_are_counted_by_their_bytes(tmp_path):
    """A picker that refuses bodies at its limit has few streams open when its page is read."""
    watch = Watch(place_of(tmp_path), last={"homing_held_body_bytes_max": 512.0})
    watch.highest["homing_held_body_bytes"] = 255.0
    with pytest.raises(NoEffectError, match=r"observed 255 bytes .*expected at least 256"):
        require_reached(watch, "held", done=1, probes=1)
    watch.highest["homing_held_body_bytes"] = 256.0
    require_reached(watch, "held", done=1, probes=1)


async def test_the_picker_is_read_while_the_attacked_pod_does_not_answer(tmp_path):
    async def metrics(_):
        return web.Response(text="homing_extproc_connections 3\n")

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    async with TestServer(application) as picker:
        watch = Watch(place_of(tmp_path, pages=str(picker.make_url(""))))
        await watch.read()
    assert watch.last == {"homing_extproc_connections": 3.0, "connections at the picker": 0.0}
    assert not watch.pod_pages


async def test_requests_of_a_burst_that_are_lost_are_results_of_the_attack(monkeypatch):
    """Its clients are innocent, so the command ends with 1 if one of them is lost."""
    monkeypatch.setattr("bench.attack.attacks.BURST", 3)
    (port,) = free_ports(1)
    target = Target("", f"http://127.0.0.1:{port}", 0.1, [])
    said = await ATTACKS["burst"](target)
    assert target.lost == ["ClientConnectorError"] * 3
    assert said == "3 of 3 lost: 3 ClientConnectorError"


async def test_requests_that_fail_at_once_are_no_recovery():
    """A picker that refuses every request answers quickly."""
    probe = Probe(place=None)
    since_s = time.monotonic()
    refused = [Probed(since_s + number, 0.001, "got 503") for number in range(CALM_PROBES)]
    served = [Probed(since_s + 100 + number, 0.001, "") for number in range(CALM_PROBES)]
    probe.done = [*refused, *served]
    assert await _recovery(probe, since_s, 0.01) == pytest.approx(100)


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_a_picker_that_saw_nothing_is_no_proof(name):
    """Each proof fails where the picker's counters and the pod's page stay as they were."""
    watch = Watch(place=None, pod_pages={b"page"})
    with pytest.raises(NoEffectError, match=f"attack {name}: the fault did not take effect"):
        require_reached(watch, name, done=1_000, probes=40)


def test_an_attacker_that_sent_nothing_is_no_proof():
    with pytest.raises(NoEffectError, match="an attacker that sent nothing"):
        require_reached(Watch(place=None), "models", done=0, probes=40)
