import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.shell.engines.page_client import (
    CHUNKS_MAX,
    HEAD_BYTES_MAX,
    PIECES_MAX,
    BadResponseError,
    ResponseReader,
)

PAGE = b"vllm:num_requests_waiting 1\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b"5;x=y\r\nvllm:\r\n17\r\nnum_requests_waiting 1\n\r\n0\r\nTrailer: x\r\n\r\n"
)
TO_THE_END = b"HTTP/1.0 200 OK\r\n\r\n" + PAGE


def read(wire, page_bytes_max=1000):
    reader = ResponseReader(page_bytes_max)
    reader.feed(wire)
    return reader


@pytest.mark.parametrize("wire", [PLAIN, CHUNKED])
def test_a_framed_page_keeps_the_connection(wire):
    """Content-Length and chunked answers are complete by themselves."""
    reader = read(wire)
    assert reader.body == PAGE
    assert reader.keep_alive


def test_a_page_without_a_length_ends_with_the_connection():
    """HTTP/1.0 servers close when they are done."""
    reader = read(TO_THE_END)
    assert reader.body is None
    reader.end()
    assert reader.body == PAGE
    assert not reader.keep_alive


@given(st.sampled_from([PLAIN, CHUNKED, TO_THE_END]), st.data())
def test_where_the_bytes_are_cut_does_not_matter(wire, data):
    """Any partition of an answer gives the same page."""
    reader = ResponseReader(1000)
    while wire:
        cut = data.draw(st.integers(1, len(wire)))
        assert reader.body is None
        reader.feed(wire[:cut])
        wire = wire[cut:]
    if reader.body is None:
        reader.end()
    assert reader.body == PAGE


STATUS_LINES = [b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.0 200 OK", b"http/1.1 200 OK"]
HEADERS = [
    b"date: today",
    b"Content-Type: text/plain",
    b"content-types: none",
    b"Content-Length: 28",
    b"content-length:28",
    b"content-length: 29",
    b"content-length: +28",
    b"content-length : 28",
    b"Content-Encoding: identity",
    b"content-encoding: gzip",
    b"connection: close",
    b"Connection: keep-alive",
    b"transfer-encoding: chunked",
    b"no colon",
    b"odd: \x00\n",
    b"",
]


def outcome(*pieces):
    """All that an answer that comes in these pieces leads to."""
    reader = ResponseReader(1000)
    try:
        for piece in pieces:
            reader.feed(piece)
    except BadResponseError as bad:
        return bad.kind, str(bad)
    return reader.body, reader.keep_alive


@given(
    st.sampled_from(STATUS_LINES),
    st.lists(st.sampled_from(HEADERS), max_size=6),
    st.sampled_from([PAGE, PAGE[:-1], PAGE + b"x"]),
)
@settings(max_examples=500, deadline=None)
def test_an_answer_in_one_piece_is_judged_like_one_in_two(status_line, headers, body):
    """Nearly all come in one piece, and are read in a shorter way."""
    wire = b"\r\n".join((status_line, *headers, b"", body))
    assert outcome(wire) == outcome(wire[:1], wire[1:])


@pytest.mark.parametrize(
    "wire",
    [PLAIN + b"x", CHUNKED + b"x", PLAIN.replace(b"\r\n\r\n", b"\r\nConnection: Close\r\n\r\n", 1)],
)
def test_a_connection_that_cannot_be_trusted_is_not_used_again(wire):
    """Bytes that nobody asked for, or a server that says it closes."""
    reader = read(wire)
    assert reader.body == PAGE
    assert not reader.keep_alive


@pytest.mark.parametrize(
    ("wire", "kind", "what"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "page", "did not answer with HTTP/1"),
        (b"HTTP/2 200\r\n\r\n", "page", "did not answer with HTTP/1"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "page", "did not answer with HTTP/1"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status", "answered 404, expected 200"),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n", "status", "answered 302, expected 200"),
        (b"HTTP/1.1 204\r\n\r\n", "status", "answered 204, expected 200"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n", "page", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "page", "Content-Length"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            "page",
            "Content-Length",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "page", "other than"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", "page", "compressed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", "page", "chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc", "page", "chunk"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 300,
            "page",
            "chunk",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
            "page",
            "larger than 1000",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", "page", "larger than 1000"),
        (
            b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * (1001 + HEAD_BYTES_MAX),
            "page",
            "larger than 1000",
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_BYTES_MAX, "page", "bytes of headers"),
    ],
)
def test_an_answer_that_is_no_page_is_refused(wire, kind, what):
    """The kind is counted, the words go into the sentence."""
    with pytest.raises(BadResponseError, match=what) as caught:
        read(wire)
    assert caught.value.kind == kind


@pytest.mark.parametrize("wire", [PLAIN, CHUNKED])
def test_a_page_that_is_cut_off_is_refused(wire):
    """Half a page could show half a number."""
    reader = read(wire[:-5])
    with pytest.raises(BadResponseError, match="before the page ended"):
        reader.end()


ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        (ENDLESS + b"1\r\nx\r\n" * (CHUNKS_MAX + 1), f"more than {CHUNKS_MAX} chunks"),
        (ENDLESS + b"0\r\n" + b"a: b\r\n" * HEAD_BYTES_MAX, "bytes of trailers"),
    ],
)
def test_an_answer_of_crumbs_is_refused(wire, what):
    """Each chunk costs as much as a page that comes in one."""
    with pytest.raises(BadResponseError, match=what) as caught:
        read(wire, 10**6)
    assert caught.value.kind == "page"


def test_as_many_chunks_as_are_allowed_are_read():
    """A server may write its page line by line."""
    wire = ENDLESS + b"1\r\nx\r\n" * CHUNKS_MAX + b"0\r\n\r\n"
    assert read(wire, 10**6).body == b"x" * CHUNKS_MAX


@pytest.mark.parametrize("head", [PLAIN, CHUNKED, TO_THE_END])
def test_an_answer_in_too_many_pieces_is_refused(head):
    """A server decides how often it wakes the loop: byte by byte it would all the time."""
    wire = head[: head.index(b"\r\n\r\n")] + b"\r\nx: y" * 2_000
    reader = ResponseReader(10**6)
    for byte in wire[:PIECES_MAX]:
        reader.feed(bytes([byte]))
    with pytest.raises(BadResponseError, match=f"more than {PIECES_MAX} pieces") as caught:
        reader.feed(wire[PIECES_MAX : PIECES_MAX + 1])
    assert caught.value.kind == "page"


@given(st.lists(st.sampled_from([*(bytes([b]) for b in CHUNKED), PLAIN[:20], CHUNKED[:60]])))
def test_no_bytes_break_the_reader(pieces):
    """Any bytes give a page, a wish for more, or a `BadResponseError`, nothing else."""
    reader = ResponseReader(100)
    try:
        for piece in pieces:
            if reader.body is None:
                reader.feed(piece)
    except BadResponseError as bad:
        assert bad.kind in ("status", "page")  # noqa: PT017
