"""A simulated pod behind a loopback server, for tests that talk HTTP to it."""

import asyncio
import contextlib
import json
import re

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from sim.engine.engine import EngineSettings
from sim.engine.features import features_named
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.pods.kv_event_sockets import publishing
from sim.pods.pods import Pod, PodSettings
from sim.pods.server import PodServer, listen

MODEL = "base-model"


class Running:
    """A pod behind a loopback server, and a client for it."""

    def __init__(self, pod, server, client, sources=()):
        self.pod = pod
        self.server = server
        self.client = client
        self.sources = sources

    @property
    def ports(self):
        """The ports at which it serves, publishes KV events and sends old ones again."""
        source = self.sources[0]
        return self.server.port, source.port, source.replay_port

    @property
    def port(self):
        return self.server.port

    def url(self, path):
        return self.server.make_url(path)

    async def post(self, path, body):
        """(status, parsed body)."""
        async with self.client.post(self.url(path), json=body) as response:
            return response.status, await response.json()

    async def completion(self, headers=None, **body):
        asked = {"model": MODEL, **body}
        url = self.url("/v1/completions")
        async with self.client.post(url, json=asked, headers=headers) as response:
            status, answer = response.status, await response.json()
        assert status == 200, answer
        return answer

    async def events(self, path, body):
        """The data of each server-sent event."""
        async with self.client.post(self.url(path), json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    async def metric(self, series):
        async with self.client.get(self.url("/metrics")) as response:
            page = await response.text()
        found = re.search(rf"^vllm:{re.escape(series)} (\S+)$", page, re.MULTILINE)
        assert found, f"{series} is not on the page"
        return float(found[1])


@contextlib.asynccontextmanager
async def running_pod(
    *,
    speed=200.0,
    max_num_queued_reqs=0,
    kv_events=False,
    stream_interval_tokens=1,
    ports=(0, 0, 0),
    features=(),
    **engine,
):
    """`ports`: where it serves, publishes KV events and tells old ones again; 0: a free one."""
    settings = PodSettings(
        profile=find_profile(DEFAULT_PROFILE),
        engine=EngineSettings(**{"blocks_total": 2000, "max_loras": 2, **engine}),
        features=features_named(features),
        model=MODEL,
        adapters=("sql",),
        speed=speed,
        max_num_queued_reqs=max_num_queued_reqs,
        kv_events=kv_events,
        stream_interval_tokens=stream_interval_tokens,
    )
    pod = Pod("pod-0", settings)
    port, *event_ports = ports
    stack = contextlib.AsyncExitStack()
    sources = []
    for events in pod.kv_events:
        live, replay = (listen("127.0.0.1", wanted, 1)[0] for wanted in event_ports)
        sources.append(await stack.enter_async_context(publishing(events, live, replay, "kv@")))
    server = TestServer(PodServer(pod, sources).application(), port=port)
    pump = asyncio.create_task(pod.run())
    await server.start_server()
    try:
        async with stack, ClientSession() as client:
            yield Running(pod, server, client, sources)
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        await server.close()
