"""Certificates of servers on loopback."""

import datetime as dt
import ssl

from epp.shell.gateway.tls import self_signed


def written(folder, name):
    """Write a self-signed certificate for localhost and loopback.

    Return its two files: (certificate, key).
    """
    pair = self_signed("localhost", dt.datetime.now(dt.UTC))
    files = folder / f"{name}.crt", folder / f"{name}.key"
    files[0].write_bytes(pair.certificate_chain)
    files[1].write_bytes(pair.private_key)
    return files


def serving_by(files, clients=None):
    """Return the TLS context of a server with the files (certificate, key).

    The server requires client certificates that the file `clients` vouches for. If `clients` is
    None, it requests none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    return context
