"""What simple placements hit, and that leaving some out changes nothing of the others."""

from itertools import product

import pytest

from sim.traces.hits import AFFINITY, PLACEMENTS, RANDOM, Hits
from tests.sim.made import arrival, arrivals

TOGETHER = (True, False)


def counted(given, **fields):
    hits = Hits(**({"pods": 3, "kv_tokens": 2_000, "seed": 1} | fields))
    for one in given:
        hits.add(one)
    return hits


@pytest.mark.parametrize(
    ("placements", "together"), list(product([PLACEMENTS, (RANDOM, AFFINITY), ()], TOGETHER))
)
def test_what_is_left_out_changes_nothing_of_the_rest(placements, together):
    """The same draws and the same caches, whoever else is counted."""
    given = list(arrivals(200))
    everything = counted(given)
    some = counted(given, placements=placements, together=together)
    assert some.one_cache_tokens == everything.one_cache_tokens > 0
    assert some.load == everything.load
    assert some.together_tokens == (everything.together_tokens if together else 0)
    assert list(some.placements) == list(placements)
    for name in placements:
        ours, theirs = some.placements[name], everything.placements[name]
        assert ours.hit_tokens == theirs.hit_tokens > 0
        assert ours.lru_hit_tokens == theirs.lru_hit_tokens > 0


def test_one_prompt_twice_is_hit_in_whole_blocks():
    """By one cache in any case; by pods only where both went to the same."""
    twice = [arrival(at, prompt_tokens=130, blocks=(1, 2), block_tokens=64) for at in range(2)]
    hits = counted(twice)
    assert hits.one_cache_tokens == hits.together_tokens == 128
    assert hits.placements[AFFINITY].hit_tokens == 128
    assert hits.placements["round_robin"].hit_tokens == 0
