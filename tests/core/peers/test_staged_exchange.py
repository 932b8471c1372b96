"""Peers count what each stage of a request has in flight."""

from collections import Counter

import numpy as np
from msgspec import structs

from epp.core.decision.inputs import RequestEnded, ResponseStarted
from epp.core.decision.stages import Always, Stages
from epp.core.knowledge.inflight import Outcome
from epp.core.peers.exchange import PeerExchange, Taken
from epp.core.peers.frames import TOKENS, Frame, Kind, encode
from epp.plugins.filters import DecodeRole, PrefillRole
from epp.plugins.scorers import ActiveRequests, TokenLoad
from tests.builders import PREFIX
from tests.core.decision.staged import BOTH, chat, pool_of, profile
from tests.core.peers.test_exchange import settle

ROLES = ["prefill", "decode", "prefill", "decode"]
BY_LOAD = Stages(
    decode=profile("decode", DecodeRole(), scorers=[ActiveRequests()]),
    prefill=profile("prefill", PrefillRole(), scorers=[TokenLoad()]),
    prefill_if=Always(),
)


def picker(number, stages=BOTH):
    made = pool_of(ROLES, stages, seed=number)
    return made, PeerExchange(made, origin=bytes([number]) * 8, now=0.0, replicas=2)


def seen_by(scheduler, now):
    """Return requests and prefill tokens of each endpoint, with those of peers."""
    columns = scheduler.pool.columns
    slots = np.arange(len(ROLES))
    speed = columns.prefill_drain_tokens_per_s[slots]
    requests = columns.inflight_requests[slots] + columns.peers.requests(slots, len(columns))
    tokens = columns.peers.prefill_tokens(slots, now, speed)
    return requests.tolist(), tokens.tolist()


def test_a_peer_counts_every_leg_and_the_promised_prefill_tokens():
    one, talk_one = picker(1)
    other, talk_other = picker(2)
    settle(0.0, talk_one, talk_other)
    decision = one.schedule(chat(512), 0.1)
    settle(0.1, talk_one, talk_other)
    requests, tokens = seen_by(other, 0.1)
    assert requests == [1, 1, 0, 0]
    assert tokens == [512.0, 0.0, 0.0, 0.0]
    one.take(ResponseStarted(decision.lease), 0.2)
    settle(0.2, talk_one, talk_other)
    assert seen_by(other, 0.2) == ([0, 1, 0, 0], [0.0] * 4)
    one.take(RequestEnded(decision.lease, Outcome(status=200)), 0.3)
    settle(0.3, talk_one, talk_other)
    assert seen_by(other, 0.3) == ([0] * 4, [0.0] * 4)


def test_a_peer_counts_the_context_and_the_kv_transfers_of_every_leg():
    one, talk_one = picker(1)
    other, talk_other = picker(2)
    settle(0.0, talk_one, talk_other)
    decision = one.schedule(chat(512), 0.1)
    settle(0.1, talk_one, talk_other)

    def seen():
        found = other.state.candidates(np.arange(len(ROLES)), {}, chat(512), 0.2)
        numbers = [found.prefill_numbers_of(at)[4:6] for at in range(2)]
        receiving, sending = found.receiving_tokens.tolist(), found.sending_tokens.tolist()
        assert numbers == list(zip(receiving[:2], sending[:2], strict=True))
        return found.inflight_context_tokens.tolist(), receiving, sending

    assert seen() == ([512, 512, 0, 0], [0.0, 512.0, 0.0, 0.0], [512.0, 0.0, 0.0, 0.0])
    one.take(RequestEnded(decision.lease, Outcome(status=200)), 0.3)
    settle(0.3, talk_one, talk_other)
    assert seen() == ([0] * 4, [0.0] * 4, [0.0] * 4)


def test_a_lost_report_of_tokens_is_repaired_by_the_next_heartbeat():
    one, talk_one = picker(1)
    other, talk_other = picker(2)
    settle(0.0, talk_one, talk_other)
    one.schedule(chat(512), 0.1)
    talk_one.outgoing(0.1)
    settle(2.0, talk_one, talk_other)
    columns = other.pool.columns
    assert columns.peers.sending_tokens(np.arange(4), 4).tolist() == [512.0, 0.0, 0.0, 0.0]
    talk_other.tick(9.0)
    assert columns.peers.sending_tokens(np.arange(4), 4).tolist() == [0.0] * 4


def test_tokens_that_no_page_makes_plausible_are_cut():
    other, talk_other = picker(2)
    lies = np.zeros(1, dtype=TOKENS)
    lies["endpoint"] = next(iter(talk_other_slots(talk_other)))
    for member in ("context_tokens", "receiving_tokens", "sending_tokens"):
        lies[member] = np.inf
    frame = Frame(b"1" * 8, 1, Kind.LIVE, 1.0, tokens=lies.tobytes())
    assert talk_other.receive(encode(frame), 0.1, frame.origin) is Taken.TAKEN
    peers = other.pool.columns.peers
    # Four requests of 2,048 tokens may have been sent when the page is new, and 20 more each second.
    assert 0.0 < peers.sending_tokens(np.arange(4), 4).max() < 5 * 24 * 2_048
    assert talk_other.claims_cut == 1


def talk_other_slots(exchange):
    exchange._read_pool()
    return exchange._slots


def test_a_peer_learns_the_prompt_at_both_endpoints():
    one, talk_one = picker(1)
    other, talk_other = picker(2)
    settle(0.0, talk_one, talk_other)
    one.schedule(chat(512), 0.1)
    settle(0.1, talk_one, talk_other)
    assert other.indexes.match(chat(512), 4, 0.2)[PREFIX].matched.tolist() == [8, 8, 0, 0]


def test_two_pickers_that_share_spread_both_stages_as_one_does():
    alone = pool_of(ROLES, BY_LOAD, indexes={})
    pair = [picker(number, BY_LOAD) for number in (1, 2)]
    settle(0.0, *(exchange for _, exchange in pair))
    counts = [Counter(), Counter()]
    for number in range(20):
        for found, scheduler in zip(counts, (alone, pair[number % 2][0]), strict=True):
            decision = scheduler.schedule(chat(64, text=b"%d" % number), 0.0)
            found[decision.endpoint.name] += 1
            found[decision.prefiller.name] += 1
        settle(0.0, *(exchange for _, exchange in pair))
    assert counts[0] == counts[1] == dict.fromkeys(("pod-0", "pod-1", "pod-2", "pod-3"), 10)


def test_a_fallback_shares_like_any_other_decision():
    stages = structs.replace(BOTH, prefill_if=Always(), fallback=BOTH.decode)
    made = pool_of(["decode"], stages)
    made.placements.tell_peers()
    made.schedule(chat(512), 0.1)
    assert [one.left_out for one in made.placements.sent] == [()]
