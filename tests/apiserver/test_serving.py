"""The picker as Helm installs it, with a real API server: it finds pods and serves them."""

import pytest

from tests import gateway as gw
from tests.apiserver.cluster import POOL, Release, running_engines, running_picker
from tests.chart.rendering import ROOT
from tests.envoy.rig import until

VALUES = ROOT / "tests/chart/values"


@pytest.fixture
def release(helm, namespace, tmp_path):
    return Release(helm, namespace, VALUES / "existing-pool.yaml", tmp_path)


async def test_pods_come_change_and_go(release, namespace, tmp_path):
    """One endpoint each Ready pod, whatever the kubelet says of it; terminating is gone at once."""
    async with running_engines("a", "b") as (a, b):
        namespace.create_pool(a.port)
        async with running_picker(release, tmp_path / "picker") as picker:
            await picker.knows()
            assert (await picker.refused())[0] == 503

            namespace.run_pod(a)
            await picker.knows(a)
            assert await picker.pick() == a.address

            namespace.run_pod(b)
            await picker.knows(a, b)
            namespace.tell_pod(a, ready=False)
            await picker.knows(b)
            assert await picker.pick() == b.address

            namespace.tell_pod(a)
            await picker.knows(a, b)
            namespace.delete("pods", "b")
            terminating = namespace.get("pods", "b")
            assert terminating["metadata"]["deletionTimestamp"]
            await picker.knows(a)
            namespace.delete("pods", "b", grace_s=0)

            # The same name, another pod, another address.
            b.name, a.name = a.name, b.name
            namespace.delete("pods", "a", grace_s=0)
            namespace.run_pod(b)
            await picker.knows(b)
            assert await picker.pick() == b.address
            assert await picker.metric("kube_repairs_total", resource="pods") == 0
        assert release.refused() == set()


async def test_annotations_and_the_pool_say_which_ports_and_pods(release, namespace, tmp_path):
    """Active ports are annotated; a pool that selects others replaces all at once."""
    async with running_engines("a", "b") as (a, b):
        namespace.create_pool(a.port)
        namespace.run_pod(a)
        namespace.run_pod(b, labels={"app": "other"})
        async with running_picker(release, tmp_path / "picker") as picker:
            await picker.knows(a)
            namespace.patch("pods", "a", metadata={"annotations": {"llm-d.ai/active-ports": "1"}})
            await picker.knows()
            namespace.patch("pods", "a", metadata={"annotations": {"llm-d.ai/active-ports": None}})
            await picker.knows(a)

            spec = {"selector": {"matchLabels": {"app": "other"}}}
            namespace.patch("inferencepools", POOL, spec=spec)
            await picker.knows(b)
            assert await picker.pick() == b.address


async def test_objectives_and_rewrites_are_followed(release, namespace, tmp_path):
    """A priority below zero is shed when all are busy; a model is called by its new name."""
    async with running_engines("a") as (a,):
        a.waiting_requests, a.kv_cache_usage = 100, 1.0
        namespace.create_pool(a.port)
        namespace.run_pod(a)
        group = "llm-d.ai/v1alpha2"
        async with running_picker(release, tmp_path / "picker") as picker:
            await picker.knows(a)
            namespace.create(
                "inferenceobjectives",
                "batch",
                apiVersion=group,
                kind="InferenceObjective",
                spec={"poolRef": {"name": POOL}, "priority": -1},
            )
            namespace.create(
                "inferencemodelrewrites",
                "renamed",
                apiVersion=group,
                kind="InferenceModelRewrite",
                spec={
                    "poolRef": {"name": POOL},
                    "rules": [
                        {
                            "matches": [{"model": {"value": "my-model"}}],
                            "targets": [{"modelRewrite": "its-new-name"}],
                        }
                    ],
                },
            )

            async def renamed():
                messages = gw.request_headers(), gw.request_body(gw.prompt())
                body, _ = gw.streamed(await picker.answers(*messages, answers=2))
                return b"its-new-name" in body

            async def shed():
                messages = (
                    gw.request_headers(gw.COMPLETIONS | {"x-llm-d-inference-objective": "batch"}),
                    gw.request_body(gw.prompt()),
                )
                (first, *_) = await picker.answers(*messages, answers=1)
                return gw.kind(first) == "immediate_response" and gw.refusal(first)[0] == 429

            await until(renamed, "the model to be rewritten")
            await until(shed, "requests of the objective to be refused")


async def test_without_a_pool_a_selector_is_enough(helm, namespace, tmp_path):
    """Two ports of a pod are two endpoints; its Role names no pool and none is asked for."""
    release = Release(helm, namespace, VALUES / "selector-without-pool.yaml", tmp_path)
    async with running_engines("a") as (a,):
        namespace.run_pod(a, labels={"app": "vllm-llama", "tier": "chat"})
        ports = f"--endpoint-target-ports={a.port}"
        async with running_picker(release, tmp_path / "picker", ports) as picker:
            await picker.knows(a)
        assert release.refused() == set()
