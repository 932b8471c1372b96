"""One of two leads: all are ready, a rollout ends, and the other takes over."""

import asyncio

import pytest

from tests.cluster.conftest import MINUTES
from tests.cluster.release import BY_LABEL, GATEWAY, GATEWAY_PORT, NAME, load, name_of, namespace
from tests.cluster.rows import Row

LEAD = "Envoy, one picker leads"


@pytest.fixture(scope="module")
def led(node, tmp_path_factory):
    values = {**BY_LABEL, "replicas": 2, "leaderElection": {"enabled": True}}
    with namespace(node, "leader") as space:
        space.run_models(3)
        # Ends when the rollout has.
        space.install({**values, "service": {"headless": True}}, tmp_path_factory.mktemp("values"))
        space.run_gateway(f"--picker-address={NAME}-headless:9002")
        yield space


def leader(space):
    """Its pod; None: nobody that runs holds the Lease."""
    holder = space.get("lease", NAME)["spec"].get("holderIdentity", "")
    return next((pod for pod in space.pickers() if holder.startswith(name_of(pod))), None)


@getattr(pytest.mark, MINUTES)
@pytest.mark.parametrize(
    ("what", "killed"), [("the leader deleted", False), ("the leader killed", True)]
)
async def test_the_other_takes_over(led, rows, what, killed):
    await led.until(lambda: leader(led) is not None, 60, "a leader")
    first = leader(led)
    async with load(led.address(GATEWAY, GATEWAY_PORT), streams=8) as asked:
        await asyncio.sleep(5)
        if killed:
            led.kill(first)
        else:
            led.kubectl("delete", "pod", name_of(first), "--wait=false")
        await asyncio.sleep(30)
    row = rows.add(Row.of(LEAD, what, asked))
    await led.until(lambda: leader(led) is not None, 60, "a leader again")
    print(row, asked.told)
    if not killed:
        assert name_of(leader(led)) != name_of(first)
        assert (row.lost, row.cut, row.streams) == (0, 0, 8), asked.told
