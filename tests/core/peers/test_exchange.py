"""Pickers that tell each other: what arrives, what is lost, and what a hostile one costs."""

import tracemalloc
from asyncio import CancelledError
from random import Random
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.abilities import Abilities
from epp.core.decision.inputs import PageScraped, PoolReplaced, Reconfigured, RequestEnded, ServedBy
from epp.core.decision.profile import SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.knowledge.affinity import NoHitLruSettings, SessionIndexSettings
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Outcome
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.peers.exchange import (
    FRAMES_LOST_MAX,
    HEARTBEAT_S,
    ORIGINS_MAX,
    RECORDS_PER_APPLY,
    RECORDS_PER_S_MAX,
    SILENT_S_MAX,
    PeerExchange,
    Taken,
)
from epp.core.peers.frames import (
    FRAME_BYTES_MAX,
    LOAD,
    LOADS_MAX,
    MAGIC,
    VERSION,
    Frame,
    Kind,
    Record,
    decode,
    encode,
    encode_record,
    records_of,
)
from epp.core.peers.inbox import WAITING_BYTES_MAX
from epp.core.prompt.blocks import hash_blocks
from epp.core.types import EndpointMetrics
from epp.plugins.pickers import MaxScore
from epp.plugins.scorers import ActiveRequests, PrefixCache, TokenLoad
from tests.builders import endpoint, request

N = 4
PREFIX = "prefix"
INDEXES = {
    PREFIX: PrefixIndexSettings(),
    "session": SessionIndexSettings(),
    "cold": NoHitLruSettings(),
}


def picker(number, *, endpoints=N, indexes=INDEXES, replicas=2, now=0.0):
    """A scheduler and its exchange."""
    scorers = (
        WeightedScorer("prefix", PrefixCache(), 3.0),
        WeightedScorer("active", ActiveRequests(), 1.0),
        WeightedScorer("tokens", TokenLoad(), 1.0),
    )
    profile = SchedulingProfile(
        name="default", filters=(), scorers=scorers, picker_name="max", picker=MaxScore()
    )
    made = Scheduler(
        SchedulerSettings(stages=Stages(decode=profile), indexes=indexes, prefix=PREFIX),
        seed=number,
    )
    made.take(PoolReplaced([endpoint(at) for at in range(endpoints)]), now)
    for slot in range(endpoints):
        made.take(PageScraped(slot, EndpointMetrics()), now)
    return made, PeerExchange(made, origin=bytes([number]) * 8, now=now, replicas=replicas)


def asked(text, **fields):
    """One block a letter, of 64 tokens."""
    chain = hash_blocks(text.encode(), seed=1, block_bytes=1, blocks_max=len(text))
    fields = {"prompt_tokens": 64 * len(text), "chains": {256: (chain,)}} | fields
    return request(**fields)


def hear(exchange, message, now):
    """By a connection of the origin that the frame names."""
    try:
        origin = decode(message).origin
    except ValueError:
        origin = b"somebody"
    return exchange.receive(message, now, origin)


def settle(now, *exchanges):
    """Everything that is to be told arrives and is learnt."""
    for sender in exchanges:
        for frame in sender.outgoing(now):
            for receiver in exchanges:
                if receiver is not sender:
                    assert hear(receiver, frame, now) in {Taken.TAKEN, Taken.AGAIN}
    learn(now, *exchanges)


def learn(now, *exchanges):
    for exchange in exchanges:
        while exchange.pending():
            exchange.apply(now)


def acquainted(*numbers, **given):
    made = [picker(number, **given) for number in numbers]
    settle(0.0, *(exchange for _, exchange in made))
    return [part for pair in made for part in pair]


def held(scheduler, text, now=1.0):
    return scheduler.indexes[PREFIX].match(asked(text), N, now).matched.tolist()


def inflight(scheduler):
    columns = scheduler.pool.columns
    slots = np.arange(N)
    return (columns.inflight_requests[:N] + columns.peers.requests(slots, N)).tolist()


