"""What an operator sees in a terminal."""

import io

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from epp.commands.top_screen import top_screen
from epp.core.protocol.flow_queue import WaitingFlow
from epp.journal.records import Applied, RefusedDocument
from epp.shell.operators.journal import JournalSnapshot
from epp.shell.operators.live.live_view import (
    Live,
    LiveBand,
    LiveDecision,
    LiveEndpoint,
    LiveLatency,
    LivePrefills,
    LiveScore,
)
from epp.shell.process.own_process import ProcessLately

WEIGHTS = {
    "prefix-cache-scorer": 3.0,
    "queue-scorer": 2.0,
    "kv-cache-utilization-scorer": 2.0,
    "lora-affinity-scorer": 1.0,
    "active-request-scorer": 1.0,
}


def live_endpoint(number, **fields):
    told = {
        "name": f"default/vllm-llama3-8b-instruct-7d9c6b5f4-x{number}k2p",
        "address": f"10.0.0.{number}:8000",
        "state": "ready",
        "slowness": 1.0,
        "outlier": None,
        "ejected": False,
        "since": "2026-01-02T11:55:07.000+00:00",
        "reason": "",
        "metrics_age_s": 0.1,
        "waiting": float(number),
        "running": 64.0,
        "kv_cache_usage": 0.45,
        "inflight_requests": 7,
        "inflight_prefill_tokens": 1e5,
        "requests": 10 * number,
        "share": number / 10,
        "failed": 0,
        "predicted_hits": 0.8,
        "compared_hits": 0.7,
        "actual_hits": 0.5,
    }
    return LiveEndpoint(**(told | fields))


def live_decision(**fields):
    told = {
        "at": "2026-01-02T12:00:01.000+00:00",
        "request_id": "7c9e6679-7425-40de-944b-e07fc1f90ae7",
        "model": "llama",
        "status": 200,
        "score": LiveScore(
            endpoint="default/pod-1",
            total=7.0,
            parts={"prefix-cache-scorer": 3.0, "queue-scorer": 4.0},
        ),
        "runner_up": LiveScore(endpoint="default/pod-2", total=4.0, parts={"queue-scorer": 4.0}),
        "decided_by": ["prefix-cache-scorer"],
        "matched_blocks": 9,
        "total_blocks": 9,
    }
    return LiveDecision(**(told | fields))


def live(**fields):
    told = {
        "version": "0.1.0",
        "at_s": 1.7e9,
        "pool": "llama-pool",
        "window_s": 60.0,
        "decided": 300,
        "refused": {},
        "shed_total": 0,
        "decided_total": 9_999,
        "endpoints_total": 4,
        "endpoints_ready": 4,
        "endpoints": [live_endpoint(at) for at in range(4)],
        "decisions": [live_decision()],
        "configuration": Applied(
            generation=3, hash="abcdef0123", source="config.yaml", at_s=1.7e9, weights=WEIGHTS
        ),
        "configuration_refused": None,
    }
    return Live(**(told | fields))


def drawn(seen, columns=80, lines=None, **more):
    out = io.StringIO()
    console = Console(file=out, width=columns, force_terminal=False)
    console.print(top_screen(seen, columns=columns, lines=lines, **more))
    return out.getvalue().splitlines()


def line_of(lines, text):
    (found,) = [line for line in lines if text in line]
    return found


def test_a_pod_is_a_line_of_eighty_columns():
    """By the end of its name, in which pods differ, with its share, load and hits."""
    lines = drawn(live())
    assert all(cell_len(line) <= 80 for line in lines)
    words = line_of(lines, "x3k2p").split()
    assert words[1:] == ["ready", "30%", "3", "64", "7", "45%", "80%", "50%", "0", "0.1s"]
    assert lines[0].startswith("homing llama-pool  22:13:20 UTC  5.0/s in 60 s  4 of 4 ready")


def test_a_wide_terminal_shows_names_and_requests_whole():
    """So that the name can be given to `epp explain`."""
    lines = drawn(live(), columns=140)
    assert "vllm-llama3-8b-instruct-7d9c6b5f4-x3k2p " in line_of(lines, "x3k2p")
    assert "7c9e6679-7425-40de-944b-e07fc1f90ae7" in line_of(lines, "12:00:01")
    narrow = line_of(drawn(live()), "12:00:01")
    assert "7c9e" not in narrow, "a part of it is of no use"
    assert narrow.split() == ["12:00:01", "pod-1", "7", "█" * 16, "pod-2", "4", "prefix-cache"]


