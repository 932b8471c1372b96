"""Against servers on loopback with several ranks behind one address, each of which publishes."""

import contextlib
import json

import pytest

from epp.core.decision.inputs import Reconfigured
from epp.core.knowledge.exact_parameters import PodDiscoveryConfig
from epp.core.knowledge.index import RANKS_MAX
from epp.core.kv_events.stream import StreamState
from epp.shell.engines import kv_events
from epp.shell.engines.kv_event_places import Place, places_of
from epp.shell.engines.kv_event_server import Rejection
from tests.shell.engines.kv_event_picker import INDEX, Picker, eventually, prompt, settings_of
from tests.shell.engines.kv_event_pod import KVEventPod


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes seconds takes parts of them."""
    for name in ("BACKOFF_S", "BACKOFF_S_MAX", "WATCH_S", "NO_SOURCE_S"):
        monkeypatch.setattr(kv_events, name, 0.02)


@contextlib.asynccontextmanager
async def server(ranks):
    """Its ranks; the first answers for all."""
    async with contextlib.AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(KVEventPod()) for _ in range(ranks)]
        pods[0].sources = pods[0].page(*pods[1:])
        yield pods


def held(picker, tokens):
    """Tokens of a prompt that each rank is believed to hold."""
    asked = picker.asked(tokens)
    index = picker.scheduler.indexes[INDEX]
    return [blocks * 16 for blocks in index.held_by_ranks(asked, 0, 0.0)]


async def test_each_rank_is_heard():
    """The endpoint is believed to hold what the best of them holds."""
    async with server(3) as ranks, Picker(ranks[0], ranks_chosen=True) as picker:
        await eventually(lambda: picker.live and all(rank.subscribers for rank in ranks))
        ranks[1].serve(prompt(1, 2))
        ranks[2].serve(prompt(1, 3))
        await eventually(lambda: held(picker, prompt(1, 2)) == [0, 64, 32])
        assert picker.believed(prompt(1, 2)) == 64
        row = picker.row()
        assert (row.state, row.complete, row.problem) == (StreamState.LIVE, True, "")
        assert len(picker.listener.rows()) == 1


async def test_a_rank_that_dies_is_forgotten_alone():
    """And named."""
    async with server(3) as ranks, Picker(ranks[0], ranks_chosen=True) as picker:
        await eventually(lambda: picker.live and all(rank.subscribers for rank in ranks))
        ranks[0].serve(prompt(1))
        ranks[1].serve(prompt(1, 2))
        await eventually(lambda: held(picker, prompt(1, 2)) == [32, 64, 0])
        await ranks[1].__aexit__()
        await eventually(lambda: picker.row().state is StreamState.STALE)
        assert picker.row().problem.startswith("rank 1 of 3: tcp://127.0.0.1:")
        assert held(picker, prompt(1, 2)) == [32, 0, 0]
        assert picker.believed(prompt(1, 2)) == 32
        assert picker.listener.snapshot().states["stale"] == 1


async def test_an_engine_that_restarts_with_fewer_ranks_loses_those_that_are_gone():
    """Though its first rank is where it was."""
    async with server(3) as ranks, Picker(ranks[0], ranks_chosen=True) as picker:
        await eventually(lambda: picker.live and all(rank.subscribers for rank in ranks))
        ranks[2].serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1)) == 32)
        picker.scrape(process=1.0)
        ranks[0].sources = None
        for gone in ranks[1:]:
            await gone.__aexit__()
        picker.scrape(process=2.0)
        await eventually(lambda: picker.scheduler.indexes[INDEX].ranks_at(0) == 1)
        await eventually(lambda: picker.live)
        assert picker.believed(prompt(1)) == 0
        ranks[0].serve(prompt(2))
        await eventually(lambda: picker.believed(prompt(2)) == 32)


async def test_ranks_are_not_given_up_because_something_else_answers():
    """As a proxy does while its engine starts; asked again, it tells of one rank."""
    async with server(2) as ranks, Picker(ranks[0], ranks_chosen=True) as picker:
        await eventually(lambda: picker.live and all(rank.subscribers for rank in ranks))
        picker.scrape(process=1.0)
        ranks[0].sources = b""
        asked = ranks[0].asked
        picker.scrape(process=2.0)
        await eventually(lambda: ranks[0].asked >= asked + 2)
        assert picker.scheduler.indexes[INDEX].ranks_at(0) == 2
        ranks[0].sources = None
        await eventually(lambda: picker.scheduler.indexes[INDEX].ranks_at(0) == 1)


async def test_ranks_that_are_gone_are_found_out_where_nothing_else_tells():
    """No scrape shows that the engine restarted."""
    async with server(2) as ranks, Picker(ranks[0], ranks_chosen=True) as picker:
        await eventually(lambda: picker.live and all(rank.subscribers for rank in ranks))
        ranks[0].sources = None
        await ranks[1].__aexit__()
        await eventually(lambda: picker.scheduler.indexes[INDEX].ranks_at(0) == 1)
        await eventually(lambda: picker.live)


async def test_an_engine_that_restarts_with_more_ranks_is_heard_by_all():
    async with server(2) as ranks, Picker(ranks[0], ranks_chosen=True) as picker:
        both, ranks[0].sources = ranks[0].sources, None
        await eventually(lambda: picker.live and ranks[0].subscribers)
        picker.scrape(process=1.0)
        ranks[0].sources = both
        picker.scrape(process=2.0)
        await eventually(lambda: ranks[1].subscribers)
        ranks[1].serve(prompt(1))
        await eventually(lambda: held(picker, prompt(1)) == [0, 32])


async def test_without_a_plugin_that_places_requests_ranks_are_not_heard():
    """The reason says what to declare; once that is done they are."""
    async with server(2) as ranks, Picker(ranks[0]) as picker:
        await eventually(lambda: "lists 2 ranks behind 1 endpoint" in picker.row().problem)
        assert "declare a data-parallel-rank-producer" in picker.row().problem
        assert picker.row().state is StreamState.NONE
        picker.scheduler.take(Reconfigured(settings_of(ranks_chosen=True)), 0.0)
        picker.listener.replace(picker.endpoints)
        await eventually(lambda: picker.live and all(rank.subscribers for rank in ranks))


async def test_where_only_ports_are_configured_ranks_count_up(monkeypatch):
    """Nobody is asked; a rank after the first may well be elsewhere, and is named then."""
    async with KVEventPod() as pod:
        ports = PodDiscoveryConfig(socket_port=pod.live_port, data_parallel_size=2)
        async with Picker(pod, ranks_chosen=True, pod_discovery_config=ports) as picker:
            await eventually(lambda: pod.subscribers)
            problem = f"rank 1 of 2: tcp://127.0.0.1:{pod.live_port + 1} cannot be received"
            await eventually(lambda: picker.row().problem.startswith(problem))
            assert pod.asked == 0


def test_the_port_of_the_last_rank_is_one():
    with pytest.raises(ValueError, match="socketPort is 65535 with dataParallelSize 2"):
        PodDiscoveryConfig(socket_port=65_535, data_parallel_size=2)


async def test_two_pickers_hear_all_ranks():
    """Nothing is shared, and both believe the same."""
    async with (
        server(2) as ranks,
        Picker(ranks[0], ranks_chosen=True) as first,
        Picker(ranks[0], ranks_chosen=True) as second,
    ):
        await eventually(lambda: all(len(rank.subscribers) == 2 for rank in ranks))
        ranks[1].serve(prompt(1))
        for picker in (first, second):
            await eventually(lambda picker=picker: held(picker, prompt(1)) == [0, 32])


async def test_who_connects_besides_speaks_for_none_of_the_ranks():
    """It does not say which it is."""
    central = {"zmq_endpoint": "tcp://127.0.0.1:0"}
    async with server(2) as ranks, Picker(ranks[0], ranks_chosen=True, **central) as picker:
        await eventually(lambda: picker.live and all(rank.subscribers for rank in ranks))
        listening = picker.listener.server
        await eventually(lambda: listening.port)
        async with KVEventPod() as other:
            await other.connect(listening.port)
            other.serve(prompt(1))
            await eventually(lambda: listening.turned[Rejection.TAKEN] == 1)
        assert picker.believed(prompt(1)) == 0
        assert picker.live


def central(ranks):
    """Nobody is asked; engines connect."""
    ports = PodDiscoveryConfig(data_parallel_size=ranks)
    return {
        "zmq_endpoint": "tcp://127.0.0.1:0",
        "discover_pods": False,
        "pod_discovery_config": ports,
    }


async def connect(picker, *pods):
    """Each as the next rank."""
    listening = picker.listener.server
    await eventually(lambda: listening.port)
    for number, pod in enumerate(pods):
        pod.engine.rank = number
        await pod.connect(listening.port)


async def test_ranks_that_connect_are_told_apart_by_what_they_say():
    """And all is known of their endpoint once each of them is heard."""
    one, two = KVEventPod(), KVEventPod()
    async with one, two, Picker(one, ranks_chosen=True, **central(2)) as picker:
        assert picker.row().problem == "rank 0 of 2: is connecting"
        await connect(picker, one, two)
        one.serve(prompt(1, 2))
        await eventually(lambda: held(picker, prompt(1, 2)) == [64, 0])
        assert picker.row().problem == "rank 1 of 2: is connecting"
        two.serve(prompt(1))
        await eventually(lambda: held(picker, prompt(1, 2)) == [64, 32])
        assert (picker.row().state, picker.row().complete) == (StreamState.LIVE, True)
        assert one.asked == 0
        one.cut()
        await eventually(lambda: "rank 0 of 2: tcp://127.0.0.1:" in picker.row().problem)
        await eventually(lambda: held(picker, prompt(1, 2)) == [0, 32])
        await connect(picker, one)
        one.serve(prompt(3))
        await eventually(lambda: held(picker, prompt(3)) == [32, 0])


async def test_a_rank_beyond_what_is_configured_is_counted_and_not_heard():
    one, two = KVEventPod(), KVEventPod()
    async with one, two, Picker(one, ranks_chosen=True, **central(2)) as picker:
        await connect(picker, one, two)
        two.engine.rank = 2
        two.serve(prompt(1))
        await eventually(lambda: picker.listener.server.turned[Rejection.RANK] == 1)
        assert picker.listener.snapshot().faults[Rejection.RANK] == 1
        assert held(picker, prompt(1)) == [0, 0]


async def test_what_ranks_kept_is_asked_for_at_a_port_each():
    """The next rank has the next port."""
    async with KVEventPod() as pod:
        pod.serve(prompt(1))
        ports = PodDiscoveryConfig(replay_socket_port=pod.replay_port - 1, data_parallel_size=2)
        settings = central(2) | {"pod_discovery_config": ports}
        async with Picker(pod, ranks_chosen=True, **settings) as picker:
            await connect(picker, pod)
            pod.engine.rank = 1
            pod.serve(prompt(2))
            await eventually(lambda: held(picker, prompt(1)) == [0, 32])
            assert pod.replayed == 1


async def test_without_a_plugin_ranks_that_connect_are_not_heard():
    async with KVEventPod() as pod, Picker(pod, **central(2)) as picker:
        assert picker.row().problem.startswith("dataParallelSize is 2 ranks behind 1 endpoint")
        await connect(picker, pod)
        pod.serve(prompt(1))
        await eventually(lambda: picker.listener.server.turned[Rejection.RANK] == 1)
        assert picker.row().state is StreamState.NONE
        assert "declare a data-parallel-rank-producer" in picker.row().problem


async def test_an_engine_that_connects_with_more_ranks_than_it_should_is_not_heard():
    """What one of them holds does not say what a request finds. It may be another process next time."""
    one, two = KVEventPod(), KVEventPod()
    async with one, two, Picker(one, **central(1)) as picker:
        await connect(picker, one, two)
        one.serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1)) == 32)
        two.serve(prompt(2))
        await eventually(lambda: "connects with ranks 0 and 1" in picker.row().problem)
        assert picker.believed(prompt(1)) == picker.believed(prompt(2)) == 0
        assert picker.row().state is StreamState.NONE
        two.serve(prompt(3))
        await eventually(lambda: picker.listener.server.turned[Rejection.RANK] == 2)
        two.cut()
        picker.scrape(process=1.0)
        picker.scrape(process=2.0)
        await eventually(lambda: "has not connected" in picker.row().problem)
        await connect(picker, one)
        await eventually(lambda: picker.live)
        assert picker.row().problem == ""


def rank(port, host="*", **fields):
    return {"endpoint": f"tcp://{host}:{port}", "replay_endpoint": None} | fields


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ({"0": rank(7), "1": rank(8)}, (7, 8)),
        ({"1": rank(8), "0": rank(7)}, (7, 8)),
        ({"4": rank(7), "5": rank(8)}, (7, 8)),
        ({"0": rank(7, "1.2.3.4"), "1": rank(8, "[::1]")}, (7, 8)),
        ({str(at): rank(at + 1) for at in range(RANKS_MAX)}, tuple(range(1, RANKS_MAX + 1))),
        ({str(at): rank(at + 1) for at in range(RANKS_MAX + 1)}, "at most 64 are supported"),
        ({"0": rank(7), "2": rank(8)}, "lists ranks that are not consecutive"),
        ({"0": rank(7), "-1": rank(8)}, "lists ranks that are not numbers"),
        ({"0": rank(7), "01": rank(8)}, "lists ranks that are not numbers"),
        ({"0": rank(7), "1" * 5_000: rank(8)}, "lists ranks that are not numbers"),
        ({"0": rank(7), "1": rank(7)}, "lists one port for several ranks"),
        ({"0": rank(7), "1": rank(70_000)}, "lists no source of rank 1 that publishes"),
        ({"0": rank(7), "1": rank(8, publisher="null")}, "lists no source of rank 1"),
    ],
)
def test_what_a_page_says_of_ranks(page, found):
    """A host in it is nobody to connect to; all ranks are found or none is."""
    said = places_of(json.dumps(page).encode(), "10.0.0.1", 0, 1, ranks_chosen=True)
    if isinstance(found, str):
        assert found in said
    else:
        assert said == tuple(Place("10.0.0.1", port) for port in found)


def test_ten_thousand_ranks_cost_a_sentence():
    """And a name that comes twice counts once."""
    page = json.dumps({str(at): {} for at in range(10_000)}).encode()
    said = places_of(page, "10.0.0.1", 0, 1, ranks_chosen=True)
    assert "lists 10000 ranks" in said
    assert len(said) < 200
    twice = b'{"0": {"endpoint": "tcp://*:7"}, "0": {"endpoint": "tcp://*:8"}}'
    assert places_of(twice, "10.0.0.1", 0, 1, ranks_chosen=True) == (Place("10.0.0.1", 8),)
