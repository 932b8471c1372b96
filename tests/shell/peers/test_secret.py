import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.shell.peers.secret import (
    FILE_BYTES_MAX,
    answer_to,
    identity_of,
    origin_of,
    peer_identity,
    stranger,
)
from epp.shell.starting import StartError

SECRET = b"0123456789abcdef0123456789abcdef"


def shaken(serving, asking):
    """(origin that the one that asks sees, the other's) after a handshake in memory."""
    pipes = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(pipes[0], pipes[1], server_side=True)
    client = asking.wrap_bio(pipes[1], pipes[0])
    left = [client, server]
    for _ in range(10):
        for each in tuple(left):
            try:
                each.do_handshake()
                left.remove(each)
            except ssl.SSLWantReadError:
                pass
    assert not left, "a handshake takes no more"
    return tuple(origin_of(each.getpeercert(binary_form=True)) for each in (client, server))


def test_who_knows_the_same_secret_is_known_by_its_origin(tmp_path):
    """However the file ends: editors add a line break, Secrets do not."""
    (tmp_path / "one").write_bytes(SECRET)
    (tmp_path / "two").write_bytes(SECRET + b"\n")
    one, two = (peer_identity(str(tmp_path / name)) for name in ("one", "two"))
    assert one.origin != two.origin
    assert one.gate_key == two.gate_key
    assert shaken(one.serving, two.asking) == (one.origin, two.origin)


@pytest.mark.parametrize("theirs", [SECRET[::-1], None], ids=["another secret", "no certificate"])
def test_who_does_not_know_the_secret_is_not(theirs):
    """Neither as the one that asks nor as the one that serves."""
    ours = identity_of(SECRET)
    if theirs is None:
        asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        asking.check_hostname = False
        asking.verify_mode = ssl.CERT_NONE
    else:
        other = identity_of(theirs)
        assert other.gate_key != ours.gate_key
        asking = other.asking
        with pytest.raises(ssl.SSLCertVerificationError):
            shaken(other.serving, ours.asking)
    with pytest.raises(ssl.SSLError):
        shaken(ours.serving, asking)


def test_a_certificate_of_another_replica_alone_is_nobody():
    """Every replica sees it; its key stays where it was drawn."""
    one, two = identity_of(SECRET), identity_of(SECRET)
    assert one.origin != two.origin
    assert one.asking.check_hostname is False
    for context in (one.serving, one.asking):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1


@settings(max_examples=20)
@given(st.binary(min_size=32, max_size=100))
def test_any_secret_gives_an_identity_that_does_not_show_it(secret):
    identity = identity_of(secret)
    assert len(identity.origin) == 8
    shown = repr(identity)
    assert secret.hex() not in shown
    assert identity.gate_key.hex() not in shown


def test_without_a_secret_there_is_nothing_to_encrypt_with():
    """And everybody has the same answer, which says only that it speaks the protocol."""
    identity = peer_identity("")
    assert identity.serving is identity.asking is None
    assert identity.origin != stranger().origin
    nonce = bytes(32)
    assert answer_to(nonce, identity.gate_key) != answer_to(nonce, identity_of(SECRET).gate_key)


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
        peer_identity(str(path))
    assert str(caught.value) == f"--peer-secret-file {path} {problem}"
