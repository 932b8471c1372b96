"""The Envoy of standalone mode, as the picker beside it sees it at the end: by its admin interface.

Both are told to go at once, and each needs the other until the last request is over: Envoy asks the
picker where requests go, and the picker ends the streams of answers that bypass it long before Envoy
has passed them on. So the picker sends Envoy's clients away, and stays until Envoy has nothing to do.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable
from typing import Final

import structlog

from epp.core.types import Seconds

HOST: Final = "127.0.0.1"
"""The bootstrap has it on loopback only."""
TIMEOUT_S: Final[Seconds] = 1.0
"""For the whole of an answer."""
LOOK_S: Final[Seconds] = 0.25
"""Between two looks at how many requests are open."""
ANSWER_BYTES_MAX: Final = 65_536
ACTIVE: Final = "http.inference.downstream_rq_active"
"""Requests that are open, by the `stat_prefix` of the bootstrap's listener."""

_ACTIVE_LINE: Final = re.compile(rb"^%b: (\d{1,9})\r?$" % re.escape(ACTIVE.encode()), re.MULTILINE)

_log = structlog.get_logger(__name__)


class EnvoyAdmin:
    """The admin interface on `port` of loopback. An Envoy that does not answer is taken for gone."""

    def __init__(self, port: int, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._port = port
        self._clock = clock
        self._looked_at_s = -math.inf
        self._busy_at_s = clock()
        self._silent = False
        self.active_requests = 0
        """Open when it was last looked."""

    async def send_away(self) -> None:
        """Have clients connect elsewhere: every answer from now on closes its connection, in HTTP/2
        by a GOAWAY, and `/ready` says no.
        """
        self._busy_at_s = self._clock()
        await self._ask("POST", "/healthcheck/fail")

    async def call_back(self) -> None:
        """Undo `send_away`: a picker that is restarted alone finds its Envoy as it left it.

        Where nobody answers there is nothing to undo: Envoy may be starting too.
        """
        with contextlib.suppress(OSError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._exchange("POST", "/healthcheck/ok")

    async def idle_for_s(self) -> Seconds:
        """How long no request has been open; infinite where nobody answers. Looks now and then."""
        now = self._clock()
        if now - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now
            await self._look(now)
        return math.inf if self._silent else now - self._busy_at_s

    async def _look(self, now: Seconds) -> None:
        answer = await self._ask("GET", f"/stats?filter=^{re.escape(ACTIVE)}$")
        found = None if answer is None else _ACTIVE_LINE.search(answer)
        self.active_requests = 0 if found is None else int(found[1])
        if self.active_requests:
            self._busy_at_s = now

    async def _ask(self, method: str, path: str) -> bytes | None:
        """The answer with its headers; None: there was none, which is told once."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._exchange(method, path)
        except (OSError, asyncio.IncompleteReadError) as error:
            problem = str(error) or type(error).__name__
        else:
            if answer.startswith(b"HTTP/1.1 200 "):
                self._silent = False
                return answer
            status = answer[:80].partition(b"\r")[0].decode("ascii", "replace")
            problem = f"answered {status!r}, expected status 200"
        if not self._silent:
            self._silent = True
            _log.warning(
                "the Envoy beside this picker does not answer at its admin port, nobody waits for it",
                port=self._port,
                path=path.partition("?")[0],
                problem=problem,
            )
        return None

    async def _exchange(self, method: str, path: str) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: {HOST}:{self._port}\r\n"
                "Content-Length: 0\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            answer = bytearray()
            while len(answer) < ANSWER_BYTES_MAX:
                piece = await reader.read(ANSWER_BYTES_MAX)
                if not piece:
                    break
                answer += piece
            return bytes(answer)
        finally:
            writer.close()
