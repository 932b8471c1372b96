"""What llm-d and GIE ship, told apart by what their indexes believe."""

import pytest

from epp.core.decision.inputs import PoolReplaced
from epp.core.decision.scheduler import Decision
from homing_rivals.llm_d import Gate
from homing_rivals.routed_blocks import RoutedBlocksSettings
from sim.cluster.built_in import configurations
from sim.cluster.simulated_request import Fate
from sim.experiments.leaderboard.cases import CASES
from tests.builders import candidates, endpoint, request
from tests.rivals.driven import Driven, scheduler_of, settings_of
from tests.sim.made import arrival, cluster, ran

NAMES = [name for name in configurations() if name.startswith(("llm-d", "gie"))]


def went(scheduler, prompt, now):
    decision = scheduler.schedule(request(prompts=(prompt,), prompt_tokens=len(prompt) // 4), now)
    assert isinstance(decision, Decision)
    return decision


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_goes_where_its_head_went(name):
    """3 for the prefix outweighs nothing else: engines report nothing here."""
    scheduler = scheduler_of(name)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    first = went(scheduler, b"a" * 4_096, 0.0)
    for turn in range(1, 5):
        again = went(scheduler, b"a" * 4_096 + b"b" * 512 * turn, float(turn))
        assert again.endpoint == first.endpoint
        assert again.leg.matched_blocks > 0


@pytest.mark.parametrize(("name", "blocks"), [("gie-v1", 256), ("llm-d-approximate", 1_025)])
def test_blocks_are_those_of_the_original(name, blocks):
    """64 characters, 256 of them at most; or 256 bytes, with the partial one at the end."""
    scheduler = scheduler_of(name)
    scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    assert went(scheduler, b"a" * (256 * 1_024 + 1), 0.0).leg.total_blocks == blocks


@pytest.mark.parametrize(
    ("name", "weights"),
    [("llm-d-approximate-lora", (3, 2, 2, 1)), ("gie-v1-lora", (1, 1, 1, 1))],
)
def test_adapters_count_as_their_project_ships_it(name, weights):
    """Over the same index as without them."""
    settings = settings_of(name)
    assert tuple(scorer.weight for scorer in settings.profile.scorers) == weights
    assert settings.profile.scorers[-1].name == "lora-affinity-scorer"
    assert settings.indexes == settings_of(name.removesuffix("-lora")).indexes


def test_believed_hits_vanish_when_heads_go_first():
    """Under the same pressure the repaired index still knows the head of each prompt.

    Every later block becomes unreachable. One pod, prompts of 256 blocks each in an
    index of 600: three in turn push each other's heads out before they come again.
    """
    prompts = [bytes([65 + number]) * 64 * 256 for number in range(3)]
    believed = {}
    for fixed in (False, True):
        index = RoutedBlocksSettings(
            block_tokens=16,
            blocks_per_request_max=256,
            blocks_per_endpoint_max=600,
            contiguous=fixed,
            tail_first=fixed,
        ).open()
        found = 0
        for turn in range(12):
            asked = request(prompts=(prompts[turn % 3],))
            found += int(index.match(asked, 1, 0.0).matched[0])
            index.record(asked, 0, 0.0)
        believed[fixed] = found
    assert believed == {False: 0, True: 9 * (600 - 2 * 256)}


def test_a_cold_prompt_goes_to_the_pod_that_got_one_the_longest_ago():
    """As shipped: pods that never got one come first, in the order of the list."""
    scheduler = scheduler_of("llm-d-no-hit-lru")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    names = [went(scheduler, b"%d" % at * 1_024, 0.0).endpoint.name for at in range(8)]
    assert names == [f"pod-{number}" for number in (0, 1, 2, 3) * 2]


@pytest.mark.parametrize("name", ["gie-v1", "gie-v1-fixed", "llm-d-approximate"])
def test_it_replays(name):
    """The simulator makes chains of the block size that the index asks for."""
    blocks = tuple(range(1, 21))
    given = [
        arrival(at, time_s=0.5 * at, prompt_tokens=1_280, blocks=blocks, block_tokens=64)
        for at in range(6)
    ]
    requests, _ = ran(given, policy=name, pods=3)
    assert len({one.pod.number for one in requests}) == 1
    assert (
        requests[-1].route.decision.leg.matched_blocks
        == requests[-1].route.decision.leg.total_blocks
    )


@pytest.mark.parametrize(
    ("waiting", "kv", "age_s", "held"),
    [
        ([5.0, 5.0], [0.0, 0.0], [0.1, 0.1], True),
        ([4.0, 5.0], [0.0, 0.0], [0.1, 0.1], False),
        ([0.0, 20.0], [0.0, 0.0], [0.1, 0.1], True),
        ([0.0, 0.0], [0.8, 0.8], [0.1, 0.1], True),
        ([0.0, 0.0], [0.0, 0.0], [2.0, 2.0], True),
        ([0.0, 0.0], [0.0, 0.0], [2.0, 0.1], False),
    ],
)
def test_requests_wait_while_the_mean_of_the_pool_is_full(waiting, kv, age_s, held):
    """One full endpoint hides behind idle ones, and holds up an idle one if it is full enough."""
    some = candidates(2, waiting_requests=waiting, kv_cache_usage=kv, metrics_age_s=age_s)
    assert Gate().holds(request(), some) is held
    assert Gate().keep(request(), some).all()


def test_a_number_of_requests_is_placed_between_two_pages():
    """As many as llm-d-router places in 50 ms; the next page lets more go."""
    driven = Driven("llm-d-gate")
    for number in range(50):
        assert not driven.scheduler.admission.holds(request(prompt_tokens=1), 0.0)
        driven.send(f"{number}")
    assert driven.scheduler.admission.holds(request(prompt_tokens=1), 0.0)
    driven.report(0, running=25.0)
    assert not driven.scheduler.admission.holds(request(prompt_tokens=1), 0.0)


def test_a_burst_overshoots_the_gate_and_is_served_in_order():
    """The pages that would close the gate come too late for the requests of a burst."""
    given = [arrival(number, time_s=0.0, prompt_tokens=4_000) for number in range(300)]
    requests, order = [], []
    one = cluster(given, policy="llm-d-gate", pods=2, ended=requests.append)
    one.gateway.decided = lambda request: order.append(request.sequence)
    one.run()
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    assert order == sorted(order)
    sent_at_once = sum(request.submitted_at < 0.1 for request in requests)
    assert sent_at_once == 50
    assert max(request.submitted_at for request in requests) > 1.0


def test_a_request_waits_at_the_gate_for_a_minute_at_most():
    """The gate is closed for good, because no page is ever read; clients that never give up end too."""
    given = [arrival(number, time_s=0.0, prompt_tokens=4_000) for number in range(60)]
    requests = []
    case = CASES["scrape-none-held"].cluster()
    one = cluster(
        given,
        policy="llm-d-gate",
        pods=2,
        ended=requests.append,
        scrape_troubles=case.scrape_troubles,
    )
    one.run()
    assert len(requests) == 60
    refused = [request for request in requests if request.fate is not Fate.COMPLETE]
    assert len(refused) >= 10
    assert [request.ended_at for request in refused] == pytest.approx(
        [60.0] * len(refused), abs=0.1
    )
