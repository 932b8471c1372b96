"""Profiles: step times against measured anchors, and profiles of one's own."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.profiles import (
    DEFAULT_PROFILE,
    KVWindow,
    Memory,
    Profile,
    ProfileError,
    StepWork,
    built_in_profiles,
    find_profile,
    profile_as_toml,
    profiles_in,
)


def prefill_s(name, tokens):
    profile = find_profile(name)
    work = StepWork(tokens=tokens, prefills=1, attention_pairs=tokens**2 / 2, sequences=1)
    return profile.step_s(work)


def test_the_peak_prefill_speed_is_the_one_that_was_measured():
    """The guide optimized-baseline of llm-d: 15,928 tokens/s of Qwen3-32B on two H100s."""
    speed = find_profile("qwen3-32b-h100-tp2").prefill_tokens_per_s(8_192)
    assert speed == pytest.approx(15_928, rel=0.01)


@pytest.mark.parametrize("name", built_in_profiles())
def test_steps_of_more_tokens_prefill_faster_until_attention_takes_over(name):
    """What a step costs besides its tokens is shared; a table may have its own kinks."""
    profile = find_profile(name)
    assert profile.prefill_tokens_per_s(64) < profile.prefill_tokens_per_s(2_048)
    assert profile.prefill_tokens_per_s(2_048) == pytest.approx(2_048 / prefill_s(name, 2_048))


def decode_s(name, requests, context):
    work = StepWork(
        tokens=requests,
        decodes=requests,
        decode_context_tokens=requests * context,
        sequences=requests,
    )
    return find_profile(name).step_s(work)


@pytest.mark.parametrize(
    ("name", "tokens", "expected_ms"),
    [
        ("llama-3.1-8b-h100-tp1", 2048, 43.5),
        ("llama-3.1-8b-h100-tp1", 8192, 200),
        ("qwen3-32b-h100-tp2", 2048, 107),
        ("qwen3-32b-h100-tp2", 8192, 514),
        ("llama-3.1-70b-h100-tp4", 2048, 130),
        ("llama-3.1-70b-h100-tp4", 8192, 577),
        ("llama-3.1-70b-h100-tp8", 8192, 344),
    ],
)
def test_a_prefill_takes_what_was_measured(name, tokens, expected_ms):
    """One chunk is within 20 % of operator-level runs, or of the published 15,928 tokens/s."""
    assert prefill_s(name, tokens) * 1e3 == pytest.approx(expected_ms, rel=0.20)


@pytest.mark.parametrize(
    ("name", "requests", "context", "expected_ms"),
    [
        ("llama-3.1-8b-h100-tp1", 8, 1024, 6.6),
        ("llama-3.1-8b-h100-tp1", 64, 1024, 10.4),
        ("llama-3.1-8b-h100-tp1", 32, 4096, 12.4),
        ("qwen3-32b-h100-tp2", 8, 1024, 15.7),
        ("qwen3-32b-h100-tp2", 32, 4096, 22.0),
        ("llama-3.1-70b-h100-tp4", 1, 1024, 15.1),
    ],
)
def test_a_decode_takes_what_was_measured(name, requests, context, expected_ms):
    """Without the host's time a decode step is within 20 % of operator-level runs."""
    ours_s = decode_s(name, requests, context) - find_profile(name).host_s
    assert ours_s * 1e3 == pytest.approx(expected_ms, rel=0.20)


@pytest.mark.parametrize(
    ("name", "weight_bytes", "kv_bytes_per_token", "tensor_parallel"),
    [
        ("llama-3.1-8b-h100-tp1", 16.06e9, 131_072, 1),
        ("llama-3.1-8b-a100-tp1", 16.06e9, 131_072, 1),
        ("qwen3-32b-h100-tp2", 65.5e9, 262_144, 2),
        ("llama-3.1-70b-h100-tp4", 141.1e9, 327_680, 4),
        ("llama-3.1-70b-h100-tp8", 141.1e9, 327_680, 8),
    ],
)
def test_the_cache_is_what_the_memory_leaves(
    name, weight_bytes, kv_bytes_per_token, tensor_parallel
):
    """The KV tokens of the 80 GB profiles are those of the formula, within 2 %."""
    memory = Memory(
        bytes=80 * 2**30,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        tensor_parallel=tensor_parallel,
    )
    assert memory.kv_tokens == pytest.approx(find_profile(name).kv_tokens, rel=0.02)


@given(st.sampled_from(sorted(built_in_profiles())), st.integers(1, 8192), st.integers(1, 500))
def test_more_tokens_take_no_less_time(name, tokens, more):
    """Linear layers grow with their tokens, in every profile, but for noise in measured tables."""
    profile = find_profile(name)
    now, then = profile.linear_layers_s(tokens), profile.linear_layers_s(tokens + more)
    assert then >= now * 0.999


