"""Trace files to arrivals: formats found by content, bad lines named, order kept, nothing held."""

import gzip
import json
import os
import tracemalloc
from itertools import islice

import pytest

from sim.traces.arrival import TraceError
from sim.traces.formats import FORMATS, open_trace
from sim.traces.reading import ReadOptions

MOONCAKE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [%d, %d]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DEEP = "[" * 100_000 + "]" * 100_000 + "}"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def trace_of(tmp_path):
    def make(text, **options):
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return open_trace(path, ReadOptions(**options))

    return make


def test_a_mooncake_line_becomes_an_arrival(trace_of):
    """Milliseconds become seconds from the first request."""
    trace = trace_of(MOONCAKE % (1500, 7, 8) + "\n" + MOONCAKE % (2250, 7, 9))
    first, second = trace
    assert trace.format.name == "mooncake"
    assert (first.index, first.time_s, first.prompt_tokens, first.output_tokens) == (0, 0, 600, 5)
    assert (second.index, second.time_s) == (1, 0.75)
    assert list(first.spans()) == [(7, 512)]
    assert first.shareable_tokens == 512


def test_an_azure_row_has_lengths_and_shares_nothing(trace_of):
    """Seven decimals of a second are read; what happens before dawn does not matter."""
    rows = "2023-11-16 23:59:59.9799600,4808,10\n2023-11-17 00:00:00.0319600,3180,0\n"
    trace = trace_of(AZURE + rows)
    first, second = trace
    assert trace.format.name == "azure"
    assert (first.prompt_tokens, first.output_tokens, first.shareable_tokens) == (4808, 10, 0)
    assert second.time_s == pytest.approx(0.052, abs=1e-6)
    assert second.output_tokens == 1


def test_a_burstgpt_row_that_failed_is_no_arrival(trace_of):
    """Zero response tokens mean that nothing was answered; the index is still the row's."""
    rows = (
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,9,0,9,API log\n118,GPT-4,30,7,37,API log\n"
    )
    trace = trace_of(BURSTGPT + rows)
    assert trace.format.name == "burstgpt"
    assert [(one.index, one.time_s, one.model) for one in trace] == [
        (0, 0, "ChatGPT"),
        (2, 113, "GPT-4"),
    ]


def test_bailian_turns_belong_to_the_session_of_their_root(trace_of):
    """A conversation is known by its first chat."""
    line = {"timestamp": 1.0, "input_length": 20, "output_length": 3, "hash_ids": [5, 6]}
    rows = [
        {**line, "chat_id": 10, "parent_chat_id": -1, "turn": 1},
        {**line, "chat_id": 11, "parent_chat_id": 10, "turn": 2},
        {**line, "chat_id": 12, "parent_chat_id": 11, "turn": 3},
    ]
    trace = trace_of("\n".join(map(json.dumps, rows)))
    assert trace.format.name == "bailian"
    assert [(one.session, one.turn, one.block_tokens) for one in trace] == [
        ("10", 0, 16),
        ("10", 1, 16),
        ("10", 2, 16),
    ]


NOTHING = [
    (b"", ""), (b"\n \n\r\n", ""), (gzip.compress(b"", mtime=0), ""), (b"", "azure"), (b"\n", "inference-perf"),
]  # fmt: skip
HEADERS = [AZURE, BURSTGPT, '{"format": "homing-capture", "version": 1}\n\n']


@pytest.mark.parametrize(("text", "name"), NOTHING)
def test_a_file_with_nothing_in_it_is_called_empty(trace_of, text, name):
    """Not of an unknown format: there is nothing to know one by. Nor is it bad YAML."""
    with pytest.raises(TraceError, match="trace: The trace is empty, expected at least one"):
        trace_of(text, format=name)


@pytest.mark.parametrize("text", HEADERS)
def test_a_header_alone_is_an_empty_trace(trace_of, text):
    """It is of its format, and has no requests."""
    trace = trace_of(text)
    assert list(trace) == []
    assert "The trace is empty" in str(trace.without_requests())


def test_lines_of_which_none_was_a_request_are_no_empty_trace(trace_of):
    """Requests that all failed, or lines that were all skipped: the first of these is named."""
    failed = trace_of(BURSTGPT + "45,GPT-4,9,0,9,API log\n")
    assert list(failed) == []
    assert str(failed.without_requests()).endswith("trace: Expected at least one request")
    bad = trace_of(AZURE + "yesterday,1,1\n", skip_bad=True)
    assert list(bad) == []
    assert "trace:2: TIMESTAMP" in str(bad.without_requests())


