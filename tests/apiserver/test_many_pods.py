"""Long lists, bursts of events and restarts: the endpoints are the pods, no more, no fewer."""

import asyncio
from ipaddress import ip_address
from random import Random

import pytest

from tests.apiserver.cluster import Release, running_picker
from tests.chart.rendering import ROOT
from tests.envoy.rig import until
from tests.envoy.upstream import Pod

PODS = 230
"""Three pages."""
PORT = 8000
BACKOFF_S_MAX = 30.0


@pytest.fixture(scope="module", params=[True, False], ids=["streamed", "in pages"])
def streamed(request):
    """How lists are read."""
    return request.param


@pytest.fixture(scope="module")
def api(streamed, api, api_with):
    """The one of all tests, and one such as were before Kubernetes 1.32."""
    if streamed:
        yield api
        return
    with api_with("--feature-gates=WatchList=false") as old:
        yield old


@pytest.fixture
def release(helm, namespace, tmp_path):
    namespace.create_pool(PORT)
    return Release(helm, namespace, ROOT / "tests/chart/values/existing-pool.yaml", tmp_path)


def pod(number):
    """Nobody serves there: it is known and not ready."""
    return Pod(f"pod-{number}", str(ip_address("10.1.0.0") + number), PORT)


def truth(namespace):
    """Addresses of the pods that may serve, as the API server has them."""
    return {
        f"{each['status']['podIP']}:{PORT}"
        for each in namespace.list("pods")
        if "deletionTimestamp" not in each["metadata"]
        and any(told["status"] == "True" for told in each["status"].get("conditions", ()))
    }


async def same(picker, namespace, timeout_s=15.0):
    async def equal():
        return await picker.addresses() == truth(namespace)

    await until(equal, "the endpoints to be the pods", timeout_s)


async def test_a_long_list_and_a_burst_of_deletions(release, namespace, streamed, tmp_path):
    """One list is enough for all that happens."""
    await asyncio.gather(
        *(asyncio.to_thread(namespace.run_pod, pod(number)) for number in range(PODS))
    )
    async with running_picker(release, tmp_path / "picker") as picker:
        assert len(await picker.addresses()) == PODS
        await asyncio.to_thread(
            namespace.api.request, "DELETE", namespace.path("pods"), {"gracePeriodSeconds": 0}
        )
        await until(lambda: _nothing(picker), "all endpoints to be gone")
        # The stream that was asked for in vain was the first.
        lists = 1 if streamed else 2
        assert await picker.metric("kube_lists_total", resource="pods") == lists
        assert await picker.metric("kube_repairs_total", resource="pods") == 0


async def _nothing(picker):
    return not await picker.addresses()


class Churn:
    """A cluster in which anything happens to a few pods."""

    def __init__(self, namespace, seed):
        self._namespace = namespace
        self._random = Random(seed)
        self._born = 0
        self._names = {}
        """Name -> the pod; None: terminating."""

    def step(self):
        name = f"pod-{self._random.randrange(8)}"
        if name not in self._names:
            self._born += 1
            born = pod(self._born)
            born.name = name
            self._namespace.run_pod(born)
            self._names[name] = born
            return
        found = self._names[name]
        what = self._random.choice(["kill", "terminate", "ready", "not ready", "label"])
        if what == "kill" or found is None:
            self._namespace.delete("pods", name, grace_s=0)
            del self._names[name]
        elif what == "terminate":
            self._namespace.delete("pods", name)
            self._names[name] = None
        elif what == "label":
            labels = {"generation": str(self._random.random())}
            self._namespace.patch("pods", name, metadata={"labels": labels})
        else:
            self._namespace.tell_pod(found, ready=what == "ready")


async def test_whatever_happens_the_endpoints_are_the_pods(release, namespace, tmp_path):
    """Also when the API server restarts in between, by accident and in good order."""
    api = namespace.api
    churn = Churn(namespace, seed=1)
    async with running_picker(release, tmp_path / "picker") as picker:
        for end in (None, api.kill, api.terminate, api.kill, None):
            if end is not None:
                await asyncio.to_thread(end)
                api.start()
                await until(lambda: asyncio.to_thread(api.ready), "the API server", 60)
            for _ in range(60):
                await asyncio.to_thread(churn.step)
            await same(picker, namespace, BACKOFF_S_MAX + 10)
        assert await picker.metric("kube_repairs_total", resource="pods") == 0
