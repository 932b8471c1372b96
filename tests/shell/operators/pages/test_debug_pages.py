"""What operators see of a running picker."""

import asyncio
import json
import math
import sys
import time
from datetime import datetime
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from epp.configuration.build import default_config, plugin_tables
from epp.core.decision.inputs import PageScraped, PoolReplaced, ScrapeFailed
from epp.core.knowledge.hit_accuracy import Expected
from epp.core.types import EndpointMetrics, Refusal, RefusalReason
from epp.shell.engines.endpoint_pages import PagesRow
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.recent_decisions import RecentDecisions
from epp.shell.operators.pages.bearer_token import BearerToken
from epp.shell.operators.pages.debug_pages import PAGES, DebugPages
from epp.shell.operators.pages.metrics_server import MetricsServer
from epp.shell.operators.pages.page_queue import ROWS_PER_TURN, WAITING_MAX, PageQueue
from epp.shell.operators.pages.text_table import table_in_turns
from epp.shell.peers.state import PeerRow
from tests.app.test_wiring import (
    LONG,
    PREFIX_FIRST,
    QUEUE_FIRST,
    TWO,
    ready_at_once,
    replace,
    serving,
)
from tests.builders import PREFIX, endpoint
from tests.builders import request as make_request
from tests.envoy.rig import until
from tests.shell.operators.pages.test_metrics_server import get
from tests.test_hermetic import pods

REFUSAL = Refusal(reason=RefusalReason.NO_ENDPOINTS, status=503, message="secret")


class On(NamedTuple):
    """A server elsewhere, for `get`."""

    port: int


class Picker:
    """A scheduler with two scraped endpoints, and the pages of it."""

    def __init__(self):
        self.scheduler = pods((0, 0.1), (3, 0.2))
        self.recent = RecentDecisions(self.scheduler.pool)
        config = default_config(plugin_tables())
        self.peers = []
        self.states = EndpointStates(
            self.scheduler, lambda _: ("timeout", "no answer"), self.recent.know_states
        )
        self.pages = DebugPages(
            self.scheduler, self.recent, lambda: (config, 7), self.states, lambda: self.peers
        )
        self.server = MetricsServer(
            CollectorRegistry(),
            lambda: True,
            host="127.0.0.1",
            port=0,
            routes=self.pages.routes(PageQueue(asyncio.Lock())),
        )

    def decide(self, **fields):
        decision = self.scheduler.schedule(make_request(**fields), 1.0)
        self.recent.decided(decision)
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
    assert chosen["total"] == round(float(second.leg.scored.total[second.leg.picked]), 4)
    assert list(chosen["parts"]) == list(second.leg.scorers)
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


async def test_the_table_shows_the_parts_of_scores(picker):
    """Of the chosen one first, then of the best of the others."""
    decision = picker.decide()
    _, _, text = await picker.page("/debug/decisions")
    head, line = text.splitlines()
    assert head.split()[-1] == "scores"
    scores = line[head.index("scores") :]
    assert scores.startswith(f"{decision.endpoint.name} ")
    assert all(scores.count(scorer) == 2 for scorer in decision.leg.scorers)
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


async def test_why_a_request_went_where_it_went_is_told(picker):
    """In words or as JSON; all that have the id, newest first; 404 with what is kept if none has."""
    picker.decide(request_id="r-1")
    picker.decide(request_id="r-2")
    picker.recent.refused(REFUSAL, make_request(request_id="r-1"))
    status, headers, text = await picker.page("/debug/explain?request_id=r-1")
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    refused, decided = text.split("\n\n")
    assert "refused with 503" in refused
    assert "runner-up pod-1" in decided
    both = await picker.json("/debug/explain?request_id=r-1")
    assert [row.get("refused") for row in both["decisions"]] == ["rejected-no-endpoints", None]
    assert both["decisions"][1]["costs"] == []
    status, _, text = await picker.page("/debug/explain?request_id=none%1b")
    assert status == 404
    assert text.startswith("no request none? was decided or refused by this picker since 20")
    status, _, body = await picker.page("/debug/explain?request_id=x&format=json")
    assert status == 404
    assert json.loads(body)["kept_since"]


