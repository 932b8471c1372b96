import asyncio
import itertools
import json
from random import Random

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from epp.shell.kubernetes.list_watch import Timing
from epp.shell.kubernetes.objects import Collection
from epp.shell.kubernetes.reflector import Reflector
from tests.shell.kubernetes.fake_api_server import (
    OBJECTIVES,
    OLD_OBJECTIVES,
    PODS,
    FakeApiServer,
    pod,
)
from tests.shell.kubernetes.kube import FAST, connected, eventually, running

PODS_OF_LLM = Collection(resource="pods", namespace="llm", label_selector="app=llama")
NEW = Collection(
    group="llm-d.ai", version="v1alpha2", resource="inferenceobjectives", namespace="llm"
)
OLD = Collection(
    group="inference.networking.x-k8s.io",
    version="v1alpha2",
    resource="inferenceobjectives",
    namespace="llm",
)


def uid(raw):
    return json.loads(raw)["metadata"]["uid"]


def reflector(
    client, *sources, timing=FAST, on_change=lambda: None, seed=1, streamed=False, **arguments
):
    sources = sources or (PODS_OF_LLM,)
    if not streamed:
        timing = structs.replace(timing, streamed_list_s_max=0)
    return Reflector(
        client, sources, uid, on_change, random=Random(seed), timing=timing, **arguments
    )


def truth(server, path=PODS):
    return {
        name: item["metadata"]["uid"]
        for name, item in sorted(server.objects[path].items())
        if item["metadata"].get("labels", {"app": "llama"}).get("app") == "llama"
    }


class Watched:
    """A fake server, a client and a reflector that runs, for one test."""

    def __init__(self, tmp_path, *sources, pods=5, streams="yes", **arguments):
        self.tmp_path = tmp_path
        self.server = FakeApiServer(streams=streams)
        for number in range(pods):
            self.server.put(PODS, pod(f"pod-{number}"))
        self.sources = sources
        self.arguments = arguments
        self.changes = 0

    def changed(self):
        self.changes += 1

    async def __aenter__(self):
        await self.server.__aenter__()
        self.connection = connected(self.server, self.tmp_path)
        client = await self.connection.__aenter__()
        self.reflector = reflector(client, *self.sources, on_change=self.changed, **self.arguments)
        self.task = running(self.reflector.run())
        await self.task.__aenter__()
        return self

    async def __aexit__(self, *_):
        await self.task.__aexit__(None, None, None)
        await self.connection.__aexit__(None, None, None)
        await self.server.__aexit__()

    async def settled(self):
        """The reflector has what the server has, and a watch is open."""
        await eventually(
            lambda: (
                self.reflector.synced
                and self.reflector.objects == truth(self.server)
                and self.reflector.in_touch
                and self.server.open_watches >= 1
            ),
            f"{self.reflector.objects} becoming {truth(self.server)}",
        )


async def test_pages_then_changes(tmp_path):
    """Five pods in pages of three, and what a watch tells; other labels are not ours."""
    async with Watched(tmp_path) as watched:
        await watched.settled()
        server = watched.server
        queries = [query for _, verb, _, query in server.requests if verb == "LIST"]
        assert [query["limit"] for query in queries] == ["3", "3"]
        assert all(query["labelSelector"] == "app=llama" for query in queries)
        server.put(PODS, pod("new"))
        server.delete(PODS, "pod-1")
        server.put(PODS, pod("other", labels={"app": "other"}))
        await watched.settled()
        assert watched.reflector.statistics.lists == 1


@pytest.mark.parametrize(("streams", "asked"), [("yes", 1), ("no", 2), ("old", 2)])
async def test_a_list_is_streamed_where_the_server_can_and_read_in_pages_elsewhere(
    tmp_path, streams, asked
):
    """One that says no, and one that streams on without an end; neither is an error."""
    timing = structs.replace(FAST, streamed_list_s_max=0.2)
    async with Watched(tmp_path, timing=timing, streamed=True, streams=streams) as watched:
        await watched.settled()
        watched.server.put(PODS, pod("new"))
        await watched.settled()
        lists = [query for _, verb, _, query in watched.server.requests if verb == "LIST"]
        assert [query.get("sendInitialEvents") for query in lists[:2]] == ["true", None][:asked]
        assert all(query["labelSelector"] == "app=llama" for query in lists)
        assert len(watched.server.lists(PODS)) == asked
        assert watched.reflector.reflection().errors == {}


