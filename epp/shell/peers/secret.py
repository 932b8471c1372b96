"""What replicas know each other by: one secret in a file, and what follows from it.

Of the secret a replica derives the key of an authority, which all replicas have in common, and
lets it sign a certificate for a key that it draws for its own lifetime. In a handshake of TLS 1.3
each side wants a certificate of that authority. So whoever does not know the secret cannot speak
to a replica, nor read what replicas say, nor pass for one; and who does know it cannot pass for
another replica, because an origin is the hash of the certificate that was shown. What was
recorded cannot be read with a secret that becomes known later.

Certificates have no term: the secret is what ends them. Clocks of replicas may differ.
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
"""As `openssl rand -base64 32` and more; what can be guessed is no secret."""
FILE_BYTES_MAX: Final = 65_536
_AUTHORITY: Final = b"homing-peer-ca-1"
_GATE: Final = b"homing-peer-gate"
"""Of the hashes; another purpose of the same secret gives another key."""
_BEGIN: Final = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
_END: Final = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)
"""No end, as RFC 5280 (4.1.2.5) spells it."""


class Identity(Struct, frozen=True):
    """Who this process is among its peers, and how it knows them."""

    origin: bytes
    """8 bytes: of the hash of its certificate, or random where there is no secret."""
    gate_key: bytes = b""
    """With which a newcomer shows that it knows the secret before anything else is done for it."""
    serving: ssl.SSLContext | None = None
    """For connections to us; None, as is the next: in plaintext."""
    asking: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"<Identity {self.origin.hex()[:8]}>"


def read_secret(path: str, flag: str) -> bytes:
    """The content of `path` that `flag` names, without white space round it. `StartError`."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise StartError(f"{flag} {path} cannot be read: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise StartError(f"{flag} {path} is larger than {FILE_BYTES_MAX} bytes")
    return content.strip()


def peer_identity(path: str) -> Identity:
    """A new one by the secret in the file `path`; "": without a secret. Raises `StartError`."""
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
    """One that no secret vouches for: it speaks plaintext."""
    return Identity(secrets.token_bytes(ORIGIN_BYTES))


def identity_of(secret: bytes) -> Identity:
    """A new one at each call, which all that know `secret` know for one of theirs."""
    # Any 32 bytes are a key of Ed25519 (RFC 8032, 5.1.5).
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
    """The origin of who has the key of `certificate` (DER)."""
    return hashlib.sha256(certificate).digest()[:ORIGIN_BYTES]


def answer_to(nonce: bytes, gate_key: bytes) -> bytes:
    """What shows whoever drew `nonce` that one knows the secret; 32 bytes."""
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
        # Nobody comes back to a session: a connection lasts as long as both processes.
        context.num_tickets = 0
    # Python takes them from files only. Nobody else can open these, and they are gone at once.
    with tempfile.TemporaryDirectory(prefix="homing-") as folder:
        files = Path(folder, "tls.crt"), Path(folder, "tls.key")
        for file, content in zip(files, (chain, key), strict=True):
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as opened:
                opened.write(content)
        context.load_cert_chain(*files)
    return context
