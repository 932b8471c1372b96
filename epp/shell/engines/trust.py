"""TLS settings of connections that the picker opens to other servers."""

import ssl

from epp.configuration.compatibility import (
    DcgmDataSource,
    MetricsDataSource,
    MetricsScheme,
    ModelsDataSource,
)
from epp.configuration.document import ConfigError


def client_context(
    what: str,
    *,
    ca_cert_path: str = "",
    client_cert_path: str = "",
    client_key_path: str = "",
    insecure_skip_verify: bool = False,
) -> ssl.SSLContext:
    """Return the TLS context of a client with the given files. Raises `ConfigError`, which names
    `what`, if the files are invalid.
    """
    try:
        if insecure_skip_verify:
            # Loading the authorities of the system takes long, and they are not needed here.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            context = ssl.create_default_context(cafile=ca_cert_path or None)
        if client_cert_path:
            context.load_cert_chain(client_cert_path, client_key_path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([f"{what} cannot be used: {error}"]) from error
    return context


def trust_of(
    source: MetricsDataSource | ModelsDataSource | DcgmDataSource,
) -> ssl.SSLContext | None:
    """Return the TLS context of connections to a data source's server, or None if the connections
    need no context of their own.

    None is needed with http, or if every certificate is accepted and the source has no client
    certificate. Reads files. Raises `ConfigError`.
    """
    if source.scheme is not MetricsScheme.HTTPS:
        return None
    authority = certificate = key = ""
    if not isinstance(source, DcgmDataSource):
        authority, certificate = source.ca_cert_path, source.client_cert_path
        key = source.client_key_path
    if source.insecure_skip_verify and not certificate:
        return None
    return client_context(
        "files of a data source's TLS",
        ca_cert_path=authority,
        client_cert_path=certificate,
        client_key_path=key,
        insecure_skip_verify=source.insecure_skip_verify,
    )
