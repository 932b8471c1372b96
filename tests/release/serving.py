"""A picker in a root of its own: started, asked as the kubelet and a gateway do, and drained."""

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import grpc
from grpc_health.v1 import health_pb2

from tests import gateway as gw
from tests.envoy.rig import free_ports, start_process, until
from tests.release.roots import USER, Root
from tests.streams import Call, channel_to

ENDPOINT = {"name": "a", "address": "10.0.0.1", "port": 8000, "metrics": None}


async def serve_and_drain(
    root: Root, entrypoint: Sequence[str], environment: Mapping[str, str], log: Path
) -> list[dict[str, object]]:
    """Run a picker as Kubernetes does, route a request, end the picker and return its log."""
    ports = free_ports(3)
    root.at("/config").mkdir(exist_ok=True)
    root.at("/config/endpoints.json").write_text(json.dumps({"endpoints": [ENDPOINT]}))
    flags = ["--endpoints-file=/config/endpoints.json", "--secure-serving=false"]
    names = ("grpc-port", "grpc-health-port", "metrics-port")
    flags += [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    flags += ["--drain-grace=0s", "--drain-timeout=5s", "--seed=1"]
    command = root.command([*entrypoint, "serve", *flags], environment=environment, contained=True)
    process = await start_process(shutil.which(command[0]) or "", *command[1:], log=log)
    try:
        await until(lambda: _is_ready(ports[2]) if process.returncode is None else True, "it", 50)
        assert process.returncode is None, log.read_text()
        assert await _health(ports[1], "liveness") == await _health(ports[1], "readiness") == 1
        async with channel_to(f"127.0.0.1:{ports[0]}") as channel:
            call = Call(channel)
            head, _ = await call.exchange(
                gw.request_headers(), gw.request_body(gw.prompt()), answers=2
            )
            assert gw.destination(head) == "10.0.0.1:8000"
            await call.exchange(gw.response_headers(end=True), answers=1)
            assert await call.end() == grpc.StatusCode.OK
        _check_identity(process.pid)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return [json.loads(line) for line in log.read_text().splitlines()]


def _check_identity(pid: int) -> None:
    """Check that the process has only the rights that Pod Security "restricted" leaves it.

    The user, its groups and the bounding set are checked only if the tests run as root.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert told["CapEff"] == ["0" * 16]
    assert told["NoNewPrivs"] == ["1"]
    if os.geteuid() == 0:
        assert told["Uid"] == [str(USER)] * 4
        assert told["CapBnd"] == ["0" * 16]
        assert told["Groups"] == []


async def _is_ready(port: int) -> bool:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/readyz") as response,
        ):
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _health(port: int, service: str) -> int:
    async with channel_to(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=15)
    return int(answer.status)
