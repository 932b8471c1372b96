"""What operators see of a running picker."""

import asyncio
import gc
import json
import math
import time
import tracemalloc
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from epp.configuration.build import default_config, plugin_tables
from epp.core.prompt.request import InferenceRequest
from epp.core.types import EndpointMetrics, Refusal, RefusalReason
from epp.shell.operators.debug_pages import (
    _MEMBERSHIPS_MAX,
    PAGES,
    DebugPages,
    RecentDecisions,
    Wanted,
    table,
)
from epp.shell.operators.metrics_server import MetricsServer
from epp.shell.peers.state import PeerRow
from tests.builders import endpoint
from tests.builders import request as make_request
from tests.envoy.rig import until
from tests.shell.operators.test_metrics_server import get
from tests.test_app import LONG, PREFIX_FIRST, QUEUE_FIRST, TWO, ready_at_once, replace, serving
from tests.test_hermetic import pods

REFUSAL = Refusal(reason=RefusalReason.NO_ENDPOINTS, status=503, message="secret")


class On(NamedTuple):
    """A server elsewhere, for `get`."""

    port: int


def parts_of(decision):
    return decision.scored.parts_of(decision.picked)


class Picker:
    """A scheduler with two scraped endpoints, and the pages of it."""

    def __init__(self):
        self.scheduler = pods((0, 0.1), (3, 0.2))
        self.recent = RecentDecisions(self.scheduler.pool)
        config = default_config(plugin_tables())
        self.peers = []
        pages = DebugPages(self.scheduler, self.recent, lambda: (config, 7), lambda: self.peers)
        self.server = MetricsServer(
            CollectorRegistry(), lambda: True, host="127.0.0.1", port=0, routes=pages.routes()
        )

    def decide(self, **fields):
        decision = self.scheduler.schedule(make_request(**fields), 1.0)
        self.recent.decided(decision, parts_of(decision))
        return decision

    async def page(self, path, **headers):
        async with self.server:
            return await get(self.server, path, **headers)

    async def json(self, path):
        status, headers, body = await self.page(path, Accept="application/json")
        assert (status, headers["content-type"]) == (200, "application/json")
        return json.loads(body)


@pytest.fixture
def picker():
    return Picker()


async def test_plugins_that_failed_are_shown_with_the_configuration(picker):
    """How often, and what each did last; nothing while none has."""
    assert (await picker.json("/debug/config"))["failing_plugins"] == []
    _, _, text = await picker.page("/debug/config")
    assert "failed" not in text
    for _ in range(2):
        picker.scheduler.failures.add("queue-scorer", "score raised KeyError at near/near.py:14")
    assert (await picker.json("/debug/config"))["failing_plugins"] == [
        {
            "plugin": "queue-scorer",
            "failures": 2,
            "last": "score raised KeyError at near/near.py:14",
        }
    ]
    _, _, text = await picker.page("/debug/config")
    shown = text.partition("plugins that failed\n")[2].splitlines()
    assert shown[1].split() == [
        *("queue-scorer", "2", "score", "raised", "KeyError", "at", "near/near.py:14")
    ]


async def test_decisions_are_explained_newest_first(picker):
    """Where to, and the score of each candidate by scorer."""
    first, second = picker.decide(model="a"), picker.decide(model="b", prompt_tokens=9)
    newest, older = (await picker.json("/debug/decisions"))["decisions"]
    assert [newest["number"], older["number"]] == [2, 1]
    assert newest["model"] == "b"
    assert newest["prompt_tokens"] == 9
    assert older["address"] == first.endpoint.address
    scores = {score["endpoint"]: score for score in newest["scores"]}
    assert set(scores) == {at.name for _, at in picker.scheduler.pool.endpoints()}
    chosen = scores[second.endpoint.name]
    assert chosen["total"] == round(float(second.scored.total[second.picked]), 4)
    assert list(chosen["parts"]) == list(second.scorers)
    assert sum(chosen["parts"].values()) == pytest.approx(chosen["total"], abs=1e-3)


