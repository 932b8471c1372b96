import msgspec
import pytest

from epp.core.types import ApiKind
from epp.shell.engines.tokens.frames import (
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    Begin,
    Cannot,
    Done,
    Job,
    Load,
    Loaded,
    Ready,
    framed,
    from_worker,
    length_of,
    to_worker,
)

ASKED = (Begin(b"{}", "m"), Load("m"), Job("m", ApiKind.CHAT, body=b'{"a":1}'))
ANSWERED = (
    Ready(("m", "n")),
    Cannot("why"),
    Loaded("m", "", "tiktoken", cut=True, template=True, seconds=1.5),
    Done((b"\1\0\0\0",), "found", 1, 2, 3),
)


@pytest.mark.parametrize(
    ("message", "read"),
    [*((one, to_worker) for one in ASKED), *((one, from_worker) for one in ANSWERED)],
)
def test_what_is_told_arrives(message, read):
    """Behind its length."""
    frame = framed(message)
    length = length_of(frame[:LENGTH_BYTES])
    assert length == len(frame) - LENGTH_BYTES
    assert read(frame[LENGTH_BYTES:]) == message


def test_a_frame_without_end_is_not_read():
    """Neither side trusts the other's length."""
    with pytest.raises(ValueError, match="a frame has"):
        length_of((FRAME_BYTES_MAX + 1).to_bytes(LENGTH_BYTES, "little"))


@pytest.mark.parametrize("frame", [b"", b"\xc1", framed(ASKED[0])[LENGTH_BYTES:], b"\x93\1\2\3"])
def test_what_is_no_answer_is_one_kind_of_error(frame):
    """A question, for one."""
    with pytest.raises(msgspec.DecodeError):
        from_worker(frame)
