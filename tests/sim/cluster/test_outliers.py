"""Which pod is bad: found among simulated ones by what the picker sees of their answers."""

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from epp.configuration.config import DEFAULT_CONFIG
from epp.core.knowledge.ejection import Cause
from epp.core.protocol.budget import BodyBudget
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.metrics.snapshot import pool_snapshot
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from epp.shell.process.pressure import MemoryPressure
from sim.cluster.policies import policy_source, scheduler_of
from tests.sim.made import arrivals, cluster, kind

SLOW_SPEED = 0.15
WEIGHTS = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: outlier-ejection
  parameters: {enabled: false}
- type: prefix-cache-scorer
- type: queue-scorer
- type: active-request-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
  - pluginRef: queue-scorer
  - pluginRef: active-request-scorer
"""


@pytest.fixture
def telling(tmp_path):
    """A configuration by which outliers are told of and nobody is ejected."""
    file = tmp_path / "telling.yaml"
    off = "plugins:\n- {type: outlier-ejection, parameters: {enabled: false}}\n"
    file.write_text(DEFAULT_CONFIG.replace("plugins:\n", off, 1), encoding="utf-8")
    return policy_source(str(file))


class Watched:
    """A run, and which pods it was told of meanwhile."""

    def __init__(self, speeds, *, rate=8.0, count=700, policy="default", **settings):
        self.causes = {}
        self.ejected = set()
        self.slowness = {}
        self.ended = []
        given = arrivals(count, rate=rate, groups=40, blocks=(4, 40), output=(20, 200))
        pods = tuple(structs.replace(kind(), speed=speed) for speed in speeds)
        self.cluster = cluster(given, pods=pods, policy=policy, ended=self.ended.append, **settings)
        self.cluster.run(self._look)

    def _look(self):
        scheduler = scheduler_of(self.cluster.pickers.policies[0])
        for slot, outlier in scheduler.outliers.detected(self.cluster.loop.now):
            self.causes.setdefault(slot, outlier.cause)
            if outlier.ejected:
                self.ejected.add(slot)
        self.slowness.update(scheduler.outliers.slowness())

    def requests_at(self, pod):
        return sum(request.pod is self.cluster.pods[pod] for request in self.ended)


def pages_name(scheduler, now):
    """Whom the page of metrics and that of endpoints name, which must be the same."""
    registry = CollectorRegistry()
    bodies, pressure = BodyBudget(1), MemoryPressure(1)
    Telemetry(registry, lambda: pool_snapshot(scheduler, "pool", bodies, pressure, None, now))
    named = {
        sample.labels["endpoint_name"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "homing_per_endpoint_outlier"
    }
    rows = endpoint_rows(scheduler, EndpointStates(scheduler), now)
    assert named == {row["name"] for row in rows if row["outlier"] == "slow"}
    assert named == {row["name"] for row in rows if row["slowness"] >= 3}
    return named


@pytest.mark.parametrize("response_chunks", [False, True], ids=["ends", "chunks"])
@pytest.mark.parametrize("pods", [4, 8])
def test_a_slow_pod_is_named_and_nobody_else(pods, response_chunks, telling):
    """Though load scorers send it little, and whether or not the gateway shows first chunks."""
    bad = 2
    speeds = [SLOW_SPEED if pod == bad else 1.0 for pod in range(pods)]
    watched = Watched(speeds, rate=1.0 * pods, policy=telling, response_chunks=response_chunks)
    assert watched.causes == {bad: Cause.SLOW}
    assert pages_name(
        scheduler_of(watched.cluster.pickers.policies[0]), watched.cluster.loop.now
    ) == {f"pod-{bad}"}
    assert watched.slowness[bad] > 3
    assert all(watched.slowness[pod] < 2 for pod in range(pods) if pod != bad)
    assert watched.ejected == set()


@pytest.mark.parametrize("response_chunks", [False, True], ids=["ends", "chunks"])
@pytest.mark.parametrize(
    "speeds",
    [(1.0, 1.0, 0.8, 0.8, 0.5, 0.5, 1.5, 1.0), (1.0, 1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 0.3)],
    ids=["mixed", "two kinds"],
)
def test_in_a_healthy_pool_of_several_cards_nobody_is_named(speeds, response_chunks):
    watched = Watched(speeds, response_chunks=response_chunks)
    assert watched.causes == {}
    assert len(watched.slowness) == len(speeds)


def test_nobody_is_named_in_a_crowd():
    """More traffic than the pods bear: all are slow, none beside the others."""
    watched = Watched((1.0,) * 4, rate=60.0, count=1_500)
    assert watched.causes == {}


def test_a_slow_pod_is_ejected_by_default_and_tried_again(tmp_path):
    """It gets a part of what it had, and more than nothing: it may have been mended."""
    files = {"kept": WEIGHTS, "ejecting": WEIGHTS.replace("enabled: false", "")}
    speeds = (1.0, SLOW_SPEED, 1.0, 1.0)
    runs = {}
    for name, text in files.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(text, encoding="utf-8")
        runs[name] = Watched(speeds, rate=8.0, count=2_000, policy=policy_source(str(file)))
    ejecting, kept = runs["ejecting"], runs["kept"]
    assert (ejecting.ejected, kept.ejected) == ({1}, set())
    assert set(ejecting.causes) == set(kept.causes) == {1}
    outliers = scheduler_of(ejecting.cluster.pickers.policies[0]).outliers
    assert outliers.ejection.total[Cause.SLOW] >= 2
    assert 0 < ejecting.requests_at(1) < 0.5 * kept.requests_at(1)
