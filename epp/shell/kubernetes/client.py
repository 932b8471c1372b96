"""The API server over HTTP: where it is and who we are (`kubernetes.aio`), and one request function.

Raw JSON in both directions. The generated models of `kubernetes` are left alone: importing them
takes 0.9 s and 27 MB, and the few members that we need are read faster without them.
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
"""A page of a hundred pods of the greatest size that etcd stores."""
CONNECTIONS_MAX: Final = 32
_REASON_BYTES_MAX: Final = 65_536

# These have no types.
_InClusterConfigLoader: Final[Any] = InClusterConfigLoader
_load_kube_config: Final[Any] = load_kube_config


class Credentials:
    """Where the API server is and how to say who we are; read again when it was refused."""

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        *,
        token_file: Path = Path(SERVICE_TOKEN_FILENAME),
        ca_file: Path = Path(SERVICE_CERT_FILENAME),
    ) -> None:
        """Inside a cluster the pod's ServiceAccount, else `$KUBECONFIG` or ~/.kube/config."""
        self._environment = environment
        self._token_file = token_file
        self._ca_file = ca_file
        self.configuration: Final[Any] = Configuration()

    async def load(self) -> None:
        """Raises `KubeConfigError`."""
        try:
            if SERVICE_HOST_ENV_NAME in self._environment:
                # Reads the token anew once a minute: the kubelet replaces it hourly.
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
                f"the API server cannot be found: {problem}; expected to run in a pod with a "
                "ServiceAccount, or a kubeconfig"
            ) from problem

    def _kubeconfig(self) -> str:
        """Path, or paths; the library would only log that there is none."""
        paths = self._environment.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION
        if not any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep)):
            raise FileNotFoundError(f"there is no {paths}")
        return paths

    async def header(self) -> dict[str, str]:
        """The header that says who we are; none where a client certificate does.

        Raises `ApiError` if the token cannot be read.
        """
        try:
            settings = await self.configuration.auth_settings()
        except (ConfigException, OSError) as problem:
            raise ApiError(
                ApiFailure.UNAUTHORIZED, f"our own token cannot be read: {problem}"
            ) from problem
        token = settings.get("BearerToken", {}).get("value")
        return {"authorization": token.strip()} if token else {}

    async def renew(self) -> None:
        """They were refused: read them again, from wherever they came."""
        with contextlib.suppress(KubeConfigError):
            # What cannot be read now is tried again after the next refusal; the old one stays.
            await self.load()

    def tls(self) -> ssl.SSLContext | None:
        """What to trust and what to show. None: the API server is spoken to in plaintext."""
        told = self.configuration
        if not told.host.startswith("https"):
            return None
        context = ssl.create_default_context(cafile=told.ssl_ca_cert, cadata=told.ca_cert_data)
        if told.cert_file:
            context.load_cert_chain(told.cert_file, keyfile=told.key_file)
        if not told.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # Python 3.13 asks for extensions that the CAs of many clusters do not write.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


class KubeClient:
    """Async context manager. Every failure is an `ApiError`."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        timeout_s: Seconds = 30.0,
        connect_timeout_s: Seconds = 10.0,
    ) -> None:
        """`timeout_s`: the longest silence within an answer that is no watch."""
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Raises `KubeConfigError`."""
        await self._credentials.load()
        try:
            tls = self._credentials.tls()
        except (OSError, ssl.SSLError) as problem:
            raise KubeConfigError(f"the API server's certificate: {problem}") from problem
        connector = aiohttp.TCPConnector(
            limit=CONNECTIONS_MAX, ssl=tls if tls is not None else True
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"accept": "application/json", "user-agent": f"homing/{__version__}"},
            # A redirect would carry the token to wherever it points.
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
    ) -> bytes:
        """The whole answer. `body` is sent as JSON."""
        async with self.stream(
            method, path, query, body=body, silence_s_max=self._timeout_s
        ) as chunks:
            parts: list[bytes] = []
            total = 0
            async for chunk in chunks:
                parts.append(chunk)
                total += len(chunk)
                if total > ANSWER_BYTES_MAX:
                    raise ApiError(
                        ApiFailure.UNREADABLE,
                        f"{method} {path}: the answer is longer than {ANSWER_BYTES_MAX} bytes",
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
        silence_s_max: Seconds,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The answer as it comes, in chunks of any size; empty chunks never.

        Raises `ApiError` on entering, while reading, and after `silence_s_max` without a byte.
        """
        assert self._session is not None, "the client was entered"
        configuration = self._credentials.configuration
        headers = await self._credentials.header()
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["content-type"] = "application/json"
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
            # aiohttp's own are OSErrors too; a `TimeoutError` of `asyncio.timeout` round us comes
            # as a cancellation and passes by.
            raise ApiError(
                ApiFailure.SILENT, f"{what}: no byte for {silence_s_max:g} s"
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
    """What the API server's Status says; nothing if a proxy answered in its place."""
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except ValueError:
        return ""
    return f": {message[:512]}" if message else ""


def _seconds(retry_after: str) -> Seconds | None:
    """The API server sends whole seconds; a date of a proxy is not looked at."""
    known = retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 10
    return float(retry_after) if known else None


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    """Let the kernel find out when the other end of a long silence is gone."""
    connection = response.connection
    transport = connection.transport if connection is not None else None
    raw: socket.socket | None = transport.get_extra_info("socket") if transport else None
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
