"""Ranks behind one address, each with a cache of its own: what the index makes of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.knowledge.exact_parameters import ROW_BYTES
from epp.core.knowledge.index import EXACT, HOST_BLOCKS, RANKS_MAX
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import Cleared, Removed
from epp.core.kv_events.stream import StreamState
from tests.core.knowledge.test_exact import LIVE, REPLAYING, STALE, TOKENS, asked, held, opened, run

NONE, CONNECTING = StreamState.NONE, StreamState.CONNECTING


def ranked(ranks=3, block_tokens=64, **fields):
    """Slot 1 has so many ranks, all of which told all; slots 0 and 2 have one."""
    index = opened(block_tokens, **fields)
    for rank in range(ranks):
        index.set_stream(1, LIVE, complete=True, rank=rank)
    return index


def by_rank(index, tokens, slot=1, now=0.0):
    return list(index.held_by_ranks(asked(tokens), slot, now))


def exact(index):
    return index.match(asked(TOKENS[:300]), 3, 0.0).columns[EXACT].tolist()


def test_an_endpoint_holds_what_the_best_of_its_ranks_holds():
    """Never the head of one and the rest of another."""
    index = ranked()
    index.hear(1, [run(TOKENS[:128])], 0.0, rank=0)
    index.hear(1, [run(TOKENS[:256])], 0.0, rank=2)
    index.hear(0, [run(TOKENS[:192])], 0.0)
    assert held(index, asked(TOKENS[:512])) == [3, 4, 0]
    assert by_rank(index, TOKENS[:512]) == [2, 0, 4]
    assert by_rank(index, TOKENS[:512], slot=0) == [3]
    assert by_rank(index, TOKENS[:512], slot=9) == [0]
    assert [index.ranks_at(slot) for slot in (0, 1, 2, 9)] == [1, 3, 1, 1]
    index.hear(1, [Removed([102, 103])], 0.0, rank=2)
    assert held(index, asked(TOKENS[:512])) == [3, 2, 0]
    # The same blocks of the engine, by their names, in another rank.
    assert by_rank(index, TOKENS[:512]) == [2, 0, 2]


def test_several_prompts_are_served_at_one_rank():
    """What another holds of another prompt is not found there."""
    index = ranked()
    index.hear(1, [run(TOKENS[:256])], 0.0, rank=0)
    index.hear(1, [run(TOKENS[512:640], first=900)], 0.0, rank=2)
    both = asked(TOKENS[:300], TOKENS[512:800])
    assert list(index.held_by_ranks(both, 1, 0.0)) == [4, 0, 2]
    assert held(index, both) == [0, 4, 0]
    index.record(both, 1, 0.0)
    assert held(index, both) == [0, 8, 0]


def test_all_is_known_once_each_rank_told_all():
    """One that is connecting, stale or late in coming leaves decisions to answer beside it."""
    index = ranked()
    assert exact(index) == [1.0, 1.0, 1.0]
    for state, complete in ((CONNECTING, True), (STALE, True), (LIVE, False)):
        index.set_stream(1, state, complete=complete, rank=2)
        assert exact(index) == [1.0, 0.0, 1.0]
        index.set_stream(1, REPLAYING, complete=True, rank=2)
        assert exact(index) == [1.0, 1.0, 1.0]
    index.set_stream(1, CONNECTING, complete=False, rank=3)
    assert exact(index) == [1.0, 0.0, 1.0]


def test_a_stream_that_goes_stale_is_that_of_its_rank():
    index = ranked()
    for rank, tokens in enumerate((128, 256, 64)):
        index.hear(1, [run(TOKENS[:tokens])], 0.0, rank=rank)
    index.set_stream(1, STALE, complete=True, rank=1)
    assert by_rank(index, TOKENS[:512]) == [2, 0, 1]
    assert held(index, asked(TOKENS[:512])) == [0, 2, 0]
    index.silence(1, rank=1)
    index.set_stream(1, LIVE, complete=True, rank=1)
    assert by_rank(index, TOKENS[:512]) == [2, 0, 1]


def test_a_rank_that_clears_its_cache_clears_no_other():
    """What was decided goes for all: nobody knows at which it was."""
    index = ranked()
    for rank in range(2):
        index.hear(1, [run(TOKENS[:128])], 0.0, rank=rank)
    index.record(asked(TOKENS[512:800]), 1, 0.0)
    index.hear(1, [Cleared()], 0.0, rank=0)
    assert by_rank(index, TOKENS[:300]) == [0, 2, 0]
    assert held(index, asked(TOKENS[512:800])) == [0, 0, 0]
    index.clear(1)
    assert by_rank(index, TOKENS[:300]) == [0, 0, 0]


def test_ranks_that_are_gone_are_forgotten():
    """In whatever order; those that stay keep what they told."""
    index = ranked(4)
    for rank in range(4):
        index.hear(1, [run(TOKENS[:128])], 0.0, rank=rank)
    for rank in (2, 3):
        index.silence(1, rank=rank)
        index.set_stream(1, NONE, complete=False, rank=rank)
    assert index.ranks_at(1) == 2
    assert by_rank(index, TOKENS[:300]) == [2, 2]
    assert exact(index) == [1.0, 1.0, 1.0]
    index.forget(1)
    assert by_rank(index, TOKENS[:300]) == [0, 0]
    assert index.entries == 0


@pytest.mark.parametrize("rank", [-1, RANKS_MAX, 10**9])
def test_ranks_are_bounded(rank):
    """None is made for one that is not heard."""
    index = ranked()
    with pytest.raises(ValueError, match="it must be at least 0 and below 64"):
        index.hear(1, [run(TOKENS[:64])], 0.0, rank=rank)
    with pytest.raises(ValueError, match="rank is"):
        index.set_stream(1, LIVE, complete=True, rank=rank)
    assert index.ranks_at(1) == 3


def test_ranks_share_the_memory():
    """Whoever holds most gives up its tails; the endpoint does not know all then."""
    index = ranked(2, 16, memory_max_bytes=2 * ROW_BYTES * 48)
    index.hear(1, [run(TOKENS[:640], 16)], 0.0, rank=0)
    index.hear(1, [run(TOKENS[:160], 16)], 0.0, rank=1)
    index.hear(0, [run(TOKENS[:128], 16)], 0.0)
    assert index.bytes_estimated <= 2 * ROW_BYTES * 48
    assert by_rank(index, TOKENS)[1] == 10
    assert held(index, asked(TOKENS))[0] == 8
    assert exact(index)[:2] == [1.0, 0.0]


def test_the_blocks_of_an_engine_are_those_of_all_its_ranks():
    """A page says how many there are together; more than these do not balance."""
    index = ranked(2)
    index.resize(1, 9, 64)
    for rank in range(2):
        assert not index.hear(1, [run(TOKENS[:256])], 0.0, rank=rank).unbalanced
    assert index.hear(1, [run(TOKENS[512:576], first=900)], 0.0, rank=1).unbalanced
    assert by_rank(index, TOKENS[:300]) == [4, 0]


def test_the_memory_of_the_host_is_that_of_the_best_rank():
    index = ranked()
    for rank, tokens in ((0, 64), (1, 192)):
        index.hear(1, [run(TOKENS[:tokens], tier="cpu")], 0.0, rank=rank)
    known = index.match(asked(TOKENS[:300]), 3, 0.0)
    assert known.columns[HOST_BLOCKS].tolist() == [0.0, 3.0, 0.0]


def test_what_was_decided_is_told_by_any_rank():
    index = ranked()
    index.hear(1, [run(TOKENS[512:576], first=900)], 0.0, rank=0)
    index.record(asked(TOKENS[:300]), 1, 10.0)
    index.hear(1, [run(TOKENS[:256])], 11.0, rank=2)
    index.expire(12.0)
    index.expire(45.0)
    assert index.match(asked(TOKENS[:300]), 3, 45.0).columns[EXACT].tolist() == [1.0, 1.0, 1.0]


def test_what_was_decided_for_a_rank_is_believed_of_that_rank():
    """For as long as of its endpoint; where the engine chose nobody knows of which."""
    index = ranked()
    index.hear(1, [run(TOKENS[:128])], 10.0, rank=0)
    index.record(asked(TOKENS[:300]), 1, 10.0, rank=2)
    index.record(asked(TOKENS[512:800]), 1, 10.0)
    assert by_rank(index, TOKENS[:600], now=10.0) == [2, 0, 4]
    assert by_rank(index, TOKENS[512:800], now=10.0) == [0, 0, 0]
    assert held(index, asked(TOKENS[:600]), 10.0) == [0, 4, 0]
    # The last token is computed, whoever holds all.
    assert by_rank(index, TOKENS[:256], now=10.0) == [2, 0, 3]
    assert by_rank(index, TOKENS[:600], now=12.5) == [2, 0, 0]
    index.hear(1, [run(TOKENS[:256], first=900)], 12.5, rank=2)
    assert by_rank(index, TOKENS[:600], now=12.5) == [2, 0, 4]


@pytest.mark.parametrize("rank", [0, 3, 64, 10**9])
def test_what_was_decided_for_a_rank_that_is_not_there_is_believed_of_the_endpoint(rank):
    """Whoever serves in the place of another is told the same rank."""
    index = opened()
    undone = index.record(asked(TOKENS[:300]), 1, 0.0, rank=rank)
    assert held(index, asked(TOKENS[:300])) == [0, 4, 0]
    assert by_rank(index, TOKENS[:300]) == [0]
    index.retract(asked(TOKENS[:300]), 1, undone, 0.0)
    assert held(index, asked(TOKENS[:300])) == [0, 4, 0], "its chains went with another request"
    given_prompt = asked(TOKENS[512:800])
    undone = index.record(given_prompt, 1, 0.0, rank=rank)
    index.retract(given_prompt, 1, undone, 0.0)
    assert held(index, given_prompt) == [0, 0, 0]


def test_what_was_not_sent_to_a_rank_after_all_is_not_believed_of_it():
    index = ranked()
    first, second = asked(TOKENS[:300]), asked(TOKENS[:300])
    undone = index.record(first, 1, 0.0, rank=2)
    index.record(second, 1, 0.0, rank=1)
    index.retract(first, 1, undone, 0.0)
    assert by_rank(index, TOKENS[:300]) == [0, 4, 0]
    assert held(index, asked(TOKENS[:300])) == [0, 4, 0]


def test_what_was_decided_for_a_rank_goes_with_what_was_decided():
    """When a cache is cleared, the endpoint or the rank goes, or nothing is to be believed of decisions."""
    index = ranked()
    for forget in (
        lambda: index.forget(1),
        lambda: index.clear(1, rank=0),
        lambda: index.hear(1, [Cleared()], 0.0, rank=2),
    ):
        index.record(asked(TOKENS[:300]), 1, 0.0, rank=2)
        assert by_rank(index, TOKENS[:300]) == [0, 0, 4]
        forget()
        assert by_rank(index, TOKENS[:300]) == [0, 0, 0]
    index.record(asked(TOKENS[:300]), 1, 0.0, rank=2)
    index.silence(1, rank=2)
    assert by_rank(index, TOKENS[:300]) == [0, 0, 4]
    index.set_stream(1, NONE, complete=False, rank=2)
    index.set_stream(1, LIVE, complete=True, rank=2)
    assert by_rank(index, TOKENS[:300]) == [0, 0, 0]
    index = ranked(speculative_indexing=False)
    index.record(asked(TOKENS[:300]), 1, 0.0, rank=2)
    assert by_rank(index, TOKENS[:300]) == [0, 0, 0]


def test_whoever_tells_late_is_believed_to_hold_what_was_decided_for_a_rank_as_long():
    index = ranked()
    index.record(asked(TOKENS[:300]), 1, 0.0, rank=2)
    for now in range(1, 6):
        index.match(asked(TOKENS[512:800]), 3, float(now))
        assert by_rank(index, TOKENS[:300], now=float(now)) == [0, 0, 4]


def test_what_is_held_is_told_of_the_best_rank():
    """Where all of them tell all."""
    index = ranked(2)
    index.hear(1, [run(TOKENS[:256])], 0.0, rank=0)
    index.hear(1, [run(TOKENS[:128])], 0.0, rank=1)
    asks = asked(TOKENS[:256])
    index.match(asks, 3, 0.0)
    assert index.held(asks, 1).blocks == 4
    index.set_stream(1, STALE, complete=True, rank=1)
    assert index.held(asks, 1) is None


def test_what_came_of_events_makes_the_same_index():
    index, again = ranked(), ranked()
    for rank, events in ((0, [run(TOKENS[:512])]), (2, [run(TOKENS[:256])]), (0, [Cleared()])):
        heard = index.hear(1, events, 0.0, rank=rank)
        if heard.cleared:
            again.clear(1, rank=rank)
        again.change(1, heard.changes, rank=rank)
        assert by_rank(again, TOKENS[:512]) == by_rank(index, TOKENS[:512])
    assert again.entries == index.entries
    with pytest.raises(ValueError, match="rank is 64"):
        again.change(1, [Changed(True, "gpu", [1])], rank=64)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 3), st.integers(1, 8)),
        st.tuples(st.just("silence"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("state"), st.integers(0, 3), st.sampled_from([LIVE, STALE, NONE])),
        st.tuples(st.just("forget"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_ranks_are_as_endpoints_would_be(steps):
    """Told the same, each rank holds what an endpoint of its own would, and the endpoint the most."""
    ranks, apart = opened(live=()), opened(live=())
    for number, (what, rank, detail) in enumerate(steps):
        if what == "store":
            event = [run(TOKENS[: 64 * detail], first=1_000 * number)]
            ranks.hear(0, event, 0.0, rank=rank)
            apart.hear(rank, event, 0.0)
        elif what == "silence":
            ranks.silence(0, rank=rank)
            apart.silence(rank)
        elif what == "state":
            if detail is NONE:
                ranks.silence(0, rank=rank)
                apart.silence(rank)
            ranks.set_stream(0, detail, complete=True, rank=rank)
            apart.set_stream(rank, detail, complete=True)
        else:
            ranks.forget(0)
            for slot in range(4):
                apart.forget(slot)
        given_prompt = asked(TOKENS[:600])
        expected = apart.match(given_prompt, 4, 0.0).matched.tolist()
        found = list(ranks.held_by_ranks(given_prompt, 0, 0.0))
        assert found == expected[: len(found)]
        assert not any(expected[len(found) :])
        assert ranks.match(given_prompt, 1, 0.0).matched.tolist() == [max(expected)]


PROMPTS = TOKENS[:600], TOKENS[:200] + TOKENS[700:1_100]
WHOLE = tuple(map(asked, PROMPTS))
DECISIONS = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.integers(0, 3), st.integers(1, 8)),
        st.tuples(st.just("retract"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("store"), st.integers(0, 3), st.integers(1, 8)),
        st.tuples(st.just("silence"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("forget"), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 3), st.just(0)),
    ),
    max_size=20,
)


@settings(max_examples=200, deadline=None)
@given(DECISIONS)
def test_what_was_decided_for_ranks_is_believed_as_of_endpoints(steps):
    """Of two prompts with a common head; the endpoint is believed to hold no less than the best of them.

    None told all: what is awaited of an engine that did is awaited of all its ranks together.
    """
    ranks, apart = opened(live=()), opened(live=())
    for rank in range(4):
        ranks.set_stream(0, LIVE, complete=False, rank=rank)
        apart.set_stream(rank, LIVE, complete=False)
    undone, now = [], 0.0
    for number, (what, which, blocks) in enumerate(steps):
        if what == "record":
            given_prompt = asked(PROMPTS[number % 2][: 64 * blocks])
            first = ranks.record(given_prompt, 0, now, rank=which)
            undone.append((given_prompt, which, first, apart.record(given_prompt, which, now)))
        elif what == "retract":
            if which < len(undone):
                given_prompt, rank, first, second = undone.pop(which)
                ranks.retract(given_prompt, 0, first, now)
                apart.retract(given_prompt, rank, second, now)
        elif what == "store":
            event = [run(PROMPTS[number % 2][: 64 * blocks], first=1_000 * number)]
            ranks.hear(0, event, now, rank=which)
            apart.hear(which, event, now)
        elif what == "silence":
            ranks.silence(0, rank=which)
            apart.silence(which)
        elif what == "forget":
            undone.clear()
            ranks.forget(0)
            for slot in range(4):
                apart.forget(slot)
            for rank in range(4):
                ranks.set_stream(0, LIVE, complete=False, rank=rank)
                apart.set_stream(rank, LIVE, complete=False)
        else:
            now += which / 4
        for whole in WHOLE:
            expected = apart.match(whole, 4, now).matched.tolist()
            assert list(ranks.held_by_ranks(whole, 0, now)) == expected
            assert ranks.match(whole, 1, now).matched.item(0) >= max(expected)
