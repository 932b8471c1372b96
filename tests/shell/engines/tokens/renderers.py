"""A renderer over HTTP whose answers a test chooses."""

import asyncio
import contextlib
import json


class FakeRenderer:
    """HTTP server that answers each POST as `answers[path]` says.

    An entry is (status, bytes), or an async function that returns this for a body. None closes the
    connection without an answer. A path without an entry gets a 404.
    """

    def __init__(self, answers=None):
        self.answers = dict(answers or {})
        self.asked = []
        """Received requests as (path, headers, body)."""
        self.left = 0
        """Connections that were cut before their answer."""
        self.tls = None

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self.server.sockets[0].getsockname()[1]
        self.writers = set()
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        await self.server.wait_closed()

    @property
    def url(self):
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def _serve(self, reader, writer):
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        self.writers.discard(writer)
        writer.close()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        _, path, _ = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers["content-length"]))
        self.asked.append((path, headers, body))
        answer = self.answers.get(path, (404, b'{"detail":"Not Found"}'))
        if callable(answer):
            told = asyncio.ensure_future(answer(body))
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({told, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not told.done():
                told.cancel()
                self.left += 1
                return False
            answer = told.result()
        if answer is None:
            return False
        status, content = answer
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, len(content), content)
        )
        await writer.drain()
        return True


def rendered(*ids, **more):
    """Return the answer of /render to a chat, as (status, bytes)."""
    return 200, json.dumps({"request_id": "r", "token_ids": ids, "features": None} | more).encode()


def tokenized(*ids):
    """Return an answer of /tokenize, as (status, bytes)."""
    return 200, json.dumps({"count": len(ids), "max_model_len": 4096, "tokens": ids}).encode()


async def never(_):
    await asyncio.Event().wait()
