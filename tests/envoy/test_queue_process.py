"""Requests that wait in the queue of an `epp serve`, which gets new settings and signals meanwhile."""

import asyncio
import re

import aiohttp
import pytest
import yaml

from epp.configuration.compatibility import REFUSED
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.configuration.flow_samples import NAMES, text_of
from tests.envoy.process import EppProcess
from tests.envoy.rig import http_client, running_envoy, until
from tests.envoy.upstream import running_pods

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p"}'
TENANT = "x-llm-d-inference-fairness-id"
OBJECTIVE = "x-llm-d-inference-objective"
REASON = "x-llm-d-request-dropped-reason"


def configuration(*, queue=True, **flow):
    document = {
        "apiVersion": "llm-d.ai/v1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": "queue-scorer"},
            {"type": "concurrency-detector", "parameters": {"maxConcurrency": 1}},
        ],
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}],
    }
    if queue:
        document["featureGates"] = ["flowControl"]
        detector = {"pluginRef": "concurrency-detector"}
        document["flowControl"] = {"saturationDetector": detector, **flow}
    return document


class Served:
    """A pod that holds a request and has room for no other, behind `epp serve` and Envoy."""

    def __init__(self, folder, pod, epp, client):
        self.folder = folder
        self.pod = pod
        self.epp = epp
        self.client = client

    def configure(self, **changes):
        (self.folder / "config.yaml").write_text(yaml.safe_dump(configuration(**changes)))

    async def ask(self, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(PATH, data=BODY, headers=named) as response:
            await response.read()
            return response.status, response.headers.get(REASON)

    async def holds(self):
        """Return the task of a request that the pod serves until it is told to go on."""
        serving = self.pod.serving
        task = asyncio.create_task(self.ask(x_test_hold="1"))
        await until(lambda: self.pod.serving == serving + 1, "the pod serves")
        return task

    async def waits(self, count, **headers):
        """Return the task of a request that is the one of number `count` to wait."""
        task = asyncio.create_task(self.ask(**headers))
        await self.reaches("homing_flow_waiting", count)
        return task

    async def value(self, name, **labels):
        """Return the sum of the series of a metric that have these labels."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.epp.metrics_url) as response,
        ):
            page = await response.text()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        return sum(float(value) for series, value in found if all(one in series for one in wanted))

    async def reaches(self, name, value, **labels):
        async def there():
            return await self.value(name, **labels) == value

        await until(there, f"{name}{labels or ''} to be {value}")


@pytest.fixture
def served(opened, tmp_path):
    async def start(transport="ngh2", *flags, text="", holds=True, **changes):
        (pod,) = await opened.enter_async_context(running_pods(1))
        endpoints = [{"name": "pod-0", "address": "127.0.0.1", "port": pod.port}]
        document = {"endpoints": endpoints, "objectives": {"interactive": 100, "batch": -10}}
        (tmp_path / "endpoints.yaml").write_text(yaml.safe_dump(document))
        epp = EppProcess(
            tmp_path / "epp.log",
            *(
                f"--endpoints-file={tmp_path}/endpoints.yaml",
                f"--config-file={tmp_path}/config.yaml",
            ),
            *("--secure-serving=false", f"--transport={transport}", *flags),
        )
        here = Served(tmp_path, pod, epp, None)
        (tmp_path / "config.yaml").write_text(text or yaml.safe_dump(configuration(**changes)))
        await epp.start()
        opened.push_async_callback(ended, epp)
        options = BootstrapOptions(picker_address=epp.address, plaintext=True)
        envoy = await opened.enter_async_context(running_envoy(options, tmp_path))
        here.client = await opened.enter_async_context(http_client(envoy))
        # From the first response on, the picker knows that a stream without one is a lost client.
        assert await here.ask() == (200, None)
        return here, await here.holds() if holds else None

    return start


async def ended(epp):
    if epp.alive:
        await epp.kill()
    print(f"--- end of the log of epp serve\n{epp.log_text()[-4000:]}")


async def test_a_client_that_leaves_is_gone_from_the_metrics_at_once(served, transport):
    here, held = await served(transport)
    first = await here.waits(1)
    second = await here.waits(2, **{OBJECTIVE: "batch"})
    first.cancel()
    await here.reaches("homing_flow_waiting", 0, priority=0)
    assert await here.value("homing_flow_waiting", priority=-10) == 1
    assert await here.value("homing_flow_requests_total", outcome="cancelled") == 1
    here.pod.resume.set()
    assert await held == await second == (200, None)
    assert len(here.pod.received) == 3


async def test_a_reload_moves_those_that_wait_to_their_new_bands(served):
    """They were in one queue; now each tenant has its own. Nobody is lost, and the time since which
    each waits counts on.
    """
    here, held = await served()
    tasks = [await here.waits(1, **{TENANT: "a"}), await here.waits(2, **{TENANT: "b"})]
    tasks.append(await here.waits(3, **{TENANT: "a", OBJECTIVE: "interactive"}))
    assert await here.value("homing_flow_flows", priority=0) == 1
    template = {"fairnessPolicyRef": "round-robin-fairness-policy"}
    here.configure(defaultPriorityBand=template, maxRequests=1)
    await here.reaches("homing_flow_flows", 2, priority=0)
    assert await here.value("homing_flow_waiting") == 3, "a lowered limit refuses only newcomers"
    assert (await here.ask())[0] == 429
    here.pod.resume.set()
    assert await asyncio.gather(held, *tasks) == [(200, None)] * 4
    assert await here.value("homing_flow_requests_total", outcome="placed") == 5


async def test_a_reload_that_ends_the_queue_places_all(served):
    here, held = await served()
    tasks = [await here.waits(1), await here.waits(2)]
    here.configure(queue=False)
    assert await asyncio.gather(*tasks) == [(200, None)] * 2
    here.pod.resume.set()
    assert (await held)[0] == 200


async def test_a_terminating_picker_serves_or_refuses_all_that_wait(served, transport):
    """It places requests through its grace, and then refuses the rest. It exits with 0."""
    here, held = await served(transport, "--drain-grace=3s", "--drain-timeout=20s")
    first = await here.waits(1, x_test_hold="1")
    second = await here.waits(2)
    here.epp.terminate()
    await until(lambda: "drain started" in here.epp.log_text(), "the drain")
    held.cancel()
    await here.reaches("homing_flow_requests_total", 3, outcome="placed")
    assert await second == (503, "rejected-shutting-down")
    here.pod.resume.set()
    assert await first == (200, None)
    assert await here.epp.exit_code() == 0
    assert "streams were cut" not in here.epp.log_text()


class FullPage:
    """A pod whose metrics page shows a long queue and a full KV cache."""

    async def close(self, here):
        here.pod.waiting_requests, here.pod.kv_cache_usage = 1_000, 1.0
        await self._scraped(here)

    async def open(self, here):
        here.pod.waiting_requests, here.pod.kv_cache_usage = 0, 0.0

    async def _scraped(self, here):
        scrapes = here.pod.scrapes
        # The first page after the change may have been read before it.
        await until(lambda: here.pod.scrapes >= scrapes + 2, "two scrapes")


class FullSlots:
    """A pod that serves as many requests as the detector allows."""

    def __init__(self, count):
        self.count = count
        self.held = []

    async def close(self, here):
        self.held = [asyncio.create_task(here.ask(x_test_hold="1")) for _ in range(self.count)]
        await until(lambda: here.pod.serving == self.count, "the pod serves all")

    async def open(self, here):
        here.pod.resume.set()
        assert await asyncio.gather(*self.held) == [(200, None)] * self.count


QUEUES = {
    "program-aware": FullPage(),
    "soft-reflective-ceiling": FullPage(),
    "guide": FullSlots(132),
    "max-saturation": FullPage(),
}


@pytest.mark.parametrize("name", sorted(QUEUES))
async def test_requests_wait_by_a_sample_of_the_field(name, served):
    """Higher priorities are served first where the room comes back, and all are served."""
    fullness = QUEUES[name]
    here, _ = await served(text=text_of(name), holds=False)
    assert await here.ask(**{TENANT: "a"}) == (200, None)
    await fullness.close(here)
    low = await here.waits(1, **{OBJECTIVE: "batch", TENANT: "a"})
    high = await here.waits(2, **{OBJECTIVE: "interactive", TENANT: "b"})
    assert await here.value("homing_flow_waiting", priority=100) == 1
    assert not low.done()
    assert not high.done()
    await fullness.open(here)
    assert await asyncio.gather(low, high) == [(200, None)] * 2
    assert await here.value("homing_flow_wait_seconds_count", outcome="placed") >= 2


@pytest.mark.skipif("probabilistic-admitter" in REFUSED, reason="the plugin is not available")
async def test_sheddable_requests_are_refused_by_a_sample_of_the_field(served):
    """Of a full pool, and no others."""
    here, _ = await served(text=text_of("probabilistic-admitter"), holds=False)
    assert await here.ask(**{OBJECTIVE: "batch"}) == (200, None)
    await FullPage().close(here)
    assert (await here.ask(**{OBJECTIVE: "batch"}))[0] == 429
    assert await here.ask(**{OBJECTIVE: "interactive"}) == (200, None)


def test_every_sample_is_run():
    assert sorted([*QUEUES, "probabilistic-admitter"]) == NAMES
