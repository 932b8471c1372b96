"""Traces of other tools: their names of columns, their units, their files, and what is said of them."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from sim.__main__ import main
from sim.traces.arrival import Arrival, TraceError
from sim.traces.containers import lines_in
from sim.traces.formats import open_trace
from sim.traces.plausibility import warnings_of
from sim.traces.reading import ReadOptions


@pytest.fixture
def trace_of(tmp_path):
    """A trace of rows or of a text, in a file whose name says nothing."""

    def make(rows, **options):
        path = tmp_path / "trace"
        lines = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
        path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
        return open_trace(path, ReadOptions(**options))

    return make


def facts(trace):
    return [(round(one.time_s, 6), one.prompt_tokens, one.output_tokens) for one in trace]


WANTED = [(0, 100, 20), (0.5, 300, 30), (2, 128, 5)]
TIMES_S = [10, 10.5, 12]
EPOCH_S = 1_763_000_000
NAMES = {
    "plainest": ("timestamp", "input_tokens", "output_tokens", 1, 0),
    "Vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens", 1, 0),
    "Azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1, 0),
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens", 1, 0),
    "guidellm": ("timestamp", "prompt_tokens_count", "output_tokens_count", 1, 0),
    "LLMServingSim": ("arrival_time_ns", "input_toks", "output_toks", 1e9, 0),
    "genai-perf": ("request_start_ms", "isl", "osl", 1e3, 0),
    "OpenTelemetry": ("startTime", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", 1, 0),
    "Unix milliseconds": ("created_at", "prompt_len", "output_len", 1e3, EPOCH_S),
    "Unix nanoseconds": ("time", "promptTokens", "completionTokens", 1e9, EPOCH_S),
}


@pytest.mark.parametrize("tool", NAMES)
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_the_columns_of_other_tools_are_known_by_name(trace_of, tool, kind):
    """In any case and spelling, and with the unit that a name or the size of a time tells."""
    when, prompt, output, per_s, since = NAMES[tool]
    rows = [
        {when: int((at + since) * per_s) if per_s > 1 else at, prompt: tokens, output: answer}
        for at, (_, tokens, answer) in zip(TIMES_S, WANTED, strict=True)
    ]
    if kind == "csv" and tool not in {"Azure", "BurstGPT"}:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        trace = trace_of("\n".join(lines))
        assert trace.format.name == "csv"
    else:
        trace = trace_of(rows)
        assert trace.format.name == "json"
    assert facts(trace) == WANTED


def test_members_of_members_are_columns(trace_of):
    """As in what AIPerf exports; the member that is called `value` has the name above it."""
    rows = [
        {
            "metadata": {"request_start_ns": EPOCH_S * 10**9 + int(at * 1e9)},
            "metrics": {
                "input_sequence_length": {"value": tokens, "unit": "tokens"},
                "output_sequence_length": {"value": float(answer), "unit": "tokens"},
            },
        }
        for at, (_, tokens, answer) in zip(TIMES_S, WANTED, strict=True)
    ]
    assert facts(trace_of(rows)) == WANTED


@pytest.mark.parametrize("started", [True, False])
def test_the_detailed_result_of_a_benchmark_is_a_trace(trace_of, started):
    """vLLM's has the time of each request; requests that failed are no arrivals."""
    result = {
        "date": "20261101", "input_lens": [100, 7, 300, 128], "output_lens": [20, 0, 30, 5],
        "errors": ["", "Timeout", "", ""], "ttfts": [0.1, 0, 0.2, 0.1],
    }  # fmt: skip
    if started:
        result["start_times"] = [10, 10.2, 10.5, 12]
        assert facts(trace_of([result])) == WANTED
        return
    assert facts(trace_of([result], rate_per_s=2.0)) == [(0, 100, 20), (0.5, 300, 30), (1, 128, 5)]
    with pytest.raises(
        TraceError, match="arrival times, found input_len, output_len: name the column with"
    ):
        list(trace_of([result]))


