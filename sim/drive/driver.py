"""Sends the requests of a trace when the trace says: an open loop, which waits for no answer.

A gateway that is slow does not make its clients fewer. What bounds the loop is told: above
`in_flight_max` requests at once the next ones are not sent, and counted; how late requests were
sent is measured, because then it was the driver that was slow.
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
"""Requests whose end is remembered, for those that wait for their answers."""
_OWN_HEADERS: Final = frozenset(
    {"authorization", "connection", "content-length", "content-type", "host", "transfer-encoding"}
)
"""Never from a trace: they are for who drives to say."""


class DriveSettings(Struct, frozen=True, kw_only=True):
    url: str
    models: dict[str, str] = {}
    """Model of the trace -> model to ask for; under "" the one for all others."""
    headers: dict[str, str] = {}
    """Of every request."""
    pod_header: str = "x-homing-endpoint"
    """Of responses: who served."""
    speed: float = 1.0
    in_flight_max: int = 1_000
    timeout_s: Seconds = 600.0


class Driven(Struct, kw_only=True):
    """One request as its client saw it."""

    index: int
    model: str
    due_s: Seconds
    """From the start of the drive."""
    late_s: Seconds = 0.0
    """It was sent so much after it was due."""
    answer: Streamed
    error: str = ""
    """Why there is no whole answer; "" if there is."""


class Driver:
    """One drive. `stop` ends it early; what was done is done."""

    def __init__(self, settings: DriveSettings, ended: Callable[[Driven], None]) -> None:
        """`ended` is told of each request that was sent and has ended, whole or not."""
        self._settings = settings
        self._ended = ended
        self._stop = asyncio.Event()
        self._at_once = 0
        self._ends: OrderedDict[int, asyncio.Future[Seconds]] = OrderedDict()
        """By index, when each ended."""
        self.not_sent = 0
        """Too many were in flight."""
        self.unfit = 0
        """Cannot be spelt as a text."""
        self.cut = 0
        """Had not ended when the drive was stopped."""

    def stop(self) -> None:
        """Send nothing more and wait for nothing."""
        self._stop.set()

    async def run(self, arrivals: Iterable[Arrival]) -> Seconds:
        """Until all have ended, or `stop`; how long it took. Raises what reading the trace raises."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        coming = iter(arrivals)
        # To sort a trace by time many of its lines are read before the first is given.
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
                    if len(tasks) >= settings.in_flight_max:
                        self.not_sent += 1
                        continue
                    sending = self._send(session, arrival, due_at, started_at)
                    task = asyncio.create_task(sending, name=f"request-{arrival.index}")
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await self._until_ended(tasks)
            finally:
                self.cut = len(tasks)
                for task in tuple(tasks):
                    task.cancel()
                await asyncio.gather(*tuple(tasks), return_exceptions=True)
        return loop.time() - started_at

    async def _stopped_before(self, due_at: Seconds) -> bool:
        wait_s = due_at - asyncio.get_running_loop().time()
        if wait_s <= 0:
            # What is in flight has its turn also where requests are due all at once.
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
            try:
                await ask(
                    session,
                    # Put together as text: a path of the trace names no other host.
                    f"{self._settings.url.rstrip('/')}/{path.lstrip('/')}",
                    body,
                    headers,
                    driven.answer,
                    served_by=self._settings.pod_header,
                )
            except PROBLEMS as problem:
                driven.error = (str(problem) or type(problem).__name__)[:ERROR_CHARACTERS_MAX]
            self._ended(driven)
        finally:
            if not end.done():
                end.set_result(loop.time())

    def _request(self, arrival: Arrival) -> tuple[str, str, bytes]:
        """Model, path and body. Raises `ValueError` if there is no text for its ids."""
        if arrival.lengths and len(set(arrival.lengths)) == 1:
            # Blocks of one size need no ids that fit into one token.
            arrival = structs.replace(arrival, lengths=(), block_tokens=arrival.lengths[0])
        traced = model_of(arrival)
        models = self._settings.models
        model = models.get(traced) or models.get("") or traced
        body = msgspec.json.decode(body_of(arrival), type=dict)
        body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if not arrival.body:
            body |= {"max_tokens": arrival.output_tokens, "ignore_eos": True}
        return model, arrival.path or COMPLETIONS_PATH, msgspec.json.encode(body)
