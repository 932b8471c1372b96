"""Pods of `sim serve --kv-events`, heard by production's listener over sockets."""

import contextlib
from random import Random

import pytest

from epp.core.kv_events import stream
from epp.core.kv_events.stream import StreamState
from epp.shell.engines import kv_events
from tests.pod_relay import ADDRESS, PodRelay
from tests.shell.engines.kv_event_picker import Picker, eventually
from tests.sim.running import running_pod

HEAD_TOKENS = 240


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes seconds takes parts of them."""
    for name in ("BACKOFF_S", "BACKOFF_S_MAX", "WATCH_S"):
        monkeypatch.setattr(kv_events, name, 0.02)
    monkeypatch.setattr(stream, "STALE_S", 0.1)


def prompts(count, *, seed=1, heads=6):
    """Beginning like others, as far as it happens."""
    random = Random(f"{seed}:prompts")
    known = [[random.getrandbits(17) for _ in range(HEAD_TOKENS)] for _ in range(heads)]
    for _ in range(count):
        head = random.choice(known)[: random.randrange(HEAD_TOKENS) + 1]
        yield [*head, *(random.getrandbits(17) for _ in range(random.randrange(1, 60)))]


async def served(pod, prompt):
    """How many tokens of `prompt` the pod found in its cache."""
    answer = await pod.completion(prompt=prompt, max_tokens=5)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def told_all(picker, pod, process=1.0):
    """The picker, which scrapes meanwhile, has taken note of every frame that `pod` has published."""
    published = pod.pod.kv_events[0].kept_from(0)[-1][0]

    def heard():
        picker.scrape(process)
        ((_, subscription),) = picker.listener.subscriptions()
        return subscription.state is StreamState.LIVE and subscription.stream.last == published

    await eventually(heard)


async def predicted_and_served(picker, pod, given, process=1.0):
    """Of each prompt, when all that was told is known."""
    found = []
    for prompt in given:
        predicted = picker.believed(prompt)
        found.append((predicted, await served(pod, prompt)))
        await told_all(picker, pod, process)
    return found


def exact(found):
    assert sum(cached > 0 for _, cached in found) > len(found) / 4, "prompts share too little"
    return all(predicted == cached for predicted, cached in found)


@contextlib.asynccontextmanager
async def heard_through_a_relay(pod):
    """(relay, picker), which has heard all."""
    async with (
        PodRelay(*pod.ports) as relay,
        Picker(pod, host=ADDRESS) as picker,
    ):
        await served(pod, [1] * 100)
        await eventually(picker.listener.subscriptions)
        await told_all(picker, pod)
        yield relay, picker


async def test_each_hit_is_known_before():
    """Under pressure: as many blocks are evicted as there are."""
    async with running_pod(kv_events=True, blocks_total=40) as pod, Picker(pod) as picker:
        await eventually(lambda: picker.live)
        found = await predicted_and_served(picker, pod, prompts(60))
        assert exact(found)
        told = picker.listener.snapshot()
        assert told.events["removed"] > 40
        assert (told.faults, told.incomplete) == ({}, 0)


async def test_adapters_are_known_apart():
    async with running_pod(kv_events=True) as pod, Picker(pod) as picker:
        await eventually(lambda: picker.live)
        prompt = [7] * 100
        await pod.completion(prompt=prompt, max_tokens=1, model="base-model")
        await told_all(picker, pod)
        assert picker.believed(prompt) == 96
        for _ in range(2):
            await pod.completion(prompt=prompt, max_tokens=1, model="sql")
            await told_all(picker, pod)
        assert picker.believed(prompt, model="sql") == 96
        assert picker.believed(prompt) == 0, "that name may be another adapter's"
        assert picker.believed([8] * 100, model="sql") == 0


async def test_who_joins_late_knows_as_much():
    """What is kept is told again."""
    async with running_pod(kv_events=True, blocks_total=60) as pod:
        for prompt in prompts(30):
            await served(pod, prompt)
        async with Picker(pod) as picker:
            await eventually(lambda: picker.listener.subscriptions() and picker.live)
            await told_all(picker, pod)
            assert picker.row().complete
            assert exact(await predicted_and_served(picker, pod, prompts(30, seed=1)))


async def test_a_cache_that_is_reset_is_forgotten_with_the_next_step():
    async with running_pod(kv_events=True) as pod, Picker(pod) as picker:
        await eventually(lambda: picker.live)
        await served(pod, [7] * 100)
        await told_all(picker, pod)
        async with pod.client.post(pod.url("/reset_prefix_cache")) as response:
            assert response.status == 200
        await served(pod, [8] * 100)
        await told_all(picker, pod)
        assert (picker.believed([7] * 100), picker.believed([8] * 100)) == (0, 96)


async def test_a_pod_that_restarts_is_forgotten_and_heard_anew():
    """Its counter begins anew, and is beyond what was heard before it is heard again."""
    small = {"kv_events": True, "blocks_total": 60}
    async with contextlib.AsyncExitStack() as first:
        before = await first.enter_async_context(running_pod(**small))
        async with Picker(before) as picker:
            await eventually(lambda: picker.live)
            old = list(prompts(10))
            assert len(await predicted_and_served(picker, before, old)) == len(old)
            await first.aclose()
            async with running_pod(**small, ports=before.ports) as after:
                for prompt in prompts(20, seed=2):
                    await served(after, prompt)
                await told_all(picker, after, process=2.0)
                assert all(picker.believed(prompt) == 0 for prompt in old)
                found = await predicted_and_served(picker, after, prompts(30, seed=2), process=2.0)
                assert exact(found)


async def test_a_stream_that_is_cut_is_stale_and_comes_back():
    """What was told meanwhile is asked for."""
    async with (
        running_pod(kv_events=True, blocks_total=60) as pod,
        heard_through_a_relay(pod) as (relay, picker),
    ):
        relay.cut()
        await eventually(lambda: "cannot be received" in picker.row().problem)
        await eventually(lambda: picker.row().state is StreamState.STALE)
        for prompt in prompts(20):
            await served(pod, prompt)
        relay.mend()
        await eventually(lambda: picker.row().state is StreamState.REPLAYING)
        await told_all(picker, pod)
        assert picker.row().problem == ""
        assert exact(await predicted_and_served(picker, pod, prompts(30)))


async def test_frames_that_are_lost_are_asked_for_again():
    async with (
        running_pod(kv_events=True, blocks_total=60) as pod,
        heard_through_a_relay(pod) as (relay, picker),
    ):
        relay.lose_every = 3
        for prompt in prompts(20):
            await served(pod, prompt)
        await eventually(lambda: picker.row().state is StreamState.REPLAYING)
        relay.mend()
        await told_all(picker, pod)
        assert exact(await predicted_and_served(picker, pod, prompts(30)))
        assert relay.lost
        assert picker.listener.snapshot().streams["gaps"]
        assert picker.row().complete


async def test_the_wrong_port_is_named():
    """That of old frames, which speaks the same protocol and never says a word by itself."""
    async with (
        running_pod(kv_events=True) as pod,
        heard_through_a_relay(pod) as (relay, picker),
    ):
        relay.mislead()
        await eventually(lambda: "is a socket of another type" in picker.row().problem)
        await eventually(lambda: picker.row().state is StreamState.STALE)
        relay.mend()
        await eventually(lambda: picker.row().problem == "")
        await eventually(lambda: picker.row().state is StreamState.REPLAYING)
        await told_all(picker, pod)