@pytest.mark.parametrize(
    ("prompts", "outputs"), [([1, 2], [1]), ([1, 2], []), ([], [1]), ([1], [1, 2])]
)
def test_the_lists_of_a_result_must_be_of_one_length(trace_of, prompts, outputs):
    """Otherwise nobody knows which belong together."""
    with pytest.raises(TraceError, match=r"trace:1: Expected input_lens, output_lens, .* of one"):
        list(trace_of([{"input_lens": prompts, "output_lens": outputs}]))


def test_an_empty_list_of_times_or_errors_is_none(trace_of):
    result = {"input_lens": [5], "output_lens": [2], "start_times": [], "errors": []}
    assert facts(trace_of([result], rate_per_s=2.0)) == [(0, 5, 2)]


def test_a_result_without_output_lengths_is_an_error_of_the_command(tmp_path, capsys):
    path = tmp_path / "result.json"
    path.write_text('{"input_lens": [1, 2], "output_lens": []}')
    assert main(["trace", "inspect", str(path)]) == 1
    assert f"{path}:1: Expected input_lens, output_lens" in capsys.readouterr().err


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "timestamp": st.integers(0, 10_000).map(lambda number: number / 4),
            "input_tokens": st.integers(1, 10_000),
            "output_tokens": st.integers(0, 10_000),
            "session_id": st.sampled_from(["a", "b c", "ü"]),
        }
    ),
    min_size=1,
    max_size=20,
)


def _table(rows, delimiter):
    names = list(rows[0])
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(map(delimiter.join, lines))


WRITERS = {
    "comma": lambda rows, path: path.write_text(_table(rows, ",")),
    "tab": lambda rows, path: path.write_text(_table(rows, "\t") + "\n"),
    "semicolon": lambda rows, path: path.write_text(_table(rows, ";")),
    "byte order mark": lambda rows, path: path.write_text("\ufeff" + _table(rows, ",")),
    "lines": lambda rows, path: path.write_text("\n".join(map(json.dumps, rows))),
    "lines behind a mark": lambda rows, path: path.write_text(
        "\ufeff" + "\n".join(map(json.dumps, rows))
    ),
    "array": lambda rows, path: path.write_text(json.dumps(rows)),
    "indented array": lambda rows, path: path.write_text(json.dumps(rows, indent=2)),
    "packed": lambda rows, path: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "parquet": lambda rows, path: pq.write_table(pa.Table.from_pylist(rows), path),
}  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(rows=ROWS)
def test_a_trace_is_the_same_in_every_kind_of_file(tmp_path, rows):
    """CSV with several delimiters, JSON Lines, a JSON array, gzip and Parquet."""
    read = {}
    for name, write in WRITERS.items():
        path = tmp_path / "trace"
        write(rows, path)
        trace = open_trace(path)
        assert trace.requests_expected() == len(rows)
        read[name] = list(trace)
    assert len(read["lines"]) == len(rows)
    for name, arrivals in read.items():
        assert arrivals == read["lines"], name


def test_parquet_may_have_dates(tmp_path):
    """As the Azure trace of 2024 has when it is stored as Parquet."""
    table = pa.table(
        {
            "TIMESTAMP": pa.array([10_000_000, 10_500_000, 12_000_000], pa.timestamp("us")),
            "ContextTokens": [100, 300, 128],
            "GeneratedTokens": [20, 30, 5],
        }
    )
    pq.write_table(table, tmp_path / "azure.parquet")
    assert facts(open_trace(tmp_path / "azure.parquet")) == WANTED


