"""The capture format: what is written is read, ids are salted, errors are named."""

import base64
import json
import re
from io import BytesIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.journal.lines import CaptureHeader, CaptureLine, Salt, pack_blocks
from sim.traces.arrival import Arrival, FieldError, TraceError
from sim.traces.capture import CAPTURE, CaptureWriter, unpack_blocks
from sim.traces.formats import open_trace
from sim.traces.reading import ReadOptions

HEADER = '{"format": "homing-capture", "version": 1, "block_tokens": 64}\n'


def lines_of(file):
    return [json.loads(line) for line in file.getvalue().splitlines()]


def read_back(file):
    header, *lines = file.getvalue().splitlines()
    parse = CAPTURE.parser(header, ReadOptions())
    return [parse(index, line) for index, line in enumerate(lines)]


ids = st.integers(0, 2**64 - 1)
words = st.text("abc", max_size=3)


@st.composite
def traces(draw):
    found = []
    for index in range(draw(st.integers(1, 4))):
        blocks = tuple(draw(st.lists(ids, max_size=4)))
        uneven = draw(st.booleans())
        lengths = tuple(draw(st.integers(1, 300)) for _ in blocks) if uneven else ()
        own = draw(st.integers(1, 63))
        found.append(
            Arrival(
                index=index,
                time_s=draw(st.integers(0, 10**6)) / 1000,
                prompt_tokens=(sum(lengths) if uneven else 64 * len(blocks)) + own,
                output_tokens=draw(st.integers(1, 5000)),
                blocks=blocks,
                block_tokens=64 if blocks and not uneven else 0,
                lengths=lengths,
                answer=draw(st.none() | ids),
                model=draw(words),
                adapter=draw(words),
                cache_salt=draw(words),
                session=draw(words),
                turn=draw(st.integers(0, 9)),
                priority=draw(st.integers(-1, 1)),
                after=draw(st.none() | st.integers(0, index - 1)) if index else None,
                think_s=draw(st.integers(0, 50)) / 8,
            )
        )
    return found


@settings(max_examples=60)
@given(trace=traces())
def test_what_is_written_is_read_back(trace):
    """Every field that a replay needs."""
    file = BytesIO()
    writer = CaptureWriter(file)
    for one in trace:
        writer.write_arrival(one)
    assert writer.lines == len(trace)
    assert read_back(file) == trace


def test_a_request_waits_for_the_line_at_which_its_predecessor_was_written():
    """Lines that were left out leave no gap, and nobody waits for them."""

    def one(index, after):
        return Arrival(index=index, time_s=0.0, prompt_tokens=1, output_tokens=1, after=after)

    file = BytesIO()
    writer = CaptureWriter(file)
    for each in (one(3, None), one(7, 3), one(9, 5)):
        writer.write_arrival(each)
    assert [each.after for each in read_back(file)] == [None, 0, None]


def test_under_a_salt_the_same_is_shared_and_nothing_can_be_recognised():
    """Ids, sessions and cache salts are hashed with a key; two keys have nothing in common."""
    arrival = Arrival(
        index=0,
        time_s=0.0,
        prompt_tokens=128,
        output_tokens=1,
        blocks=(7, 7),
        block_tokens=64,
        session="alice",
        cache_salt="secret",
        answer=7,
    )
    texts, found = [], []
    for key in (b"one", b"two"):
        file = BytesIO()
        CaptureWriter(file).write_arrival(arrival, Salt(key))
        texts.append(file.getvalue().decode())
        found += read_back(file)
    assert not any("alice" in text or "secret" in text for text in texts)
    assert found[0].blocks[0] == found[0].blocks[1] == found[0].answer
    assert 7 not in {*found[0].blocks, *found[1].blocks}
    assert found[0].blocks != found[1].blocks
    assert found[0].session != found[1].session
    assert Salt(b"one").name("") == ""


def test_the_example_of_the_documentation_is_read():
    """docs/capture-format.md shows a header and a line of a trace in the section about traces."""
    page = (Path(__file__).parents[3] / "docs" / "capture-format.md").read_text()
    page = page[page.index('{"format": "homing-capture"') - len("```json\n") :]
    header, line, *_ = re.findall(r"```json\n(.*?)\n```", page, re.DOTALL)
    [arrival] = read_back(BytesIO(f"{header}\n{line}".encode()))
    assert arrival.blocks == (1, 2)
    assert arrival.prompt_tokens == 150


def test_the_documentation_names_every_member():
    """Those of the header and those of a line."""
    page = (Path(__file__).parents[3] / "docs" / "capture-format.md").read_text()
    for struct in (CaptureHeader, CaptureLine):
        for field in msgspec.structs.fields(struct):
            assert f"`{field.encode_name}`" in page, field.encode_name


def test_blocks_are_eight_little_endian_bytes():
    """Whatever the machine."""
    assert pack_blocks([1, 2**64 - 1]) == bytes([1, *[0] * 7, *[255] * 8])
    assert unpack_blocks(pack_blocks([3, 4])) == (3, 4)
    with pytest.raises(FieldError, match="Expected 8 bytes for each block, got 9 bytes"):
        unpack_blocks(bytes(9))


def line(**fields):
    return json.dumps({"time_s": 0, "prompt_tokens": 100, "output_tokens": 1, **fields})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEADER.replace('"version": 1', '"version": 2'), "trace:1: version: Expected homing-cap"),
        (HEADER.replace("64}", "60}"), "trace:1: Expected blocks of a multiple or a divisor"),
        (HEADER + line(blocks="AAA="), "trace:2: blocks: Expected 8 bytes"),
        (HEADER + line(blocks="%"), "trace:2: blocks: Invalid base64"),
        (HEADER + line(blocks=base64.b64encode(bytes(40)).decode()), "blocks: Expected 1 or 2 ids"),
        (HEADER + line(parts=[[1, 99], [2, 2]]), "trace:2: parts: Expected at most 100 tokens"),
        (
            HEADER + line(parts=[[1, 0]]),
            r"trace:2: parts\[\d?\.*\]\[1\]: Expected a whole number of at least 1",
        ),
        (HEADER + line(parts=[[2**64, 1]]), "trace:2: parts: Expected ids from 0 to"),
        (HEADER + line(answer=2**64), "trace:2: answer: Expected ids from 0 to"),
        (HEADER + line(after=0), "trace:2: after: Expected an earlier line than 0, got 0"),
        (
            HEADER + line(prompt_tokens=0),
            "trace:2: prompt_tokens: Expected a whole number of at least 1",
        ),
    ],
)
def test_a_malformed_capture_is_named(tmp_path, text, problem):
    """Header and lines."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=problem):
        list(open_trace(path))


def test_nobody_waits_for_the_answer_to_a_line_that_was_skipped(tmp_path):
    """The request that did is sent at its time."""
    path = tmp_path / "trace"
    path.write_text(HEADER + "{}\n" + line(after=0) + "\n" + line(after=1) + "\n")
    trace = open_trace(path, ReadOptions(skip_bad=True))
    assert [(one.index, one.after) for one in trace] == [(1, None), (2, 1)]