@pytest.mark.parametrize("query", ["", "request_id=", "request_id=a&n=5", "request=a"])
async def test_a_request_must_be_named_to_be_explained(picker, query):
    """400 and what was expected."""
    status, _, text = await picker.page(f"/debug/explain?{query}")
    expected = "expected ?request_id=, optionally with endpoint and format\n"
    assert (status, text) == (400, expected)


async def test_endpoints_that_left_keep_their_name_in_old_decisions(picker):
    """A slot that was given to another pod does not rename the past."""
    decision = picker.decide()
    before = {at.name for _, at in picker.scheduler.pool.endpoints()}
    picker.scheduler.take(PoolReplaced([endpoint(8, name="new"), endpoint(9, name="newer")]), 2.0)
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
    picker.scheduler.take(
        PoolReplaced([*members, endpoint(7, name="silent", ready_after_s=math.inf)]), 1.0
    )
    picker.scheduler.take(PageScraped(0, EndpointMetrics()), time.monotonic())
    picker.scheduler.take(PageScraped(1, EndpointMetrics(asleep=True, waiting_requests=2.0)), 1.0)
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
    picker.scheduler.take(PageScraped(1, EndpointMetrics()), 1.0)
    for _ in range(2):
        picker.scheduler.take(ScrapeFailed(slot=0, answered=False), 0.0)
    listed = (await picker.json("/debug/endpoints"))["endpoints"]
    assert [row["state"] for row in listed] == ["unreachable", "stale", "never scraped"]


async def test_attributes_and_models_are_shown_where_endpoints_tell_them(picker):
    """Of who does not, that it is not known; and why a page could not be read."""
    (row, *_) = (await picker.json("/debug/endpoints"))["endpoints"]
    assert not {"attributes", "models", "page_problems"} & row.keys()
    slot, told = next(iter(picker.scheduler.pool.endpoints()))
    metrics = EndpointMetrics(waiting_requests=0.0, attributes={"load/me": 0.123456})
    picker.scheduler.take(PageScraped(slot, metrics), 1.0)
    picker.pages._pages = lambda endpoint: (
        PagesRow(models=("base", "sql"), problems=())
        if endpoint == told
        else PagesRow(models=None, problems=("http://x answered 404",))
    )
    rows = (await picker.json("/debug/endpoints"))["endpoints"]
    found = {row["name"]: row for row in rows}
    mine = found.pop(told.name)
    (other,) = found.values()
    assert mine["attributes"] == {"load/me": pytest.approx(0.123, abs=0.001)}
    assert (mine["models"], mine["page_problems"]) == (["base", "sql"], [])
    assert other["attributes"] == {"load/me": None}
    assert (other["models"], other["page_problems"]) == (None, ["http://x answered 404"])
    _, _, text = await picker.page("/debug/endpoints")
    assert "answered 404" in text


async def test_the_configuration_in_force_is_shown(picker):
    """As check-config explains it, or as JSON by scorer with weights, hash and generation."""
    shown = await picker.json("/debug/config")
    assert shown["generation"] == 7
    assert shown["config"]["scorer added-time-scorer"]["weight"] == 1
    _, _, text = await picker.page("/debug/config")
    assert "added-time-scorer: weight 1 of 1" in text
    assert shown["hash"] in text


async def test_the_format_asked_for_wins_over_the_one_accepted(picker):
    """So that a browser can have either."""
    _, headers, _ = await picker.page("/debug/config?format=json")
    assert headers["content-type"] == "application/json"
    _, headers, _ = await picker.page("/debug/config?format=text", Accept="application/json")
    assert headers["content-type"].startswith("text/plain")


async def test_a_table_of_nothing_says_so():
    """No traffic and no endpoints are ordinary."""
    assert await table_in_turns([]) == "none\n"


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
            shown = 400 if path == "/debug/explain" else 200  # it asks for a name
            assert (await get(at, path, Authorization="Bearer s3cret"))[0] == shown, path
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
            lost=4,
            claims_cut=5,
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
        "lost": 4,
        "claims_cut": 5,
    }
    assert second["connected_s"] is second["heard_s"] is None
    _, _, text = await picker.page("/debug/peers")
    head, *lines = text.splitlines()
    assert head.split()[:4] == ["address", "origin", "connected_s", "heard_s"]
    assert lines[1].split()[:4] == ["10.0.0.2:9004", "-", "-", "-"]


