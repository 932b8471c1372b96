"""Legs of disaggregated requests in an engine."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.engine import Engine, EngineSettings
from sim.engine.legs import KVConnector
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.ranks import RankedEngine
from sim.engine.request import EngineRequest
from sim.engine.speculation import speculation_of
from sim.engine.speculative_engine import SpeculativeEngine

SIZE = 16
PROFILE = find_profile(DEFAULT_PROFILE)


def engine(*, connector=True, blocks=21, make=Engine, **more):
    shape = EngineSettings(
        blocks_total=blocks,
        block_size_tokens=SIZE,
        kv_connector=KVConnector() if connector else None,
        **more,
    )
    return make(shape, PROFILE)


def speculative(shape, profile):
    return SpeculativeEngine(shape, profile, speculation_of("0.7/0.4"))


def request(name, *, prompt=64, output=8, text="", adapter=""):
    blocks = (prompt + output) // SIZE
    chain = [hash((text or name, place)) for place in range(blocks)]
    return EngineRequest(
        name, prompt_tokens=prompt, output_tokens=output, chain=chain, adapter=adapter
    )


def prefill_leg(name, **fields):
    leg = request(name, output=1, **fields)
    leg.hands_over = True
    return leg


def decode_leg(name, **fields):
    leg = request(name, **fields)
    leg.fetches = True
    return leg


def drained(one, now=0.0):
    """Do passes until nothing can be computed; the time then."""
    while (step := one.step(now)) is not None:
        one.check()
        now = step.ends_at
    one.check()
    return now


def reserved(one):
    legs, one.legs.reserved = one.legs.reserved, []
    return legs


def test_the_blocks_of_a_prefill_leg_stay_until_they_are_released():
    """They count as used, and stay cached afterwards."""
    one = engine()
    leg = prefill_leg("a")
    one.submit(leg, 0.0)
    now = drained(one)
    assert leg.finished
    assert not one.running
    assert list(one.legs.held) == [leg]
    assert one.pool.blocks_used == 4
    assert one.snapshot().kv_cache_usage == 4 / 20
    one.release(leg, now)
    one.check()
    assert one.pool.blocks_used == 0
    again = prefill_leg("b", text="a")
    one.submit(again, now)
    drained(one, now)
    assert again.cached_tokens == 48


def test_held_blocks_stop_a_prefill_engine_until_one_is_released():
    """A decode engine that reads nothing fills the prefill engine."""
    one = engine(blocks=11)
    legs = [prefill_leg(name) for name in "abc"]
    for leg in legs:
        one.submit(leg, 0.0)
    now = drained(one)
    assert [leg.finished for leg in legs] == [True, True, False]
    assert one.begin(now) is None
    one.release(legs[0], now)
    drained(one, now)
    assert legs[2].finished


def test_a_decode_leg_gets_the_blocks_of_its_whole_prompt_before_its_transfer():
    """It is deferred, holds blocks, and computes only the last token of its prompt."""
    one = engine()
    leg = decode_leg("a", prompt=70)
    one.submit(leg, 0.0)
    assert one.begin(0.0) is None
    assert reserved(one) == [leg]
    one.check()
    told = one.snapshot()
    assert (told.running, told.waiting, told.deferred) == (0, 1, 1)
    assert (told.to_fetch, told.fetching, told.fetched) == (0, 1, 0)
    assert one.pool.blocks_used == 5
    assert leg.fetched_tokens == 70
    one.received(leg, 1.0)
    assert one.snapshot().fetched == 1
    step = one.step(1.0)
    assert (step.work.tokens, step.work.decodes, step.work.prefills) == (1, 1, 0)
    assert step.work.received == 1
    assert step.work.decode_context_tokens == 70
    assert leg.first_token_at == step.ends_at
    drained(one, step.ends_at)
    assert leg.finished
    assert one.pool.blocks_used == 0


def test_a_decode_leg_fetches_only_what_its_engine_lacks():
    one = engine()
    one.submit(request("a"), 0.0)
    now = drained(one)
    leg = decode_leg("b", text="a", prompt=70)
    one.submit(leg, now)
    one.begin(now)
    assert (leg.cached_tokens, leg.fetched_tokens) == (64, 6)


def test_received_blocks_can_be_hit_and_reserved_ones_cannot():
    one = engine()
    leg = decode_leg("a")
    one.submit(leg, 0.0)
    one.begin(0.0)
    assert one.pool.match(leg.chain, leg.chain_ends, 4) == (0, 0)
    one.received(leg, 0.0)
    assert one.pool.match(leg.chain, leg.chain_ends, 4) == (4, 0)


def test_a_decode_leg_without_room_waits_and_blocks_the_queue():
    """Its transfer does not start; requests behind it wait as behind any other."""
    one = engine(blocks=11)
    first, second = decode_leg("a", prompt=96), decode_leg("b", prompt=96)
    third = request("c", prompt=32)
    for each in (first, second, third):
        one.submit(each, 0.0)
    assert one.begin(0.0) is None
    assert reserved(one) == [first]
    told = one.snapshot()
    assert (told.waiting, told.deferred, told.to_fetch) == (3, 1, 1)
    one.received(first, 1.0)
    now = drained(one, 1.0)
    assert first.finished
    assert reserved(one) == [second]
    assert third.finished
    one.received(second, now)
    drained(one, now)
    assert second.finished


def test_a_leg_in_transfer_does_not_count_as_a_running_sequence():
    one = engine(max_num_seqs=1, max_num_batched_tokens=64)
    legs = [decode_leg("a", prompt=40), decode_leg("b", prompt=40)]
    for leg in legs:
        one.submit(leg, 0.0)
    one.begin(0.0)
    assert reserved(one) == legs
    for leg in legs:
        one.received(leg, 0.0)
    step = one.step(0.0)
    assert list(one.running) == legs[:1]
    assert one.snapshot().fetched == 1
    drained(one, step.ends_at)
    assert all(leg.finished for leg in legs)


def test_a_preempted_decode_leg_is_computed_again_by_its_own_engine():
    one = engine(blocks=11)
    old, young = decode_leg("a", prompt=64, output=60), decode_leg("b", prompt=64, output=60)
    for leg in (old, young):
        one.submit(leg, 0.0)
    one.begin(0.0)
    for leg in (old, young):
        one.received(leg, 0.0)
    drained(one)
    assert old.finished
    assert young.finished
    assert young.preemptions
    assert not one.legs.fetching


def test_running_requests_without_a_block_wait_for_transfers():
    """All free blocks are reserved, and the only running request needs one more."""
    one = engine(blocks=10)
    running, leg = request("a", prompt=64, output=40), decode_leg("b", prompt=64)
    one.submit(running, 0.0)
    step = one.step(0.0)
    one.submit(leg, step.ends_at)
    now = drained(one, step.ends_at)
    assert running.preemptions == 1
    assert one.legs.stalled
    assert list(one.legs.fetching) == [leg]
    one.received(leg, now)
    drained(one, now)
    assert running.finished
    assert leg.finished


def test_an_aborted_leg_in_transfer_keeps_its_blocks_until_the_transfer_ends():
    one = engine()
    leg = decode_leg("a")
    one.submit(leg, 0.0)
    one.begin(0.0)
    assert one.abort("a")
    assert not one.abort("a")
    assert one.pool.blocks_used == 4
    assert one.snapshot().waiting == 0
    one.received(leg, 1.0)
    one.check()
    assert one.pool.blocks_used == 0
    assert one.begin(1.0) is None


@pytest.mark.parametrize("stage", ["waiting", "given up", "fetched", "running"])
def test_an_aborted_leg_returns_its_blocks(stage):
    one = engine(blocks=21)
    other, leg = decode_leg("a", prompt=300), decode_leg("b")
    if stage == "waiting":
        one.submit(other, 0.0)
    one.submit(leg, 0.0)
    one.begin(0.0)
    if stage in {"fetched", "running"}:
        one.received(leg, 0.0)
    if stage == "running":
        one.step(0.0)
    assert one.abort("b")
    if stage == "given up":
        one.give_up(leg, 0.0)
    one.check()
    assert one.pool.blocks_used == (19 if stage == "waiting" else 0)


def test_the_blocks_of_an_aborted_prefill_leg_are_not_held():
    """Also if it ends with the pass in which its client leaves."""
    one = engine()
    leg = prefill_leg("a")
    one.submit(leg, 0.0)
    one.begin(0.0)
    one.cut(0.0)
    assert one.abort("a")
    one.end()
    assert not one.legs.held
    assert one.pool.blocks_used == 0


def test_a_leap_ends_when_blocks_arrive():
    """A step of many passes is shortened to the pass in progress."""
    one = engine(blocks=200)
    running, leg = request("a", output=200), decode_leg("b")
    one.submit(running, 0.0)
    step = one.step(0.0)
    one.submit(leg, step.ends_at)
    one.begin(step.ends_at)
    assert one.passes > 10
    pass_s = PROFILE.decode_step_s(1, 65)
    one.received(leg, step.ends_at + 2.5 * pass_s)
    assert one.end().passes == 3
    one.begin(one._ended_at)
    assert leg in one.running
    one.check()


def test_legs_with_adapters_need_a_slot():
    one = engine(blocks=60, max_loras=1)
    legs = [decode_leg("a", adapter="x"), decode_leg("b", adapter="y")]
    for leg in legs:
        one.submit(leg, 0.0)
    one.begin(0.0)
    assert reserved(one) == legs
    for leg in legs:
        one.received(leg, 0.0)
    drained(one)
    assert legs[0].last_token_at < legs[1].first_token_at


def test_an_engine_without_a_connector_refuses_legs():
    one = engine(connector=False)
    for leg in (prefill_leg("a"), decode_leg("b")):
        with pytest.raises(ValueError, match="is a leg of a disaggregated request"):
            one.submit(leg, 0.0)
    assert one.begin(0.0) is None


def test_a_speculative_engine_decodes_what_it_received():
    one = engine(make=speculative, blocks=60)
    leg = decode_leg("a", output=20)
    one.submit(leg, 0.0)
    one.begin(0.0)
    one.received(leg, 0.0)
    drained(one)
    assert leg.finished
    assert one.pool.blocks_used == 0


def test_a_stalled_rank_does_not_stop_the_others():
    """One rank waits for a transfer, the other one computes."""
    ranks = RankedEngine([engine(blocks=30), engine(blocks=30)])
    leg, whole = decode_leg("a"), request("b", output=40)
    ranks.submit(leg, 0.0, 0)
    ranks.submit(whole, 0.0, 1)
    now = ranks.begin(0.0)
    assert now is not None
    assert ranks.snapshot().fetching == 1
    assert ranks.least_loaded == 1
    while not whole.finished:
        assert ranks.ends_at is not None
        now = ranks.end().ends_at
        ranks.begin(now)
    assert ranks.ends_at is None
    ranks.ranks[0].received(leg, now)
    while (now := ranks.begin(now)) is not None:
        ranks.end()
        ranks.check()
    assert leg.finished


COMMANDS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "whole", "step", "receive", "release", "abort"]),
        st.integers(1, 120),
        st.integers(0, 5),
    ),
    min_size=5,
    max_size=60,
)


@pytest.mark.parametrize("make", [Engine, speculative])
@settings(max_examples=100, deadline=None)
@given(commands=COMMANDS)
def test_blocks_are_conserved_and_all_return(make, commands):
    """Whatever comes in which order, every block has its holders, and none is left at the end."""
    one = engine(blocks=24, make=make)
    now = 0.0
    for number, (what, tokens, choice) in enumerate(commands):
        legs = one.legs
        if what in {"prefill", "decode", "whole"}:
            text = f"text {choice}"
            maker = {"prefill": prefill_leg, "decode": decode_leg, "whole": request}[what]
            more = {} if what == "prefill" else {"output": 1 + tokens % 40}
            one.submit(maker(str(number), prompt=tokens, text=text, **more), now)
        elif what == "step":
            step = one.step(now)
            now = now if step is None else step.ends_at
        elif what == "receive" and legs.fetching:
            one.received(list(legs.fetching)[choice % len(legs.fetching)], now)
        elif what == "release" and legs.held:
            one.release(list(legs.held)[choice % len(legs.held)], now)
        elif what == "abort":
            one.abort(str(choice * number // 5))
        one.check()
    for _ in range(1_000):
        now = drained(one, now)
        for leg in list(one.legs.held):
            one.release(leg, now)
        for leg in list(one.legs.fetching):
            one.received(leg, now)
        if not (one.waiting or one.running or one.legs.fetched or list(one.legs)):
            break
    one.check()
    assert not one.waiting
    assert one.pool.blocks_used == 0
    assert one.pool.duplicate_blocks == 0


def test_a_decode_leg_costs_a_decode_pass_and_no_prefill():
    """Its first token takes as long as any token of a request with this context."""
    one = Engine(
        EngineSettings(blocks_total=1_000, kv_connector=KVConnector()),
        msgspec.structs.replace(PROFILE, prefill_s=1.0, mixed_decode_factor=5.0),
    )
    leg = decode_leg("a", prompt=4_000)
    one.submit(leg, 0.0)
    one.begin(0.0)
    one.received(leg, 0.0)
    step = one.step(0.0)
    assert step.duration_s == pytest.approx(PROFILE.decode_step_s(1, 4_000))
