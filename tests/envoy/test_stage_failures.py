"""Prefill pods that are killed, and several pickers: processes behind a real Envoy."""

import asyncio
import json
import signal
import sys
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import count

import aiohttp
import pytest

from epp.shell.gateway.bootstrap import BootstrapOptions
from sim.demo.arm import Child
from tests.envoy.process import EppProcess
from tests.envoy.rig import free_ports, http_client, running_envoy, until
from tests.envoy.test_replicas import in_turn, metric, reaches
from tests.envoy.test_stages import CONFIG, FALLBACK, PROMPT

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(120)]

MODEL = "m"
RECEIVED = r'homing_peer_records_total\{direction="received",outcome="applied"\}'


class Pool:
    """Pods by `sim serve --roles`, one process for each role, with pickers and Envoy."""

    def __init__(self, pods, pickers, client):
        self.pods = pods
        self.pickers = pickers
        self.client = client

    async def chat(self, number):
        """The status of a chat with a prompt of its own."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": PROMPT % number}],
            "max_tokens": 4,
        }
        async with self.client.post("/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status

    async def routes(self):
        """Decisions by route, of all pickers together."""
        counted = {}
        for picker in self.pickers:
            async with (
                aiohttp.ClientSession() as session,
                session.get(picker.metrics_url) as response,
            ):
                for line in (await response.text()).splitlines():
                    if line.startswith('homing_routes_total{route="'):
                        route, value = line.split('"')[1], float(line.rsplit(" ", 1)[1])
                        counted[route] = counted.get(route, 0) + value
        return {route: count for route, count in counted.items() if count}


@pytest.fixture
async def start(tmp_path):
    """Start pods of these roles, each text a process of its own, and so many pickers."""
    async with AsyncExitStack() as opened:

        async def started(*roles, pickers=1, fallback="", prefix_weight=1):
            pods, endpoints = {}, []
            for place, role in enumerate(roles):
                child = await opened.enter_async_context(
                    Child.running(
                        "sim serve",
                        [
                            *(sys.executable, "-m", "sim", "serve", "--roles", role),
                            *("--port", "0", "--speed", "20", "--json", "--model", MODEL),
                        ],
                        tmp_path / f"pods-{place}.log",
                        announces=True,
                    )
                )
                pods[place] = child
                for pod in json.loads(await child.announcement())["pods"]:
                    del pod["url"]
                    endpoints.append(pod | {"name": f"{place}-{pod['name']}"})
            (tmp_path / "endpoints.json").write_text(json.dumps({"endpoints": endpoints}))
            prefix = "  - pluginRef: prefix-cache-scorer\n"
            config = CONFIG.replace(prefix, f"{prefix}    weight: {prefix_weight}\n") % fallback
            (tmp_path / "config.yaml").write_text(config)
            ports = free_ports(pickers)
            peers = ",".join(f"127.0.0.1:{port}" for port in ports)
            processes = []
            for port in ports:
                together = (
                    *("--replicas", str(pickers), "--peers", peers),
                    *("--peer-port", str(port), "--peer-bind-address", "127.0.0.1"),
                )
                process = EppProcess(
                    tmp_path / f"epp-{port}.log",
                    *("--endpoints-file", str(tmp_path / "endpoints.json")),
                    *("--config-file", str(tmp_path / "config.yaml"), "--secure-serving=false"),
                    *("--drain-grace=0s", "--drain-timeout=1s"),
                    *(together if pickers > 1 else ()),
                )
                opened.push_async_callback(ended, process)
                processes.append(process)
            await asyncio.gather(*(process.start() for process in processes))
            await reaches(processes, "homing_peers", pickers - 1)
            await reaches(processes, "homing_ready_endpoints", len(endpoints))
            options = BootstrapOptions(
                picker_address=",".join(process.address for process in processes), plaintext=True
            )
            envoy = await opened.enter_async_context(running_envoy(options, tmp_path, in_turn))
            client = await opened.enter_async_context(http_client(envoy))
            return Pool(pods, processes, client)

        yield started


async def ended(picker):
    if picker.alive:
        await picker.kill()
    print(f"--- end of the log of epp serve\n{picker.log_text()[-3000:]}")


async def answered_from_now_on(pool, first):
    """Send chats until ten in a row are answered; return the statuses of those before.

    The picker notices a killed pod by its scrapes after a time, not after a number of chats, so
    the chats have a limit of time too.
    """
    statuses, numbers = [], count(first)

    async def answered():
        statuses.append(await pool.chat(next(numbers)))
        return statuses[-10:] == [200] * 10

    await until(answered, "ten chats in a row to be answered")
    return statuses[:-10]


@pytest.mark.parametrize("decoders", [1, 2])
async def test_a_killed_prefill_pod_is_replaced_by_the_fallback(decoders, start):
    """Only requests from before the picker noticed fail, and no decode pod is excluded."""
    pool = await start("prefill=1", f"decode={decoders}", fallback=FALLBACK)
    assert [await pool.chat(number) for number in range(4)] == [200] * 4
    assert await pool.routes() == {"prefill-decode": 4}
    pool.pods[0].signal(signal.SIGKILL)
    failed = await answered_from_now_on(pool, 100)
    assert set(failed) <= {502}
    routes = await pool.routes()
    assert routes["aggregated-fallback"] >= 10
    (picker,) = pool.pickers
    assert await metric(picker, "homing_endpoints_set_aside") <= 1


async def test_a_killed_prefill_pod_is_replaced_by_another(start):
    pool = await start("prefill=1", "prefill=1", "decode=2")
    assert [await pool.chat(number) for number in range(4)] == [200] * 4
    pool.pods[0].signal(signal.SIGKILL)
    failed = await answered_from_now_on(pool, 100)
    assert set(failed) <= {502}
    assert set(await pool.routes()) == {"prefill-decode"}


async def received(pool):
    """The number of records that all pickers received from each other."""
    return sum([await metric(picker, RECEIVED) for picker in pool.pickers])


async def more_received(pool, than):
    return await received(pool) > than


async def test_two_pickers_know_each_others_prefills(start):
    """Envoy asks them in turn. The second turn of each chat is decided by the other picker. A picker
    may believe that a request is active for as long as the record of its end is on the way, so the
    prefix has the greater weight.
    """
    pool = await start("prefill=2", "decode=2", pickers=2, prefix_weight=10)
    others = count(100)

    async def heard():
        """True if the second picker knew what the first decided for a new chat. Records arrive in
        their order, so it knows the older decisions of the first as well.
        """
        number, before, arrived = next(others), await pool.routes(), await received(pool)
        assert await pool.chat(number) == 200
        # Before both connections are open no record arrives, and later an older one may.
        with suppress(AssertionError):
            await until(partial(more_received, pool, arrived), "a record", timeout_s=1.0)
        assert await pool.chat(number) == 200
        return (await pool.routes()).get("decode-only", 0) == before.get("decode-only", 0) + 1

    async def each_other_heard():
        for _ in pool.pickers:
            await until(heard, "a picker to know what the other decided")
            # The other picker decides the next chat first.
            assert await pool.chat(next(others)) == 200

    await each_other_heard()
    before = await pool.routes()
    chats = 9
    assert [await pool.chat(number) for number in range(chats)] == [200] * chats
    first_turn = before | {"prefill-decode": before["prefill-decode"] + chats}
    assert await pool.routes() == first_turn
    await each_other_heard()
    before = await pool.routes()
    assert [await pool.chat(number) for number in range(chats)] == [200] * chats
    assert await pool.routes() == before | {"decode-only": before["decode-only"] + chats}
    for picker in pool.pickers:
        assert await metric(picker, "homing_request_error_total") == 0
