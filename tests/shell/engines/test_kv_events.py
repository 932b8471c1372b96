"""Against pods on loopback that publish."""

import asyncio
import json
import time

import pytest

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import Reconfigured
from epp.core.knowledge.exact_parameters import PodDiscoveryConfig
from epp.core.kv_events.stream import StreamState
from epp.shell.engines import kv_event_turns, kv_events
from epp.shell.engines.kv_event_places import Place, places_of
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from tests.shell.engines.kv_event_picker import INDEX, Picker, eventually, prompt
from tests.shell.engines.kv_event_pod import KVEventPod


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes seconds takes parts of them."""
    for name in ("BACKOFF_S", "BACKOFF_S_MAX", "WATCH_S", "NO_SOURCE_S"):
        monkeypatch.setattr(kv_events, name, 0.02)


async def test_a_pod_is_heard_where_it_says_that_it_publishes():
    """What it cached before anybody listened too."""
    async with KVEventPod() as pod:
        pod.serve(prompt(1, 2))
        async with Picker(pod) as picker:
            await eventually(lambda: picker.believed(prompt(1, 2)) == 64)
            for parts in ((1, 3), (1, 2, 4), (5, 6), (1, 3, 3)):
                tokens = prompt(*parts)
                cached = pod.engine.cached_tokens(tokens)
                assert picker.believed(tokens) == pod.serve(tokens) == cached
                held = pod.engine.cached_tokens(tokens)
                await eventually(lambda tokens=tokens, held=held: picker.believed(tokens) == held)
            await eventually(lambda: picker.live)
            row = picker.row()
            assert (row.complete, row.problem, row.silent) == (True, "", False)
            assert row.place == f"tcp://127.0.0.1:{pod.live_port}"


async def test_a_frame_that_was_lost_is_asked_for_again():
    """And applied once the process was seen."""
    async with KVEventPod() as pod, Picker(pod) as picker:
        await eventually(lambda: pod.subscribers and picker.live)
        pod.serve(prompt(1))
        pod.serve(prompt(2), lost=True)
        pod.serve(prompt(3))
        await eventually(lambda: picker.row().state is StreamState.REPLAYING)
        picker.scrape()
        await eventually(lambda: picker.live)
        assert picker.believed(prompt(2)) == 32
        assert picker.believed(prompt(3)) == 32
        assert pod.replayed == 2


async def test_who_is_cut_off_comes_back():
    """What was told meanwhile is asked for."""
    async with KVEventPod() as pod, Picker(pod) as picker:
        await eventually(lambda: pod.subscribers and picker.live)
        pod.serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1)) == 32)
        pod.cut()
        pod.serve(prompt(2))
        await eventually(lambda: pod.subscribers)
        await eventually(lambda: picker.row().state is StreamState.REPLAYING)
        picker.scrape()
        await eventually(lambda: picker.believed(prompt(2)) == 32)
        await eventually(lambda: picker.live)


async def test_a_turn_that_fails_is_not_the_last(monkeypatch):
    """It is told to the loop, and what comes later is taken note of."""
    failed = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failed.append(context["exception"])
    )
    async with KVEventPod() as pod, Picker(pod) as picker:
        await eventually(lambda: pod.subscribers and picker.live)

        def fetch(until_s):
            monkeypatch.undo()
            raise RuntimeError("a defect")

        monkeypatch.setattr(picker.listener._reception.turns.reads, "fetch", fetch)
        await eventually(lambda: failed)
        pod.serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1)) == 32)
        assert [type(error) for error in failed] == [RuntimeError]


async def test_who_cannot_be_heard_is_named():
    """And is asked anew where its source is."""
    gone = json.dumps({"0": {"endpoint": "tcp://*:1"}}).encode()
    async with KVEventPod(sources=gone) as pod, Picker(pod) as picker:
        await eventually(lambda: "tcp://127.0.0.1:1 cannot be received" in picker.row().problem)
        pod.sources = None
        await eventually(lambda: pod.subscribers)
        await eventually(lambda: picker.live)
        assert pod.asked >= 2


async def test_who_does_not_know_the_path_is_tried_at_the_port_of_the_field(monkeypatch):
    """Without replay: nobody said where."""
    async with KVEventPod(sources=b"") as pod:
        monkeypatch.setattr(kv_events, "DEFAULT_PORT", pod.live_port)
        async with Picker(pod) as picker:
            await eventually(lambda: pod.subscribers and picker.live)
            pod.serve(prompt(1))
            await eventually(lambda: picker.believed(prompt(1)) == 32)
            assert pod.replayed == 0


async def test_with_a_port_nobody_is_asked():
    async with KVEventPod() as pod:
        ports = PodDiscoveryConfig(socket_port=pod.live_port, replay_socket_port=pod.replay_port)
        async with Picker(pod, pod_discovery_config=ports) as picker:
            await eventually(lambda: pod.subscribers and picker.live)
            assert (pod.asked, pod.replayed) == (0, 1)


async def test_a_pod_without_a_source_is_named():
    async with KVEventPod(sources=b"{}") as pod, Picker(pod) as picker:
        await eventually(lambda: "lists no source" in picker.row().problem)
        assert picker.row().state is StreamState.NONE


async def test_who_did_not_answer_is_asked_again_soon(monkeypatch):
    """It is about to come; who answered that it has no source is not."""
    monkeypatch.setattr(kv_events, "NO_SOURCE_S", 3_600.0)
    async with KVEventPod() as pod:
        pod.away = True
        async with Picker(pod) as picker:
            await eventually(lambda: "cannot be reached" in picker.row().problem)
            pod.away = False
            await eventually(lambda: pod.subscribers and picker.live)


async def test_one_that_is_no_publisher_is_named():
    """It speaks HTTP."""
    async with KVEventPod() as pod:
        ports = PodDiscoveryConfig(socket_port=pod.port)
        async with Picker(pod, pod_discovery_config=ports) as picker:
            await eventually(lambda: "cannot be received" in picker.row().problem)


async def test_what_is_no_message_of_events_costs_a_count():
    """The next one counts again."""
    async with KVEventPod() as pod, Picker(pod) as picker:
        await eventually(lambda: pod.subscribers and picker.live)
        pod.send(b"one part")
        pod.send(b"topic", b"short", b"x")
        pod.serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1)) == 32)
        ((_, subscription),) = picker.listener.subscriptions()
        assert subscription.unreadable == 2


async def test_an_endpoint_that_left_is_not_heard_any_more():
    """Nor is anybody, once no index hears engines."""
    async with KVEventPod() as one, KVEventPod() as other, Picker(one, other) as picker:
        await eventually(lambda: one.subscribers and other.subscribers and picker.live)
        picker.replace(picker.endpoints[1])
        await eventually(lambda: not one.subscribers)
        other.serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1), slot=1) == 32)
        settings = build_settings(default_config(plugin_tables()))
        picker.scheduler.take(Reconfigured(settings), time.monotonic())
        picker.listener.replace(picker.endpoints[1:])
        await eventually(lambda: not other.subscribers)
        assert picker.listener.rows() == []


async def test_what_was_told_is_counted_and_shown():
    """Of endpoints that left too; nothing while no index hears engines."""
    async with KVEventPod() as pod, Picker(pod) as picker:
        await eventually(lambda: pod.subscribers and picker.live)
        pod.serve(prompt(1))
        pod.send(b"topic", (1).to_bytes(8, "big"), b"garbage")
        await eventually(lambda: picker.listener.snapshot().faults)
        picker.replace()
        told = picker.listener.snapshot()
        assert told.events == {"stored": 1}
        assert told.faults == {"not a batch": 1}
        assert told.streams["frames"] == 2
        assert sum(told.states.values()) == 0
        settings = build_settings(default_config(plugin_tables()))
        picker.scheduler.take(Reconfigured(settings), time.monotonic())
        picker.listener.replace(())
        assert picker.listener.snapshot() is None


async def test_a_row_tells_how_an_endpoint_is_heard():
    """And rows tell nothing of it where nobody is to be."""
    async with KVEventPod(sources=b"{}") as pod, Picker(pod) as picker:
        await eventually(lambda: picker.row().problem)
        states = EndpointStates(picker.scheduler)
        asked = (picker.scheduler, states, time.monotonic(), None)
        (row,) = endpoint_rows(*asked, picker.listener.row_of)
        assert row["kv_events"] == "none"
        assert "lists no source" in row["kv_events_problem"]
        assert row["kv_events_source"] is row["kv_events_lag_s"] is None
        assert row["kv_events_sequence"] is None
        (row,) = endpoint_rows(*asked)
        assert "kv_events" not in row
        pod.sources = None
        await eventually(lambda: picker.live)
        pod.serve(prompt(1))
        pod.serve(prompt(2))
        await eventually(lambda: picker.row().sequence == 1)
        (row,) = endpoint_rows(*asked, picker.listener.row_of)
        assert (row["kv_events"], row["kv_events_problem"]) == ("live", None)
        assert row["kv_events_source"] == f"tcp://127.0.0.1:{pod.live_port}"
        assert row["kv_events_lag_s"] > 0.0


async def test_an_index_that_was_opened_anew_is_told_all_again():
    async with KVEventPod() as pod, Picker(pod) as picker:
        await eventually(lambda: pod.subscribers and picker.live)
        pod.serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1)) == 32)
        picker.scheduler.indexes.open(INDEX)
        assert picker.believed(prompt(1)) == 0
        await eventually(lambda: picker.believed(prompt(1)) == 32)


async def test_who_says_more_than_there_is_time_for_is_not_read_from(monkeypatch):
    """What it cannot send its engine drops; what was read is taken note of."""
    monkeypatch.setattr(kv_event_turns, "WAITING_BYTES_MAX", 2_000)
    async with KVEventPod(blocks=4_000) as pod, Picker(pod) as picker:
        await eventually(lambda: pod.subscribers and picker.live)
        for part in range(300):
            pod.serve(prompt(part))
        await eventually(lambda: picker.believed(prompt(299)) == 32)
        assert picker.believed(prompt(150)) == 32


RANK = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "x"}


@pytest.mark.parametrize(
    ("page", "rank", "found"),
    [
        ({"0": RANK}, 0, Place("10.0.0.1", 5557, 5558)),
        ({"0": RANK}, 3, Place("10.0.0.1", 5557, 5558)),
        ({"0": RANK, "1": RANK | {"endpoint": "tcp://1.2.3.4:6000"}}, 1, Place("10.0.0.1", 6000, 5558)),
        ({"0": RANK | {"replay_endpoint": None}}, 0, Place("10.0.0.1", 5557, None)),
        ({"0": RANK, "1": RANK}, 2, "lists no source of rank 2"),
        ({"0": RANK, "1": RANK, "2": RANK, "3": RANK}, 0, "lists 4 ranks behind 3 endpoints"),
        ({}, 0, "lists no source"),
        ({"0": RANK | {"endpoint": "ipc:///tmp/x"}}, 0, "lists no source that publishes"),
        ({"0": RANK | {"endpoint": "tcp://*:99999"}}, 0, "lists no source that publishes"),
        ({"0": RANK | {"publisher": "null"}}, 0, "lists no source that publishes"),
        ({"0": RANK | {"enable_kv_cache_events": False}}, 0, "lists no source that publishes"),
        ([], 0, "answered with something other"),
        ({"0": "x"}, 0, "answered with something other"),
    ],
)  # fmt: skip
def test_where_an_engine_publishes_is_read_from_its_answer(page, rank, found):
    """The port alone: an engine does not say where else this picker connects to."""
    said = places_of(json.dumps(page).encode(), "10.0.0.1", rank, 3, ranks_chosen=True)
    if isinstance(found, str):
        assert found in said
    else:
        assert said == (found,)