HOSTILE = [
    ("[", "whole JSON array, and it is malformed at element 1"),
    ('[{"timestamp": 0, "input_tokens": 1, "output_tokens": 1},', "malformed at element 2"),
    ('[{"timestamp": 0, "input_tokens": 1, "output_tokens": 1} oops', "malformed at element 1"),
    ("[" * 100_000, "nested less deeply"),
    ('[{"timestamp": ' + "[" * 50_000 + "]" * 50_000 + "}]", "nested less deeply"),
    ("[1, 2]", "Expected one of the formats"),
    ("[]", "The trace is empty"),
    ('{"timestamp": NaN, "input_tokens": 1, "output_tokens": 1}', "trace:1"),
    ('{"timestamp": -1, "input_tokens": 1, "output_tokens": 1}', "timestamp: Expected a time"),
    ('{"timestamp": true, "input_tokens": 1, "output_tokens": 1}', "timestamp: Expected a time"),
    ('{"timestamp": 1' + "0" * 3000 + ', "input_tokens": 1, "output_tokens": 1}', "trace:1"),
    ('{"timestamp": 1, "input_tokens": 1e400, "output_tokens": 1}', "trace:1"),
    (
        '{"timestamp": 1, "input_tokens": 1.5, "output_tokens": 1}',
        "integer from 1 to 10,000,000, got 1.5",
    ),
    (
        '{"timestamp": 1, "input_tokens": 99999999, "output_tokens": 1}',
        "integer from 1 to 10,000,000",
    ),
    (
        '{"timestamp": 1, "input_tokens": [1], "output_tokens": 1}',
        "integer from 1 to 10,000,000, got [1]",
    ),
    ('{"timestamp": 1, "input_tokens": 5, "output_tokens": 1, "prefix": [-1]}', "ids of blocks"),
    ('{"timestamp": 1, "input_tokens": 5, "output_tokens": 1, "prefix": ["a"]}', "ids of blocks"),
    ('{"prompt": "", "output_tokens": 5}', "prompt: Expected at least one token, got an"),
    (
        '{"prompt": "a", "x": 1}\n{"prompt": 5}',
        "prompt: Expected a text, messages or a request, got int",
    ),
    ('{"messages": [5]}', "messages: Expected a text, messages or a request, got list"),
    ('{"conversations": [{"from": "human", "value": 5}]}', "Expected texts under `from` and"),
    (
        '{"prompt": null, "text": "", "x": 1}',
        "prompt: Expected a text, messages or a request, got none",
    ),
    ("PAR1 and then nothing", "Expected a whole Parquet file"),
]


@pytest.mark.parametrize(("text", "problem"), HOSTILE)
def test_what_cannot_be_read_is_said_in_a_sentence(trace_of, text, problem):
    """With the file, the place, and what was expected."""
    with pytest.raises(TraceError) as caught:
        list(trace_of(text))
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
MEMBERS = st.sampled_from(
    [
        *("timestamp", "input_tokens", "output_tokens", "input_length", "output_length", "delay"),
        *("session_id", "hash_ids", "block_size", "prompt", "messages", "conversations", "payload"),
        *("text_input", "model", "prefix", "prefix_tokens", "answer", "tools"),
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400)
@given(rows=st.lists(st.dictionaries(MEMBERS, JSON, max_size=6), max_size=4), array=st.booleans())
def test_any_json_is_read_or_refused(trace_of, rows, array):
    """There is no third way, and no other error."""
    try:
        trace = trace_of(json.dumps(rows) if array else rows)
        arrivals = list(trace)
    except TraceError:
        return
    assert all(isinstance(one, Arrival) and one.prompt_tokens > 0 for one in arrivals)
    assert isinstance(warnings_of(trace), list)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.binary(max_size=200))
def test_any_bytes_behind_a_beginning_are_read_or_refused(tmp_path, data):
    """Of an array, of Parquet and of a table."""
    path = tmp_path / "trace"
    for beginning in (
        b"[",
        b"PAR1",
        b'{"input_lens": [',
        b"timestamp,input_tokens,output_tokens\n",
    ):
        path.write_bytes(beginning + data)
        try:
            arrivals = list(open_trace(path))
        except TraceError:
            continue
        assert all(one.prompt_tokens > 0 for one in arrivals)


FOUND = "found when, in, out, who"
MISSING = "when,in,out,who\n5,100,20,a\n9,110,21,b\n"