def test_a_peer_knows_prefix_session_and_order_of_cold_prompts_of_each_decision():
    one, talk_one, other, talk_other = acquainted(1, 2)
    decision = one.schedule(asked("abcdefgh" * 20, session_id="s"), 0.5)
    at = one.pool.slot_of(decision.endpoint)
    settle(1.0, talk_one, talk_other)
    assert held(other, "abcdefgh" * 20)[at] == 160
    assert other.indexes["session"].match(asked("x", session_id="s"), N, 1.0).matched[at] == 1
    assert other.indexes["cold"].match(asked("x"), N, 1.0).matched[at] == 1
    assert talk_other.received.applied == 1
    follow_up = other.schedule(asked("abcdefgh" * 20 + "more"), 1.0)
    assert follow_up.endpoint == decision.endpoint
    assert follow_up.leg.matched_blocks == 160
    assert other.indexes[PREFIX].statistics.known_from_peers == 1


def test_only_the_end_of_a_chain_that_was_told_is_told():
    """Users who share a preamble, and turns of a chat, cost what is new of them."""
    one, talk_one, other, talk_other = acquainted(1, 2)
    preamble = "p" * 96
    sizes = []
    for turn, text in enumerate(
        (preamble + "first" * 4, preamble + "second" * 4, preamble + "first" * 4 + "more")
    ):
        one.schedule(asked(text), 0.5)
        (frame,) = talk_one.outgoing(0.5 + turn * 0.02)
        sizes.append(len(frame))
        hear(talk_other, frame, 0.6)
        learn(0.6, talk_other)
        assert max(held(other, text)) == len(text)
    whole, shared, grown = sizes
    assert whole > 116 * 8
    assert shared < whole - 96 * 8 + 100
    assert grown < 220
    assert talk_other.received.applied == 3


def test_a_chain_that_was_lost_is_told_whole_at_the_next_heartbeat():
    """Until then what goes on from it is not learnt, and counted."""
    one, talk_one, other, talk_other = acquainted(1, 2)
    one.schedule(asked("a" * 100), 0.1)
    assert talk_one.outgoing(0.1)  # lost
    one.schedule(asked("a" * 100 + "b" * 9), 0.2)
    (frame,) = talk_one.outgoing(0.2)
    hear(talk_other, frame, 0.2)
    learn(0.2, talk_other)
    assert talk_other.received.unknown_chain == 1
    assert max(held(other, "a" * 100)) == 0
    settle(HEARTBEAT_S, talk_one, talk_other)
    one.schedule(asked("a" * 100 + "b" * 9), 1.2)
    settle(1.22, talk_one, talk_other)
    assert max(held(other, "a" * 100 + "b" * 9)) == 109
    assert talk_other.peers[talk_one.origin].lost == talk_other.frames_lost == 1


def test_what_was_lost_stays_counted_when_its_origin_leaves():
    """A total never falls; and one frame cannot claim that more was lost than there can have been."""
    _, talk_one, _, talk_other = acquainted(1, 2)
    for number in (1, 2**62):
        late = Frame(talk_one.origin, talk_one.peers[talk_other.origin].number + number, 0, 1.0)
        assert hear(talk_other, encode(late), 0.1) is Taken.TAKEN
    assert 0 < talk_other.frames_lost <= FRAMES_LOST_MAX
    lost = talk_other.frames_lost
    assert talk_other.unheard == 0
    hear(talk_other, talk_one.goodbye(0.2), 0.2)
    assert (talk_other.frames_lost, talk_other.unheard) == (lost, 1)
    talk_other.expect(4, 0.0)
    assert talk_other.unheard == 3


def test_load_is_told_as_it_is_and_counts_where_scorers_read_it():
    one, talk_one, other, talk_other = acquainted(1, 2)
    leases = [one.schedule(asked("abc", prompt_tokens=192), 1.0).lease for _ in range(6)]
    settle(1.0, talk_one, talk_other)
    assert inflight(other) == one.pool.columns.inflight_requests[:N].tolist()
    assert sum(inflight(other)) == 6
    seen = other.state.candidates(np.arange(N), {}, asked("x"), 1.0)
    ours = one.state.candidates(np.arange(N), {}, asked("x"), 1.0)
    assert seen.inflight_requests.tolist() == ours.inflight_requests.tolist()
    assert seen.inflight_prefill_tokens == pytest.approx(ours.inflight_prefill_tokens)
    for lease in leases[:4]:
        one.take(RequestEnded(lease, Outcome()), 1.1)
    settle(1.12, talk_one, talk_other)
    assert sum(inflight(other)) == 2


