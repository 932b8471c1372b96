"""Ordinary requests at a fixed mean rate, whatever the answers are, and the result of each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Final

import msgspec
from aiohttp import ClientError, ClientSession
from msgspec import Struct

from bench.place import client_session
from epp.core.types import Seconds
from sim.drive.streaming import PROBLEMS, Streamed, ask
from sim.engine.profiles import DEFAULT_PROFILE, find_profile

NUMBER_HEADER: Final = "x-chaos-number"
ASK_S_MAX: Final = 10.0
"""Maximum time in seconds that a client waits for an answer."""
NO_ANSWER: Final = "no answer"
CUT: Final = "cut short"


class Traffic(Struct, frozen=True, kw_only=True):
    """The composition and the rate of the requests. A word is about one token."""

    rate_per_s: float = 25.0
    tenants: int = 12
    system_words: int = 300
    question_words: int = 60
    answer_tokens: int = 24
    streamed_share: float = 0.75
    """Share of streamed requests, from 0 to 1; the others request a short answer in one piece."""
    short_answer_tokens: int = 4


LIGHT: Final = Traffic(system_words=100, answer_tokens=8)
"""Traffic with shorter prompts and answers than the default.

A request uses about a quarter of the pods' time, so four times the rate is about the same load.
"""


class Asked(Struct, kw_only=True):
    """The result of one request from the client's point of view."""

    number: int
    sent_at: Seconds
    """Time at which the request was sent, by `time.monotonic`."""
    ttft_s: Seconds = 0.0
    """Seconds from sending the request to the first text of a stream; 0 if there was no text, the
    request was lost, or it was not streamed.
    """
    lost: str = ""
    """Status of a failed answer, or `NO_ANSWER` or `CUT`; "" if the whole answer came."""


class Load:
    """A sender of requests at random times, until `stop`.

    The same seed gives the same requests and gaps.
    """

    def __init__(self, gateway: str, traffic: Traffic, seed: int) -> None:
        self.asked: list[Asked] = []
        self._gateway = gateway
        self._traffic = traffic
        self._random = Random(f"{seed}:requests")
        self._model = find_profile(DEFAULT_PROFILE).model
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()

    def stop(self) -> None:
        """Send no more requests; `run` returns after the last answer."""
        self._stop.set()

    async def ended(self) -> None:
        """Wait until `run` has ended: no request is sent any more, and each has an answer or has
        failed.
        """
        await self._ended.wait()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests while the context is open; then wait for the answers.

        An exception inside cancels the requests and is raised unchanged.
        """
        sending = asyncio.create_task(self.run(), name="load")
        try:
            yield
            self.stop()
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def run(self) -> None:
        """Send requests until `stop` is called, then wait for the answers, `ASK_S_MAX` at most."""
        try:
            await self._run()
        finally:
            self._ended.set()

    async def _run(self) -> None:
        async with client_session(ASK_S_MAX) as session, asyncio.TaskGroup() as asking:
            due_at = time.monotonic()
            for number, (body, streamed) in enumerate(self._bodies()):
                due_at += self._random.expovariate(self._traffic.rate_per_s)
                await asyncio.sleep(max(0.0, due_at - time.monotonic()))
                if self._stop.is_set():
                    return
                asking.create_task(self._ask(session, number, body, streamed))

    async def _ask(self, session: ClientSession, number: int, body: bytes, streamed: bool) -> None:
        asked = Asked(number=number, sent_at=time.monotonic())
        self.asked.append(asked)
        url = f"{self._gateway}/v1/completions"
        headers = {NUMBER_HEADER: str(number)}
        if streamed:
            answer = Streamed()
            try:
                await ask(session, url, body, headers, answer)
            except PROBLEMS:
                asked.lost = _lost(answer.status)
            else:
                asked.ttft_s = answer.ttft_s
            return
        status = 0
        try:
            headers["content-type"] = "application/json"
            async with session.post(url, data=body, headers=headers) as response:
                status = response.status
                await response.read()
                if status != 200:
                    asked.lost = str(status)
        except (ClientError, TimeoutError):
            asked.lost = _lost(status)

    def _bodies(self) -> Iterator[tuple[bytes, bool]]:
        """Yield request bodies without end, each with True if it asks for a stream."""
        traffic, random = self._traffic, self._random
        words = [f"w{number:03}" for number in range(1000)]
        systems = [
            " ".join(random.choices(words, k=traffic.system_words)) for _ in range(traffic.tenants)
        ]
        while True:
            question = " ".join(random.choices(words, k=traffic.question_words))
            body = {
                "model": self._model,
                "prompt": f"{random.choice(systems)} {question}",
                "ignore_eos": True,
            }
            streamed = random.random() < traffic.streamed_share
            if streamed:
                body |= {"max_tokens": traffic.answer_tokens, "stream": True}
                body |= {"stream_options": {"include_usage": True}}
            else:
                body |= {"max_tokens": traffic.short_answer_tokens}
            yield msgspec.json.encode(body), streamed


def _lost(status: int) -> str:
    if status == 0:
        return NO_ANSWER
    return CUT if status == 200 else str(status)
