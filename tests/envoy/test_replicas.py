"""Three pickers behind one Envoy, each a process, over four simulated pods.

The clients' side is the demo's. Envoy asks the pickers in turn, so that two turns of a conversation
rarely reach the same one.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import aiohttp
import pytest

from epp.shell.gateway.bootstrap import BootstrapOptions
from sim.demo.arm import BLOCK_SIZE_TOKENS, PODS, PROFILE, Child, cache_blocks
from sim.demo.client import RequestOutcome, drive
from sim.demo.workload import WorkloadSettings, conversations
from sim.engine.profiles import find_profile
from tests.envoy.process import EppProcess
from tests.envoy.rig import Envoy, free_ports, running_envoy, until

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(300)]

WORKLOAD = WorkloadSettings(
    arrival_window_s=10.0,
    conversations_per_s=4.0,
    tenants=12,
    system_tokens=3000,
    question_tokens=150,
    answer_tokens=40,
    turns_max=4,
    think_s_mean=0.7,
)

LEFT_ALONE_S = 5.0
"""Within it Envoy asks no more who is gone, by its checks of health."""


class Replicas:
    """Pods, pickers and Envoy, all running."""

    def __init__(self, pickers: Sequence[EppProcess], envoy: Envoy) -> None:
        self.pickers = pickers
        self.envoy = envoy

    async def run(self, seed: int, answered=lambda _: None) -> list[RequestOutcome]:
        """The whole workload."""
        model = find_profile(PROFILE).model
        return await drive(self.envoy.url, model, conversations(WORKLOAD, seed), answered)


async def metric(picker: EppProcess, name: str) -> float:
    """The sum of a metric's series; 0 if there is none."""
    async with aiohttp.ClientSession() as session, session.get(picker.metrics_url) as response:
        page = await response.text()
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


async def reaches(pickers: Sequence[EppProcess], name: str, value: float) -> None:
    for picker in pickers:

        async def there(picker=picker) -> bool:
            return await metric(picker, name) == value

        await until(there, f"{name} to be {value}", 30.0)


@pytest.fixture
async def start(tmp_path) -> AsyncIterator:
    """Start so many pickers, in front of pods of their own."""
    async with AsyncExitStack() as opened:

        async def started(pickers: int, *flags: str) -> Replicas:
            folder = tmp_path / f"{pickers}-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            endpoints = folder / "endpoints.json"
            pods = Child.running(
                "sim serve",
                [
                    *(sys.executable, "-m", "sim", "serve", "--pods", str(PODS), "--port", "0"),
                    *("--profile", PROFILE, "--blocks", str(cache_blocks())),
                    *("--block-size", str(BLOCK_SIZE_TOKENS), "--seed", "1", "--json"),
                    *("--endpoints-out", str(endpoints), "--log-format", "json"),
                ],
                folder / "pods.log",
                announces=True,
            )
            child = await opened.enter_async_context(pods)
            assert json.loads(await child.announcement())["pods"]
            ports = free_ports(pickers)
            everybody = ",".join(f"127.0.0.1:{port}" for port in ports)
            processes = []
            for port in ports:
                together = (
                    ()
                    if pickers == 1
                    else (
                        *("--replicas", str(pickers), "--peers", everybody),
                        *("--peer-port", str(port), "--peer-bind-address", "127.0.0.1"),
                    )
                )
                process = EppProcess(
                    folder / f"epp-{port}.log",
                    *("--endpoints-file", str(endpoints), "--secure-serving=false"),
                    *("--drain-grace=0s", "--drain-timeout=1s", *together, *flags),
                )
                opened.push_async_callback(ended, process)
                processes.append(process)
            await asyncio.gather(*(process.start() for process in processes))
            await reaches(processes, "homing_peers", pickers - 1)
            await reaches(processes, "homing_ready_endpoints", PODS)
            options = BootstrapOptions(
                picker_address=",".join(process.address for process in processes), plaintext=True
            )
            envoy = await opened.enter_async_context(running_envoy(options, folder, in_turn))
            return Replicas(processes, envoy)

        yield started


async def ended(picker: EppProcess) -> None:
    if picker.alive:
        await picker.kill()


async def counted(picker: EppProcess) -> tuple[float, float]:
    """Sum of the hit ratios of its decisions, and how many they were."""
    name = "homing_prefix_indexer_hit_ratio"
    return await metric(picker, f"{name}_sum"), await metric(picker, f"{name}_count")


def in_turn(bootstrap: dict) -> None:
    """Envoy asks one picker after the other."""
    for cluster in bootstrap["static_resources"]["clusters"]:
        if cluster["name"] == "ext_proc":
            cluster["lb_policy"] = "ROUND_ROBIN"


def hit_rate(outcomes: Sequence[RequestOutcome]) -> float:
    return sum(o.cached_tokens for o in outcomes) / sum(o.prompt_tokens for o in outcomes)


