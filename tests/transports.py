"""Transports of calls, by name, so that every transport passes the same tests."""

import asyncio
from contextlib import asynccontextmanager

from epp.core.protocol.budget import BodyBudget
from epp.shell.gateway.grpcio import GrpcioServer
from epp.shell.gateway.http2 import Http2Server, Http2Settings

TRANSPORTS = ("grpcio", "ngh2")


def transport_of(
    name, methods, *, bytes_max=32 * 1024 * 1024, budget=None, age_max_s=None, cut=lambda _: None
):
    """Return a transport that listens nowhere yet."""
    if name == "ngh2":
        return Http2Server(
            methods,
            budget=budget or BodyBudget(2**40),
            settings=Http2Settings(message_bytes_max=bytes_max),
            cut=cut,
        )
    return GrpcioServer(
        methods, receive_bytes_max=bytes_max, connection_age_max_s=age_max_s, cut=cut
    )


@asynccontextmanager
async def carried(transport, *, host="127.0.0.1", port=0, certificate=None, wait_s=None):
    """Serve with `transport` during the block, and yield the port that it took."""
    taken = await transport.listen(host, port, certificate)
    await transport.start()
    running = [asyncio.create_task(loop()) for loop in transport.loops().values()]
    try:
        yield taken
    finally:
        await transport.stop(wait_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
