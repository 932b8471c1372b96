"""Two candidates a prefix, and the better of the two."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from epp.core.decision.inputs import PoolReplaced
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from homing_rivals.dualmap import TwoHashes
from tests.builders import affinity, candidates, endpoint, request
from tests.rivals.driven import scheduler_of

BLOCK = 256


def prompt(number):
    asked = request(prompts=(Random(number).randbytes(8 * BLOCK),), prompt_tokens=512)
    asked.chains_of(BLOCK, 2_048)
    return asked


def scored(asked, n=8, *, matched=None, **columns):
    some = candidates(
        n,
        affinities={
            "prefix-popularity-producer": affinity([4] * n, 8),
            "approx-prefix-cache-producer": affinity(matched or [0] * n, 8),
        },
        prompt_tokens=512,
        **columns,
    )
    return TwoHashes().score(asked, some)


def pair_of(asked, n=8):
    return sorted(np.flatnonzero(scored(asked, n)).tolist())


@pytest.mark.parametrize("number", range(20))
def test_a_prefix_has_two_endpoints_and_prefers_who_holds_more(number):
    """Different ones; all others score nothing."""
    asked = prompt(number)
    one, other = pair_of(asked)
    for holder in (one, other):
        matched = [0] * 8
        matched[holder] = 1
        scores = scored(asked, matched=matched)
        assert scores[holder] == 1.0
        assert sorted(scores)[:-2] == [0.0] * 6


def test_an_endpoint_that_comes_takes_a_place_and_moves_nobody_else():
    """Of two candidates at most one is new: what a ring promises."""
    moved = 0
    for number in range(200):
        before, after = pair_of(prompt(number), 8), pair_of(prompt(number), 9)
        assert len(set(before) - set(after)) <= 1
        assert set(after) - set(before) <= {8}
        moved += before != after
    assert 20 < moved < 80, "two of nine, roughly"


def test_the_holder_gives_way_when_its_first_token_would_be_late():
    """5 s of prefill ahead, its own included; beyond, who has less waiting."""
    asked = prompt(1)
    one, other = pair_of(asked)
    matched, ahead = [0] * 8, [0.0] * 8
    matched[one] = 8
    ahead[one] = 5 * PREFILL_TOKENS_PER_S
    assert scored(asked, matched=matched, inflight_prefill_tokens=ahead)[one] == 1.0
    ahead[one] += 1
    assert scored(asked, matched=matched, inflight_prefill_tokens=ahead)[other] == 1.0
    ahead[other] = ahead[one] + 1
    assert scored(asked, matched=matched, inflight_prefill_tokens=ahead)[one] == 1.0


def test_alone_or_without_a_block_there_is_no_choice_of_two():
    """The one there is; else the least loaded."""
    assert scored(prompt(1), 1).tolist() == [1.0]
    short = request(prompts=(b"short",), prompt_tokens=2)
    short.chains_of(BLOCK, 2_048)
    ahead = [100.0, 0.0]
    assert scored(short, 2, inflight_prefill_tokens=ahead).tolist() == [0.0, 1.0]


def test_two_choices_spread_cold_prefixes_better_than_one():
    """What the paper takes from the power of two choices: loads of 800 prefixes on eight."""
    scheduler = scheduler_of("dualmap")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(8)]), 0.0)
    went, hashed = Counter(), Counter()
    for number in range(800):
        decision = scheduler.schedule(prompt(number), 0.0)
        went[decision.lease.slot] += 1
        key = prompt(number).block_hash(BLOCK, 4)
        hashed[int(candidates(8).rendezvous(key).argmax())] += 1
    assert (
        max(went.values()) - min(went.values()) < (max(hashed.values()) - min(hashed.values())) / 3
    )


def test_a_preamble_that_all_share_does_not_send_all_to_two():
    """The prefix grows until it tells requests apart; at first it is the head, and two share the work.

    An endpoint that has nothing of the preamble is found where both have nothing, or one is late.
    """
    scheduler = scheduler_of("dualmap")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(8)]), 0.0)
    preamble = b"s" * 16 * BLOCK
    went = []
    for number in range(400):
        text = preamble + Random(number).randbytes(16 * BLOCK)
        asked = request(prompts=(text,), prompt_tokens=len(text) // 4)
        went.append(scheduler.schedule(asked, float(number)).lease.slot)
    assert len(set(went[:64])) <= 2
    assert len(set(went[200:])) >= 6
