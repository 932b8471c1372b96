"""Pickers that engines tell what they hold, in simulated time."""

import pytest
from msgspec import structs

from epp.core.kv_events.stream import StreamState
from epp.shell.engines import kv_events as shell
from sim.cluster import kv_events as module
from sim.cluster.faults import Fault, FaultKind
from sim.cluster.kv_events import KVEventSettings
from sim.cluster.settings import Absence
from sim.cluster.simulated_request import Fate
from sim.cluster.tokenizing import TokenizeSettings
from sim.engine.features import Ranks
from tests.sim.made import BLOCK_TOKENS, arrival, arrivals, cluster, kind, ran

EXACT = "docs/examples/exact.yaml"
AT_ONCE = KVEventSettings(delay_s=0.0)


def small(pods=3, blocks_total=200):
    return (kind(blocks_total=blocks_total),) * pods


def one_by_one(count):
    """So far apart that each finds the pods idle."""
    for at, one in enumerate(arrivals(count, output=(1, 3))):
        yield structs.replace(one, time_s=5.0 * at)


def wrong(requests):
    """Tokens by which each estimate was off, as far as whole blocks can tell."""
    return [
        request.predicted_cached_tokens
        - request.engine.cached_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        for request in requests
    ]


def subscriptions(one, picker=0):
    return one.pickers._listeners[picker].subscriptions


def test_the_rules_are_production_s():
    assert module.WATCH_S == shell.WATCH_S
    assert module.CONNECT_PAUSE_S == shell.BACKOFF_S


def test_who_is_told_at_once_knows_each_hit():
    """Under pressure, where who goes by decisions is wrong."""
    given = list(one_by_one(150))
    told, _ = ran(given, policy=EXACT, pods=small(), kv_events=AT_ONCE)
    assert set(wrong(told)) == {0}
    assert sum(request.engine.cached_tokens for request in told)
    untold, _ = ran(given, policy=EXACT, pods=small())
    assert any(wrong(untold))


def test_each_of_several_pickers_knows_all():
    """Whoever decided before."""
    given = list(one_by_one(150))
    told, one = ran(given, policy=EXACT, pods=small(), kv_events=AT_ONCE, replicas=4)
    assert {request.replica for request in told} == {0, 1, 2, 3}
    assert set(wrong(told)) == {0}
    for picker in range(4):
        assert {each.state for each in subscriptions(one, picker)} == {StreamState.LIVE}


def test_nothing_is_known_before_it_is_told():
    """Another picker than the one that decided knows after the delay and not before."""
    known = []
    for pause_s in (4.0, 6.0):
        given = [
            arrival(0, prompt_tokens=1_000, blocks=(1,) * 15, block_tokens=64, session="a"),
            arrival(
                1,
                time_s=pause_s,
                prompt_tokens=1_000,
                blocks=(1,) * 15,
                block_tokens=64,
                session="b",
            ),
        ]
        requests, _ = ran(
            given,
            policy=EXACT,
            pods=1,
            kv_events=KVEventSettings(delay_s=5.0),
            replicas=2,
            seed=_seed_that_parts(given),
        )
        known.append(requests[1].predicted_cached_tokens)
    assert known == [0, 960]


def _seed_that_parts(given):
    """Under which the two reach different pickers."""
    for seed in range(1, 50):
        requests, _ = ran(given, policy="random", pods=1, replicas=2, seed=seed)
        if requests[0].replica != requests[1].replica:
            return seed
    raise AssertionError("all seeds send both to one picker")


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_what_is_lost_is_asked_for_again(delay_s):
    """A stream is live again and knows all, but for what its last frames said."""
    settings = KVEventSettings(delay_s=delay_s, loss=0.01)
    told, one = ran(list(arrivals(300)), policy=EXACT, pods=small(), kv_events=settings)
    assert len(told) == 300
    counts = [each.stream.counts for each in subscriptions(one)]
    assert sum(each.gaps for each in counts) > 0
    assert sum(each.replays for each in counts) > len(counts)
    assert sum(each.lost for each in counts) == 0
    assert all(each.stream.complete for each in subscriptions(one))


@pytest.mark.parametrize("seed", [1, 2])
def test_late_events_are_not_worse_than_none(seed):
    """What was decided counts until it is told: as many tokens are found as by decisions alone."""
    given = list(arrivals(150, rate=6.0))
    found = []
    for settings in ({}, {"kv_events": KVEventSettings(delay_s=8.0)}):
        requests, _ = ran(given, policy=EXACT, pods=small(), seed=seed, **settings)
        found.append(sum(request.engine.cached_tokens for request in requests))
    untold, late = found
    assert late >= 0.97 * untold


