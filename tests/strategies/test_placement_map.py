"""smg's hash index."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.duration import Duration
from epp.strategies.placement_map import PlacementMapAffinity, PlacementMapSettings
from tests.builders import affinity, candidates, request
from tests.strategies.driven import Driven, text

SMALL = {"boundaries_tokens": (64, 256)}
HEAD, TAIL = text("head", 64), text("tail", 192)
TYPE = PlacementMapSettings.type_name


def said(what):
    return request(prompts=(what.encode(),))


def placed(*routed, **parameters):
    """`routed`: (text, slot, second)."""
    made = PlacementMapSettings(**(SMALL | parameters)).open()
    for what, slot, at_s in routed:
        made.record(said(what), slot, at_s)
    return made


def matched(made, what, now=1.0, slots=4):
    return made.match(said(what), slots, now).matched.tolist()


def test_heads_are_known_as_a_whole_or_not_at_all():
    """255 tokens in common are as good as 64."""
    made = placed((HEAD + TAIL, 0, 0.0), (HEAD + TAIL[:-4] + "else", 1, 0.0))
    assert matched(made, HEAD + TAIL + "and more") == [4, 1, 0, 0]
    assert matched(made, HEAD + text("other", 192)) == [1, 1, 0, 0]
    assert matched(made, HEAD[:-4] + "else") == [0, 0, 0, 0]
    assert matched(made, "short") == [0, 0, 0, 0]


def test_a_head_is_forgotten_180_s_after_it_was_last_sent():
    """Not after it was last looked up."""
    made = placed((HEAD, 0, 0.0), (HEAD, 1, 10.0))
    assert matched(made, HEAD, 180.0) == [1, 1, 0, 0]
    assert matched(made, HEAD, 180.1) == [0, 1, 0, 0]
    made.expire(190.0)
    assert len(made) == 1
    made.expire(190.1)
    assert len(made) == 0


def test_a_fourth_holder_replaces_the_one_that_got_it_longest_ago():
    """A holder that gets it again is no longer that one."""
    made = placed((HEAD, 0, 0.0), (HEAD, 1, 1.0), (HEAD, 2, 2.0), (HEAD, 0, 3.0), (HEAD, 3, 4.0))
    assert matched(made, HEAD, 5.0) == [1, 0, 1, 1]


def test_who_leaves_is_forgotten_and_what_it_gets_later_counts():
    """Although nothing is searched for it."""
    made = placed((HEAD, 0, 0.0), (HEAD, 1, 0.0))
    made.forget(0)
    assert matched(made, HEAD) == [0, 1, 0, 0]
    made.record(said(HEAD), 0, 1.0)
    assert matched(made, HEAD) == [1, 1, 0, 0]


def test_what_went_elsewhere_is_taken_back():
    """But not what was there before, nor what came since."""
    made = placed((HEAD, 0, 0.0))
    asked = said(HEAD + TAIL)
    made.retract(asked, 0, made.record(asked, 0, 5.0), 6.0)
    assert matched(made, HEAD + TAIL) == [1, 0, 0, 0]
    assert matched(made, HEAD, 181.0) == [0, 0, 0, 0], "as of 0 s"
    first, second = said(HEAD + TAIL), said(HEAD + TAIL)
    of_first = made.record(first, 1, 7.0)
    of_second = made.record(second, 1, 7.0)
    made.retract(first, 1, of_first, 7.0)
    assert matched(made, HEAD + TAIL, 7.0) == [1, 4, 0, 0]
    made.retract(second, 1, of_second, 7.0)


def test_a_peer_tells_what_it_sent_in_any_order_and_more_than_once():
    """The latest counts; what is none, or too old, does not."""
    peer = placed((HEAD + TAIL, 1, 0.0), (HEAD, 2, 3.0))
    told = list(peer.known())
    for heard in (told, told[::-1], told * 2):
        made = placed((HEAD, 1, 2.0))
        assert made.signature == peer.signature
        for slot, stamp, keys in heard:
            made.learn(keys, slot, stamp, 4.0)
        assert matched(made, HEAD + TAIL, 4.0) == [0, 4, 1, 0]
        assert matched(made, HEAD, 181.0) == [0, 1, 1, 0], "its own of 2 s is not made older"
    made.learn([b"no head", b""], 0, 4.0, 4.0)
    made.learn(made.share(said(HEAD)), 0, 0.0, 200.0)
    assert matched(made, HEAD, 100.0)[0] == 0
    made.forget(1)
    assert {slot for slot, _, _ in made.known()} == {2}
    made.learn(made.share(said(HEAD)), 1, 2.0, 5.0)
    assert matched(made, HEAD, 5.0) == [0, 1, 1, 0], "a new endpoint in the slot"
    assert PlacementMapSettings().open().signature != made.signature


@given(
    routed=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 5)), max_size=40),
    heads_max=st.integers(1, 5),
)
def test_heads_are_bounded(routed, heads_max):
    """And the last one is known."""
    made = PlacementMapSettings(boundaries_tokens=(64,), heads_max=heads_max).open()
    for at, (name, slot) in enumerate(routed):
        made.record(said(text(name, 64)), slot, float(at))
        assert len(made) <= heads_max
        assert matched(made, text(name, 64), float(at), slots=6)[slot] == 1


@pytest.mark.parametrize("boundaries", [(), (256, 64), (64, 64), (100,)])
def test_boundaries_ascend_in_whole_blocks(boundaries):
    """Else there would be no hash to look up."""
    with pytest.raises(ValueError, match="boundariesTokens"):
        PlacementMapSettings(boundaries_tokens=boundaries)
    with pytest.raises(ValueError, match="ttl"):
        PlacementMapSettings(ttl=Duration(0.0))


def test_settings_are_adopted_while_heads_stay():
    """Fewer heads at once; others are another map."""
    made = placed((HEAD, 0, 0.0), (text("b", 64), 0, 0.0))
    assert PlacementMapSettings(**SMALL, heads_max=1).adopt(made)
    assert len(made) == 1
    assert not PlacementMapSettings().adopt(made)


def test_the_longest_head_decides_then_the_expected_wait():
    """Of two holders the one that waits less, of whoever holds more the one."""

    def best(matched_blocks, **columns):
        some = candidates(affinities={TYPE: affinity(matched_blocks, 10)}, **columns)
        return np.flatnonzero(PlacementMapAffinity().score(request(), some) == 1.0).tolist()

    kv = {"kv_cache_usage": [0.5, 0.9, 0.0]}
    assert best([4, 1, 0], **kv) == [0]
    assert best([4, 4, 0], **kv) == [0]
    assert best([1, 4, 0], **kv) == [1]
    assert best([0, 0, 0], **kv) == [2]
    assert best([4, 1, 0], inflight_requests=[30, 0, 0], **kv) == [2], "too full: anybody"


def test_affinity_ends_when_engines_would_have_evicted():
    """smg-project/smg #2213: a tree would send the next turn to an endpoint that has forgotten it."""
    prompt = text("conversation", 2_100)
    pods = Driven("smg-hash-index", pods=4)
    tree = Driven("smg-cache-aware-4", pods=4)
    homes = [driven.ask(prompt) for driven in (pods, tree)]
    for driven, home in zip((pods, tree), homes, strict=True):
        driven.now = 170.0
        for slot in range(4):
            driven.report(slot, kv=0.5 if slot == home else 0.0)
        assert driven.ask(prompt) == home, "170 s later"
        driven.now = 170.0 + 181.0
        for slot in range(4):
            driven.report(slot, kv=0.5 if slot == home else 0.0)
    assert pods.ask(prompt) != homes[0], "181 s after that"
    assert tree.ask(prompt) == homes[1]


def test_what_is_shared_below_the_first_boundary_pins_nobody():
    """A system prompt of 1,024 tokens: cold prompts spread as they would without it."""
    preamble = text("system", 1_024)
    pods = Driven("smg-hash-index", pods=4)
    went = {pods.send(preamble + text(f"user{at}", 256)) for at in range(4)}
    assert went == {0, 1, 2, 3}
