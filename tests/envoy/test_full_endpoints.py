"""Pods that answer 429, through a real Envoy: they get less, and their share once they serve."""

import json

import pytest

from epp.core.knowledge.fullness import STEP_S, STEPS

pytestmark = pytest.mark.envoy

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
REQUESTS = 200


async def post(wired):
    async with wired.client.post("/v1/chat/completions", data=CHAT) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("headers", [{}, {"retry-after": "30"}])
async def test_who_answers_429_gets_little_while_others_have_room(headers, wire):
    """Of 200 requests among five pods it had 40 before."""
    wired = await wire(pods=5)
    full = wired.pods[2]
    full.refuses = headers
    statuses = [await post(wired) for _ in range(REQUESTS)]
    refused = statuses.count(429)
    assert len(full.received) == refused
    assert 1 <= refused <= 10
    assert statuses.count(200) == REQUESTS - refused
    slots = {endpoint.address: slot for slot, endpoint in wired.picker.scheduler.pool.endpoints()}
    assert list(wired.picker.scheduler.full.by_slot) == [slots[full.address]]


async def test_who_serves_again_gets_its_share_again(wire):
    """Its `retry-after` is over at once; a request that it serves ends the state."""
    wired = await wire(pods=5)
    full = wired.pods[2]
    full.refuses = {"retry-after": "0"}
    while await post(wired) != 429:
        pass
    assert wired.picker.scheduler.full.by_slot
    full.refuses = None
    got = len(full.received)
    for _ in range(REQUESTS):
        assert await post(wired) == 200
    assert wired.picker.scheduler.full.by_slot == {}
    assert len(full.received) - got >= REQUESTS // 5 - int(STEPS * STEP_S)