def test_nothing_that_a_peer_says_opens_or_closes_a_lease_of_our_own():
    one, talk_one, other, talk_other = acquainted(1, 2)
    lease = other.schedule(asked("mine"), 0.5).lease
    for _ in range(3):
        one.schedule(asked("yours"), 0.5)
    settle(0.6, talk_one, talk_other)
    hear(talk_other, talk_one.goodbye(0.7), 0.7)
    assert (other.ledger.open_leases, one.ledger.open_leases) == (1, 3)
    assert sum(inflight(other)) == 1
    other.take(RequestEnded(lease, Outcome()), 0.8)
    assert sum(inflight(other)) == 0


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_no_load_survives_its_origin(says_goodbye):
    """With a goodbye at once, else once it has been silent; what it told of prefixes stays."""
    one, talk_one, other, talk_other = acquainted(1, 2)
    one.schedule(asked("abc"), 0.5)
    settle(0.6, talk_one, talk_other)
    assert (sum(inflight(other)), other.state.replicas_unheard) == (1, 0)
    if says_goodbye:
        hear(talk_other, talk_one.goodbye(0.7), 0.7)
    else:
        talk_other.tick(0.6 + SILENT_S_MAX)
        assert sum(inflight(other)) == 1
        talk_other.tick(0.7 + SILENT_S_MAX)
    assert (sum(inflight(other)), other.state.replicas_unheard) == (0, 1)
    assert max(held(other, "abc")) == 3
    # Heard again, it is as it was.
    settle(9.0, talk_one, talk_other)
    assert (sum(inflight(other)), other.state.replicas_unheard) == (1, 0)


def test_a_late_or_repeated_frame_does_not_bring_an_old_load_back():
    one, talk_one, other, talk_other = acquainted(1, 2)
    lease = one.schedule(asked("abc"), 0.5).lease
    (busy,) = talk_one.outgoing(0.5)
    one.take(RequestEnded(lease, Outcome()), 0.6)
    (idle,) = talk_one.outgoing(0.6)
    for frame in (idle, busy, busy):
        hear(talk_other, frame, 0.7)
        learn(0.7, talk_other)
    assert sum(inflight(other)) == 0
    assert max(held(other, "abc")) == 3


words = st.lists(st.sampled_from(["a", "bb", "abc" * 20, "d" * 130]), min_size=1, max_size=4)
plan = st.lists(
    st.tuples(st.integers(0, 2), words.map("".join), st.booleans()), min_size=1, max_size=25
)


@settings(max_examples=60, deadline=None)
@given(plan, st.randoms(use_true_random=False))
def test_any_order_loss_repetition_and_delay_converges(decisions, random: Random):
    """Each believes what one index would that saw all that arrived there, and once it is quiet
    everybody has the same picture of the load, whatever was lost before.
    """
    made = [picker(number, replicas=3) for number in range(3)]
    exchanges = [exchange for _, exchange in made]
    settle(0.0, *exchanges)
    on_the_way = {exchange.origin: [] for exchange in exchanges}
    now = 0.1
    for number, text, ends in decisions:
        scheduler, exchange = made[number]
        lease = scheduler.schedule(asked(text), now).lease
        if ends:
            scheduler.take(RequestEnded(lease, Outcome()), now)
        for frame in exchange.outgoing(now):
            for receiver in exchanges:
                if receiver is not exchange and random.random() < 0.8:
                    on_the_way[receiver.origin] += [frame] * random.choice([1, 1, 2])
        now += 0.02
    for scheduler, exchange in made:
        frames = on_the_way[exchange.origin]
        random.shuffle(frames)
        before = scheduler.indexes[PREFIX].entries
        for frame in frames:
            hear(exchange, frame, now)
        learn(now, exchange)
        once = scheduler.indexes[PREFIX].entries
        for frame in frames:
            hear(exchange, frame, now)
        learn(now, exchange)
        # What was lost may be found in another order; what was learnt stays.
        assert before <= once <= scheduler.indexes[PREFIX].entries
    settle(2.0, *exchanges)
    settle(3.1, *exchanges)
    total = sum(scheduler.ledger.open_leases for scheduler, _ in made)
    assert [sum(inflight(scheduler)) for scheduler, _ in made] == [total] * 3
    assert len({tuple(inflight(scheduler)) for scheduler, _ in made}) == 1