@pytest.mark.parametrize(
    ("columns", "missing"),
    [
        ({}, f"arrival times, {FOUND}: name the column with --columns timestamp=NAME, or send the requests at"),
        ({"timestamp": "when"}, f"prompt tokens, {FOUND}: name the column with --columns prompt_tokens=NAME"),
        ({"timestamp": "when", "prompt_tokens": "in"}, "--columns output_tokens=NAME"),
        ({"timestamp": "then"}, "Expected a column 'then' for timestamp, found when, in, out, who"),
    ],
)  # fmt: skip
def test_a_missing_column_is_named_with_the_flag(trace_of, columns, missing):
    """And so are the columns that there are."""
    with pytest.raises(TraceError) as caught:
        list(trace_of(MISSING, columns=tuple(columns.items())))
    assert missing in str(caught.value)


def test_any_names_can_be_told(trace_of):
    """With a unit; a prefix that is named says that prompts share all that they can."""
    told = {"timestamp": "when", "prompt_tokens": "in", "output_tokens": "out", "prefix": "who"}
    text = "when,in,out,who\n5,100,20,a\n9,110,21,b\n12,90,1,a\n"
    first, second, third = trace_of(text, columns=tuple(told.items()), time_unit="ms")
    assert (second.time_s, third.time_s) == pytest.approx((0.004, 0.007))
    assert list(first.spans()) == [(1, 100)]
    assert list(second.spans()) == [(2, 110)]
    assert list(third.spans()) == [(1, 90)]


def test_told_columns_go_before_a_format_that_is_recognised(trace_of):
    """A file that looks like Mooncake's is read by its columns then."""
    rows = [
        {"timestamp": 5, "input_length": 600, "output_length": 3, "real": 7, "hash_ids": [1, 2]}
    ]
    (one,) = trace_of(rows, columns=(("prompt_tokens", "real"), ("prefix", "timestamp")))
    assert (one.prompt_tokens, list(one.spans())) == (7, [(1, 7)])


def test_an_option_that_a_format_ignores_is_refused(trace_of):
    """Rather than the user believing that it had an effect."""
    rows = [{"format": "homing-capture", "version": 1}]
    with pytest.raises(
        TraceError, match="Expected no --time-unit: the format capture does not use it"
    ):
        trace_of(rows, time_unit="s")
    with pytest.raises(TraceError, match="Expected no --columns"):
        trace_of(rows, format="mooncake", columns=(("prompt_tokens", "a"),))


def test_prefixes_of_a_length_are_shared(trace_of):
    """Requests of one prefix have so much in common; by its name alone a column says nothing."""
    text = (
        "timestamp,input_tokens,output_tokens,prefix_id,prefix_length\n1,100,2,x,40\n2,30,2,x,40\n"
    )
    first, second = trace_of(text)
    assert list(first.spans()) == [(1, 40)]
    assert list(second.spans()) == [(1, 30)]
    (alone,) = trace_of("timestamp,input_tokens,output_tokens,prefix_id\n1,100,2,x\n")
    assert not alone.blocks


QUESTION = "Tell me all that is known about the ships of the north. " * 10


def test_sharegpt_gives_the_first_question_and_the_length_of_its_answer(trace_of):
    """What comes before it belongs to the prompt; conversations without an answer are left out."""
    rows = [
        {"id": "a", "conversations": [
            {"from": "human", "value": QUESTION}, {"from": "gpt", "value": "x" * 400},
            {"from": "human", "value": "And?"}, {"from": "gpt", "value": "no"},
        ]},
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": [{"from": "human", "value": "?"}]},
        {"id": "d", "conversations": [{"from": "gpt", "value": "!"}]},
        {"id": "e", "conversations": [
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": QUESTION},
            {"from": "chatgpt", "value": "x" * 40},
        ]},
        {"id": "f", "conversations": [
            {"from": "human", "value": QUESTION}, {"from": "bard", "value": "y"},
        ]},
    ]  # fmt: skip
    trace = trace_of(json.dumps(rows, indent=1), rate_per_s=2.0)
    first, other, same = trace
    assert trace.format.name == "prompts"
    assert [one.output_tokens for one in (first, other, same)] == [100, 10, 1]
    assert [one.time_s for one in (first, other, same)] == [0, 0.5, 1]
    assert first.blocks == same.blocks
    assert first.blocks[0] != other.blocks[0]
    assert 140 <= first.prompt_tokens <= 160
    body = json.loads(first.body)
    assert body["messages"] == [{"role": "user", "content": QUESTION}]
    assert (body["max_tokens"], first.output_tokens_max) == (100, 100)


