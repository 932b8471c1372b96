"""The phases of a stream, driven through both codecs so that what is asserted is on the wire."""

import gzip
import re
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import field, structs

from epp.core.abilities import Abilities
from epp.core.decision.inputs import PoolReplaced, Reconfigured, Tick
from epp.core.decision.profile import NamedResponder
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Ending
from epp.core.parameters import Parameters
from epp.core.protocol.budget import PIECE_BYTES, BodyBudget
from epp.core.protocol.messages import (
    BODY_CHUNK_BYTES_MAX,
    BodyMode,
    RequestBody,
    RequestTrailers,
)
from epp.core.protocol.session import (
    PIECE_MEAN_BYTES_MIN,
    PIECES_FREE,
    UNSEEN_TOLD,
    Gateway,
    SessionSettings,
    chunks,
)
from tests import gateway as gw
from tests.builders import endpoint
from tests.test_hermetic import pods

BODY = gw.prompt("hello")


def stream_of(pool=None, **fields):
    return gw.Stream(pool or pods((0, 0.1), (5, 0.5)), **fields)


def inflight(stream):
    return stream.scheduler.pool.columns.inflight_requests[:2].tolist()


@pytest.mark.parametrize("modes", [None, gw.protocol()], ids=["not announced", "full duplex"])
def test_full_duplex_holds_the_headers_until_the_body_is_whole(modes):
    """Then headers, then the body, the last chunk ending the stream."""
    stream = stream_of()
    assert stream.send(gw.request_headers(modes=modes)) == []
    assert stream.send(gw.request_body(gw.prompt("x")[:9], end=False)) == []
    answers = stream.send(gw.request_body(gw.prompt("x")[9:], end=False), gw.request_body(b""))
    assert gw.kinds(answers) == ["request_headers", "request_body"]
    assert gw.destination(answers[0]) == "192.168.1.1:8000"
    assert gw.streamed(answers) == (gw.prompt("x"), [True])


@pytest.mark.parametrize("came_at_s", [None, 99.5])
def test_the_time_of_a_request_starts_when_its_stream_came(came_at_s):
    """Where the gateway's server knows that; otherwise with its first message."""
    stream = stream_of()
    stream.session.came_at_s = came_at_s
    stream.now = 100.0
    stream.send(gw.request_headers(), gw.request_body(BODY))
    assert stream.told.exchange.started_at_s == (100.0 if came_at_s is None else came_at_s)


@pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 124_000, 200_000])
def test_bodies_are_cut_where_every_gateway_accepts_them(size):
    """At most 62,000 bytes a chunk, whole, and only the last one ends the stream."""
    body = bytes(size)
    pieces = list(chunks(body, ends=True))
    assert b"".join(piece for piece, _ in pieces) == body
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece) <= BODY_CHUNK_BYTES_MAX for piece, _ in pieces)
    assert not any(last for _, last in chunks(body, ends=False))


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("mode", [gw.FULL_DUPLEX, gw.BUFFERED, gw.STREAMED])
@pytest.mark.parametrize("ends", ["with the piece", "with trailers", "with an empty piece"])
def test_a_piece_of_a_body_may_be_a_view(mode, ends, encoding):
    """It is answered as bytes are, also where it is the whole body."""
    body = BODY if encoding == "identity" else gzip.compress(BODY)
    answered, requests = [], []
    for piece in (body, memoryview(body)):
        stream = stream_of()
        fields = gw.COMPLETIONS | {"content-encoding": encoding}
        stream.send(gw.request_headers(fields, modes=gw.protocol(mode, gw.NONE)))
        answers = stream.session.receive(RequestBody(piece, ends == "with the piece"), 0.0)
        if ends != "with the piece":
            end = RequestTrailers() if ends == "with trailers" else RequestBody(b"", True)
            answers += stream.session.receive(end, 0.0)
        answered.append([gw.encode(answer) for answer in answers])
        requests.append(stream.told.exchange.request)
    assert answered[0] == answered[1]
    assert answered[0]
    assert requests[0].prompt_tokens == requests[1].prompt_tokens
    assert requests[0].chains == requests[1].chains


def test_full_duplex_with_trailers_ends_with_the_trailers():
    """No chunk ends the stream; the trailers answer comes last."""
    stream = stream_of()
    answers = stream.send(
        gw.request_headers(), gw.request_body(BODY, end=False), gw.request_trailers()
    )
    assert gw.kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert gw.streamed(answers) == (BODY, [False])


@pytest.mark.parametrize("mode", [gw.BUFFERED, gw.BUFFERED_PARTIAL])
def test_a_buffered_body_is_answered_with_the_destination(mode):
    """Headers at once, or Envoy would wait for ever; the body stays with Envoy."""
    stream = stream_of()
    head = stream.send(gw.request_headers(modes=gw.protocol(mode, gw.NONE)))
    assert gw.kinds(head) == ["request_headers"]
    assert gw.common(head[0]) is None or not gw.set_headers(head[0])
    (answer,) = stream.send(gw.request_body(BODY))
    assert gw.destination(answer) == "192.168.1.1:8000"
    assert gw.common(answer).body_mutation is None
    assert stream.told.exchange.request.model == "my-model"


