"""A gateway's side of an ext_proc stream, through a codec that is not ours (envoy-data-plane)."""

import json

from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc import v3
from envoy_data_plane.google.protobuf import ListValue, Struct, Value

from epp.core.protocol.session import Gateway, Session, SessionSettings
from epp.shell.gateway.codec import decode, encode

FULL_DUPLEX = ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
BUFFERED = ProcessingModeBodySendMode.BUFFERED
BUFFERED_PARTIAL = ProcessingModeBodySendMode.BUFFERED_PARTIAL
STREAMED = ProcessingModeBodySendMode.STREAMED
NONE = ProcessingModeBodySendMode.NONE

CHAT = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
COMPLETIONS = CHAT | {":path": "/v1/completions"}


def headers(fields, *, in_value=False):
    """Return a header map; `in_value` fills `value`, as gateways do that do not use `raw_value`."""
    return HeaderMap(
        headers=[
            HeaderValue(key=name, value=value)
            if in_value
            else HeaderValue(key=name, raw_value=value.encode())
            for name, value in fields.items()
        ]
    )


def metadata(namespace, key, value):
    return Metadata(filter_metadata={namespace: Struct(fields={key: value})})


def string(text):
    return Value(string_value=text)


def strings(*texts):
    return Value(list_value=ListValue(values=[string(text) for text in texts]))


def subset(value):
    return metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", value)


def served(address):
    return metadata("envoy.lb", "x-gateway-destination-endpoint-served", string(address))


def protocol(request=FULL_DUPLEX, response=FULL_DUPLEX):
    return v3.ProtocolConfiguration(request_body_mode=request, response_body_mode=response)


def request_headers(fields=COMPLETIONS, *, end=False, modes=None, hint=None, in_value=False):
    return bytes(
        v3.ProcessingRequest(
            request_headers=v3.HttpHeaders(
                headers=headers(fields, in_value=in_value), end_of_stream=end
            ),
            protocol_config=modes,
            metadata_context=hint,
        )
    )


def request_body(body=b"", *, end=True, hint=None):
    return bytes(
        v3.ProcessingRequest(
            request_body=v3.HttpBody(body=body, end_of_stream=end), metadata_context=hint
        )
    )


def request_trailers():
    return bytes(v3.ProcessingRequest(request_trailers=v3.HttpTrailers()))


def response_headers(status=200, *, end=False, modes=None, by="", **fields):
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return bytes(
        v3.ProcessingRequest(
            response_headers=v3.HttpHeaders(
                headers=headers({":status": str(status)} | named), end_of_stream=end
            ),
            protocol_config=modes,
            metadata_context=served(by) if by else None,
        )
    )


def response_body(body=b"", *, end=True):
    return bytes(v3.ProcessingRequest(response_body=v3.HttpBody(body=body, end_of_stream=end)))


def response_trailers():
    return bytes(v3.ProcessingRequest(response_trailers=v3.HttpTrailers()))


def prompt(text="test1", model="my-model", **fields):
    return json.dumps({"max_tokens": 100, "model": model, "prompt": text} | fields).encode()


class Told:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.events = []
        self.exchange = None
        self.refused_exchange = None

    def decided(self, exchange):
        self.exchange = exchange
        self.events.append("decided")

    def refused(self, exchange, refusal):
        self.refused_exchange = exchange
        self.events.append(f"refused {refusal.status}")

    def failed(self, exchange, failure):
        self.events.append(f"failed: {failure}")

    def response_started(self, exchange):
        self.events.append("response started")

    def completed(self, exchange, outcome, now):
        self.events.append(f"completed {outcome.ending.value}")

    def set_aside(self, endpoint):
        self.events.append(f"set aside {endpoint.name}")

    def unknown_body_mode(self, mode):
        self.events.append("unknown body mode")

    def unknown_objective(self):
        self.events.append("unknown objective")

    def protocol_violated(self, phase, event):
        self.events.append(f"violated: {event} in {phase}")

    def response_body_declined(self):
        self.events.append("response body declined")

    def usage_unseen(self):
        self.events.append("usage unseen")

    def responses_unseen(self):
        self.events.append("responses unseen")


class Stream:
    """One stream through the codec and the session, without a socket."""

    def __init__(
        self,
        scheduler,
        *,
        settings=None,
        gateway=None,
        now=0.0,
        budget=None,
        told=None,
        resolver=None,
        queue=None,
    ):
        self.told = told or Told()
        self.now = now
        self.scheduler = scheduler
        self.session = Session(
            scheduler,
            settings or SessionSettings(),
            gateway or Gateway(),
            self.told,
            lambda: "generated-id",
            budget,
            resolver,
            queue,
        )
        self.resumed = []
        self.session.resume = self._resume
        self.session.evict = self._evict

    def send(self, *messages):
        """Send the messages; return every answer, decoded by the other codec."""
        answers = []
        for message in messages:
            answered = self.session.receive(decode(message), self.now)
            while self.session.undecoded:
                answered += self.session.carry_on(self.now)
            answers += [v3.ProcessingResponse.parse(encode(answer)) for answer in answered]
            self.session.sent()
        return answers

    def _resume(self, resolution):
        self._go_on(self.session.resolved(resolution, self.now))

    def _evict(self, refusal):
        self._go_on(self.session.evicted(refusal, self.now))

    def _go_on(self, answered):
        self.resumed += [v3.ProcessingResponse.parse(encode(answer)) for answer in answered]
        self.session.sent()

    def close(self):
        self.session.closed(self.now)


def kind(answer):
    """Return the phase that the answer is for, e.g. "request_body"."""
    names = (
        "request_headers", "request_body", "request_trailers",
        "response_headers", "response_body", "response_trailers", "immediate_response",
    )  # fmt: skip
    (found,) = [name for name in names if getattr(answer, name, None) is not None]
    return found


def kinds(answers):
    return [kind(answer) for answer in answers]


def destination(answer):
    """Return the destination, which must be the same in the header and in the metadata."""
    mutated = set_headers(answer)["x-gateway-destination-endpoint"]
    told = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert told["x-gateway-destination-endpoint"].string_value == mutated
    assert common(answer).clear_route_cache
    return mutated


def common(answer):
    return getattr(answer, kind(answer)).response


def set_headers(answer):
    mutation = (
        answer.immediate_response.headers
        if kind(answer) == "immediate_response"
        else common(answer).header_mutation
    )
    assert all(option.header.value == "" for option in mutation.set_headers)
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def removed_headers(answer):
    return set(common(answer).header_mutation.remove_headers)


def streamed(answers):
    """Return the body in the streamed chunks among the answers, and where the stream ends."""
    chunks = [
        common(answer).body_mutation.streamed_response
        for answer in answers
        if kind(answer) in {"request_body", "response_body"}
    ]
    assert all(len(chunk.body) <= 62_000 for chunk in chunks)
    return b"".join(chunk.body for chunk in chunks), [chunk.end_of_stream for chunk in chunks]


def refusal(answer):
    """Return the status and the error object of an immediate response."""
    immediate = answer.immediate_response
    return int(immediate.status.code), json.loads(immediate.body)["error"]