async def test_refusals_stand_among_the_decisions(picker):
    """With their reason, without the sentence, which may quote what the client sent."""
    picker.decide()
    refusal = Refusal(
        reason=RefusalReason.NO_ENDPOINTS,
        status=503,
        message="secret",
        eliminated={"fresh-metrics-filter": 2},
    )
    picker.recent.refused(refusal, make_request(request_id="r-2"))
    picker.recent.refused(refusal, None)
    unread, refused, _ = (await picker.json("/debug/decisions"))["decisions"]
    assert refused["refused"] == "rejected-no-endpoints"
    assert refused["status"] == 503
    assert refused["request_id"] == "r-2"
    assert refused["eliminated"] == {"fresh-metrics-filter": 2}
    assert unread["request_id"] == ""
    _, _, text = await picker.page("/debug/decisions")
    assert "2 by fresh-metrics-filter" in text
    assert "secret" not in text


async def test_only_as_many_are_shown_as_asked_for(picker):
    """Newest first."""
    for _ in range(60):
        picker.decide()
    kept = (await picker.json("/debug/decisions?n=60"))["decisions"]
    assert [kept[0]["number"], kept[-1]["number"], len(kept)] == [60, 1, 60]
    assert len((await picker.json("/debug/decisions"))["decisions"]) == 50
    _, _, text = await picker.page("/debug/decisions?n=3")
    assert len(text.splitlines()) == 1 + 3


async def test_what_is_kept_is_bounded_in_bytes(picker):
    """The oldest go, whatever clients and gateways write; minutes of ordinary traffic stay."""
    decision = picker.scheduler.schedule(make_request(request_id="r" * 36, model="m" * 40), 1.0)
    tracemalloc.start()
    recent = RecentDecisions(picker.scheduler.pool, rows_bytes_max=10**6, scores_bytes_max=10**5)
    empty, _ = tracemalloc.get_traced_memory()
    for _ in range(20_000):
        recent.decided(decision, parts_of(decision))
        recent.refused(REFUSAL, None, request_id="r" * 300, path="/p" * 10_000)
    full, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1.1e6 < empty < 1.2e6, "taken at once"
    assert full < 1.01 * empty
    ordinary = RecentDecisions(picker.scheduler.pool)
    for _ in range(2 * 60 * 100):
        ordinary.decided(decision, parts_of(decision))
    assert len(ordinary) == 2 * 60 * 100, "two minutes at 100 a second"


async def test_old_decisions_keep_the_score_of_the_chosen_one(picker):
    """Those of all candidates are large, and stay as long as there is room for them."""
    recent = RecentDecisions(picker.scheduler.pool, scores_bytes_max=500)
    for number in range(5):
        decision = picker.scheduler.schedule(make_request(request_id=str(number)), 1.0)
        recent.decided(decision, parts_of(decision))
    newest, *_, oldest = await recent.rows(5, Wanted())
    assert len(newest["scores"]) == 2
    (chosen,) = oldest["scores"]
    assert chosen["endpoint"] == oldest["endpoint"]
    assert sum(chosen["parts"].values()) == pytest.approx(chosen["total"], abs=1e-3)
    assert list(chosen["parts"]) == list(decision.scorers)


async def test_scores_go_when_the_names_of_their_endpoints_do(picker):
    """Lists of endpoints are bounded in number; those of the chosen one stay."""
    first = picker.decide()
    for number in range(2 * _MEMBERSHIPS_MAX):
        replaced = [endpoint(8, name=f"new-{number}"), endpoint(9)]
        picker.scheduler.replace(replaced, 1.0)
        for slot, _ in picker.scheduler.pool.endpoints():
            picker.scheduler.observe(slot, EndpointMetrics(), 1.0)
        picker.decide()
    assert len(picker.recent._memberships) == _MEMBERSHIPS_MAX
    newest, *_, oldest = await picker.recent.rows(1_000, Wanted())
    assert {score["endpoint"] for score in newest["scores"]} == {at.name for at in replaced}
    (chosen,) = oldest["scores"]
    assert chosen["endpoint"] == oldest["endpoint"] == first.endpoint.name