def test_a_buffered_body_gets_its_new_model():
    """The whole new body and its length."""
    stream = stream_of(settings=SessionSettings(trust_model_rewrite=True))
    fields = gw.COMPLETIONS | {"x-gateway-model-name-rewrite": "other"}
    stream.send(gw.request_headers(fields, modes=gw.protocol(gw.BUFFERED, gw.NONE)))
    (answer,) = stream.send(gw.request_body(gw.prompt()))
    body = gw.common(answer).body_mutation.body
    assert body == gw.prompt(model="other")
    assert gw.set_headers(answer)["content-length"] == str(len(body))


def test_the_rules_of_the_cluster_rewrite_the_model():
    """What the engine is asked for is what its affinity is kept under."""
    stream = stream_of(settings=SessionSettings(rewrite={"my-model": "tuned"}.get))
    head, body = stream.send(gw.request_headers(), gw.request_body(gw.prompt()))
    assert gw.streamed([head, body])[0] == gw.prompt(model="tuned")
    assert stream.told.exchange.request.model == "tuned"
    assert stream.told.exchange.incoming_model == "my-model"


def test_a_body_too_large_for_envoys_buffer_is_routed_without_prefix():
    """BUFFERED_PARTIAL hands over the head of the body: no JSON, but still a request."""
    stream = stream_of()
    modes = gw.protocol(gw.BUFFERED_PARTIAL, gw.NONE)
    _, answer = stream.send(gw.request_headers(modes=modes), gw.request_body(BODY[:9], end=False))
    assert gw.destination(answer) == "192.168.1.1:8000"
    assert stream.told.exchange.unseen_body is BodyMode.BUFFERED_PARTIAL


@pytest.mark.parametrize("mode", [gw.STREAMED, gw.NONE, 77], ids=["streamed", "none", "unknown"])
def test_where_the_body_is_not_seen_in_time_the_headers_carry_the_destination(mode):
    """Envoy gives 503 if the destination comes later."""
    stream = stream_of()
    (answer,) = stream.send(gw.request_headers(modes=gw.protocol(mode, gw.NONE)))
    assert gw.destination(answer) == "192.168.1.1:8000"
    assert stream.told.exchange.unseen_body is not None
    assert ("unknown body mode" in stream.told.events) is (mode == 77)
    passed = stream.send(gw.request_body(BODY, end=False), gw.request_body(b""))
    assert gw.kinds(passed) == ["request_body", "request_body"]
    assert all(gw.common(answer) is None for answer in passed)


def test_body_messages_after_the_end_are_ignored():
    """Envoy can send the end of a large body twice (envoy#46237)."""
    stream = stream_of()
    answers = stream.send(gw.request_headers(), gw.request_body(BODY), gw.request_body(BODY))
    assert gw.streamed(answers) == (BODY, [True])
    assert stream.told.events == ["decided"]


def test_header_values_are_read_from_either_field():
    """Some gateways fill `value`, Envoy fills `raw_value`."""
    stream = stream_of()
    fields = gw.COMPLETIONS | {"X-Request-Id": "mine"}
    stream.send(gw.request_headers(fields, in_value=True), gw.request_body(BODY))
    assert stream.told.exchange.request.request_id == "mine"


def test_a_request_without_an_id_gets_one():
    """It is set, so that the pod's logs carry the same."""
    answers = stream_of().send(gw.request_headers(), gw.request_body(BODY))
    assert gw.set_headers(answers[0])["x-request-id"] == "generated-id"


def answered_with(asked, answered=None, **settings):
    """Headers that are set on the response to a request with the headers `asked`."""
    stream = stream_of(settings=SessionSettings(**settings))
    stream.send(gw.request_headers(gw.COMPLETIONS | asked), gw.request_body(BODY))
    (answer,) = stream.send(gw.response_headers(200, end=True, **(answered or {})))
    return gw.set_headers(answer) if gw.common(answer) else {}


def test_the_client_is_told_the_name_of_its_request():
    """Its own, or the one that was made: with it anybody can ask why it went where it went."""
    assert answered_with({"x-request-id": "mine"}) == {"x-request-id": "mine"}
    assert answered_with({}) == {"x-request-id": "generated-id"}


@pytest.mark.parametrize("hostile", ["r" * 257, "caf\u00e9", "a\x7fb", "a\tb"])
def test_a_name_that_is_no_header_is_not_sent_back(hostile):
    """Too long, or not printable: a response has less room than a request."""
    assert answered_with({"x-request-id": hostile}) == {}


def test_who_was_chosen_is_told_to_clients_where_that_is_wanted():
    """By name, with the scores and what decided; nothing of it by default."""
    told = answered_with({"x-request-id": "mine"}, explain_headers=True)
    assert told["x-homing-endpoint"] == "pod-0"
    assert re.fullmatch(
        r"score \S+, next \S+, decided by [a-z -]+, 0 of 0 blocks", told["x-homing-reason"]
    )
    assert set(told) == {"x-request-id", "x-homing-endpoint", "x-homing-reason"}


def test_a_refusal_tells_the_name_of_the_request_too():
    """The same that the log and the records of refusals have; a time-out before any header has none."""
    stream = stream_of()
    (answer,) = stream.send(gw.request_headers(), gw.request_body(b"{"))
    assert gw.set_headers(answer)["x-request-id"] == "generated-id"
    assert stream.session._exchange.request_id == "generated-id"
    silent = stream_of()
    (late,) = silent.session.time_out(1.0)
    assert "x-request-id" not in dict(late.headers)


