"""Each task of a picker ends in turn, by what nobody asked for: the picker goes on and says so.

A task is ended by ending what it waits for, as a plugin or a library would from within.
"""

import asyncio
import datetime as dt
import time
from contextlib import asynccontextmanager

import pytest
from prometheus_client import generate_latest

from epp.shell.gateway.tls import self_signed
from epp.shell.supervision import ENDS_MAX, Supervisor
from tests.app.test_wiring import (
    PREFIX_FIRST,
    QUEUE_FIRST,
    pod_pages,
    replace,
    serving,
    write_endpoints,
)
from tests.envoy.rig import free_ports, until
from tests.shell.kubernetes import test_cluster as kube
from tests.shell.kubernetes.fake_api_server import CONFIG_MAPS, PODS, POOLS, FakeApiServer

BY_FILES = (
    *(
        "KV events",
        "certificate",
        "config",
        "connections (health)",
        "connections (serving)",
    ),
    *(
        "debug token",
        "endpoint pages",
        "endpoints",
        "garbage",
        "journal",
        "kept configuration",
        "kept endpoints",
        "loop lag",
    ),
    *("memory", "overdue", "peers: addresses", "peers: catching up", "peers: pump"),
    *("peers: snapshots", "peers: warm start"),
    *(
        "scrape",
        "scrape endpoint",
        "session-keys",
        "standings",
        "tick",
        "tokens",
        "watch KV events",
    ),
)
"""Of a picker that has everything but Kubernetes and a broker."""
BY_KUBERNETES = (
    *("config in touch", "discovery", "election", "events", "watch config", "watch objectives"),
    *("watch peers", "watch pods", "watch pool", "watch rewrites"),
)
"""What it has besides, where there is Kubernetes."""
EVENT = "background task ended unexpectedly, it is restarted"
CANARY = "canary-of-a-client"


def supervised():
    """Name -> the task that keeps it, as many as there are; of endpoints the first."""
    kept = {}
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        if coroutine.__qualname__ == Supervisor.keep.__qualname__:
            name = task.get_name()
            kept["scrape endpoint" if name.startswith("scrape ") else name] = task
    return kept


async def end(name, how):
    """End what the task `name` runs by `how`, where it waits now."""
    await until(lambda: name in supervised() and waiting(name), f"the task {name} to wait")
    (waits_for,) = waiting(name)
    if how is asyncio.CancelledError:
        waits_for.cancel()
    else:
        waits_for.set_exception(how(CANARY))


def waiting(name):
    """What the task `name` waits for, if that is a future, which others can end."""
    future = supervised()[name]._fut_waiter
    ends = future is not None and not future.done() and not isinstance(future, asyncio.Task)
    return [future] if ends else []


@asynccontextmanager
async def by_files(folder):
    """A picker with a task of every kind that needs no API server."""
    pair = self_signed("localhost", dt.datetime.now(dt.UTC))
    (folder / "tls.crt").write_bytes(pair.certificate_chain)
    (folder / "tls.key").write_bytes(pair.private_key)
    (folder / "token").write_text("a-token-of-the-debug-pages")
    (folder / "keys").write_text("0123456789abcdef0123456789abcdef\n")
    (folder / "secret").write_text("0123456789abcdef0123456789abcdef")
    peer_port, other_port = free_ports(2)
    more = [
        *("--transport=ngh2", f"--cert-path={folder}", "--enable-cert-reload"),
        *(f"--capture={folder / 'capture'}", f"--last-good-dir={folder / 'kept'}"),
        *(f"--debug-token-file={folder / 'token'}", f"--snapshot-dir={folder / 'snapshots'}"),
        *(f"--session-token-key-file={folder / 'keys'}", f"--peer-secret-file={folder / 'secret'}"),
        *(f"--peers=localhost:{other_port}", f"--peer-port={peer_port}"),
        *("--peer-bind-address=127.0.0.1", "--peer-snapshot-timeout=0s"),
        "--refresh-metrics-interval=20ms",
    ]
    async with pod_pages("a") as (pod,):
        given = folder, [pod.entry], *more
        async with serving(*given, config=PREFIX_FIRST, tls=True) as running:
            await until(lambda: set(BY_FILES) <= set(supervised()), "the tasks")
            pool = running.picker.scheduler.pool
            await until(lambda: len(pool.ready(None, time.monotonic())), "the first page")
            yield running, pod