async def test_rows_that_go_while_others_are_looked_through_are_left_out(picker):
    """What is kept meanwhile neither repeats a row nor tears one."""
    recent = RecentDecisions(picker.scheduler.pool, rows_bytes_max=200_000)
    for number in range(5_000):
        recent.refused(REFUSAL, make_request(request_id=f"r-{number}"))
    kept = len(recent)
    asking = asyncio.create_task(recent.rows(kept, Wanted()))
    await asyncio.sleep(0)
    for number in range(kept * 3 // 4):
        recent.refused(REFUSAL, make_request(request_id=f"s-{number}"))
    found = [row["request_id"] for row in await asking]
    assert 0 < len(found) < kept
    assert found == [f"r-{number}" for number in range(4_999, 4_999 - len(found), -1)]


async def test_a_question_finds_one_among_many(picker):
    """By request id, endpoint, model and whether it was refused, alone and together."""
    for number in range(2_000):
        picker.decide(request_id=f"r-{number}", model=f"m-{number % 3}")
        picker.recent.refused(REFUSAL, make_request(request_id=f"s-{number}", model="m-0"))
    named = next(at.name for _, at in picker.scheduler.pool.endpoints())

    async def found(query):
        return (await picker.json(f"/debug/decisions?n=1000&{query}"))["decisions"]

    (one,) = await found("request_id=r-7")
    assert (one["number"], one["model"]) == (8, "m-1")
    assert await found("request_id=r-") == []
    assert {row["endpoint"] for row in await found(f"endpoint={named}")} == {named}
    assert {row["model"] for row in await found("model=m-2")} == {"m-2"}
    assert {row["refused"] for row in await found("refused=true")} == {"rejected-no-endpoints"}
    assert {row["request_id"][0] for row in await found("refused=false&model=m-0")} == {"r"}
    assert {row["request_id"][0] for row in await found("model=m-0&refused=true")} == {"s"}
    assert await found("refused=rejected-saturated") == []
    (gone,) = await found("refused=rejected-no-endpoints&request_id=s-1999")
    assert gone["status"] == 503


async def test_the_loop_runs_while_rows_are_looked_through(picker):
    """Other tasks get their turn every few hundred rows."""
    for _ in range(3_000):
        picker.recent.refused(REFUSAL, None)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await picker.recent.rows(10, Wanted(request_id="none")) == []
    counting.cancel()
    assert turns >= 5


async def test_the_table_shows_the_parts_of_scores(picker):
    """Of the chosen one first, then of the best of the others."""
    decision = picker.decide()
    _, _, text = await picker.page("/debug/decisions")
    head, line = text.splitlines()
    assert head.split()[-1] == "scores"
    scores = line[head.index("scores") :]
    assert scores.startswith(f"{decision.endpoint.name} ")
    assert all(scores.count(scorer) == 2 for scorer in decision.scorers)
    assert " = " in scores
    picker.recent.refused(REFUSAL, None, request_id="r-9", path="/v1/completions")
    head, newest, *_ = (await picker.page("/debug/decisions"))[2].splitlines()
    assert head.split()[-1] == "scores", "the columns do not depend on what comes first"
    assert {"r-9", "/v1/completions", "503"} <= set(newest.split())


@pytest.mark.parametrize(
    "query",
    [
        *("n=0", "n=1001", "n=-1", "n=", "n=many", "n=²", f"n={'9' * 5000}", "format=xml"),
        *("refused=maybe", "refused=", "request=r-1"),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(picker, query):
    """400 and what was expected."""
    status, _, text = await picker.page(f"/debug/decisions?{query}")
    assert status == 400
    assert "must be" in text or "is not one of n, format, request_id" in text


async def test_what_is_kept_holds_no_request(picker):
    """Neither prompts nor leases nor headers live on because a page may ask."""
    asked = make_request(prompts=(b"once upon a time" * 100,), headers={"authorization": "secret"})
    decision = picker.scheduler.schedule(asked, 1.0)
    picker.recent.decided(decision, parts_of(decision))
    for ring in (picker.recent._rows, picker.recent._scores):
        (kept,) = ring.newest_first()
        assert b"once upon" not in kept
        assert b"secret" not in kept
    reached, seen = [picker.recent._memberships], set()
    while reached:
        at = reached.pop()
        if id(at) in seen or at is picker.scheduler.pool:
            continue
        seen.add(id(at))
        assert not isinstance(at, InferenceRequest)
        assert at is not decision.lease
        fields = getattr(at, "__struct_fields__", ())
        reached += [getattr(at, name) for name in fields] or gc.get_referents(at)


async def test_endpoints_that_left_keep_their_name_in_old_decisions(picker):
    """A slot that was given to another pod does not rename the past."""
    decision = picker.decide()
    before = {at.name for _, at in picker.scheduler.pool.endpoints()}
    picker.scheduler.replace([endpoint(8, name="new"), endpoint(9, name="newer")], 2.0)
    (kept,) = (await picker.json("/debug/decisions"))["decisions"]
    assert kept["endpoint"] == decision.endpoint.name
    assert {score["endpoint"] for score in kept["scores"]} == before


async def test_what_clients_write_cannot_break_a_page(picker):
    """Long names are cut, control characters and what is no text are replaced."""
    picker.decide(model="m" * 100_000, request_id="a\nb\x1b[2J\ud800")
    (kept,) = (await picker.json("/debug/decisions"))["decisions"]
    assert len(kept["model"]) == 256
    assert kept["request_id"] == "a\nb\x1b[2J?"
    _, _, text = await picker.page("/debug/decisions")
    assert len(text.splitlines()) == 2
    assert "a?b?[2J?" in text


async def test_endpoints_are_listed_with_their_state(picker):
    """As last scraped and as counted here; what is not known is null and a dash."""
    picker.decide()
    pool = picker.scheduler.pool
    members = [at for _, at in pool.endpoints()]
    picker.scheduler.replace([*members, endpoint(7, name="silent", ready_after_s=math.inf)], 1.0)
    picker.scheduler.observe(0, EndpointMetrics(), time.monotonic())
    picker.scheduler.observe(1, EndpointMetrics(asleep=True, waiting_requests=2.0), 1.0)
    first, second, silent = (await picker.json("/debug/endpoints"))["endpoints"]
    assert first["state"] == "ready"
    assert first["inflight_requests"] == 1
    assert second["state"] == "asleep"
    assert second["waiting"] == 2.0
    assert second["kv_cache_usage"] is None
    assert silent["state"] == "never scraped"
    assert silent["metrics_age_s"] is None
    status, headers, text = await picker.page("/debug/endpoints")
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert text.splitlines()[3].split()[0] == "silent"
    assert " - " in text.splitlines()[3]
    picker.scheduler.observe(1, EndpointMetrics(), 1.0)
    for _ in range(2):
        picker.scheduler.observe_failure(0, answered=False)
    listed = (await picker.json("/debug/endpoints"))["endpoints"]
    assert [row["state"] for row in listed] == ["unreachable", "stale", "never scraped"]


async def test_the_configuration_in_force_is_shown(picker):
    """As check-config explains it, or as JSON by scorer with weights, hash and generation."""
    shown = await picker.json("/debug/config")
    assert shown["generation"] == 7
    assert shown["config"]["scorer prefix-cache-scorer"]["weight"] == 3
    _, _, text = await picker.page("/debug/config")
    assert "prefix-cache-scorer: weight 3 of 9" in text
    assert shown["hash"] in text


async def test_the_format_asked_for_wins_over_the_one_accepted(picker):
    """So that a browser can have either."""
    _, headers, _ = await picker.page("/debug/config?format=json")
    assert headers["content-type"] == "application/json"
    _, headers, _ = await picker.page("/debug/config?format=text", Accept="application/json")
    assert headers["content-type"].startswith("text/plain")


def test_a_table_of_nothing_says_so():
    """No traffic and no endpoints are ordinary."""
    assert table([]) == "none\n"


async def test_the_pages_of_a_picker_ask_for_its_token(tmp_path):
    """Of who shows it; metrics, health and the list of pages stay open."""
    (tmp_path / "token").write_text("s3cret")
    flags = (f"--debug-token-file={tmp_path / 'token'}", "--metrics-bind-address=127.0.0.1")
    async with serving(tmp_path, TWO, *flags) as running:
        at = On(running.picker.flags.metrics_port)
        listed = [line.split()[0] for line in (await get(at, "/"))[2].splitlines()]
        assert set(PAGES) < set(listed)
        for path in listed:
            asks = path.startswith("/debug/")
            assert (await get(at, path))[0] == (401 if asks else 200), path
            assert (await get(at, path, Authorization="Bearer s3cret"))[0] == 200, path
        (tmp_path / "token").write_text("n3w")

        async def changed():
            status, *_ = await get(at, "/debug/config", Authorization="Bearer n3w")
            return status == 200

        await until(changed, "the new token")
        with pytest.raises(OSError):
            await asyncio.open_connection("::1", at.port)


async def test_a_running_picker_shows_itself(tmp_path):
    """`epp serve` has the pages on its metrics port, and they follow a reload."""
    async with serving(tmp_path, TWO, config=PREFIX_FIRST) as running:
        picker = running.picker
        ready_at_once(running)

        async def shown(path):
            _, _, body = await get(On(picker.flags.metrics_port), path, Accept="application/json")
            return json.loads(body)

        assert len((await shown("/debug/endpoints"))["endpoints"]) == 2
        assert (await shown("/debug/config"))["generation"] == 1
        replace(tmp_path / "config.yaml", QUEUE_FIRST)
        await until(lambda: picker.live.generation == 2, "the reload")
        changed = await shown("/debug/config")
        assert changed["generation"] == 2
        assert changed["config"]["scorer queue-scorer"]["weight"] == 3
        destination = await running.pick(LONG)
        (decision,) = (await shown("/debug/decisions"))["decisions"]
        assert decision["address"] == destination
        assert "once upon" not in json.dumps(decision)


async def test_peers_are_shown_with_what_is_between_us(picker):
    """Who does not answer has no times; nobody is "none"."""
    assert (await picker.page("/debug/peers"))[2] == "none\n"
    picker.peers = [
        PeerRow(
            address="10.0.0.1:9004",
            origin="0a0b0c0d",
            connected_s=12.345,
            heard_s=0.51,
            bytes_sent=1,
            bytes_received=2,
            dropped=3,
        ),
        PeerRow(address="10.0.0.2:9004", origin="", connected_s=None, heard_s=None),
    ]
    (first, second) = (await picker.json("/debug/peers"))["peers"]
    assert first == {
        "address": "10.0.0.1:9004",
        "origin": "0a0b0c0d",
        "connected_s": 12.3,
        "heard_s": 0.5,
        "bytes_sent": 1,
        "bytes_received": 2,
        "dropped": 3,
    }
    assert second["connected_s"] is second["heard_s"] is None
    _, _, text = await picker.page("/debug/peers")
    head, *lines = text.splitlines()
    assert head.split()[:4] == ["address", "origin", "connected_s", "heard_s"]
    assert lines[1].split()[:4] == ["10.0.0.2:9004", "-", "-", "-"]
