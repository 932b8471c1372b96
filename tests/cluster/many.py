"""Measurement of the picker in front of hundreds of pods that come and go: `make cluster-many`.

`python -m tests.cluster.many [--write FILE] [PODS...]`. It takes the chart with an InferencePool of
its own and an Envoy beside the picker, pods on nodes that kwok plays, and a simulated engine behind
each address (`tests.cluster.engines`). Clients ask at an even rate while ten pods are deleted every
second, drawn from all, and their ReplicaSet makes ten others.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from bench.chaos.__main__ import write_between_marks
from bench.report.verdicts import quantile
from bench.termination import end_in_order
from tests.chart.tools import ToolsError
from tests.cluster.fake_nodes import FakeEngines, fake_engines, fake_models, fake_nodes
from tests.cluster.node import Node, missing
from tests.cluster.place import ClusterError, Place
from tests.cluster.release import ENVOY, MODELS, NAME, Namespace, load, namespace
from tests.envoy.rig import until
from tests.go_program import GoProgramError

SIZES: Final = (200, 1_000)
CHANGES_A_SECOND: Final = 10
CHURN_S: Final = 30
REST_S: Final = 10.0
RATE_PER_S: Final = 20.0
BEGIN_S_MAX: Final = 240.0
SETTLE_S_MAX: Final = 60.0
POLL_S: Final = 1.0
MARKS: Final = ("<!-- many, by `make cluster-many` -->", "<!-- end of many -->")
"""Marks of a page between which `--write` puts the table."""
_HEAD: Final = (
    "endpoints",
    "pods replaced",
    "requests",
    "lost",
    "CPU at rest",
    "CPU with changes",
    "memory before",
    "memory after",
    "loop late, p99",
    "new pod read, p50",
    "new pod read, slowest",
    "deleted pod still asked for",
)


class Picker(Struct, frozen=True):
    """Metrics that the picker shows of itself at one instant."""

    at_s: float
    cpu_s: float
    resident_bytes: float
    known: int
    ready: int
    inflight: float
    repairs: float
    lag: Mapping[float, float]
    """Upper bound in seconds -> beats of the event loop that were no later."""
    series: int
    endpoints: frozenset[str]
    """Endpoints that any series names."""


class Measured(Struct, frozen=True, kw_only=True):
    """Result for one number of pods."""

    pods: int
    replaced: int
    outcomes: Mapping[str, int]
    at_rest: tuple[Picker, Picker]
    """Two instants between which nobody asks and nothing changes."""
    changing: tuple[Picker, Picker]
    settled: Picker
    """Instant after the last change, with nothing in flight."""
    begun: Mapping[str, Any]
    """Observations of engines (members of `engines.Seen`) while the pool grew from none."""
    seen: Mapping[str, Any]
    """Observations of engines (members of `engines.Seen`) after that, among them of the changes."""
    live: frozenset[str]
    """Pods that the API server has in the end."""
    shown: frozenset[str]
    """Endpoints that the picker shows in the end."""

    @property
    def lost(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome != "200")


async def measure(
    node: Node, folder: Path, *, pods: int, churn_s: int = CHURN_S, seed: int = 1
) -> Measured:
    """Measure the picker with `pods` endpoints, which takes the cluster for some minutes.

    Raises `ClusterError`, `GoProgramError`, AssertionError.
    """
    with namespace(node, f"many-{pods}") as space:
        define_pools(node)
        space.install(
            {
                "pool": {"create": True, "matchLabels": {"app": MODELS}},
                "standalone": ENVOY,
                "debugToken": {"enabled": False},
            },
            folder,
        )
        async with (
            fake_nodes(node, pods),
            fake_engines(space) as engines,
            fake_models(space, pods),
        ):
            return await _measure(space, engines, pods, churn_s, Random(seed))


async def _measure(
    space: Namespace, engines: FakeEngines, pods: int, churn_s: int, random: Random
) -> Measured:
    await _ready(space, pods, BEGIN_S_MAX)
    begun = await engines.seen()
    rested = await _picker(space), await _after(REST_S, space)
    async with load(space.address(f"{NAME}-envoy", 8081), rate_per_s=RATE_PER_S) as asked:
        first = await _picker(space)
        replaced = await _replace(space, churn_s * CHANGES_A_SECOND, random)
        last = await _picker(space)
        await _ready(space, pods, SETTLE_S_MAX)
    await until(lambda: _is_idle(space), "nothing to be in flight", SETTLE_S_MAX)
    page = json.loads(_page(space, "debug/endpoints?format=json"))
    return Measured(
        pods=pods,
        replaced=replaced,
        outcomes=asked.requests,
        at_rest=rested,
        changing=(first, last),
        settled=await _picker(space),
        begun=begun,
        seen=await engines.seen(),
        live=frozenset(_names(space)),
        shown=frozenset(row["name"].rpartition("/")[2] for row in page["endpoints"]),
    )


def define_pools(node: Node) -> None:
    """Define InferencePool as published, from the folder of shared data.

    Raises `ClusterError` if that folder is not there.
    """
    beside = Path(__file__).parents[3] / "shared"
    folder = Path(os.environ.get("HOMING_SHARED", beside)) / "crds"
    if not folder.is_dir():
        raise ClusterError(f"{folder} is no folder: the definition of InferencePool is not here")
    node.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(folder))


async def _replace(space: Namespace, pods: int, random: Random) -> int:
    """Delete `pods` pods, ten a second, and return their number; their ReplicaSet makes others."""
    names: list[str] = []
    due_s = time.monotonic()
    for _ in range(pods // CHANGES_A_SECOND):
        if len(names) < CHANGES_A_SECOND:
            names = await asyncio.to_thread(_names, space)
            random.shuffle(names)
        gone, names = names[:CHANGES_A_SECOND], names[CHANGES_A_SECOND:]
        await asyncio.to_thread(space.kubectl, "delete", "pod", "--wait=false", *gone)
        due_s += 1.0
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return pods


def _names(space: Namespace) -> list[str]:
    """Return the names of fake pods that are not terminating."""
    path = f"/api/v1/namespaces/{space.name}/pods?labelSelector=app%3D{MODELS}"
    found = json.loads(space.node.kubectl("get", "--raw", path))["items"]
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]


async def _ready(space: Namespace, pods: int, s_max: float) -> None:
    """Wait until the picker knows `pods` endpoints and has read the page of each.

    It waits until exactly `pods` pods exist, too. Raises `ClusterError` after `s_max` seconds.
    """
    deadline_s = time.monotonic() + s_max
    while True:
        told = await _picker(space)
        if told.known == told.ready == pods == len(_names(space)):
            return
        if time.monotonic() > deadline_s:
            raise ClusterError(
                f"waited {s_max:.0f} s in vain for {pods} endpoints: the picker knows {told.known}, "
                f"{told.ready} of them ready"
            )
        await asyncio.sleep(POLL_S)


async def _is_idle(space: Namespace) -> bool:
    await asyncio.sleep(POLL_S)
    return not (await _picker(space)).inflight


async def _after(rest_s: float, space: Namespace) -> Picker:
    await asyncio.sleep(rest_s)
    return await _picker(space)


def _page(space: Namespace, path: str) -> str:
    """Return a page of the picker, by way of the API server."""
    port = f"/api/v1/namespaces/{space.name}/services/http:{NAME}:9090/proxy/{path}"
    return space.node.kubectl("get", "--raw", port)


async def _picker(space: Namespace) -> Picker:
    at_s = time.monotonic()
    text = await asyncio.to_thread(_page, space, "metrics")
    sums: dict[str, float] = {}
    lag: dict[float, float] = {}
    endpoints: set[str] = set()
    series = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series += 1
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if "endpoint_name" in sample.labels:
                endpoints.add(sample.labels["endpoint_name"])
            if sample.name == "homing_loop_lag_seconds_bucket":
                lag[float(sample.labels["le"])] = sample.value
    return Picker(
        at_s=at_s,
        cpu_s=sums["homing_process_cpu_seconds_total"],
        resident_bytes=sums["homing_process_resident_memory_bytes"],
        known=int(sums["homing_known_endpoints"]),
        ready=int(sums["homing_ready_endpoints"]),
        inflight=sums.get("homing_inflight_requests", 0.0),
        repairs=sums.get("homing_kube_repairs_total", 0.0),
        lag=lag,
        series=series,
        endpoints=frozenset(endpoints),
    )


def cores(between: tuple[Picker, Picker]) -> float:
    """Return the CPU that the picker took, as a share of one core."""
    first, last = between
    return (last.cpu_s - first.cpu_s) / (last.at_s - first.at_s)


def late_s(between: tuple[Picker, Picker], share: float) -> float:
    """Return an upper bound of the delay of `share` of the loop's beats, in seconds."""
    first, last = between
    counts = {bound: beats - first.lag[bound] for bound, beats in last.lag.items()}
    wanted = share * max(counts.values())
    return min(bound for bound, beats in counts.items() if beats >= wanted)


