import base64
import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random

import msgspec
import pytest

from epp.core.duration import Duration
from epp.core.knowledge import exact as module
from epp.core.knowledge.exact import KNOWN_SPARE_MAX, ExactIndexSettings
from epp.core.knowledge.exact_awaited import LATE_S_MAX
from epp.core.knowledge.exact_parameters import (
    ROW_BYTES,
    IndexerConfig,
    KvEventsConfig,
    TierWeight,
    TokenProcessorConfig,
)
from epp.core.knowledge.exact_slots import TRACKED_MAX
from epp.core.knowledge.index import EXACT, HOST_BLOCKS, missing_verbs
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import BlockExtra, Cleared, Fault, Removed, Stored, read_payload
from epp.core.kv_events.stream import StreamState
from epp.core.moment import PlacedMedia
from epp.core.types import ApiKind
from sim.truth import validate
from sim.truth.judgement import lines_of
from sim.truth.prefix_cache import Recorded
from tests.builders import request
from tests.core.kv_events.publisher import FakeEngine

SLOTS = 3
DICE = Random(7)
TOKENS = [DICE.getrandbits(17) for _ in range(1_024)]
LIVE, STALE, REPLAYING = StreamState.LIVE, StreamState.STALE, StreamState.REPLAYING


def packed(tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


def asked(*prompts, media=(), **fields):
    """A request whose tokens are known."""
    token_ids = tuple(map(packed, prompts))
    return request(token_ids=token_ids, token_media=(media,) * len(prompts), **fields)


def settings_of(block_tokens=64, **fields):
    processor = TokenProcessorConfig(block_size_tokens=block_tokens)
    return ExactIndexSettings(token_processor_config=processor, **fields)


def opened(block_tokens=64, *, live=range(SLOTS), **fields):
    """An index all of whose streams are live and told all, but for what follows."""
    index = settings_of(block_tokens, **fields).open()
    for slot in live:
        index.set_stream(slot, LIVE, complete=True)
    return index


def run(tokens, size=64, *, first=100, parent=None, **members):
    hashes = [first + at for at in range(len(tokens) // size)]
    return Stored(hashes=hashes, parent=parent, tokens=packed(tokens), block_tokens=size, **members)


def held(index, given, now=0.0):
    return index.match(given, SLOTS, now).matched.tolist()


def test_it_has_what_it_declares():
    assert missing_verbs(ExactIndexSettings.abilities, opened()) == []


def test_who_holds_how_much_of_a_prompt_is_what_engines_say():
    """Endpoint by endpoint, until one says that it is gone."""
    index = opened()
    index.hear(0, [run(TOKENS[:512])], 0.0)
    index.hear(2, [run(TOKENS[:192])], 0.0)
    known = index.match(asked(TOKENS[:500]), SLOTS, 0.0)
    assert (known.matched.tolist(), known.total) == ([7, 0, 3], 7)
    index.hear(0, [Removed([103])], 0.0)
    assert held(index, asked(TOKENS[:500])) == [3, 0, 3]
    index.hear(2, [Removed([100])], 0.0)
    assert held(index, asked(TOKENS[:500])) == [3, 0, 0]


@pytest.mark.parametrize(("size", "tokens", "blocks"), [
    (64, 512, 7), (64, 513, 8), (16, 512, 7), (128, 512, 6), (128, 513, 8), (128, 500, 6),
    (128, 129, 2), (128, 128, 0), (256, 511, 4), (256, 513, 8), (96, 512, 6), (48, 200, 3),
])  # fmt: skip
def test_never_more_than_an_engine_can_use(size, tokens, blocks):
    """The last token is computed, and blocks of the engine are used wholly."""
    index = opened()
    whole = len(TOKENS) // size * size
    index.hear(0, [run(TOKENS[:whole], size)], 0.0)
    assert held(index, asked(TOKENS[:tokens])) == [blocks, 0, 0]


def test_prompts_that_come_as_ids_need_nobody_to_make_tokens():
    index = opened()
    index.hear(1, [run(TOKENS[:256])], 0.0)
    given = request(api=ApiKind.TOKENS, prompts=(packed(TOKENS[:300]),))
    assert held(index, given) == [0, 4, 0]


def test_without_tokens_nothing_is_looked_up():
    """And that is counted, but not as a hit."""
    index = opened()
    index.hear(1, [run(TOKENS[:256])], 0.0)
    known = index.match(request(prompts=(bytes(1_024),)), SLOTS, 0.0)
    assert (known.matched.tolist(), known.total) == ([0, 0, 0], 0)
    assert index.measures().lookups["unknown"] == 1
    assert index.measures().hits == 0
    index.match(asked(TOKENS[:256]), SLOTS, 0.0)
    assert index.measures().hits == 1


def test_prompts_of_one_request_are_added_up():
    index = opened()
    index.hear(0, [run(TOKENS[:128]), run(TOKENS[512:640], first=900)], 0.0)
    known = index.match(asked(TOKENS[:130], TOKENS[512:], [1] * 10), SLOTS, 0.0)
    assert (known.matched.tolist(), known.total) == ([4, 0, 0], 10)


def test_adapters_salts_and_images_are_prompts_of_their_own():
    """An adapter is known by its name once an engine has told of it."""
    index = opened()
    cat = (PlacedMedia("cat", 10, 20),)
    index.hear(0, [run(TOKENS[:128], adapter="sql")], 0.0)
    index.hear(1, [run(TOKENS[:128], extras=(BlockExtra(salt="s"), BlockExtra()))], 0.0)
    index.hear(2, [run(TOKENS[:128], extras=(BlockExtra((("cat", 10),)), BlockExtra()))], 0.0)
    prompt = TOKENS[:200]
    assert held(index, asked(prompt, model="sql")) == [2, 0, 0]
    assert held(index, asked(prompt, model="", cache_salt="s")) == [0, 2, 0]
    assert held(index, asked(prompt, model="", media=cat)) == [0, 0, 2]
    assert held(index, asked(prompt, model="")) == [0, 0, 0]


def total(index, given):
    """0: nothing is known of it."""
    return index.match(given, SLOTS, 0.0).total


def test_an_adapter_that_nobody_has_named_is_not_taken_for_its_model():
    """What the model holds is nothing to it; the index of decisions answers meanwhile."""
    index = opened()
    index.hear(0, [run(TOKENS[:128])], 0.0)
    new = TOKENS[:200]
    assert held(index, asked(new, model="sql")) == [2, 0, 0], "no engine serves adapters"
    index.adapters_told(["others"])
    assert total(index, asked(new, model="sql")) == 0
    index.adapters_told(["others", "sql"])
    assert held(index, asked(new, model="sql")) == [0, 0, 0]
    assert total(index, asked(new, model="sql")) == 3


def test_a_name_of_the_model_itself_is_known_by_what_engines_hold_of_it():
    """Once one has stored what was asked for under it."""
    index = opened()
    index.adapters_told(["sql"])
    index.hear(0, [run(TOKENS[:128])], 0.0)
    index.record(asked(TOKENS[:130], model="base"), 0, 0.0)
    assert total(index, asked(TOKENS[:256], model="base")) == 0, "it was there before"
    index.record(asked(TOKENS[:256], model="base"), 0, 0.0)
    index.record(asked(TOKENS[:256], model="tuned"), 0, 0.0)
    assert total(index, asked(TOKENS[:256], model="base")) == 0
    index.hear(0, [run(TOKENS[128:256], first=102, parent=101, adapter="")], 1.0)
    assert held(index, asked(TOKENS[:300], model="base")) == [4, 0, 0]
    index.adapters_told(["tuned"])
    assert held(index, asked(TOKENS[:300], model="tuned")) == [0, 0, 0]


def test_what_sglang_leaves_out_of_its_hashes_is_not_known():
    """Adapters and salts: they would be taken for the model itself."""
    index = opened(kv_events_config=KvEventsConfig(engine_type="sglang"))
    heard = index.hear(0, [run(TOKENS[:128], adapter="sql"), run(TOKENS[:128], first=7)], 0.0)
    assert heard.faults == [Fault.KEYS]
    assert held(index, asked(TOKENS[:200])) == [2, 0, 0]
    known = index.match(asked(TOKENS[:200], cache_salt="s"), SLOTS, 0.0)
    assert known.total == 0


def stored(index, given, slot=0):
    """(blocks, of how many) that the engine in `slot` tells of what its lease keeps."""
    index.match(given, SLOTS, 0.0)
    told = index.held(given.without_prompts(), slot)
    return told and (told.blocks, told.total)


@pytest.mark.parametrize(("size", "tokens", "blocks"), [
    (64, 512, 8), (64, 513, 8), (16, 540, 8), (128, 512, 8), (128, 640, 10), (128, 500, 6),
    (256, 767, 8), (48, 200, 3), (1, 512, 8), (8, 541, 8), (24, 540, 7),
])  # fmt: skip
def test_an_engine_holds_all_of_a_prompt_that_it_has_computed(size, tokens, blocks):
    """As far as its blocks go; that is how the ids are compared."""
    index = opened()
    index.hear(0, [run(TOKENS[: tokens // size * size], size)], 0.0)
    assert stored(index, asked(TOKENS[:tokens])) == (blocks, blocks)


def test_of_a_prompt_that_differs_it_is_told_how_far_it_is_the_same():
    """To the block; what was only decided does not count."""
    index = opened()
    index.hear(0, [run(TOKENS[:512])], 0.0)
    other = [*TOKENS[:200], 7, *TOKENS[201:512]]
    index.record(asked(other), 0, 0.0)
    assert stored(index, asked(other)) == (3, 8)
    assert stored(index, asked([7, *TOKENS[:511]])) == (0, 8)
    assert stored(index, asked(TOKENS[:256])) == (4, 4)


def asked_of(index, given, slot=0):
    """What the engine in `slot` tells of what its lease keeps, and will have told."""
    index.match(given, SLOTS, 0.0)
    return index.held(given.without_prompts(), slot)


def test_what_was_told_and_is_evicted_was_held():
    """By engines whose cache is soon used up: once somebody has asked, and in one message as in two."""
    index = opened()
    index.hear(0, [run(TOKENS[:64])], 0.0)
    late, soon = asked(TOKENS[:256]), asked([*TOKENS[:64], *range(192)])
    told = [asked_of(index, given) for given in (late, soon)]
    assert [(one.blocks, one.total) for one in told] == [(1, 4), (1, 4)]
    rest = run(TOKENS[64:256], first=200, parent=100)
    index.hear(0, [rest], 0.0)
    index.hear(0, [Removed(hashes=rest.hashes)], 0.0)
    other = run(list(range(192)), first=300, parent=100)
    index.hear(0, [other, Removed(hashes=other.hashes)], 0.0)
    assert [one.blocks for one in told] == [4, 4]
    assert (asked_of(index, late).blocks, asked_of(index, soon).blocks) == (1, 1)
    assert held(index, late) == [1, 0, 0]


def test_whoever_asks_again_of_one_prompt_gets_one_answer():
    """Two that wait for the same prompt; another endpoint that tells of it answers for itself."""
    index = opened()
    index.hear(0, [run(TOKENS[:64])], 0.0)
    given = asked(TOKENS[:256])
    first, again = asked_of(index, given), asked_of(index, given)
    index.hear(1, [run(TOKENS[:256])], 0.0)
    assert (first.blocks, again.blocks) == (1, 1)
    index.hear(0, [run(TOKENS[64:128], first=200, parent=100)], 0.0)
    assert asked_of(index, given).blocks == 2
    index.hear(0, [run(TOKENS[128:256], first=300, parent=200)], 0.0)
    assert (first.blocks, again.blocks, first.void) == (4, 4, False)


@pytest.mark.parametrize("void", [
    lambda index: index.hear(0, [Cleared()], 0.0),
    lambda index: index.clear(0),
    lambda index: index.silence(0),
    lambda index: index.forget(0),
])  # fmt: skip
def test_of_what_is_told_anew_nothing_follows_for_what_was_asked_before(void):
    """The engine restarted, or its stream did: that it has not got a prompt says nothing of its ids."""
    index = opened()
    index.hear(0, [run(TOKENS[:64])], 0.0)
    told, elsewhere = asked_of(index, asked(TOKENS[:256])), asked(TOKENS[:256])
    index.hear(1, [run(TOKENS[:64])], 0.0)
    beside = asked_of(index, elsewhere, slot=1)
    void(index)
    assert (told.void, beside.void) == (True, False)


def test_what_is_asked_for_is_bounded():
    """Of each endpoint: the oldest is not followed any more."""
    index = opened()
    index.hear(0, [run(TOKENS[:64])], 0.0)
    told = [asked_of(index, asked([number] * 64)) for number in range(TRACKED_MAX + 2)]
    assert [one.void for one in told[:3]] == [True, True, False]
    index.hear(0, [run([5] * 64, first=5), run([0] * 64, first=6)], 0.0)
    assert [told[at].blocks for at in (0, 5, 6)] == [0, 1, 0]


def test_where_more_or_less_than_ids_decides_nothing_is_compared():
    """An endpoint that is not heard, or not from its start; adapters, salts, short prompts, bytes."""
    index = opened()
    index.hear(0, [run(TOKENS[:512]), run(TOKENS[:512], first=900, adapter="sql")], 0.0)
    assert stored(index, asked(TOKENS[:512]), slot=1) is None
    assert stored(index, asked(TOKENS[:512]), slot=SLOTS) is None
    for given in (
        asked(TOKENS[:512], model="sql"),
        asked(TOKENS[:512], cache_salt="s"),
        asked(TOKENS[:63]),
        request(prompts=(bytes(1_024),)),
    ):
        assert stored(index, given) is None
    for state, complete in ((LIVE, False), (STALE, True), (REPLAYING, True)):
        index.set_stream(0, state, complete=complete)
        assert stored(index, asked(TOKENS[:512])) is None


def test_adapters_of_sglang_are_known_by_what_it_says_of_them():
    """And not taken for the model itself."""
    index = opened(kv_events_config=KvEventsConfig(engine_type="sglang"))
    index.hear(0, [run(TOKENS[:128]), run(TOKENS[:128], first=7, adapter="sql")], 0.0)
    assert held(index, asked(TOKENS[:200])) == [2, 0, 0]
    assert held(index, asked(TOKENS[:200], model="sql")) == [0, 0, 0]


def test_tiers_count_by_their_weight():
    """The best that holds a block, truncated at the end."""
    weights = (TierWeight(name="CPU", weight=0.8),)
    index = opened(indexer_config=IndexerConfig(kv_cache_backend_configs=weights))
    index.hear(0, [run(TOKENS[:128]), run(TOKENS[128:832], first=200, parent=101, tier="cpu")], 0.0)
    index.hear(1, [run(TOKENS[:832], tier="cpu"), run(TOKENS[:832])], 0.0)
    index.hear(2, [run(TOKENS[:832], tier="tape")], 0.0)
    assert held(index, asked(TOKENS[:900])) == [int(2 + 11 * 0.8), 13, int(13 * 0.5)]


@pytest.mark.parametrize("other_tier", [False, True])
def test_a_weight_of_the_device_counts_whether_or_not_another_tier_has_blocks(other_tier):
    weights = (TierWeight(name="GPU", weight=0.5),)
    index = opened(indexer_config=IndexerConfig(kv_cache_backend_configs=weights))
    index.hear(0, [run(TOKENS[:832])], 0.0)
    if other_tier:
        index.hear(1, [run(TOKENS[:64], first=900, tier="cpu")], 0.0)
    assert held(index, asked(TOKENS[:900]))[0] == int(13 * 0.5)


def test_what_others_can_fetch_is_told_apart():
    """In the memory of the host, from the first block on without a gap, whatever the device holds."""
    index = opened()
    index.hear(0, [run(TOKENS[:512]), run(TOKENS[:192], tier="cpu")], 0.0)
    index.hear(1, [run(TOKENS[:320], tier="cpu")], 0.0)
    index.hear(1, [Removed([103], tier="cpu")], 0.0)
    index.set_stream(2, LIVE, complete=True)
    known = index.match(asked(TOKENS[:500]), SLOTS, 0.0)
    assert known.columns[HOST_BLOCKS].tolist() == [3.0, 3.0, 0.0]
    index.set_stream(1, STALE, complete=True)
    known = index.match(asked(TOKENS[:500], TOKENS[:100]), SLOTS, 0.0)
    assert known.columns[HOST_BLOCKS].tolist() == [4.0, 0.0, 0.0]
    assert HOST_BLOCKS not in opened().match(asked(TOKENS[:500]), SLOTS, 0.0).columns


def test_a_hybrid_counts_up_to_where_all_its_groups_are():
    index = opened()
    index.hear(0, [
        run(TOKENS[:256]),
        Stored(hashes=[101], block_tokens=64, group=1, kind="mamba", sparse=True),
    ], 0.0)  # fmt: skip
    index.hear(1, [run(TOKENS[:256])], 0.0)
    assert held(index, asked(TOKENS[:300])) == [2, 4, 0]


def test_what_was_decided_lately_counts_until_it_is_told():
    """For a while, by `speculativeTTL`."""
    index = opened()
    given = asked(TOKENS[:300])
    recorded = index.record(given, 1, 10.0)
    assert held(index, asked(TOKENS[:400]), 11.0) == [0, 4, 0]
    # It tells of what was decided after it, and not of that.
    index.record(asked(TOKENS[512:600]), 1, 11.0)
    index.hear(1, [run(TOKENS[512:576], first=900)], 11.0)
    assert held(index, asked(TOKENS[:400]), 12.5) == [0, 0, 0]
    index.retract(given, 1, recorded, 11.0)
    assert held(index, asked(TOKENS[:400]), 11.0) == [0, 0, 0]


def exact_of(index, now):
    return index.match(asked(TOKENS[:300]), SLOTS, now).columns[EXACT].tolist()


def test_what_was_decided_counts_until_a_late_engine_tells_of_it():
    """Or of what was decided later: then it is gone, or was never computed."""
    index = opened()
    index.hear(0, [run(TOKENS[:64])], 0.0)
    first, second = asked(TOKENS[:300]), asked(TOKENS[512:800])
    index.record(first, 0, 10.0)
    for now in (11.5, 13.0, 14.5):
        index.expire(now)
        assert held(index, first, now) == [4, 0, 0]
    index.record(second, 0, 14.5)
    index.hear(0, [run(TOKENS[512:768], first=900)], 16.0)
    index.expire(16.0)
    assert held(index, first, 17.0) == [1, 0, 0]
    assert held(index, second, 17.0) == [4, 0, 0]
    assert exact_of(index, 17.0) == [1.0, 1.0, 1.0]


def test_an_engine_that_is_later_than_that_is_not_taken_to_tell_all():
    """Until it tells of something that was decided since."""
    index = opened()
    given = asked(TOKENS[:300])
    index.record(given, 0, 10.0)
    index.expire(10.0 + LATE_S_MAX)
    assert exact_of(index, 10.0 + LATE_S_MAX) == [1.0, 1.0, 1.0]
    index.expire(41.0)
    assert exact_of(index, 41.0) == [0.0, 1.0, 1.0]
    index.expire(42.0)
    assert held(index, given, 43.0) == [0, 0, 0]
    index.record(given, 0, 50.0)
    index.hear(0, [run(TOKENS[:256])], 51.0)
    assert exact_of(index, 52.0) == [1.0, 1.0, 1.0]


def test_what_was_not_sent_after_all_is_not_awaited():
    index = opened()
    given = asked(TOKENS[:300])
    index.retract(given, 0, index.record(given, 0, 10.0), 10.5)
    index.expire(41.0)
    assert exact_of(index, 41.0) == [1.0, 1.0, 1.0]


def test_of_an_endpoint_that_left_nothing_is_awaited():
    index = opened()
    index.record(asked(TOKENS[:300]), 0, 10.0)
    index.forget(0)
    index.set_stream(0, LIVE, complete=True)
    index.expire(41.0)
    assert exact_of(index, 41.0) == [1.0, 1.0, 1.0]


def test_what_was_decided_is_taken_back_without_its_tokens():
    """The lease keeps the chain and lets the prompt go."""
    index = opened()
    given = asked(TOKENS[:300])
    recorded = index.record(given, 1, 10.0)
    kept = given.without_prompts()
    assert kept.moment.token_ids == ()
    assert held(index, kept, 10.0) == [0, 4, 0], "how many tokens it had is kept"
    index.retract(kept, 1, recorded, 10.0)
    assert held(index, asked(TOKENS[:400]), 10.0) == [0, 0, 0]


def test_without_speculation_only_what_is_told_counts():
    index = opened(speculative_indexing=False)
    assert index.record(asked(TOKENS[:300]), 1, 10.0) is None
    assert held(index, asked(TOKENS[:400]), 10.0) == [0, 0, 0]


@pytest.mark.parametrize(
    ("state", "complete", "counts", "exact"),
    [
        (LIVE, True, True, 1.0),
        (LIVE, False, True, 0.0),
        (REPLAYING, False, True, 0.0),
        (STALE, True, False, 0.0),
        (StreamState.CONNECTING, False, False, 0.0),
        (StreamState.NONE, False, False, 0.0),
    ],
)
def test_a_stream_counts_as_it_stands(state, complete, counts, exact):
    """What a stale one said is there again when it comes back."""
    index = opened()
    index.hear(0, [run(TOKENS[:256])], 0.0)
    index.set_stream(0, state, complete=complete)
    known = index.match(asked(TOKENS[:300]), SLOTS, 0.0)
    assert known.matched.tolist() == [4 * counts, 0, 0]
    assert known.columns[EXACT].tolist() == [exact, 1.0, 1.0]
    index.set_stream(0, LIVE, complete=True)
    assert held(index, asked(TOKENS[:300])) == [4, 0, 0]


def test_an_engine_that_cleared_its_cache_holds_nothing():
    """Of all that came before, and of what was decided."""
    index = opened()
    index.record(asked(TOKENS[:300]), 0, 0.0)
    heard = index.hear(0, [run(TOKENS[:256]), Cleared(), run(TOKENS[512:640], first=900)], 0.0)
    assert heard.cleared
    assert held(index, asked(TOKENS[:300])) == [0, 0, 0]
    assert held(index, asked(TOKENS[512:700])) == [2, 0, 0]
    assert index.match(asked(TOKENS), SLOTS, 0.0).columns[EXACT][0] == 1.0


def test_an_endpoint_that_left_or_restarted_is_forgotten():
    """At once, whatever it held; who takes its place is a stranger."""
    index = opened()
    index.hear(0, [run(TOKENS)], 0.0)
    index.hear(1, [run(TOKENS)], 0.0)
    index.record(asked(TOKENS[:300]), 0, 0.0)
    index.forget(0)
    assert held(index, asked(TOKENS[:300])) == [0, 4, 0]
    index.hear(0, [run(TOKENS[:64])], 0.0)
    assert held(index, asked(TOKENS[:300])) == [1, 4, 0]


def test_what_is_silenced_keeps_what_was_decided():
    index = opened()
    index.hear(0, [run(TOKENS[:256])], 0.0)
    index.record(asked(TOKENS[:200]), 0, 0.0)
    index.silence(0)
    assert held(index, asked(TOKENS[:300])) == [3, 0, 0]


def test_forgetting_a_large_cache_takes_no_turn_of_the_loop(monkeypatch):
    """It is swept out bit by bit."""
    monkeypatch.setattr(module, "SWEPT_AT_ONCE_MAX", 4)
    monkeypatch.setattr(module, "SWEPT_MAX", 5)
    index = opened(16)
    index.hear(0, [run(TOKENS, 16)], 0.0)
    index.hear(1, [run(TOKENS[:64], 16)], 0.0)
    index.forget(0)
    assert held(index, asked(TOKENS[:300])) == [0, 4, 0]
    assert index.entries == 68
    sweeps = 0
    while index.entries > 4:
        before = index.entries
        index.expire(1.0)
        assert before - index.entries <= 5
        sweeps += 1
    assert sweeps == 13
    assert held(index, asked(TOKENS[:300])) == [0, 4, 0]
    assert index.measures().evictions["forgotten"] == 64


def test_an_engine_whose_stores_and_removals_do_not_balance_is_not_counted_any_more():
    """It is forgotten, and to be asked for all again."""
    index = opened()
    index.resize(0, 5, 64)
    assert not index.hear(0, [run(TOKENS[:256])], 0.0).unbalanced
    assert index.hear(0, [run(TOKENS[:256])], 0.0).unbalanced
    assert held(index, asked(TOKENS[:300])) == [0, 0, 0]
    index.hear(0, [run(TOKENS[:256]), run(TOKENS[:256]), Removed([103])], 0.0)
    assert held(index, asked(TOKENS[:300])) == [3, 0, 0]
    assert index.statistics.unbalanced == 1


def test_runs_that_wait_for_a_parent_are_held_with_it():
    """One behind the other, and the index knows all that the engine holds as before."""
    index = opened()
    index.hear(0, [run(TOKENS[256:384], first=104, parent=103)], 0.0)
    index.hear(0, [run(TOKENS[128:256], first=102, parent=101)], 0.0)
    assert held(index, asked(TOKENS[:400])) == [0, 0, 0]
    index.hear(0, [run(TOKENS[:128]), run(TOKENS[640:704], first=200)], 0.0)
    known = index.match(asked(TOKENS[:400]), SLOTS, 0.0)
    assert known.matched.tolist() == [6, 0, 0]
    assert known.columns[EXACT].tolist() == [1.0, 1.0, 1.0]
    assert index.bytes_estimated == 2 * 7 * ROW_BYTES


def test_above_its_memory_whoever_holds_most_gives_up_its_tails():
    """And says that it does not know all; who comes later gets its share."""
    index = opened(16, memory_max_bytes=2 * ROW_BYTES * 48)
    index.hear(0, [run(TOKENS[:640], 16)], 0.0)
    index.hear(1, [run(TOKENS[:160], 16)], 0.0)
    assert index.bytes_estimated <= 2 * ROW_BYTES * 48
    assert held(index, asked(TOKENS))[1] == 10
    index.hear(0, [run(TOKENS[512:], 16, first=5_000)], 0.0)
    known = index.match(asked(TOKENS), SLOTS, 0.0)
    assert known.columns[EXACT].tolist()[:2] == [0.0, 1.0]
    assert 0 < known.matched[0] <= 40
    assert index.bytes_estimated <= 2 * ROW_BYTES * 48
    index.limit_memory(0.25)
    for _ in range(8):
        index.expire(0.0)
    assert index.bytes_estimated <= 2 * ROW_BYTES * 12
    assert index.measures().evictions["memory"] > 0


def test_what_came_of_events_makes_the_same_index():
    """For a capture, which has no tokens."""
    index, again = opened(), opened()
    for events in ([run(TOKENS[:512])], [Removed([107, 106])], [Cleared(), run(TOKENS[:128])]):
        heard = index.hear(0, events, 0.0)
        if heard.cleared:
            again.clear(0)
        again.change(0, heard.changes)
        assert held(again, asked(TOKENS)) == held(index, asked(TOKENS))
    assert again.entries == index.entries == 2
    again.change(0, [Changed(True, "cpu", [1])])
    again.forget(0)
    assert again.entries == 0


def test_settings_are_adopted_but_for_what_keys_and_streams_rest_on():
    index = opened()
    index.hear(0, [run(TOKENS[:256], tier="cpu")], 0.0)
    weights = (TierWeight(name="cpu", weight=0.5),)
    assert settings_of(indexer_config=IndexerConfig(kv_cache_backend_configs=weights)).adopt(index)
    assert held(index, asked(TOKENS[:300])) == [2, 0, 0]
    assert settings_of(speculative_ttl=Duration(9.0)).adopt(index)
    index.record(asked(TOKENS[512:]), 1, 0.0)
    assert held(index, asked(TOKENS[512:]), 8.0) == [0, 7, 0]
    assert not settings_of(32).adopt(index)
    assert not settings_of(kv_events_config=KvEventsConfig(engine_type="sglang")).adopt(index)


@pytest.mark.parametrize(("pods", "bytes_max"), [(1, 148), (4, 136)])
def test_memory_is_what_is_estimated(pods, bytes_max):
    """An (endpoint, block), of unique content and of content that four have."""
    index = opened(live=range(pods))
    dice = Random(3)
    blocks = 16_384
    stores = []
    for start in range(0, blocks, 64):
        tokens = packed([dice.getrandbits(17) for _ in range(64 * 64)])
        hashes = [dice.getrandbits(64) for _ in range(64)]
        stores.append((start, tokens, hashes))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for slot in range(pods):
        for _, tokens, hashes in stores:
            event = Stored(hashes=[each + 0 for each in hashes], tokens=tokens, block_tokens=64)
            payload = msgspec.msgpack.encode(event.hashes)
            index.hear(slot, [Stored(msgspec.msgpack.decode(payload), None, tokens, 64)], 0.0)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert index.entries == pods * blocks
    assert grown / (pods * blocks) <= bytes_max
    assert 0.8 * grown <= index.bytes_estimated <= 1.4 * grown


@pytest.mark.parametrize(
    ("size", "ours"), [(1, 16), (1, 64), (4, 64), (15, 16), (1, 100), (16, 1_000)]
)
@pytest.mark.parametrize("in_a_row", [1, 1_024])
def test_memory_of_small_pages_is_what_is_estimated(size, ours, in_a_row):
    """Told one by one, each from the start or behind the one before, or in long runs."""
    for chained in (True, False):
        index = opened(ours, live=range(1))
        dice = Random(3)
        blocks = 8_192
        tokens = packed([dice.getrandbits(17) for _ in range(blocks * size)])
        hashes = [dice.getrandbits(64) for _ in range(blocks)]
        stores = []
        for start in range(0, blocks, in_a_row):
            parent = hashes[start - 1] if start and chained else None
            piece = tokens[start * size * 4 : (start + in_a_row) * size * 4]
            names = msgspec.msgpack.encode(hashes[start : start + in_a_row])
            stores.append((names, parent, piece))
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for names, parent, piece in stores:
            index.hear(0, [Stored(msgspec.msgpack.decode(names), parent, piece, size)], 0.0)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert index.mirror_of(0).counts.stored == blocks
        assert 0.9 * grown <= index.bytes_estimated


@pytest.mark.parametrize(("ours", "size"), [(16, 16), (64, 16), (16, 64), (64, 1), (64, 15)])
@pytest.mark.parametrize("shared", [False, True])
def test_a_process_grows_by_what_is_estimated(ours, size, shared):
    """Of content of their own, and of content that all have; numbers take more than they ask for."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not say how much memory a process has in /proc/self/statm")
    arguments = map(str, (ours, size, 20, int(shared)))
    asked_for = [sys.executable, "-m", "tests.core.knowledge.exact_growth", *arguments]
    told = subprocess.run(asked_for, capture_output=True, check=True)
    grown, estimated = json.loads(told.stdout)
    assert 0.8 * grown <= estimated <= 1.35 * grown


def test_an_engine_with_small_pages_stays_within_its_memory():
    """A hundred thousand pages of one token: in long runs, alone, in branches, removed in any order."""
    dice = Random(5)
    limit = 2 * ROW_BYTES * 4_000
    index = opened(16, memory_max_bytes=limit)
    for turn in range(400):
        tokens = [dice.getrandbits(17) for _ in range(250)]
        first = 1_000 * turn
        events = [run(tokens, 1, first=first)]
        for at, token in enumerate(tokens[:20]):
            events.append(
                run([token], 1, first=first + 500 + at, parent=first + dice.randrange(250))
            )
        removed = [dice.randrange(first + 250) for _ in range(100)]
        index.hear(turn % SLOTS, [*events, Removed(removed)], 0.0)
        assert index.bytes_estimated <= limit
        index.expire(0.0)
    assert index.match(asked(TOKENS), SLOTS, 0.0).columns[EXACT].tolist() == [0.0] * SLOTS
    for slot in range(SLOTS):
        index.forget(slot)
    for _ in range(8):
        index.expire(0.0)
    assert index.bytes_estimated == index.entries == 0


def test_blocks_of_many_keys_are_noted_for_little_more_than_the_memory_there_is():
    """What is left is not worked out for each message; these blocks take three times what they reserve."""
    limit = 2 * ROW_BYTES * 20_000
    index = opened(16, memory_max_bytes=limit)
    dice = Random(9)
    for first in range(0, 30_000, 500):
        tokens = packed([dice.getrandbits(17) for _ in range(500 * 64)])
        index.hear(0, [Stored([*range(first, first + 500)], None, tokens, 64)], 0.0)
    assert index.bytes_estimated <= limit + 6 * ROW_BYTES * KNOWN_SPARE_MAX
    assert index.match(asked(TOKENS), SLOTS, 0.0).columns[EXACT].tolist()[0] == 0.0


def test_a_prompt_that_is_told_in_small_pages_is_awaited_as_any_other():
    """What was decided and is not told counts until it is, and no longer."""
    index = opened()
    given = asked(TOKENS[:300])
    index.hear(0, [run(TOKENS[900:1000], 1, first=5_000)], 0.0)
    index.record(given, 0, 10.0)
    assert held(index, given, 14.0) == [4, 0, 0]
    index.hear(0, [run(TOKENS[:300], 1)], 14.0)
    assert held(index, given, 15.0) == [4, 0, 0]
    index.hear(0, [Removed([*range(399, 99, -1)])], 15.0)
    assert held(index, given, 30.0) == [0, 0, 0]


# What a real engine did.


def frames_of(truth, form):
    for _, _, encoded in lines_of(truth / "kv_events.jsonl", tuple[str, str, str]):
        payload = base64.b64decode(encoded)
        if form == "array":
            at, events, rank = msgspec.msgpack.decode(payload)
            payload = msgspec.msgpack.encode([at, [[*event.values()] for event in events], rank])
        yield payload


def belongs(batch, tokens, done):
    """Where the blocks end that a frame stores of `tokens`, if it stores none but such."""
    for event in batch.events:
        if isinstance(event, Stored):
            at = next(
                (at for at in range(done, len(tokens), 128) if tokens.startswith(event.tokens, at)),
                None,
            )
            if at is None:
                return None
            done = at + len(event.tokens)
    return done


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("block_tokens", [32, 64])
def test_a_real_engine_is_predicted_exactly(form, block_tokens):
    """300 of 300 `cached_tokens`, from nothing but its frames; in blocks twice as long, whole ones."""
    truth = validate.RECORDINGS / "vllm-0.32-cpu"
    index = opened(block_tokens, live=[0])
    index.resize(0, 200, 32)
    batches = [read_payload(payload) for payload in frames_of(truth, form)]
    assert len(batches) == 699
    assert not any(batch.faults for batch in batches)
    predicted, reported = [], []
    at = 0
    for row in lines_of(truth / "sequential.jsonl", Recorded):
        known = index.match(asked(row.prompt_token_ids), 1, 0.0)
        predicted.append(int(known.matched[0]) * block_tokens)
        reported.append(row.cached_tokens // block_tokens * block_tokens)
        tokens = packed(row.prompt_token_ids + row.output_token_ids)
        done = 0
        while at < len(batches) and (ends := belongs(batches[at], tokens, done)) is not None:
            index.hear(0, batches[at].events, 0.0)
            done = ends
            at += 1
    assert at == len(batches)
    assert len(predicted) == 300
    assert predicted == reported
    mirror = index.mirror_of(0)
    assert (len(mirror), mirror.copies, mirror.counts.unknown) == (198, 198, 0)


def test_a_late_join_never_promises_more_than_is_held():
    """Whatever came before: misses only."""
    truth = validate.RECORDINGS / "vllm-0.32-cpu"
    batches = [read_payload(payload) for payload in frames_of(truth, "map")]
    rows = [*lines_of(truth / "sequential.jsonl", Recorded)]
    whole = opened(32, live=[0])
    for batch in batches:
        whole.hear(0, batch.events, 0.0)
    for missed in (1, 50, 350, 600, 690):
        late = opened(32, live=[0])
        for batch in batches[missed:]:
            late.hear(0, batch.events, 0.0)
        for row in rows[::7]:
            given = asked(row.prompt_token_ids)
            assert late.match(given, 1, 0.0).matched <= whole.match(given, 1, 0.0).matched


def test_a_pool_of_engines_of_every_kind_is_followed():
    """Block sizes, forms and hashes differ; each is predicted up to whole blocks of ours."""
    dice = Random(5)
    engines = [
        FakeEngine(40, 16, form="array"),
        FakeEngine(20, 32, digests=True, seed=b"x"),
        FakeEngine(10, 64),
    ]
    index = opened()
    heads = [[dice.getrandbits(17) for _ in range(160)] for _ in range(4)]
    for _ in range(300):
        slot = dice.randrange(SLOTS)
        prompt = dice.choice(heads) + [dice.getrandbits(2) for _ in range(dice.randrange(200))]
        believed = held(index, asked(prompt))[slot] * 64
        assert believed == engines[slot].serve(prompt) // 64 * 64
        index.hear(slot, read_payload(engines[slot].step()).events, 0.0)
