"""What the whole cluster feels: its API server does not answer, its node is drained."""

import asyncio

import pytest

from tests.cluster.conftest import ALONE
from tests.cluster.place import NODE
from tests.cluster.release import BY_LABEL, ENVOY, MODELS, NAME, load, namespace
from tests.cluster.rows import Row

pytestmark = getattr(pytest.mark, ALONE)
AWAY_S = 30.0
GATEWAY = "Envoy beside each picker"


@pytest.fixture(scope="module")
def space(node, tmp_path_factory):
    with namespace(node, "alone") as found:
        found.run_models(3)
        values = {**BY_LABEL, "replicas": 2, "standalone": ENVOY}
        found.install(values, tmp_path_factory.mktemp("values"))
        yield found


def ready_endpoints(page):
    return sum(value for name, value in page.items() if name.startswith("homing_ready_endpoints"))


async def test_the_api_server_is_away(node, space, rows):
    url = space.address(f"{NAME}-envoy", 8081)
    async with load(url) as asked:
        await asyncio.sleep(5)
        node.stop_api_server()
        try:
            await asyncio.sleep(AWAY_S)
        finally:
            node.stop_api_server(resume=True)
        await asyncio.to_thread(
            space.kubectl, "scale", f"deployment/{MODELS}", "--replicas=4", "--request-timeout=60s"
        )

        def all_known():
            return all(ready_endpoints(space.metrics(one)) == 4 for one in space.pickers())

        await space.until(all_known, 90, "pods that came after it")
    row = rows.add(Row.of(GATEWAY, "the API server away for half a minute", asked))
    assert row.lost == 0, asked.told


async def test_the_node_is_drained_of_pickers(node, space, rows):
    """Nothing may start meanwhile, so that the disruption budget has the last word."""
    label = f"--pod-selector=app.kubernetes.io/name={NAME},app.kubernetes.io/instance={NAME}"
    url = space.address(f"{NAME}-envoy", 8081)
    try:
        async with load(url, streams=8) as asked:
            await asyncio.sleep(5)
            said = await asyncio.to_thread(
                space.kubectl,
                *("drain", NODE, label, "--ignore-daemonsets", "--delete-emptydir-data"),
                "--timeout=30s",
                check=False,
            )
            assert len(space.pickers()) == 1, said
    finally:
        node.kubectl("uncordon", NODE)
    row = rows.add(Row.of(GATEWAY, "the node drained", asked))
    assert (row.lost, row.cut, row.streams) == (0, 0, 8), asked.told
    space.rolled_out(f"deployment/{NAME}")
