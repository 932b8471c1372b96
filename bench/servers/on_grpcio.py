"""A server that gives a picker's answers through grpc.aio and uvloop: `python -m
bench.servers.on_grpcio`.

It prints its port.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from bench.servers.answers import Conversation
from epp.shell.process.event_loop import loop_factory

MESSAGE_BYTES_MAX = 64 * 2**20
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


async def _process(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
) -> None:
    conversation = Conversation()
    while isinstance(message := await context.read(), bytes):
        for answer in conversation.answers(message):
            await context.write(answer)


async def _serve() -> None:
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_concurrent_streams", 20_000),
        )
    )
    handler = grpc.stream_stream_rpc_method_handler(_process)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        sys.exit(runner.run(_serve()))