def test_prompts_of_benchmarks_are_read(trace_of):
    """vLLM's custom data, AIPerf's texts, messages and whole requests; AIPerf's times are in ms."""
    custom = list(trace_of([{"prompt": QUESTION, "output_tokens": 7}, {"prompt": QUESTION}]))
    assert [(one.time_s, one.output_tokens) for one in custom] == [(0, 7), (1, 128)]
    assert custom[0].blocks == custom[1].blocks
    texts = trace_of([{"timestamp": 250 * at, "text_input": QUESTION} for at in range(3)])
    assert [one.time_s for one in texts] == [0, 0.25, 0.5]
    messages = [{"role": "user", "content": QUESTION}]
    (chat,) = trace_of([{"timestamp": 5, "messages": messages, "output_length": 9}])
    assert (chat.path, chat.output_tokens) == ("/v1/chat/completions", 9)
    (whole,) = trace_of([{"payload": {"model": "m", "messages": messages, "max_tokens": 11}}])
    assert (whole.model, whole.output_tokens, len(whole.blocks)) == ("m", 11, len(chat.blocks))


def test_a_later_turn_waits_for_the_answer_and_for_its_delay(trace_of):
    """A turn without a time and without a delay waits for the answer alone."""
    rows = [
        {"session_id": "a", "delay": 900, "input_length": 300, "output_length": 20, "timestamp": 0},
        {"session_id": "b", "input_length": 300, "output_length": 20, "timestamp": 100.0},
        {"session_id": "a", "delay": 500, "input_length": 400, "output_length": 20},
        {"session_id": "b", "input_length": 500, "output_length": 20},
        {"session_id": "a", "delay": 250, "input_length": 600.0, "output_length": 20},
    ]
    arrivals = {one.index: one for one in trace_of(rows)}
    told = [(one.time_s, one.after, one.think_s, one.turn) for _, one in sorted(arrivals.items())]
    assert told == [
        (0, None, 0, 0),
        (0.1, None, 0, 0),
        (0.5, 0, 0.5, 1),
        (0.1, 1, 0, 1),
        (0.75, 2, 0.25, 2),
    ]
    with pytest.raises(TraceError, match="trace:2: timestamp: Expected a time, as the first"):
        list(trace_of([rows[0], {"input_length": 1, "output_length": 1}]))


def test_blocks_of_mooncake_may_have_a_size_of_their_own(trace_of):
    """The line says it, unless the user does."""
    row = {"timestamp": 0, "input_length": 130, "output_length": 1, "hash_ids": [1, 2, 3]}
    (one,) = trace_of([{**row, "block_size": 64}])
    assert list(one.spans()) == [(1, 64), (2, 64)]


