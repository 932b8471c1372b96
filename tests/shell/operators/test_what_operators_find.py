"""What is wrong with a pool is found from `epp top` and `epp explain` alone."""

import asyncio
import json

import msgspec
import pytest

from epp.__main__ import main
from epp.core.decision.inputs import PageScraped, RequestEnded, ServedBy
from epp.core.decision.profile import WeightedScorer
from epp.core.knowledge.inflight import Outcome
from epp.core.protocol.usage import Usage
from epp.core.types import EndpointMetrics
from epp.plugins import SCORERS
from epp.plugins.added_time import AddedTime
from epp.shell.operators.decisions.configuration_changes import ConfigurationChanges
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.explanation import explanation
from epp.shell.operators.decisions.recent_decisions import Wanted
from epp.shell.operators.live.live_view import Live, LiveView
from tests import gateway as gw
from tests.app.test_wiring import PREFIX_FIRST, QUEUE_FIRST, TWO, ready_at_once, replace, serving
from tests.commands.test_top_screen import drawn
from tests.envoy.rig import until
from tests.shell.operators.decisions.test_explanation import PROMPT, Told
from tests.shell.operators.decisions.test_recent_decisions import exchange_of
from tests.streams import Call
from tests.transports import TRANSPORTS

NEW = {"prompts": (b"short",), "prompt_tokens": 2}


async def top(told):
    """Lines of `epp top`, as its JSON makes them."""
    view = LiveView(
        told.scheduler,
        told.recent,
        ConfigurationChanges(),
        EndpointStates(told.scheduler),
        clock=lambda: 0.5,
    )
    return drawn(msgspec.json.decode(await view.look(), type=Live))


def columns_of(lines):
    """Name of a pod -> the words of its line."""
    return {words[0]: words for line in lines if (words := line.split()) and words[0][:4] == "pod-"}


def ended(told, decision, **fields):
    """The request of `decision` is over."""
    told.recent.completed(exchange_of(decision, **fields), Outcome(status=200), 101.0)
    told.scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 1.0)


async def test_the_slow_pod_is_the_one_whose_requests_do_not_end():
    """At 0.15 of the others' speed: more in flight at every look, for no greater share."""
    told = Told(WeightedScorer("active", SCORERS["active-request-scorer"](), 1.0))
    slow, open_ = "pod-1", {f"pod-{at}": [] for at in range(3)}
    earned = dict.fromkeys(open_, 0.0)
    for _ in range(200):
        decision = told.decide(**NEW)
        open_[decision.endpoint.name].append(decision)
        for name, running in open_.items():
            earned[name] += 0.06 if name == slow else 0.4
            while earned[name] >= 1.0:
                earned[name] -= 1.0
                if running:
                    ended(told, running.pop(0))
    columns = columns_of(await top(told))
    in_flight = {name: int(words[5]) for name, words in columns.items()}
    share = {name: int(words[2].rstrip("%")) for name, words in columns.items()}
    assert max(in_flight, key=in_flight.get) == slow
    assert min(share, key=share.get) == slow


async def test_an_index_that_lies_predicts_what_is_not_found():
    """At one pod alone, which has restarted behind our back, say."""
    told = Told()
    for at in range(6):
        first = told.decide(model=f"m-{at % 3}")
        predicted = first.leg.matched_blocks * first.leg.block_tokens
        lies = first.endpoint.name == "pod-0"
        ended(told, first, usage=Usage(cached_tokens=0 if lies else predicted))
    columns = columns_of(await top(told))
    assert {name: line[7:9] for name, line in columns.items()} == {
        "pod-0": ["50%", "0%"],
        "pod-1": ["50%", "50%"],
        "pod-2": ["50%", "50%"],
    }


async def test_a_weight_that_is_wrong_explains_itself():
    """The prefix is followed into a queue of ninety, while somebody is idle."""
    weights = {"prefix-cache-scorer": 100.0, "queue-scorer": 1.0}
    told = Told(*(WeightedScorer(name, SCORERS[name](), at) for name, at in weights.items()))
    first = told.decide()
    crowded = EndpointMetrics(waiting_requests=90, running_requests=64, kv_cache_usage=0.98)
    told.scheduler.take(PageScraped(first.lease.slot, crowded), 0.0)
    told.decide(request_id="r-7")
    (row,) = await told.recent.rows(1, Wanted(request_id="r-7"))
    text = explanation(row)
    name = first.endpoint.name
    assert f"{name}: 100, including prefix-cache-scorer 100 (9 of 9 blocks); runner-up" in text
    assert ": 1, including queue-scorer 1; prefix-cache-scorer decided" in text
    assert f"{name} at that time: 90 waiting, 64 running, KV cache 98%" in text
    assert "at that time: 0 waiting, 0 running" in text