def test_one_at_a_time_pickers_together_decide_as_one_would():
    """Without delay and loss, and with the same dice, any assignment gives the same endpoints."""
    random = Random(3)
    texts = ["".join(random.choices("abc", k=random.randint(1, 40))) for _ in range(150)]
    alone, _ = picker(1, replicas=1)
    made = [picker(1, replicas=3) for _ in range(3)]
    for at, (_, exchange) in enumerate(made):
        exchange.origin = bytes([at]) * 8
    exchanges = [exchange for _, exchange in made]
    settle(0.0, *exchanges)
    open_leases = []
    for turn, text in enumerate(texts):
        now = 0.1 + turn * 0.05
        wanted = alone.schedule(asked(text), now)
        scheduler, _ = made[random.randrange(3)]
        # Ties rotate by the number of decisions, which each counts for itself.
        scheduler.decisions = turn
        decision = scheduler.schedule(asked(text), now)
        assert (decision.endpoint, decision.leg.matched_blocks) == (
            wanted.endpoint,
            wanted.leg.matched_blocks,
        )
        open_leases.append((alone, wanted.lease, scheduler, decision.lease))
        settle(now, *exchanges)
        if len(open_leases) > 7:
            one, first, other, second = open_leases.pop(0)
            one.take(RequestEnded(first, Outcome()), now)
            other.take(RequestEnded(second, Outcome()), now)
            settle(now, *exchanges)


def test_an_endpoint_that_is_not_here_or_another_incarnation_is_counted_and_nothing_else():
    one, talk_one, other, talk_other = acquainted(1, 2)
    other.take(PoolReplaced([endpoint(at, incarnation="second") for at in range(N)]), 0.1)
    one.schedule(asked("abc"), 0.2)
    settle(0.3, talk_one, talk_other)
    assert other.indexes[PREFIX].entries == 0
    assert sum(inflight(other)) == 0
    assert talk_other.received.unknown_endpoint == 1


def test_indexes_that_mean_something_else_are_not_mixed_up():
    """Another block size: nothing of prefixes is learnt, sessions and load are."""
    one, talk_one = picker(1)
    different = INDEXES | {PREFIX: PrefixIndexSettings(block_size_tokens=128)}
    other, talk_other = picker(2, indexes=different)
    settle(0.0, talk_one, talk_other)
    one.schedule(asked("abc" * 30, session_id="s"), 0.5)
    settle(0.6, talk_one, talk_other)
    assert not talk_other.peers[talk_one.origin].understood
    assert other.indexes[PREFIX].entries == 0
    assert len(other.indexes["session"]) == 1
    assert sum(inflight(other)) == 1
    # Once the same is configured there, all of it is.
    other.take(Reconfigured(one.settings), 0.7)
    one.schedule(asked("abc" * 30, session_id="s"), 2.0)
    settle(2.1, talk_one, talk_other)
    settle(3.2, talk_one, talk_other)
    assert talk_other.peers[talk_one.origin].understood


def test_a_restarted_picker_takes_a_snapshot_and_knows_what_its_peer_knows():
    one, talk_one = picker(1)
    random = Random(5)
    texts = ["p" * 60 + "".join(random.choices("ab", k=40)) for _ in range(300)]
    for turn, text in enumerate(texts):
        one.schedule(asked(text, session_id=f"s{turn}"), turn / 10)
    new, talk_new = picker(9, now=30.0)
    frames = list(talk_one.snapshot(30.0))
    for frame in frames:
        records = list(records_of(decode(frame).records))
        assert len(records) <= RECORDS_PER_APPLY
        assert talk_new.receive_snapshot_frame(frame, 30.0, 0.0) is Taken.TAKEN
        learn(30.0, talk_new)
    assert talk_new.restored.unknown_chain == 0
    for text in texts:
        assert held(new, text, 30.0) == held(one, text, 30.0)
    assert new.indexes[PREFIX].entries == one.indexes[PREFIX].entries
    assert len(new.indexes["session"]) == len(one.indexes["session"]) == 300
    # Again, or an hour old: nothing changes.
    before = new.indexes[PREFIX].entries
    for age_s in (0.0, 3600.0):
        for frame in frames:
            talk_new.receive_snapshot_frame(frame, 30.0, age_s)
            learn(30.0, talk_new)
    assert new.indexes[PREFIX].entries == before
    assert sum(inflight(new)) == 0