def test_losses_are_drawn_by_the_seed():
    settings = KVEventSettings(delay_s=0.01, loss=0.3)
    runs = []
    for seed in (1, 1, 2):
        _, one = ran(list(arrivals(50)), policy=EXACT, kv_events=settings, seed=seed)
        runs.append([each.stream.counts.gaps for each in subscriptions(one)])
    assert runs[0] == runs[1]


def test_a_process_that_is_gone_is_forgotten_and_the_next_is_heard():
    fault = Fault(kind=FaultKind.RESTART, at_s=2.0, pod=0, duration_s=1.0, factor=1.0)
    given = list(arrivals(200, rate=20.0))
    told, one = ran(given, policy=EXACT, pods=small(), kv_events=AT_ONCE, faults=[fault])
    assert len(told) == 200
    assert one.pods[0].restarts == 1
    assert [each.state for each in subscriptions(one)] == [StreamState.LIVE] * 3
    assert all(each.complete for each in subscriptions(one))


def test_a_picker_that_joins_late_asks_for_all():
    """And then knows what the others know."""
    given = list(one_by_one(60))
    away = Absence(replica=1, from_s=0.0, to_s=100.0)
    told, one = ran(
        given, policy=EXACT, pods=small(), kv_events=AT_ONCE, replicas=2, absences=(away,)
    )
    late = [at for at, request in enumerate(told) if request.replica == 1]
    assert late
    errors = wrong(told)
    assert {errors[at] for at in late} == {0}
    assert all(each.complete for each in subscriptions(one, 1))


def test_engines_serve_as_they_do_untold():
    """Step by step or not, to the last digit that rounding leaves."""
    given = list(arrivals(100))
    times = []
    for settings in ({}, {"kv_events": AT_ONCE}):
        requests, _ = ran(given, policy="round-robin", pods=small(), **settings)
        times.append([request.ended_at for request in requests])
    assert times[0] == pytest.approx(times[1], rel=1e-6)


def test_who_waited_for_tokens_in_vain_is_placed_without():
    """The index of decisions answers."""
    never = TokenizeSettings(seconds_per_token=1.0, timeout_s=0.01)
    told, one = ran(
        list(arrivals(30)), policy=EXACT, pods=small(), kv_events=AT_ONCE, tokenize=never
    )
    (index,) = one.pickers.policies[0].scheduler.indexes.hearing.values()
    assert index.measures().lookups["unknown"] >= 30
    assert any(request.predicted_cached_tokens for request in told)


def test_who_does_not_listen_is_not_told():
    _, one = ran(list(arrivals(10)), policy="default", kv_events=AT_ONCE)
    assert subscriptions(one) == []
    _, one = ran(list(arrivals(10)), policy="round-robin", kv_events=AT_ONCE)
    assert one.pickers._listeners == [None]
    assert cluster([], policy=EXACT).pickers._listeners == [None]


RANKS = "docs/examples/ranks.yaml"


def ranked(pods=2, ranks=3, blocks_total=2_000):
    made = kind(blocks_total=blocks_total)
    return (structs.replace(made, features=(Ranks(count=ranks),)),) * pods


def test_whoever_is_sent_to_a_rank_finds_there_what_was_predicted():
    """Before anything is told in between; who is sent to none is placed by a balancer that sees no prompt."""
    given = list(arrivals(300, rate=30.0, output=(20, 60)))
    told, one = ran(given, policy=RANKS, pods=ranked(), kv_events=AT_ONCE)
    placed = [request for request in told if request.route.decision.rank is not None]
    assert len(placed) > 50
    found = [request.engine.cached_tokens for request in placed]
    assert min(found) > 0
    short = [missed for missed in wrong(placed) if missed > 0]
    assert len(short) < len(placed) / 20
    assert len(subscriptions(one)) == 6
    assert {each.state for each in subscriptions(one)} == {StreamState.LIVE}
    blind, one = ran(given, policy=EXACT, pods=ranked(), kv_events=AT_ONCE)
    assert sum(request.engine.cached_tokens for request in blind) < sum(
        request.engine.cached_tokens for request in told
    )
    assert subscriptions(one) == [], "ranks are heard where a plugin places requests"


def test_a_pod_that_restarts_has_forgotten_in_each_rank():
    given = list(arrivals(200, rate=20.0))
    faults = (Fault(kind=FaultKind.RESTART, at_s=3.0, pod=0, duration_s=1.0, factor=1.0),)
    told, one = ran(given, policy=RANKS, pods=ranked(), kv_events=AT_ONCE, faults=faults)
    assert {request.fate for request in told} <= {Fate.COMPLETE, Fate.FAILED}
    assert {each.state for each in subscriptions(one)} == {StreamState.LIVE}
