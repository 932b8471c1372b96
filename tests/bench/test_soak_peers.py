import asyncio
import json
import socket

import pytest

from bench import soak
from bench.effect import listens
from bench.place import free_ports
from bench.soak_peers import Outcome, PeerSoak, Picker, Ports, table

CALM = Outcome(
    seconds=60.0,
    requests={"served": 10},
    trouble={"picker killed": 1},
    lives=[1, 2, 1],
    aborts=[],
    unsettled=[],
    resident_mb=[(100.0, 101.0, 102.0)],
    growth=0.01,
    peers={"frames missed": 3},
)


@pytest.mark.parametrize(
    ("member", "value"),
    [("aborts", ["picker 1 ended by itself with code -6"]), ("unsettled", ["?"]), ("growth", 0.2)],
)
def test_what_must_not_be_fails_the_soak(member, value):
    told = {name: getattr(CALM, name) for name in CALM.__struct_fields__}
    failed = Outcome(**told | {member: value})
    assert CALM.held
    assert not failed.held
    assert str(value[0] if isinstance(value, list) else "20.0%") in table(failed)


@pytest.mark.parametrize("fault", ["_strangers", "_flood"])
async def test_who_floods_a_picker_that_still_starts_waits_for_it(tmp_path, monkeypatch, fault):
    """The picker was killed just before; otherwise the fault would seem to have no effect."""
    (port,) = free_ports(1)
    secret = tmp_path / "secret"
    secret.write_text("soak" * 16)
    picker = Picker(0, Ports(grpc=0, health=0, metrics=0, peer=port), (), tmp_path)
    attack = PeerSoak("", pods=None, pickers=[picker], secret=secret, seed=1)
    start_process = asyncio.create_subprocess_exec

    async def start_flood(*command, **settings):
        assert await listens(port), "the flood began before its picker listened"
        return await start_process(*command, **settings)

    async def starts_late():
        await asyncio.sleep(0.5)
        return socket.create_server(("127.0.0.1", port), backlog=1024)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_flood)
    starting = asyncio.create_task(starts_late())
    await getattr(attack, fault)()
    (await starting).close()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_three_pickers_outlive_what_happens_to_them(tmp_path):
    report = tmp_path / "soak.json"
    assert soak.main(["--peers", "--minutes", "2", "--json", str(report)]) == 0
    told = json.loads(report.read_text())
    assert told["aborts"] == []
    assert told["requests"]["served"] > 1_000
