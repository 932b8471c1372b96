"""An open loop: requests go out when they are due, whatever becomes of the others."""

import asyncio
import json
from itertools import takewhile

import pytest

from epp.core.prompt.parse import parse_request
from sim.drive.driver import Driver, DriveSettings
from sim.traces.arrival import Arrival
from tests.sim.drive.gateway import gateway
from tests.sim.running import MODEL, running_pod


def arrival(index=0, **fields):
    defaults = {
        "index": index,
        "time_s": 0.0,
        "prompt_tokens": 64 * 4 + 10,
        "output_tokens": 5,
        "blocks": (2**63 + 1, 2, 3, 100 + index),
        "block_tokens": 64,
    }
    return Arrival(**(defaults | fields))


async def drive(url, arrivals, **settings):
    found = []
    driver = Driver(DriveSettings(url=url, **settings), found.append)
    async with asyncio.timeout(20):
        await driver.run(arrivals)
    return driver, found


async def test_every_answer_is_measured():
    """First token, gaps, end, who served, what was cached."""
    with gateway() as served:
        _, found = await drive(served.url, [arrival(index) for index in range(8)])
    assert len(found) == 8
    for one in found:
        answer = one.answer
        assert not one.error
        assert 0 < answer.ttft_s <= answer.duration_s
        assert len(answer.gaps_s) == 4
        assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (266, 5, 64)
        assert one.late_s >= 0
    assert {one.answer.served_by for one in found} == {"pod-0", "pod-1"}


async def test_a_simulated_pod_finds_the_blocks_that_the_trace_shares():
    """Through real text: 3 of 4 blocks are in its cache the second time."""
    async with running_pod(speed=50.0) as pod:
        _, found = await drive(
            str(pod.url("/")), [arrival(0), arrival(1, after=0)], models={"": MODEL}
        )
    first, second = found
    assert (first.answer.cached_tokens, second.answer.cached_tokens) == (0, 192)


async def test_bodies_share_exactly_as_the_blocks_do():
    """By the picker's own parser, for ids of 64 bits, stretches included."""
    given = [
        arrival(0),
        arrival(1),
        arrival(2, blocks=(9, 2, 3, 4)),
        arrival(3, blocks=(2**63 + 1, 2), lengths=(64, 64), block_tokens=0, session="me"),
    ]
    with gateway() as served:
        await drive(served.url, given, models={"": "asked-for"}, headers={"x-key": "k"})
        asked = sorted(served.asked, key=lambda one: "x-session-id" in one[1])
    chains = []
    for path, headers, body in asked:
        assert (path, body["model"], headers["x-key"]) == ("/v1/completions", "asked-for", "k")
        assert (body["max_tokens"], body["stream"], body["ignore_eos"]) == (5, True, True)
        raw = json.dumps(body).encode()
        parsed = parse_request(path=path, headers={}, body=raw, request_id="r")
        (chain,) = parsed.request.chains_of(256, 100)
        chains.append([chain[at : at + 8] for at in range(0, len(chain), 8)])
    shared = [
        sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chains[0], one, strict=False))
        )
        for one in chains
    ]
    assert sorted(shared) == [0, 2, 3, 4]


async def test_nobody_waits_for_anybody():
    """All are sent although none is answered."""
    with gateway() as served:
        served.held.clear()
        driver = Driver(DriveSettings(url=served.url), lambda _: None)
        running = asyncio.create_task(driver.run([arrival(index) for index in range(20)]))
        async with asyncio.timeout(10):
            while len(served.asked) < 20:
                await asyncio.sleep(0.005)
        driver.stop()
        await running
    assert driver.cut == 20


async def test_more_than_may_be_open_are_not_sent_and_counted():
    """The others are not delayed by it."""
    with gateway() as served:
        served.held.clear()
        driver = Driver(DriveSettings(url=served.url, in_flight_max=3), lambda _: None)
        running = asyncio.create_task(driver.run([arrival(index) for index in range(10)]))
        async with asyncio.timeout(10):
            while driver.not_sent < 7:
                await asyncio.sleep(0.005)
        served.held.set()
        async with asyncio.timeout(10):
            await running
    assert (driver.not_sent, driver.cut, len(served.asked)) == (7, 0, 3)


async def test_turns_that_wait_for_an_answer_are_not_in_flight():
    """A conversation of nine turns needs room for one request."""
    with gateway() as served:
        driver = Driver(DriveSettings(url=served.url, in_flight_max=1), lambda _: None)
        turns = [arrival(0), *(arrival(index, after=index - 1) for index in range(1, 9))]
        await driver.run(turns)
    assert (driver.not_sent, len(served.asked)) == (0, 9)


async def test_a_turn_waits_for_the_answer_that_it_is_about():
    """And only for that."""
    order = []
    with gateway() as served:
        given = [arrival(0), arrival(1, after=0, think_s=0.01), arrival(2)]
        driver = Driver(DriveSettings(url=served.url), order.append)
        await driver.run(given)
    ended = {one.index: one.due_s + one.late_s + one.answer.duration_s for one in order}
    (second,) = [one for one in order if one.index == 1]
    assert second.due_s >= ended[0]


@pytest.mark.parametrize(
    ("answers", "problem"), [("refuse", "status 503: no room"), ("redirect", "status 307")]
)
async def test_a_refusal_is_an_error_with_its_status(answers, problem):
    """No redirect is followed: a key is for the gateway that was named."""
    with gateway() as served:
        served.answers = getattr(served, answers)
        _, (one,) = await drive(served.url, [arrival()])
        assert len(served.asked) == 1
    assert one.error.startswith(problem)
    assert one.answer.status in {503, 307}


async def test_nobody_at_the_url_is_an_error_of_each_request():
    _, found = await drive("http://127.0.0.1:1", [arrival(0), arrival(1)])
    assert [bool(one.error) for one in found] == [True, True]


async def test_an_answer_that_never_comes_is_given_up():
    with gateway() as served:
        served.held.clear()
        _, (one,) = await drive(served.url, [arrival()], timeout_s=0.05)
    assert one.error == "TimeoutError"


async def test_a_trace_names_no_other_host_and_no_key():
    """Whatever its raw requests have as path and headers."""
    raw = b'{"model": "m", "prompt": "hello", "max_tokens": 2}'
    headers = (("authorization", "theirs"), ("host", "elsewhere"), ("x-zone", "a"))
    with gateway() as served:
        _, found = await drive(
            f"{served.url}/base",
            [
                arrival(0, body=raw, path="//elsewhere.example/v1/completions", headers=headers),
                arrival(1, body=raw, path="http://elsewhere.example/v1"),
                arrival(2, body=b"{"),
            ],
            headers={"authorization": "ours"},
        )
        assert [path for path, *_ in served.asked] == [
            "/base/elsewhere.example/v1/completions",
            "/base/http://elsewhere.example/v1",
        ]
        first = {name.lower(): value for name, value in served.asked[0][1].items()}
    assert (first["authorization"], first["x-zone"]) == ("ours", "a")
    assert "elsewhere" not in first["host"]
    assert served.asked[0][2]["max_tokens"] == 2
    assert [one.error for one in found] == ["", ""]


async def test_what_no_text_can_say_is_counted():
    """Ids of short stretches that are too large for it."""
    with gateway() as served:
        driver, found = await drive(
            served.url, [arrival(0, blocks=(2**40, 1), lengths=(1, 2), block_tokens=0), arrival(1)]
        )
    assert (driver.unfit, len(found)) == (1, 1)
