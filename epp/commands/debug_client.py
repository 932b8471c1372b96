"""Send requests from a terminal to the debug port of a picker."""

import http.client
import os
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from epp.core.types import Seconds

TIMEOUT_S: Final = 5.0
"""Default timeout in seconds of each step of a request to the debug port: the connection, the wait
for the response, and its body.
"""
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
TOKEN_BYTES_MAX: Final = 4_096
TOKEN_VARIABLE: Final = "HOMING_DEBUG_TOKEN"  # noqa: S105  a name
TOKEN_FILE_VARIABLE: Final = "HOMING_DEBUG_TOKEN_FILE"  # noqa: S105  a name
_PIECE_BYTES: Final = 65_536
PORT_FORWARD: Final = "kubectl port-forward deploy/homing 9090"


class NoAnswerError(Exception):
    """The error of a request to the debug port of a picker: the URL or the token is invalid, there
    is no answer, or the answer is not the expected one.

    The message is one sentence.
    """


class DebugClient:
    """An HTTP client for the debug port of one picker.

    It follows no redirects and uses no proxy, because either would receive the token.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        timeout_s: Seconds = TIMEOUT_S,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """Raise `NoAnswerError` if `url` is not `http://host:port` or `https://host:port`."""
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise NoAnswerError(f"{url} is not http://host:port or https://host:port") from error
        bare = not (parts.path or parts.query or parts.fragment or parts.username)
        if parts.scheme not in {"http", "https"} or not parts.hostname or not bare:
            raise NoAnswerError(f"{url} is not http://host:port or https://host:port")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._token = token
        self._timeout_s = timeout_s
        self._clock = clock

    def at(self, host: str) -> str:
        """Return this client's URL with the IP address `host` in place of its host; scheme and port
        stay.
        """
        named = f"[{host}]" if ":" in host else host
        port = "" if self._port is None else f":{self._port}"
        return f"{'https' if self._secure else 'http'}://{named}{port}"

    def get(self, path: str, *, accept: str) -> tuple[int, bytes]:
        """Return the HTTP status and the body of the page `path` of the debug port.

        Raises `NoAnswerError` if no complete answer arrives in time, and for a body of more than
        `ANSWER_BYTES_MAX` bytes.
        """
        headers = {"accept": accept, "user-agent": "epp"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        connection = self._connection()
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, self._read(answer)
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = f"forward its port, for example with `{PORT_FORWARD}`"
            raise NoAnswerError(f"{self.url} gives no whole answer: {why}; {hint}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        until_s = self._clock() + self._timeout_s
        body = bytearray()
        while piece := answer.read1(_PIECE_BYTES):
            body += piece
            if len(body) > ANSWER_BYTES_MAX:
                raise NoAnswerError(
                    f"the answer of {self.url} exceeds {ANSWER_BYTES_MAX} bytes, expected a page"
                )
            if self._clock() > until_s:
                raise NoAnswerError(
                    f"the answer of {self.url} takes more than {self._timeout_s:g} s, expected a "
                    "page"
                )
        if answer.length:
            raise http.client.IncompleteRead(bytes(body), answer.length)
        return bytes(body)


def read_token(file: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the bearer token of debug ports, or "" if none is configured.

    It is read from `file`, else from the file that `TOKEN_FILE_VARIABLE` names, else from
    `TOKEN_VARIABLE`. Raises `NoAnswerError` if the token cannot be read or is not valid.
    """
    name = f"--token-file {file}"
    if not file:
        file = environ.get(TOKEN_FILE_VARIABLE, "")
        name = f"{TOKEN_FILE_VARIABLE}={file}"
    if not file:
        return _checked(environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE, allow_none=True)
    try:
        with Path(file).open("rb") as stream:
            token = stream.read(TOKEN_BYTES_MAX).strip().decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "the file is not ASCII"
        raise NoAnswerError(f"{name} cannot be read: {why}") from error
    return _checked(token, name)


def _checked(token: str, name: str, *, allow_none: bool = False) -> str:
    sound = token.isascii() and token.isprintable() and " " not in token
    if sound and (token or allow_none):
        return token
    raise NoAnswerError(
        f"{name} has no valid token, expected one line of printable ASCII without spaces"
    )
