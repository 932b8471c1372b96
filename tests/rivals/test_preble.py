"""Exploit, explore and rebalance, by hand and driven."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.duration import Duration
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Outcome
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.knowledge.prefix import PrefixIndexSettings
from homing_rivals.preble import ExploreExploit, PrebleHistorySettings
from tests.builders import affinity, candidates, endpoint, request
from tests.rivals.driven import scheduler_of

BLOCK = 256
A_SECOND = PREFILL_TOKENS_PER_S
"""Tokens of one second of prefill."""


def best(plugin=None, *, matched, tokens=640, inflight=None, **history):
    n = len(matched)
    names = ("missed_tokens", "hit_tokens", "requests", "pushed_out_tokens")
    columns = {name: np.array(history.get(name, [0.0] * n), dtype=np.float64) for name in names}
    known = Affinity(np.array(matched, dtype=np.int64), tokens // 64, columns)
    some = candidates(
        inflight_requests=inflight or [0] * n,
        affinities={
            "preble-history-producer": known,
            "approx-prefix-cache-producer": affinity(matched, tokens // 64),
        },
        prompt_tokens=tokens,
    )
    scores = (plugin or ExploreExploit()).score(request(), some)
    return [at for at, score in enumerate(scores) if score == 1.0]


def test_a_prefix_is_exploited_if_it_is_longer_than_what_is_new():
    """Strictly: 5 of 10 blocks are explored, and go where there is less load."""
    assert best(matched=[6, 0], missed_tokens=[100 * A_SECOND, 99 * A_SECOND]) == [0]
    assert best(matched=[5, 0], missed_tokens=[100 * A_SECOND, 99 * A_SECOND]) == [1]


def test_of_those_who_hold_the_most_the_least_loaded():
    """6.75 s for each request in flight: 45 tokens of 0.15 s."""
    assert best(matched=[9, 9, 8], missed_tokens=[7 * A_SECOND, 0, 0], inflight=[0, 1, 0]) == [1]
    assert best(matched=[9, 9, 8], missed_tokens=[6 * A_SECOND, 0, 0], inflight=[0, 1, 0]) == [0]


def test_exploring_adds_what_is_missing_and_what_is_pushed_out():
    """One second of load against a prompt of two, of which 0.6 s are there; then half of 1 s is lost."""
    tokens = int(2 * A_SECOND) // 64 * 64
    held = tokens // 64 * 3 // 10
    load = {"missed_tokens": [0.5 * A_SECOND, 0.0]}
    assert best(matched=[held, 0], tokens=tokens, **load) == [0]
    load |= {"hit_tokens": [0.5 * A_SECOND, 0.0], "pushed_out_tokens": [A_SECOND, A_SECOND]}
    assert best(matched=[held, 0], tokens=tokens, **load) == [1]


@pytest.mark.parametrize(
    ("load", "requests", "expected"),
    [(1.5, 50, [0]), (1.6, 50, [1]), (1.6, 49, [0]), (1.5001, 51, [1])],
)
def test_a_holder_with_half_as_much_again_gives_way(load, requests, expected):
    """Strictly more than 1.5 of the least, once there were 50 requests each."""
    assert (
        best(
            matched=[9, 0],
            missed_tokens=[load * A_SECOND, A_SECOND],
            requests=[2 * requests, 0],
        )
        == expected
    )


def said(*letters):
    return request(prompts=(b"".join(letter.encode() * BLOCK for letter in letters),))


def columns(index, *letters, slots=2, now=0.0):
    known = index.match(said(*letters), slots, now)
    return {name: column.tolist() for name, column in known.columns.items()}


def test_history_is_of_the_window():
    """Three minutes; what is taken back never was."""
    index = PrebleHistorySettings().open()
    index.record(said("a", "b"), 0, 0.0)
    index.record(said("a", "b", "c"), 0, 100.0)
    moved = said("x")
    index.retract(moved, 0, index.record(moved, 0, 100.0), 101.0)
    assert columns(index, "a") == {
        "missed_tokens": [192.0, 0.0],
        "hit_tokens": [128.0, 0.0],
        "requests": [2.0, 0.0],
        "pushed_out_tokens": [0.0, 0.0],
    }
    index.expire(181.0)
    assert columns(index, "a")["missed_tokens"] == [64.0, 0.0]
    index.expire(281.0)
    assert columns(index, "a")["requests"] == [0.0, 0.0]


def test_what_a_prompt_pushes_out_is_what_does_not_fit():
    """A cache of three blocks, two of them taken."""
    index = PrebleHistorySettings(lru_capacity_per_server=3).open()
    index.record(said("a", "b"), 0, 0.0)
    assert columns(index, "a", "x", "y")["pushed_out_tokens"] == [64.0, 0.0]


def test_a_restart_forgets_history_and_what_comes_too_late():
    """A request of before does not lessen what came after."""
    index = PrebleHistorySettings().open()
    old = said("a")
    recorded = index.record(old, 0, 0.0)
    index.forget(0)
    index.record(said("b", "c"), 0, 1.0)
    index.retract(old, 0, recorded, 2.0)
    assert columns(index, "a")["missed_tokens"] == [128.0, 0.0]


def test_settings_are_adopted_unless_blocks_change():
    """And a window has a length."""
    index = PrebleHistorySettings().open()
    assert PrebleHistorySettings(window=Duration(1.0)).adopt(index)
    index.record(said("a"), 0, 0.0)
    index.expire(2.0)
    assert columns(index, "x")["requests"] == [0.0, 0.0]
    assert not PrebleHistorySettings(block_size_tokens=128).adopt(index)
    assert not PrebleHistorySettings().adopt(PrefixIndexSettings().open())
    with pytest.raises(ValueError, match="window"):
        PrebleHistorySettings(window=Duration(0.0))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "retract", "forget", "expire"]),
            st.integers(0, 1),
            st.lists(st.sampled_from("ab"), max_size=3),
            st.sampled_from([0.0, 50.0, 200.0]),
        ),
        max_size=25,
    )
)
def test_sums_are_never_below_nothing_and_end_at_nothing(actions):
    """Whatever comes and goes."""
    index = PrebleHistorySettings().open()
    now = 0.0
    for verb, slot, letters, passed in actions:
        now += passed
        asked = said(*letters)
        recorded = index.record(asked, slot, now)
        if verb == "retract":
            index.retract(asked, slot, recorded, now)
        elif verb == "forget":
            index.forget(slot)
        elif verb == "expire":
            index.expire(now)
        assert all(min(column) >= 0 for column in columns(index, "a", now=now).values())
    index.expire(now + 181.0)
    assert all(not any(column) for column in columns(index, "c", now=now + 181.0).values())


def spread(plugin_of):
    """Where 400 requests for one long document go, each with a question of its own."""
    scheduler = scheduler_of("preble")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    random = Random(2)
    went = Counter()
    document = b"d" * 40 * BLOCK
    for at in range(400):
        text = document + random.randbytes(plugin_of * BLOCK)
        asked = request(prompts=(text,), prompt_tokens=len(text) // 4)
        decision = scheduler.schedule(asked, at * 0.1)
        went[decision.endpoint.name] += 1
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), at * 0.1 + 0.05)
    return went


def test_a_hot_document_is_replicated_and_not_pinned():
    """Exploited by one while there are few requests, by all four once it is overloaded."""
    went = spread(plugin_of=8)
    assert len(went) == 4
    first = went.most_common(1)[0][1]
    assert 200 <= first <= 280, "50 each are 200 in all; from then on the loads come together"
