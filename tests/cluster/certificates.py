"""One authority, a certificate for each part of the control plane and for the administrator."""

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.cluster.place import NODE, NODE_ADDRESS, SERVICE_ADDRESS

VALID: Final = dt.timedelta(days=3650)
_SKEW: Final = dt.timedelta(hours=1)
AUTHORITY: Final = "ca"
SERVER: Final = "apiserver"
SIGNER: Final = "serviceaccounts"
"""Name of the key that signs tokens of ServiceAccounts."""
FRONT: Final = "front-proxy"
WHO: Final = {
    "admin": ("system:masters", "admin"),
    "kubelet": ("system:nodes", f"system:node:{NODE}"),
    "kube-controller-manager": ("", "system:kube-controller-manager"),
    "kube-scheduler": ("", "system:kube-scheduler"),
    "kube-proxy": ("", "system:kube-proxy"),
}
"""File -> organisation and name: the groups and the user that the API server takes it for."""
_API_NAMES: Final = (
    *("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"),
    "kubernetes.default.svc.cluster.local",
)


def write(folder: Path) -> None:
    """Write all keys and certificates into `folder`, unless they are there."""
    if (folder / f"{AUTHORITY}.crt").exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _signed("", "homing-cluster", key.public_key(), (), key, None)
    _keep(folder, AUTHORITY, key, authority)
    leaves = {
        SERVER: ("", "kube-apiserver", (*_API_NAMES, NODE_ADDRESS, "127.0.0.1", SERVICE_ADDRESS)),
        FRONT: ("", "front-proxy", ()),
        **{name: (*who, (NODE, NODE_ADDRESS)) for name, who in WHO.items()},
    }
    for name, (organisation, common_name, addresses) in leaves.items():
        own = ec.generate_private_key(ec.SECP256R1())
        signed = _signed(organisation, common_name, own.public_key(), addresses, key, authority)
        _keep(folder, name, own, signed)
    signer = ec.generate_private_key(ec.SECP256R1())
    (folder / f"{SIGNER}.key").write_bytes(_private(signer))
    (folder / f"{SIGNER}.pub").write_bytes(
        signer.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def write_kubeconfig(file: Path, folder: Path, who: str) -> None:
    """Write the kubeconfig of `who`, one of `WHO`, whose certificate is in `folder`, to `file`."""
    cluster = {
        "server": f"https://{NODE_ADDRESS}:6443",
        "certificate-authority": str(folder / f"{AUTHORITY}.crt"),
    }
    user = {
        "client-certificate": str(folder / f"{who}.crt"),
        "client-key": str(folder / f"{who}.key"),
    }
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "homing", "cluster": cluster}],
        "users": [{"name": who, "user": user}],
        "contexts": [{"name": "homing", "context": {"cluster": "homing", "user": who}}],
        "current-context": "homing",
    }
    file.write_text(yaml.safe_dump(document))


def _signed(
    organisation: str,
    common_name: str,
    key: ec.EllipticCurvePublicKey,
    addresses: Sequence[str],
    signer: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate | None,
) -> x509.Certificate:
    names = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organisation:
        names.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
    subject = x509.Name(names)
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.subject if authority else subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
    )
    if authority is not None:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if addresses:
        told = [_general(address) for address in addresses]
        builder = builder.add_extension(x509.SubjectAlternativeName(told), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _general(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _keep(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    (folder / f"{name}.key").write_bytes(_private(key))
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
