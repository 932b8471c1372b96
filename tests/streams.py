"""A gateway's side of ext_proc over gRPC, its answers read by the other codec."""

from contextlib import asynccontextmanager

import grpc
import pytest
from envoy_data_plane.envoy.service.ext_proc import v3

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
TIMEOUT_S = 15


class Call:
    """One stream."""

    def __init__(self, channel):
        self.grpc = channel.stream_stream(PROCESS)(timeout=TIMEOUT_S)

    async def send(self, *messages):
        for message in messages:
            await self.grpc.write(message)

    async def answers(self, count):
        return [v3.ProcessingResponse.parse(await self.grpc.read()) for _ in range(count)]

    async def exchange(self, *messages, answers):
        await self.send(*messages)
        return await self.answers(answers)

    async def end(self):
        """Half-close; the status, which comes without another answer."""
        await self.grpc.done_writing()
        return await self.ended()

    async def ended(self):
        assert await self.grpc.read() is grpc.aio.EOF
        return await self.grpc.code()

    async def failed(self):
        """(status, details) of a stream that ends with an error."""
        with pytest.raises(grpc.aio.AioRpcError):
            await self.grpc.read()
        return await self.grpc.code(), await self.grpc.details()


@asynccontextmanager
async def channel_to(address, *, credentials=None, **options):
    """`options` without their "grpc."."""
    options = [(f"grpc.{name}", value) for name, value in options.items()]
    async with (
        grpc.aio.insecure_channel(address, options=options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=options)
    ) as channel:
        yield channel
