import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.peers.secret import FILE_BYTES_MAX, keys_of, peer_keys
from epp.shell.starting import StartError

SECRET = b"0123456789abcdef0123456789abcdef"


def test_the_same_secret_gives_the_same_keys_however_the_file_ends(tmp_path):
    """Editors add a line break, Secrets do not."""
    (tmp_path / "one").write_bytes(SECRET)
    (tmp_path / "two").write_bytes(SECRET + b"\n")
    (tmp_path / "other").write_bytes(SECRET[::-1])
    one, two, other = (peer_keys(str(tmp_path / name)) for name in ("one", "two", "other"))
    assert one == two != other


@given(st.binary(min_size=32, max_size=100))
def test_any_secret_gives_a_pair_that_belongs_together(secret):
    keys = keys_of(secret)
    assert zmq.curve_public(keys.secret) == keys.public
    assert secret.hex() not in repr(keys)
    assert keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (SECRET[:-1], "has 31 bytes, expected at least 32"),
        (b" " * 100, "has 0 bytes, expected at least 32"),
        (b"x" * (FILE_BYTES_MAX + 1), "is larger than 65536 bytes"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_without_a_secret_is_one_sentence(tmp_path, content, problem):
    """Which says nothing of what is in it."""
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartError) as caught:
        peer_keys(str(path))
    assert str(caught.value) == f"--peer-secret-file {path} {problem}"
