"""Protect the debug pages with a bearer token."""

import hmac
import re
from hashlib import sha256
from pathlib import Path
from typing import Final

import structlog
from aiohttp import hdrs, web

from epp.shell.files.watch import FileWatcher, first_read
from epp.shell.operators.pages.page_queue import Handler
from epp.shell.starting import StartError

TOKEN_BYTES_MAX: Final = 4_096
_TOKEN: Final = re.compile(rb"[!-~]+")
_EXPECTED: Final = "one line of printable ASCII without spaces"

_log = structlog.get_logger(__name__)


class BearerToken:
    """A bearer token in a file, which is read at once and after each change.

    An invalid new token leaves the old one in force.
    """

    def __init__(self, path: Path) -> None:
        """Read the bearer token from its file. Raises `StartError`."""
        self._path = path
        self._watcher = FileWatcher(path, self._changed, self._report, bytes_max=TOKEN_BYTES_MAX)
        content = first_read(self._watcher, f"--debug-token-file {path}").strip()
        if not _TOKEN.fullmatch(content):
            raise StartError(f"--debug-token-file {path} has no valid token, expected {_EXPECTED}")
        self._digest = sha256(content).digest()

    async def run(self) -> None:
        """Watch the file of the bearer token until cancelled."""
        await self._watcher.run()

    def guarded(self, handler: Handler) -> Handler:
        """Wrap the HTTP `handler` so that requests without the bearer token get status 401."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if self._admits(request.headers.get(hdrs.AUTHORIZATION, "")):
                return await handler(request)
            return web.Response(
                status=401,
                headers={hdrs.WWW_AUTHENTICATE: 'Bearer realm="homing"'},
                text="expected the token of --debug-token-file in the header Authorization: "
                "Bearer TOKEN\n",
            )

        return answer

    def _admits(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        # Digests are compared, so that the time does not depend on the lengths of the tokens.
        shown = sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        return hmac.compare_digest(shown, self._digest) and scheme.lower() == "bearer"

    def _changed(self, content: bytes) -> None:
        token = content.strip()
        if not _TOKEN.fullmatch(token):
            self._report(f"{self._path} has no valid token, expected {_EXPECTED}")
            return
        self._digest = sha256(token).digest()
        _log.info("token of the debug pages replaced")

    def _report(self, problem: str) -> None:
        _log.error(
            "token of the debug pages cannot be read, the last one stays in force", problem=problem
        )
