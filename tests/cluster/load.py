"""Clients inside the cluster, which tell what became of each request.

`python -m tests.cluster.load URL` sends short requests at an even rate, over kept and over new
connections, and long streams beside them, until standard input ends and the streams have; then it
prints one JSON object.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

BEGIN_S_MAX: Final = 15.0
ASK_S_MAX: Final = 20.0
STREAM_S_MAX: Final = 120.0
TOKENS_A_SECOND: Final = 100
"""Approximate rate at which the simulated pods send the tokens of a stream."""
_PROMPT: Final = "You are helper {who}. " + "Rules of the house. " * 60 + "Question {number}."


class Load:
    """Requests and streams of `url`, with what came of them."""

    def __init__(self, url: str, model: str, stream_s: float) -> None:
        self.outcomes: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        self.spans_s: dict[str, list[float]] = {}
        """Outcome -> times of the first and the last of it, in seconds since the beginning."""
        self.times_s: list[float] = []
        self._url = f"{url}/v1/completions"
        self._model = model
        self._stream_s = stream_s
        self._began_s = time.monotonic()

    async def ask(self, session: ClientSession, number: int) -> None:
        """Send one short request and count its outcome."""
        body = self._body(number, max_tokens=4)
        began_s = time.monotonic()
        try:
            async with session.post(self._url, json=body) as response:
                await response.read()
                outcome = str(response.status)
        except (ClientError, TimeoutError) as error:
            outcome = type(error).__name__
        self._count(self.outcomes, outcome)
        if outcome == "200":
            self.times_s.append(time.monotonic() - began_s)

    async def stream(self, session: ClientSession, number: int) -> None:
        """Ask for one answer that takes about `stream_s`, and watch it to its end."""
        tokens = int(self._stream_s * TOKENS_A_SECOND)
        body = self._body(number, max_tokens=tokens, stream=True, ignore_eos=True)
        outcome = "cut"
        try:
            timeout = ClientTimeout(total=STREAM_S_MAX + self._stream_s)
            async with session.post(self._url, json=body, timeout=timeout) as response:
                if response.status != 200:
                    outcome = str(response.status)
                async for line in response.content:
                    if line.strip() == b"data: [DONE]":
                        outcome = "whole"
        except (ClientError, TimeoutError) as error:
            outcome = type(error).__name__
        self._count(self.streams, outcome)

    def _body(self, number: int, **more: object) -> dict[str, object]:
        prompt = _PROMPT.format(who=number % 7, number=number)
        return {"model": self._model, "prompt": prompt, **more}

    def _count(self, among: Counter[str], outcome: str) -> None:
        among[outcome] += 1
        after_s = round(time.monotonic() - self._began_s, 2)
        self.spans_s.setdefault(outcome, [after_s, after_s])[1] = after_s

    def told(self) -> dict[str, object]:
        """Return what is printed."""
        times_s = sorted(self.times_s) or [0.0]
        return {
            "requests": dict(self.outcomes),
            "streams": dict(self.streams),
            "spans_s": self.spans_s,
            "p50_s": times_s[len(times_s) // 2],
            "p99_s": times_s[int(len(times_s) * 0.99)],
        }


async def _model(session: ClientSession, url: str) -> str:
    """Return the name of the model once `url` answers.

    A Service is programmed a moment after its pods are ready. The last error is raised if there is
    no answer within `BEGIN_S_MAX`.
    """
    deadline_s = time.monotonic() + BEGIN_S_MAX
    while True:
        try:
            async with session.get(f"{url}/v1/models") as response:
                return str((await response.json())["data"][0]["id"])
        except (ClientError, TimeoutError, KeyError):
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(0.2)


async def _input_ended() -> None:
    """Wait until standard input ends.

    The loop watches it: a thread that reads would outlive an error.
    """
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()
    transport.close()


async def run(url: str, rate_per_s: float, streams: int, stream_s: float) -> dict[str, object]:
    """Send requests until standard input and the streams end; return what became of them."""
    timeout = ClientTimeout(total=ASK_S_MAX)
    ended = asyncio.create_task(_input_ended(), name="standard input")
    async with (
        ClientSession(timeout=timeout, connector=TCPConnector(limit=0)) as kept,
        ClientSession(timeout=timeout, connector=TCPConnector(limit=0, force_close=True)) as anew,
        asyncio.TaskGroup() as tasks,
    ):
        load = Load(url, await _model(kept, url), stream_s)
        streamed = [tasks.create_task(load.stream(kept, number)) for number in range(streams)]
        # Whoever started us waits for it.
        print("asking", flush=True)
        number = 0
        due_s = time.monotonic()
        while not (ended.done() and all(stream.done() for stream in streamed)):
            tasks.create_task(load.ask(anew if number % 3 == 0 else kept, number))
            number += 1
            due_s += 1 / rate_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return load.told()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.load")
    parser.add_argument("url")
    parser.add_argument("--rate-per-s", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--stream-s", type=float, default=60.0)
    told = parser.parse_args()
    print(json.dumps(asyncio.run(run(told.url, told.rate_per_s, told.streams, told.stream_s))))


if __name__ == "__main__":
    main()
