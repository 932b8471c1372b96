"""The sender of `sim drive`: it sends the requests of a trace at the trace's times, in an open
loop.

Only a turn of a conversation waits: for the end of the previous turn and its think time (divided by
`speed`), if the trace names the previous turn. All other requests are sent at their times, so that
a slow gateway does not reduce the load. If `in_flight_max` requests are in flight, further ones are
counted but not sent. A turn that waits is not in flight. The driver measures how late it sent each
request, because lateness means that the driver itself is slow.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Final

import msgspec
from aiohttp import ClientSession, ClientTimeout, TCPConnector
from msgspec import Struct, structs

from epp.core.types import Seconds
from sim.drive.streaming import ERROR_CHARACTERS_MAX, PROBLEMS, Streamed, ask
from sim.traces.arrival import Arrival
from sim.traces.prompts import COMPLETIONS_PATH, body_of, model_of

ENDS_KEPT_MAX: Final = 100_000
"""Maximum number of requests whose end time is stored for follow-up requests, and of requests that
wait for a previous turn or are in flight.
"""
_OWN_HEADERS: Final = frozenset(
    {"authorization", "connection", "content-length", "content-type", "host", "transfer-encoding"}
)
"""Names of request headers that are never copied from a trace, because the driver or its operator
sets them.
"""


class DriveSettings(Struct, frozen=True, kw_only=True):
    """The settings of a run of `sim drive`: the gateway, the models and headers of its requests, and
    the load.
    """

    url: str
    models: dict[str, str] = {}
    """Name of the model to request, by model of the trace; the key "" has the default for other
    models.
    """
    headers: dict[str, str] = {}
    """Headers that are added to every request."""
    pod_header: str = "x-homing-endpoint"
    """Response header that names the pod that served the request."""
    speed: float = 1.0
    in_flight_max: int = 1_000
    timeout_s: Seconds = 600.0


class Driven(Struct, kw_only=True):
    """One request that `sim drive` sent, with its result as the client saw it."""

    index: int
    model: str
    due_s: Seconds
    """Time at which the request should be sent, in seconds from the start of the drive."""
    late_s: Seconds = 0.0
    """Time in seconds by which the request was sent later than planned."""
    answer: Streamed
    error: str = ""
    """Reason why the request has no complete answer, or "" if it has one."""


class Driver:
    """One run of `sim drive` over a trace. `stop` ends it early without losing the measurements of
    requests that have ended.
    """

    def __init__(self, settings: DriveSettings, ended: Callable[[Driven], None]) -> None:
        """Create a driver. `ended` is called with each request that was sent and has ended, with a
        complete answer or not.
        """
        self._settings = settings
        self._ended = ended
        self._stop = asyncio.Event()
        self._in_flight = 0
        """Number of requests that were sent and have not ended."""
        self._ends: OrderedDict[int, asyncio.Future[Seconds]] = OrderedDict()
        """End time of each of the last requests, by their index in the trace."""
        self.not_sent = 0
        """Number of requests that were not sent because `in_flight_max` requests were in flight, or
        `ENDS_KEPT_MAX` were waiting or in flight.
        """
        self.unfit = 0
        """Number of requests that were not sent because their token ids cannot be written as text,
        or because their recorded body is not JSON.
        """
        self.cut = 0
        """Number of requests that were in flight when the drive was stopped."""

    def stop(self) -> None:
        """End the drive: send no further requests, and do not wait for those in flight."""
        self._stop.set()

    async def run(self, arrivals: Iterable[Arrival]) -> Seconds:
        """Send all requests at their times, and wait until they have ended or `stop` is called.
        Return the duration in seconds.

        Raises what reading the trace raises.
        """
        settings = self._settings
        loop = asyncio.get_running_loop()
        coming = iter(arrivals)
        # Sorting a trace by time reads many lines before the first one is available.
        first = tuple(islice(coming, 1))
        started_at = loop.time()
        tasks: set[asyncio.Task[None]] = set()
        async with ClientSession(
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=settings.timeout_s),
        ) as session:
            try:
                for arrival in chain(first, coming):
                    due_at = started_at + arrival.time_s / settings.speed
                    if await self._stopped_before(due_at):
                        break
                    if len(tasks) >= ENDS_KEPT_MAX:
                        self.not_sent += 1
                        continue
                    sending = self._send(session, arrival, due_at, started_at)
                    task = asyncio.create_task(sending, name=f"request-{arrival.index}")
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await self._until_ended(tasks)
            finally:
                self.cut = self._in_flight
                for task in tuple(tasks):
                    task.cancel()
                await asyncio.gather(*tuple(tasks), return_exceptions=True)
        return loop.time() - started_at

    async def _stopped_before(self, due_at: Seconds) -> bool:
        wait_s = due_at - asyncio.get_running_loop().time()
        if wait_s <= 0:
            # Requests in flight must also make progress while many requests are due at once.
            await asyncio.sleep(0)
            return self._stop.is_set()
        try:
            await asyncio.wait_for(self._stop.wait(), wait_s)
        except TimeoutError:
            return False
        return True

    async def _until_ended(self, tasks: set[asyncio.Task[None]]) -> None:
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            while tasks and not stopping.done():
                await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    async def _send(
        self, session: ClientSession, arrival: Arrival, due_at: Seconds, started_at: Seconds
    ) -> None:
        loop = asyncio.get_running_loop()
        end: asyncio.Future[Seconds] = loop.create_future()
        self._ends[arrival.index] = end
        while len(self._ends) > ENDS_KEPT_MAX:
            self._ends.popitem(last=False)
        try:
            before = self._ends.get(arrival.after) if arrival.after is not None else None
            if before is not None:
                due_at = max(due_at, await before + arrival.think_s / self._settings.speed)
                await asyncio.sleep(due_at - loop.time())
            if self._in_flight >= self._settings.in_flight_max:
                self.not_sent += 1
                return
            try:
                model, path, body = self._request(arrival)
            except (ValueError, msgspec.DecodeError):
                self.unfit += 1
                return
            driven = Driven(
                index=arrival.index,
                model=model,
                due_s=due_at - started_at,
                late_s=max(0.0, loop.time() - due_at),
                answer=Streamed(),
            )
            headers = {name: value for name, value in arrival.headers if name not in _OWN_HEADERS}
            headers |= self._settings.headers
            if arrival.session:
                headers.setdefault("x-session-id", arrival.session)
            self._in_flight += 1
            try:
                await ask(
                    session,
                    # The URL is joined as text, so that a path in the trace cannot name another
                    # host.
                    f"{self._settings.url.rstrip('/')}/{path.lstrip('/')}",
                    body,
                    headers,
                    driven.answer,
                    served_by=self._settings.pod_header,
                )
            except PROBLEMS as problem:
                driven.error = (str(problem) or type(problem).__name__)[:ERROR_CHARACTERS_MAX]
            finally:
                self._in_flight -= 1
            self._ended(driven)
        finally:
            if not end.done():
                end.set_result(loop.time())

    def _request(self, arrival: Arrival) -> tuple[str, str, bytes]:
        """Return (model, path, body) of the HTTP request for an arrival. Raises `ValueError` if its
        token ids cannot be written as text, and `msgspec.DecodeError` if its recorded body is not
        JSON.
        """
        if arrival.lengths and len(set(arrival.lengths)) == 1:
            # If all blocks have the same size, no token id has to fit into one token.
            arrival = structs.replace(arrival, lengths=(), block_tokens=arrival.lengths[0])
        traced = model_of(arrival)
        models = self._settings.models
        model = models.get(traced) or models.get("") or traced
        body = msgspec.json.decode(body_of(arrival), type=dict)
        body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if not arrival.body:
            body |= {"max_tokens": arrival.output_tokens, "ignore_eos": True}
        return model, arrival.path or COMPLETIONS_PATH, msgspec.json.encode(body)