def test_control_headers_of_the_client_do_not_reach_the_pod():
    """They are removed; a spoofed destination is overwritten."""
    fields = gw.COMPLETIONS | {
        "x-gateway-destination-endpoint": "10.6.6.6:1",
        "x-gateway-destination-endpoint-subset": "10.6.6.6:1",
        "x-prefiller-host-port": "10.6.6.6:1",
        "x-request-id": "r",
    }
    answers = stream_of().send(gw.request_headers(fields), gw.request_body(BODY))
    assert gw.destination(answers[0]) == "192.168.1.1:8000"
    assert gw.removed_headers(answers[0]) == {
        "x-gateway-destination-endpoint-subset",
        "x-prefiller-host-port",
    }


SOURCE = "x-kv-cache-source-host-port"


class Marks(Parameters, frozen=True):
    """Sets two headers, or one."""

    type_name: ClassVar[str] = "marks"
    abilities: ClassVar[Abilities] = Abilities(marks_requests=True)
    own_headers: ClassVar[tuple[str, ...]] = (SOURCE, "x-mine")
    found: dict[str, str] = field(default_factory=dict)

    def request_headers(self, request, candidates, endpoint):
        assert len(candidates) == 2
        return {name: value.format(endpoint.address) for name, value in self.found.items()}


@pytest.mark.parametrize(
    ("found", "removed"),
    [
        ({SOURCE: "not {}"}, {"x-mine"}),
        ({"x-mine": "1"}, {SOURCE}),
        ({}, {SOURCE, "x-mine"}),
        ({"x-other": "1"}, {SOURCE, "x-mine"}),
    ],
)
def test_headers_that_a_plugin_sets_are_no_clients(found, removed):
    """Those that it does not set now are removed; it sets none but its own."""
    pool = pods((0, 0.1), (5, 0.5))
    profile = pool.settings.profile
    marked = structs.replace(profile, responders=(NamedResponder("marks", Marks(found=found)),))
    pool.take(Reconfigured(structs.replace(pool.settings, stages=Stages(decode=marked))), 0.0)
    fields = gw.COMPLETIONS | {SOURCE: "10.6.6.6:1", "x-mine": "a client's", "x-request-id": "r"}
    head, *_ = stream_of(pool).send(gw.request_headers(fields), gw.request_body(BODY))
    told = gw.set_headers(head)
    expected = {SOURCE: "not 192.168.1.1:8000"} if SOURCE in found else found
    expected = {} if "x-other" in found else expected
    assert {name: told[name] for name in (SOURCE, "x-mine", "x-other") if name in told} == expected
    assert gw.removed_headers(head) == removed
    assert [one.name for one in pool.failures] == (["marks"] if "x-other" in found else [])


PRIORITIES = SessionSettings(priorities={"urgent": 2**31 - 1, "batch": -1}, engine_priority=True)
ENGINE_PRIORITY = "x-vllm-priority"


def placed_head(mode, fields, *, settings=None, body=BODY):
    """Return the answer with the destination of a request in body mode `mode`; without a body if
    `body` is None.
    """
    stream = stream_of(settings=settings)
    head = gw.request_headers(fields, end=body is None, modes=gw.protocol(mode, gw.NONE))
    answers = stream.send(head) if body is None else stream.send(head, gw.request_body(body))
    # The answer to buffered headers has no destination; that of the body has it.
    return answers[-1 if mode is gw.BUFFERED else 0]


@pytest.mark.parametrize("body", [BODY, None])
@pytest.mark.parametrize("mode", [gw.FULL_DUPLEX, gw.BUFFERED, gw.STREAMED, gw.NONE])
def test_the_engine_receives_the_negated_priority_where_that_is_set(mode, body):
    """The higher the priority of the objective, the lower the number, and the earlier vLLM serves."""
    sent = {}
    for objective in ("urgent", "", "unknown", "batch"):
        fields = gw.COMPLETIONS | {ENGINE_PRIORITY: "-99", "x-request-id": "r"}
        if objective:
            fields["x-llm-d-inference-objective"] = objective
        head = placed_head(mode, fields, settings=PRIORITIES, body=body)
        sent[objective] = gw.set_headers(head)[ENGINE_PRIORITY]
        # Envoy may remove headers after it has set others.
        assert ENGINE_PRIORITY not in gw.removed_headers(head)
    assert sent == {"urgent": str(1 - 2**31), "": "0", "unknown": "0", "batch": "1"}


@pytest.mark.parametrize("body", [BODY, None])
@pytest.mark.parametrize("mode", [gw.FULL_DUPLEX, gw.BUFFERED, gw.STREAMED, gw.NONE])
def test_the_engine_never_receives_a_clients_priority(mode, body):
    """It is removed where the picker sets none either."""
    head = placed_head(mode, gw.COMPLETIONS | {ENGINE_PRIORITY: "-99"}, body=body)
    assert gw.removed_headers(head) == {ENGINE_PRIORITY}
    assert ENGINE_PRIORITY not in gw.set_headers(head)


@pytest.mark.parametrize("mode", [gw.FULL_DUPLEX, gw.BUFFERED])
def test_a_body_over_the_limit_is_refused_as_soon_as_it_is_over(mode):
    """413, and nothing of it is kept."""
    limit = SessionSettings(request_body_bytes_max=100)
    stream = stream_of(settings=limit)
    stream.send(gw.request_headers(modes=gw.protocol(mode, gw.NONE)))
    (answer,) = stream.send(gw.request_body(b"x" * 101, end=mode == gw.BUFFERED))
    status, error = gw.refusal(answer)
    assert status == 413
    assert "100 bytes" in error["message"]
    assert stream.session.finished