BAD_LINES = [
    (MOONCAKE % (0, 1, 2) + "\n{", 2, "", "Expected more: the text ends before it is whole"),
    (
        MOONCAKE % (0, 1, 2) + "\n\n" + MOONCAKE % (0, 1, -2),
        3,
        "hash_ids[1]",
        "Expected a whole number of at least 0",
    ),
    (
        '{"timestamp": 0, "input_length": "x", "output_length": 1, "hash_ids": []}',
        1,
        "input_length",
        "Expected a whole number, got a text",
    ),
    ('{"timestamp": 0, "output_length": 1, "hash_ids": []}', 1, "input_length", "found none"),
    (
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2, 3]}',
        1,
        "hash_ids",
        "Expected 1 or 2 ids for 600 tokens in blocks of 512, got 3",
    ),
    (MOONCAKE % (0, 1, 2**64), 1, "hash_ids", "Expected ids from 0 to 2^64 - 1"),
    (
        AZURE + "2023-11-16 18:17:03,1,99999999999\n",
        2,
        "GeneratedTokens",
        "an integer from 0 to 10,000,000",
    ),
    (AZURE + "2023-11-16 18:17:03,1\n", 2, "", "Expected 3 columns, got 2"),
    (AZURE + "yesterday,1,1\n", 2, "TIMESTAMP", "Expected a date and a time, got 'yesterday'"),
    (AZURE + "2023-11-16 18:17:03,0,1\n", 2, "ContextTokens", "from 1 to 10,000,000, got '0'"),
    (BURSTGPT + "nan,GPT-4,1,1,2,API log\n", 2, "Timestamp", "Expected a time"),
    (BURSTGPT.encode() + b"1,\xff,1,1,2,API log\n", 2, "", "Expected UTF-8"),
    (AZURE + "2023-11-16\r18:17:03,1,1\n", 2, "", "Expected a row without line breaks"),
    (AZURE + "x" * 140_000 + ",1,1\n", 2, "", "cells of at most 131072 characters"),
    (AZURE.replace("\n", "\r") + "2023-11-16,1,1\r", 1, "", "Expected a row without line breaks"),
    (BURSTGPT + "1,a\rb,1,1,2,API log\n", 2, "", "Expected a row without line breaks"),
    (MOONCAKE % (0, 1, 2) + '\n{"x": ' + DEEP, 2, "", "Expected JSON that is nested less deeply"),
]


@pytest.mark.parametrize(("text", "line", "field", "expected"), BAD_LINES)
def test_a_malformed_line_is_named(trace_of, text, line, field, expected):
    """File, line, field, and what was expected."""
    trace = trace_of(text)
    with pytest.raises(TraceError) as caught:
        list(trace)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert expected in caught.value.expected
    assert str(caught.value).startswith(f"{trace.path}:{line}: {field}")


def test_malformed_lines_are_counted_when_they_are_skipped(trace_of):
    """The others keep the index of their line; iterating again counts again."""
    lines = [MOONCAKE % (0, 1, 2), "{}", MOONCAKE % (1000, 1, 3), "nonsense"]
    trace = trace_of("\n".join(lines), skip_bad=True)
    for _ in range(2):
        assert [one.index for one in trace] == [0, 2]
        assert trace.bad_lines == 2
        assert [problem.line for problem in trace.problems] == [2, 4]


def test_arrivals_come_in_order_of_time(trace_of):
    """Lines may be out of order by a window; ties keep the order of the file."""
    times = [3, 1, 2, 2, 5, 4]
    trace = trace_of("\n".join(MOONCAKE % (1000 * time, 1, 2) for time in times), reorder_max=3)
    assert [(one.time_s, one.index) for one in trace] == [
        (0, 1),
        (1, 2),
        (1, 3),
        (2, 0),
        (3, 5),
        (4, 4),
    ]


def test_a_line_too_far_out_of_order_is_named(trace_of):
    """Time never runs back, and nothing is dropped in silence."""
    text = "\n".join(MOONCAKE % (1000 * time, 1, 2) for time in [1, 2, 3, 4, 0])
    with pytest.raises(TraceError, match="trace:5: Expected arrivals at most 2 lines out of order"):
        list(trace_of(text, reorder_max=2))


def test_a_packed_file_is_read_through_gzip(trace_of):
    """By its magic, whatever its name."""
    trace = trace_of(gzip.compress((MOONCAKE % (0, 1, 2)).encode()))
    assert len(list(trace)) == 1


def test_a_packed_file_that_was_cut_is_named(trace_of):
    """As happens to a capture that is copied while it is written."""
    lines = "\n".join(MOONCAKE % (time, time, time) for time in range(5000))
    whole = gzip.compress(lines.encode())
    with pytest.raises(TraceError, match="trace: Expected a whole gzip file"):
        list(trace_of(whole[:-5000]))


