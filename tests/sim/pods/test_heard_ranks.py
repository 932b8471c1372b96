"""Ranks of `sim serve --kv-events --engine ranks`, heard by production's listener over sockets."""

import time
from random import Random

import pytest

from epp.core.kv_events.stream import StreamState
from epp.plugins.data_parallel_rank import RANK_HEADER
from epp.shell.engines import kv_events
from tests.shell.engines.kv_event_picker import Picker, eventually
from tests.sim.pods.test_heard_pods import prompts
from tests.sim.running import MODEL, running_pod

RANKS = 3
TWO = ("ranks:count=2",)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes seconds takes parts of them."""
    for name in ("BACKOFF_S", "BACKOFF_S_MAX", "WATCH_S"):
        monkeypatch.setattr(kv_events, name, 0.02)


async def served(pod, prompt, rank=None):
    """How many tokens of `prompt` the pod found in its cache."""
    headers = None if rank is None else {RANK_HEADER: str(rank)}
    answer = await pod.completion(prompt=prompt, max_tokens=5, headers=headers)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def told_all(picker, pod):
    """The picker, which scrapes meanwhile, has taken note of every frame of every rank."""
    kept = [events.kept_from(0) for events in pod.pod.kv_events]
    published = [frames[-1][0] if frames else None for frames in kept]

    def heard():
        picker.scrape()
        found = [one.noted for _, one in picker.listener.subscriptions()]
        return picker.live and found == published

    await eventually(heard)


def decided(picker, prompt):
    """As a gateway would ask."""
    asked = picker.asked(prompt, prompt_tokens=len(prompt))
    return picker.scheduler.schedule(asked, time.monotonic())


async def test_whoever_is_sent_to_a_rank_finds_there_what_was_predicted():
    """Under pressure, with what the decision says and nothing else: each hit is known before."""
    random = Random(3)
    pod_of = running_pod(kv_events=True, features=(f"ranks:count={RANKS}",), blocks_total=40)
    async with pod_of as pod, Picker(pod, ranks_chosen=True) as picker:
        await eventually(lambda: picker.live)
        placed = 0
        for prompt in prompts(80):
            decision = decided(picker, prompt)
            rank = decision.rank
            # Its own balancer places what is placed by nobody: here dice do, so that all get some.
            cached = await served(pod, prompt, random.randrange(RANKS) if rank is None else rank)
            if rank is not None:
                assert decision.request_headers() == {RANK_HEADER: str(rank)}
                assert cached == decision.predicted_tokens > 0
                placed += 1
            picker.ended(decision)
            await told_all(picker, pod)
        assert placed > 20
        told = picker.listener.snapshot()
        assert told.states["live"] == 1
        assert told.events["removed"] > 40
        assert (told.faults, told.incomplete) == ({}, 0)


async def test_two_pickers_predict_the_same():
    """Whoever of them decided."""
    async with (
        running_pod(kv_events=True, features=(f"ranks:count={RANKS}",)) as pod,
        Picker(pod, ranks_chosen=True) as one,
        Picker(pod, ranks_chosen=True) as other,
    ):
        for number, prompt in enumerate(prompts(20)):
            await served(pod, prompt, number % RANKS)
        for picker in (one, other):
            await told_all(picker, pod)
        for prompt in prompts(20):
            first, second = (decided(picker, prompt) for picker in (one, other))
            assert (first.rank, first.predicted_tokens) == (second.rank, second.predicted_tokens)


async def test_a_rank_is_one_that_the_server_has():
    """As vLLM answers; what is no number is nothing."""
    body = {"model": MODEL, "prompt": [7] * 100, "max_tokens": 1}
    async with running_pod(features=TWO) as pod:
        for rank, expected in (("1", 200), ("2", 400), ("-1", 400), ("x", 200)):
            url, headers = pod.url("/v1/completions"), {RANK_HEADER: rank}
            async with pod.client.post(url, json=body, headers=headers) as response:
                assert response.status == expected
                if expected == 400:
                    assert f"data_parallel_rank {rank} is out of range" in await response.text()


async def test_a_page_tells_the_blocks_of_every_rank():
    """So that stores and removals of all of them balance."""
    async with running_pod(features=TWO, blocks_total=77) as pod:
        async with pod.client.get(pod.url("/metrics")) as response:
            page = await response.text()
        rows = [row for row in page.splitlines() if row.startswith("vllm:cache_config_info{")]
        assert [f'engine="{rank}"' in row for rank, row in enumerate(rows)] == [True, True]
        assert all('num_gpu_blocks="77"' in row for row in rows)


async def test_without_a_plugin_ranks_are_not_heard():
    async with running_pod(kv_events=True, features=TWO) as pod, Picker(pod) as picker:
        await eventually(lambda: "lists 2 ranks behind 1 endpoint" in picker.row().problem)
        assert picker.row().state is StreamState.NONE
