"""The chaos table: one short fault of it through all its parts, and what it makes of the figures."""

import asyncio
import contextlib
import re

import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer
from msgspec import structs

from bench.chaos.__main__ import (
    MARKS,
    Row,
    as_markdown,
    bare_gateway,
    main,
    play,
    write_between_marks,
)
from bench.chaos.faults import CASES
from bench.chaos.load import NO_ANSWER, Traffic
from bench.chaos.pods import CRAWL, SLOWNESS, FaultyPod
from bench.chaos.stage import PODS
from epp.shell.gateway.bootstrap import BootstrapOptions, render
from sim.engine.request import EngineRequest
from tests.envoy.rig import ENVOY

POD = CASES["pod-fails-fast"]
SHORT = Traffic(rate_per_s=20, answer_tokens=8, system_words=20, question_words=10)


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
@pytest.mark.xdist_group("replicas")
async def test_a_pod_that_fails_is_seen_by_who_asks():
    """Real pods, pickers and Envoy: its 500s are lost requests, others are not, times are told."""
    traffic = Traffic(rate_per_s=20, answer_tokens=2, system_words=20, question_words=10)
    row = await play("pod-fails-fast", seconds=3.0, traffic=traffic, seed=1)
    assert row.sent > 30
    assert set(row.lost) == {"500"}
    assert row.lost["500"] < row.sent
    assert row.bad_share is not None
    assert 0 <= row.bad_share < 1
    assert len(row.ttft_before_s) > 30
    assert 0 < len(row.ttft_during_s) <= row.sent - row.lost["500"]


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
async def test_a_slow_pod_gets_less_and_no_request_is_lost():
    """Real pods, pickers and Envoy: its effect is proven, and the other pods serve more."""
    row = await play("pod-slow", seconds=6.0, traffic=SHORT, seed=1)
    assert row.sent > 30
    assert not row.lost
    assert row.bad_share is not None
    assert row.bad_share < 1 / PODS


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
async def test_a_fault_that_is_replaced_by_nothing_fails_the_run(monkeypatch, capsys, tmp_path):
    """The run ends with 1, says why in one sentence, prints no table and writes no page."""

    @contextlib.asynccontextmanager
    async def nothing(*_):
        yield

    case = CASES["picker-frozen"]

    @contextlib.asynccontextmanager
    async def harmless(folder):
        async with case.set(folder) as setting:
            yield structs.replace(setting, happen=nothing)

    page = tmp_path / "page.md"
    page.write_text("\n".join(MARKS))
    monkeypatch.setitem(CASES, "picker-frozen", structs.replace(case, set=harmless))
    monkeypatch.setattr("bench.chaos.__main__.end_in_order", lambda: None)
    flags = ["picker-frozen", "--light", "--write", str(page)]
    assert await asyncio.to_thread(main, flags) == 1
    told = capsys.readouterr()
    assert re.search(r"the fault did not take effect: observed process state '[RSD]'", told.err)
    assert told.out == ""
    assert page.read_text() == "\n".join(MARKS)


async def test_what_cannot_be_played_says_why(tmp_path, monkeypatch):
    """A row with a reason, and no stage."""
    monkeypatch.setenv("HOMING_SHARED", str(tmp_path))
    row = await play("api-server-away", seconds=1.0, traffic=Traffic(), seed=1)
    assert row.not_played == f"{tmp_path / 'crds'} has no definition of InferencePool"
    assert row.not_played in as_markdown([row])


def test_the_table_says_what_a_fault_cost():
    """Losses by kind, the share, and quantiles beside those without the fault."""
    row = Row(
        case=POD,
        sent=1500,
        lost={"500": 2, NO_ANSWER: 1},
        last_lost_s=0.84,
        bad_share=0.015,
        ttft_before_s=[0.1] * 10,
        ttft_during_s=[0.15] * 8 + [0.3] * 2,
    )
    *_, line = as_markdown([row]).splitlines()
    assert line == (
        f"| {POD.what} | 1,500 | 2 × 500, 1 × no answer | 0.8 s | 1.5% | 150 ms (+50%) "
        "| 300 ms (+200%) |"
    )


def test_a_run_without_answers_has_no_times():
    """Where nothing came there is nothing to compare."""
    *_, line = as_markdown([Row(case=POD, sent=3, lost={"500": 3})]).splitlines()
    assert line.endswith("| none | none |")


def test_the_table_goes_between_its_marks_only():
    """What is round it stays, a second time too; a page without marks is left alone."""
    begin, end = MARKS
    once = write_between_marks(f"before\n{begin}\nold\n{end}\nafter\n", "| new |")
    assert once == f"before\n{begin}\n\n| new |\n\n{end}\nafter\n"
    assert write_between_marks(once, "| new |") == once
    with pytest.raises(ValueError, match="once each"):
        write_between_marks("nothing", "| new |")


@pytest.mark.parametrize(
    ("fault", "factor"), [("slow", SLOWNESS), ("lies", SLOWNESS), ("crawls", CRAWL), ("none", 1.0)]
)
async def test_each_pass_of_a_slow_pod_takes_as_many_times_as_long(fault, factor):
    """The factor applies to the engine that serves, for prefill and for decode passes."""
    faulty = FaultyPod(port=0)
    (engine,) = faulty.pod.engines.ranks
    healthy_s = passes_s(engine, "before", range(62))
    async with TestClient(TestServer(faulty.application())) as client:
        response = await client.post(f"/fault/{fault}")
        assert response.status == 200
    slow_s = passes_s(engine, "after", range(100, 162))
    assert slow_s == pytest.approx([factor * one for one in healthy_s])


def passes_s(engine, name, chain):
    """Return the durations of one prefill pass and two decode passes of a request.

    `chain` holds the keys of its blocks; keys that no other request has are not cached.
    """
    engine.submit(EngineRequest(name, prompt_tokens=1000, output_tokens=3, chain=chain), 0.0)
    return [engine.step(0.0).duration_s for _ in range(3)]


def test_the_bare_gateway_has_nothing_of_ours_against_lost_pickers():
    """What is compared with is Envoy's own way with a picker that is gone."""
    document = yaml.safe_load(render(BootstrapOptions()))
    bare_gateway(document)
    assert not re.search(r"retr|outlier|keepalive|panic", str(document))