def test_load_that_has_no_place_in_a_frame_is_sent_in_the_next():
    n = LOADS_MAX + 3
    pool = [endpoint(at) for at in range(n)]
    schedulers, exchanges = [], []
    for number in (1, 2):
        made, exchange = picker(number, endpoints=0)
        made.take(PoolReplaced(pool), 0.0)
        schedulers.append(made)
        exchanges.append(exchange)
    settle(0.0, *exchanges)
    columns, peers = schedulers[0].pool.columns, schedulers[1].pool.columns.peers

    def beyond():
        slots = np.arange(LOADS_MAX, n)
        return peers.requests(slots, n).tolist(), peers.context_tokens(slots, n).tolist()

    schedulers[0].schedule(asked("abc"), 0.1)
    columns.inflight_requests[:n] = columns.inflight_context_tokens[:n] = 3
    settle(0.1, *exchanges)
    assert beyond() == ([0] * 3, [0] * 3)
    assert exchanges[1].received.applied == 1
    settle(0.2, *exchanges)
    assert beyond() == ([3] * 3, [3] * 3)
    # A heartbeat replaces what was sent before, and comes with all that has no place in it.
    settle(HEARTBEAT_S, *exchanges)
    assert beyond() == ([3] * 3, [3] * 3)


def test_a_snapshot_is_no_live_frame_and_a_live_frame_no_snapshot():
    one, talk_one, other, talk_other = acquainted(1, 2)
    one.schedule(asked("abc"), 0.5)
    (live,) = talk_one.outgoing(0.5)
    (frame, *_) = talk_one.snapshot(0.5)
    assert hear(talk_other, frame, 0.6) is Taken.UNREADABLE
    learn(0.6, talk_other)
    assert held(other, "abc") == [0] * N
    for message in (live, b"garbage"):
        assert talk_other.receive_snapshot_frame(message, 0.6, 0.0) is Taken.UNREADABLE
    newer = frame[:3] + b"\x7f" + frame[4:]
    assert talk_other.receive_snapshot_frame(newer, 0.6, 0.0) is Taken.OTHER_VERSION
    assert not talk_other.pending()


def live(number, records=b"", load=b"", **fields):
    return encode(
        Frame(
            **{
                "origin": b"hostile!",
                "number": number,
                "kind": Kind.LIVE,
                "uptime_s": 1.0,
                "records": records,
                "load": load,
            }
            | fields
        )
    )


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_do_harm(noise, at, value):
    """Garbage, and frames of ours with one byte changed, are taken or counted; nothing raises."""
    one, talk_one, _, talk_other = acquainted(1, 2)
    one.schedule(asked("abc" * 50, session_id="s"), 0.5)
    (frame,) = talk_one.outgoing(0.5)
    wrong = bytearray(frame)
    wrong[at % len(wrong)] = value
    for message in (
        noise,
        bytes(wrong),
        frame[: at % len(frame)],
        MAGIC + bytes([VERSION]) + noise,
        live(1, records=noise),
        live(2, load=noise),
        live(3, records=encode_record(Record(1, 0, ((noise,),)))),
    ):
        assert hear(talk_other, message, 0.6) in Taken
        learn(0.6, talk_other)
        talk_other.outgoing(0.7)
        talk_other.tick(0.7)


