import asyncio

import pytest
from structlog.testing import capture_logs

from epp.shell.files.session_keys import (
    FILE_BYTES_MAX,
    SessionKeys,
    SessionKeysError,
    read_session_keys,
)
from epp.shell.starting import StartError

OLD, NEW = b"o" * 32, b"n" * 44


def test_a_line_is_a_key():
    """In their order; empty lines and white space round them do not count."""
    assert read_session_keys(b"\n  " + NEW + b"\r\n\n" + OLD, "keys") == (NEW, OLD)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "keys: has 0 keys, expected 1 to 8"),
        (b"\n \n", "keys: has 0 keys, expected 1 to 8"),
        (NEW + b"\nsesame", "keys: line 2 has 6 bytes, expected a key of at least 32"),
        ((NEW + b"\n") * 9, "keys: has 9 keys, expected 1 to 8"),
    ],
)
def test_keys_that_cannot_be_used_are_refused_without_showing_them(content, said):
    with pytest.raises(SessionKeysError) as error:
        read_session_keys(content, "keys")
    assert str(error.value) == said


def test_without_a_file_every_process_has_a_key_of_its_own():
    """One that nobody can guess."""
    one, two = (SessionKeys("", lambda _: None) for _ in range(2))
    assert one.keys != two.keys
    assert [len(key) for key in one.keys] == [32]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"sesame", "line 1 has 6 bytes"),
        (b"x" * (FILE_BYTES_MAX + 1), "is larger than"),
    ],
)
def test_at_start_a_wrong_file_is_fatal(tmp_path, content, said):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartError, match=said) as error:
        SessionKeys(str(path), lambda _: None)
    assert "sesame" not in str(error.value)


async def test_later_the_last_good_keys_stay(tmp_path):
    """What is wrong is logged in a sentence without a key, what is good is told."""
    path = tmp_path / "keys"
    path.write_bytes(OLD)
    told = asyncio.Queue()
    keys = SessionKeys(str(path), told.put_nowait, poll_s=0.01)
    assert keys.keys == (OLD,)
    with capture_logs() as lines:
        running = asyncio.create_task(keys.run())
        try:
            async with asyncio.timeout(10):
                path.write_bytes(b"sesame")
                while not lines:
                    await asyncio.sleep(0.01)
                assert keys.keys == (OLD,)
                path.write_bytes(NEW + b"\n" + OLD)
                assert await told.get() == (NEW, OLD)
        finally:
            running.cancel()
    assert keys.keys == (NEW, OLD)
    assert lines[0]["event"] == "session token keys rejected, the last valid ones stay in force"
    assert lines[-1]["keys"] == 2
    for secret in ("sesame", OLD.decode(), NEW.decode()):
        assert secret not in str(lines)
