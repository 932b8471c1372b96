"""Tokens of users, against a model that remembers every request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing_rivals.user_tokens import TOKENS, TOKENS_MAX, TOKENS_MIN, UserTokensSettings
from tests.builders import request

WINDOW_S = 20


def of(user, tokens=0):
    return request(headers={"user": user}, prompt_tokens=tokens)


def told(index, user, now=0.0):
    columns = index.match(of(user), 2, now).columns
    return tuple(columns[name][0] for name in (TOKENS, TOKENS_MIN, TOKENS_MAX))


def test_a_request_weighs_its_prompt_and_twice_its_estimated_answer():
    """100 + 2 x 1.5 x 100; a session is a user where none is named; moved, it counts once."""
    index = UserTokensSettings().open()
    asked = of("a", 100)
    index.retract(asked, 0, index.record(asked, 0, 0.0), 0.0)
    index.record(asked, 1, 0.0)
    index.record(request(session_id="b", prompt_tokens=10), 0, 0.0)
    index.record(request(prompt_tokens=1_000), 0, 0.0)
    assert told(index, "a") == (400, 40, 400)
    assert told(index, "b") == (40, 40, 400)
    assert index.match(request(), 2, 0.0).total == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 50)),
        st.tuples(st.just("wait"), st.integers(1, 12)),
    ),
    max_size=50,
)


@given(steps=STEPS)
def test_it_knows_what_the_window_knows(steps):
    """To five seconds; and at once after it was swept, the least and the most."""
    index = UserTokensSettings(window_s=WINDOW_S).open()
    known = []
    now = 0
    for what, value in steps:
        if what == "wait":
            now += value
        else:
            index.record(of(what, value), 0, float(now))
            known.append((what, now // 5 * 5, 4 * value))
        index.expire(float(now))
        known = [one for one in known if one[1] > now - WINDOW_S]
        sums = {user: sum(t for u, _, t in known if u == user) for user, _, _ in known}
        assert len(index) == len(sums)
        least, most = min(sums.values(), default=0), max(sums.values(), default=0)
        for user in "abcd":
            assert told(index, user, now) == pytest.approx((sums.get(user, 0), least, most))


@given(users=st.lists(st.integers(0, 30), max_size=60))
def test_it_never_knows_more_users_than_it_may(users):
    """Whoever was silent for longest goes."""
    index = UserTokensSettings(users_max=5).open()
    for user in users:
        index.record(of(f"{user}", 1), 0, 0.0)
        assert len(index) <= 5
        assert told(index, f"{user}")[0] > 0
    assert UserTokensSettings(users_max=2).adopt(index)
    assert len(index) <= 2
