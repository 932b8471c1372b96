"""LiteLLM logs, raw requests, and workload files: what they share comes out as they say."""

import json

import pytest

from epp.core.types import BYTES_PER_TOKEN
from sim.traces.arrival import TraceError
from sim.traces.formats import open_trace
from sim.traces.prompts import request_of, request_through_bytes
from sim.traces.reading import ReadOptions


@pytest.fixture
def trace_of(tmp_path):
    def make(text, **options):
        path = tmp_path / "trace"
        lines = text if isinstance(text, str) else "\n".join(map(json.dumps, text))
        path.write_text(lines)
        return open_trace(path, ReadOptions(**options))

    return make


ROW = {
    "request_id": "r",
    "startTime": "2026-11-01T10:00:00.500Z",
    "model": "m",
    "prompt_tokens": 1000,
    "completion_tokens": 50,
    "session_id": "s",
}
HASHES = ["00000000000000aa", "ffffffffffffffff"]


@pytest.mark.parametrize(
    "place",
    [
        {"prefix_block_hashes": HASHES},
        {"metadata": {"prefix_block_hashes": HASHES}},
        {"metadata": json.dumps({"prefix_block_hashes": HASHES})},
        {"metadata": {"extra": {"prefix_block_hashes": {"block_size": 512, "hashes": HASHES}}}},
    ],
)
def test_litellm_hashes_are_found_wherever_the_export_puts_them(trace_of, place):
    """Top level, metadata as an object or as a string, a list or an object with a list."""
    trace = trace_of([{**ROW, **place}, {**ROW, "startTime": "2026-11-01 10:00:02.500"}])
    first, second = trace
    assert trace.format.name == "litellm"
    assert list(first.spans()) == [(0xAA, 512)]
    assert (first.model, first.session, first.output_tokens) == ("m", "s", 50)
    assert second.time_s == 2.0
    assert second.shareable_tokens == 0


def test_litellm_rows_that_never_reached_the_model_are_no_arrivals(trace_of):
    """Failed ones, and those that LiteLLM answered from its own cache."""
    rows = [ROW, {**ROW, "status": "failure"}, {**ROW, "cache_hit": "True"}, ROW]
    assert [one.index for one in trace_of(rows)] == [0, 3]


def test_a_litellm_hash_that_is_none_is_named(trace_of):
    """Sixteen hexadecimal digits are expected."""
    rows = [{**ROW, "metadata": {"prefix_block_hashes": ["00000000000000aa", "xyz"]}}]
    with pytest.raises(TraceError, match=r"trace:1: prefix_block_hashes\[1\]: Expected 16 hex"):
        list(trace_of(rows))


@pytest.mark.parametrize("size", [-64, 0, True, "64", 1.5])
def test_a_litellm_block_size_that_is_none_is_named(trace_of, size):
    """Rather than taken for what is usual."""
    found = {"block_size": size, "hashes": HASHES}
    rows = [{**ROW, "metadata": {"prefix_block_hashes": found}}]
    problem = "prefix_block_hashes.block_size: Expected an integer of at least 1, got"
    with pytest.raises(TraceError, match=f"trace:1: {problem}"):
        list(trace_of(rows))


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (json.dumps(ROW)[:-1] + f', "metadata": {{"a": {DEEP}}}}}', "trace:1: Expected JSON"),
        (f'{{"model": "m", "messages": {DEEP}}}', "trace:1: Expected JSON"),
        (f"data: {DEEP[99_000:101_000]}\nload: 1\n", "trace: Expected YAML"),
    ],
)
def test_what_is_nested_too_deeply_is_malformed(trace_of, text, problem):
    """In every format, also where the first line tells the format."""
    with pytest.raises(TraceError, match=problem + " that is nested less deeply"):
        list(trace_of(text))


LONG = "Be brief. " * 200
CHAT = {"model": "m", "messages": [{"role": "system", "content": LONG}], "max_tokens": 9}


def asked(text):
    return {**CHAT, "messages": [*CHAT["messages"], {"role": "user", "content": text}]}


def test_raw_requests_share_as_production_says_in_both_ways(trace_of):
    """The picker's blocks of the recorded bodies, and those made of their hashes, match alike."""
    bodies = [asked("One?"), asked("One? " * 50), asked("Two? " * 50), CHAT]
    arrivals = list(trace_of(bodies))
    for make in (request_of, request_through_bytes):
        chains = [make(one).chains_of(64 * BYTES_PER_TOKEN, 1000)[0] for one in arrivals]
        assert [len(chain) // 8 for chain in chains] == [7, 8, 8, 7]
        assert chains[0][:56] == chains[1][:56] == chains[2][:56]
        assert chains[1] != chains[2]
    for one in arrivals:
        assert request_of(one).prompt_tokens == request_through_bytes(one).prompt_tokens


def test_a_batch_file_brings_time_path_and_the_length_of_the_answer(trace_of):
    """A limit in the body is only what is left when nothing was measured."""
    lines = [
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "timestamp": 100.0,
            "body": {"model": "m", "prompt": LONG, "max_tokens": 700},
            "output_tokens": 33,
        },
        {
            "url": "/v1/chat/completions",
            "timestamp": "1970-01-01T00:01:42Z",
            "body": CHAT,
            "response": {"body": {"usage": {"completion_tokens": 44}}},
        },
        {
            "path": "/v1/completions",
            "timestamp": 103,
            "body": json.dumps({"model": "m", "prompt": LONG}),
        },
    ]
    trace = trace_of(lines)
    assert trace.format.name == "openai"
    assert [(one.time_s, one.path, one.output_tokens) for one in trace] == [
        (0, "/v1/completions", 33),
        (2, "/v1/chat/completions", 44),
        (3, "/v1/completions", 128),
    ]