def test_another_version_is_told_from_garbage():
    _, talk_one, _, talk_other = acquainted(1, 2)
    (frame,) = talk_one.outgoing(2.0)
    newer = MAGIC + bytes([VERSION + 1]) + frame[4:]
    assert hear(talk_other, newer, 2.0) is Taken.OTHER_VERSION
    assert hear(talk_other, b"GET / HTTP/1.1", 2.0) is Taken.UNREADABLE
    assert hear(talk_other, MAGIC + b"\1" + b"x" * FRAME_BYTES_MAX, 2.0) is Taken.UNREADABLE
    assert hear(talk_one, frame, 2.0) is Taken.OWN


def test_members_that_a_later_format_appends_are_skipped():
    _, talk_one, _, talk_other = acquainted(1, 2)
    members = msgspec.msgpack.decode(talk_one.outgoing(2.0)[0][4:])
    later = MAGIC + bytes([VERSION]) + msgspec.msgpack.encode([*members, {"more": 1}])
    assert hear(talk_other, later, 2.0) is Taken.TAKEN


def test_a_peer_that_lies_about_load_cannot_make_sums_overflow():
    _, _, other, talk_other = acquainted(1, 2)
    lies = np.zeros(N, dtype=LOAD)
    lies["endpoint"] = list(talk_other._slots)
    lies["requests"] = 2**32 - 1
    lies["prefill_tokens"] = [np.nan, np.inf, -np.inf, -5.0]
    hear(talk_other, live(2**62, load=lies.tobytes()), 0.5)
    assert max(inflight(other)) < 100
    assert talk_other.claims_cut == sum(peer.claims_cut for peer in talk_other.peers.values()) == N
    seen = other.state.candidates(np.arange(N), {}, asked("x"), 0.5)
    assert np.isfinite(seen.inflight_prefill_tokens).all()
    assert (seen.inflight_prefill_tokens >= 0).all()
    assert other.schedule(asked("abc"), 0.5).endpoint


def test_a_peer_that_lies_about_load_does_not_choose_for_us():
    """Three endpoints are said to have 4e9 requests each; their pages show none, so that the fourth
    gets no more than what a peer may have sent the others unseen.
    """
    _, _, other, talk_other = acquainted(1, 2)
    lies = np.zeros(N - 1, dtype=LOAD)
    lies["endpoint"] = list(talk_other._slots)[: N - 1]
    lies["requests"] = 2**32 - 1
    lies["prefill_tokens"] = 4e9
    for slot in range(N):
        page = EndpointMetrics(waiting_requests=0, running_requests=0)
        other.take(PageScraped(slot, page), 0.4)
    chosen = []
    for number in range(40):
        now = 0.5 + number * 0.005
        if number % 15 == 0:
            hear(talk_other, live(number + 1, load=lies.tobytes()), now)
        chosen.append(other.schedule(asked(chr(33 + number) * 3), now).endpoint.name)
    assert max(map(chosen.count, chosen)) < 20
    assert len(set(chosen)) == N


def test_honest_load_is_believed_in_full_once_pages_show_it():
    """However much it is."""
    _, _talk_one, other, talk_other = acquainted(1, 2)
    load = np.zeros(1, dtype=LOAD)
    load["endpoint"] = next(iter(talk_other._slots))
    load["requests"], load["prefill_tokens"] = 500, 400_000.0
    slot = next(iter(talk_other._slots.values()))
    hear(talk_other, live(1, load=load.tobytes()), 0.5)
    assert inflight(other)[slot] < 50
    other.take(PageScraped(slot, EndpointMetrics(waiting_requests=300, running_requests=200)), 0.6)
    hear(talk_other, live(2, load=load.tobytes()), 0.6)
    assert inflight(other)[slot] == 500
    assert talk_other.claims_cut == 1


def test_nobody_speaks_for_another():
    """Neither of load nor to say goodbye."""
    one, talk_one, other, talk_other = acquainted(1, 2)
    one.schedule(asked("abc"), 0.5)
    settle(0.6, talk_one, talk_other)
    for frame in (talk_one.goodbye(0.7), live(99, origin=talk_one.origin)):
        assert talk_other.receive(frame, 0.7, b"somebody") is Taken.FOREIGN
        assert talk_other.receive(frame, 0.7, b"") is Taken.FOREIGN
    assert sum(inflight(other)) == 1


