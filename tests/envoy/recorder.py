"""Recorder between Envoy and the picker, which notes their messages and changes none.

Messages pass as unchanged bytes; they are read with `envoy-data-plane`, which shares no code
with the codec of the picker.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import betterproto2
import grpc
import grpc.aio
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from epp.core.protocol.messages import DESTINATION_HEADER

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]


class RecordedStream:
    """One ext_proc stream: Envoy's questions and the picker's answers, in order."""

    def __init__(self) -> None:
        self.asked: list[ProcessingRequest] = []
        self.answered: list[ProcessingResponse] = []
        self.order: list[str] = []
        """All messages: "> request_headers" is Envoy's question, "< request_headers" the answer."""
        self.half_closed = False
        """True once Envoy has announced that it will send no more."""
        self.cut = False
        """True once Envoy has reset the stream."""
        self.status: grpc.StatusCode | None = None
        """Status with which the picker ended the stream; None while it has not."""

    @property
    def over(self) -> bool:
        return self.half_closed or self.cut or self.status is not None

    def note_question(self, message: ProcessingRequest) -> None:
        self.asked.append(message)
        self.order.append(f"> {betterproto2.which_one_of(message, 'request')[0]}")

    def note_answer(self, message: ProcessingResponse) -> None:
        self.answered.append(message)
        self.order.append(f"< {betterproto2.which_one_of(message, 'response')[0]}")

    def count(self, entry: str) -> int:
        """Return the number of times that `entry` happened, e.g. "> response_body"."""
        return self.order.count(entry)

    def destination(self) -> str:
        """Return what the picker put into the header that ORIGINAL_DST reads; "" if nothing."""
        for answer in self.answered:
            phase = answer.request_headers or answer.request_body
            mutation = phase and phase.response and phase.response.header_mutation
            for option in mutation.set_headers if mutation else ():
                if option.header and option.header.key == DESTINATION_HEADER:
                    return option.header.raw_value.decode()
        return ""


class Recorder(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.streams: list[RecordedStream] = []
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method == PROCESS:
            return grpc.stream_stream_rpc_method_handler(self._process)

        async def ask(message: bytes, context: Any) -> bytes:
            answer: bytes = await self._channel.unary_unary(details.method)(message, timeout=5)
            return answer

        return grpc.unary_unary_rpc_method_handler(ask)

    async def _process(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        stream = RecordedStream()
        self.streams.append(stream)
        call = self._channel.stream_stream(PROCESS)()
        forwarding = asyncio.create_task(_forward(requests, call, stream))
        try:
            async for message in call:
                stream.note_answer(ProcessingResponse.parse(message))
                yield message
            stream.status = await call.code()
        except grpc.aio.AioRpcError as error:
            stream.status = error.code()
            await context.abort(error.code(), error.details() or "")
        finally:
            stream.cut = stream.status is None
            forwarding.cancel()
            call.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)


async def _forward(requests: AsyncIterator[bytes], call: Any, stream: RecordedStream) -> None:
    async for message in requests:
        stream.note_question(ProcessingRequest.parse(message))
        try:
            await call.write(message)
        except asyncio.InvalidStateError:
            # The picker has ended the stream; Envoy is told by its status.
            return
    stream.half_closed = True
    await call.done_writing()


@asynccontextmanager
async def recording(picker_address: str) -> AsyncIterator[Recorder]:
    """Yield a recorder, plaintext on both sides, in front of the picker at `picker_address`."""
    async with grpc.aio.insecure_channel(picker_address, options=_OPTIONS) as channel:
        recorder = Recorder(channel)
        # Envoy pings a picker more often than gRPC's default allows while requests wait.
        options = [*_OPTIONS, ("grpc.http2.min_ping_interval_without_data_ms", 500)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((recorder,))
        recorder.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield recorder
        finally:
            await server.stop(0)
