"""The picker's TLS certificate, and the authorities that must sign gateways' certificates.

The certificate is generated in memory, or read from files and reloaded. A gateway must present a
certificate only if a file names the authorities. Gateways do not verify the picker's certificate by
default.
"""

import asyncio
import datetime as dt
import ipaddress
import os
import socket
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID
from msgspec import Struct

from epp.shell.supervision import forever

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
"""Name of the file with the private key in a Kubernetes TLS secret; `tls.crt` contains the
certificate.
"""
PEM_BYTES_MAX: Final = 1 << 20
SELF_SIGNED_DAYS: Final = 3650
HANDSHAKE_S_MAX: Final = 10.0
"""Maximum time of a TLS handshake in seconds. A slower connection is closed; it does not count as a
connection before its handshake.
"""


class CertificatePair(Struct, frozen=True):
    """A TLS certificate chain, leaf first, and the private key of the leaf, both as PEM."""

    certificate_chain: bytes
    private_key: bytes


def self_signed(host_name: str, now: dt.datetime) -> CertificatePair:
    """Return a self-signed P-256 certificate for `host_name`, localhost and its IP addresses, valid
    from a minute before `now` for about ten years.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "homing")])
    names = [x509.DNSName(dns_name) for dns_name in dict.fromkeys(("localhost", host_name))]
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The validity begins a minute early, because clocks in a cluster differ.
        .not_valid_before(now - dt.timedelta(minutes=1))
        .not_valid_after(now + dt.timedelta(days=SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName([*names, *addresses]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    return CertificatePair(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def read_pair(directory: Path) -> CertificatePair:
    """Read and check `tls.crt` and `tls.key` in a directory. Raises `ValueError`, one sentence, if
    they are unusable.
    """
    pair = CertificatePair(_read(directory / CERTIFICATE_FILE), _read(directory / KEY_FILE))
    check_pair(pair, directory)
    return pair


def check_pair(pair: CertificatePair, directory: Path) -> None:
    """Raise `ValueError` if the certificate chain or the key does not parse, or they do not
    match.
    """
    try:
        leaf = x509.load_pem_x509_certificates(pair.certificate_chain)[0]
    except ValueError as problem:
        raise ValueError(
            f"{directory / CERTIFICATE_FILE}: expected PEM certificates: {problem}"
        ) from problem
    try:
        key = load_pem_private_key(pair.private_key, password=None)
    except (ValueError, TypeError) as problem:
        raise ValueError(
            f"{directory / KEY_FILE}: expected an unencrypted PEM private key: {problem}"
        ) from problem
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ValueError(
            f"{directory}: {KEY_FILE} must be the private key of the first certificate in "
            f"{CERTIFICATE_FILE}, and is not"
        )


def read_authorities(path: Path) -> bytes:
    """Read PEM certificates of certificate authorities. Raises `ValueError`, one sentence, if they
    are unusable.
    """
    content = _read(path)
    try:
        x509.load_pem_x509_certificates(content)
    except ValueError as problem:
        raise ValueError(f"{path}: expected PEM certificates: {problem}") from problem
    return content


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(PEM_BYTES_MAX + 1)
    except OSError as problem:
        raise ValueError(f"{path}: cannot be read: {problem.strerror}") from problem
    if len(content) > PEM_BYTES_MAX:
        raise ValueError(f"{path}: is longer than {PEM_BYTES_MAX} bytes, expected a PEM file")
    return content


class ServerCertificate:
    """The picker's certificate for new TLS connections, and the authorities that must have signed
    gateways' certificates.

    The object must live as long as the server, because it is used at every handshake.
    """

    def __init__(
        self,
        pair: CertificatePair,
        directory: Path | None = None,
        client_ca: Path | None = None,
        client_authorities: bytes | None = None,
    ) -> None:
        """Create a holder of the certificate `pair`. New pairs are read from `directory`, or never
        if it is None.

        With `client_authorities`, as PEM, clients must present a certificate that one of them
        signed; `client_ca` is the file from which it is reloaded.
        """
        self._directory = directory
        self._client_ca = client_ca
        self._pair = pair
        self._authorities = client_authorities
        self._rejected = ""
        self._context: ssl.SSLContext | None = None

    @classmethod
    def open(
        cls,
        directory: Path | None,
        client_ca: Path | None = None,
        client_authorities: bytes | None = None,
    ) -> "ServerCertificate":
        """Return the picker's certificate from `directory`, or a self-signed one if it is None.
        Raises `ValueError` if the files are unusable.
        """
        if directory is None:
            pair = self_signed(socket.gethostname(), dt.datetime.now(dt.UTC))
        else:
            pair = read_pair(directory)
        return cls(pair, directory, client_ca, client_authorities)

    @property
    def pair(self) -> CertificatePair:
        """Certificate and private key that are presented on new connections."""
        return self._pair

    @property
    def authorities(self) -> bytes | None:
        """Authorities, as PEM, that must sign the certificate of a gateway; None if it needs no
        certificate.
        """
        return self._authorities

    def ssl_context(self) -> ssl.SSLContext:
        """Return the TLS context of one listening port. New connections get the certificate that is
        in force when they begin.
        """
        listening = _ssl_context(self._pair, self._authorities)
        self._context = listening

        def choose(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            # Python calls this at each handshake, whether or not the client names a server.
            assert self._context is not None
            connection.context = self._context

        listening.sni_callback = choose
        return listening

    def reload(self) -> bool:
        """Load changed files of the certificate and the authorities, and return whether anything
        changed.

        Raises `ValueError` if one of the files is unusable; the last good certificate and
        authorities then stay in force.
        """
        pair = self._pair if self._directory is None else read_pair(self._directory)
        authorities = self._authorities
        if self._client_ca is not None:
            authorities = read_authorities(self._client_ca)
        if (pair, authorities) == (self._pair, self._authorities):
            return False
        if self._context is not None:
            self._context = _ssl_context(pair, authorities)
        self._pair, self._authorities = pair, authorities
        return True

    async def watch(self, interval_s: float, report: Callable[[str, bool], None]) -> None:
        """Reload the files of the certificate and the authorities, if there are any, every
        `interval_s` seconds until cancelled.

        `report(sentence, good)` is called once for each change that is loaded, and once for each
        new reason why one is rejected. An unchanged reason is not repeated.
        """
        watched = [str(path) for path in (self._directory, self._client_ca) if path is not None]
        if not watched:
            await forever()
        while True:
            await asyncio.sleep(interval_s)
            try:
                taken = self.reload()
            except ValueError as problem:
                if str(problem) != self._rejected:
                    self._rejected = str(problem)
                    report(f"{problem}; the last good certificate stays in force", False)
                continue
            self._rejected = ""
            if taken:
                report(f"{' and '.join(watched)}: the changed certificate is in force", True)


def _ssl_context(pair: CertificatePair, authorities: bytes | None) -> ssl.SSLContext:
    """Return a TLS context that presents `pair`, speaks HTTP/2 only, and requires clients to have a
    certificate of `authorities` if that is not None.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    # Session resumption is off, because a resumed session presents no certificate and would outlive
    # its authority. Gateways connect seldom and can afford full handshakes.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    # Python loads certificates from files only. Only this user can read these, and they are deleted
    # at once.
    with tempfile.TemporaryDirectory(prefix="homing-") as folder:
        chain, key = Path(folder) / CERTIFICATE_FILE, Path(folder) / KEY_FILE
        for file, content in ((chain, pair.certificate_chain), (key, pair.private_key)):
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as opened:
                opened.write(content)
        context.load_cert_chain(chain, key)
    if authorities is not None:
        context.load_verify_locations(cadata=authorities.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context
