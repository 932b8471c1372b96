"""Simulated engines at the addresses of pods that only seem to run.

`python -m tests.cluster.engines` is one process that follows the pods of a selector. Each pod that
is there has a simulated engine of its own, which serves at the pod's address: it is born with the
pod, knows nothing of an earlier pod of that address, goes on while the pod terminates, and then
nobody listens there any more.

It runs inside the cluster, until its input ends. For each line of input it prints, as JSON, what
engines saw since the line before: how long after a pod was ready its page was first read, and how
long after a pod was deleted somebody still sent it a request.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from bench.pods import allow_open_files
from epp.shell.process.event_loop import loop_factory
from sim.engine.engine import EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.pods.pods import Pod, PodSettings
from sim.pods.server import PodServer, serving
from tests.cluster.api import Api, administrator
from tests.cluster.place import Place

PORT: Final = 8000
BLOCK_TOKENS: Final = 16
BEAT_S: Final = 0.02


class Seen:
    """Observations of all engines since the last report."""

    def __init__(self) -> None:
        self.born = 0
        self.gone = 0
        self.pages = 0
        self.requests = 0
        self.first_page_s: list[float] = []
        """Seconds for which each pod was ready when its page was first read."""
        self.late_s: list[float] = []
        """Seconds for which a pod was deleted when a request came for it, of each such request."""
        self.loop_late_s = 0.0
        """Longest delay of this process's own event loop, in seconds."""

    def told(self) -> dict[str, Any]:
        return vars(self)


class Engine(PodServer):
    """Server of one pod, which records what it sees."""

    def __init__(self, pod: Pod, seen: "Engines") -> None:
        super().__init__(pod)
        self.terminates_at: float | None = None
        self.ends = asyncio.Event()
        self.ended = asyncio.Event()
        self._engines = seen
        self._born_at = time.monotonic()
        self._asked = False

    async def metrics(self, request: web.Request) -> web.Response:
        seen = self._engines.seen
        seen.pages += 1
        if not self._asked:
            self._asked = True
            seen.first_page_s.append(time.monotonic() - self._born_at)
        return await super().metrics(request)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self._count()
        return await super().completions(request)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self._count()
        return await super().chat(request)

    def _count(self) -> None:
        seen = self._engines.seen
        seen.requests += 1
        if self.terminates_at is not None:
            seen.late_s.append(time.monotonic() - self.terminates_at)


class Engines:
    """Engines, one for each pod that the API server shows ready."""

    def __init__(self, settings: PodSettings, tasks: asyncio.TaskGroup) -> None:
        self.seen = Seen()
        self._settings = settings
        self._tasks = tasks
        self._by_uid: dict[str, Engine] = {}
        self._by_address: dict[str, Engine] = {}
        """Latest engine of each address, also if it is about to end."""

    def list(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Begin and end engines so that they match `pods`, which are all that there are."""
        there = {pod["metadata"]["uid"] for pod in pods}
        for uid in self._by_uid.keys() - there:
            self._end(uid)
        for pod in pods:
            self.tell("ADDED", pod)

    def tell(self, what: str, pod: Mapping[str, Any]) -> None:
        """Apply an event of a watch, of the type `what`."""
        uid = pod["metadata"]["uid"]
        if uid not in self._by_uid:
            if what != "DELETED" and _is_ready(pod):
                self._begin(uid, pod)
        elif what == "DELETED":
            self._end(uid)
        elif "deletionTimestamp" in pod["metadata"] and not self._by_uid[uid].terminates_at:
            self._by_uid[uid].terminates_at = time.monotonic()

    def _begin(self, uid: str, pod: Mapping[str, Any]) -> None:
        self.seen.born += 1
        engine = Engine(Pod(pod["metadata"]["name"], self._settings), self)
        self._by_uid[uid] = engine
        self._tasks.create_task(self._serve(engine, pod["status"]["podIP"]))

    def _end(self, uid: str) -> None:
        self.seen.gone += 1
        self._by_uid.pop(uid).ends.set()

    async def _serve(self, engine: Engine, address: str) -> None:
        before = self._by_address.get(address)
        self._by_address[address] = engine
        if before is not None:
            await before.ended.wait()
        listener = socket.create_server((address, PORT), backlog=1024)
        async with asyncio.TaskGroup() as tasks, serving(engine, listener, tasks):
            await engine.ends.wait()
        engine.ended.set()
        if self._by_address[address] is engine:
            del self._by_address[address]


def _is_ready(pod: Mapping[str, Any]) -> bool:
    status = pod["status"]
    conditions = {at["type"]: at["status"] for at in status.get("conditions", ())}
    leaves = "deletionTimestamp" in pod["metadata"]
    return "podIP" in status and conditions.get("Ready") == "True" and not leaves


async def _beat(engines: Engines) -> None:
    """Record how late this process is itself.

    Engines that get no CPU say nothing about whoever asks them.
    """
    while True:
        due_s = time.monotonic() + BEAT_S
        await asyncio.sleep(BEAT_S)
        seen = engines.seen
        seen.loop_late_s = max(seen.loop_late_s, time.monotonic() - due_s)


async def _follow(engines: Engines, api: Api, namespace: str, selector: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    while True:
        found = await api.get(path, labelSelector=selector)
        engines.list(found["items"])
        version = found["metadata"]["resourceVersion"]
        # It ends after half an hour or more.
        async for what, pod in api.watch(path, version, labelSelector=selector):
            engines.tell(what, pod)


async def run(namespace: str, selector: str, settings: PodSettings) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    with contextlib.suppress(asyncio.CancelledError):
        async with administrator(Place.of(os.environ)) as api, asyncio.TaskGroup() as tasks:
            engines = Engines(settings, tasks)
            tasks.create_task(_follow(engines, api, namespace, selector))
            tasks.create_task(_beat(engines))
            print("following", flush=True)
            while await reader.readline():
                told, engines.seen = engines.seen.told(), Seen()
                print(json.dumps(told), flush=True)
            transport.close()
            # Every task is one of them.
            asyncio.current_task().cancel()
            await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.engines")
    parser.add_argument("namespace")
    parser.add_argument("selector")
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    told = parser.parse_args()
    profile = find_profile(told.profile)
    engine = EngineSettings(
        blocks_total=profile.kv_tokens // BLOCK_TOKENS + 1,
        block_size_tokens=BLOCK_TOKENS,
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
    )
    settings = PodSettings(profile=profile, engine=engine, model=profile.model)
    allow_open_files()
    with contextlib.suppress(OSError):
        # Cores are shared between sessions: this one stands for hundreds of pods.
        Path("/proc/self/autogroup").write_text("-10")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run(told.namespace, told.selector, settings))


if __name__ == "__main__":
    main()
