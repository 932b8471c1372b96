"""What each gateway of the field says to a picker, and whether it understands the answers.

A transcript, tests/conformance/*.yaml, names a gateway, the source that tells how it behaves, and
how it speaks; then streams, each an exchange in which `>` is the gateway, `<` the picker, and `=`
what must be true of the picker. A real gRPC client plays the gateway against the real server.

    > request-headers modes=FULL_DUPLEX_STREAMED/NONE end subset=b x-name=value
    > request-body 1000 end          the next 1,000 bytes of the body; `rest`: all that is left
    > request-trailers
    > response-headers 200 end served=a
    > response-body 1000 end
    > response-trailers
    > half-close, > reset
    < request-headers to a           also of request-body; without `to`: no destination in it
    < request-body echo              all that was said of the body, in chunks; `echo end`: and its end
    < response-headers x-name=value  the headers that it sets: these and no others
    < response-body echo end         or `response-body`: an empty answer
    < refusal 503
    < end                            the stream ends with OK, and no other answer came before
    = leases 1, = prefix known, = api chat, = body unseen, = told completed unseen
"""

import asyncio
import ipaddress
import json
import ssl
import time
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import yaml
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as BodyMode,
)
from envoy_data_plane.envoy.service.ext_proc import v3

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.core.protocol.session import Session, SessionSettings
from epp.core.types import Endpoint, EndpointMetrics
from epp.plugins.strategies import STRATEGIES
from epp.shell.gateway.ext_proc import ExtProc
from epp.shell.gateway.tls import ServerCertificate
from tests import gateway as gw
from tests.envoy.rig import until
from tests.shell.gateway.test_ext_proc import Told
from tests.streams import Call, channel_to
from tests.transports import TRANSPORTS, carried, transport_of

TRANSCRIPTS = sorted((Path(__file__).parent / "conformance").glob("*.yaml"))
GATEWAYS = {
    "Istio",
    "Envoy AI Gateway, duplex",
    "Envoy AI Gateway, buffered",
    "Envoy Gateway",
    "kgateway",
    "agentgateway",
    "NGINX Gateway Fabric",
    "GKE Gateway",
    "AIBrix",
    "static Envoy",
}
WEIGHTED = STRATEGIES["weighted-scores"].config
POOL = {"a": "10.0.0.1:8000", "b": "10.0.0.2:8000"}
RECEIVE_BYTES_MAX = 32 * 1024 * 1024 + 65_536
OURS = {"x-gateway-destination-endpoint", "x-request-id"}


def load(path):
    return yaml.safe_load(path.read_text())


class Picker:
    """The server behind both of its ports, with endpoints of which the first one is idle."""

    def __init__(self, pool, config):
        settings = build_settings(load_config(config, "transcript", plugin_tables()))
        self.addresses = pool
        self.scheduler = Scheduler(settings, seed=1)
        self.told = Told()
        self.server = ExtProc(
            lambda gateway: Session(
                self.scheduler, SessionSettings(), gateway, self.told, lambda: "generated"
            ),
            self.told,
        )
        endpoints = [
            Endpoint(endpoint_id=name, name=name, address=address) for name, address in pool.items()
        ]
        self.scheduler.take(PoolReplaced(endpoints), time.monotonic())

    def observe(self):
        """As if just scraped: each endpoint busier than the one before it."""
        for slot, _ in self.scheduler.pool.endpoints():
            metrics = EndpointMetrics(
                waiting_requests=10 * slot, running_requests=0, kv_cache_usage=0.1
            )
            self.scheduler.take(PageScraped(slot, metrics), time.monotonic())


