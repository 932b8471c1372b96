"""The picker in front of a fake API server: `EndpointPicker` with the flags of Kubernetes."""

import asyncio
import contextlib
import json
import time

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from epp.app.wiring import EndpointPicker
from epp.core.decision.inputs import PageScraped
from epp.core.types import EndpointMetrics
from epp.flags.command_lines import parse_serve
from epp.shell.starting import StartError
from tests import gateway as gw
from tests.envoy.rig import free_ports
from tests.shell.kubernetes.fake_api_server import (
    CONFIG_MAPS,
    EVENTS,
    LEASES,
    OBJECTIVES,
    PODS,
    POOLS,
    REWRITES,
    FakeApiServer,
    objective,
    pod,
    pool,
    rewrite,
)
from tests.shell.kubernetes.kube import eventually
from tests.streams import Call, channel_to

WANTED = "envoy.service.ext_proc.v3.ExternalProcessor"

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: queue-scorer, weight: {weight}}}
"""


def config_map(text, name="homing-config"):
    return {"metadata": {"name": name, "uid": "uid-config"}, "data": {"config.yaml": text}}


def weights(picker):
    return [scorer.weight for scorer in picker.scheduler.settings.profile.scorers]


@contextlib.asynccontextmanager
async def serving(server, folder, monkeypatch, *more):
    """A picker that serves the fake's pool, from a kubeconfig."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder)))
    grpc_port, health_port, metrics_port = free_ports(3)
    given = [
        *("--pool-name=llama-pool", "--pool-namespace=llm", "--secure-serving=false", "--seed=1"),
        *(f"--grpc-port={grpc_port}", f"--grpc-health-port={health_port}"),
        *(f"--metrics-port={metrics_port}", "--drain-grace=0s", "--drain-timeout=1s"),
    ]
    flags = parse_serve([*given, *more], {"NAMESPACE": "llm", "POD_NAME": "homing-0"})
    picker = EndpointPicker(flags)
    stop = asyncio.Event()
    task = asyncio.create_task(picker.serve(stop))
    try:
        yield picker
    finally:
        stop.set()
        await task


async def test_a_pool_is_served_once_it_and_its_pods_are_known(tmp_path, monkeypatch):
    """Not ready before; then priorities and rewrites of the API decide too."""
    async with FakeApiServer() as server:
        server.put(PODS, pod("a", ip="10.0.0.7"))
        server.put(OBJECTIVES, objective("batch", -1))
        server.put(REWRITES, rewrite("all", [{"targets": [{"modelRewrite": "tuned"}]}]))
        async with serving(server, tmp_path, monkeypatch) as picker:
            await eventually(lambda: server.lists(POOLS))
            assert not picker.health.ready
            server.put(POOLS, pool())
            await eventually(lambda: picker.health.ready)
            await eventually(lambda: picker.sessions.settings.rewrite is not None)
            await eventually(lambda: picker.sessions.settings.priorities == {"batch": -1})
            ((slot, endpoint),) = picker.scheduler.pool.endpoints()
            assert endpoint.address == "10.0.0.7:8000"
            # Ready in the scheduler without a scrape: the pod is no process of ours.
            picker.scheduler.pool.columns.observed_at_s[slot] = 0.0
            picker.scheduler.pool._members[slot].joined_at_s = 0.0
            stream = gw.Stream(picker.scheduler, settings=picker.sessions.settings, now=1_000_000.0)
            head, *_ = answers = stream.send(
                gw.request_headers(), gw.request_body(gw.prompt(model="llama"))
            )
            assert gw.destination(head) == "10.0.0.7:8000"
            assert json.loads(gw.streamed(answers)[0])["model"] == "tuned"
            page = generate_latest(picker.registry).decode()
            assert 'homing_kube_synced{resource="pods"} 1.0' in page
            assert 'homing_kube_objects{resource="pods"} 1.0' in page
            assert 'homing_kube_repairs_total{resource="pods"} 0.0' in page
            assert "homing_leader" not in [line.split()[0] for line in page.splitlines() if line]