def test_the_bar_of_a_decision_is_made_of_its_scorers():
    """As long as its share of the greatest; a tie and a lone candidate are named."""
    parts = {"prefix-cache-scorer": 1.0, "queue-scorer": 1.0}
    less = live_decision(score=LiveScore(endpoint="pod-1", total=2.0, parts=parts), decided_by=[])
    line = line_of(drawn(live(decisions=[less])), "12:00:01")
    assert line.count("█") == 8
    assert line.count("·") == 8
    assert "a tie" in line
    alone = live_decision(runner_up=None, decided_by=[], status=503, served_by="10.0.0.9:8000")
    line = line_of(drawn(live(decisions=[alone])), "12:00:01")
    assert line.endswith("  503  served by 10.0.0.9:8000")
    alone = live_decision(runner_up=None, decided_by=[])
    assert line_of(drawn(live(decisions=[alone])), "12:00:01").endswith("  the only one")


def test_what_is_wrong_is_seen():
    """Refusals by reason, streams that were shed, pods that are not ready, a refused document."""
    seen = live(
        refused={"rejected-saturated": 3},
        shed_total=2,
        endpoints_ready=3,
        endpoints=[live_endpoint(1, state="unreachable", metrics_age_s=None, waiting=None)],
        decisions=[live_decision(refused="rejected-saturated", status=429, score=None)],
        configuration_refused=RefusedDocument(at_s=1.7e9, problem="config.yaml: unknown plugin"),
    )
    lines = drawn(seen, problem="without 1 of 2: no answer")
    assert "3 of 4 ready  3 refused  2 shed" in lines[0]
    assert lines[1] == "3 rejected-saturated"
    assert line_of(lines, "no answer").startswith("without 1 of 2")
    assert line_of(lines, "unreachable").split()[3] == "-"
    assert "refused 429 rejected-saturated" in line_of(lines, "12:00:01")
    assert "unknown plugin" in line_of(lines, "refused at")


def test_requests_that_were_not_understood_are_seen_by_reason():
    lines = drawn(live(unparsed_total={"no-prompt": 3, "encoding-corrupt": 1}))
    assert lines[1] == "unparsed: 3 no-prompt, 1 encoding-corrupt"
    assert not any("unparsed" in line for line in drawn(live()))


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"slowness": 6.24, "outlier": "slow"}, "slow x6.24"),
        ({"slowness": None, "outlier": "failing"}, "failing"),
        ({"outlier": "slow", "ejected": True}, "ejected"),
        ({"outlier": "slow", "state": "stale"}, "stale"),
        ({"slowness": 6.24}, "ready"),
    ],
)
def test_a_ready_pod_that_is_worse_than_the_others_is_named(told, state):
    lines = drawn(live(endpoints=[live_endpoint(1), live_endpoint(2, **told)]))
    assert f" {state} " in line_of(lines, "x2k2p")


def test_on_a_small_screen_the_notable_pods_stay():
    """Those that are not ready, then those with most requests; the rest is counted."""
    endpoints = [live_endpoint(at) for at in range(1, 10)]
    endpoints[0] = live_endpoint(1, state="stale")
    lines = drawn(live(endpoints=endpoints, endpoints_total=12), lines=24)
    shown = [line.split()[0][-5:] for line in lines if line.startswith("…")]
    assert shown == ["x1k2p", "x7k2p", "x8k2p", "x9k2p"]
    assert "8 more, with fewer requests" in lines
    assert len(lines) <= 24


def test_an_idle_picker_can_be_drawn():
    """Nothing decided, nobody there."""
    empty = live(endpoints=[], decisions=[], decided=0, window_s=0.0, endpoints_total=0, pool="")
    lines = drawn(msgspec.structs.replace(empty, configuration=Applied()))
    assert "none yet" in lines


@pytest.mark.parametrize("hostile", ["\x1b[2J[red]x[/red]", "a\nb", "a\u202eb", "m" * 5_000])
def test_names_cannot_steer_the_terminal(hostile):
    """Neither by its sequences nor by the markup of the library."""
    score = LiveScore(endpoint=hostile, total=1.0, parts={hostile: 1.0})
    seen = live(
        pool=hostile,
        refused={hostile: 1},
        endpoints=[live_endpoint(1, name=hostile, state=hostile)],
        decisions=[
            live_decision(
                request_id=hostile, score=score, runner_up=score, decided_by=[hostile],
                served_by=hostile,
            ),
            live_decision(refused=hostile, score=None),
        ],
        configuration=Applied(
            hash=hostile, source=hostile, changes=(hostile,), weights={hostile: 1.0}
        ),
        configuration_refused=RefusedDocument(at_s=0.0, problem=hostile),
    )  # fmt: skip
    lines = drawn(seen)
    assert all(line.isprintable() for line in lines)
    assert all(cell_len(line) <= 80 for line in lines)
    if "[red]" in hostile:
        assert any("[red]" in line for line in lines), "markup is shown, not obeyed"


