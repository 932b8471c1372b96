"""Relay that gives a pod of loopback another address of loopback, to spoil its KV events.

Its ports are the pod's, so that the ports at which the pod says it publishes hold here too.
"""

import asyncio
import contextlib
from functools import partial

from tests.shell.engines.kv_event_pod import GREETING, next_frame

ADDRESS = "127.0.0.2"
_MORE, _COMMAND = 1, 4


class PodRelay:
    """A relay that loses the last of every `lose_every` live frames; 0 means that all arrive."""

    def __init__(self, port, live_port, replay_port, *, pod="127.0.0.1", address=ADDRESS):
        self.port = port
        self.address = address
        self.lose_every = 0
        self.lost = 0
        self._pod = pod
        self._live_port = live_port
        self._replay_port = replay_port
        self._leads_to = {}
        self._open = {}
        self.mend()

    async def __aenter__(self):
        self._stack = contextlib.AsyncExitStack()
        for port in (self.port, self._live_port, self._replay_port):
            self._open[port] = set()
            server = await asyncio.start_server(partial(self._relay, port), self.address, port)
            self._stack.push_async_callback(server.wait_closed)
            self._stack.callback(self._abort, port)
            self._stack.callback(server.close)
        return self

    async def __aexit__(self, *_):
        await self._stack.aclose()

    def cut(self):
        """Cut the connections for events, and refuse new ones until `mend`."""
        self._leads_to = {self.port: self.port}
        self._abort(self._live_port)
        self._abort(self._replay_port)

    def mislead(self):
        """Lead subscribers of live events to the replay socket until `mend`."""
        self._leads_to[self._live_port] = self._replay_port
        self._abort(self._live_port)

    def mend(self):
        """Lead every new connection to its own port again, and lose nothing."""
        self.lose_every = 0
        self._leads_to = {port: port for port in (self.port, self._live_port, self._replay_port)}

    def _abort(self, port):
        for writer in self._open[port]:
            writer.transport.abort()

    async def _relay(self, port, reader, writer):
        target = self._leads_to.get(port)
        try:
            if target is None:
                raise ConnectionRefusedError
            pod_reader, pod_writer = await asyncio.open_connection(self._pod, target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, pod_writer}
        self._open[port] |= ends
        down = self._messages if port == self._live_port else pump
        pumps = [
            asyncio.ensure_future(pump(reader, pod_writer)),
            asyncio.ensure_future(down(pod_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in pumps:
                each.cancel()
            for end in ends:
                end.close()
            self._open[port] -= ends
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _messages(self, reader, writer):
        """Pass on what a publisher sends, message by message, but for the frames to lose."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await reader.readexactly(len(GREETING)))
            number, message = 0, b""
            while True:
                flags, body = await next_frame(reader)
                size = len(body).to_bytes(8 if flags & 2 else 1, "big")
                message += bytes([flags]) + size + body
                if flags & _MORE:
                    continue
                number += not flags & _COMMAND
                if self.lose_every and not flags & _COMMAND and number % self.lose_every == 0:
                    self.lost += 1
                else:
                    writer.write(message)
                    await writer.drain()
                message = b""


async def pump(reader, writer):
    """Pass on all bytes, until `reader` ends or one of the two connections fails."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
