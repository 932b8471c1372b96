"""Rings keyed by headers: whose value counts, and what is done without any."""

import pytest

from epp.core.decision.inputs import PoolReplaced
from epp.strategies.keyed_ring import KeyedRing
from tests.builders import candidates, endpoint, request
from tests.strategies.driven import scheduler_of

POOL = candidates(16)


def home(headers, *, session="", **parameters):
    plugin = KeyedRing(headers=("x-first", "x-second"), **parameters)
    return plugin.score(request(headers=headers, session_id=session), POOL).tolist()


def test_the_first_header_that_is_sent_is_the_key():
    """Then the session, then the next header, spelt as configured in any case."""
    first = home({"x-first": "a"})
    assert sum(first) == 1
    assert home({"x-first": "a", "x-second": "b"}, session="s") == first
    assert home({"x-second": "b"}, session="a") == first
    assert home({"x-second": "a"}) == first
    assert home({"x-first": "another"}) != first
    shouted = KeyedRing(headers=("X-First",)).score(request(headers={"x-first": "a"}), POOL)
    assert shouted.tolist() == first


@pytest.mark.parametrize(
    ("name", "endpoints"), [("smg-consistent-hashing", 2), ("vllm-router-consistent-hash", 1)]
)
def test_requests_without_a_key(name, endpoints):
    """Observed of vllm-router: 18 different bodies, no key, all to one of two workers."""
    scheduler = scheduler_of(name)
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1)]), 0.0)
    went = {
        scheduler.schedule(request(request_id=f"{n}", prompts=(b"%d" % n,)), 0.0).endpoint.name
        for n in range(18)
    }
    assert len(went) == endpoints


@pytest.mark.parametrize("name", ["smg-consistent-hashing", "vllm-router-consistent-hash"])
def test_a_key_is_locked_onto_its_endpoint(name):
    """However much is in flight there; keys themselves are spread."""
    scheduler = scheduler_of(name)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)

    def went(session):
        return scheduler.schedule(request(session_id=session), 0.0).endpoint.name

    assert len({went("hot") for _ in range(50)}) == 1
    assert len({went(f"{number}") for number in range(60)}) == 4
