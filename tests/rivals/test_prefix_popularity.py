"""How long a head must be to be no longer everybody's."""

from hypothesis import given
from hypothesis import strategies as st

from homing_rivals.prefix_popularity import PrefixPopularitySettings
from tests.builders import request

BLOCK = 256


def opened(**parameters):
    usual = {"blocks_min": 1, "requests_min": 2, "requests_max": 16}
    return PrefixPopularitySettings(**(usual | parameters)).open()


def said(text):
    """One letter a block."""
    return request(prompts=(b"".join(letter.encode() * BLOCK for letter in text),))


def head(index, text, slots=3):
    known = index.match(said(text), slots, 0.0)
    assert len(set(known.matched.tolist())) == 1
    return int(known.matched[0])


def test_a_head_is_lengthened_while_too_many_share_it():
    """1, 2, 4, ...: two of it are allowed, or a quarter of the last."""
    index = opened()
    for _ in range(2):
        index.record(said("abcdefgh"), 0, 0.0)
    assert head(index, "abcdefgh") == 1
    index.record(said("abcx"), 0, 0.0)
    assert head(index, "abcdefgh") == 4
    assert head(index, "axyz") == 2
    assert head(index, "z") == 1


def test_a_prompt_that_all_send_is_taken_as_a_whole():
    """There is nothing longer."""
    index = opened()
    for _ in range(8):
        index.record(said("abcde"), 0, 0.0)
    assert head(index, "abcde") == 5
    assert head(index, "") == 0


def test_what_is_many_requests_ago_is_no_longer_popular():
    """Sixteen here."""
    index = opened()
    for _ in range(8):
        index.record(said("ab"), 0, 0.0)
    assert head(index, "ab") == 2
    for number in range(12):
        index.record(said(chr(ord("c") + number)), 0, 0.0)
    assert head(index, "ab") == 1


@given(st.lists(st.text("ab", max_size=9), max_size=40))
def test_it_counts_the_last_requests_and_no_others(texts):
    """At most twelve heads each."""
    index = opened(requests_max=16)
    for text in texts:
        index.record(said(text), 0, 0.0)
        assert len(index) <= 16 * 12
    for _ in range(16):
        index.record(said(""), 0, 0.0)
    assert len(index) == 0


def test_new_settings_begin_anew():
    """What is known is soon known again."""
    index = PrefixPopularitySettings().open()
    assert PrefixPopularitySettings().adopt(index)
    assert not PrefixPopularitySettings(blocks_min=8).adopt(index)