async def test_every_task_is_looked_after(tmp_path):
    """What runs in a picker for long is kept by its supervisor, or belongs to a library."""
    async with by_files(tmp_path):
        assert sorted(supervised()) == sorted(BY_FILES)
        others = {
            task.get_coro().__qualname__.partition(".")[0]
            for task in asyncio.all_tasks() - set(supervised().values())
            if task.get_coro().cr_code.co_filename.count("/epp/")
        }
        # The picker itself, which is the main task of its process.
        assert others == {"EndpointPicker"}


@pytest.mark.parametrize("name", BY_FILES)
async def test_a_task_that_ends_is_started_anew(name, tmp_path):
    """It is counted and logged by its name, and whatever operators change is still taken up."""
    async with by_files(tmp_path) as (running, pod):
        for ends, how in enumerate((asyncio.CancelledError, SystemExit), 1):
            before = supervised()
            await end(name, how)
            await until(
                lambda ends=ends: running.metric("task_ends_total", task=name) == ends, "the count"
            )
            line = running.logged(EVENT)[-1]
            assert (line["task"], line["how"]) == (name, f"raised {how.__name__}")
            assert CANARY not in str({**line, "exc_info": ""})
            await until(lambda: set(BY_FILES) <= set(supervised()), "all tasks to run")
            assert supervised()[name] is before[name], "its supervisor goes on"
            assert await running.pick() == pod.address
            assert running.picker.health.ready
        other = {"name": "other", "address": "10.0.0.2", "port": 8000, "metrics": None}
        write_endpoints(tmp_path, [pod.entry, other])
        replace(tmp_path / "config.yaml", QUEUE_FIRST)
        await until(lambda: running.logged("endpoints replaced"), "the endpoints to be taken")
        await until(
            lambda: running.logged("configuration replaced"), "the configuration to be taken"
        )
        pages = len(pod.paths)
        await until(lambda: len(pod.paths) > pages, "the next page")
        assert len(running.logged(EVENT)) == 2, "no other task has ended"


async def test_a_picker_whose_gateway_task_cannot_be_started_anew_is_not_ready(tmp_path):
    """Streams would be open for ever: another replica should have the traffic."""
    async with by_files(tmp_path) as (running, pod):
        for ends in range(1, ENDS_MAX + 1):
            assert running.picker.health.ready
            await end("overdue", ZeroDivisionError)
            await until(
                lambda ends=ends: running.metric("task_ends_total", task="overdue") == ends, "it"
            )
        assert not running.picker.health.ready
        assert await running.pick() == pod.address, "who comes nevertheless is served"


@pytest.mark.parametrize("name", BY_KUBERNETES)
async def test_a_watch_that_ends_is_started_anew(name, tmp_path, monkeypatch):
    """Pods, the pool and the configuration are heard of as before, and the Lease is held."""
    file = tmp_path / "config.yaml"
    file.write_text(kube.CONFIG.format(weight=1))
    more = (
        *("--config-map=homing-config", f"--config-file={file}", "--ha-enable-leader-election"),
        *("--peer-service=homing:9004", f"--peer-port={free_ports(1)[0]}"),
        "--peer-bind-address=127.0.0.1",
    )
    async with FakeApiServer() as server:
        server.put(POOLS, kube.pool())
        server.put(PODS, kube.pod("a", ip="127.0.0.7"))
        server.put(CONFIG_MAPS, kube.config_map(kube.CONFIG.format(weight=2)))
        async with kube.serving(server, tmp_path, monkeypatch, *more) as picker:
            await until(lambda: kube.weights(picker) == [2.0], "the first configuration")
            await until(lambda: len(picker.scheduler.pool) == 1, "the first pod")
            assert set(BY_KUBERNETES) <= set(supervised())
            for ends, how in enumerate((asyncio.CancelledError, SystemExit), 1):
                await end(name, how)
                line = f'homing_task_ends_total{{task="{name}"}} {ends}.0'
                await until(
                    lambda line=line: line in generate_latest(picker.registry).decode(), line
                )
                await until(lambda: set(BY_KUBERNETES) <= set(supervised()), "all watches to run")
                server.put(PODS, kube.pod(f"more-{ends}", ip=f"127.0.0.{10 + ends}"))
                server.put(CONFIG_MAPS, kube.config_map(kube.CONFIG.format(weight=2 + ends)))
                await until(lambda ends=ends: len(picker.scheduler.pool) == 1 + ends, "the pod")
                await until(
                    lambda ends=ends: kube.weights(picker) == [2.0 + ends], "the configuration"
                )
                await until(lambda: picker._cluster.leading, "the Lease")