def test_what_was_missed_is_asked_for_and_told_again():
    """Once; who has it already learns nothing anew, and its age counts."""
    one, talk_one, other, talk_other, _third, talk_third = acquainted(1, 2, 3)
    decision = one.schedule(asked("abc" * 20), 0.5)
    at = one.pool.slot_of(decision.endpoint)
    for frame in talk_one.outgoing(0.5):
        hear(talk_third, frame, 0.5)
    learn(0.5, talk_third)
    settle(1.0, talk_one, talk_other, talk_third)
    assert (held(other, "abc" * 20)[at], talk_other.frames_lost) == (0, 1)
    settle(2.1, talk_other, talk_one, talk_third)
    # Asked at each of two heartbeats, and told after the second.
    assert (talk_other.frames_asked, talk_other.frames_recovered) == (2, 1)
    assert held(other, "abc" * 20)[at] == 60
    assert talk_other.peers[talk_one.origin].inbox.lag_s == pytest.approx(1.6)
    applied = talk_third.received.applied
    settle(5.0, talk_other, talk_one, talk_third)
    assert (talk_other.frames_asked, talk_third.received.applied) == (2, applied)


def test_after_a_partition_both_are_told_what_they_missed():
    """Of half a minute, in which each was as if alone."""
    one, talk_one, other, talk_other = acquainted(1, 2)
    settle(1.0, talk_one, talk_other)
    for second in range(2, 32):
        for number, (scheduler, exchange) in enumerate(((one, talk_one), (other, talk_other))):
            scheduler.schedule(asked(f"{number}{second:03}" * 4), float(second))
            exchange.outgoing(float(second))
            exchange.tick(float(second))
    assert talk_one.unheard == talk_other.unheard == 1
    assert [change.kind for change in talk_one.changes] == ["heard", "lost"]
    for turn in range(60):
        settle(32.0 + turn * 0.05, talk_one, talk_other)
    assert [change.kind for change in talk_one.changes] == ["heard", "lost", "returned"]
    for second in range(2, 32):
        assert max(held(one, f"1{second:03}" * 4, now=35.0)) == 16
        assert max(held(other, f"0{second:03}" * 4, now=35.0)) == 16
    assert not talk_one.snapshots_wanted


def test_what_nobody_keeps_any_more_is_asked_of_a_snapshot():
    """Asked for as often as may be, and no more."""
    _, talk_one, _, talk_other = acquainted(1, 2)
    number = talk_one.peers[talk_other.origin].number
    hear(talk_other, live(number + 1_000_000, origin=talk_one.origin), 0.5)
    for second in range(1, 40):
        settle(float(second), talk_other)
        talk_other.peers[talk_one.origin].heard_at_s = float(second)
    assert talk_other.snapshots_wanted == {talk_one.origin}
    asked_for = talk_other.frames_asked
    settle(50.0, talk_other)
    assert talk_other.frames_asked == asked_for > 0
    assert not talk_other.peers[talk_one.origin].missed


def test_a_million_records_cost_a_bounded_share_of_memory_and_turns():
    """What waits is bounded by bytes, what is learnt by records a second; the rest is counted."""
    _, _, other, talk_other = acquainted(1, 2)
    slot_hash = next(iter(talk_other._slots))
    hashes = talk_other._index_hashes
    random = Random(1)
    records = b"".join(
        encode_record(Record(slot_hash, 0, ((random.randbytes(160),),))) for _ in range(1_000)
    )
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(1_000):
        hear(talk_other, live(number + 1, records=records, indexes=hashes), 0.5)
    waiting = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert waiting < 2 * WAITING_BYTES_MAX
    calls = 0
    while talk_other.pending():
        talk_other.apply(0.5)
        calls += 1
    counts = talk_other.received
    assert counts.applied <= RECORDS_PER_S_MAX
    assert calls <= RECORDS_PER_S_MAX / RECORDS_PER_APPLY + 200
    assert counts.dropped > 900
    assert other.indexes[PREFIX].entries <= 20 * RECORDS_PER_S_MAX