def _tokenizer(folder):
    words = {word: at for at, word in enumerate(["[UNK]", *sorted(set(QUESTION.split()))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_local_tokenizer_counts(trace_of, tmp_path):
    """Prompts and recorded answers; prompts share whole blocks of tokens."""
    folder = _tokenizer(tmp_path)
    rows = [
        {"prompt": QUESTION, "response": "known about ships"},
        {"prompt": QUESTION + "the north"},
    ]
    first, second = trace_of(rows, tokenizer=folder)
    assert (first.prompt_tokens, second.prompt_tokens) == (120, 122)
    assert first.output_tokens == 3
    assert len(first.blocks) == 120 // 16
    assert first.blocks == second.blocks[: len(first.blocks)]
    (chat,) = trace_of(
        [{"model": "m", "messages": [{"role": "user", "content": QUESTION}]}], tokenizer=folder
    )
    assert (chat.prompt_tokens, chat.blocks) == (120, first.blocks)


def test_what_is_no_tokenizer_is_refused(trace_of, tmp_path):
    """With its path."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TraceError, match=r"tokenizer.json: Expected a tokenizer.json"):
        list(trace_of([{"prompt": "a"}], tokenizer=str(tmp_path)))


def warned(trace):
    return " ".join(warnings_of(trace))


def _requests(times, **more):
    return [
        {"timestamp": at, "input_length": 600 + place, "output_length": 5 + place, **more}
        for place, at in enumerate(times)
    ]


def test_a_unit_that_seems_wrong_is_told(trace_of):
    """Both ways, and not where the user has told the unit."""
    seconds = _requests([at * 0.3 for at in range(20)])
    assert "looks like seconds: use --time-unit s" in warned(trace_of(seconds))
    assert "looks like" not in warned(trace_of(seconds, time_unit="s"))
    text = "timestamp,input_tokens,output_tokens\n" + "".join(
        f"{at * 90_000},{100 + at},{5 + at}\n" for at in range(20)
    )
    assert "looks like milliseconds: use --time-unit ms" in warned(trace_of(text))
    assert "looks like" not in warned(trace_of(text, time_unit="ms"))
    assert "looks like" not in warned(trace_of(_requests(range(0, 6000, 300))))


def test_decreasing_times_and_constant_tokens_are_told(trace_of):
    """The requests are sorted, and the columns may be others than was meant."""
    rows = _requests([5000, 1000, 9000, 2000, *range(10_000, 20_000, 1000)])
    assert "2 of the first 14 times are earlier than the one before" in warned(trace_of(rows))
    same = [{**row, "output_length": 9} for row in rows]
    assert "All of the first 14 requests have 9 output tokens" in warned(trace_of(same))
    assert "prompt tokens" not in warned(trace_of(same))


def test_a_trace_without_times_or_sharing_says_so(trace_of):
    """Unless a rate was told, or ids."""
    rows = [{"input_length": 600 + at, "output_length": 8 + at} for at in range(12)]
    assert "no times, so requests are sent at 1 a second: set --rate-per-s" in warned(
        trace_of(rows)
    )
    assert "no times" not in warned(trace_of(rows, rate_per_s=3.0))
    assert "does not say what prompts share" in warned(trace_of(rows))
    shared = [{**row, "hash_ids": [1, at]} for at, row in enumerate(rows)]
    assert "share" not in warned(trace_of(shared))


def test_a_generated_workload_has_no_warnings(tmp_path):
    """Whoever generates it has chosen its lengths."""
    out = tmp_path / "made.jsonl"
    assert main(["trace", "generate", "rag", "--requests", "20", "--out", str(out)]) == 0
    assert warnings_of(open_trace(out)) == []


# The small inputs that were refused or misread.


def test_the_plainest_trace_is_read(shared_data):
    """Seconds, prompt tokens, output tokens."""
    arrivals = list(open_trace(shared_data / "reports/plain.csv"))
    assert len(arrivals) == 50
    assert (arrivals[0].prompt_tokens, arrivals[0].output_tokens) == (1034, 65)
    assert arrivals[1].time_s == pytest.approx(0.3)


def test_mooncake_without_times_is_sent_at_a_rate(shared_data):
    """One a second, which a warning says, or as fast as was told."""
    path = shared_data / "reports/notime.jsonl"
    trace = open_trace(path, ReadOptions(rate_per_s=4.0))
    assert [one.time_s for one in trace][:3] == [0, 0.25, 0.5]
    assert "set --rate-per-s" in warned(open_trace(path))


def test_mooncake_without_ids_shares_nothing(shared_data):
    """And the report says so."""
    trace = open_trace(shared_data / "reports/nohash.jsonl")
    assert {one.shareable_tokens for one in trace} == {0}
    assert "does not say what prompts share" in warned(trace)


def test_turns_wait_for_their_delays(shared_data):
    """Four sessions; only their first turns have times."""
    arrivals = list(open_trace(shared_data / "reports/aiperf_session.jsonl"))
    assert [one.after for one in arrivals].count(None) == 4
    assert {one.think_s for one in arrivals if one.after is not None} == {0.5}


def test_seconds_for_milliseconds_are_told(shared_data):
    """And are read as what they are when the user says so."""
    path = shared_data / "reports/seconds.jsonl"
    assert "looks like seconds: use --time-unit s" in warned(open_trace(path))
    last = list(open_trace(path, ReadOptions(time_unit="s")))[-1]
    assert last.time_s == pytest.approx(3.8)


@pytest.mark.parametrize(
    "name", ["plain.csv", "notime.jsonl", "nohash.jsonl", "aiperf_session.jsonl", "seconds.jsonl"]
)
def test_each_is_inspected_converted_and_replayed(shared_data, tmp_path, capsys, name):
    """As a user would: the conversions have the same requests."""
    path = shared_data / "reports" / name
    assert main(["trace", "inspect", str(path)]) == 0
    assert main(["replay", str(path), "--pods", "2", "--out", str(tmp_path / "run")]) == 0
    report = (tmp_path / "run/report.md").read_text()
    assert ("does not say what prompts share" in report) == (
        name not in {"notime.jsonl", "seconds.jsonl"}
    )
    expected = facts(open_trace(path))
    for kind in ("capture", "mooncake"):
        out = tmp_path / kind
        assert main(["trace", "convert", str(path), str(out), "--to", kind]) == 0
        assert [one[1:] for one in facts(open_trace(out))] == [one[1:] for one in expected]
    capsys.readouterr()


def test_a_converted_prompt_leaves_no_text(tmp_path):
    """A capture of texts has their hashes under a random salt."""
    path, out = tmp_path / "in", tmp_path / "out"
    path.write_text(json.dumps({"prompt": "canary " * 100, "output_tokens": 3}))
    assert main(["trace", "convert", str(path), str(out), "--to", "capture"]) == 0
    assert "canary" not in out.read_text()
    (one,) = open_trace(out)
    assert one.blocks != next(iter(open_trace(path))).blocks


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--columns", "when=a"], "'when=a' is not WHAT=NAME, where WHAT is one of timestamp, "),
        (["--columns", "timestamp"], "is not WHAT=NAME"),
        (["--columns", "timestamp=a,"], "is not WHAT=NAME"),
        (["--time-unit", "h"], "--time-unit: expected s, ms, us or ns, got 'h'"),
        (["--rate-per-s", "0"], "expected a number above 0 and at most 10^9, got '0'"),
        (["--block-tokens", "x"], "expected an integer from 1 to 1000000, got 'x'"),
    ],
)
@pytest.mark.parametrize("command", [["trace", "inspect"], ["replay"]])
def test_a_wrong_flag_is_refused(tmp_path, capsys, command, flags, problem):
    """In the same words by every command that reads a trace."""
    with pytest.raises(SystemExit) as caught:
        main([*command, str(tmp_path / "none"), *flags])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_lines_are_counted_of_what_a_file_stores(tmp_path):
    """Of a benchmark's result as many as there are requests."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"input_lens": [1, 2, 3], "output_lens": [1, 2, 3]}))
    assert lines_in(path) == 3


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--config", "default", "--config", "round-robin", "--seeds", "1"],
        ["sweep", "--rates", "2", "--config", "default", "--seeds", "1"],
        ["size", "--slo", "ttft-p90=9", "--pods-max", "2", "--seeds", "3"],
    ],
)
def test_commands_of_several_runs_warn_once(tmp_path, capsys, command):
    """On stderr, whatever the number of runs."""
    path = tmp_path / "plain.csv"
    rows = [f"{at},{100 + at},{5 + at}" for at in range(30)]
    path.write_text("\n".join(["timestamp,input_tokens,output_tokens", *rows]))
    assert main([command[0], str(path), *command[1:], "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err.count("does not say what prompts share") == 1
