"""Derive the identity of replicas from one shared secret in a file.

A replica derives from the secret the key of a certificate authority, which all replicas share. The
authority signs a certificate for a random key that lives as long as the process. Each side of a TLS
1.3 handshake requires a certificate of this authority. A host without the secret can therefore
neither talk to a replica, nor read its traffic, nor impersonate a replica. A host with the secret
cannot impersonate another replica, because an origin is the hash of the presented certificate.
Recorded traffic stays unreadable if the secret leaks later.

Certificates do not expire; changing the secret invalidates them. Clocks of replicas may differ.
"""

import datetime as dt
import hashlib
import os
import secrets
import ssl
import tempfile
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from msgspec import Struct

from epp.core.peers.frames import ORIGIN_BYTES
from epp.shell.starting import StartError

SECRET_BYTES_MIN: Final = 32
"""Minimum length of the peers' shared secret in bytes; `openssl rand -base64 32` generates a longer
one.
"""
FILE_BYTES_MAX: Final = 65_536
_AUTHORITY: Final = b"homing-peer-ca-1"
_GATE: Final = b"homing-peer-gate"
"""Purpose of the key for the gate, the check of a client before TLS. Each purpose yields another
key from the same secret.
"""
_BEGIN: Final = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
_END: Final = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)
"""End of validity that stands for a certificate without expiry, as RFC 5280 (4.1.2.5) defines
it.
"""


class Identity(Struct, frozen=True):
    """The identity of this process among the replicas, and the means to authenticate its peers."""

    origin: bytes
    """Id of this process: eight bytes of its certificate's hash, or eight random bytes without a
    secret.
    """
    gate_key: bytes = b""
    """Key with which a connection's client proves at the gate, before TLS, that it knows the
    secret; b"" without a secret.
    """
    serving: ssl.SSLContext | None = None
    """TLS context of incoming connections from peers, or None for plaintext. `asking` is the
    context of outgoing connections.
    """
    asking: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"<Identity {self.origin.hex()[:8]}>"


def read_secret(path: str, flag: str) -> bytes:
    """Return the secret in the file at `path` without surrounding white space.

    `flag` names the file in errors. Raises `StartError`.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise StartError(f"{flag} {path} cannot be read: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise StartError(f"{flag} {path} is larger than {FILE_BYTES_MAX} bytes")
    return content.strip()


def peer_identity(path: str) -> Identity:
    """Return a new identity for this process, with the secret in the file at `path`, or without a
    secret if `path` is "".

    Raises `StartError` if the secret is unusable.
    """
    if not path:
        return stranger()
    content = read_secret(path, "--peer-secret-file")
    if len(content) < SECRET_BYTES_MIN:
        raise StartError(
            f"--peer-secret-file {path} has {len(content)} bytes, expected at least "
            f"{SECRET_BYTES_MIN}"
        )
    return identity_of(content)


def stranger() -> Identity:
    """Return an identity without a secret, whose connections use plaintext."""
    return Identity(secrets.token_bytes(ORIGIN_BYTES))


def identity_of(secret: bytes) -> Identity:
    """Return a new identity for this process, which every process with the same `secret` accepts as
    that of a peer.
    """
    # Every 32 bytes are a valid Ed25519 key (RFC 8032, 5.1.5).
    authority_key = Ed25519PrivateKey.from_private_bytes(_derived(secret, _AUTHORITY))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "homing peers")])
    authority = (
        _certificate(name, authority=True)
        .public_key(authority_key.public_key())
        .sign(authority_key, None)
    )
    own_key = ec.generate_private_key(ec.SECP256R1())
    own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "homing peer")])
    own = (
        _certificate(own_name, authority=False)
        .issuer_name(name)
        .public_key(own_key.public_key())
        .sign(authority_key, None)
    )
    chain = own.public_bytes(Encoding.PEM)
    private = own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    serving, asking = (
        _context(kind, chain, private, authority.public_bytes(Encoding.PEM))
        for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    return Identity(
        origin_of(own.public_bytes(Encoding.DER)), _derived(secret, _GATE), serving, asking
    )


def origin_of(certificate: bytes) -> bytes:
    """Return the origin (8-byte id) of the replica that presents this `certificate` (DER)."""
    return hashlib.sha256(certificate).digest()[:ORIGIN_BYTES]


def answer_to(nonce: bytes, gate_key: bytes) -> bytes:
    """Return the 32 bytes with which a client proves that it knows the secret: a hash of `nonce`
    with `gate_key`.
    """
    return hashlib.blake2b(nonce, key=gate_key, digest_size=32).digest()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=purpose).digest()


def _certificate(name: x509.Name, *, authority: bool) -> x509.CertificateBuilder:
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    return builder.issuer_name(name) if authority else builder


def _context(kind: int, chain: bytes, key: bytes, authority: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.decode("ascii"))
    if kind == ssl.PROTOCOL_TLS_SERVER:
        # Session tickets are useless, because a connection lasts as long as both processes.
        context.num_tickets = 0
    # Python loads certificates only from files. The files are private and deleted immediately.
    with tempfile.TemporaryDirectory(prefix="homing-") as folder:
        files = Path(folder, "tls.crt"), Path(folder, "tls.key")
        for file, content in zip(files, (chain, key), strict=True):
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as opened:
                opened.write(content)
        context.load_cert_chain(*files)
    return context