async def test_the_watched_config_map_is_in_force_at_once(tmp_path, monkeypatch):
    """The file at start; then the API, and an Event on the pool for each change."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(weight=1))
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        server.put(CONFIG_MAPS, config_map(CONFIG.format(weight=2)))
        server.put(CONFIG_MAPS, config_map("not ours", name="other"))
        more = ("--config-map=homing-config", f"--config-file={file}")
        async with serving(server, tmp_path, monkeypatch, *more) as picker:
            assert weights(picker) == [1.0]
            await eventually(lambda: picker.health.ready and weights(picker) == [2.0])
            server.put(CONFIG_MAPS, config_map(CONFIG.format(weight=3)))
            await eventually(lambda: weights(picker) == [3.0])
            server.put(CONFIG_MAPS, config_map("kind: nonsense"))
            await eventually(
                lambda: any(
                    event["reason"] == "ConfigRejected" for event in server.objects[EVENTS].values()
                )
            )
            assert weights(picker) == [3.0]
            reasons = [event["reason"] for event in server.objects[EVENTS].values()]
            assert "ConfigApplied" in reasons
            messages = [event["message"] for event in server.objects[EVENTS].values()]
            assert any("2 -> 3" in message for message in messages)
            (refused,) = (text for text in messages if "kind" in text)
            assert refused.startswith("ConfigMap llm/homing-config: "), refused
            server.delete(CONFIG_MAPS, "homing-config")
            # While the API server is away the file counts.
            await server.stop()
            file.write_text(CONFIG.format(weight=4))
            await eventually(lambda: weights(picker) == [4.0])
            await server.start()


async def test_a_follower_keeps_warm_and_takes_over(tmp_path, monkeypatch):
    """While another leads it is ready and not wanted, and answers who asks it nevertheless."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        server.put(PODS, pod("a"))
        held = {
            "holderIdentity": "another",
            "leaseDurationSeconds": 3600,
            "renewTime": "2026-01-01T00:00:00.000000Z",
        }
        lease = {"metadata": {"name": "homing-llama-pool", "uid": "uid-lease"}, "spec": held}
        server.put(LEASES, lease)
        more = ["--ha-enable-leader-election"]
        async with serving(server, tmp_path, monkeypatch, *more) as picker:
            await eventually(lambda: picker.health.ready)
            assert not picker.health.serving(WANTED)
            ((slot, endpoint),) = picker.scheduler.pool.endpoints()
            picker.scheduler.take(PageScraped(slot, EndpointMetrics()), time.monotonic())
            async with channel_to(f"127.0.0.1:{picker.flags.grpc_port}") as channel:
                asked = gw.request_headers(), gw.request_body(gw.prompt(model="llama"))
                head, _ = await Call(channel).exchange(*asked, answers=2)
                assert gw.destination(head) == endpoint.address
            server.put(LEASES, lease | {"spec": {}})
            await eventually(lambda: picker.health.serving(WANTED))
            assert "homing_leader 1.0" in generate_latest(picker.registry).decode()
        found = server.objects[LEASES]["homing-llama-pool"]["spec"]
        assert "holderIdentity" not in found, "given back at the end"


async def test_the_lease_is_given_back_however_short_the_drain(tmp_path, monkeypatch):
    """The process waits for that much: the next leader would wait for the Lease to run out."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        more = ["--ha-enable-leader-election"]
        async with serving(server, tmp_path, monkeypatch, *more) as picker:
            await eventually(lambda: picker.health.serving(WANTED))
            server.fail("GET", LEASES, *["slow"] * 3)
            server.fail("UPDATE", LEASES, *["slow"] * 3)
        found = server.objects[LEASES]["homing-llama-pool"]["spec"]
        assert "holderIdentity" not in found


async def test_without_an_api_server_to_be_found_the_start_fails(tmp_path, monkeypatch):
    """By one sentence."""
    async with FakeApiServer() as server:
        monkeypatch.setattr(server, "kubeconfig", lambda folder: folder / "none")
        with pytest.raises(
            StartError, match=r"^the configuration of the API server cannot be loaded: "
        ):
            async with serving(server, tmp_path, monkeypatch):
                pass


async def test_an_api_server_that_is_down_at_start_is_waited_for(tmp_path, monkeypatch):
    """Not ready and with a sentence, but running: liveness must not restart us."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        await server.stop()
        with capture_logs() as logs:
            async with serving(server, tmp_path, monkeypatch) as picker:
                await eventually(lambda: any("cannot be reached" in line["event"] for line in logs))
                assert not picker.health.ready
                await server.start()
                await eventually(lambda: picker.health.ready)