class Talk:
    """One stream of a transcript."""

    def __init__(self, transcript, picker, channel, body, decided_before):
        self.transcript = transcript
        self.picker = picker
        self.call = Call(channel)
        self.left = body
        self.said = b""
        self.response = b""
        self.response_said = 0
        self.end = False
        self.decided_before = decided_before
        self.streams_before = len(picker.told.codes)

    async def play(self, line):
        who, verb, *words = line.split()
        flags = {word for word in words if "=" not in word}
        named = dict(word.split("=", 1) for word in words if "=" in word)
        direction = {">": "say", "<": "hear", "=": "check"}[who]
        await getattr(self, f"{direction}_{verb.replace('-', '_')}")(words, flags, named)

    # What the gateway says.

    def fields(self, named):
        """Headers the way this gateway writes them."""
        form = self.transcript["header_values"]

        def value(name, text):
            plain = form == "value" or (form == "pseudo in value" and name.startswith(":"))
            if plain:
                return HeaderValue(key=name, value=text)
            return HeaderValue(key=name, raw_value=text.encode())

        return HeaderMap(headers=[value(name, text) for name, text in named.items()])

    def message(self, named, **phase):
        """With what goes along with any message: modes, subset hint, who served."""
        context = None
        if "subset" in named:
            allowed = [self.picker.addresses.get(at, at) for at in named["subset"].split(",")]
            context = gw.subset(gw.strings(*allowed))
        if "served" in named:
            context = gw.served(self.picker.addresses[named["served"]])
        modes = None
        if "modes" in named:
            modes = gw.protocol(*(BodyMode[mode] for mode in named["modes"].split("/")))
        request = v3.ProcessingRequest(metadata_context=context, protocol_config=modes, **phase)
        return bytes(request)

    async def say_request_headers(self, words, flags, named):
        own = {name: at for name, at in named.items() if name not in {"modes", "subset"}}
        headers = self.fields(self.transcript["headers"] | own)
        said = v3.HttpHeaders(headers=headers, end_of_stream="end" in flags)
        await self.call.send(self.message(named, request_headers=said))

    async def say_request_body(self, words, flags, named):
        size = len(self.left) if words[0] == "rest" else int(words[0])
        piece, self.left = self.left[:size], self.left[size:]
        self.said += piece
        said = v3.HttpBody(body=piece, end_of_stream="end" in flags)
        await self.call.send(self.message(named, request_body=said))

    async def say_request_trailers(self, words, flags, named):
        await self.call.send(self.message(named, request_trailers=v3.HttpTrailers()))

    async def say_response_headers(self, words, flags, named):
        headers = self.fields({":status": words[0], "content-type": "text/event-stream"})
        said = v3.HttpHeaders(headers=headers, end_of_stream="end" in flags)
        await self.call.send(self.message(named, response_headers=said))

    async def say_response_body(self, words, flags, named):
        piece = bytes(index % 251 for index in range(int(words[0])))
        self.response += piece
        said = v3.HttpBody(body=piece, end_of_stream="end" in flags)
        await self.call.send(self.message(named, response_body=said))

    async def say_response_trailers(self, words, flags, named):
        await self.call.send(self.message(named, response_trailers=v3.HttpTrailers()))

    async def say_half_close(self, words, flags, named):
        await self.call.grpc.done_writing()

    async def say_reset(self, words, flags, named):
        self.call.grpc.cancel()
        await self.closed()

    # What it must hear.

    async def answer(self, kind):
        (answer,) = await self.call.answers(1)
        assert gw.kind(answer) == kind, answer
        return answer

    def to(self, answer, words):
        """The destination as this gateway reads it, or that there is none."""
        if "to" not in words:
            assert not set_headers(answer)
            assert answer.dynamic_metadata is None
            return
        expected = self.picker.addresses[words[words.index("to") + 1]]
        assert gw.destination(answer) == expected
        # Whoever reads the gateway's headers finds the request id, and gives none of its own.
        named = {name.lower() for name in self.transcript["headers"]}
        assert set(set_headers(answer)) == OURS - named
        for place in self.transcript["reads"]:
            assert socket_address(READERS[place](answer)) == socket_address(expected)

    async def echo(self, kind, expected, *, ends):
        """Chunks no larger than this gateway takes, byte for byte, the end on the last."""
        chunks = []
        left = len(expected)
        while not chunks or left > 0 or (ends and not chunks[-1].end_of_stream):
            answer = await self.answer(kind)
            assert gw.kind(answer) == kind
            chunks.append(gw.common(answer).body_mutation.streamed_response)
            left -= len(chunks[-1].body)
        assert b"".join(chunk.body for chunk in chunks) == expected
        assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [ends]
        assert max(len(chunk.body) for chunk in chunks) <= self.transcript["chunk_bytes_max"]

    async def hear_request_headers(self, words, flags, named):
        self.to(await self.answer("request_headers"), words)

    async def hear_request_body(self, words, flags, named):
        if "echo" in flags:
            expected, self.said = self.said, b""
            await self.echo("request_body", expected, ends="end" in flags)
            return
        answer = await self.answer("request_body")
        assert not changes_body(answer), "the gateway holds the body itself"
        self.to(answer, words)

    async def hear_request_trailers(self, words, flags, named):
        await self.answer("request_trailers")

    async def hear_response_headers(self, words, flags, named):
        told = set_headers(await self.answer("response_headers"))
        # Who asks why afterwards needs the name of the request.
        assert told.pop("x-request-id")
        assert told == named

    async def hear_response_body(self, words, flags, named):
        expected, self.response = self.response, b""
        if "echo" in flags:
            await self.echo("response_body", expected, ends="end" in flags)
            return
        assert not changes_body(await self.answer("response_body"))

    async def hear_response_trailers(self, words, flags, named):
        await self.answer("response_trailers")

    async def hear_refusal(self, words, flags, named):
        answer = await self.answer("immediate_response")
        status, error = gw.refusal(answer)
        assert status == int(words[0])
        assert error["message"]
        assert gw.set_headers(answer)["content-type"] == "application/json"

    async def hear_end(self, words, flags, named):
        assert await self.call.ended() is grpc.StatusCode.OK
        await self.closed()

    async def closed(self):
        told = self.picker.told
        await until(lambda: len(told.codes) > self.streams_before, "the end of the stream")
        self.end = True

    # What must be true then.

    async def check_leases(self, words, flags, named):
        assert self.picker.scheduler.ledger.open_leases == int(words[0])

    async def check_prefix(self, words, flags, named):
        known = self.picker.told.exchange.decision.leg.matched_blocks > 0
        assert known == (words[0] == "known")

    async def check_api(self, words, flags, named):
        assert self.picker.told.exchange.request.api == words[0]

    async def check_body(self, words, flags, named):
        assert words == ["unseen"]
        assert self.picker.told.exchange.unseen_body is not None

    async def check_told(self, words, flags, named):
        assert self.picker.told.events[-1] == " ".join(words)


