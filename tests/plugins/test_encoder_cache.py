"""Images are remembered by their content, where they were sent, in bounds."""

import json

import numpy as np
import pytest

from epp.core.prompt.parse import parse_request
from epp.plugins import encoder_cache
from epp.plugins.encoder_cache import EncoderCacheAffinity, EncoderCacheSettings
from tests.builders import affinity, candidates, request

SLOTS = 3


def part(content):
    return {"type": "image_url", "image_url": {"url": f"data:,{content}"}}


def shown(*contents, text="what is it?"):
    """A chat with these images."""
    parts = [part(content) for content in contents]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    path = "/v1/chat/completions"
    return parse_request(path=path, headers={}, body=body, request_id="r").request


def opened(items=1_000):
    return EncoderCacheSettings(cache_size_in_mb_per_server=2 * items).open()


def held(index, given):
    known = index.match(given, SLOTS, 0.0)
    return known.matched.tolist(), known.total


def test_who_was_sent_an_image_has_it_whatever_is_said_of_it():
    """Each distinct one counts once."""
    index = opened()
    index.record(shown("cat", "dog"), 1, 0.0)
    index.record(shown("dog"), 2, 0.0)
    assert held(index, shown("cat", "dog", "cat", text="another question")) == ([0, 2, 1], 2)
    assert held(index, shown("bird")) == ([0, 0, 0], 1)
    assert held(index, shown()) == ([0, 0, 0], 0)
    assert index.measures().lookups == {"full": 1, "partial": 0, "none": 1}
    assert index.measures().entries == 3


def test_a_request_that_has_let_its_prompt_go_is_still_known():
    """It may be found at another endpoint later."""
    index = opened()
    given = shown("cat")
    index.match(given, SLOTS, 0.0)
    index.record(given.without_prompts(), 0, 0.0)
    assert held(index, shown("cat")) == ([1, 0, 0], 1)


def test_the_least_recently_sent_goes_first():
    """As in the cache of an engine."""
    index = opened(items=2)
    for content in ("cat", "dog", "cat", "bird"):
        index.record(shown(content), 0, 0.0)
    assert [held(index, shown(one))[0][0] for one in ("cat", "dog", "bird")] == [1, 0, 1]


def test_what_was_not_sent_after_all_is_taken_back():
    """Unless it was sent there since, or had been before."""
    index = opened()
    before = index.record(shown("cat"), 0, 1.0)
    again = index.record(shown("cat", "dog"), 0, 2.0)
    index.retract(shown("cat", "dog"), 0, again, 3.0)
    assert held(index, shown("cat", "dog")) == ([1, 0, 0], 2)
    index.retract(shown("cat"), 0, before, 3.0)
    assert held(index, shown("cat"))[0][0] == 1
    index.retract(shown(), 0, index.record(shown(), 0, 3.0), 3.0)
    assert index.measures().entries == 1


def test_an_endpoint_that_left_is_forgotten():
    index = opened()
    index.record(shown("cat", "dog"), 0, 0.0)
    index.record(shown("cat"), 1, 0.0)
    index.forget(0)
    index.forget(7)
    assert held(index, shown("cat", "dog")) == ([0, 1, 0], 2)
    assert index.measures().entries == 1


def test_all_endpoints_together_are_bounded(monkeypatch):
    """Who has most gives up its oldest."""
    monkeypatch.setattr(encoder_cache, "ENTRIES_MAX", 100)
    index = opened()
    index.record(shown("few"), 1, 0.0)
    for number in range(300):
        index.record(shown(str(number)), 0, 0.0)
    assert index.measures().entries <= 100
    assert held(index, shown("few"))[0] == [0, 1, 0]
    assert held(index, shown("299"))[0] == [1, 0, 0]
    assert held(index, shown("0"))[0] == [0, 0, 0]


def test_replicas_tell_each_other():
    """What one knows, another one learns."""
    index, other = opened(), opened()
    index.record(shown("cat"), 0, 1.0)
    index.record(shown("dog"), 2, 2.0)
    other.learn(index.share(shown("bird")), 1, 1.5, 3.0)
    for slot, stamp, keys in index.shared_entries():
        other.learn(keys, slot, stamp, 3.0)
    assert held(other, shown("cat", "dog", "bird")) == ([1, 1, 1], 3)
    other.learn([b"", bytes(1_000)], 0, 1.0, 3.0)
    assert other.measures().entries == 3


def test_settings_are_adopted_with_what_is_known():
    index = opened(items=3)
    for content in ("cat", "dog", "bird"):
        index.record(shown(content), 0, 0.0)
    assert EncoderCacheSettings(cache_size_in_mb=2).adopt(index)
    assert held(index, shown("cat", "dog", "bird"))[0] == [1, 0, 0]
    assert index.measures().entries == 1


@pytest.mark.parametrize(
    ("fields", "items", "warned"),
    [
        ({}, 2_048, False),
        ({"cache_size_in_mb_per_server": 100}, 50, False),
        ({"cache_size_in_mb": 2_048}, 1_024, True),
        ({"cache_size_in_mb": 2_048, "cache_size_in_mb_per_server": 3}, 1, True),
        ({"cache_size_in_mb_per_server": 1}, 1, False),
    ],
)
def test_both_spellings_say_how_much_an_endpoint_has(fields, items, warned):
    """The field's sample has the one that its picker does not read."""
    settings = EncoderCacheSettings(**fields)
    assert settings.items_max == items
    assert bool(settings.warnings()) is warned


@pytest.mark.parametrize(
    ("held", "total", "scores"),
    [([2, 1, 0], 2, [1.0, 0.5, 0.0]), ([0, 0, 0], 0, [0.0, 0.0, 0.0])],
)
def test_the_score_is_the_share_that_is_there(held, total, scores):
    """Of distinct images; without any nobody is preferred."""
    for name in ("", "mine"):
        scorer = EncoderCacheAffinity(producer_name=name)
        known = {name or "mm-embeddings-cache-producer": affinity(held, total)}
        pool = candidates(matched_blocks=[0, 0, 0], affinities=known)
        assert np.array_equal(scorer.score(request(), pool), scores)
        assert scorer.producer in known