LATE = ProcessLately(lag_mean_s=0.0893, lag_most_s=1.25, cpu_cores=0.31, resident_bytes=212_400_000)


def test_the_picker_itself_is_the_second_line():
    """How late its loop is, what it takes; of an earlier version nothing."""
    lines = drawn(live(process=LATE))
    assert " at 10." not in lines[1]
    (shown,) = [
        one for one in drawn(live(process=LATE, process_at="http://10.0.0.7:9090")) if "loop" in one
    ]
    assert "1.2s at most in a minute, at 10.0.0.7:9090  0.31 CPU" in shown
    assert lines[1].rstrip() == (
        "loop late 89ms on average, 1.2s at most in a minute  0.31 CPU  212 MB"
    )
    new = msgspec.structs.replace(LATE, cpu_cores=None)
    assert "CPU" not in drawn(live(process=new))[1]
    assert "loop late" not in "".join(drawn(live()))


@pytest.mark.parametrize(
    ("dropped", "write_errors", "told"),
    [
        ({"queue": 0, "disk": 0}, 0, "capture 5 MB"),
        ({"queue": 3, "disk": 4}, 2, "lost 3 by its queue, 4 by its disk, 2 writes failed"),
        ({"queue": 0, "disk": 0}, 1, "lost 0, 1 writes failed"),
    ],
)
def test_what_a_capture_lost_is_told(dropped, write_errors, told):
    capture = JournalSnapshot(
        requests=1, events=2, dropped=dropped, write_errors=write_errors, bytes=5_000_000
    )
    line = line_of(drawn(live(capture=capture)), "capture")
    assert told in line
    assert ("lost" in line) is bool(write_errors)


def test_first_tokens_by_the_engines_clock_have_a_column_where_there_is_room():
    pods = [live_endpoint(1, engine_ttft_s=0.4), live_endpoint(2)]
    lines = drawn(live(endpoints=pods), columns=90)
    assert all(cell_len(line) <= 90 for line in lines)
    assert line_of(lines, "x1k2p").split()[-1] == "400ms"
    assert line_of(lines, "x2k2p").split()[-1] == "-"
    assert "ttft" not in "".join(drawn(live(endpoints=pods), columns=80))


def test_how_kv_events_are_heard_has_a_column_where_there_is_room():
    """And only where they are to be heard; who is not heard is named on every screen."""
    pods = [
        live_endpoint(1, kv_events="live"),
        live_endpoint(2, kv_events="live, incomplete"),
        live_endpoint(3, kv_events="stale", kv_events_problem="5557 closed"),
        live_endpoint(4, kv_events="none"),
    ]
    lines = drawn(live(endpoints=pods), columns=102)
    assert all(cell_len(line) <= 102 for line in lines)
    told = [line_of(lines, f"x{number}k2p").split()[-1] for number in (1, 2, 4)]
    assert told == ["live", "partly", "none"]
    for columns in (80, 102):
        line = line_of(drawn(live(endpoints=pods), columns=columns), "KV events missing from 2")
        assert "stale, 5557 closed" in line
    assert "events" not in "".join(drawn(live(endpoints=pods[:2]), columns=80))
    assert "events" not in "".join(drawn(live(endpoints=[live_endpoint(1)]), columns=120))


def test_what_engines_count_stands_in_for_answers_that_do_not_tell():
    pods = [
        live_endpoint(1, actual_hits=None, engine_hits=0.37),
        live_endpoint(2, actual_hits=0.42, engine_hits=0.37),
        live_endpoint(3, actual_hits=None),
    ]
    lines = drawn(live(endpoints=pods))
    found = [line_of(lines, f"x{number}k2p").split()[-3] for number in (1, 2, 3)]
    assert found == ["37%", "42%", "-"]


def test_reasons_stand_below_the_table_newest_first():
    """Which pod, since when, and why; of many the newest."""
    bad = [
        live_endpoint(
            at,
            state="unreachable",
            since=f"2026-01-02T02:0{at}:07.000+00:00",
            reason="its scrapes get no connection",
        )
        for at in range(6)
    ]
    lines = drawn(live(endpoints=[*bad, live_endpoint(7)]))
    told = [line for line in lines if "since 02:0" in line]
    assert ["since 02:0" + line.split("since 02:0")[1][0] for line in told] == [
        f"since 02:0{at}" for at in (5, 4, 3, 2)
    ]
    assert all("unreachable since" in line and "its scrapes" in line for line in told)
    assert line_of(lines, "and 2 more")


