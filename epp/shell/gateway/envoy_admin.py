"""The admin interface of the Envoy beside a standalone picker, for a common shutdown.

Envoy and picker receive the stop signal at once, and each needs the other until the last request
has ended. Envoy asks the picker where to route requests. The picker ends the streams of bypassed
answers long before Envoy has forwarded them. The picker therefore makes Envoy's clients leave, and
waits until Envoy has no open requests.
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
"""Address of Envoy's admin interface, which the bootstrap binds to loopback only."""
TIMEOUT_S: Final[Seconds] = 1.0
"""Timeout in seconds of a complete answer of Envoy's admin interface."""
LOOK_S: Final[Seconds] = 0.25
"""Interval in seconds between two queries of the number of Envoy's open requests."""
ANSWER_BYTES_MAX: Final = 65_536
ACTIVE: Final = "http.inference.downstream_rq_active"
"""Name of Envoy's metric of open requests, with the `stat_prefix` of the bootstrap's listener."""

_ACTIVE_LINE: Final = re.compile(rb"^%b: (\d{1,9})\r?$" % re.escape(ACTIVE.encode()), re.MULTILINE)

_log = structlog.get_logger(__name__)


class EnvoyAdmin:
    """A client of Envoy's admin interface on `port` of loopback. An Envoy that does not answer
    counts as stopped.
    """

    def __init__(self, port: int, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._port = port
        self._clock = clock
        self._looked_at_s = -math.inf
        self._busy_at_s = clock()
        self._silent = False
        self.active_requests = 0
        """Number of open requests that Envoy reported at the last query; 0 if it gave no valid
        answer.
        """

    async def send_away(self) -> None:
        """Make Envoy's clients connect elsewhere: Envoy closes the connection of every further
        response, with a GOAWAY in HTTP/2, and its `/ready` fails.
        """
        self._busy_at_s = self._clock()
        await self._ask("POST", "/healthcheck/fail")

    async def call_back(self) -> None:
        """Undo `send_away`. A picker that is restarted alone finds its Envoy in that state.

        If Envoy does not answer, there is nothing to undo, because Envoy may be starting as well.
        """
        with contextlib.suppress(OSError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._exchange("POST", "/healthcheck/ok")

    async def idle_for_s(self) -> Seconds:
        """Return for how many seconds since `send_away` Envoy has had no open request, or infinity
        if it did not answer the last query with status 200.

        Envoy is queried at most every `LOOK_S`.
        """
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
        """Return the answer of Envoy's admin interface with its headers, or None if it did not
        answer with status 200; the first of consecutive failures is logged.
        """
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
                "the Envoy beside this picker gives no valid answer at its admin port, so the picker does not wait for it",
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
