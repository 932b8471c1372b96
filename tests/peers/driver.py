"""A peer as a process before simulated pods, and one of our strategies beside it."""

import asyncio
import json
import os
import re
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import aiohttp
from msgspec.structs import replace

from epp.core.decision.inputs import OutputStarted, PageScraped, PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Outcome
from epp.core.types import Endpoint, EndpointMetrics
from tests.builders import request
from tests.envoy.rig import free_ports, start_process, until
from tests.rivals.driven import settings_of

PLACE = Path(__file__).parents[2] / ".peers"
"""Folder into which `make peers` installs the peers."""
PODS = 3
_MODEL = "m"
_DRAWS = 128
"""Number of times that a picker is asked for its choice. A pod that has an even chance with two
others is missed once in 10^22."""


class Peer:
    """A running router; each request sent to it is a stream that stays open until it is ended."""

    def __init__(self, client, port, urls, key_header):
        self._client = client
        self._url = f"http://127.0.0.1:{port}"
        self._key_header = key_header
        self._urls = urls
        self._inflight = []
        self.order = []
        """Names of pods, in the order of the peer's own list."""

    async def is_ready(self):
        """Return True if the peer knows all pods and takes all for healthy."""
        try:
            workers = await self._workers()
        except aiohttp.ClientError:
            return False
        self.order = [self._urls[worker["url"]] for worker in workers]
        return len(workers) == PODS and all(worker["is_healthy"] for worker in workers)

    async def send(self, step):
        """Send `step` and return the pod that it reaches; it is in flight from then on."""
        self.end(step.ends)
        await self._settle()
        headers = {self._key_header: step.key} if self._key_header and step.key else {}
        response = await self._client.post(
            f"{self._url}/v1/completions",
            json={
                "model": _MODEL,
                "prompt": step.prompt,
                "max_tokens": 20_000,
                "ignore_eos": True,
                "stream": True,
            },
            headers=headers,
        )
        first = await response.content.readline()
        assert response.status == 200, first
        # The pod writes its name into the id of the answer.
        pod = re.fullmatch(r"cmpl-(pod-\d+)-\d+", json.loads(first.removeprefix(b"data: "))["id"])
        self._inflight.append((pod[1], response))
        return pod[1]

    def end(self, requests=None):
        """Close that many requests in flight, the oldest first; None closes all."""
        for _, response in self._inflight[:requests]:
            response.close()
        del self._inflight[:requests]

    async def _settle(self):
        """Return when the peer counts as many requests in flight at each pod as there are."""
        expected = Counter(pod for pod, _ in self._inflight)

        async def settled():
            counted = {self._urls[each["url"]]: each["load"] for each in await self._workers()}
            return counted == {pod: expected[pod] for pod in self._urls.values()}

        await until(settled, f"the peer to count {dict(expected)}")

    async def hit_rate(self):
        """Return the share of all prompt tokens so far that the pods found in their caches."""
        hits = queries = 0.0
        for url in self._urls:
            async with self._client.get(f"{url}/metrics") as response:
                page = await response.text()
            hits += _counter(page, "prefix_cache_hits")
            queries += _counter(page, "prefix_cache_queries")
        return hits / queries

    async def _workers(self):
        async with self._client.get(f"{self._url}/workers") as response:
            return (await response.json(content_type=None))["workers"]


def _counter(page, name):
    return float(re.search(rf"^vllm:{name}_total(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)[1])


@asynccontextmanager
async def running_peer(folder, module, *flags, key_header=""):
    """Yield the router of `module` before fresh pods; both are processes.

    The end of their log is printed at the end.
    """
    found, log = folder / "endpoints.json", folder / "log.txt"
    port, metrics_port = free_ports(2)
    processes = [
        await start_process(
            *(sys.executable, "-m", "sim", "serve", "--pods", str(PODS), "--port", "0"),
            *("--model", _MODEL, "--speed", "0.5", "--endpoints-out", found),
            log=log,
        )
    ]
    try:
        await until(found.exists, "sim serve to listen", timeout_s=60)
        pods = json.loads(found.read_text())["endpoints"]
        urls = {f"http://{pod['address']}:{pod['port']}": pod["name"] for pod in pods}
        processes.append(
            await start_process(
                *(sys.executable, "-m", *module.split(), "--host", "127.0.0.1"),
                *("--port", str(port), "--prometheus-host", "127.0.0.1"),
                *("--prometheus-port", str(metrics_port), "--worker-urls", *urls, *flags),
                log=log,
                environment={**os.environ, "PYTHONPATH": str(PLACE)},
            )
        )
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=50)
        ) as client:
            peer = Peer(client, port, urls, key_header)
            await until(
                lambda: processes[-1].returncode is not None or peer.is_ready(),
                f"{module} to know its pods",
                timeout_s=60,
            )
            assert processes[-1].returncode is None, log.read_text()[-4000:]
            try:
                yield peer
            finally:
                peer.end()
    finally:
        for process in reversed(processes):
            if process.returncode is None:
                process.terminate()
        for process in processes:
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
        print(f"--- end of {log}\n{log.read_text()[-4000:]}")


