"""The longer two prompts begin alike, the closer they are on the ring."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.knowledge.inflight import Outcome
from homing_rivals.early_blocks import EarlyBlocksHash
from tests.builders import candidates, endpoint, request
from tests.rivals.driven import scheduler_of
from tests.rivals.simulated import hit_rate, simulated
from tests.sim.made import arrivals

BLOCK_BYTES = 256


def asked(*blocks, request_id="one"):
    """A prompt of blocks that are told apart by number."""
    prompt = b"".join(f"{block:04}".encode() * 64 for block in blocks)
    made = request(request_id=request_id, prompts=(prompt,))
    made.chains_of(BLOCK_BYTES, 64)
    return made


@given(
    shared=st.integers(1, 20),
    tails=st.lists(st.lists(st.integers(1, 500), max_size=4), min_size=2, max_size=2),
    bits=st.integers(1, 3),
)
def test_two_prompts_are_as_close_as_what_they_share_is_long(shared, tails, bits):
    """Closer than 2^-(bits x shared blocks) of the ring."""
    plugin = EarlyBlocksHash(bits_per_block=bits)
    head = list(range(shared))
    places = [plugin.place(asked(*head, *(1_000 + at for at in tail))) for tail in tails]
    assert abs(places[0] - places[1]) < 2 ** (64 - bits * shared)
    assert all(0 <= place < 2**64 for place in places)


def test_equal_prompts_have_one_place_and_others_differ():
    """Even of one block; what has none is told apart by its id."""
    plugin = EarlyBlocksHash()
    assert plugin.place(asked(1)) == plugin.place(asked(1, request_id="two"))
    assert plugin.place(asked(1)) != plugin.place(asked(2))
    assert plugin.place(asked()) != plugin.place(asked(request_id="two"))
    long = list(range(80))
    assert plugin.place(asked(*long)) == plugin.place(asked(*long[:64])), "64 bits are full"


def test_the_first_bit_is_the_first_blocks():
    """By hand: the top bit of each chained hash, then the rest of the last one."""
    one = asked(1, 2, 3)
    hashes = np.frombuffer(one.chains[BLOCK_BYTES][0], dtype=np.uint64)
    place = EarlyBlocksHash().place(one)
    assert [place >> 63 - at & 1 for at in range(3)] == [int(h) >> 63 for h in hashes]
    assert place & 2**61 - 1 == (int(hashes[2]) << 1 & 2**64 - 1) >> 3


def test_places_are_spread_evenly():
    """A hash of the first block alone would be as even; weights must not bend it."""
    plugin = EarlyBlocksHash()
    places = [plugin.place(asked(number, number + 1)) for number in range(800)]
    eighths = Counter(place >> 61 for place in places)
    assert len(eighths) == 8
    assert max(eighths.values()) < 1.5 * 100


def test_a_hot_prefix_stays_together_whatever_the_load_unless_bounded():
    """The hot spot that the proposal warns of, and the bound that it asks for."""

    def used(name):
        scheduler = scheduler_of(name)
        scheduler.take(PoolReplaced([endpoint(number) for number in range(8)]), 0.0)
        leases = [
            scheduler.schedule(asked(*range(12), 100 + n, request_id=f"{n}"), 0.0).lease
            for n in range(80)
        ]
        counts = Counter(lease.slot for lease in leases)
        for lease in leases:
            scheduler.take(RequestEnded(lease, Outcome(status=200)), 0.0)
        return counts

    assert max(used("early-blocks-hash").values()) > 72, "but for who is beyond a point of the ring"
    bounded = used("early-blocks-hash-fixed")
    assert len(bounded) == 8
    assert max(bounded.values()) <= 1.25 * 80 / 8 + 1


def test_only_the_chosen_one_has_a_score():
    """1 there, 0 elsewhere, also for one candidate alone."""
    scores = EarlyBlocksHash().score(asked(1, 2), candidates(5))
    assert sorted(scores.tolist()) == [0, 0, 0, 0, 1]
    assert EarlyBlocksHash().score(asked(), candidates(1)).tolist() == [1]


def test_it_finds_more_in_caches_than_chance_does():
    """In the simulator, without a memory of what went where."""

    def hits(policy):
        return hit_rate(simulated(arrivals(200, rate=10.0, groups=12), policy))

    assert hits("early-blocks-hash") > 1.1 * hits("random-live")
