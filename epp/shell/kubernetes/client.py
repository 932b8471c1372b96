"""Access the API server over HTTP: its address, credentials and requests.

Bodies are raw JSON in both directions. The generated models of `kubernetes` are not imported,
because that takes 0.9 s and 27 MB. Reading the few required members without them is also faster.
"""

import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import msgspec
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_kube_config
from kubernetes.aio.config.incluster_config import (
    SERVICE_CERT_FILENAME,
    SERVICE_HOST_ENV_NAME,
    SERVICE_TOKEN_FILENAME,
    InClusterConfigLoader,
)
from kubernetes.aio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

from epp import __version__
from epp.core.types import Seconds
from epp.shell.kubernetes.api_errors import (
    ApiError,
    ApiFailure,
    KubeConfigError,
    failure_of_status,
)

ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum size in bytes of an answer of the API server that is read as a whole: more than a page of
a hundred pods of the maximum size in etcd.
"""
CONNECTIONS_MAX: Final = 32
_REASON_BYTES_MAX: Final = 65_536

# These objects have no types.
_InClusterConfigLoader: Final[Any] = InClusterConfigLoader
_load_kube_config: Final[Any] = load_kube_config


class Credentials:
    """The address of the API server and the credentials for it. They are read again after a status
    401.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        *,
        token_file: Path = Path(SERVICE_TOKEN_FILENAME),
        ca_file: Path = Path(SERVICE_CERT_FILENAME),
    ) -> None:
        """Create credentials, which `load` reads: in a cluster those of the pod's ServiceAccount,
        otherwise those of `$KUBECONFIG` or ~/.kube/config.
        """
        self._environment = environment
        self._token_file = token_file
        self._ca_file = ca_file
        self.configuration: Final[Any] = Configuration()

    async def load(self) -> None:
        """Read the API server's address and the credentials. Raises `KubeConfigError`."""
        try:
            if SERVICE_HOST_ENV_NAME in self._environment:
                # The loader reads the token once a minute, because the kubelet replaces it hourly.
                loader: Any = _InClusterConfigLoader(
                    str(self._token_file), str(self._ca_file), environ=self._environment
                )
                loader.load_and_set(self.configuration)
            else:
                await _load_kube_config(
                    config_file=self._kubeconfig(),
                    client_configuration=self.configuration,
                    persist_config=False,
                )
        except (ConfigException, OSError) as problem:
            raise KubeConfigError(
                f"the configuration of the API server cannot be loaded: {problem}; expected to run "
                "in a pod with a ServiceAccount, or a kubeconfig"
            ) from problem

    def _kubeconfig(self) -> str:
        """Return the path or paths of the kubeconfig file. Raises `FileNotFoundError` if none
        exists, which the library would only log.
        """
        paths = self._environment.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION
        if not any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep)):
            raise FileNotFoundError(f"{paths} does not exist")
        return paths

    async def header(self) -> dict[str, str]:
        """Return the authorization header for the API server, or {} if there is no token, for
        example because a client certificate is used.

        Raises `ApiError` if the token cannot be read.
        """
        try:
            settings = await self.configuration.auth_settings()
        except (ConfigException, OSError) as problem:
            raise ApiError(
                ApiFailure.UNAUTHORIZED,
                f"the token of the ServiceAccount cannot be read: {problem}",
            ) from problem
        token = settings.get("BearerToken", {}).get("value")
        return {"authorization": token.strip()} if token else {}

    async def renew(self) -> None:
        """Read the credentials again after the API server refused them."""
        with contextlib.suppress(KubeConfigError):
            # If this fails, the old credentials stay and the next refusal triggers another attempt.
            await self.load()

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings for the API server, or None if it uses plaintext."""
        told = self.configuration
        if not told.host.startswith("https"):
            return None
        context = ssl.create_default_context(cafile=told.ssl_ca_cert, cadata=told.ca_cert_data)
        if told.cert_file:
            context.load_cert_chain(told.cert_file, keyfile=told.key_file)
        if not told.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # Python 3.13 requires extensions that the CAs of many clusters lack.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


class KubeClient:
    """An HTTP client for the API server and an async context manager.

    After entering, every failure is an `ApiError`.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        timeout_s: Seconds = 30.0,
        connect_timeout_s: Seconds = 10.0,
    ) -> None:
        """Create the client. `timeout_s` is the maximum time in seconds without data within an
        answer to `request`; `stream` has its own.
        """
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Load the credentials for the API server. Raises `KubeConfigError`."""
        await self._credentials.load()
        try:
            tls = self._credentials.tls()
        except (OSError, ssl.SSLError) as problem:
            raise KubeConfigError(
                f"the certificates for the API server cannot be used: {problem}"
            ) from problem
        connector = aiohttp.TCPConnector(
            limit=CONNECTIONS_MAX, ssl=tls if tls is not None else True
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"accept": "application/json", "user-agent": f"homing/{__version__}"},
            # A redirect would send the token to another server.
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        accept: str = "",
    ) -> bytes:
        """Send a request to the API server and return the body of its answer. `body` is sent as
        JSON. `accept` are the requested media types if not JSON. Raises `ApiError`.
        """
        async with self.stream(
            method, path, query, body=body, accept=accept, silence_s_max=self._timeout_s
        ) as chunks:
            parts: list[bytes] = []
            total = 0
            async for chunk in chunks:
                parts.append(chunk)
                total += len(chunk)
                if total > ANSWER_BYTES_MAX:
                    raise ApiError(
                        ApiFailure.UNREADABLE,
                        f"{method} {path}: the answer exceeds {ANSWER_BYTES_MAX} bytes",
                    )
            return b"".join(parts)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: object = None,
        accept: str = "",
        silence_s_max: Seconds,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the body of the API server's answer in chunks of any size as they arrive; no chunk
        is empty.

        Raises `ApiError` on entering, while reading, and after `silence_s_max` seconds without a
        byte.
        """
        assert self._session is not None, "the client must be entered"
        configuration = self._credentials.configuration
        headers = await self._credentials.header()
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["content-type"] = "application/json"
        if accept:
            headers["accept"] = accept
        what = f"{method} {path}"
        try:
            async with self._session.request(
                method,
                configuration.host + path,
                params=query,
                data=data,
                headers=headers,
                allow_redirects=False,
                proxy=configuration.proxy,
                server_hostname=configuration.tls_server_name,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self._connect_timeout_s, sock_read=silence_s_max
                ),
            ) as response:
                if not 200 <= response.status < 300:
                    raise await self._refused(what, response)
                _keep_alive(response)
                yield response.content.iter_any()
        except TimeoutError as problem:
            # Timeouts of aiohttp are OSErrors too. A timeout of an enclosing `asyncio.timeout`
            # arrives as a cancellation instead.
            raise ApiError(
                ApiFailure.SILENT,
                f"{what}: no connection within {self._connect_timeout_s:g} s, or no byte for "
                f"{silence_s_max:g} s",
            ) from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise ApiError(
                ApiFailure.UNREACHABLE, f"{what}: the API server cannot be reached: {problem}"
            ) from problem

    async def _refused(self, what: str, response: aiohttp.ClientResponse) -> ApiError:
        kind = failure_of_status(response.status)
        if kind is ApiFailure.UNAUTHORIZED:
            await self._credentials.renew()
        reason = _reason(await response.content.read(_REASON_BYTES_MAX))
        return ApiError(
            kind,
            f"{what}: {response.status} {response.reason}{reason}",
            retry_after_s=_seconds(response.headers.get("retry-after", "")),
        )


class _Status(msgspec.Struct, frozen=True):
    message: str | None = None


def _reason(body: bytes) -> str:
    """Return ": " and the message of the Status object in an error answer of the API server, or ""
    if there is none, for example because a proxy answered.
    """
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except ValueError:
        return ""
    return f": {message[:512]}" if message else ""


def _seconds(retry_after: str) -> Seconds | None:
    """Parse the header Retry-After as a number of seconds. Return None for anything else, such as
    the date that a proxy may send.
    """
    known = retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 10
    return float(retry_after) if known else None


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    """Enable TCP keep-alive on a connection to the API server, so that the kernel detects during a
    long silence that the server is gone.
    """
    connection = response.connection
    transport = connection.transport if connection is not None else None
    raw: socket.socket | None = transport.get_extra_info("socket") if transport else None
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
