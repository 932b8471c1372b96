"""Delay and cost of a change of scorers' weights under load, through a real Envoy.

`python -m bench.reload` prints the rows. Envoy as `epp envoy-config` configures it, `epp serve` and
two HTTP servers as pods are processes of their own. One pod has cached the prompt and the other has
the shorter queue, so the weights decide. `REQUESTS_PER_S` requests a second are sent, whatever the
answers are. The configuration is changed after `SWAP_AFTER_S` as the kubelet changes it, by one
rename of a link. The answering pod shows which weights decided.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from aiohttp import ClientError, ClientSession, web

from bench.envoy import EnvoyPorts, running_envoy, write_bootstrap
from bench.place import client_session, free_ports
from epp.plugins.strategy import config_of, step
from sim.demo.arm import Child

REQUESTS_PER_S = 500
LASTS_S = 10
SWAP_AFTER_S = 3
READY_S_MAX = 30.0
WAITING = 10
"""Number of waiting requests that the busier of the two pods reports."""
BODY = json.dumps({"model": "m", "prompt": "once upon a time in a land far away " * 100}).encode()


def _config(*, prefix: float, queue: float) -> str:
    """Return a configuration with the weights `prefix` of the prefix scorer and `queue` of the
    queue scorer.
    """
    return config_of(step("prefix-cache-scorer", prefix), step("queue-scorer", queue))


async def _pod(port: int) -> None:
    """Run a pod at `port` that answers every request with its port.

    Its metrics page reports N waiting requests after a request to /waiting/N.
    """
    waiting = 0

    async def say(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(text=str(port))

    async def wait(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting = int(request.match_info["count"])
        return web.Response()

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            text=f"vllm:num_requests_waiting {waiting}\nvllm:num_requests_running 0\n"
            "vllm:kv_cache_usage_perc 0.1\n"
        )

    application = web.Application()
    application.add_routes(
        [
            web.get("/metrics", metrics),
            web.post("/waiting/{count}", wait),
            web.route("*", "/{path:.*}", say),
        ]
    )
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


class _Answered:
    """The result of one request: its times, the pod that answered, and the problem if it failed."""

    def __init__(self, asked_s: float, answered_s: float, pod: str, problem: str) -> None:
        self.asked_s = asked_s
        self.latency_s = answered_s - asked_s
        self.answered_s = answered_s
        self.pod = pod
        self.problem = problem


async def _ask(session: ClientSession, url: str) -> _Answered:
    asked_s = time.monotonic()
    try:
        async with session.post(url, data=BODY) as response:
            said = await response.text()
            problem = "" if response.status == 200 else f"{response.status} {said}"
    except (ClientError, TimeoutError) as error:
        said, problem = "", repr(error)
    return _Answered(asked_s, time.monotonic(), said, problem)


async def _load(session: ClientSession, url: str) -> list[_Answered]:
    """Send `REQUESTS_PER_S` requests a second for `LASTS_S` seconds, and return their results."""
    started_s = time.monotonic()
    asked = []
    for number in range(REQUESTS_PER_S * LASTS_S):
        left_s = started_s + number / REQUESTS_PER_S - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        asked.append(asyncio.create_task(_ask(session, url)))
    return await asyncio.gather(*asked)


def _mount(folder: Path, version: int, text: str) -> Path:
    """Write `text` to the file of a ConfigMap as the kubelet does, and return the file."""
    data = folder / f"..{version}"
    data.mkdir()
    (data / "config.yaml").write_text(text)
    (folder / "..data_tmp").symlink_to(data.name)
    (folder / "..data_tmp").replace(folder / "..data")
    file = folder / "config.yaml"
    if not file.is_symlink():
        file.symlink_to("..data/config.yaml")
    return file


@contextlib.asynccontextmanager
async def _running(folder: Path, config: Path) -> AsyncIterator[tuple[str, list[str], str]]:
    """Run Envoy, the picker and two pods.

    Yield the URL of Envoy, the ports of the pods, and the URL of the picker's pages.
    """
    drawn = free_ports(8)
    gateway = EnvoyPorts(*drawn[:3])
    picker, health, metrics, *pods = map(str, drawn[3:])
    endpoints = folder / "endpoints.json"
    endpoints.write_text(
        json.dumps(
            {
                "endpoints": [
                    {"name": port, "address": "127.0.0.1", "port": int(port)} for port in pods
                ]
            }
        )
    )
    python = (sys.executable, "-m")
    bootstrap = folder / "envoy.yaml"
    commands: dict[str, Sequence[str]] = {
        **{f"pod-{port}": (*python, "bench.reload", "pod", port) for port in pods},
        "epp": (
            *(*python, "epp", "serve", "--endpoints-file", str(endpoints)),
            *("--config-file", str(config), "--secure-serving=false", "--grpc-port", picker),
            *("--grpc-health-port", health, "--metrics-port", metrics, "--seed", "1"),
        ),
    }
    await write_bootstrap(bootstrap, gateway, [f"127.0.0.1:{picker}"])
    async with contextlib.AsyncExitStack() as started:
        for name, command in commands.items():
            child = Child.running(name, command, folder / f"{name}.log")
            await started.enter_async_context(child)
        await started.enter_async_context(running_envoy(bootstrap))
        yield f"{gateway.url}/v1/completions", pods, f"http://127.0.0.1:{metrics}"


async def _until_waiting(session: ClientSession, pages: str, expected: list[int]) -> None:
    """Wait until the picker has scraped the numbers `expected` of waiting requests.

    Raise `TimeoutError` if that takes longer than `READY_S_MAX`.
    """
    async with asyncio.timeout(READY_S_MAX):
        while True:
            with contextlib.suppress(ClientError):
                async with session.get(f"{pages}/debug/endpoints?format=json") as response:
                    rows = (await response.json())["endpoints"]
                if [row["waiting"] for row in rows if row["state"] == "ready"] == expected:
                    return
            await asyncio.sleep(0.05)


async def _until_answered(session: ClientSession, gateway: str) -> None:
    """Wait until a request through Envoy and the picker succeeds.

    Raise `TimeoutError` if that takes longer than `READY_S_MAX`.
    """
    async with asyncio.timeout(READY_S_MAX):
        while True:
            if not (await _ask(session, gateway)).problem:
                return
            await asyncio.sleep(0.05)


async def _measure() -> list[_Answered | float]:
    """Run the measurement. Return the time at which the weights were changed, then the result of
    every request.
    """
    with tempfile.TemporaryDirectory(prefix="homing-reload-") as name:
        folder = Path(name)
        mounted = folder / "mounted"
        mounted.mkdir()
        config = _mount(mounted, 1, _config(prefix=3, queue=1))
        async with (
            client_session(READY_S_MAX) as session,
            _running(folder, config) as (gateway, pods, pages),
        ):
            await _until_waiting(session, pages, [0, 0])
            await _set_waiting(session, pods, [0, WAITING])
            await _until_waiting(session, pages, [0, WAITING])
            await _until_answered(session, gateway)
            await _set_waiting(session, pods, [WAITING, 0])
            await _until_waiting(session, pages, [WAITING, 0])
            loading = asyncio.create_task(_load(session, gateway))
            await asyncio.sleep(SWAP_AFTER_S)
            swapped_s = time.monotonic()
            _mount(mounted, 2, _config(prefix=1, queue=3))
            return [swapped_s, *await loading]


async def _set_waiting(session: ClientSession, pods: list[str], counts: list[int]) -> None:
    for port, count in zip(pods, counts, strict=True):
        async with session.post(f"http://127.0.0.1:{port}/waiting/{count}") as response:
            assert response.status == 200


def _p99_ms(answers: list[_Answered]) -> float:
    return sorted(answer.latency_s for answer in answers)[int(len(answers) * 0.99)] * 1e3


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the delay and the cost of the change of weights."""
    swapped_s, *answers = asyncio.run(_measure())
    assert isinstance(swapped_s, float)
    told = [answer for answer in answers if isinstance(answer, _Answered)]
    failed = [answer for answer in told if answer.problem]
    before = [answer for answer in told if answer.answered_s <= swapped_s]
    old = before[0].pod
    assert {answer.pod for answer in before} == {old}, "the prefix decides before the change"
    anew_s = min(answer.answered_s for answer in told if answer.pod not in {old, ""})
    around = [answer for answer in told if 0 <= answer.asked_s - swapped_s <= 2]
    # A machine that is too slow for the load fails here too, so the error says how.
    failures = f"{len(failed)} ({failed[0].problem})" if failed else "0"
    what = f"weights changed at {REQUESTS_PER_S}/s through Envoy: "
    return [
        (what + "first decision by the new ones after", f"{anew_s - swapped_s:.2f} s"),
        (what + f"failed or reset of {len(told):,} requests", failures),
        (what + "p99 latency before", f"{_p99_ms(before):.1f} ms"),
        (what + "p99 latency in the 2 s after", f"{_p99_ms(around):.1f} ms"),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["pod"]:
        asyncio.run(_pod(int(sys.argv[2])))
    else:
        for what, figure in run():
            print(f"{what:85} {figure:>10}")