def errors(outcomes: Sequence[RequestOutcome]) -> list[str]:
    return [outcome.error for outcome in outcomes if outcome.error]


async def test_three_pickers_hit_as_often_as_one(start):
    """Within three points, over the same requests; each of the three decides a third of them."""
    alone = await start(1)
    one = await alone.run(seed=3)
    together = await start(3)
    three = await together.run(seed=3)
    assert errors(one) + errors(three) == []
    assert hit_rate(one) > 0.5
    assert abs(hit_rate(three) - hit_rate(one)) < 0.03
    decided = [await metric(picker, "homing_request_total") for picker in together.pickers]
    assert max(decided) - min(decided) <= 6
    owed = [
        await metric(picker, "homing_prefix_known_from_peers_total") for picker in together.pickers
    ]
    assert min(owed) > 0


async def test_a_picker_that_is_killed_leaves_nothing_behind_and_comes_back_warm(start):
    """The others go on; its requests in flight vanish; the new one hits as often as its peers."""
    together = await start(3)
    victim, *others = together.pickers
    half_way = asyncio.Event()
    seen = 0

    def answered(_: RequestOutcome) -> None:
        nonlocal seen
        seen += 1
        if seen == 40:
            half_way.set()

    clock = asyncio.get_running_loop().time
    started_s = clock()
    running = asyncio.create_task(together.run(4, answered))
    await half_way.wait()
    await victim.kill()
    left_alone_s = clock() - started_s + LEFT_ALONE_S
    await reaches(others, "homing_peers", 1)
    outcomes = await running
    # What was open through the dead one is lost, and what Envoy still asks it.
    later = [outcome for outcome in outcomes if outcome.sent_at_s > left_alone_s]
    assert later
    assert errors(later) == []
    await victim.start()
    await reaches(together.pickers, "homing_peers", 2)
    assert await metric(victim, "homing_peer_snapshot_seconds_count") == 1
    before = {picker: await counted(picker) for picker in together.pickers}
    for seed in (4, 5, 6):
        assert errors(await together.run(seed)) == []
    rates = []
    for picker in together.pickers:
        matched, total = (a - b for a, b in zip(await counted(picker), before[picker], strict=True))
        assert total > 75, "a hundred decisions or so"
        rates.append(matched / total)
    assert rates[0] > min(rates[1:]) - 0.05


QUEUE = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: added-time-scorer
- type: max-score-picker
- type: concurrency-detector
  parameters: {maxConcurrency: 1}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: added-time-scorer
  - pluginRef: max-score-picker
flowControl:
  maxRequests: 4
  saturationDetector: {pluginRef: concurrency-detector}
"""
"""Each of the four pods has room for one request, and four requests may wait."""


async def status_of(client: aiohttp.ClientSession, text: str) -> int:
    """The status of a request whose answer takes longer than the test."""
    model = find_profile(PROFILE).model
    body = {"model": model, "prompt": text, "max_tokens": 16_000, "ignore_eos": True}
    async with client.post("/v1/completions", json=body) as response:
        await response.read()
        return response.status


async def burst_over(replicas: Replicas, name: str) -> int:
    """How many of sixteen requests are not refused. Each of the first four is sent once all pickers
    know where the one before it was placed. Otherwise two pickers may place one each at the same pod.

    None ends before all are counted. Then the client leaves.
    """
    alive = [one for one in replicas.pickers if one.alive]

    async def placed() -> int:
        # The count of each picker includes those of its peers, once they have reported them.
        return int(min([await metric(one, "homing_inflight_requests") for one in alive]))

    async def waiting() -> int:
        return int(sum([await metric(one, "homing_flow_waiting") for one in alive]))

    async with aiohttp.ClientSession(replicas.envoy.url) as client, asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[int]] = []
        for number in range(16):
            tasks.append(group.create_task(status_of(client, f"{name} {number}")))
            if number < PODS:

                async def is_placed(expected=number + 1) -> bool:
                    return await placed() == expected

                await until(is_placed, f"{number + 1} requests to be placed", 60.0)

        async def settled() -> bool:
            refused = sum(task.done() for task in tasks)
            return refused + await placed() + await waiting() == len(tasks)

        await until(settled, "each request to be refused, placed, or waiting", 60.0)
        refused = [task.result() for task in tasks if task.done()]
        assert set(refused) == {429}
        for task in tasks:
            task.cancel()
    return len(tasks) - len(refused)


async def test_two_pickers_share_the_room_of_pods_and_the_limits_of_the_queue(start, tmp_path):
    """As many requests are placed or wait as with one picker, and as many when one has left."""
    config = tmp_path / "queue.yaml"
    config.write_text(QUEUE)
    flags = ("--config-file", str(config))
    together = await start(2, *flags)
    assert await burst_over(together, "shared") == 2 * PODS
    apart = await start(2, *flags)
    gone, left = apart.pickers
    await gone.kill()
    await reaches([left], "homing_peers", 0)
    assert await burst_over(apart, "alone") == 2 * PODS
