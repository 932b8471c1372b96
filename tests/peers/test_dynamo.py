"""NVIDIA Dynamo 1.6.1: `SelectionService`, in this process."""

import struct
import sys
from collections import Counter
from importlib import import_module
from random import Random

import pytest

from tests.envoy.rig import until
from tests.peers.comparison import Comparison
from tests.peers.driver import PLACE, Ours
from tests.peers.workload import conversations, hit_rate

pytestmark = pytest.mark.timeout(240)
PODS = ("pod-0", "pod-1", "pod-2")
_MODEL = {"model_name": "m"}
_BLOCK_TOKENS = 64


class Selection:
    """The service, and what it was told to have in flight."""

    def __init__(self, service):
        self._service = service
        self._inflight = []
        self._sent = 0

    async def start(self):
        for number, name in enumerate(PODS):
            await self._service.upsert_worker(
                {
                    **_MODEL,
                    "worker_id": number,
                    "block_size": _BLOCK_TOKENS,
                    "endpoint": f"http://{name}",
                }
            )
        await until(
            lambda: self._service.ready()["schedulable_workers"] == len(PODS), "workers to be known"
        )

    async def send(self, step, prefilled):
        """The pod that gets `step`; then the prefills of those in flight at `prefilled` are over."""
        for _ in range(step.ends):
            await self._service.free_reservation(self._inflight.pop(0)[0])
        await self._settle()
        tokens = _tokens(step)
        self._sent += 1
        name = f"request-{self._sent}"
        asked = {**_MODEL, "token_ids": tokens, "selection_id": name}
        selected = await self._service.select_and_reserve(asked)
        self._inflight.append((name, selected["worker_id"]))
        await self._indexed(tokens, selected["worker_id"])
        for at in prefilled:
            await self._service.prefill_complete(self._inflight[at][0])
        return PODS[selected["worker_id"]]

    async def select(self, step):
        """The pod that would get `step`."""
        selected = await self._service.select({**_MODEL, "token_ids": _tokens(step)})
        return PODS[selected["worker_id"]]

    async def _settle(self):
        expected = Counter(worker for _, worker in self._inflight)

        def settled():
            loads = [each for model in self._service.loads(**_MODEL) for each in model["loads"]]
            return all(each["active_requests"] == expected[each["worker_id"]] for each in loads)

        await until(settled, "reservations to be freed")

    async def _indexed(self, tokens, worker):
        """What was routed is known only after a moment."""

        async def known():
            asked = await self._service.overlap_scores({**_MODEL, "token_ids": tokens})
            blocks = {each["worker_id"]: each["device_blocks"] for each in asked["workers"]}
            return blocks[worker] == len(tokens) // _BLOCK_TOKENS

        await until(known, "the prompt to be indexed")


def _tokens(step):
    """Four characters a token, as ours counts them."""
    return list(struct.unpack(f"<{len(step.prompt) // 4}I", step.prompt.encode()))


@pytest.fixture
async def selection(monkeypatch, versions):
    """Makes a service that decides by environment variables, as Dynamo is configured."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PLACE)])
    core = import_module("dynamo._core")
    made = []

    async def start(**environment):
        monkeypatch.setenv("DYN_USE_KV_EVENTS", "false")
        monkeypatch.setenv("DYN_LOG", "error")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        made.append(core.SelectionService(indexer_threads=1))
        service = Selection(made[-1])
        await service.start()
        return service

    yield start
    for service in made:
        service.shutdown()


async def compare(versions, policy, strategy, steps, service):
    """As the routers are compared; prefills end at random, alike on both sides."""
    following, alone = Ours(strategy, PODS), Ours(strategy, PODS)
    random = Random(2)
    waiting = []
    went, allowed, ours = [], [], []
    for step in steps:
        waiting = [at - step.ends for at in waiting if at >= step.ends]
        waiting.append(following.inflight - step.ends)
        over = [at for at in waiting if random.random() < 0.5]
        waiting = [at for at in waiting if at not in over]
        pod = await service.send(step, over)
        went.append(pod)
        allowed.append(following.send(step, told=pod)[1])
        ours.append(alone.send(step)[0])
        for at in over:
            following.prefilled(at)
            alone.prefilled(at)
    hits = (hit_rate(steps, went), hit_rate(steps, ours))
    name = f"ai-dynamo-runtime {versions['ai-dynamo-runtime']}"
    return Comparison(name, policy, strategy, PODS, tuple(went), tuple(allowed), tuple(ours), hits)


async def test_the_least_cost_is_the_same(selection, versions, keep):
    """Request by request: the service chooses among those of the least cost by ours."""
    steps = list(conversations(400, inflight_max=12))
    done = await compare(versions, "use_kv_events=false", "dynamo", steps, await selection())
    keep(done)
    assert done.disagreed == []
    assert done.decided > len(steps) / 2


TWO_TIERS = """
worker_selection:
  aggregated: two-tiers
  instances:
    - name: two-tiers
      type: dynamo-two-tier-cost-fn
"""


async def test_two_tiers_are_the_same(selection, versions, keep, tmp_path):
    """Its second policy: the load if it is uneven, else the cache, else the load."""
    config = tmp_path / "policy.yaml"
    config.write_text(TWO_TIERS)
    steps = list(conversations(400, inflight_max=12))
    service = await selection(DYN_ROUTER_POLICY_CONFIG=str(config))
    done = await compare(versions, "dynamo-two-tier-cost-fn", "dynamo-two-tier", steps, service)
    keep(done)
    assert done.disagreed == []
    assert done.decided > len(steps) / 4


async def test_a_temperature_draws_alike(selection, versions):
    """Of one state, 600 draws: each pod's share within 0.08 of what ours is drawn with."""
    service = await selection(DYN_ROUTER_TEMPERATURE="0.5")
    ours = Ours("dynamo-temperature", PODS)
    *steps, last = conversations(12, inflight_max=12, cold=0.0)
    for step in steps:
        ours.send(step, told=await service.send(step, ()))
    drawn = Counter([await service.select(last) for _ in range(600)])
    ours.send(last)
    assert {pod: drawn[pod] / 600 for pod in PODS} == pytest.approx(ours.chances, abs=0.08)