# Without the time, which would be in the names of tests.
PACKED = gzip.compress(
    "\n".join(MOONCAKE % (7 * time, time, 1) for time in range(500)).encode(), mtime=0
)


@pytest.mark.parametrize(
    "text",
    [
        PACKED[:15],
        PACKED[:20] + b"\xff" * 40 + PACKED[60:],
        PACKED[:-6] + b"????" + PACKED[-2:],
        PACKED[:2] + b"\x07" + PACKED[3:],
    ],
)
def test_a_packed_file_that_is_damaged_is_named(trace_of, text):
    """Where its beginning is looked at too: cut, with bad data, sum or method."""
    with pytest.raises(TraceError, match="trace: Expected a whole gzip file"):
        list(trace_of(text))


@pytest.mark.parametrize(
    ("name", "lines", "indices"),
    [
        ("mooncake", ["{oops", MOONCAKE % (0, 1, 2), MOONCAKE % (5, 1, 2)], [1, 2]),
        ("mooncake", ["", "null", "7", MOONCAKE % (0, 1, 2)], [2]),
        ("mooncake", ['{"\udcff": 1}', MOONCAKE % (0, 1, 2)], [1]),
        ("azure", ["# made by hand", AZURE.strip(), "2023-11-16 18:17:03,1,1"], [0]),
    ],
)
def test_the_format_shows_behind_bad_first_lines(trace_of, name, lines, indices):
    """They are counted where bad lines are, else the first of them is named."""
    text = "\n".join(lines).encode(errors="surrogateescape")
    trace = trace_of(text, skip_bad=True)
    assert trace.format.name == name
    assert [one.index for one in trace] == indices
    first = next(number for number, line in enumerate(lines, 1) if line)
    assert trace.problems[0].line == first
    with pytest.raises(TraceError, match=f"trace:{first}: "):
        list(trace_of(text))


def test_only_a_few_first_lines_may_be_bad(trace_of):
    """A file of something else is not searched through."""
    text = "oops\n" * 10 + MOONCAKE % (0, 1, 2)
    with pytest.raises(TraceError, match="trace:1: Expected one of the formats"):
        trace_of(text, skip_bad=True)


def test_a_trace_must_be_a_file(tmp_path):
    """A pipe could be read only once, and is not waited for."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(TraceError, match="pipe: Expected a regular file"):
        open_trace(path)


@pytest.mark.parametrize("text", ["hello\n", "1,2,3\n", "\x7fELF,\x01\n"])
def test_an_unknown_format_is_refused_with_the_known_ones(trace_of, text):
    """And a format can be forced."""
    with pytest.raises(TraceError, match="Expected one of the formats capture, mooncake"):
        trace_of(text)
    with pytest.raises(TraceError, match="Expected one of the formats"):
        trace_of(MOONCAKE % (0, 1, 2), format="no-such-format")


@pytest.mark.parametrize("block_tokens", [48, 65, 96])
def test_blocks_that_do_not_fit_the_pickers_are_refused(trace_of, block_tokens):
    """Neither a multiple nor a divisor of 64 tokens."""
    trace = trace_of(MOONCAKE % (0, 1, 2), block_tokens=block_tokens)
    with pytest.raises(TraceError, match=f"of 64 tokens, got {block_tokens}"):
        list(trace)


def test_a_long_trace_is_never_held(trace_of):
    """Of 20,000 requests only the window is in memory."""
    text = "\n".join(MOONCAKE % (time, time, time + 1) for time in range(20_000))
    trace = trace_of(text, reorder_max=100)
    del text
    tracemalloc.start()
    try:
        assert sum(1 for _ in trace) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_trace_can_be_left_and_begun_anew(trace_of):
    """A look at the head does not use it up."""
    trace = trace_of("\n".join(MOONCAKE % (time, 1, 2) for time in range(10)))
    assert len(list(islice(trace, 3))) == 3
    assert len(list(trace)) == 10


INFERENCE_PERF = """
data: {type: random}
load:
  type: constant
  stages: [{rate: 10, duration: 3}]
"""


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("\n".join(MOONCAKE % (time, 1, 2) for time in range(5)), 5),
        (AZURE + "2023-11-16 18:17:03,1,1\n" * 3, 3),
        (gzip.compress((MOONCAKE % (0, 1, 2) + "\n").encode(), mtime=0), 1),
        (INFERENCE_PERF, 29),
    ],
)
def test_how_many_requests_come_is_known_beforehand(trace_of, text, requests):
    """By lines without a header, and for a workload by its parameters, however few its lines."""
    trace = trace_of(text)
    assert trace.requests_expected() == requests == len(list(trace))


def test_every_format_has_a_name_of_its_own():
    """For `--format`."""
    assert len({known.name for known in FORMATS}) == len(FORMATS)