@pytest.mark.parametrize(
    ("order", "lists", "kind"),
    [
        ("close", 1, None),
        ("reset", 1, "unreachable"),
        ("silent", 1, None),
        ("half", 1, "unreachable"),
        ("half-close", 1, None),
        ("garbage", 2, "unreadable"),
        ("gone", 2, "gone"),
        ("error", 2, "watch"),
    ],
)
async def test_a_watch_that_breaks_in_any_way_loses_nothing(tmp_path, order, lists, kind):
    """What happens while no watch is open is heard of afterwards; a list only where it must be."""
    async with Watched(tmp_path) as watched:
        await watched.settled()
        server = watched.server
        server.disturb(order)
        server.put(PODS, pod("born-meanwhile"))
        server.delete(PODS, "pod-0")
        await watched.settled()
        assert len(server.lists(PODS)) == lists
        assert set(watched.reflector.reflection().errors) == ({kind} if kind else set())
        assert watched.reflector.statistics.repairs == 0


async def test_compacted_history_leads_to_a_list(tmp_path):
    """HTTP 410 on the watch; and 410 on a page starts the list again."""
    async with Watched(tmp_path) as watched:
        await watched.settled()
        server = watched.server
        server.fail("LIST", PODS, "pass", 410)
        server.put(PODS, pod("lost-in-history"))
        server.delete(PODS, "pod-0")
        server.compact()
        server.disturb("close")
        await watched.settled()
        assert len(server.lists(PODS)) == 3
        assert watched.reflector.reflection().errors == {"gone": 2}


@pytest.mark.parametrize("verb", ["LIST", "WATCH"])
@pytest.mark.parametrize(
    "fault", [401, 403, 404, (429, {"Retry-After": "1"}), 500, 503, "reset", "silent"]
)
async def test_requests_that_fail_are_tried_again(tmp_path, verb, fault):
    """Several times in a row, and the objects stay as they were meanwhile."""
    async with Watched(tmp_path) as watched:
        if verb == "WATCH":
            await watched.settled()
        server = watched.server
        server.fail(verb, PODS, *[fault] * (1 if fault == "silent" else 3))
        server.disturb("close" if verb == "WATCH" else "gone")
        server.put(PODS, pod("new"))
        await watched.settled()
        assert not server.faults(verb, PODS), "each of them was met"
        assert watched.reflector.reflection().errors


async def test_an_api_server_that_is_away_takes_nothing_with_it(tmp_path):
    """Connections are refused for many back-offs; the objects stay, then changes come in."""
    async with Watched(tmp_path) as watched:
        await watched.settled()
        server = watched.server
        before = dict(watched.reflector.objects)
        await server.stop()
        errors = watched.reflector.statistics.errors
        await eventually(lambda: sum(errors.values()) >= 8)
        assert watched.reflector.objects == before
        assert watched.reflector.synced
        assert not watched.reflector.in_touch
        server.put(PODS, pod("new"))
        server.delete(PODS, "pod-0")
        await server.start()
        await watched.settled()
        assert watched.reflector.in_touch


async def test_a_rotated_token_is_taken_up(tmp_path):
    """401, the token is read again, and on it goes."""
    async with Watched(tmp_path) as watched:
        await watched.settled()
        server = watched.server
        server.tokens = {"second"}
        server.kubeconfig(tmp_path, token="second")
        server.disturb("close")
        server.put(PODS, pod("new"))
        await watched.settled()
        assert watched.reflector.reflection().errors == {"unauthorized": 1}