def cells(told: Measured) -> Sequence[str]:
    """Return a row of the table."""
    first_page_s = told.seen["first_page_s"]
    megabytes = (f"{at.resident_bytes / 1e6:.0f} MB" for at in (told.changing[0], told.settled))
    return (
        f"{told.pods:,}",
        str(told.replaced),
        f"{sum(told.outcomes.values()):,}",
        str(told.lost),
        f"{cores(told.at_rest):.0%} of a core",
        f"{cores(told.changing):.0%} of a core",
        *megabytes,
        f"at most {late_s(told.changing, 0.99) * 1e3:.0f} ms",
        f"{quantile(first_page_s, 0.5):.2f} s",
        f"{max(first_page_s):.2f} s",
        f"{max(told.seen['late_s'], default=0.0) * 1e3:.0f} ms",
    )


def as_markdown(rows: Sequence[Measured]) -> str:
    """Return the table."""
    lines = [_HEAD, ("---:",) * len(_HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Measure all sizes; return 0, or 1 if one could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.many", description=__doc__)
    parser.add_argument("pods", nargs="*", type=int, default=SIZES, help="endpoints of each row")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a page with the marks")
    options = parser.parse_args(arguments)
    end_in_order()
    if lacking := missing():
        print(lacking, file=sys.stderr)
        return 1
    node = Node(Place.of(os.environ), os.environ, print)
    rows = []
    try:
        with node.kept_up():
            for pods in options.pods:
                with tempfile.TemporaryDirectory(prefix="homing-many-") as folder:
                    rows.append(asyncio.run(measure(node, Path(folder), pods=pods)))
                print(as_markdown(rows[-1:]), flush=True)
    except (AssertionError, ClusterError, GoProgramError, ToolsError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(write_between_marks(page, as_markdown(rows), MARKS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