async def test_a_misrouted_request_is_marked_where_one_looks():
    """`epp top` shows that the gateway went elsewhere, and where."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0))
    decision = told.decide(prompts=(PROMPT,))
    (other, *_) = (
        at for _, at in told.scheduler.pool.endpoints() if at.name != decision.endpoint.name
    )
    told.scheduler.take(ServedBy(decision.lease, other.address), 1.0)
    told.recent.served(exchange_of(decision, served=other.address))
    assert f"served by {other.address}" in "\n".join(await top(told))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_running_picker_is_asked_from_a_terminal(transport, tmp_path, capsys):
    """From the answer that a client gets to the words, over sockets; and a reload is seen."""
    flags = (f"--transport={transport}", "--explain-headers")
    async with serving(tmp_path, TWO, *flags, config=PREFIX_FIRST) as running:
        ready_at_once(running)
        url = f"--url=http://127.0.0.1:{running.picker.flags.metrics_port}"
        call = Call(running.channel)
        asked = gw.COMPLETIONS | {"x-request-id": "r 1"}
        await call.exchange(gw.request_headers(asked), gw.request_body(gw.prompt()), answers=2)
        (answer,) = await call.exchange(gw.response_headers(end=True), answers=1)
        assert (await call.end()).name == "OK"
        told = gw.set_headers(answer)
        assert told["x-request-id"] == "r 1"
        await until(lambda: not running.picker.ext_proc.open_streams, "the end of the stream")
        assert await asyncio.to_thread(main, ["explain", told["x-request-id"], url]) == 0
        shown = capsys.readouterr().out
        assert f"routed to {told['x-homing-endpoint']} at" in shown
        assert "configuration generation 1" in shown
        assert "ended: 200" in shown
        assert await asyncio.to_thread(main, ["explain", "none", url]) == 1
        capsys.readouterr()
        replace(tmp_path / "config.yaml", QUEUE_FIRST)
        await until(lambda: running.picker.live.generation == 2, "the reload")
        assert await asyncio.to_thread(main, ["explain", "r 1", "--json", url]) == 0
        (row,) = json.loads(capsys.readouterr().out)["decisions"]
        assert row["config_generation"] == 1, "that which decided"
        assert await asyncio.to_thread(main, ["top", "--once", url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any("generation 2" in line for line in lines)
        assert any("queue-scorer" in line and "3" in line for line in lines), "what changed"
        replace(tmp_path / "config.yaml", "kind: nonsense")
        await until(
            lambda: running.logged("configuration rejected, the last valid one stays in force"),
            "it",
        )


async def test_a_picker_that_is_to_keep_nothing_keeps_nothing(tmp_path, capsys):
    """`--decision-records-keep=0s`; requests are served as ever."""
    async with serving(tmp_path, TWO, "--decision-records-keep=0s") as running:
        ready_at_once(running)
        await running.pick(x_request_id="r-1")
        url = f"--url=http://127.0.0.1:{running.picker.flags.metrics_port}"
        assert await asyncio.to_thread(main, ["explain", "r-1", url]) == 1
        assert (
            "no request r-1 was decided or refused by this picker so far" in capsys.readouterr().err
        )
        assert await asyncio.to_thread(main, ["top", "--once", url]) == 0
        assert "none yet" in capsys.readouterr().out


async def test_last_night_is_asked_from_files(tmp_path, capsys):
    """By sockets into files: who went where, what a change did; also of the process before."""
    flags = (f"--decisions-dir={tmp_path / 'kept'}", "--decision-records-keep=0s")
    folder = f"--dir={tmp_path / 'kept'}"
    async with serving(tmp_path, TWO, *flags, config=PREFIX_FIRST) as running:
        ready_at_once(running)
        await running.pick(x_request_id="before")
        replace(tmp_path / "config.yaml", QUEUE_FIRST)
        await until(lambda: running.picker.live.generation == 2, "the reload")
        await running.pick(x_request_id="after")
    async with serving(tmp_path, TWO, *flags) as running:
        ready_at_once(running)
        await running.pick(x_request_id="restarted")
    assert main(["decisions", folder, "--until=-1s"]) == 0
    shown = capsys.readouterr().out
    assert ": 3 decisions, " in shown
    assert all(name in shown for name in ("before", "after", "restarted"))
    assert main(["explain", "after", folder]) == 0
    assert "configuration generation 2" in capsys.readouterr().out
    assert main(["changes", folder]) == 0
    shown = capsys.readouterr().out
    assert "queue-scorer" in shown, "what changed"
    assert "decisions a second" in shown
    assert "the picker started with" in shown