async def test_indexes_are_shown_with_what_they_hold(picker):
    """By being in the configuration, whatever they can say of themselves."""
    for _ in range(3):
        picker.scheduler.schedule(make_request(prompts=(bytes(1_024),)), 1.0)
    (row,) = (await picker.json("/debug/indexes"))["indexes"]
    assert row["memory_bytes"] > 0
    row["memory_bytes"] = "some"
    assert row == {
        "name": PREFIX,
        "type": PREFIX,
        "origin": "decided",
        "open": True,
        "entries": 4,
        "memory_bytes": "some",
        "memory_max_bytes": 268_435_456,
        "hits": 2,
        "lookups": {"full": 2, "partial": 0, "none": 1},
    }
    head, line = (await picker.page("/debug/indexes"))[2].splitlines()
    assert head.split()[:4] == ["name", "type", "origin", "open"]
    assert "2 full, 0 partial, 1 none" in line


async def test_endpoints_say_why_and_since_when(picker):
    """As of the look that the page itself makes."""
    (slot, bad), *_ = picker.scheduler.pool.endpoints()
    before = time.time()
    for _ in range(2):
        picker.scheduler.take(ScrapeFailed(slot=slot, answered=False), 0.0)
    row = next(
        row
        for row in (await picker.json("/debug/endpoints"))["endpoints"]
        if row["name"] == bad.name
    )
    assert row["state"] == "unreachable"
    assert row["reason"] == "scrapes fail to connect or get no answer: timeout, no answer"
    assert before - 1 <= datetime.fromisoformat(row["since"]).timestamp() <= time.time()
    _, _, text = await picker.page("/debug/endpoints")
    assert "scrapes fail to connect or get no answer" in text


async def test_it_is_told_why_not_another(picker):
    """Of an endpoint that is asked for, by its name."""
    decision = picker.decide(request_id="r-7")
    other = next(
        at.name for _, at in picker.scheduler.pool.endpoints() if at.name != decision.endpoint.name
    )
    _, _, text = await picker.page(f"/debug/explain?request_id=r-7&endpoint={other}")
    assert f"  why not {other}: {other} had " in text
    (row,) = (await picker.json("/debug/explain?request_id=r-7&endpoint=nobody"))["decisions"]
    assert row["why_not"] == {"endpoint": "nobody", "verdict": "absent"}


ENDPOINTS = 1_000


@pytest.mark.parametrize(
    ("path", "work"),
    [
        ("/debug/endpoints", "epp.shell.operators.pages.text_table.cell"),
        ("/debug/endpoints?format=json", "msgspec.json.encode"),
        ("/debug/decisions?n=1000", "epp.shell.operators.pages.text_table.cell"),
        ("/debug/decisions?n=1000&format=json", "msgspec.json.encode"),
    ],
)
async def test_a_page_of_a_thousand_rows_leaves_the_loop_its_turns(path, work, monkeypatch):
    """Between two turns of the loop few rows are made, however many there are."""
    picker = Picker()
    picker.scheduler.take(PoolReplaced([endpoint(number) for number in range(ENDPOINTS)]), 0.0)
    for _ in range(ENDPOINTS):
        picker.decide()
    where, _, name = work.rpartition(".")
    module = sys.modules[where]
    real = getattr(module, name)
    done, most = 0, 0

    def counted(value):
        nonlocal done
        done += 1
        return real(value)

    async def loop_turns():
        nonlocal most
        before = 0
        while True:
            await asyncio.sleep(0)
            most, before = max(most, done - before), done

    async with picker.server:
        turns = asyncio.create_task(loop_turns())
        monkeypatch.setattr(module, name, counted)
        status, _, text = await get(picker.server, path)
        turns.cancel()
    assert status == 200
    assert text.count("pod-") >= ENDPOINTS
    rows = ENDPOINTS
    assert done >= rows
    assert most <= ROWS_PER_TURN * done / rows