def set_headers(answer):
    """{} if the answer changes nothing at all."""
    common = gw.common(answer)
    return gw.set_headers(answer) if common is not None and common.header_mutation else {}


def changes_body(answer):
    common = gw.common(answer)
    return common is not None and common.body_mutation is not None


def header(answer):
    return gw.set_headers(answer)["x-gateway-destination-endpoint"]


def metadata(answer):
    fields = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    return fields["x-gateway-destination-endpoint"].string_value


READERS = {"header": header, "metadata": metadata}


def socket_address(text):
    """One address and port; IPv6 in brackets only, no list: what the strictest of them parses."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
    assert bracketed == (ip.version == 6)
    return ip, int(port)


def body_of(said):
    """`KIND BYTES`: a request body of at least that size; none: nothing."""
    if not said:
        return b""
    kind, size = said.split()
    text = "once upon a time in a land far away " * (int(size) // 36 + 1)
    match kind:
        case "chat":
            document = {"model": "m", "messages": [{"role": "user", "content": text}]}
        case "completion":
            document = {"model": "m", "prompt": text}
        case "broken":
            return b'{"model": "m", "prompt": ' + text.encode()
    return json.dumps(document).encode()


async def play(transcript, transport):
    picker = Picker(transcript.get("pool", POOL), transcript.get("config", WEIGHTED))
    carries = transport_of(transport, picker.server.methods, bytes_max=RECEIVE_BYTES_MAX)
    credentials = None
    async with AsyncExitStack() as opened:
        certificate = ServerCertificate.open(None) if transcript["tls"] else None
        port = await opened.enter_async_context(carried(carries, certificate=certificate))
        if transcript["tls"]:
            shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
            credentials = grpc.ssl_channel_credentials(root_certificates=shown.encode())

        def connection():
            return channel_to(
                f"localhost:{port}", credentials=credentials, use_local_subchannel_pool=1
            )

        shared = None
        if transcript["connections"] == "shared":
            shared = await opened.enter_async_context(connection())
        for number, stream in enumerate(transcript["streams"]):
            picker.observe()
            async with AsyncExitStack() as one:
                channel = shared or await one.enter_async_context(connection())
                talk = Talk(transcript, picker, channel, body_of(stream.get("body")), number)
                for line in stream["exchange"].strip().splitlines():
                    try:
                        async with asyncio.timeout(15):
                            await talk.play(line)
                    except (AssertionError, TimeoutError, TypeError) as error:
                        error.add_note(f"at {line!r} of: {stream['what']}")
                        raise
                assert talk.end, f"{stream['what']}: the exchange does not come to its end"
    violations = [event for event in picker.told.events if event.startswith("violated")]
    assert violations == []
    assert set(picker.told.codes) <= {"OK", "CANCELLED"}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
async def test_a_gateway_is_answered_as_it_understands(path, transport):
    """Every stream of its transcript, in order, and nothing else is said to it."""
    await play(load(path), transport)


def test_every_gateway_of_the_field_has_a_transcript():
    """With where it is known from."""
    transcripts = [load(path) for path in TRANSCRIPTS]
    assert {transcript["gateway"] for transcript in transcripts} >= GATEWAYS
    for transcript in transcripts:
        assert transcript["source"].strip()
        assert all(stream["what"] for stream in transcript["streams"])


@pytest.mark.parametrize("answer", ["10.0.0.1:8000,10.0.0.2:8000", "fd00::1:8000", "10.0.0.1"])
def test_the_strictest_reader_is_strict(answer):
    """A list, IPv6 without brackets and a bare address are what such gateways fail on."""
    with pytest.raises((AssertionError, ValueError)):
        socket_address(answer)