async def test_two_megabyte_lines_are_read(tmp_path):
    """Longer than any buffer of the client."""
    async with Watched(tmp_path) as watched:
        await watched.settled()
        big = pod("big", annotations={"note": "x" * 2_000_000})
        watched.server.put(PODS, big)
        await watched.settled()
        assert watched.reflector.reflection().errors == {}


async def test_a_kind_in_which_nothing_happens_is_in_order(tmp_path):
    """API servers may send no bookmark there: the watch is begun anew, and that it can be is news."""
    with capture_logs() as logs:
        async with Watched(tmp_path) as watched:
            await watched.settled()
            server = watched.server
            server.bookmark_s = 30.0
            server.disturb("close")
            await eventually(lambda: watched.reflector.statistics.watches >= 5)
            assert watched.reflector.reflection().errors == {}
            assert watched.reflector.in_touch
            assert watched.reflector.reflection().stale_s < 2 * FAST.silence_s_max
            assert len(server.lists(PODS)) == 1
    assert not [line for line in logs if line["log_level"] in {"error", "warning"}]


async def test_a_server_that_does_not_answer_a_watch_is_silent(tmp_path):
    """That is a failure; the watch goes on once it answers."""
    async with Watched(tmp_path) as watched:
        await watched.settled()
        watched.server.fail("WATCH", PODS, "silent")
        watched.server.disturb("close")
        watched.server.put(PODS, pod("new"))
        await watched.settled()
        assert watched.reflector.reflection().errors == {"silent": 1}


async def test_a_silent_kind_is_stale_and_its_objects_stay(tmp_path):
    """The gauge tells the time since the last page, event, bookmark or beginning of a watch."""
    async with Watched(tmp_path, timing=Timing(reconnect_s=(0.001, 0.01))) as watched:
        await watched.settled()
        watched.server.bookmark_s = 30.0
        watched.server.disturb("close")
        await eventually(lambda: watched.reflector.reflection().stale_s > 1.0)
        assert len(watched.reflector.objects) == 5
        watched.server.put(PODS, pod("new"))
        await watched.settled()
        assert watched.reflector.reflection().stale_s < 1.0


async def test_never_more_than_one_list_a_second(tmp_path):
    """Not even of a server that answers every watch with 410; measured at the server,
    which hears of one sooner and of another later."""
    async with Watched(tmp_path, timing=Timing(reconnect_s=(0.001, 0.01))) as watched:
        server = watched.server
        server.fail("WATCH", PODS, *[410] * 3)
        server.put(PODS, pod("new"))
        await eventually(lambda: len(server.lists(PODS)) >= 3)
        times = server.lists(PODS)
        assert all(later - sooner >= 0.7 for sooner, later in itertools.pairwise(times))


async def test_the_safety_net_lists_now_and_then_and_finds_nothing(tmp_path):
    """Repairs stay 0 while pods come and go, because the watch had told of them."""
    timing = Timing(list_interval_s_min=0.01, relist_s=(0.02, 0.06), reconnect_s=(0.001, 0.002))
    async with Watched(tmp_path, timing=timing) as watched:
        for number in range(40):
            watched.server.put(PODS, pod(f"more-{number}"))
            await eventually(lambda: watched.reflector.objects == truth(watched.server))
        await eventually(lambda: watched.reflector.statistics.lists > 5)
        assert watched.reflector.statistics.repairs == 0


async def test_a_missing_right_is_one_sentence_with_verb_and_resource(tmp_path):
    """Said once, not at every try."""
    with capture_logs() as logs:
        async with FakeApiServer() as server, connected(server, tmp_path) as client:
            server.fail("LIST", PODS, *[403] * 4)
            watched = reflector(client)
            async with running(watched.run()):
                await eventually(lambda: watched.synced)
    errors = [line["event"] for line in logs if line["log_level"] == "error"]
    assert len(errors) == 1
    assert errors[0].startswith(
        "forbidden to list pods in namespace llm: the Role of the picker's ServiceAccount needs the verbs "
        "get, list and watch on resource pods of apiGroup ''"
    )


