"""Decoders of request bodies: any split gives the same bytes, and hostile input stays in its limits."""

import gzip
import random
import tracemalloc
import zlib
from itertools import pairwise

import brotli
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epp.core.prompt.encodings import (
    CALL_BYTES_MAX,
    FRAMES_MAX,
    READ_BYTES_FREE,
    TURN_BYTES_MAX,
    ZSTD_WINDOW_BYTES_MAX,
    EncodedBody,
    Unparsed,
    is_identity,
    zstd,
)

LIMIT = 32 * 1024 * 1024
SKIPPABLE = (0x184D2A53).to_bytes(4, "little")


def raw_deflate(body):
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(body) + encoder.flush()


def streamed_zstd(body):
    """A frame that does not tell its length, hence has a window descriptor."""
    encoder = zstd.ZstdCompressor()
    return encoder.compress(body) + encoder.flush()


def skippable(content):
    return SKIPPABLE + len(content).to_bytes(4, "little") + content


ENCODERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    " GZip ": gzip.compress,
    "gzip, identity": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "br": brotli.compress,
    "zstd": zstd.compress,
    "ZSTD": streamed_zstd,
}


def halves(encode):
    """Two members or frames, the body split between them."""
    return lambda body: encode(body[: len(body) // 2]) + encode(body[len(body) // 2 :])


MANY = {
    "gzip": halves(gzip.compress),
    "gzip,": lambda body: halves(gzip.compress)(body) + bytes(700),
    "zstd": lambda body: (
        skippable(b"x" * 70_000) + halves(zstd.compress)(body) + skippable(b"") + skippable(b"yz")
    ),
}
CASES = [*ENCODERS.items(), *MANY.items()]


def decoded(encoding, encoded, cuts=(), bytes_max=LIMIT):
    """What becomes of a body that comes in pieces cut at `cuts`."""
    body = EncodedBody(encoding, bytes_max)
    for start, stop in pairwise(
        sorted({0, *(cut % (len(encoded) + 1) for cut in cuts), len(encoded)})
    ):
        body.feed(encoded[start:stop])
        worked_off(body)
    return body


def worked_off(body):
    """Give it turns until nothing is left; each is bounded."""
    while body.unfinished and not body.too_large:
        before = body.decoded_bytes
        body.work()
        assert body.decoded_bytes - before <= TURN_BYTES_MAX + 2 * CALL_BYTES_MAX


bodies = st.one_of(
    st.binary(max_size=3_000),
    st.builds(
        lambda seed, size: random.Random(seed).randbytes(size),
        st.integers(),
        st.integers(0, 200_000),
    ),
    st.builds(lambda text, times: text * times, st.binary(max_size=40), st.integers(0, 10_000)),
)


@pytest.mark.parametrize(("encoding", "encode"), CASES)
@given(body=bodies, cuts=st.lists(st.integers(0, 10**6), max_size=8))
@example(body=b"", cuts=[])
@example(body=b"{}" * 200_000, cuts=[])
@example(body=b"{}" * 200_000, cuts=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
@settings(max_examples=25, deadline=None)
def test_any_split_of_an_encoded_body_decodes_to_the_same_bytes(encoding, encode, body, cuts):
    """Every encoding, in one frame or several, with the output larger than one turn too."""
    if body.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return
    one = decoded(encoding, encode(body), cuts)
    if len(body) > max(READ_BYTES_FREE, 20 * one.encoded_bytes):
        assert one.finish() is None
        assert one.problem is Unparsed.RATIO
        return
    # Not shown when it fails: bodies are long.
    same = one.finish() == body
    assert same


@pytest.mark.parametrize(("encoding", "encode"), CASES)
def test_a_body_cut_at_every_byte_decodes_to_the_same_bytes(encoding, encode):
    """Headers of members and frames are read whole, however they are cut."""
    body = b'{"model":"m","prompt":"once upon a time"}' * 20
    encoded = encode(body)
    assert decoded(encoding, encoded, range(min(len(encoded), 3_000))).finish() == body


@pytest.mark.parametrize(("encoding", "encode"), ENCODERS.items())
def test_a_truncated_body_is_corrupt(encoding, encode):
    """At whatever byte it ends."""
    encoded = encode(b'{"model":"m","prompt":"once upon a time"}')
    for end in range(len(encoded)):
        one = decoded(encoding, encoded[:end])
        assert one.finish() is None
        assert one.problem is Unparsed.CORRUPT


@pytest.mark.parametrize(("encoding", "encode"), CASES)
@given(
    body=st.binary(max_size=2_000),
    noise=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 10**6), max_size=3),
)
@settings(max_examples=50, deadline=None)
def test_corrupt_bodies_never_raise_and_stay_in_their_limits(encoding, encode, body, noise, cuts):
    """Whatever bytes come, the result is a body within the limit or a reason."""
    encoded = bytearray(encode(body))
    for at, byte in noise:
        encoded[at % len(encoded)] = byte
    one = decoded(encoding, bytes(encoded), cuts, bytes_max=10_000)
    if one.too_large:
        assert one.held_bytes <= 10_000 + 2 * CALL_BYTES_MAX
        return
    found = one.finish()
    assert (found is None) == (one.problem is not None)
    assert found is None or len(found) <= 10_000


@given(data=st.binary(max_size=5_000), encoding=st.sampled_from(sorted(ENCODERS)))
@settings(max_examples=200, deadline=None)
def test_any_bytes_become_a_body_or_a_reason(data, encoding):
    """The decoders raise nothing that is not expected."""
    one = decoded(encoding, data, [len(data) // 2])
    found = one.finish()
    assert (found is None) == (one.problem is not None)


def zeros(count_bytes):
    """A gzip body that decodes to so many zeros, made without holding them."""
    encoder = zlib.compressobj(9, wbits=31)
    piece = bytes(2**20)
    return (
        b"".join([encoder.compress(piece) for _ in range(count_bytes // 2**20)]) + encoder.flush()
    )


def zstd_zeros(count_bytes):
    encoder = zstd.ZstdCompressor()
    piece = bytes(2**20)
    return (
        b"".join([encoder.compress(piece) for _ in range(count_bytes // 2**20)]) + encoder.flush()
    )


@pytest.mark.parametrize(
    ("encoding", "bomb", "ratio_min"),
    [
        ("gzip", zeros(256 * 2**20), 1_000),
        ("zstd", zstd_zeros(512 * 2**20), 10_000),
        ("br", brotli.compress(bytes(256 * 2**20), quality=5), 100_000),
    ],
)
def test_bombs_stop_at_the_limit_with_bounded_memory(encoding, bomb, ratio_min):
    """No more than the limit and one turn is ever decoded, or held."""
    assert 256 * 2**20 / len(bomb) > ratio_min
    limit = 4 * 2**20
    tracemalloc.start()
    one = decoded(encoding, bomb, bytes_max=limit)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert one.too_large
    assert one.decoded_bytes <= limit + 2 * CALL_BYTES_MAX
    assert peak_bytes < 2 * limit + ZSTD_WINDOW_BYTES_MAX


def test_a_small_body_that_decodes_to_much_is_not_read():
    """Reading costs more than decoding, so a client must send bytes to cause it."""
    one = decoded("gzip", gzip.compress(b"x" * (READ_BYTES_FREE + 1)))
    assert one.finish() is None
    assert one.problem is Unparsed.RATIO
    assert decoded("gzip", gzip.compress(b"x" * READ_BYTES_FREE)).finish() == b"x" * READ_BYTES_FREE


@pytest.mark.parametrize(
    ("encoding", "encode"), [("gzip", gzip.compress), ("zstd", zstd.compress), ("zstd", skippable)]
)
def test_too_many_frames_are_corrupt(encoding, encode):
    """Each frame takes a decoder of its own."""
    most = decoded(encoding, encode(b"") * FRAMES_MAX)
    assert most.finish() == b""
    more = decoded(encoding, encode(b"") * (FRAMES_MAX + 1))
    assert more.finish() is None
    assert more.problem is Unparsed.CORRUPT


def test_many_frames_are_decoded_in_many_turns():
    """One turn makes a bounded number of decoders, however small the frames are."""
    one = EncodedBody("zstd", LIMIT)
    one.feed(zstd.compress(b"") * FRAMES_MAX)
    turns = 0
    while one.unfinished:
        one.work()
        turns += 1
    assert turns >= FRAMES_MAX // 16


@pytest.mark.parametrize(
    "options",
    [
        {zstd.CompressionParameter.window_log: 24},
        {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.checksum_flag: 1},
    ],
)
def test_a_large_window_of_zstd_is_not_allocated(options):
    """RFC 9659 allows 8 MiB."""
    encoder = zstd.ZstdCompressor(options=options)
    one = decoded("zstd", encoder.compress(b"prompt") + encoder.flush())
    assert one.finish() is None
    assert one.problem is Unparsed.WINDOW
    assert one.held_bytes == 0


def test_the_largest_window_of_zstd_is_decoded_and_counted():
    """A decoder with a large window counts as much memory."""
    encoder = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 23})
    one = EncodedBody("zstd", LIMIT)
    one.feed(encoder.compress(b"prompt", zstd.ZstdCompressor.FLUSH_BLOCK))
    worked_off(one)
    assert one.held_bytes > ZSTD_WINDOW_BYTES_MAX
    one.feed(encoder.flush())
    worked_off(one)
    assert one.finish() == b"prompt"


def test_a_large_window_of_brotli_is_not_allocated():
    """The first byte of a stream by RFC 7932 cannot be 0x11."""
    one = decoded("br", b"\x11\x1e" + bytes(20))
    assert one.finish() is None
    assert one.problem is Unparsed.WINDOW


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("compress", Unparsed.UNKNOWN),
        ("*", Unparsed.UNKNOWN),
        ("zstd;q=1", Unparsed.UNKNOWN),
        ("gzip, zstd", Unparsed.STACKED),
        ("gzip,gzip", Unparsed.STACKED),
    ],
)
def test_what_cannot_be_decoded_has_a_reason(encoding, reason):
    """It is known from the header, and nothing is held."""
    one = decoded(encoding, b"anything")
    assert one.finish() is None
    assert one.problem is reason
    assert one.held_bytes == 0


@pytest.mark.parametrize("inner", [gzip.compress, zstd.compress])
def test_an_encoding_inside_of_another_is_stacked(inner):
    """A gateway that shows two headers of one name shows the picker only the last."""
    one = decoded("zstd", zstd.compress(inner(b"{}")))
    assert one.finish() is None
    assert one.problem is Unparsed.STACKED


@pytest.mark.parametrize("encoding", ["", " ", "identity", " Identity , identity", ","])
def test_identity_is_no_encoding(encoding):
    """Such a body is read as it is."""
    assert is_identity(encoding)
    assert not is_identity(f"{encoding},gzip")
