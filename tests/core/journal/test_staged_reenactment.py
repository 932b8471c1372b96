"""A journal of decisions in several stages is decided again, and differences name all endpoints."""

import pytest
from msgspec.structs import replace

from epp.core.decision.inputs import RequestEnded, ResponseStarted
from epp.core.journal.events import Scheduled, ScheduledLeg
from epp.core.journal.reenactment import Difference, Reenactment
from epp.core.knowledge.inflight import Outcome
from epp.core.types import ApiKind, Stage
from epp.journal.derived import derived
from epp.journal.frames import frame_of, record_of_frame
from epp.journal.past import PastDecision
from tests.core.decision.staged import ROLE
from tests.core.journal.traffic import Live, settings_of

STAGED = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: disagg-profile-handler
  parameters: {deciders: {prefill: decider}}
- {name: decider, type: DECIDER}
- type: decode-filter
- type: prefill-filter
- type: prefix-cache-scorer
- type: active-request-scorer
schedulingProfiles:
- name: decode
  plugins: [pluginRef: decode-filter, pluginRef: prefix-cache-scorer, pluginRef: active-request-scorer]
- name: prefill
  plugins: [pluginRef: prefill-filter, pluginRef: active-request-scorer]
"""
STAGED = STAGED.replace("[pluginRef: ", "[{pluginRef: ").replace(", pluginRef: ", "}, {pluginRef: ")
STAGED = STAGED.replace("-scorer]", "-scorer}]")
ALWAYS = STAGED.replace("DECIDER", "always-disagg-pd-decider")
SOMETIMES = STAGED.replace("DECIDER", "prefix-based-pd-decider, parameters: {nonCachedTokens: 600}")


class StagedLive(Live):
    """A pool in which endpoints 0 and 1 prefill and all others decode."""

    def endpoint(self, number, **fields):
        role = "prefill" if number < 2 else "decode"
        return super().endpoint(number, **({"labels": {ROLE: role}} | fields))

    def ask(self, **fields):
        return super().ask(**({"api": ApiKind.CHAT} | fields))

    def end(self):
        """End a request; the headers of half of the others have come before."""
        if self.open and self.random.random() < 0.5:
            self.scheduler.take(ResponseStarted(self.random.choice(self.open)), self.now)
        super().end()


def done_again(live, of=settings_of):
    again = Reenactment(of)
    for event in live.events:
        again.feed(record_of_frame(frame_of(event)))
    return again


@pytest.mark.parametrize("text", [ALWAYS, SOMETIMES])
def test_every_decision_is_the_same_again(text):
    """Both endpoints of each request are compared, and all shares of load are equal at the end."""
    live = StagedLive(text)
    live.run(200, endpoints=6)
    routes = {event.route for event in live.events if isinstance(event, Scheduled)}
    assert "prefill-decode" in routes
    assert ("decode-only" in routes) is (text is SOMETIMES)
    again = done_again(live)
    assert again.result.same == again.result.decisions == 200, again.result.first
    for name in ("inflight_requests", "prefill_backlog_tokens"):
        was = getattr(live.scheduler.pool.columns, name).tolist()
        assert getattr(again.scheduler.pool.columns, name).tolist() == was


def test_another_prefill_endpoint_is_a_difference_and_does_not_cause_further_ones():
    """The leg is moved to the endpoint of the journal, so that the next decision is the same."""
    live = StagedLive(ALWAYS)
    live.run(30, endpoints=6)
    at = next(
        at for at, one in enumerate(live.events) if isinstance(one, Scheduled) and one.earlier
    )
    event = live.events[at]
    (leg,) = event.earlier
    live.events[at] = replace(event, earlier=(replace(leg, slot=1 - leg.slot),))
    result = done_again(live).result
    assert result.decisions - result.same >= 1
    first = result.first[0]
    assert first.difference is Difference.CHOICE
    assert first.live.split(", ")[0] == first.again.split(", ")[0], "the decode endpoint"
    assert first.live.split(", ")[1] != first.again.split(", ")[1], "the prefill endpoint"


def test_a_leg_moves_with_its_share_of_load():
    """After the re-enactment, the request counts at the prefill endpoint of the journal."""
    live = StagedLive(ALWAYS)
    live.begin(4)
    live.scrape()
    decision = live.ask(priority=0, prompts=(b"x" * 1024,), prompt_tokens=256)
    (leg,) = decision.earlier
    other = 1 - leg.lease.slot
    scheduled = next(event for event in live.events if isinstance(event, Scheduled))
    at = live.events.index(scheduled)
    live.events[at] = replace(scheduled, earlier=(ScheduledLeg(stage=Stage.PREFILL, slot=other),))
    columns = done_again(live).scheduler.pool.columns
    assert columns.inflight_requests[:4].tolist()[other] == 1
    assert columns.inflight_requests[:4].tolist()[leg.lease.slot] == 0
    assert columns.prefill_backlog_tokens[other] == 256


def test_derived_decisions_have_the_route_and_both_endpoints():
    live = StagedLive(ALWAYS)
    live.begin(4)
    live.scrape()
    decision = live.ask(priority=0, prompts=(b"x" * 1024,), prompt_tokens=256)
    live.scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 1.0)
    (past,) = [one for one in derived(live.events) if isinstance(one, PastDecision)]
    (leg,) = past.told.earlier
    assert (past.told.route, past.told.uncached_tokens) == ("prefill-decode", 256)
    assert (leg.stage, leg.endpoint) == ("prefill", decision.prefiller.name)
    assert leg.address == decision.prefiller.address