def test_all_streams_together_hold_no_more_than_their_budget():
    """Who comes when nothing is left is refused, what others hold goes on, and all is given back."""
    budget = BodyBudget(3 * (100 + PIECE_BYTES))
    streams = [stream_of(budget=budget) for _ in range(4)]
    told = []
    for stream in streams:
        stream.send(gw.request_headers())
        told.append(stream.send(gw.request_body(b" " * 100, end=False)))
    assert told[:3] == [[], [], []]
    (answer,) = told[3]
    status, error = gw.refusal(answer)
    assert (status, error["code"]) == (503, "rejected-bodies-held")
    assert gw.set_headers(answer)["retry-after"] == "1"
    assert budget.held_bytes == budget.bytes_max
    streams[0].close()
    assert streams[1].send(gw.request_body(BODY[:50], end=False)) == []
    streams[1].close()
    streams[2].close()
    assert budget.held_bytes == 0


@pytest.mark.parametrize("mode", [gw.FULL_DUPLEX, gw.BUFFERED])
def test_a_body_is_held_until_the_gateway_has_taken_its_answer(mode):
    """One that the gateway does not read is held by us; afterwards the stream holds nothing."""
    budget = BodyBudget(10_000)
    stream = stream_of(budget=budget)
    stream.send(gw.request_headers(modes=gw.protocol(mode, gw.NONE)))
    stream.session.sent()
    answers = stream.session.receive(gw.decode(gw.request_body(BODY)), 0.0)
    assert answers
    assert budget.held_bytes == len(BODY) + PIECE_BYTES
    stream.session.sent()
    assert budget.held_bytes == 0
    stream.close()
    assert budget.held_bytes == 0


