import asyncio
import json

import pytest

from bench import soak
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


async def test_strangers_wait_for_a_picker_that_still_starts(tmp_path):
    """The fault would otherwise seem to have no effect on a picker that was killed just before."""
    (port,) = free_ports(1)
    picker = Picker(0, Ports(grpc=0, health=0, metrics=0, peer=port), (), tmp_path)
    attack = PeerSoak("", pods=None, pickers=[picker], secret=tmp_path, seed=1)

    async def starts_late():
        await asyncio.sleep(0.5)
        return await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)

    starting = asyncio.create_task(starts_late())
    await attack._strangers()
    server = await starting
    server.close()
    await server.wait_closed()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_three_pickers_outlive_what_happens_to_them(tmp_path):
    report = tmp_path / "soak.json"
    assert soak.main(["--peers", "--minutes", "2", "--json", str(report)]) == 0
    told = json.loads(report.read_text())
    assert told["aborts"] == []
    assert told["requests"]["served"] > 1_000
