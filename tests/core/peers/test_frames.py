"""The format in which pickers talk."""

import msgspec
import numpy as np
import pytest

from epp.core.flow.shares import CHARGES_MAX
from epp.core.peers.exchange import ORIGINS_MAX, WANTED_MAX
from epp.core.peers.frames import (
    CHARGE,
    FRAME_BYTES_MAX,
    LOAD,
    LOADS_MAX,
    MAGIC,
    RECORD_BYTES_MAX,
    TOKENS,
    VERSION,
    Frame,
    Kind,
    OtherVersionError,
    Record,
    UnreadableMessageError,
    decode,
    encode,
    encode_record,
    endpoint_hash,
    index_hashes,
    loads_of,
    records_of,
)
from tests.builders import endpoint

FRAME = Frame(b"8 bytes.", 7, Kind.LIVE, 1.5, indexes=(1, 2), records=b"r", load=b"l", whole=True)
RECORDS = (Record(1, 20, ((b"key",), ())), Record(2**64 - 1, 0, (((b"12345678", b"rest"),),)))


def test_what_is_encoded_is_decoded():
    assert decode(encode(FRAME)) == FRAME
    assert list(records_of(b"".join(map(encode_record, RECORDS)))) == list(RECORDS)


def test_the_bytes_of_version_1_stay_as_they_are():
    """Pickers of two releases talk during an update."""
    first = "484d500199c408382062797465732e0700cb3ff8000000000000920102c40172c4016cc390"
    assert decode(bytes.fromhex(first)) == FRAME
    # Members that were appended since are skipped by who does not know them.
    longer = first.replace("484d500199", "484d50019e") + "90cb0000000000000000c400c2c400"
    assert encode(FRAME).hex() == longer
    assert encode_record(RECORDS[0]).hex() == "0b0000009301149291c4036b657990"


def test_a_frame_with_the_load_of_the_most_endpoints_is_readable():
    largest = msgspec.structs.replace(
        FRAME,
        load=bytes(LOADS_MAX * LOAD.itemsize),
        tokens=bytes(LOADS_MAX * TOKENS.itemsize),
        charges=bytes(CHARGES_MAX * CHARGE.itemsize),
        unread=(b"8 bytes.",) * ORIGINS_MAX,
        wanted=((b"8 bytes.", 2**63 - 1, 2**63 - 1),) * WANTED_MAX,
    )
    assert decode(encode(largest)) == largest


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"HMP",
        MAGIC + bytes([VERSION]),
        encode(FRAME)[:-1],
        encode(FRAME) + b"x",
        MAGIC + bytes([VERSION]) + msgspec.msgpack.encode([b"8 bytes.", "seven", 0, 1.5]),
        encode(msgspec.structs.replace(FRAME, origin=b"short")),
        encode(msgspec.structs.replace(FRAME, load=bytes(LOADS_MAX * LOAD.itemsize + 1))),
        encode(msgspec.structs.replace(FRAME, records=bytes(FRAME_BYTES_MAX))),
    ],
)
def test_what_is_no_frame_is_unreadable(message):
    with pytest.raises(UnreadableMessageError if message[:4] != MAGIC else ValueError):
        decode(message)


def test_another_version_is_not_looked_at():
    with pytest.raises(OtherVersionError):
        decode(MAGIC + bytes([VERSION + 1]) + b"whatever")


@pytest.mark.parametrize(
    "rest",
    [b"\1", (9).to_bytes(4, "little") + b"short", (RECORD_BYTES_MAX + 1).to_bytes(4, "little")],
)
def test_records_before_what_is_broken_are_read(rest):
    reading = records_of(encode_record(RECORDS[0]) + rest)
    assert next(reading) == RECORDS[0]
    with pytest.raises(UnreadableMessageError):
        next(reading)


def test_half_a_load_is_left_out():
    loads = np.zeros(3, dtype=LOAD)
    loads["requests"] = [1, 2, 3]
    assert loads_of(loads.tobytes()[:-1])["requests"].tolist() == [1, 2]
    assert len(loads_of(b"")) == 0


def test_hashes_tell_incarnations_and_indexes_apart():
    """And are the same in every process: they are on the wire."""
    first, second = endpoint(1), endpoint(1, incarnation="2")
    assert len({endpoint_hash(first), endpoint_hash(second), endpoint_hash(endpoint(2))}) == 3
    assert endpoint_hash(first) == 4607666869702297583
    assert len(set(index_hashes(["prefix:64", "prefix:64", "session"]))) == 3
    assert index_hashes(["session"]) != index_hashes(["prefix:64"])
