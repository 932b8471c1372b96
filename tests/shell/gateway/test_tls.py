import asyncio
import datetime as dt
import socket
import ssl
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from bench.raw_http2 import PREFACE, SETTINGS, frame
from epp.shell.gateway.tls import (
    PEM_BYTES_MAX,
    CertificatePair,
    ServerCertificate,
    read_authorities,
    read_pair,
    self_signed,
)
from tests.transports import TRANSPORTS, carried, transport_of


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def write(directory, pair):
    (directory / "tls.crt").write_bytes(pair.certificate_chain)
    (directory / "tls.key").write_bytes(pair.private_key)


def der(pair):
    return ssl.PEM_cert_to_DER_cert(pair.certificate_chain.decode())


@asynccontextmanager
async def serving(name, certificate):
    transport = transport_of(name, {})
    async with carried(transport, certificate=certificate) as port:
        yield port


async def connect(port):
    """What a gateway sees: (protocol negotiated, certificate in DER)."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    tls = writer.get_extra_info("ssl_object")
    seen = tls.selected_alpn_protocol(), tls.getpeercert(binary_form=True)
    writer.close()
    # gRPC may close first: the handshake is all that is asked for.
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return seen


def test_the_self_signed_certificate_names_this_host_for_ten_years():
    """P-256, localhost and the host name, valid from just before now for ten years."""
    pair = self_signed("picker-0", NOW)
    certificate = x509.load_pem_x509_certificate(pair.certificate_chain)
    assert isinstance(certificate.public_key().curve, ec.SECP256R1)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "picker-0"]
    assert certificate.not_valid_before_utc <= NOW
    assert certificate.not_valid_after_utc == NOW + dt.timedelta(days=3650)


async def test_grpc_negotiates_h2_with_the_self_signed_pair(transport):
    """A client that offers h2 and http/1.1 gets h2 and the certificate made in memory."""
    certificate = ServerCertificate.open(None)
    async with serving(transport, certificate) as port:
        assert await connect(port) == ("h2", der(certificate.pair))


async def test_a_client_that_trusts_the_certificate_can_call(transport):
    """Verification works too, for gateways that do it: localhost is among the names."""
    certificate = ServerCertificate.open(None)
    credentials = grpc.ssl_channel_credentials(certificate.pair.certificate_chain)
    async with (
        serving(transport, certificate) as port,
        grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as answered:
            await channel.unary_unary("/no/Such")(b"")
        assert answered.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_swapped_pair_is_served_to_new_connections(tmp_path, transport):
    """After a reload the next connection sees the new certificate; without, the old one."""
    first, second = self_signed("a", NOW), self_signed("b", NOW)
    write(tmp_path, first)
    certificate = ServerCertificate.open(tmp_path)
    async with serving(transport, certificate) as port:
        assert await connect(port) == ("h2", der(first))
        assert not certificate.reload()
        write(tmp_path, second)
        assert await connect(port) == ("h2", der(first))
        assert certificate.reload()
        assert await connect(port) == ("h2", der(second))
        assert await connect(port) == ("h2", der(second))


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("tls.crt", b"garbage", "tls.crt: expected PEM certificates"),
        ("tls.key", b"garbage", "tls.key: expected an unencrypted PEM private key"),
        ("tls.key", b"x" * (PEM_BYTES_MAX + 1), "tls.key: is longer than"),
        ("tls.key", self_signed("other", NOW).private_key, "must be the private key of"),
        ("tls.key", None, "tls.key: cannot be read: No such file"),
    ],
)
async def test_a_bad_pair_is_refused_in_a_sentence_and_the_last_good_one_served(
    tmp_path, file, content, sentence, transport
):
    """Whatever is wrong with the files, connections still see the last good pair."""
    good = self_signed("a", NOW)
    write(tmp_path, good)
    certificate = ServerCertificate.open(tmp_path)
    async with serving(transport, certificate) as port:
        if content is None:
            (tmp_path / file).unlink()
        else:
            (tmp_path / file).write_bytes(content)
        with pytest.raises(ValueError, match=sentence) as refused:
            certificate.reload()
        assert "\n" not in str(refused.value)
        assert await connect(port) == ("h2", der(good))
        write(tmp_path, self_signed("b", NOW))
        assert certificate.reload()


def test_a_bad_pair_at_start_is_an_error(tmp_path):
    """There is no last good pair at start: the command must fail, not make up a certificate."""
    with pytest.raises(ValueError, match=r"tls\.crt: cannot be read"):
        ServerCertificate.open(tmp_path)


def test_a_chain_is_read_leaf_first(tmp_path):
    """The key must belong to the first certificate; what follows it is kept."""
    leaf, issuer = self_signed("a", NOW), self_signed("ca", NOW)
    chained = CertificatePair(leaf.certificate_chain + issuer.certificate_chain, leaf.private_key)
    write(tmp_path, chained)
    assert read_pair(tmp_path) == chained


async def test_watching_reports_each_change_once(tmp_path):
    """A bad pair is one sentence however often it is read; the good one after it is another."""
    write(tmp_path, self_signed("a", NOW))
    certificate = ServerCertificate.open(tmp_path)
    reports = asyncio.Queue()
    reads = []

    def reload():
        reads.append(None)
        return original()

    original, certificate.reload = certificate.reload, reload
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(
            certificate.watch(0.001, lambda *report: reports.put_nowait(report))
        )
        (tmp_path / "tls.crt").write_bytes(b"garbage")
        sentence, good = await reports.get()
        assert "the last good certificate stays in force" in sentence
        assert not good
        seen = len(reads)
        while len(reads) < seen + 3:
            await asyncio.sleep(0)
        assert reports.empty()
        replacement = self_signed("b", NOW)
        # As a volume of Kubernetes changes: both files between two reads.
        write(tmp_path, replacement)
        assert (await reports.get())[1]
        assert certificate.pair == replacement
        watching.cancel()


def asking_for_clients(path, directory=None):
    return ServerCertificate.open(directory, path, read_authorities(path))


async def called(port, certificate, client=None):
    """The status that a client which shows the pair `client` gets for an unknown method."""
    shown = (client.private_key, client.certificate_chain) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(certificate.pair.certificate_chain, *shown)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials, options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as answered:
            await channel.unary_unary("/no/Such")(b"", timeout=15)
        return answered.value.code()


async def test_only_a_client_with_a_certificate_of_the_authority_gets_in(tmp_path, transport):
    """One without, and one whose certificate another signed, end at the handshake."""
    known, unknown = self_signed("gateway", NOW), self_signed("stranger", NOW)
    (tmp_path / "ca.crt").write_bytes(known.certificate_chain)
    certificate = asking_for_clients(tmp_path / "ca.crt")
    async with serving(transport, certificate) as port:
        assert await called(port, certificate, known) is grpc.StatusCode.UNIMPLEMENTED
        assert await called(port, certificate, unknown) is grpc.StatusCode.UNAVAILABLE
        assert await called(port, certificate) is grpc.StatusCode.UNAVAILABLE


async def test_a_changed_authority_counts_for_new_connections(tmp_path, transport):
    """After a reload the other client gets in, and the first one does not any more."""
    first, second = self_signed("a", NOW), self_signed("b", NOW)
    file = tmp_path / "ca.crt"
    file.write_bytes(first.certificate_chain)
    certificate = asking_for_clients(file)
    async with serving(transport, certificate) as port:
        assert not certificate.reload()
        file.write_bytes(second.certificate_chain)
        assert await called(port, certificate, first) is grpc.StatusCode.UNIMPLEMENTED
        assert certificate.reload()
        assert await called(port, certificate, second) is grpc.StatusCode.UNIMPLEMENTED
        assert await called(port, certificate, first) is grpc.StatusCode.UNAVAILABLE


def resumed(port, context, session=None):
    """(the session that a gateway may resume, whether it was); raises `OSError` if not let in."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=15) as connection,
        context.wrap_socket(connection, server_hostname="localhost", session=session) as tls,
    ):
        tls.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        # Tickets come behind the handshake, before the first answer; so does a refusal.
        if not tls.recv(1):
            raise ConnectionError("closed")
        return tls.session, tls.session_reused


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_ends_with_the_authority_that_vouched_for_it(tmp_path, transport, version):
    """A gateway that resumes one shows no certificate: it would be let in for ever."""
    first, second = self_signed("a", NOW), self_signed("b", NOW)
    file = tmp_path / "ca.crt"
    file.write_bytes(first.certificate_chain)
    write(tmp_path, first)
    certificate = asking_for_clients(file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    async with serving(transport, certificate) as port:
        session, _ = await asyncio.to_thread(resumed, port, context)
        file.write_bytes(second.certificate_chain)
        assert certificate.reload()
        for offered in filter(None, (session, None)):
            with pytest.raises(OSError):
                await asyncio.to_thread(resumed, port, context, offered)


async def test_an_unusable_authority_never_opens_the_port(tmp_path, transport):
    """The last good one stays in force, as with a certificate; nobody gets in without one."""
    known = self_signed("gateway", NOW)
    file = tmp_path / "ca.crt"
    file.write_bytes(known.certificate_chain)
    certificate = asking_for_clients(file)
    async with serving(transport, certificate) as port:
        for content in (b"", b"garbage"):
            file.write_bytes(content)
            with pytest.raises(ValueError, match=r"ca\.crt: expected PEM certificates"):
                certificate.reload()
        file.unlink()
        with pytest.raises(ValueError, match=r"ca\.crt: cannot be read"):
            certificate.reload()
        assert await called(port, certificate, known) is grpc.StatusCode.UNIMPLEMENTED
        assert await called(port, certificate) is grpc.StatusCode.UNAVAILABLE


async def test_an_authority_is_watched_also_beside_a_self_signed_certificate(tmp_path):
    """The report names the file."""
    file = tmp_path / "ca.crt"
    file.write_bytes(self_signed("a", NOW).certificate_chain)
    certificate = asking_for_clients(file)
    reports = asyncio.Queue()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(
            certificate.watch(0.001, lambda *report: reports.put_nowait(report))
        )
        file.write_bytes(self_signed("b", NOW).certificate_chain)
        sentence, good = await reports.get()
        # It may be read while it is written.
        while not good:
            sentence, good = await reports.get()
        assert str(file) in sentence
        watching.cancel()