class _Follower:
    """A picker that chooses as it is told and remembers what the strategy's picker might choose."""

    def __init__(self, picker):
        self._picker = picker
        self.told = None
        self._latest = None

    def pick(self, scores, candidates, random, rotation, /):
        self._latest = (scores.copy(), candidates, rotation)
        names = [endpoint.name for endpoint in candidates.endpoints]
        chosen = self._picker.pick(scores, candidates, random, rotation)
        if self.told is not None:
            chosen[0] = names.index(self.told)
        return chosen[:1]

    def draw(self, draws):
        """Return how often the picker takes each pod in `draws` draws from the latest state."""
        scores, candidates, rotation = self._latest
        names = [endpoint.name for endpoint in candidates.endpoints]
        return Counter(
            names[self._picker.pick(scores, candidates, Random(at), rotation + at)[0]]
            for at in range(draws)
        )


class Ours:
    """A strategy over pods of the names `order`. Time stands still."""

    def __init__(self, config, order, *, seed=1, key_header="", metrics=None):
        """Create the pods, each scraped once with `metrics`; None means empty queues.

        `config` is a strategy's name or the text of a configuration.
        """
        settings = settings_of(config)
        self._follower = _Follower(settings.profile.picker)
        profile = replace(settings.profile, picker=self._follower)
        self.scheduler = Scheduler(replace(settings, stages=Stages(decode=profile)), seed=seed)
        self._key_header = key_header
        self._inflight = []
        self._sent = 0
        self.scores = {}
        """Scores of the latest decision: scorer -> pod -> its score."""
        endpoints = [
            Endpoint(endpoint_id=name, name=name, address=f"127.0.0.1:{9000 + at}")
            for at, name in enumerate(order)
        ]
        self.scheduler.take(PoolReplaced(endpoints), 0.0)
        reported = metrics or EndpointMetrics(waiting_requests=0.0, running_requests=0.0)
        for slot in range(len(order)):
            self.scheduler.take(PageScraped(slot, reported), 0.0)

    def send(self, step, told=None):
        """Send `step` and return (pod, pods that the strategy allows).

        `told`: the pod that `step` goes to anyway; None means that the strategy chooses.
        """
        for _ in range(step.ends):
            self.scheduler.take(RequestEnded(self._inflight.pop(0), Outcome(status=200)), 0.0)
        self._follower.told = told
        self._sent += 1
        prompt = step.prompt.encode()
        headers = {self._key_header: step.key} if self._key_header and step.key else {}
        asked = request(
            request_id=str(self._sent),
            prompts=(prompt,),
            prompt_tokens=len(prompt) // 4,
            headers=headers,
        )
        decision = self.scheduler.schedule(asked, 0.0)
        self._inflight.append(decision.lease)
        names = [endpoint.name for endpoint in decision.leg.candidates.endpoints]
        self.scores = {
            scorer: dict(zip(names, row, strict=True))
            for scorer, row in zip(
                decision.leg.scorers, decision.leg.scored.scores.tolist(), strict=True
            )
        }
        return decision.endpoint.name, frozenset(self._follower.draw(_DRAWS))

    @property
    def chances(self):
        """Return the share of many draws in which the latest decision chooses each pod."""
        drawn = self._follower.draw(_DRAWS * 40)
        return {pod: drawn[pod] / drawn.total() for pod in drawn}

    @property
    def inflight(self):
        """Return the number of requests in flight."""
        return len(self._inflight)

    def prefilled(self, at):
        """Report the prompt of the request in flight at `at`, the oldest at 0, as prefilled."""
        self.scheduler.take(OutputStarted(self._inflight[at]), 0.0)
