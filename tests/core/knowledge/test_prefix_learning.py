"""What peers tell the prefix index: late, repeated, in any order, or wrong."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.duration import Duration
from tests.core.knowledge.test_prefix import (
    SLOTS,
    chain_of,
    check_structure,
    matched,
    opened,
    request_of,
)

words = st.lists(st.sampled_from(["a", "b", "aaa", "cabc"]), min_size=1, max_size=4).map("".join)
told = st.tuples(words, st.integers(0, SLOTS - 1), st.integers(0, 30))
TEXTS = ("a", "aaab", "aaaaaab", "cabcaaab", "bcabccabc", "baaa")


@settings(max_examples=300, deadline=None)
@given(st.lists(told, max_size=12), st.randoms(use_true_random=False))
def test_any_order_of_what_is_told_with_any_repeated_leaves_the_belief_of_who_saw_it_all(
    records, random: Random
):
    """Who recorded all of it itself, in time, matches the same at any later instant."""
    saw = opened(ttl=Duration(20))
    for text, slot, at in sorted(records, key=lambda record: record[2]):
        saw.record(request_of(text), slot, float(at))
    learnt = opened(ttl=Duration(20))
    shuffled = records + [record for record in records if random.random() < 0.3]
    random.shuffle(shuffled)
    for text, slot, at in shuffled:
        learnt.learn((chain_of(text),), slot, float(at), 30.0)
        check_structure(learnt)
    for now in (30.0, 35.0, 41.0, 49.0, 60.0):
        for text in (*TEXTS, *(text for text, _, _ in records)):
            assert matched(learnt, text, now=now) == matched(saw, text, now=now)


calls = st.lists(
    st.tuples(st.sampled_from(["record", "learn", "retract", "expire", "forget"]), told),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(calls, st.integers(4, 20))
def test_own_prompts_and_those_of_peers_share_one_tree(given_calls, capacity):
    """Counts, stamps and queues stay right whatever comes between what, and all can be forgotten."""
    index = opened(ttl=Duration(15), lru_capacity_per_server=capacity)
    now = 0.0
    recorded = []
    for verb, (text, slot, number) in given_calls:
        now += number % 3
        if verb == "record":
            request = request_of(text)
            recorded.append((request, slot, index.record(request, slot, now)))
            assert matched(index, text, now=now)[slot] == min(len(text), capacity)
        elif verb == "learn":
            index.learn((chain_of(text),), slot, now - number, now)
        elif verb == "retract" and recorded:
            index.retract(*recorded.pop(number % len(recorded)), now)
        elif verb == "expire":
            index.expire(now)
        elif verb == "forget":
            index.forget(slot)
        check_structure(index)
        assert all(index.blocks_held(slot) <= capacity for slot in range(SLOTS))
    for slot in range(SLOTS):
        index.forget(slot)
    assert (index.entries, index.bytes_estimated) == (0, 0)


def test_what_is_older_than_the_ttl_is_not_learnt():
    index = opened(ttl=Duration(10))
    index.learn((chain_of("abc"),), 0, 89.0, 100.0)
    assert index.entries == 0
    index.learn((chain_of("abc"),), 0, 91.0, 100.0)
    assert matched(index, "abc", now=100.0) == [3, 0, 0, 0]
    assert matched(index, "abc", now=102.0) == [0, 0, 0, 0]


def test_a_peer_that_lies_about_the_time_makes_nothing_last_longer():
    """What it says was used in the future was used now."""
    index = opened(ttl=Duration(10))
    index.learn((chain_of("abc"),), 0, 1e12, 100.0)
    assert matched(index, "abc", now=110.0) == [3, 0, 0, 0]
    assert matched(index, "abc", now=110.1) == [0, 0, 0, 0]
    index.record(request_of("abc"), 0, 100.5)
    assert matched(index, "abc", now=110.4) == [3, 0, 0, 0]


def test_half_a_hash_and_an_endless_chain_are_cut():
    index = opened(max_prefix_tokens_to_match=64 * 5)
    index.learn((chain_of("abc") + b"1234", b"", b"123", chain_of("d" * 100)), 1, 0.0, 0.0)
    assert index.blocks_held(1) == 3 + 5
    check_structure(index)


def test_a_snapshot_is_what_was_known_oldest_first():
    """Told to another index it gives the same matches, and so it does when told again."""
    index = opened(ttl=Duration(100))
    random = Random(7)
    for turn in range(200):
        text = "".join(random.choices("ab", k=random.randint(1, 12)))
        index.record(request_of(text), random.randrange(SLOTS), turn / 2)
    known = list(index.shared_entries())
    stamps = [stamp for _, stamp, _ in known]
    assert stamps == sorted(stamps)
    other = opened(ttl=Duration(100))
    for _ in range(2):
        for slot, stamp, keys in known:
            other.learn(keys, slot, stamp, 100.0)
        check_structure(other)
        assert other.entries == index.entries
        for text in ("ababab", "bbbbbb", "aabbaabbaabb", "a"):
            for now in (100.0, 130.0, 160.0, 195.0):
                assert matched(other, text, now=now) == matched(index, text, now=now)


def test_what_is_dropped_while_a_snapshot_is_read_is_not_told():
    index = opened()
    index.record(request_of("aaa"), 0, 0.0)
    index.record(request_of("bbb"), 1, 1.0)
    reading = index.shared_entries()
    assert next(reading)[0] == 0
    index.forget(1)
    assert list(reading) == []


@pytest.mark.parametrize("own_first", [True, False])
def test_hits_that_are_owed_to_peers_alone_are_counted(own_first):
    """A prompt whose deepest known block no prompt of our own went through, once."""
    index = opened()
    if own_first:
        index.record(request_of("ab"), 0, 0.0)
    index.learn((chain_of("abcd"),), 0, 1.0, 1.0)
    index.record(request_of("abcde"), 0, 2.0)
    assert index.statistics.known_from_peers == 1
    index.record(request_of("abcde"), 0, 3.0)
    index.record(request_of("abx"), 0, 3.0)
    assert index.statistics.known_from_peers == 1


def test_a_late_record_does_not_refresh_what_was_used_since():
    """The head was used later than the peer says, its tail was not."""
    index = opened(ttl=Duration(10))
    index.record(request_of("ab"), 0, 8.0)
    index.learn((chain_of("abcd"),), 0, 5.0, 8.0)
    assert matched(index, "abcd", now=15.0) == [4, 0, 0, 0]
    assert matched(index, "abcd", now=16.0) == [2, 0, 0, 0]
    index.expire(16.0)
    assert index.blocks_held(0) == 2
    check_structure(index)


def test_peers_stay_within_the_memory_limit():
    index = opened(memory_max_bytes=20_000)
    for turn in range(2_000):
        index.learn((chain_of(f"{turn:05}"),), turn % SLOTS, float(turn), float(turn))
        assert index.bytes_estimated <= 20_000
    check_structure(index)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside another endpoint"])
def test_what_a_peer_told_late_outlives_the_own_prompt_that_is_taken_back(others):
    """The peer's prompt went through the same head: it is still there, and can be forgotten."""
    index = opened()
    if others:
        index.record(request_of("a"), 1, 0.0)
    own = request_of("ab")
    recorded = index.record(own, 0, 10.0)
    index.learn((chain_of("abcd"),), 0, 7.0, 10.0)
    index.retract(own, 0, recorded, 11.0)
    assert matched(index, "abcd", now=11.0)[:2] == [4, 1 if others else 0]
    check_structure(index)
    index.forget(0)
    index.forget(1)
    assert index.entries == 0
