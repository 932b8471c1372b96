"""The demo's client: it sends the workload to one gateway and measures latencies as a client sees
them.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from aiohttp import ClientSession, ClientTimeout, TCPConnector
from msgspec import Struct

from epp.core.types import Seconds
from sim.demo.workload import Conversation
from sim.drive.streaming import PROBLEMS, Streamed, ask

_REQUEST_S_MAX: Final = 60.0


class RequestOutcome(Struct, kw_only=True):
    """One request of the demo with its result, as its client saw it."""

    conversation: int
    turn: int
    sent_at_s: Seconds
    """Time when the request was sent, in seconds after the start of the run."""
    ttft_s: Seconds = 0.0
    """Time in seconds from sending the request to the first chunk with text; 0 if there was
    none.
    """
    duration_s: Seconds = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """Reason why the request has no complete answer, or "" if it has one."""


async def drive(
    gateway: str,
    model: str,
    workload: Sequence[Conversation],
    answered: Callable[[RequestOutcome], None],
) -> list[RequestOutcome]:
    """Send all conversations of the workload to the gateway. Return the outcome of each request, in
    the order in which the requests ended.

    `answered` is called with each outcome. A request without a complete answer ends its
    conversation, because the next turn would differ.
    """
    outcomes: list[RequestOutcome] = []
    started_at = asyncio.get_running_loop().time()

    def ended(outcome: RequestOutcome) -> None:
        outcomes.append(outcome)
        answered(outcome)

    async with (
        ClientSession(
            gateway,
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=_REQUEST_S_MAX),
        ) as session,
        asyncio.TaskGroup() as readers,
    ):
        for index, conversation in enumerate(workload):
            reader = _Reader(session, model, index, conversation, started_at, ended)
            readers.create_task(reader.run(), name=f"conversation-{index}")
    return outcomes


class _Reader:
    """A simulated user who sends one conversation, turn after turn."""

    def __init__(
        self,
        session: ClientSession,
        model: str,
        index: int,
        conversation: Conversation,
        started_at: Seconds,
        ended: Callable[[RequestOutcome], None],
    ) -> None:
        self._session = session
        self._model = model
        self._index = index
        self._conversation = conversation
        self._started_at = started_at
        self._ended = ended
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> None:
        messages = [{"role": "system", "content": self._conversation.system}]
        await asyncio.sleep(self._started_at + self._conversation.arrives_s - self._clock())
        for number, turn in enumerate(self._conversation.turns):
            await asyncio.sleep(turn.think_s)
            messages.append({"role": "user", "content": turn.question})
            body = {
                "model": self._model,
                "messages": messages,
                "max_tokens": turn.answer_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            sent_at = self._clock()
            outcome = RequestOutcome(
                conversation=self._index, turn=number, sent_at_s=sent_at - self._started_at
            )
            try:
                answer = await self._ask(body, outcome)
            except PROBLEMS as problem:
                outcome.error = str(problem) or type(problem).__name__
            self._ended(outcome)
            if outcome.error:
                return
            messages.append({"role": "assistant", "content": answer})

    async def _ask(self, body: dict[str, Any], outcome: RequestOutcome) -> str:
        found = Streamed()
        try:
            return await ask(
                self._session,
                "/v1/chat/completions",
                msgspec.json.encode(body),
                {},
                found,
                output_tokens=body["max_tokens"],
            )
        finally:
            outcome.ttft_s = found.ttft_s
            outcome.duration_s = found.duration_s
            outcome.prompt_tokens = found.prompt_tokens
            outcome.output_tokens = found.output_tokens
            outcome.cached_tokens = found.cached_tokens
