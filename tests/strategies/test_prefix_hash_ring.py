"""smg's prefix_hash."""

import numpy as np

from epp.strategies.prefix_hash_ring import PrefixHashRing
from tests.builders import candidates, request
from tests.strategies.driven import Driven, text

PROMPT = text("head", 512)


def best(inflight, prompt=PROMPT):
    asked = request(prompts=(prompt.encode(),))
    some = candidates(inflight_requests=inflight, matched_blocks=[0] * len(inflight))
    asked.chains_of(256, 100)
    return np.flatnonzero(PrefixHashRing().score(asked, some) == 1.0).tolist()


def test_the_head_alone_decides():
    """256 tokens of 512."""
    [owner] = best([0] * 8)
    assert best([0] * 8, PROMPT[:1_024] + text("another tail", 256)) == [owner]
    assert {best([0] * 8, text(f"{at}", 512))[0] for at in range(40)} == set(range(8))


def test_an_owner_is_left_only_when_both_tests_fail_it():
    """(total + 1) / n is the mean: 1.25 times it, and ten above it, both strictly."""
    [owner] = best([0, 0])
    other = 1 - owner

    def load(at_owner, at_other):
        return best([at_owner, at_other] if owner == 0 else [at_other, at_owner])

    assert load(20, 0) == [owner], "the mean is 10.5: 9.5 above"
    assert load(21, 0) == [owner], "10 above"
    assert load(22, 0) == [other], "10.5 above"
    assert load(100, 79) == [owner], "the mean is 90: 10 above, 1.11 times"
    assert load(130, 80) == [owner], "24.5 above, 1.23 times"
    assert load(140, 80) == [other], "29.5 above, 1.27 times"


def test_of_those_with_room_the_fewest_requests():
    """Also where another is as full as the owner."""
    [owner] = best([0] * 4)
    inflight = [0] * 4
    inflight[owner] = 60
    full, idle, busy = (at for at in range(4) if at != owner)
    inflight[full], inflight[busy] = 60, 3
    assert best(inflight) == [idle]


def test_without_a_full_block_requests_decide():
    """There is no head to hash."""
    assert best([2, 1, 1], "short") == [1, 2]


def test_a_shared_preamble_has_one_owner_until_the_margin_is_used_up():
    """Then the rest spills: what cache-aware trees replicate, a ring only overflows."""
    pods = Driven("smg-prefix-hash", pods=4)
    preamble = text("system", 256)
    went = [pods.send(preamble + text(f"q{at}", 64)) for at in range(40)]
    owner = went[0]
    assert went.index(next(slot for slot in went if slot != owner)) == 14
    assert went.count(owner) > 20


def test_only_the_keys_of_an_owner_that_leaves_move():
    """The ring is made of endpoint identities, not of places in the list."""
    prompts = [text(f"topic{at}", 256) for at in range(60)]
    before, after = Driven("smg-prefix-hash", pods=4), Driven("smg-prefix-hash", pods=3)
    moved = [
        (was, now)
        for was, now in ((before.ask(prompt), after.ask(prompt)) for prompt in prompts)
        if was != now
    ]
    assert moved
    assert {was for was, _ in moved} == {3}
