import pytest
import zmq

from epp.shell.peers.admission import ANSWERS_PER_BEAT_MAX, Admission, plain_host
from epp.shell.peers.secret import keys_of

KEYS = keys_of(b"a secret of more than thirty-two bytes")


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("address", "admitted"),
    [
        ("10.0.0.7", True),
        ("::ffff:10.0.0.7", True),
        ("fd00::7", True),
        ("fd00::7%eth0", True),
        ("127.0.0.1", True),
        ("127.0.0.6", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.8", False),
        ("fd00::8", False),
        ("", False),
        ("no address", False),
        ("10.0.0.7\n", False),
    ],
)
def test_in_plaintext_an_address_decides(context, address, admitted):
    """A replica that is known, or this machine; however IPv4 is spelt."""
    admission = Admission(context, None)
    admission.hosts = frozenset({"10.0.0.7", "fd00::7"})
    assert admission.admits(address, []) is admitted
    admission.close()


def test_with_a_secret_only_the_key_decides(context):
    """From wherever: the key cannot be shown without knowing the secret."""
    admission = Admission(context, KEYS)
    admission.hosts = frozenset({"10.0.0.7"})
    key = zmq.utils.z85.decode(KEYS.public)
    assert admission.admits("192.0.2.1", [key])
    for credentials in ([], [b""], [bytes(32)], [key, key], [key[:-1]]):
        assert not admission.admits("10.0.0.7", credentials)
    admission.close()


def test_who_asks_is_answered_in_the_words_of_zap(context):
    """Version, the request's own id, and a status; so many in a beat and no more."""
    admission = Admission(context, None)
    asking = [context.socket(zmq.REQ) for _ in range(ANSWERS_PER_BEAT_MAX + 1)]
    for number, socket in enumerate(asking):
        socket.connect("inproc://zeromq.zap.01")
        address = b"127.0.0.1" if number % 2 else b"192.0.2.1"
        socket.send_multipart([b"1.0", b"%d" % number, b"homing", address, b"", b"NULL"])
    refused = admission.answer()
    assert refused == ["192.0.2.1"] * (ANSWERS_PER_BEAT_MAX // 2)
    assert len(admission.answer()) == 1
    assert admission.answer() == []
    for number, socket in enumerate(asking):
        version, request_id, status, *_ = socket.recv_multipart()
        assert (version, request_id) == (b"1.0", b"%d" % number)
        assert status == (b"200" if number % 2 else b"400")
        socket.close(0)
    admission.close()


@pytest.mark.parametrize(
    ("address", "host"), [("10.0.0.1", "10.0.0.1"), ("FD00::1%2", "fd00::1"), ("x", "None")]
)
def test_an_address_has_one_spelling(address, host):
    assert str(plain_host(address)) == host