def table(tokens, seconds, **fields):
    base = msgspec.structs.replace(find_profile("llama-3.1-8b-h100-tp1"), linear_s_per_token=1e-5)
    return msgspec.structs.replace(base, linear_tokens=tokens, linear_s=seconds, **fields)


@pytest.mark.parametrize(
    ("tokens", "expected_s"), [(1, 0.01), (10, 0.01), (15, 0.015), (20, 0.02), (120, 0.021)]
)
def test_a_table_is_read_between_its_points(tokens, expected_s):
    """Straight lines between the points, the first before them, the slope behind them."""
    profile = table((10, 20), (0.01, 0.02))
    assert profile.linear_layers_s(tokens) == pytest.approx(expected_s)


def test_skew_counts_the_longest_context_for_all():
    """With skew 1 a batch is as slow as if all had the longest context; with 0 the sum counts."""
    base = find_profile("llama-3.1-8b-h100-tp1")
    uneven = StepWork(
        tokens=2, decodes=2, decode_context_tokens=5000, longest_context_tokens=4000, sequences=2
    )
    even = msgspec.structs.replace(uneven, decode_context_tokens=8000)
    skewed = msgspec.structs.replace(base, skew=1.0)
    assert skewed.step_s(uneven) == pytest.approx(base.step_s(even))


def test_decodes_beside_a_chunk_may_be_slower():
    """The factor counts only in steps that compute chunks too."""
    base = find_profile("llama-3.1-8b-h100-tp1")
    slow = msgspec.structs.replace(base, mixed_decode_factor=2.0)
    work = StepWork(tokens=9, decodes=8, decode_context_tokens=8000, sequences=8)
    assert slow.step_s(work) == base.step_s(work)
    mixed = msgspec.structs.replace(work, prefills=1)
    more_s = slow.step_s(mixed) - base.step_s(mixed)
    assert more_s == pytest.approx(8000 * base.decode_s_per_context_token)


def test_a_profile_may_be_like_another(tmp_path):
    """What a file does not say is taken from the profile that it names; memory gives KV tokens."""
    file = tmp_path / "mine.toml"
    file.write_text(
        '[one]\nlike = "llama-3.1-8b-h100-tp1"\nhost_s = 0.004\n'
        '[two]\nlike = "one"\nmemory = {bytes = 48e9, weight_bytes = 16e9, '
        "kv_bytes_per_token = 131072}\n"
    )
    profiles = profiles_in(file)
    assert profiles["one"] == msgspec.structs.replace(
        find_profile("llama-3.1-8b-h100-tp1"), name="one", host_s=0.004
    )
    assert profiles["two"].host_s == 0.004
    assert 150_000 < profiles["two"].kv_tokens < 180_000
    assert find_profile(f"{file}:two") == profiles["two"]
    with pytest.raises(ProfileError, match="no profile 'three'; expected one of one, two"):
        find_profile(f"{file}:three")
    with pytest.raises(ProfileError, match=r"expected .*mine\.toml:NAME with one of one, two"):
        find_profile(str(file))


