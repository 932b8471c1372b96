"""Caches by name."""

import msgspec
import pytest

from sim.caches.kronk_imc_v1 import KronkImcV1
from sim.caches.names import (
    BEHAVIOURS,
    NAMES,
    CacheNameError,
    cache_named,
    cache_spelt,
    check_cache,
)
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import KV_TOKENS_MIN
from tests.sim.caches.made import PROFILE


@pytest.mark.parametrize("name", NAMES)
def test_a_name_alone_is_the_cache_with_its_defaults(name):
    """And is spelt so again."""
    assert cache_spelt(cache_named(name)) == name


def test_parameters_are_told_behind_a_colon():
    """Numbers and truth values, as text."""
    cache = cache_named("kronk-imc-v1:slots=8")
    assert cache == KronkImcV1(slots=8)
    assert cache_spelt(cache) == "kronk-imc-v1:slots=8"
    assert cache_named("mlx-memory:trimmable=false,entries_max=2").trimmable is False


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lru", r"No cache 'lru'; expected one of vllm, ruvllm-faithful"),
        ("vllm:slots=2", "No cache"),
        ("kronk-imc-v1:slot=2", "No parameter 'slot=2' .* one of slots, cache_min_tokens"),
        ("kronk-imc-v1:slots", "No parameter 'slots'"),
        ("kronk-imc-v1:slots=0", r"kronk-imc-v1:slots=0.*at least 1\."),
        ("kronk-imc-v1:slots=two", "slots"),
        ("ruvllm-fixed:memory_share=nan", "memory_share"),
        ("ruvllm-fixed:memory_share=1", "at most 0.9"),
        ("kronk-spc:bytes_per_s=1e-300", "at least 1000000"),
        ("kronk-spc:bytes_per_s=inf", "at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(text, told):
    """In one sentence."""
    with pytest.raises(CacheNameError, match=told):
        cache_named(text)


@pytest.mark.parametrize("share", ["1e-9", "0.9"])
def test_the_least_cache_is_shared_too(share):
    """Of the smallest profile there is, requests and prompts get something each."""
    profile = msgspec.structs.replace(PROFILE, kv_tokens=KV_TOKENS_MIN)
    kind = PodKind.of(profile, cache=cache_named(f"ruvllm-fixed:memory_share={share}"))
    assert 16 <= kind.request_tokens_max <= KV_TOKENS_MIN
    assert kind.cache.bytes_max(profile) > 0


def test_a_profile_that_does_not_say_its_bytes_is_refused():
    """All count bytes, but vLLM's."""
    profile = msgspec.structs.replace(PROFILE, kv_bytes_per_token=0)
    check_cache(None, profile)
    for name in BEHAVIOURS:
        with pytest.raises(CacheNameError, match="has no kv_bytes_per_token"):
            check_cache(cache_named(name), profile)
