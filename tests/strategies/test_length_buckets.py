"""smg's bucket."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.duration import Duration
from epp.strategies.length_buckets import LengthBucket, LengthBucketsSettings
from tests.builders import candidates, request
from tests.strategies.driven import Driven, text

TYPE = LengthBucketsSettings.type_name


def index(*routed, **parameters):
    """`routed`: (tokens, slot), all at 0 s."""
    made = LengthBucketsSettings(**parameters).open()
    for tokens, slot in routed:
        made.record(request(prompt_tokens=tokens), slot, 0.0)
    return made


def best(made, tokens, n=3, **plugin):
    asked = request(prompt_tokens=tokens)
    some = candidates(n, affinities={TYPE: made.match(asked, n, 0.0)})
    return np.flatnonzero(LengthBucket(**plugin).score(asked, some) == 1.0).tolist()


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, 0), (1_365, 0), (1_366, 1), (2_731, 2), (4_096, 2), (90_000, 2)]
)
def test_at_first_4096_tokens_are_cut_into_equal_ranges(tokens, bucket):
    """The last has no end."""
    assert best(index(), tokens) == [bucket]


def test_buckets_are_fitted_to_prefill_as_much_each():
    """Of 100 tokens, those of up to 15 are 30, those of up to 24 are 74."""
    made = index((5, 0), (10, 0), (15, 0), (20, 0), (24, 0), (26, 0))
    made.expire(0.0)
    apart = {"balance_abs": 300.0}
    assert [best(made, tokens, **apart) for tokens in (1, 20, 24, 26, 27)] == [
        [0], [0], [1], [2], [2],
    ]  # fmt: skip


def test_buckets_stay_while_the_load_is_neither_doubled_nor_halved():
    """And are looked at once in five seconds."""
    made = index((10, 0), (100, 0), window=Duration(5.0))
    made.expire(0.0)
    made.record(request(prompt_tokens=90), 1, 4.0)
    made.record(request(prompt_tokens=20), 1, 4.0)
    made.expire(5.0)
    apart = {"balance_abs": 1e9}
    assert best(made, 60, n=2, **apart) == [0], "as fitted: 10 of 110 are shorter"
    made.record(request(prompt_tokens=800), 1, 6.0)
    made.expire(9.0)
    assert best(made, 801, n=2, **apart) == [1]
    made.expire(10.0)
    assert best(made, 800, n=2, **apart) == [0], "fitted anew: 110 of 910 are shorter"


def test_the_fewest_tokens_win_when_both_tests_fail():
    """More than 32 apart and more than 1.0001 times, strictly."""
    assert best(index((32, 0)), 0) == [0]
    assert best(index((33, 0)), 0) == [1, 2]
    assert best(index((100, 0), (60, 1), (61, 2)), 0, balance_rel=2.0) == [0]


def test_tokens_count_for_five_seconds():
    """Then the window moves on."""
    made = index((1_000, 0))
    made.expire(5.0)
    assert best(made, 0) == [1, 2]
    made.expire(5.1)
    assert best(made, 0) == [0]
    assert len(made) == 0


def test_who_leaves_or_was_not_served_has_no_tokens():
    """Nor those of later."""
    made = index((1_000, 0), (500, 1))
    made.forget(0)
    asked = request(prompt_tokens=700)
    made.retract(asked, 1, made.record(asked, 1, 0.0), 0.0)
    told = made.match(asked, 2, 0.0).columns["window_tokens"]
    assert told.tolist() == [0.0, 500.0]
    made.expire(100.0)
    assert made.match(asked, 2, 0.0).columns["window_tokens"].tolist() == [0.0, 0.0]


@given(
    routed=st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 3)), max_size=40),
    requests_max=st.integers(1, 6),
)
def test_the_window_is_bounded_and_its_sums_are_those_of_its_requests(routed, requests_max):
    """However many come within five seconds."""
    made = index(*routed, requests_max=requests_max)
    assert len(made) == min(len(routed), requests_max)
    kept = Counter()
    for tokens, slot in routed[-requests_max:]:
        kept[slot] += tokens
    told = made.match(request(), 4, 0.0).columns["window_tokens"]
    assert told.tolist() == [kept[slot] for slot in range(4)]


def test_the_margin_of_32_tokens_leaves_buckets_nothing_to_decide():
    """Long and short prompts alike go to whoever was sent the fewest tokens."""
    pods = Driven("smg-bucket", pods=4)
    went = [pods.send(text(f"{at}", 100 if at % 2 else 3_000)) for at in range(8)]
    by_length = Counter((went[at], at % 2) for at in range(8))
    assert len({slot for slot, short in by_length if short}) > 1, "short prompts share no bucket"
