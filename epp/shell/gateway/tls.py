"""The certificate that the gRPC server shows, and whose it wants to see.

Ours is made in memory, or read and re-read from files. A certificate of the gateway is asked for
only where a file tells who may sign it. gRPC itself negotiates ALPN h2. Gateways do not verify the
picker's certificate by default.
"""

import asyncio
import datetime as dt
import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
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

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
"""As Kubernetes names them in a TLS secret."""
PEM_BYTES_MAX: Final = 1 << 20
SELF_SIGNED_DAYS: Final = 3650


class CertificatePair(Struct, frozen=True):
    """PEM: a chain, leaf first, and the private key of the leaf."""

    certificate_chain: bytes
    private_key: bytes


def self_signed(host_name: str, now: dt.datetime) -> CertificatePair:
    """A P-256 certificate for localhost and `host_name`, valid for ten years from `now`."""
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
        # Clocks of a cluster differ: a minute early is valid everywhere at once.
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
    """Read and check `tls.crt` and `tls.key`. Raises `ValueError`, one sentence, if unusable."""
    pair = CertificatePair(_read(directory / CERTIFICATE_FILE), _read(directory / KEY_FILE))
    check_pair(pair, directory)
    return pair


def check_pair(pair: CertificatePair, directory: Path) -> None:
    """Raises `ValueError` when either does not parse, or the key is not the certificate's."""
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
    """Read PEM certificates that may sign others. Raises `ValueError`, one sentence, if unusable."""
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
    """What new connections are shown and asked for, and the gRPC credentials that do it.

    Keep it for as long as the server lives: gRPC calls back into it at every handshake.
    """

    def __init__(
        self,
        pair: CertificatePair,
        directory: Path | None = None,
        client_ca: Path | None = None,
        client_authorities: bytes | None = None,
    ) -> None:
        """`directory` is where newer pairs may appear; None: never.

        With `client_authorities`, PEM, clients must show a certificate that one of them signed;
        `client_ca` is the file where newer ones may appear.
        """
        self._directory = directory
        self._client_ca = client_ca
        self._pair = pair
        self._authorities = client_authorities
        self._rejected = ""
        # Assigned on the event loop, read by gRPC's handshake threads: one reference, no lock.
        self._configuration = _configuration(pair, client_authorities)
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._configuration,
            lambda: self._configuration,
            require_client_authentication=client_authorities is not None,
        )

    @classmethod
    def open(
        cls,
        directory: Path | None,
        client_ca: Path | None = None,
        client_authorities: bytes | None = None,
    ) -> "ServerCertificate":
        """From `directory`, or self-signed. Raises `ValueError` if the files are unusable."""
        if directory is None:
            pair = self_signed(socket.gethostname(), dt.datetime.now(dt.UTC))
        else:
            pair = read_pair(directory)
        return cls(pair, directory, client_ca, client_authorities)

    @property
    def pair(self) -> CertificatePair:
        """What new connections are shown."""
        return self._pair

    def reload(self) -> bool:
        """Take what has changed in the files; true if anything has.

        Raises `ValueError` if one of them is unusable; then the last good ones stay in force.
        """
        pair = self._pair if self._directory is None else read_pair(self._directory)
        authorities = self._authorities
        if self._client_ca is not None:
            authorities = read_authorities(self._client_ca)
        if (pair, authorities) == (self._pair, self._authorities):
            return False
        self._configuration = _configuration(pair, authorities)
        self._pair, self._authorities = pair, authorities
        return True

    async def watch(self, interval_s: float, report: Callable[[str, bool], None]) -> None:
        """Reload every `interval_s` until cancelled.

        `report(sentence, good)` is called once for each pair taken, and once for each new reason
        why one was not; a reason that stays the same is not repeated.
        """
        watched = [str(path) for path in (self._directory, self._client_ca) if path is not None]
        if not watched:
            return
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


def _configuration(
    pair: CertificatePair, authorities: bytes | None
) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pair.private_key, pair.certificate_chain)], root_certificates=authorities
    )
