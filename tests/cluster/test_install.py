"""Installed as the documentation says, asked through its own gateway, brought up to date, and taken away."""

import asyncio

import pytest

from tests.chart.rendering import CHART
from tests.chart.tools import HELM_3, HELM_4
from tests.cluster.conftest import MINUTES
from tests.cluster.images import EARLIER, has_earlier, unpack_earlier
from tests.cluster.place import ClusterError
from tests.cluster.release import BY_LABEL, ENVOY, NAME, load, namespace
from tests.cluster.rows import Row

EVERYTHING = {
    **BY_LABEL,
    "replicas": 2,
    "standalone": ENVOY,
    "leaderElection": {"enabled": True},
    "lastGood": {"enabled": True},
    "snapshot": {"enabled": True},
    "capture": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "grafanaDashboard": {"enabled": True},
    "service": {"headless": True},
}
"""What the chart can add without the API of an operator."""
TRANSIENT = {"Event", "EndpointSlice", "PodMetrics"}
"""What the cluster itself makes and takes away in its own time."""


def inventory(space):
    """(kind, name) of all that is in the namespace."""
    kinds = space.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    found = space.get(",".join(kinds))["items"]
    return {
        (one["kind"], one["metadata"]["name"]) for one in found if one["kind"] not in TRANSIENT
    } - {("Endpoints", NAME)}


async def test_the_quick_start_serves(node, tmp_path):
    """Standalone, simulated pods, no gateway and no CRD: the first minutes of a user."""
    with namespace(node, "quick-start") as space:
        space.run_models(3)
        space.install({**BY_LABEL, "standalone": ENVOY}, tmp_path)
        async with load(space.address("homing-envoy", 8081)) as asked:
            await asyncio.sleep(5)
        assert set(asked.requests) == {"200"}, asked.told
        assert asked.requests["200"] > 50


@pytest.mark.parametrize("package", [HELM_3, HELM_4], ids=["Helm 3", "Helm 4"])
async def test_it_is_installed_tested_and_leaves_nothing(node, tmp_path, package):
    """With everything turned on, by a user who may not do more than the namespace's Pod Security allows."""
    with namespace(node, "install") as space:
        before = inventory(space)
        space.install(EVERYTHING, tmp_path, package=package)
        assert "Succeeded" in space.helm("test", NAME, package=package)
        (ready, wanted) = (
            space.get("deployment", NAME)["status"].get(key)
            for key in ("readyReplicas", "replicas")
        )
        assert ready == wanted == 2, "a standby is ready as well"
        space.helm("uninstall", NAME, "--wait", "--timeout=60s", package=package)

        def nothing_left():
            return inventory(space) == before

        await space.until(nothing_left, 60, f"no more than {sorted(before)}")


@getattr(pytest.mark, MINUTES)
async def test_it_is_brought_up_to_date_under_load(node, tmp_path, rows):
    """From the chart and the image of the version before, which share what they know meanwhile."""
    if not has_earlier():
        pytest.skip("this clone does not go back to the version before")
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    unpack_earlier(earlier)
    values = {**BY_LABEL, "replicas": 2, "standalone": ENVOY}
    with namespace(node, "upgrade") as space:
        space.run_models(3)
        chart = earlier / CHART.relative_to(CHART.parents[1])
        space.install(values, tmp_path, chart=chart, image=EARLIER)
        async with load(space.address("homing-envoy", 8081), streams=8) as asked:
            await asyncio.sleep(5)
            await asyncio.to_thread(space.install, values, tmp_path)
        row = rows.add(Row.of("Envoy beside each picker", "chart and image upgraded", asked))
        assert (row.lost, row.cut, row.streams) == (0, 0, 8), asked.told


def test_pod_security_is_enforced_where_it_is_installed(node):
    """Or the other tests would prove nothing about it."""
    with namespace(node, "restricted") as space, pytest.raises(ClusterError, match="PodSecurity"):
        space.kubectl("run", "root", "--image=registry.example.com/pause:1", "--privileged")