async def test_the_numbers_of_a_page_are_rounded_by_column():
    """None where nothing is known: of a thousand endpoints each number alone would take 60 ms."""
    picker = Picker()
    picker.scheduler.take(PoolReplaced([endpoint(0), endpoint(7)]), 0.0)
    report = EndpointMetrics(waiting_requests=2, running_requests=1, kv_cache_usage=0.123456)
    picker.scheduler.take(PageScraped(0, report), 1.0)
    first, second = (await picker.json("/debug/endpoints?format=json"))["endpoints"]
    assert (first["waiting"], first["kv_cache_usage"]) == (2.0, 0.123)
    assert (second["waiting"], second["kv_cache_usage"]) == (None, None)


async def test_a_row_has_belief_beside_what_its_engine_counts():
    """And why not, where the engine's counters cannot be used."""
    picker = Picker()
    picker.scheduler.take(PoolReplaced([endpoint(0), endpoint(7)]), 0.0)
    decided = Expected(
        prompt_tokens=1_000, predicted_tokens=500, prompt_bytes=4_000, indexes={"approx": 125}
    )
    for now, queried in ((0.0, 0.0), (30.0, 40_000.0)):
        for slot, told in ((0, queried), (1, 0.0)):
            report = EndpointMetrics(
                waiting_requests=0.0,
                cache_queried_tokens=told,
                cache_hit_tokens=told / 4,
                tier_hit_tokens={"device": told / 5, "host": told / 20, "disk": 0.0},
            )
            picker.scheduler.take(PageScraped(slot, report), now)
            for _ in range(40):
                picker.scheduler.accuracy.decided(slot, "llama", decided)
    first, second = (await picker.json("/debug/endpoints?format=json"))["endpoints"]
    shown = "predicted_hits", "engine_hits", "hit_counters"
    assert [first[name] for name in shown] == [0.5, 0.25, "measured"]
    assert [second[name] for name in shown] == [None, None, "still"]
    assert first["predicted_hits_by_index"] == {"approx": 0.125}
    assert first["engine_hits_by_tier"] == {"device": 0.2, "host": 0.05}
    assert (second["predicted_hits_by_index"], second["engine_hits_by_tier"]) == (None, None)


async def test_where_one_index_believes_and_no_engine_tells_tiers_no_row_has_them():
    picker = Picker()
    picker.scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    (row,) = (await picker.json("/debug/endpoints?format=json"))["endpoints"]
    assert row.keys().isdisjoint({"predicted_hits_by_index", "engine_hits_by_tier"})


async def test_debug_pages_wait_in_a_queue_of_their_own_for_the_turn_of_all_pages():
    """As many as wait are bounded, and a scrape is not refused because they do."""
    picker = Picker()
    turn = asyncio.Lock()
    queue = PageQueue(turn)
    server = MetricsServer(
        CollectorRegistry(),
        lambda: True,
        host="127.0.0.1",
        port=0,
        routes=picker.pages.routes(queue),
        turn=turn,
    )
    async with server, asyncio.TaskGroup() as tasks:
        await turn.acquire()
        paths = [list(PAGES)[number % 2] for number in range(WAITING_MAX)]
        waiting = [tasks.create_task(get(server, path)) for path in paths]
        while queue.waiting < WAITING_MAX:
            await asyncio.sleep(0)
        status, headers, _ = await get(server, "/debug/endpoints")
        assert (status, headers["Retry-After"]) == (503, "1")
        scrape = tasks.create_task(get(server, "/metrics"))
        while not server.scrapes.waiting:
            await asyncio.sleep(0)
        turn.release()
        assert {(await page)[0] for page in [*waiting, scrape]} == {200}


async def test_a_stranger_takes_nobodys_place(tmp_path):
    """Who shows no token is told so at once, while pages are made."""
    (tmp_path / "token").write_text("a-token")
    picker = Picker()
    turn = asyncio.Lock()
    queue = PageQueue(turn)
    routes = picker.pages.routes(queue, BearerToken(tmp_path / "token"))
    server = MetricsServer(
        CollectorRegistry(), lambda: True, host="127.0.0.1", port=0, routes=routes, turn=turn
    )
    async with server, turn:
        assert [(await get(server, path))[0] for path in PAGES] == [401] * len(PAGES)
        assert queue.waiting == 0