def test_origins_are_bounded_and_silent_ones_make_room():
    _, _, _, talk_other = acquainted(1, 2)
    outcomes = [
        hear(talk_other, live(1, origin=number.to_bytes(8, "big")), 0.5)
        for number in range(100, 100 + 2 * ORIGINS_MAX)
    ]
    assert outcomes.count(Taken.TAKEN) == ORIGINS_MAX - 1
    assert outcomes.count(Taken.TOO_MANY) == ORIGINS_MAX + 1
    talk_other.tick(0.6 + SILENT_S_MAX)
    assert hear(talk_other, live(1), 4.0) is Taken.TAKEN


def test_alone_nothing_is_kept_for_peers_and_heartbeats_go_on():
    scheduler, exchange = picker(1)
    assert len(exchange.outgoing(0.0)) == 1
    for turn in range(50):
        scheduler.schedule(asked("abc"), 0.001 * turn)
    assert exchange.outgoing(0.5) == []
    assert not scheduler.placements.sent
    assert exchange.records_sent == 0
    assert len(exchange.outgoing(HEARTBEAT_S)) == 1
    assert scheduler.state.replicas_unheard == 1


@pytest.mark.parametrize("keeps_snapshots", [True, False])
def test_without_peers_nothing_is_kept_for_them_and_nothing_added(keeps_snapshots):
    scheduler = Scheduler(picker(1)[0].settings, seed=1)
    if keeps_snapshots:
        PeerExchange(scheduler, origin=b"12345678", now=0.0, has_peers=False)
    scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    scheduler.take(PageScraped(0, EndpointMetrics()), 0.0)
    scheduler.schedule(asked("abc"), 0.0)
    assert scheduler.placements.sent is None
    assert scheduler.pool.columns.peers is None


def test_where_the_gateway_went_instead_is_told_too():
    one, talk_one, other, talk_other = acquainted(1, 2)
    lease = one.schedule(asked("abc"), 0.5).lease
    elsewhere = (lease.slot + 1) % N
    one.take(ServedBy(lease, endpoint(elsewhere).address), 0.6)
    settle(0.7, talk_one, talk_other)
    assert held(other, "abc")[elsewhere] == 3
    assert inflight(other) == inflight(one)


def test_a_decision_is_not_told_of_who_has_left_since():
    one, talk_one, _, talk_other = acquainted(1, 2)
    one.schedule(asked("abc"), 0.5)
    one.take(PoolReplaced([]), 0.55)
    settle(0.6, talk_one, talk_other)
    assert talk_other.received.applied == 0


class Failing:
    """An index of a stranger that can be shared, and fails at it."""

    def __init__(self, kind):
        self.kind = kind
        self.signature = "strange"

    def match(self, request, slots, now):
        return Affinity(np.zeros(slots, dtype=np.int64), 0)

    def record(self, request, slot, now): ...
    def retract(self, request, slot, recorded, now): ...
    def forget(self, slot): ...
    def expire(self, now): ...
    def resize(self, slot, blocks_total, block_size_tokens): ...

    def share(self, request):
        raise self.kind("secret")

    def learn(self, keys, slot, stamp, now):
        raise self.kind("secret")

    def shared_entries(self):
        raise self.kind("secret")
        yield


class FailingSettings(msgspec.Struct, frozen=True):
    kind: type[BaseException]

    abilities: ClassVar = Abilities(shares=True)

    def open(self):
        return Failing(self.kind)

    def adopt(self, index):
        return False


@pytest.mark.parametrize(
    "kind", [KeyError, CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit]
)
def test_an_index_that_fails_to_share_costs_only_what_it_knows(kind):
    indexes = INDEXES | {"strange": FailingSettings(kind)}
    one, talk_one, other, talk_other = acquainted(1, 2, indexes=indexes)
    one.schedule(asked("abc"), 0.5)
    settle(0.6, talk_one, talk_other)
    assert max(held(other, "abc")) == 3
    assert len(list(talk_one.snapshot(1.0))) == 2
    (failing,) = one.failures
    assert failing.name == "strange"
    assert "secret" not in failing.what


def test_an_origin_has_eight_bytes():
    scheduler, _ = picker(1)
    with pytest.raises(ValueError, match="the origin has 3 bytes; it must have 8"):
        PeerExchange(scheduler, origin=b"abc", now=0.0)
