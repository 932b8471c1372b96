"""Nodes that do not exist: kwok tells the API server that they and their pods run.

Their pods have addresses of `ADDRESSES`, which the network of the cluster takes for its own, so
that `tests.cluster.engines` can serve there. Both end with the process that started them.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tests.chart.rendering import ROOT
from tests.cluster.daemons import INSIDE
from tests.cluster.kwok import KWOK
from tests.cluster.node import Node
from tests.cluster.place import ClusterError
from tests.cluster.release import MODELS, Namespace
from tests.envoy.rig import dying_with_us

ADDRESSES: Final = "10.79.0.0/16"
PODS_A_NODE_MAX: Final = 200
_MARK: Final = "kwok.x-k8s.io/node"
_FAKE: Final = {_MARK: "fake"}
READY_S_MAX: Final = 60.0
END_S_MAX: Final = 180.0


class FakeEngines:
    """Engines that serve at the addresses of the fake pods of one namespace."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def seen(self) -> dict[str, Any]:
        """Return what engines saw since the last call: members of `engines.Seen`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        told: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return told


@asynccontextmanager
async def fake_nodes(node: Node, pods: int) -> AsyncIterator[None]:
    """Run as many fake nodes as `pods` need; nothing else is placed there."""
    program = KWOK.find(os.environ)
    names = [f"fake-{number}" for number in range(-(-pods // PODS_A_NODE_MAX))]
    _route("replace")
    with tempfile.NamedTemporaryFile("wb", suffix=".log") as log:
        process = await asyncio.create_subprocess_exec(
            *_inside(
                *(program, f"--kubeconfig={node.place.kubeconfig}"),
                f"--manage-nodes-with-annotation-selector={_MARK}=fake",
                *("--node-lease-duration-seconds=40", "--server-address=127.0.0.1:10247"),
                f"--config={Path(__file__).with_name('stages.yaml')}",
            ),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            nodes = [_node(name, number) for number, name in enumerate(names)]
            node.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(nodes))
            node.kubectl(
                *("wait", "--for=condition=Ready", f"--timeout={READY_S_MAX:.0f}s"),
                *(f"node/{name}" for name in names),
            )
            yield
        except BaseException:
            print(Path(log.name).read_text(errors="replace")[-3_000:])
            raise
        finally:
            node.kubectl("delete", "node", *names, "--wait=false", check=False)
            if process.returncode is None:
                process.terminate()
                await process.wait()
            _route("del")


@asynccontextmanager
async def fake_engines(space: Namespace, *flags: str) -> AsyncIterator[FakeEngines]:
    """Yield engines that serve the pods of `fake_models`.

    `flags` are those of `tests.cluster.engines`. Raises `ClusterError` if the engines do not begin.
    """
    command = [sys.executable, "-m", "tests.cluster.engines", space.name, f"app={MODELS}"]
    process = await asyncio.create_subprocess_exec(
        *_inside(*command, *flags),
        cwd=ROOT,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
        # Linux shares cores between sessions: engines and those who ask them are not one.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        if await process.stdout.readline() != b"following\n":
            raise ClusterError("engines of fake pods did not begin")
        yield FakeEngines(process)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


@asynccontextmanager
async def fake_models(space: Namespace, replicas: int) -> AsyncIterator[None]:
    """Run the project's own manifest of simulated pods on fake nodes; it is deleted afterwards."""
    text = (ROOT / "deploy/simulated-pods.yaml").read_text()
    (deployment,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment"]
    deployment["spec"]["replicas"] = replicas
    pod = deployment["spec"]["template"]["spec"]
    pod["nodeSelector"] = _FAKE
    pod["tolerations"] = [{"key": _MARK, "operator": "Exists"}]
    space.apply(yaml.safe_dump(deployment))
    try:
        yield
    finally:
        # Who tells that they ended goes next.
        space.kubectl(
            *("delete", f"deployment/{MODELS}", "--cascade=foreground"),
            *(f"--timeout={END_S_MAX:.0f}s",),
            check=False,
        )


def _node(name: str, number: int) -> dict[str, Any]:
    room = {"cpu": "1k", "memory": "1Ti", "pods": str(PODS_A_NODE_MAX + 50)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": _FAKE, "annotations": _FAKE},
        "spec": {
            "podCIDR": f"10.79.{number}.0/24",
            "podCIDRs": [f"10.79.{number}.0/24"],
            "taints": [{"key": _MARK, "value": "fake", "effect": "NoSchedule"}],
        },
        "status": {"allocatable": room, "capacity": room},
    }


def _inside(*command: str | Path) -> list[str]:
    """Return a command that runs `command` in the network of the cluster.

    It ends with this process.
    """
    enter, *flags = INSIDE
    # At the priority of pods, whose part they play, though tests run at a lower one.
    ordinary = ("nice", "-n", str(-os.nice(0)))
    return dying_with_us(shutil.which(enter) or enter, *flags, *ordinary, *command)


def _route(what: str) -> None:
    """Make addresses of fake pods those of the cluster's network itself, or undo that.

    `what` is "replace" or "del".
    """
    command = [*INSIDE, "ip", "route", what, "local", ADDRESSES, "dev", "lo"]
    subprocess.run(command, check=what != "del", capture_output=True)