def test_a_body_in_ever_smaller_pieces_is_refused():
    """A piece costs what it costs, whatever is in it; large bodies come in as many as they like."""
    stream = stream_of()
    stream.send(gw.request_headers())
    small = gw.request_body(b"x", end=False)
    assert stream.send(*[small] * PIECES_FREE) == []
    (answer,) = stream.send(*[small] * (2 * PIECES_FREE // PIECE_MEAN_BYTES_MIN))
    assert gw.refusal(answer)[0] == 400
    stream = stream_of()
    stream.send(gw.request_headers())
    pieces = [gw.request_body(b" " * PIECE_MEAN_BYTES_MIN, end=False)] * (2 * PIECES_FREE)
    assert stream.send(*pieces) == []
    assert gw.kinds(stream.send(gw.request_body(BODY)))[0] == "request_headers"


def test_empty_pieces_are_not_answered_without_end():
    """Neither before the end of a body nor after it."""
    empty = gw.request_body(b"", end=False)
    stream = stream_of()
    stream.send(gw.request_headers(), *[empty] * PIECES_FREE)
    assert gw.refusal(stream.send(empty)[0])[0] == 400
    stream = stream_of()
    stream.send(gw.request_headers(), gw.request_body(BODY), *[empty] * PIECES_FREE)
    assert stream.session.violated
    assert "violated: small pieces of a body in routed" in stream.told.events


OPEN_STREAMS = {
    "upgrade": {":method": "GET", ":path": "/v1/realtime", "upgrade": "WebSocket"},
    "extended CONNECT": {
        ":method": "CONNECT",
        ":protocol": "websocket",
        ":path": "/v1/realtime",
        ":scheme": "https",
    },
    "CONNECT": {":method": "CONNECT", ":authority": "llm:443"},
}


@pytest.mark.parametrize("mode", [gw.FULL_DUPLEX, gw.STREAMED, gw.NONE])
@pytest.mark.parametrize("fields", OPEN_STREAMS.values(), ids=OPEN_STREAMS)
def test_a_request_whose_stream_stays_open_is_answered_at_its_headers(fields, mode):
    """Its body has no end that could be waited for."""
    stream = stream_of()
    answers = stream.send(gw.request_headers(fields, modes=gw.protocol(mode, gw.NONE)))
    assert [gw.kind(one) for one in answers] == ["request_headers"]
    assert gw.destination(answers[0])
    assert not stream.session.incomplete


@pytest.mark.parametrize("fields", OPEN_STREAMS.values(), ids=OPEN_STREAMS)
def test_a_websocket_sends_pieces_as_it_likes(fields):
    """What follows its headers is another protocol."""
    stream = stream_of()
    stream.send(gw.request_headers(fields))
    answers = stream.send(*[gw.request_body(b"x", end=False)] * (2 * PIECES_FREE))
    assert len(answers) == 2 * PIECES_FREE


def test_a_request_that_does_not_become_whole_is_refused():
    """With 408, whatever part of it is missing; one that is routed is not asked for more."""
    budget = BodyBudget(10_000)
    for messages in (
        [],
        [gw.request_headers()],
        [gw.request_headers(), gw.request_body(b"{", end=False)],
        [gw.request_headers(modes=gw.protocol(gw.BUFFERED, gw.NONE))],
    ):
        stream = stream_of(budget=budget)
        stream.send(*messages)
        assert stream.session.incomplete
        (answer,) = stream.session.time_out(5.0)
        assert answer.refusal.status == 408
        assert stream.told.events == ["refused 408"]
        assert stream.session.finished
        assert not stream.session.incomplete
    assert budget.held_bytes == 0
    stream = stream_of()
    stream.send(gw.request_headers(), gw.request_body(BODY))
    assert not stream.session.incomplete


def test_only_a_gateway_that_is_trusted_may_name_the_model_to_serve():
    """From anybody else the header is removed and does nothing."""
    fields = gw.COMPLETIONS | {"x-gateway-model-name-rewrite": "expensive"}
    head, body = stream_of().send(gw.request_headers(fields), gw.request_body(BODY))
    assert gw.streamed([body]) == (BODY, [True])
    assert gw.removed_headers(head) == {"x-gateway-model-name-rewrite"}
    trusting = SessionSettings(trust_model_rewrite=True)
    _, body = stream_of(settings=trusting).send(gw.request_headers(fields), gw.request_body(BODY))
    assert gw.streamed([body]) == (gw.prompt("hello", model="expensive"), [True])


def test_an_objective_that_nobody_knows_is_told():
    """Its request goes on with priority 0."""
    stream = stream_of(settings=SessionSettings(priorities={"batch": -1}))
    fields = gw.COMPLETIONS | {"x-llm-d-inference-objective": "btach"}
    stream.send(gw.request_headers(fields), gw.request_body(BODY))
    assert stream.told.events == ["unknown objective", "decided"]
    assert stream.told.exchange.request.priority == 0


def test_shed_requests_are_told_when_to_come_back():
    """429 with retry-after and the reason in a header."""
    settings_ = SessionSettings(priorities={"batch": -1})
    stream = stream_of(pods((50, 0.99)), settings=settings_)
    fields = gw.COMPLETIONS | {"x-gateway-inference-objective": "batch"}
    (answer,) = stream.send(gw.request_headers(fields), gw.request_body(BODY))
    assert gw.refusal(answer)[0] == 429
    told = gw.set_headers(answer)
    assert told["retry-after"] == "1"
    assert told["x-llm-d-request-dropped-reason"] == "rejected-saturated"


def test_the_lease_ends_with_the_last_chunk_of_the_response():
    """Not with its headers: vLLM sends those of a stream before the first token."""
    stream = stream_of()
    stream.send(gw.request_headers(modes=gw.protocol()), gw.request_body(BODY))
    stream.send(gw.response_headers(200))
    stream.send(gw.response_body(b"data: 1\n\n", end=False))
    assert inflight(stream) == [1, 0]
    stream.send(gw.response_body(b"", end=True))
    assert inflight(stream) == [0, 0]
    stream.close()
    assert stream.told.events[-1] == "completed complete"
    assert stream.told.events.count("completed complete") == 1


@pytest.mark.parametrize(("status", "shown"), [(200, True), (500, False)])
def test_the_first_chunk_of_an_error_says_nothing_of_the_prompt(status, shown):
    """Or an endpoint that fails at once would pass for one that is fast."""
    stream = stream_of()
    stream.send(gw.request_headers(modes=gw.protocol()), gw.request_body(BODY))
    stream.send(gw.response_headers(status), gw.response_body(b"data: 1\n\n", end=False))
    assert (stream.told.exchange.decision.lease.first_output_at_s is not None) is shown


@pytest.mark.parametrize(
    ("response_mode", "ending"), [(gw.NONE, "complete"), (gw.FULL_DUPLEX, "client-disconnect")]
)
def test_the_end_of_the_stream_ends_the_lease_after_response_headers(response_mode, ending):
    """With mode NONE the stream ends when the response does; otherwise its end was not seen."""
    stream = stream_of()
    modes = gw.protocol(gw.FULL_DUPLEX, response_mode)
    stream.send(gw.request_headers(modes=modes), gw.request_body(BODY), gw.response_headers(200))
    stream.close()
    assert inflight(stream) == [0, 0]
    assert stream.told.events[-1] == f"completed {ending}"


@pytest.mark.parametrize(
    ("response_mode", "asked", "fields", "end", "told"),
    [
        (gw.NONE, True, {}, False, True),
        (gw.STREAMED, True, {}, False, False),
        (gw.FULL_DUPLEX, True, {}, False, False),
        (gw.NONE, False, {}, False, False),
        (gw.NONE, True, {}, True, False),
        (gw.NONE, True, {"upgrade": "websocket"}, False, False),
        (gw.NONE, True, {":method": "CONNECT", ":protocol": "websocket"}, False, False),
    ],
)
def test_usage_that_is_to_be_read_and_not_shown_is_told(response_mode, asked, fields, end, told):
    """Where a body follows that the gateway hides; what follows an upgrade is never read."""
    stream = stream_of(settings=SessionSettings(parse_response_usage=asked))
    modes = gw.protocol(gw.FULL_DUPLEX, response_mode)
    stream.send(gw.request_headers(gw.COMPLETIONS | fields, modes=modes), gw.request_body(BODY))
    stream.send(gw.response_headers(200, end=end))
    assert ("usage unseen" in stream.told.events) is told


def test_a_stream_that_ends_before_any_response_means_that_the_client_left_if_the_gateway_responds():
    """Once a gateway has sent response headers it always does."""
    gateway = Gateway()
    pool = pods((0, 0.1), (5, 0.5))
    first = stream_of(pool, gateway=gateway)
    first.send(gw.request_headers(), gw.request_body(BODY), gw.response_headers(200, end=True))
    second = stream_of(pool, gateway=gateway)
    second.send(gw.request_headers(), gw.request_body(BODY))
    second.close()
    assert second.told.events[-1] == "completed client-disconnect"
    assert inflight(second) == [0, 0]


def test_a_gateway_without_a_response_phase_leaves_the_lease_for_its_estimate():
    """The pod works on although nothing is heard of it; the estimate ends it."""
    stream = stream_of()
    stream.send(gw.request_headers(), gw.request_body(gw.prompt(max_tokens=100)))
    stream.close()
    assert stream.told.events[-1] == "completed unseen"
    stream.scheduler.take(Tick(), 2.4)
    assert inflight(stream) == [1, 0]
    stream.scheduler.take(Tick(), 2.6)
    assert inflight(stream) == [0, 0]


def test_a_gateway_that_shows_no_responses_is_told_of_once():
    """Whether endpoints fail cannot be seen there; some clients that leave are no sign of it."""
    blind, told, pool = Gateway(), gw.Told(), pods((0, 0.1), (5, 0.5))
    for number in range(2 * UNSEEN_TOLD):
        assert ("responses unseen" in told.events) is (number >= UNSEEN_TOLD)
        stream = stream_of(pool, gateway=blind, told=told)
        stream.send(gw.request_headers(), gw.request_body(BODY))
        stream.close()
    assert told.events.count("responses unseen") == 1


def test_a_half_close_ends_the_body_of_a_gateway_that_announces_nothing():
    """Some send the body in one message and close without marking its end."""
    stream = stream_of()
    stream.send(gw.request_headers(), gw.request_body(BODY, end=False))
    assert len(stream.session.half_closed(0.0)) == 2
    announced = stream_of()
    announced.send(gw.request_headers(modes=gw.protocol()), gw.request_body(BODY, end=False))
    assert announced.session.half_closed(0.0) == []


@pytest.mark.parametrize("shows", [False, True], ids=["obeys", "shows it all the same"])
def test_a_gateway_that_streams_bodies_is_asked_not_to(shows):
    """By a mode override; what it shows all the same is answered, and its end is the client's."""
    settings_ = SessionSettings(decline_response_bodies=True)
    stream = stream_of(settings=settings_)
    modes = gw.protocol(gw.BUFFERED, gw.STREAMED)
    stream.send(gw.request_headers(modes=modes), gw.request_body(BODY))
    (answer,) = stream.send(gw.response_headers(200))
    assert answer.mode_override.response_body_mode == gw.NONE
    assert "response body declined" in stream.told.events
    if shows:
        assert gw.kinds(stream.send(gw.response_body(b"x", end=False))) == ["response_body"]
    stream.close()
    ending = Ending.CLIENT_LEFT if shows else Ending.COMPLETE
    assert stream.told.events[-1] == f"completed {ending.value}"
    assert inflight(stream) == [0, 0]


@pytest.mark.parametrize(
    ("modes", "fields"),
    [
        ((gw.FULL_DUPLEX, gw.STREAMED), {"decline_response_bodies": True}),
        ((gw.BUFFERED, gw.FULL_DUPLEX), {"decline_response_bodies": True}),
        ((gw.BUFFERED, gw.NONE), {"decline_response_bodies": True}),
        (
            (gw.BUFFERED, gw.STREAMED),
            {"decline_response_bodies": True, "parse_response_usage": True},
        ),
        ((gw.BUFFERED, gw.STREAMED), {}),
    ],
)
def test_no_other_gateway_is_asked(modes, fields):
    """Full duplex ignores it, and bodies that are read are wanted."""
    stream = stream_of(settings=SessionSettings(**fields))
    stream.send(gw.request_headers(modes=gw.protocol(*modes)), gw.request_body(BODY))
    (answer,) = stream.send(gw.response_headers(200))
    assert answer.mode_override is None
    assert "response body declined" not in stream.told.events


def test_the_lease_follows_the_endpoint_that_served():
    """The gateway fell back to another: load and prefix count there."""
    stream = stream_of()
    long = gw.prompt("x" * 2_000)
    stream.send(gw.request_headers(gw.COMPLETIONS), gw.request_body(long))
    assert inflight(stream) == [1, 0]
    stream.send(gw.response_headers(200, by="192.168.1.2:8000"))
    assert inflight(stream) == [0, 1]
    again = stream_of(stream.scheduler)
    again.send(gw.request_headers(gw.COMPLETIONS), gw.request_body(long))
    matched = again.told.exchange.decision.leg.candidates.matched_blocks.tolist()
    assert matched[0] == 0
    assert matched[1] > 0


@pytest.mark.parametrize(
    ("by", "got"),
    [("", "pod-0"), ("192.168.1.2:8000", "pod-1"), ("10.9.9.9:1", None)],
    ids=["who was picked", "another", "nobody we know"],
)
def test_who_got_the_request_is_told(by, got):
    """Its times are those of who served it, whoever was picked."""
    stream = stream_of()
    stream.send(gw.request_headers(), gw.request_body(BODY))
    assert stream.told.exchange.endpoint.name == "pod-0"
    stream.send(gw.response_headers(200, by=by))
    endpoint = stream.told.exchange.endpoint
    assert (endpoint and endpoint.name) == got


def test_two_failures_set_the_endpoint_aside():
    """Envoy reports a refused connection as response headers with 503."""
    pool = pods((0, 0.1), (5, 0.5))
    for expected in ("192.168.1.1:8000", "192.168.1.1:8000", "192.168.1.2:8000"):
        stream = stream_of(pool)
        answers = stream.send(gw.request_headers(), gw.request_body(BODY))
        assert gw.destination(answers[0]) == expected
        stream.send(gw.response_headers(503, end=True))
        stream.close()


@pytest.mark.parametrize(
    ("fields", "saturated"),
    [({}, False), ({"date": "today"}, True), ({"server": "uvicorn"}, True)],
    ids=["gateway", "dated", "named"],
)
def test_only_the_503_of_an_engine_is_taken_for_load(fields, saturated):
    """What the gateway says when it gets no connection comes without what servers add."""
    pool = pods((0, 0.1), (5, 0.5))
    stream = stream_of(pool)
    stream.send(gw.request_headers(), gw.request_body(BODY))
    stream.send(gw.response_headers(503, end=True, **fields))
    assert pool.pool.columns.saturated[:2].tolist() == [saturated, False]


@pytest.mark.parametrize(
    ("request_mode", "response_mode", "may_end"),
    [
        (gw.FULL_DUPLEX, gw.NONE, True),
        (gw.BUFFERED, gw.STREAMED, True),
        (gw.FULL_DUPLEX, gw.FULL_DUPLEX, False),
        (gw.FULL_DUPLEX, gw.BUFFERED, False),
    ],
)
def test_only_a_bypassed_response_lets_the_stream_end_early(request_mode, response_mode, may_end):
    """In full duplex an early end loses bytes of the answer."""
    stream = stream_of()
    stream.send(gw.request_headers(modes=gw.protocol(request_mode, response_mode)))
    assert not stream.session.may_end_for_drain()
    stream.send(gw.request_body(BODY))
    assert stream.session.may_end_for_drain() is may_end
    stream.send(gw.response_headers(200))
    assert stream.session.may_end_for_drain() is may_end


@pytest.mark.parametrize(
    "first", [gw.request_body(BODY), gw.request_trailers(), gw.response_body()]
)
def test_a_message_that_the_phase_does_not_allow_ends_the_stream(first):
    """No answer would be right; later messages get none either."""
    stream = stream_of()
    assert stream.send(first) == []
    assert stream.session.violated
    assert stream.told.events[-1] == "failed: protocol-violation"
    assert stream.send(gw.request_headers()) == []


def test_a_refusal_says_whose_it_was():
    """Id and path, the path without its query, also where the body cannot be read."""
    stream = stream_of()
    told = []
    stream.told.refused = lambda exchange, _: told.append((exchange.request_id, exchange.path))
    asked = gw.COMPLETIONS | {":path": "/v1/completions?key=secret", "x-request-id": "r-7"}
    stream.send(gw.request_headers(asked), gw.request_body(b"{"))
    assert told == [("r-7", "/v1/completions")]


def test_several_destinations_are_named_only_where_fallbacks_are_configured():
    """ORIGINAL_DST clusters and Rust gateways reject a list."""
    pool = pods((0, 0.1), (5, 0.5), (9, 0.9))
    pool.take(Reconfigured(structs.replace(pool.settings, fallback_endpoints_max=1)), 0.0)
    answers = stream_of(pool).send(gw.request_headers(), gw.request_body(BODY))
    assert gw.destination(answers[0]) == "192.168.1.1:8000,192.168.1.2:8000"


MODES = st.sampled_from([gw.FULL_DUPLEX, gw.BUFFERED, gw.BUFFERED_PARTIAL, gw.STREAMED, gw.NONE])
MESSAGES = st.one_of(
    st.builds(gw.request_headers, end=st.booleans()),
    st.builds(
        lambda request, response, end: gw.request_headers(
            modes=gw.protocol(request, response), end=end
        ),
        MODES,
        MODES,
        st.booleans(),
    ),
    st.builds(gw.request_body, st.sampled_from([b"", BODY, b"{", b"x" * 300]), end=st.booleans()),
    st.just(gw.request_trailers()),
    st.builds(gw.response_headers, st.sampled_from([200, 503]), end=st.booleans()),
    st.builds(gw.response_body, st.sampled_from([b"", b"data: x\n\n"]), end=st.booleans()),
    st.just(gw.response_trailers()),
)
ORDER = [
    "request_headers",
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGES, max_size=12), st.integers(0, 12))
def test_whatever_comes_the_answers_stay_in_order_and_the_lease_is_given_back(messages, cut):
    """Headers before body before trailers, one headers answer, nothing after a refusal, no leak."""
    limits = SessionSettings(request_body_bytes_max=500)
    budget = BodyBudget(800)
    stream = stream_of(settings=limits, budget=budget)
    for number, message in enumerate(messages):
        if number == cut:
            stream.close()
            stream.close()
        answers = stream.send(message)
        found = gw.kinds(answers)
        asked = gw.kind(gw.v3.ProcessingRequest.parse(message)) if found else ""
        if "immediate_response" in found:
            assert found == ["immediate_response"]
            assert stream.session.finished
            continue
        assert found == sorted(found, key=ORDER.index)
        assert found.count("request_headers") <= 1
        # An answer belongs to the phase of what was sent; full duplex holds only requests back.
        assert all(name.split("_")[0] == asked.split("_")[0] for name in found)
    stream.close()
    stream.scheduler.take(Tick(), 1e9)
    assert inflight(stream) == [0, 0]
    assert stream.scheduler.ledger.open_leases == 0
    assert budget.held_bytes == 0


def test_the_repr_of_a_session_tells_its_state():
    """One line for logs."""
    stream = stream_of(pods((0, 0.1)))
    stream.send(gw.request_headers(), gw.request_body(BODY[:5], end=False))
    assert repr(stream.session) == "<Session [collecting, to nowhere, 5 body bytes held]>"
    assert endpoint(0).address == "192.168.1.1:8000"


REPORT = "TEXT named_metrics.kv_cache_usage_perc=0.75, named_metrics.num_requests_waiting=9.0"


def test_the_load_that_a_response_tells_is_that_of_who_served_it():
    """Of the endpoint that was picked, or of the one that the gateway says has served."""
    for by, slot in (("", 0), ("192.168.1.2:8000", 1)):
        stream = stream_of()
        stream.send(gw.request_headers(), gw.request_body(BODY))
        stream.send(gw.response_headers(by=by, endpoint_load_metrics=REPORT))
        columns = stream.scheduler.pool.columns
        assert columns.waiting_requests[slot] == 9.0
        assert columns.kv_cache_usage[slot] == 0.75
        assert columns.waiting_requests[1 - slot] != 9.0
        assert (
            stream.scheduler.state.load_reports,
            stream.scheduler.state.load_reports_unread,
        ) == (1, 0)


@pytest.mark.parametrize("lost", ["malformed", "restarted", "served by nobody we know"])
def test_a_load_report_that_says_nothing_of_an_endpoint_is_counted(lost):
    """It changes nothing."""
    stream = stream_of()
    stream.send(gw.request_headers(), gw.request_body(BODY))
    if lost == "restarted":
        stream.scheduler.take(PoolReplaced([endpoint(0, incarnation="b"), endpoint(1)]), 1.0)
    by = "10.9.9.9:1" if lost == "served by nobody we know" else ""
    report = "TEXT who knows" if lost == "malformed" else REPORT
    before = stream.scheduler.pool.columns.waiting_requests.tolist()
    stream.send(gw.response_headers(by=by, endpoint_load_metrics=report))
    assert repr(stream.scheduler.pool.columns.waiting_requests.tolist()) == repr(before)
    assert (stream.scheduler.state.load_reports, stream.scheduler.state.load_reports_unread) == (
        0,
        1,
    )


def test_engines_are_asked_for_their_load_where_that_is_set():
    """Not without the setting, and not where the client asks in its own way."""
    name = "endpoint-load-metrics-format"
    asking = SessionSettings(request_load_metrics=True)
    for settings_, fields, expected in (
        (SessionSettings(), gw.COMPLETIONS, None),
        (asking, gw.COMPLETIONS, "TEXT"),
        (asking, gw.COMPLETIONS | {name: "JSON"}, None),
    ):
        stream = stream_of(settings=settings_)
        head, _ = stream.send(gw.request_headers(fields), gw.request_body(BODY))
        assert gw.set_headers(head).get(name) == expected


PASSING = SessionSettings(pass_from_bytes=1_000)
LONG = gw.prompt("x" * 2_000)


@pytest.mark.parametrize("pieces", [1, 4])
def test_under_memory_pressure_a_long_body_passes_unread(pieces):
    """Routed once it is long, by load alone; the rest goes back as it comes, and nothing is held."""
    budget = BodyBudget(1_000_000)
    stream = stream_of(settings=PASSING, budget=budget)
    size = -(-len(LONG) // pieces)
    parts = [LONG[at : at + size] for at in range(0, len(LONG), size)]
    sent = [gw.request_body(part, end=part is parts[-1]) for part in parts]
    answers = stream.send(gw.request_headers(), *sent)
    assert gw.destination(answers[0]) == "192.168.1.1:8000"
    assert gw.streamed(answers) == (LONG, [False] * (len(answers) - 2) + [True])
    assert stream.told.exchange.passed_unread
    assert stream.told.exchange.decision.leg.total_blocks == 0
    assert stream.scheduler.indexes["approx-prefix-cache-producer"].entries == 0
    stream.session.sent()
    assert budget.held_bytes == 0
    assert inflight(stream) == [1, 0]


def test_under_memory_pressure_a_long_buffered_body_passes_unread():
    """The gateway holds it; it is not read."""
    stream = stream_of(settings=PASSING)
    modes = gw.protocol(gw.BUFFERED, gw.NONE)
    _, answer = stream.send(gw.request_headers(modes=modes), gw.request_body(LONG))
    assert gw.destination(answer) == "192.168.1.1:8000"
    assert gw.common(answer).body_mutation is None
    assert stream.told.exchange.passed_unread


@pytest.mark.parametrize(
    ("pressed", "fields", "body"),
    [
        (PASSING, {}, BODY),
        (SessionSettings(), {}, LONG),
        (msgspec.structs.replace(PASSING, rewrite={"my-model": "tuned"}.get), {}, LONG),
        (
            msgspec.structs.replace(PASSING, trust_model_rewrite=True),
            {"x-gateway-model-name-rewrite": "tuned"},
            LONG,
        ),
    ],
    ids=["short", "no pressure", "rules of the cluster", "header"],
)
def test_what_is_short_or_may_be_rewritten_is_read_all_the_same(pressed, fields, body):
    """An engine that is asked for the wrong model helps nobody."""
    stream = stream_of(settings=pressed)
    stream.send(gw.request_headers(gw.COMPLETIONS | fields), gw.request_body(body))
    assert not stream.told.exchange.passed_unread
    assert stream.told.exchange.request.model


def test_a_long_body_is_refused_unread_where_nobody_is_ready():
    """The reasons are the usual ones, and nothing stays held."""
    budget = BodyBudget(1_000_000)
    stream = stream_of(settings=PASSING, budget=budget)
    stream.scheduler.take(PoolReplaced([]), 1.0)
    (answer,) = stream.send(gw.request_headers(), gw.request_body(LONG, end=False))
    assert gw.kind(answer) == "immediate_response"
    assert stream.told.events == ["refused 503"]
    assert budget.held_bytes == 0
