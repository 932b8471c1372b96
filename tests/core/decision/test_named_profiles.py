"""Profiles that a request header names, and requests for a cached prompt only."""

import pytest
from msgspec import structs

from epp.core.decision.if_available import if_available
from epp.core.decision.stages import Always, Stages, Uncached
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.types import Refusal, RefusalReason
from epp.plugins.encoder_cache import EncoderCacheSettings
from tests.builders import PREFIX
from tests.core.decision.staged import BOTH, DECODE, ENCODE, PREFILL, chat, pool_of, sums

PHASES = {"encode": ENCODE, "prefill": PREFILL, "decode": DECODE}
BY_HEADER = Stages(decode=DECODE, named=PHASES, header="epp-profile")
POOL = ["prefill", "decode", "encode"]
IMAGES = "mm-embeddings-cache-producer"
IMAGE = (b"digest-of-an-image",)
AVAILABLE = {"prefer": "if-available"}


def asked(made, profile=None, *, available=False, **fields):
    headers = {} if profile is None else {"epp-profile": profile}
    headers |= AVAILABLE if available else {}
    return made.schedule(chat(headers=headers, **fields), 0.1)


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("prefill", "pod-0"),
        ("decode", "pod-1"),
        ("encode", "pod-2"),
        (None, "pod-1"),
        ("", "pod-1"),
    ],
)
def test_the_header_names_the_profile(profile, name):
    decision = asked(pool_of(POOL, BY_HEADER), profile)
    assert decision.endpoint.name == name
    assert [leg.stage for leg in decision.account.legs] == ["decode"]


def test_an_unknown_name_is_the_clients_fault():
    """400, not 429, and nothing is counted."""
    made = pool_of(POOL, BY_HEADER)
    refusal = asked(made, "preffil")
    assert (refusal.status, refusal.reason) == (400, RefusalReason.BAD_REQUEST)
    assert "'preffil'" in refusal.message
    assert "encode or prefill or decode" in refusal.message
    assert sums(made) == (0, 0, 0, 0)


def test_a_single_profile_serves_whatever_the_header_says():
    only = Stages(decode=DECODE, named={"decode": DECODE}, header="epp-profile")
    assert asked(pool_of(POOL, only), "prefill").endpoint.name == "pod-1"


def test_each_phase_counts_its_own_work():
    """The request that decodes was prefilled by an earlier one."""
    made = pool_of(POOL, BY_HEADER)
    for profile, tokens in (("prefill", 512.0), ("encode", 0.0), ("decode", 0.0), (None, 512.0)):
        assert asked(made, profile, text=str(profile).encode()).lease.uncached_tokens == tokens


def test_each_phase_records_its_own_cache():
    """Media where they are encoded, prompts where they are computed."""
    indexes = {PREFIX: PrefixIndexSettings(), IMAGES: EncoderCacheSettings()}
    made = pool_of(POOL, BY_HEADER, indexes=indexes)
    recorded = {
        profile: set(asked(made, profile, media=[IMAGE]).lease.recorded) for profile in PHASES
    }
    assert recorded == {"encode": {IMAGES}, "prefill": {PREFIX}, "decode": {PREFIX}}


# --- Prefer: if-available ---


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("if-available", True),
        ("If-Available", True),
        ("respond-async, if-available", True),
        ("if-available;wait=3", True),
        ('if-available="1"', True),
        ("respond-async", False),
        ("if-available-now", False),
        ("wait=if-available", False),
        ("", False),
    ],
)
def test_the_preference_is_read_as_rfc_7240_writes_it(value, wanted):
    assert if_available({"prefer": value}) is wanted
    assert not if_available({})


def test_a_prompt_that_is_not_cached_is_refused_with_412_and_leaves_nothing():
    """No lease and no record: the next request finds the same state."""
    made = pool_of(POOL, BY_HEADER)
    refusal = asked(made, "decode", available=True)
    assert (refusal.status, refusal.reason) == (412, RefusalReason.NOT_CACHED)
    assert "0 of 512 prompt tokens are cached at pod-1" in refusal.message
    assert sums(made) == (0, 0, 0, 0)
    assert made.decisions == 0
    assert isinstance(asked(made, "decode", available=True), Refusal)
    asked(made, "decode")
    cached = asked(made, "decode", available=True)
    assert cached.endpoint.name == "pod-1"
    assert cached.leg.matched_blocks == 8
    assert cached.lease.uncached_tokens == 0.0


@pytest.mark.parametrize(
    ("tokens", "limit", "refused"),
    [(512, 128, False), (640, 128, True), (639, 128, False), (2_000, 0, False)],
)
def test_the_decider_says_how_many_tokens_may_be_uncached(tokens, limit, refused):
    made = pool_of(POOL, structs.replace(BY_HEADER, prefill_if=Uncached(limit)))
    asked(made, "decode")
    assert isinstance(asked(made, "decode", available=True, tokens=tokens), Refusal) is refused


def test_a_short_prompt_passes_a_decider():
    made = pool_of(POOL, structs.replace(BY_HEADER, prefill_if=Uncached(128)))
    assert asked(made, "decode", available=True, tokens=100).endpoint.name == "pod-1"


def test_stages_of_the_picker_prefill_nothing_for_such_a_request():
    """The client wants the decode endpoint's own cache, or 412."""
    made = pool_of(POOL, BOTH)
    assert isinstance(made.schedule(chat(headers=AVAILABLE), 0.1), Refusal)
    first = made.schedule(chat(), 0.1)
    assert first.prefiller is not None
    second = made.schedule(chat(headers=AVAILABLE), 0.2)
    assert (second.endpoint.name, second.prefiller) == ("pod-1", None)


def test_a_configuration_of_one_profile_ignores_the_preference():
    made = pool_of([None], Stages(decode=DECODE, prefill_if=Always()))
    assert made.schedule(chat(headers=AVAILABLE), 0.1).endpoint.name == "pod-0"
