import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.protocol.usage import EVENT_BYTES_MAX, RESPONSE_BYTES_MAX, Usage, UsageReader

OPENAI = {
    "usage": {
        "prompt_tokens": 700,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 128},
    }
}
ALL = Usage(700, 9, 128)


def read(*pieces, event_stream):
    reader = UsageReader(event_stream=event_stream)
    for number, piece in enumerate(pieces, 1):
        reader.feed(piece, end=number == len(pieces))
    return reader.usage


def events(*documents, newline="\n"):
    return "".join(
        f"data: {json.dumps(document, ensure_ascii=False)}{newline}{newline}"
        for document in documents
    ).encode()


def cut(body, places):
    edges = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[a:b] for a, b in pairwise(edges)] + [b""]


@pytest.mark.parametrize(
    ("document", "usage"),
    [
        (OPENAI, ALL),
        (OPENAI | {"usage": {"prompt_tokens": 7}}, Usage(7, None, None)),
        (
            {
                "usage": {
                    "input_tokens": 700,
                    "output_tokens": 9,
                    "input_tokens_details": {"cached_tokens": 128},
                }
            },
            ALL,
        ),
        (
            {"usage": {"input_tokens": 700, "output_tokens": 9, "cache_read_input_tokens": 128}},
            ALL,
        ),
        ({"usage": None}, None),
        ({"choices": []}, None),
    ],
    ids=["chat", "prompt only", "responses", "messages", "null", "none"],
)
def test_the_usage_of_a_whole_answer_is_read(document, usage):
    """As each API spells it."""
    assert read(json.dumps(document).encode(), event_stream=False) == usage


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_last_event_with_usage_counts(newline):
    """OpenAI may send it with every event, Anthropic in two parts, Responses one level down."""
    grown = {"usage": OPENAI["usage"] | {"completion_tokens": 10}}
    assert read(events(OPENAI, {}, grown, newline=newline), event_stream=True) == Usage(
        700, 10, 128
    )
    parts = (
        {"message": {"usage": {"input_tokens": 700, "cache_read_input_tokens": 128}}},
        {"usage": {"output_tokens": 9}},
    )
    assert read(events(*parts, newline=newline), event_stream=True) == ALL
    assert read(events({"response": OPENAI}, newline=newline), event_stream=True) == ALL


@given(st.lists(st.integers(min_value=0), max_size=8), st.booleans())
def test_where_the_body_is_cut_does_not_matter(places, event_stream):
    """Chunks end anywhere, also inside a name or a character."""
    body = events({"text": "é"}, OPENAI) if event_stream else json.dumps(OPENAI).encode()
    assert read(*cut(body, places), event_stream=event_stream) == ALL


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=5), st.booleans())
def test_what_is_no_answer_is_no_error(pieces, event_stream):
    """It goes to the client as it is, only unmeasured."""
    read(*pieces, b"", event_stream=event_stream)
    read(b'data: {"usage":', *pieces, b"\n", b"", event_stream=event_stream)


def test_a_last_event_without_its_newline_is_read():
    """Some engines end the stream there."""
    assert read(events(OPENAI).rstrip(), event_stream=True) == ALL


def test_a_line_that_is_too_long_is_skipped_and_the_next_is_read():
    """Memory is bounded; usage comes in a short line."""
    long = b"data: " + b"x" * (EVENT_BYTES_MAX // 2)
    reader = UsageReader(event_stream=True)
    for piece in (long, long, long, b'{"usage": {}}\n', events(OPENAI)):
        reader.feed(piece, end=False)
        assert len(reader._kept) <= EVENT_BYTES_MAX
    assert reader.usage == ALL


def test_an_answer_that_is_too_long_is_not_kept():
    """Unmeasured rather than unbounded."""
    piece = b" " * (RESPONSE_BYTES_MAX // 2 + 1)
    whole = json.dumps(OPENAI).encode()
    assert read(piece, piece, whole, event_stream=False) is None
    assert read(piece, whole, event_stream=False) == ALL
    reader = UsageReader(event_stream=False)
    for kept in (len(piece), 0, 0):
        reader.feed(piece, end=False)
        assert len(reader._kept) == kept