def test_costs_are_shown_in_their_unit():
    """And who was slow is red, by name of its state in the page."""
    score = LiveScore(endpoint="a/pod-1", total=1.0, parts={"s": 1.0}, cost=0.1234, unit="s")
    other = LiveScore(endpoint="a/pod-2", total=0.99, parts={"s": 0.99}, cost=0.31, unit="s")
    one = live_decision(score=score, runner_up=other, decided_by=["queue"])
    line = line_of(drawn(live(decisions=[one])), "12:00:01")
    assert " 0.12s " in line
    assert " 0.31s  queue" in line


def band(priority=0, **fields):
    told = {
        "priority": priority,
        "requests": 12,
        "flows": 2,
        "oldest_wait_s": 4.2,
        "most": [WaitingFlow("acme", 9, 4.2), WaitingFlow("", 3, 0.25)],
    }
    return LiveBand(**(told | fields))


@pytest.mark.parametrize("columns", [80, 140])
def test_waiting_requests_are_shown_by_band_and_flow(columns):
    seen = live(queue=[band(5, requests=1, flows=1, most=[]), band(), band(-1)], evicted_total=3)
    lines = drawn(seen, columns=columns)
    assert all(cell_len(line) <= columns for line in lines)
    assert line_of(lines, "queue +5").startswith("queue +5 1 wait in 1 flows, oldest 4.2s")
    assert line_of(lines, "queue 0").endswith(
        "12 wait in 2 flows, oldest 4.2s: acme 9 (4.2s), no flow 3 (250ms)"
    )
    assert "queue -1" in line_of(lines, "queue -1")
    assert "3 evicted since the start" in lines
    assert not [line for line in drawn(live(), columns=columns) if "queue" in line[:6]]


def test_an_empty_queue_is_shown_as_such():
    assert "queue 0 wait" in drawn(live(queue=[]))


def test_a_flow_cannot_steer_the_terminal():
    hostile = band(most=[WaitingFlow("\x1b[2J", 9, 4.2)])
    assert not [line for line in drawn(live(queue=[hostile])) if "\x1b" in line]


@pytest.mark.parametrize(("columns", "aged"), [(80, False), (100, True)])
def test_the_room_of_a_pod_is_shown_if_there_is_a_queue(columns, aged):
    """In place of the age of its metrics in a narrow terminal."""
    rooms = [
        live_endpoint(0, room_load=0.5, room_requests=12),
        live_endpoint(1, room_load=1.25, room_requests=0),
        live_endpoint(2, room_load=0.61),
        live_endpoint(3),
    ]
    lines = drawn(live(endpoints=rooms, queue=[]), columns=columns)
    assert all(cell_len(line) <= columns for line in lines)
    shown = [line_of(lines, f"x{at}k2p").split() for at in range(4)]
    place = -2 if columns >= 96 else -1
    assert [words[place] for words in shown] == ["+12", "full", "61%", "-"]
    assert any("0.1s" in words for words in shown) is aged


def test_predicted_latencies_are_compared_with_observed_ones():
    """Worst errors first; what is not used is said."""
    good = {
        "ttft": LiveLatency("learned", 0.4, 0.38, 0.07),
        "tpot": LiveLatency("estimate", 0.02, 0.021, 0.04),
    }
    bad = {
        "ttft": LiveLatency("none", 9.0, 2.0, 0.71),
        "tpot": LiveLatency("estimate", None, None, None),
    }
    endpoints = [live_endpoint(0, latencies=good), live_endpoint(1, latencies=bad)]
    lines = drawn(live(endpoints=endpoints), columns=120)
    first, second = [line for line in lines if " predicted  " in line]
    assert first.endswith("predicted  ttft 9.0s, observed 2.0s, error 71%, unused")
    assert second.endswith(
        "ttft 400ms, observed 380ms, error 7%  tpot 20ms, observed 21ms, error 4%"
    )
    assert not [line for line in drawn(live(), columns=120) if " predicted  " in line]


def test_the_screen_fits_with_a_queue_and_predictions():
    latencies = {"ttft": LiveLatency("learned", 0.4, 0.38, 0.07)}
    endpoints = [live_endpoint(at, latencies=latencies, room_load=0.5) for at in range(10)]
    seen = live(endpoints=endpoints, endpoints_total=10, queue=[band(at) for at in range(9, 0, -1)])
    assert len(drawn(seen, columns=120, lines=50)) <= 50


def test_prefills_in_flight_are_shown_by_pair():
    """With the most requests first; without any, there is no such line."""
    pairs = [
        LivePrefills(prefill=f"llm/prefill-{at}", decode=f"llm/decode-{at}", requests=9 - at)
        for at in range(5)
    ]
    line = line_of(drawn(live(prefills=pairs), columns=140), "prefills in flight")
    assert line.startswith("prefills in flight: 9 prefill-0 → decode-0, 8 prefill-1 → decode-1, ")
    assert line.rstrip().endswith("and 2 more pairs")
    assert not any("prefills in flight" in one for one in drawn(live()))
