"""Certificates of servers on loopback."""

import datetime as dt
import ssl

from epp.shell.gateway.tls import self_signed


def written(folder, name):
    """(certificate, key), two files: it names localhost and loopback, and nobody vouches for it."""
    pair = self_signed("localhost", dt.datetime.now(dt.UTC))
    files = folder / f"{name}.crt", folder / f"{name}.key"
    files[0].write_bytes(pair.certificate_chain)
    files[1].write_bytes(pair.private_key)
    return files


def serving_by(files, clients=None):
    """What a server speaks TLS with; it asks for certificates that the file `clients` vouches for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    return context