async def test_a_right_that_is_missing_for_a_moment_is_a_warning(tmp_path):
    """It was there before: an API server that starts has not read its rules yet."""
    with capture_logs() as logs:
        async with Watched(tmp_path) as watched:
            await watched.settled()
            watched.server.fail("WATCH", PODS, 403)
            watched.server.disturb("close")
            watched.server.put(PODS, pod("new"))
            await watched.settled()
            assert watched.reflector.reflection().errors == {"forbidden": 1}
    (told,) = (line for line in logs if line["event"].startswith("forbidden to watch pods"))
    assert told["log_level"] == "warning"


async def test_a_kind_without_its_crd_is_off_and_comes_on_when_it_is_installed(tmp_path):
    """The newer group goes before the older; neither is an error."""
    with capture_logs() as logs:
        async with (
            FakeApiServer(absent=[OBJECTIVES, OLD_OBJECTIVES]) as server,
            connected(server, tmp_path) as client,
        ):
            timing = Timing(
                list_interval_s_min=0.01,
                relist_s=(0.1, 0.2),
                refused_s=0.02,
                reconnect_s=(0.001, 0.01),
            )
            watched = reflector(client, NEW, OLD, optional=True, timing=timing)
            async with running(watched.run()):
                await eventually(lambda: len(server.lists(OLD_OBJECTIVES)) > 1)
                assert not watched.synced
                assert watched.reflection().errors == {}
                server.put(OLD_OBJECTIVES, pod("old"))
                server.absent.discard(OLD_OBJECTIVES)
                await eventually(lambda: set(watched.objects) == {"old"})
                server.put(OBJECTIVES, pod("new"))
                server.absent.discard(OBJECTIVES)
                await eventually(lambda: set(watched.objects) == {"new"})
    assert not [line for line in logs if line["log_level"] in {"error", "warning"}]


async def test_a_callback_that_fails_does_not_end_the_watch(tmp_path):
    """It is logged and counted as a bug of ours."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        calls = []

        def on_change():
            calls.append(None)
            if len(calls) == 1:
                raise ZeroDivisionError

        watched = reflector(client, on_change=on_change)
        with capture_logs() as logs:
            async with running(watched.run()):
                await eventually(lambda: watched.reflection().errors == {"internal": 1})
                server.put(PODS, pod("new"))
                await eventually(lambda: len(calls) == 2)
        assert any(
            line["event"] == "a list or watch failed because of a defect of the picker"
            for line in logs
        )


FAULTS = [
    *("close", "reset", "silent", "half", "half-close", "garbage", "gone", "error"),
    *("duplicate", "reorder"),
]
REQUEST_FAULTS = [
    401,
    403,
    410,
    (429, {"Retry-After": "1"}),
    500,
    503,
    "reset",
    "garbage",
    "silent",
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_after_a_bad_day_of_the_api_server_the_objects_are_the_truth(
    tmp_path, seed, streamed
):
    """Random faults while pods come, go, change and are reborn under their names."""
    dice = Random(seed)
    async with Watched(tmp_path, seed=seed, streamed=streamed) as watched:
        server = watched.server
        for _ in range(25):
            name = f"pod-{dice.randrange(8)}"
            if name in server.objects[PODS] and dice.random() < 0.4:
                server.delete(PODS, name)
            else:
                held = server.objects[PODS].get(name)
                same = held["metadata"]["uid"] if held and dice.random() < 0.5 else None
                server.put(PODS, pod(name, uid=same))
            if dice.random() < 0.4:
                server.disturb(dice.choice(FAULTS))
            if dice.random() < 0.2:
                server.fail(dice.choice(["LIST", "WATCH"]), PODS, dice.choice(REQUEST_FAULTS))
            if dice.random() < 0.05:
                server.compact()
            if dice.random() < 0.04:
                await server.stop()
                await server.start()
            # The pace of events, so that faults meet watches in every state.
            await asyncio.sleep(dice.random() * 0.03)
        server.heal()
        await watched.settled()
        assert watched.reflector.statistics.repairs == 0