@pytest.mark.parametrize("name", sorted(built_in_profiles()))
def test_a_profile_survives_its_file(tmp_path, name):
    """What is written is read back, to the digits that are written."""
    file = tmp_path / "profile.toml"
    file.write_text(profile_as_toml(find_profile(name), {"host_s": "a comment"}))
    again = find_profile(str(file))
    assert again.linear_tokens == find_profile(name).linear_tokens
    for field in Profile.__struct_fields__:
        mine, theirs = getattr(again, field), getattr(find_profile(name), field)
        assert mine == (
            theirs if isinstance(theirs, str | None) else pytest.approx(theirs, rel=1e-5)
        )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "at least one table"),
        ("a = 1", "expected a table"),
        ("[a]\nlike = [1]", "like: no profile"),
        ('[a]\nlike = "nobody"', "no profile 'nobody' before it"),
        ("[a]\nhost_s = 1.0", "needs field"),
        ('[a]\nlike = "llama-3.1-8b-h100-tp1"\nhots_s = 1.0', "unknown field `hots_s`"),
        ('[a]\nlike = "llama-3.1-8b-h100-tp1"\nlinear_tokens = [2, 1]', "differ in length"),
        (
            '[a]\nlike = "llama-3.1-8b-h100-tp1"\nlinear_tokens = [2, 1]\nlinear_s = [1.0, 2.0]',
            "do not ascend",
        ),
        ("[a", "Expected ']' at the end of a table"),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(tmp_path, text, sentence):
    """File, profile and what was expected are named."""
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ProfileError, match=sentence) as caught:
        profiles_in(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("kv_tokens = -5", "kv_tokens: expected a whole number of at least 256"),
        ("kv_tokens = 10", "kv_tokens: expected a whole number of at least 256"),
        ("max_model_len_tokens = 0", "max_model_len_tokens: expected a whole number of at least 1"),
        ("max_num_seqs = 0", "max_num_seqs: expected a whole number of at least 1"),
        (
            "max_num_batched_tokens = 0",
            "max_num_batched_tokens: expected a whole number of at least 1",
        ),
        ("max_num_seqs = 9000", "max_num_batched_tokens is 8192; expected at least max_num_seqs"),
        ("pair_s = nan", "pair_s: expected a number of at least 0"),
        ("pair_s = -1.0", "pair_s: expected a number of at least 0"),
        ("host_s = inf", "host_s: expected a number of at most 60"),
        ("shared_context_factor = 1.5", "shared_context_factor: expected a number of at most 1"),
        ("linear_tokens = [1, 2]\nlinear_s = [0.1, nan]", r"linear_s\[.*\]: expected a number"),
        ("linear_tokens = [1]\nlinear_s = [0.0]", r"linear_s\[.*\]: expected a number"),
        (
            "memory = {bytes = 1, weight_bytes = 2, kv_bytes_per_token = 0}",
            "memory: kv_bytes_per_token: expected a whole number of at least 1",
        ),
        (
            "memory = {bytes = 1, weight_bytes = 2, kv_bytes_per_token = 8}",
            "memory: the weights leave -.* tokens for the KV cache; expected at least 256",
        ),
        (
            "memory = {bytes = nan, weight_bytes = 2, kv_bytes_per_token = 8}",
            "memory: bytes: expected a number",
        ),
        ("memory = 5", "memory: expected a mapping"),
    ],
)
def test_a_number_that_no_engine_has_is_refused(tmp_path, line, sentence):
    """File, profile, field and what was expected of it."""
    file = tmp_path / "bad.toml"
    file.write_text(f'[mine]\nlike = "llama-3.1-8b-h100-tp1"\n{line}\n')
    with pytest.raises(ProfileError, match=sentence) as caught:
        find_profile(str(file))
    assert str(caught.value).startswith(f"{file}: mine: ")
    assert "\n" not in str(caught.value)


def test_an_unknown_profile_is_refused_with_those_there_are():
    """A name that is no profile and no file."""
    with pytest.raises(ProfileError, match=r"No profile 'h100'; expected one of .*rtx-4090"):
        find_profile("h100")


def test_a_curve_of_experts_is_read_with_straight_lines():
    """Flat before its first point, and beyond the last as between the last two."""
    usual = find_profile(DEFAULT_PROFILE)
    profile = msgspec.structs.replace(
        usual, expert_tokens=(10, 110, 210), expert_s=(1e-3, 2e-3, 4e-3)
    )
    told = [profile.expert_layers_s(tokens) for tokens in (1, 10, 60, 160, 310)]
    assert told == pytest.approx([1e-3, 1e-3, 1.5e-3, 3e-3, 6e-3])
    work = StepWork(tokens=60, prefills=1, sequences=1)
    assert profile.step_s(work) == pytest.approx(usual.step_s(work) + 1.5e-3)
    assert usual.expert_layers_s(60) == 0.0


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            "expert_tokens = [1, 2]\nexpert_s = [0.1]",
            "expert_tokens and expert_s must have the same length",
        ),
        (
            "expert_tokens = [1]\nexpert_s = [0.1]",
            "expert_tokens and expert_s must have the same length",
        ),
        ("expert_tokens = [2, 1]\nexpert_s = [0.1, 0.2]", "expert_tokens do not ascend"),
        ("expert_tokens = [1, 2]\nexpert_s = [0.2, 0.1]", "expert_s decreases"),
    ],
)
def test_a_curve_of_experts_that_cannot_be_is_refused(tmp_path, lines, told):
    """With the file and the profile."""
    file = tmp_path / "mine.toml"
    file.write_text(f'[mine]\nlike = "{DEFAULT_PROFILE}"\n{lines}\n')
    with pytest.raises(ProfileError, match=rf"mine\.toml: mine: {told}"):
        profiles_in(file)


def test_layers_with_a_window_move_at_most_their_window():
    """The KV cache of a part of a prompt, as far as layers keep it."""
    profile = find_profile(DEFAULT_PROFILE)
    assert profile.kv_bytes(1_000) == 1_000 * profile.kv_bytes_per_token
    window = KVWindow(tokens=128, bytes_per_token=10, other_bytes_per_token=1_000)
    windowed = msgspec.structs.replace(profile, kv_window=window)
    assert windowed.kv_bytes(100) == 100 * 1_010
    assert windowed.kv_bytes(1_000) == 1_000 * 1_000 + 128 * 10


def test_built_in_profiles_know_their_layers():
    """Layer-wise transfers need them; a head of 128 with 8 KV heads in 16 bits explains the size."""
    for profile in built_in_profiles().values():
        if profile.kv_bytes_per_token:
            assert profile.kv_bytes_per_token == profile.layers * 2 * 8 * 128 * 2
