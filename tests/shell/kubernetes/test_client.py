import datetime as dt
import ipaddress
import json
import socket
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from epp.shell.kubernetes.api_errors import ApiError, ApiFailure, KubeConfigError
from epp.shell.kubernetes.client import Credentials, KubeClient
from tests.shell.kubernetes.fake_api_server import PODS, FakeApiServer, pod
from tests.shell.kubernetes.kube import connected


async def test_an_answer_comes_whole(tmp_path):
    """Paths, queries and the token of the kubeconfig reach the server."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        server.tokens = {"first"}
        server.put(PODS, pod("a"))
        answer = json.loads(await client.request("GET", PODS, {"limit": "7"}))
        assert [item["metadata"]["name"] for item in answer["items"]] == ["a"]
        assert server.requests[-1][1:] == ("LIST", PODS, {"limit": "7"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ApiFailure.STATUS),
        (401, ApiFailure.UNAUTHORIZED),
        (403, ApiFailure.FORBIDDEN),
        (404, ApiFailure.ABSENT),
        (409, ApiFailure.CONFLICT),
        (410, ApiFailure.GONE),
        (500, ApiFailure.SERVER),
        (503, ApiFailure.SERVER),
    ],
)
async def test_a_refusal_is_an_error_with_the_reason_of_the_server(tmp_path, status, kind):
    """The status decides the kind, the Status object gives the words."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        server.fail("LIST", PODS, status)
        with pytest.raises(ApiError, match=rf"GET {PODS}: {status} .*: fault {status}") as error:
            await client.request("GET", PODS)
        assert error.value.kind is kind


async def test_retry_after_is_read_where_it_is_a_number(tmp_path):
    """A date, of a proxy, is not."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        for told, expected in (("7", 7.0), ("soon", None), ("", None)):
            server.fail("LIST", PODS, (429, {"Retry-After": told}))
            with pytest.raises(ApiError) as error:
                await client.request("GET", PODS)
            assert error.value.kind is ApiFailure.THROTTLED
            assert error.value.retry_after_s == expected


async def test_silence_and_broken_connections_are_told_apart(tmp_path):
    """A server that takes the request and says nothing; one that hangs up; one that is not there."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        server.fail("LIST", PODS, "silent", "reset", "reset")
        with pytest.raises(ApiError, match=r"no byte for 0.6 s") as error:
            await client.request("GET", PODS)
        assert error.value.kind is ApiFailure.SILENT
        with pytest.raises(ApiError) as error:
            await client.request("GET", PODS)
        assert error.value.kind is ApiFailure.UNREACHABLE
        await server.stop()
        with pytest.raises(ApiError, match="cannot be reached") as error:
            await client.request("GET", PODS)
        assert error.value.kind is ApiFailure.UNREACHABLE
        await server.start()


async def test_a_refused_token_is_read_again(tmp_path):
    """A kubeconfig that was rewritten, without a restart."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        server.tokens = {"second"}
        server.kubeconfig(tmp_path, token="second")
        with pytest.raises(ApiError) as error:
            await client.request("GET", PODS)
        assert error.value.kind is ApiFailure.UNAUTHORIZED
        await client.request("GET", PODS)


async def test_in_a_pod_the_service_account_is_used_and_its_rotated_token_is_read_again(tmp_path):
    """Host and port from the environment, token and CA from files; the kubelet replaces the token."""
    token, ca = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first\n")
    ca.write_text("a certificate")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    credentials = Credentials(environment, token_file=token, ca_file=ca)
    await credentials.load()
    assert credentials.configuration.host == "https://[fd00::1]:443"
    assert await credentials.header() == {"authorization": "bearer first"}
    token.write_text("second")
    await credentials.renew()
    assert await credentials.header() == {"authorization": "bearer second"}
    token.unlink()
    await credentials.renew()
    assert await credentials.header() == {"authorization": "bearer second"}


async def test_a_token_that_cannot_be_read_is_an_error_of_the_api(tmp_path):
    """The request fails, the process does not; the kubelet may be in the middle of replacing it."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:

        def unreadable(_):
            raise FileNotFoundError(2, "No such file", "token")

        client._credentials.configuration.refresh_api_key_hook = unreadable
        with pytest.raises(
            ApiError, match="the token of the ServiceAccount cannot be read"
        ) as error:
            await client.request("GET", PODS)
        assert error.value.kind is ApiFailure.UNAUTHORIZED


async def test_the_server_is_known_by_the_ca_of_the_service_account(tmp_path):
    """As in a pod: TLS, the CA from a file. Another CA is not trusted."""
    certificate, key = self_signed(tmp_path, "127.0.0.1")
    (tmp_path / "token").write_text("first")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with FakeApiServer(tls=context) as server:
        server.tokens = {"first"}
        environment = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(server.port),
        }
        pod_s = {"environment": environment, "token_file": tmp_path / "token"}
        async with KubeClient(Credentials(ca_file=certificate, **pod_s)) as client:
            await client.request("GET", PODS)
        (tmp_path / "other").mkdir()
        other, _ = self_signed(tmp_path / "other", "127.0.0.1")
        async with KubeClient(Credentials(ca_file=other, **pod_s)) as client:
            with pytest.raises(ApiError, match="certificate verify failed") as error:
                await client.request("GET", PODS)
        assert error.value.kind is ApiFailure.UNREACHABLE


def self_signed(folder, address):
    """Paths of a certificate for `address`, its own CA, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    certificate, key_file = folder / "ca.crt", folder / "tls.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, key_file


async def test_without_a_cluster_the_error_says_what_was_expected(tmp_path):
    """One sentence, for the log of a start that failed."""
    nowhere = Credentials({"KUBECONFIG": str(tmp_path / "none")})
    with pytest.raises(
        KubeConfigError,
        match=r"^the configuration of the API server cannot be loaded: .*none does not exist; ",
    ):
        await KubeClient(nowhere).__aenter__()


async def test_a_certificate_that_is_none_is_an_error_of_the_configuration(tmp_path):
    """Not a traceback of the TLS library."""
    (tmp_path / "token").write_text("first")
    (tmp_path / "ca.crt").write_text("no certificate")
    environment = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": "443"}
    credentials = Credentials(
        environment, token_file=tmp_path / "token", ca_file=tmp_path / "ca.crt"
    )
    with pytest.raises(KubeConfigError, match="certificate"):
        await KubeClient(credentials).__aenter__()


async def test_a_watch_keeps_its_connection_alive(tmp_path):
    """The kernel probes the other end: a stream may be silent for a minute."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        query = {"watch": "true", "resourceVersion": "100", "timeoutSeconds": "5"}
        async with client.stream("GET", PODS, query, silence_s_max=1.0) as chunks:
            await anext(chunks)
            (connection,) = list(client._session.connector._acquired)
            raw = connection.transport.get_extra_info("socket")
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