def test_bodies_without_times_come_at_the_rate_that_was_asked_for(trace_of):
    """Evenly."""
    assert [one.time_s for one in trace_of([CHAT] * 3, rate_per_s=4.0)] == [0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"model": "", "prompt": "x"}, "model: The body for completions names no model"),
        ({"model": "m", "prompt": ["a", "b"]}, "prompt: Expected one prompt, got 2"),
        ({"model": "m", "prompt": ""}, "prompt: Expected at least one token, got an empty prompt"),
        ({"model": "m", "temperature": 1}, "Expected one of the members messages, prompt, input"),
    ],
)
def test_a_raw_request_that_cannot_be_replayed_is_named(trace_of, body, problem):
    """In production's own words where it refuses."""
    with pytest.raises(TraceError, match="trace:2: " + problem):
        list(trace_of([CHAT, body]))


def test_the_shortest_raw_request_has_a_token(trace_of):
    """Though production, which counts by bytes, sees none."""
    [one] = trace_of([{"model": "m", "prompt": "hi"}])
    assert (one.prompt_tokens, one.shareable_tokens) == (1, 0)


SHARED_PREFIX = """
load:
  type: poisson
  interval: 10
  stages:
  - {rate: 20, duration: 10}
  - {rate: 40, duration: 5}
  lora_traffic_split:
  - {name: one, split: 0.5}
  - {name: two, split: 0.5}
server: {type: vllm, base_url: "http://x"}
data:
  type: shared_prefix
  shared_prefix:
    num_groups: 3
    num_prompts_per_group: 5
    system_prompt_len: 640
    question_len: 100
    output_distribution: {type: uniform, min: 10, max: 20, mean: 15}
"""


def test_a_shared_prefix_workload_has_its_groups_lengths_and_stages(trace_of):
    """Fifteen prompts in three groups, again and again; nobody asks between the stages."""
    trace = trace_of(SHARED_PREFIX)
    found = list(trace)
    assert trace.format.name == "inference-perf"
    assert len({one.blocks[0] for one in found}) == 3
    assert len({one.blocks for one in found}) == 15
    assert {one.lengths for one in found} == {(640, 100)}
    assert all(10 <= one.output_tokens <= 20 for one in found)
    assert {one.adapter for one in found} == {"one", "two"}
    # Times are from the first arrival, which comes soon after the start.
    assert not any(10 < one.time_s < 19 for one in found)
    assert 140 < sum(one.time_s <= 10 for one in found) < 270
    assert 140 < sum(one.time_s >= 19 for one in found) < 270


def test_in_a_multi_turn_workload_each_prompt_continues_the_last_answer(trace_of):
    """A user waits for the answer, which is then a part of the next prompt."""
    text = SHARED_PREFIX.replace("question_len", "enable_multi_turn_chat: true\n    question_len")
    latest = {}
    for one in trace_of(text):
        before = latest.get(one.session)
        if before is None:
            assert one.after is None
        else:
            assert one.after == before.index
            assert one.blocks[: len(before.blocks) + 1] == (*before.blocks, before.answer)
            assert one.turn == before.turn + 1
        latest[one.session] = one
    assert len(latest) == 15


def test_a_concurrent_conversation_replay_keeps_its_lanes(trace_of):
    """Each stage has so many lanes; requests of a lane wait for each other, stages as well."""
    trace = trace_of("""
load:
  type: concurrent
  stages:
  - {concurrency_level: 2, num_requests: 10}
  - {concurrency_level: 4, num_requests: 9}
data:
  type: conversation_replay
  conversation_replay:
    seed: 5
    num_conversations: 6
    shared_system_prompt_len: 100
    turns_per_conversation: {type: fixed, mean: 3}
    tool_call_latency_sec: {type: fixed, mean: 2}
""")
    found = list(trace)
    assert len(found) == 19
    assert sum(one.after is None for one in found) == 2
    assert all(one.after < one.index for one in found if one.after is not None)
    assert max(one.turn for one in found) == 2
    assert {one.think_s for one in found if one.turn} == {2.0}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "poisson",
            "trace_session_replay",
            "load.type: Expected concurrent, constant or poisson, got 'trace_session_replay'",
        ),
        ("rate: 20, ", "", r"load.stages\[0\]: Expected rate and duration"),
        ("num_groups: 3", "num_groups: 0", "data.shared_prefix.num_groups"),
        ("  stages:", "  sweep: {type: linear}\n  stages:", "load.sweep: Expected stages"),
        ("load:", "load: {", "Expected YAML"),
        ("load:", "when: 2026-02-30\nload:", "Expected YAML: day is out of range"),
        ("split: 0.5", "split: 0", "load.lora_traffic_split: Expected at least one split above 0"),
        (
            "num_groups: 3",
            f"num_groups: {10**20}",
            "data.shared_prefix.num_groups: Expected a whole number of at most ",
        ),
        ("rate: 20", "rate: .inf", r"load.stages\[0\].rate: Expected a number of at most "),
        ("max: 20, ", "", "data.shared_prefix.output_distribution.max: Expected an upper end"),
        (
            "uniform, min: 10, max: 20, mean: 15",
            "lognormal, std_dev: 2, mean: 0",
            "data.shared_prefix.output_distribution.mean: Expected above 0 for a lognormal",
        ),
        ("mean: 15", "mean: .nan", "output_distribution.mean: Expected a number of at least 0"),
        ("min: 10", "min: 30", "data.shared_prefix.output_distribution: Expected 0 <= min <= max"),
    ],
)
def test_a_workload_file_that_cannot_be_followed_is_refused_by_field(trace_of, old, new, problem):
    """Rather than replayed as something else."""
    with pytest.raises(TraceError, match=problem):
        list(trace_of(SHARED_PREFIX.replace(old, new)))
