"""A request that waits before it is placed: one way in, one way out, and all that can come between."""

import pytest
from msgspec import structs

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PoolReplaced, Reconfigured
from epp.core.moment import Moment
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.session import SessionSettings, StreamFailure
from epp.core.types import Refusal, RefusalReason
from tests import gateway as gw
from tests.core.journal.traffic import document
from tests.test_hermetic import pods

BODY = gw.prompt("hello")
NO_ROOM = Refusal(reason=RefusalReason.SATURATED, status=429, message="there is no room")


class Later:
    """A resolver that lets requests wait until it is told otherwise."""

    def __init__(self):
        self.waiting = []
        self.cancelled = 0
        self.waits = True
        self.bodies = []

    def begin(self, request, body, resume):
        self.bodies.append(body)
        if not self.waits:
            return None
        self.waiting.append((request, resume))
        return self

    def cancel(self):
        self.cancelled += 1

    def resolve(self, resolution=None, **found):
        ((request, resume),) = self.waiting
        self.waiting.clear()
        resume(resolution or structs.replace(request, **found))


@pytest.fixture
def later():
    return Later()


def stream_of(later, **fields):
    return gw.Stream(pods((0, 0.1), (5, 0.5)), resolver=later, **fields)


MODES = {
    "full duplex": (
        [gw.request_headers(), gw.request_body(BODY)],
        ["request_headers", "request_body"],
    ),
    "buffered": (
        [gw.request_headers(modes=gw.protocol(gw.BUFFERED, gw.NONE)), gw.request_body(BODY)],
        ["request_body"],
    ),
    "streamed": (
        [gw.request_headers(modes=gw.protocol(gw.STREAMED, gw.NONE))],
        ["request_headers"],
    ),
    "none": ([gw.request_headers(modes=gw.protocol(gw.NONE, gw.NONE))], ["request_headers"]),
    "no body": ([gw.request_headers(end=True)], ["request_headers"]),
    "with trailers": (
        [gw.request_headers(), gw.request_body(BODY, end=False), gw.request_trailers()],
        ["request_headers", "request_body", "request_trailers"],
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_request_waits_and_is_answered_as_if_it_had_not(later, mode):
    """In every body mode, with the same bytes."""
    messages, kinds = MODES[mode]
    stream = stream_of(later)
    before = stream.send(*messages)
    assert "request_body" not in gw.kinds(before)
    assert stream.session.waiting
    assert stream.scheduler.ledger.open_leases == 0
    later.resolve()
    assert gw.kinds(stream.resumed) == kinds
    assert not stream.session.waiting
    assert stream.scheduler.ledger.open_leases == 1
    plain = gw.Stream(pods((0, 0.1), (5, 0.5)))
    assert before + stream.resumed == plain.send(*messages)


@pytest.mark.parametrize("mode", MODES)
def test_who_need_not_wait_is_answered_at_once(later, mode):
    """The same answers as where nobody asks."""
    later.waits = False
    messages, _ = MODES[mode]
    assert stream_of(later).send(*messages) == gw.Stream(pods((0, 0.1), (5, 0.5))).send(*messages)


def test_what_was_found_out_decides(later):
    """The request is placed as it is resolved."""
    stream = stream_of(later)
    stream.send(*MODES["full duplex"][0])
    later.resolve(prompt_tokens=4_321)
    assert stream.told.exchange.request.prompt_tokens == 4_321


@pytest.mark.parametrize("mode", ["full duplex", "buffered", "with trailers"])
@pytest.mark.parametrize("rewrite", [None, lambda model: "other"])
def test_what_is_forwarded_is_shown_to_who_resolves(later, mode, rewrite):
    """Byte for byte, after any rewrite."""
    settings = SessionSettings(rewrite=rewrite)
    stream = stream_of(later, settings=settings)
    messages, _ = MODES[mode]
    stream.send(*(message for message in messages))
    expected = BODY if rewrite is None else BODY.replace(b"my-model", b"other")
    assert later.bodies == [expected]


@pytest.mark.parametrize("mode", ["streamed", "none", "no body"])
def test_who_has_not_seen_the_body_shows_none(later, mode):
    """There is nothing to find out of it."""
    stream_of(later).send(*MODES[mode][0])
    assert later.bodies == [b""]


def test_tokens_that_were_found_out_are_there_at_the_decision_and_gone_after_it(later):
    """Plugins read them in the moment; a lease keeps no prompt, in no form."""
    stream = stream_of(later)
    seen = []

    class Witness:
        def asked(self, request):
            seen.append(request.token_ids)

        def decided(self, request, decision, now):
            seen.append(decision.lease.request.token_ids)

        def took(self, given, effects, now):
            pass

    stream.scheduler.witness = Witness()
    stream.send(*MODES["full duplex"][0])
    later.resolve(moment=Moment(token_ids=(b"\1\0\0\0",)))
    assert seen == [(b"\1\0\0\0",), ()]


def test_there_may_be_no_room(later):
    """Then the client is told why."""
    stream = stream_of(later)
    stream.send(*MODES["full duplex"][0])
    later.resolve(NO_ROOM)
    assert gw.kinds(stream.resumed) == ["immediate_response"]
    assert stream.session.finished
    assert later.cancelled == 0


def test_what_comes_meanwhile_is_answered_after_it_in_its_order(later):
    """Chunks of a body that the gateway streams, and its trailers."""
    stream = stream_of(later)
    modes = gw.protocol(gw.STREAMED, gw.NONE)
    assert stream.send(gw.request_headers(modes=modes)) == []
    assert stream.send(gw.request_body(b"a", end=False), gw.request_trailers()) == []
    later.resolve()
    assert gw.kinds(stream.resumed) == ["request_headers", "request_body", "request_trailers"]


def test_the_end_of_a_body_that_comes_twice_is_answered_once(later):
    """As without a wait."""
    stream = stream_of(later)
    stream.send(*MODES["full duplex"][0])
    assert stream.send(gw.request_body(b"")) == []
    later.resolve()
    assert gw.kinds(stream.resumed) == ["request_headers", "request_body"]


def test_a_deadline_ends_the_wait(later):
    """With a refusal; who resolves it afterwards is not heard."""
    stream = stream_of(later)
    stream.send(*MODES["full duplex"][0])
    assert stream.session.incomplete
    (answer,) = stream.session.time_out(60.0)
    assert (answer.refusal.status, stream.session.finished, later.cancelled) == (503, True, 1)
    later.resolve()
    assert stream.resumed == []
    assert stream.scheduler.ledger.open_leases == 0


def test_a_client_that_leaves_ends_the_wait(later):
    """Nothing is placed any more, and nothing is held."""
    budget = BodyBudget(1_000_000)
    stream = stream_of(later, budget=budget)
    stream.send(*MODES["full duplex"][0])
    assert budget.held_bytes > len(BODY)
    stream.close()
    assert (later.cancelled, budget.held_bytes) == (1, 0)
    later.resolve()
    assert (stream.resumed, stream.scheduler.ledger.open_leases) == ([], 0)


def test_a_gateway_that_answers_itself_ends_the_wait(later):
    """A local reply cuts the request short."""
    stream = stream_of(later)
    stream.send(*MODES["full duplex"][0])
    assert gw.kinds(stream.send(gw.response_headers(503))) == ["response_headers"]
    assert later.cancelled == 1
    later.resolve()
    assert stream.resumed == []


def test_a_half_close_does_not_end_it(later):
    """Some gateways half-close right after the body; the answers are still owed."""
    stream = stream_of(later)
    stream.send(gw.request_headers(), gw.request_body(BODY, end=False))
    stream.session._announced = False
    assert stream.session.half_closed(0.0) == []
    assert stream.session.waiting
    assert stream.session.half_closed(0.0) == []
    later.resolve()
    assert gw.kinds(stream.resumed) == ["request_headers", "request_body"]


def test_a_drain_waits_for_who_waits(later):
    """It ends the stream once the request is placed."""
    stream = stream_of(later)
    stream.send(gw.request_headers(modes=gw.protocol(gw.BUFFERED, gw.NONE)), gw.request_body(BODY))
    assert not stream.session.may_end_for_drain()
    later.resolve()
    assert stream.session.may_end_for_drain()


def test_the_body_counts_as_held_until_its_answer_is_sent(later):
    """And what comes meanwhile too; above the budget the request is refused."""
    budget = BodyBudget(100_000)
    stream = stream_of(later, budget=budget)
    modes = gw.protocol(gw.STREAMED, gw.NONE)
    stream.send(gw.request_headers(modes=modes), gw.request_body(bytes(20_000), end=False))
    assert budget.held_bytes >= 20_000
    (refused,) = stream.send(gw.request_body(bytes(90_000), end=False))
    assert gw.kind(refused) == "immediate_response"
    assert (budget.held_bytes, later.cancelled) == (0, 1)


def test_no_more_is_held_than_one_body_may_have(later):
    """However much room there is for all together."""
    settings = SessionSettings(request_body_bytes_max=10_000)
    stream = stream_of(later, settings=settings)
    modes = gw.protocol(gw.STREAMED, gw.NONE)
    stream.send(gw.request_headers(modes=modes), gw.request_body(bytes(6_000), end=False))
    (refused,) = stream.send(gw.request_body(bytes(6_000), end=False))
    assert gw.kind(refused) == "immediate_response"


def test_it_is_placed_by_what_is_in_force_when_it_is_placed(later):
    """Configuration and pool may have changed while it waited."""
    stream = stream_of(later)
    stream.send(*MODES["full duplex"][0])
    settings = build_settings(load_config(document(), "here", plugin_tables()))
    stream.scheduler.take(Reconfigured(settings), 1.0)
    (_, left) = stream.scheduler.pool.endpoints()
    stream.scheduler.take(PoolReplaced([left[1]]), 1.0)
    stream.now = 1.0
    later.resolve()
    decision = stream.told.exchange.decision
    assert decision.endpoint == left[1]
    assert len(decision.leg.scorers) == len(settings.profile.scorers)
    assert stream.told.exchange.answered_at_s == 1.0


def test_a_defect_ends_the_wait(later):
    """Of the stream; nobody is resolved any more."""
    stream = stream_of(later)
    stream.send(*MODES["full duplex"][0])
    stream.session.failed(StreamFailure.INTERNAL)
    assert later.cancelled == 1
    later.resolve()
    assert stream.resumed == []
