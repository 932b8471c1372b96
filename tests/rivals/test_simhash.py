"""SimHash on a ring, as proposed and as meant."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from homing_rivals.simhash import Locality, SimHashRing, simhash
from tests.builders import candidates, request
from tests.rivals.driven import Driven, text
from tests.sim.made import arrivals, ran

WORDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9)


def owner(plugin, prompt, inflight=(0,) * 8):
    some = candidates(inflight_requests=list(inflight), matched_blocks=[0] * len(inflight))
    scores = plugin.score(request(prompts=(prompt.encode(),)), some)
    return np.flatnonzero(scores == 1.0).tolist()


@given(words=WORDS)
def test_each_bit_is_the_majority_of_the_features(words):
    """Ties are 0; of one feature it is that one."""
    expected = sum(
        1 << bit for bit in range(64) if 2 * sum(word >> bit & 1 for word in words) > len(words)
    )
    assert simhash(np.array(words, dtype=np.uint64)) == expected
    assert simhash(np.array(words[:1], dtype=np.uint64)) == words[0]


def near_duplicates(number):
    """Two prompts of 512 bytes that differ in 60 of them."""
    words = ("please", "compare", "what", "these", "reports", "say", "about", "rainfall") * 8
    prompt = " ".join(f"{word}{at * number % 97}" for at, word in enumerate(words))[:512]
    return prompt, prompt[:200] + text(f"else{number}", 15) + prompt[260:]


def test_near_duplicates_part_when_the_simhash_is_hashed_again():
    """Then they meet by chance, 1 pair in 8; by the first 6 bits three times as often."""
    pairs = [near_duplicates(number) for number in range(200)]
    met = {}
    for locality in Locality:
        ring = SimHashRing(locality=locality)
        met[locality] = sum(owner(ring, one) == owner(ring, other) for one, other in pairs)
    assert met[Locality.HASHED] < 40
    assert met[Locality.BAND] > 75


def test_what_is_equal_in_its_first_512_bytes_meets():
    """Whatever follows."""
    head = text("head", 128)
    for locality in Locality:
        ring = SimHashRing(locality=locality)
        assert owner(ring, head + text("a", 500)) == owner(ring, head + text("b", 500))
        owners = {owner(ring, text(f"{at}", 128))[0] for at in range(200)}
        assert len(owners) == 8, "different prompts have different owners"


def test_a_load_factor_drops_who_is_too_busy():
    """One of ten; who is left share what it owned."""
    inflight = [0] * 9 + [5]
    bounded = SimHashRing(load_factor=1.25)
    assert 9 not in {owner(bounded, text(f"{at}", 128), inflight)[0] for at in range(40)}


def test_a_shared_beginning_has_one_owner_unless_the_ring_is_bounded():
    """512 bytes are less than most system prompts."""
    preamble = text("system", 128)
    for name, endpoints in (("production-stack-simhash", 1), ("production-stack-simhash-fixed", 4)):
        pods = Driven(name, pods=4)
        went = [pods.send(preamble + text(f"{at}", 128)) for at in range(40)]
        assert len(set(went)) == endpoints, name
        assert max(map(went.count, set(went))) <= (40 if endpoints == 1 else 13)


def test_short_and_empty_prompts():
    """Less than a shingle is one; nothing at all goes by requests in flight."""
    assert len(owner(SimHashRing(), "ab")) == 1
    assert owner(SimHashRing(), "", inflight=[2, 1, 1]) == [1, 2]


def test_a_trace_without_text_goes_by_its_blocks():
    """The chain's first two hashes of 64 tokens: a group stays together, groups spread."""
    for name in ("production-stack-simhash", "production-stack-simhash-fixed"):
        given = list(arrivals(200, rate=5.0, groups=12, blocks=(4, 8)))
        requests, _ = ran(given, policy=name)
        homes = {}
        for one in requests:
            homes.setdefault(one.arrival.session, set()).add(one.pod)
        assert len(set.union(*homes.values())) > 1, name
        if name == "production-stack-simhash":
            assert all(len(slots) == 1 for slots in homes.values())
