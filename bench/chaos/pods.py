"""A simulated vLLM pod with faults that can be switched on: `python -m bench.chaos.pods PORT`.

`POST /fault/NAME` sets its fault from then on, one of `Fault`; the pod still serves its metrics
page. To restart the pod, kill the process and start it again.
"""

import asyncio
import contextlib
import re
import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, Final

from aiohttp import web
from msgspec.structs import replace

from sim.engine.engine import EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.pods.pods import Pod, PodSettings
from sim.pods.server import PodServer

FAILS_FAST_S: Final = 0.017
FAILS_SLOWLY_S: Final = 3.0
SLOWNESS: Final = 3.0
CRAWL: Final = 8.0
FULL_REQUESTS: Final = 2
"""Number of unfinished requests at which a pod with the fault `full` answers 503; its share of the
load is more.
"""
_BLOCK_SIZE_TOKENS: Final = 16
_QUEUE: Final = re.compile(
    rb"^(vllm:(?:num_requests_(?:running|waiting|waiting_by_reason)|kv_cache_usage_perc)\{.*\}) .*$",
    re.MULTILINE,
)
_REFUSAL: Final = {"error": {"message": "too many requests", "type": "RateLimit", "code": 429}}
_FAILURE: Final = {"error": {"message": "engine dead", "type": "InternalServerError", "code": 500}}


class Fault(StrEnum):
    """A fault that a simulated pod can have."""

    NONE = "none"
    FAILS_FAST = "fails-fast"
    FAILS_SLOWLY = "fails-slowly"
    HANGS = "hangs"
    SLOW = "slow"
    LIES = "lies"
    CRAWLS = "crawls"
    FULL = "full"
    REFUSES = "refuses"


_FACTORS: Final = {Fault.SLOW: SLOWNESS, Fault.LIES: SLOWNESS, Fault.CRAWLS: CRAWL}


class FaultyPod:
    """A simulated pod with its present fault."""

    def __init__(self, port: int) -> None:
        profile = find_profile(DEFAULT_PROFILE)
        engine = EngineSettings(
            blocks_total=profile.kv_tokens // _BLOCK_SIZE_TOKENS + 1,
            block_size_tokens=_BLOCK_SIZE_TOKENS,
            max_num_seqs=profile.max_num_seqs,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            max_loras=0,
        )
        settings = PodSettings(profile=profile, engine=engine, model=profile.model)
        self.pod = Pod(f"pod-{port}", settings)
        self._fault = Fault.NONE

    def application(self) -> web.Application:
        """Return the web application with all routes of the pod, and the one that sets
        its fault.
        """
        application = PodServer(self.pod).application()
        application.middlewares.insert(0, self._misbehave)
        application.add_routes([web.post("/fault/{name}", self._change)])
        return application

    async def _change(self, request: web.Request) -> web.Response:
        fault = self._fault = Fault(request.match_info["name"])
        self.pod.engines.slowness = _FACTORS.get(fault, 1.0)
        limit = FULL_REQUESTS if fault is Fault.FULL else 0
        self.pod.settings = replace(self.pod.settings, max_num_queued_reqs=limit)
        return web.Response()

    @property
    def _misbehave(self) -> Any:
        @web.middleware
        async def misbehave(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if request.path == "/metrics" and self._fault is Fault.LIES:
                page = _QUEUE.sub(rb"\1 0.0", self.pod.page.render())
                return web.Response(body=page, content_type="text/plain")
            if not request.path.startswith("/v1/"):
                return await handler(request)
            if self._fault is Fault.HANGS:
                await asyncio.Event().wait()
            if self._fault is Fault.REFUSES:
                await request.read()
                return web.json_response(_REFUSAL, status=429)
            if self._fault in {Fault.FAILS_FAST, Fault.FAILS_SLOWLY}:
                await request.read()
                fast = self._fault is Fault.FAILS_FAST
                await asyncio.sleep(FAILS_FAST_S if fast else FAILS_SLOWLY_S)
                return web.json_response(_FAILURE, status=500)
            return await handler(request)

        return misbehave


async def _serve(port: int) -> None:
    faulty = FaultyPod(port)
    runner = web.AppRunner(faulty.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, backlog=1024).start()
    await faulty.pod.run()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(int(sys.argv[1])))
