"""py-inference-scheduler 0.1.0: the prefix index of GIE v1 in Python, beside ours."""

import sys
from importlib import import_module

import pytest

from tests.peers.comparison import Comparison
from tests.peers.driver import PLACE, Ours
from tests.peers.workload import CHUNK, conversations, hit_rate

PODS = ("pod-0", "pod-1", "pod-2")


@pytest.fixture
def framework(monkeypatch, versions):
    """Its modules; without Ray, which only its data layer imports."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PLACE)])
    made = import_module("py_inference_scheduler.framework")
    prefix = import_module("py_inference_scheduler.plugins.scorers.prefix_plugin")
    return made.CycleState, made.Endpoint, made.LLMRequest, prefix.PrefixCacheScorer


def test_blocks_are_counted_alike(framework, versions, keep):
    """Endpoint by endpoint, request by request, wherever any is known; a cold prompt differs."""
    state, endpoint, request, scorer = framework
    theirs = scorer()
    ours = Ours("gie-v1", PODS)
    pods = {name: endpoint(name=name) for name in PODS}
    steps = list(conversations(600))
    went, allowed = [], []
    for one in steps:
        given = request(request_id="", target_model="my-model", body=one.prompt)
        cycle = state()
        scores = theirs.score(cycle, given, pods)
        pod = max(PODS, key=lambda name: scores.get(name, 0.0))
        theirs.pre_request(cycle, given, pods[pod])
        went.append(pod)
        allowed.append(ours.send(one, told=pod)[1])
        counted = ours.scores["prefix-cache-scorer"]
        blocks = len(one.prompt) // CHUNK
        if any(counted.values()):
            assert {name: scores.get(name, 0.0) * blocks for name in PODS} == pytest.approx(
                {name: score * blocks for name, score in counted.items()}
            )
    alone = Ours("gie-v1", PODS)
    chosen = tuple(alone.send(one)[0] for one in steps)
    done = Comparison(
        f"py-inference-scheduler {versions['py-inference-scheduler']}",
        "prefix_cache",
        "gie-v1",
        PODS,
        tuple(went),
        tuple(allowed),
        chosen,
        (hit_rate(steps, went), hit_rate(steps, chosen)),
    )
    keep(done)
    assert done.disagreed == []
