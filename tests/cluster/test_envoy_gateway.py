"""Behind Envoy Gateway, which policies wire to the picker: the project's overlay, laid as a user does."""

import asyncio
import os
import re
import subprocess
from collections import Counter

import pytest
import yaml

from tests.chart.rendering import ROOT
from tests.cluster import envoy_gateway, gateway_class
from tests.cluster.daemons import INSIDE
from tests.cluster.images import HOMING
from tests.cluster.release import MODELS, NAME, SMALL, Namespace, load, name_of, namespace
from tests.cluster.stage import (
    FIRST_MODELS,
    PICKERS,
    RATE_PER_S,
    READY_S_MAX,
    SETTLED_S,
    STREAMS,
    Stage,
)

pytestmark = pytest.mark.gateway

OVERLAY = ROOT / "deploy/overlays/envoy-gateway"
GATEWAY = "inference-gateway"
POLICIES = tuple(
    f"{kind}/{NAME}"
    for kind in ("envoyextensionpolicy", "backendtrafficpolicy", "clienttrafficpolicy")
)
ACCEPTED = '{.status.ancestors[0].conditions[?(@.type=="Accepted")].status}'
SHOWN = "Envoy Gateway"
ATTEMPTS = re.compile(r'homing_scheduler_attempts_total\{.*endpoint_name="([^"]+)".*\}')


def lay_over(space, folder):
    """What a user lays over the overlay: a namespace, an image, two pickers."""
    repository, _, tag = HOMING.rpartition(":")
    path = "/spec/template/spec/containers/0/resources"
    small = [{"op": "replace", "path": path, "value": SMALL}]
    told = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": space.name,
        # Kustomize takes no absolute path.
        "resources": [os.path.relpath(OVERLAY, folder.resolve())],
        "images": [{"name": repository, "newTag": tag}],
        "replicas": [{"name": NAME, "count": PICKERS}],
        "patches": [
            {"target": {"kind": "Deployment", "name": NAME}, "patch": yaml.safe_dump(small)}
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(told))
    space.kubectl("apply", "-k", str(folder))


class GatewayStage(Stage):
    """And what the gateway, the pickers and the pods count."""

    def seen(self, what):
        """What the gateway says of the cluster of pickers, `what` being a name without its prefix."""
        system = Namespace(self.space.node, gateway_class.SYSTEM)
        label = f"gateway.envoyproxy.io/owning-gateway-namespace={self.space.name}"
        (envoy,) = system.get("pods", "-l", label)["items"]
        (value,) = (
            value
            for name, value in system.metrics(envoy, ":19001/stats/prometheus").items()
            if name.startswith(f"envoy_cluster_{what}{{") and "/extproc/" in name
        )
        return value

    def sent(self):
        """Name of a pod -> how often the pickers said that it is to serve."""
        told = Counter()
        for picker in self.space.pickers():
            for name, value in self.space.metrics(picker).items():
                if found := ATTEMPTS.fullmatch(name):
                    told[found[1]] += int(value)
        return told

    def served(self):
        """Name of a pod -> completions that it says it ended."""
        told = Counter()
        for pod in self.space.get("pods", "-l", f"app={MODELS}")["items"]:
            for name, value in self.space.metrics(pod, ":8000/metrics").items():
                if name.startswith("vllm:request_success_total"):
                    told[name_of(pod)] += int(value)
        return told


@pytest.fixture(scope="module")
def stage(node, tmp_path_factory):
    if not envoy_gateway.is_built(node.environment):
        pytest.skip("no Envoy Gateway is built here: run `make cluster-gateway`")
    gateway_class.install(node)
    with namespace(node, "gateway") as space:
        space.run_models(FIRST_MODELS)
        lay_over(space, tmp_path_factory.mktemp("overlay"))
        space.rolled_out(f"deployment/{NAME}")
        limit = f"--timeout={READY_S_MAX:.0f}s"
        for policy in POLICIES:
            space.kubectl("wait", f"--for=jsonpath={ACCEPTED}=True", policy, limit)
        space.kubectl("wait", "--for=condition=Programmed", f"gateway/{GATEWAY}", limit)
        (address,) = space.get("gateway", GATEWAY)["status"]["addresses"]
        yield GatewayStage(space, SHOWN, f"http://{address['value']}")


async def test_the_gateway_checks_the_health_of_pickers(stage):
    """Where no check succeeds it panics, and asks those too that are not ready."""

    def all_healthy():
        return stage.seen("membership_healthy") == PICKERS

    await stage.space.until(all_healthy, READY_S_MAX, "pickers that the gateway finds healthy")
    before = stage.seen("lb_healthy_panic")
    async with load(stage.url) as asked:
        await asyncio.sleep(SETTLED_S)
    assert set(asked.requests) == {"200"}, asked.told
    assert stage.seen("lb_healthy_panic") == before


async def test_requests_go_where_the_picker_says(stage):
    """Each pod counts as many answers as the pickers sent it requests, and one prompt stays at one pod."""
    before = stage.sent(), stage.served()
    async with load(stage.url) as asked:
        await asyncio.sleep(SETTLED_S)
    assert set(asked.requests) == {"200"}, asked.told
    sent, served = stage.sent() - before[0], stage.served() - before[1]
    assert served.total() == sum(asked.requests.values()) > 50
    # The list of models, which the clients ask for before all else, is no completion.
    assert (sent - served).total() == 1
    assert served - sent == Counter()


def test_a_client_cannot_choose_its_pod(stage):
    """What it says of the destination is gone before the picker is asked."""
    header = "x-gateway-destination-endpoint: 192.0.2.1:1"
    command = ["curl", "--silent", "--max-time", "5", "-H", header, "-w", "%{http_code}"]
    url = f"{stage.url}/v1/models"
    said = subprocess.run(
        [*INSIDE, *command, "-o", "/dev/null", url], capture_output=True, text=True, check=True
    )
    assert said.stdout == "200"


async def test_models_are_rolled_out(stage, rows):
    row, told = await stage.models_rolled_out(rows)
    assert row.lost == 0, told


async def test_models_are_scaled(stage, rows):
    row, told = await stage.models_scaled(rows)
    assert row.lost == 0, told


async def test_a_picker_is_deleted(stage, rows):
    row, told = await stage.picker_deleted(rows)
    assert (row.lost, row.cut, row.streams) == (0, 0, STREAMS), told


async def test_pickers_are_rolled_out(stage, rows):
    row, told = await stage.pickers_rolled_out(rows)
    assert (row.lost, row.cut, row.streams) == (0, 0, STREAMS), told


async def test_a_picker_is_killed(stage, rows):
    """Streams through the picker that had its answer already are not sent again, and a gateway that
    does not fail open beside full duplex ends their requests; each of them was asked in the last
    moment. Streams of answers do not pass through it.
    """
    row, told = await stage.picker_killed(rows)
    assert (row.cut, row.streams) == (0, STREAMS), told
    assert row.lost <= RATE_PER_S, told
    assert set(told["requests"]) <= {"200", "500"}, told
