"""Stay in time, else go by work."""

import pytest

from epp.core.decision.inputs import PoolReplaced
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from homing_rivals.smetric import StayInTime
from tests.builders import candidates, endpoint, request
from tests.rivals.driven import scheduler_of

V = PREFILL_TOKENS_PER_S


def best(plugin=None, *, matched, blocks=100, **columns):
    some = candidates(
        matched_blocks=matched, total_blocks=blocks, prompt_tokens=64 * blocks, **columns
    )
    scores = (plugin or StayInTime()).score(request(), some)
    return [at for at, score in enumerate(scores) if score == 1.0]


def limit_tokens(blocks=100):
    """2 x (0.5 s + the cold prompt), in tokens waiting that leave no time for more."""
    prompt = 64 * blocks
    cold = prompt * (1 + (prompt / 2) / 32_768)
    return 2 * (0.5 * V + cold)


def own_tokens(hit_blocks, blocks=100):
    prompt, new = 64 * blocks, 64 * (blocks - hit_blocks)
    return new * (1 + (prompt - new / 2) / 32_768)


def test_who_holds_most_keeps_it_while_it_fits():
    """Up to the limit, and not beyond it."""
    fits = limit_tokens() - own_tokens(90)
    for ahead, expected in ((fits - 1, [0]), (fits + 1, [1])):
        assert best(matched=[90, 0], inflight_prefill_tokens=[ahead, 0.0]) == expected


def test_where_nobody_fits_it_stays():
    """A move would be late too, and lose the prefix."""
    late = limit_tokens()
    assert best(matched=[90, 0], inflight_prefill_tokens=[late, late]) == [0]


@pytest.mark.parametrize(("hit", "expected"), [(50, [1]), (51, [0])])
def test_a_hit_counts_from_more_than_half_of_the_prompt(hit, expected):
    """Below it is a first turn, which goes by work times requests."""
    assert best(matched=[hit, 0], inflight_requests=[30, 0]) == expected


def test_what_runs_there_counts_where_decoding_is_done_there():
    """Without it the least work alone."""
    some = {"matched": [0, 0], "inflight_requests": [3, 0], "inflight_prefill_tokens": [0, 6_400]}
    assert best(**some) == [1]
    assert best(StayInTime(colocated=False), **some) == [0]


def test_attention_makes_the_end_of_a_long_prompt_dear():
    """The same 100 blocks to compute, 100 tokens ahead of one: behind 1,900 held ones it is dearer."""
    plugin = StayInTime(attention_tokens=1_000.0, hit_ratio=1.0, colocated=False)
    work = plugin._cost(6_400.0, 6_400.0), plugin._cost(6_400.0, 128_000.0)
    assert work[0] == 6_400 * (1 + 3_200 / 1_000)
    assert work[1] == 6_400 * (1 + 124_800 / 1_000)


def test_conversations_stay_and_begin_apart():
    """Eight of them at four endpoints, each turn where the last one was."""
    scheduler = scheduler_of("smetric")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    homes = {}
    for turn in range(1, 6):
        for conversation in range(8):
            text = b"%d" % conversation * 4_096 * turn
            asked = request(prompts=(text,), prompt_tokens=len(text) // 4)
            where = scheduler.schedule(asked, 10.0 * turn).endpoint.name
            assert homes.setdefault(conversation, where) == where or turn == 2
            homes[conversation] = where
    assert len(set(homes.values())) == 4
