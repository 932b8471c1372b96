"""AIBrix's prefix router: its guards by hand, and what it does under load."""

from collections import Counter

import numpy as np
import pytest

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.inflight import Outcome
from epp.plugins.strategy import config_of, step
from homing_rivals.aibrix import GuardedPrefix
from sim.cluster.policies import PolicySource
from tests.builders import affinity, candidates, endpoint, request
from tests.rivals.driven import scheduler_of
from tests.rivals.simulated import first_tokens_s, hit_rate, simulated
from tests.sim.made import arrivals, kind

INDEX = "routed-blocks-producer"
PREFIX_ONLY = config_of(
    step("guarded-prefix-scorer", imbalanceRequests=1_000_000, sigmaFactor=1_000_000.0)
)


def chosen(matched, loads, total=100, **parameters):
    pool = candidates(inflight_requests=loads, affinities={INDEX: affinity(matched, total)})
    return np.flatnonzero(GuardedPrefix(**parameters).score(request(), pool)).tolist()


def test_most_of_the_prompt_wins_then_the_fewest_requests():
    """Whole percent: 501 and 509 of 1,000 blocks are both 50 %."""
    assert chosen([50, 60, 0], [1, 1, 1]) == [1]
    assert chosen([501, 509, 0], [0, 1, 1], total=1_000) == [0]
    assert chosen([509, 510, 0], [1, 1, 1], total=1_000) == [1]
    assert chosen([60, 60, 0], [1, 1, 1]) == [0, 1]


def test_without_a_match_the_fewest_requests_win():
    """Also for a prompt without a block."""
    assert chosen([0, 0, 0], [2, 1, 1]) == [1, 2]
    assert chosen([0, 0], [1, 0], total=0) == [1]


@pytest.mark.parametrize(("load", "home"), [(8, True), (9, False)])
def test_the_imbalance_guard_is_strict(load, home):
    """A spread of 8 is borne, 9 is not; with two endpoints sigma does not bind at 1.

    Loads 0 and 8: mean 4, sigma of the sample 5.7.
    """
    assert chosen([100, 0], [load, 0]) == ([0] if home else [1])


def test_who_is_more_than_a_sigma_above_the_mean_is_passed_over():
    """Loads 6, 2, 2, 2: mean 3, sigma of the sample 2; 6 > 5. With a factor of 2: 6 <= 7."""
    assert chosen([100, 50, 0, 0], [6, 2, 2, 2]) == [1]
    assert chosen([100, 50, 0, 0], [6, 2, 2, 2], sigma_factor=2.0) == [0]
    # Mean 3.25, sigma of the sample 3.78; that of the whole, 3.27, would not do.
    assert chosen([100, 50, 0, 0], [7, 6, 0, 0]) == [0]
    assert chosen([100, 50], [3, 3]) == [0], "the bound is inclusive"
    assert chosen([100], [3]) == [0]


def families(count):
    """Of ten families with long prompts in common and questions of their own; one asks most."""
    for number in range(count):
        family = 0 if number % 4 else number // 4 % 10
        prompt = f"family {family:02} " * 300 + f"question {number} " * 20
        yield request(request_id=f"{number}", prompts=(prompt.encode(),))


def spread(scheduler):
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    leases = []
    most = 0
    for asked in families(120):
        leases.append(scheduler.schedule(asked, 0.0).lease)
        if len(leases) > 40:
            scheduler.take(RequestEnded(leases.pop(0), Outcome(status=200)), 0.0)
        counts = Counter(lease.slot for lease in leases)
        most = max(most, max(counts.values()) - min(counts.get(slot, 0) for slot in range(4)))
    return most


def test_the_other_index_knows_the_same_heads():
    """AIBrix has a table and a tree; without pressure they decide alike."""
    assert spread(scheduler_of("aibrix-prefix-tree")) == spread(scheduler_of("aibrix-prefix"))


def test_prefix_without_a_load_term_piles_up_what_the_guard_spreads():
    """AIBrix #842: prefix alone timed out many requests, prefix with load was best."""
    guarded = spread(scheduler_of("aibrix-prefix"))
    config = load_config(PREFIX_ONLY, "prefix only", plugin_tables())
    alone = spread(Scheduler(build_settings(config), seed=1))
    assert guarded <= 8 + 1
    assert alone > 2 * guarded


def test_prefix_without_a_load_term_keeps_clients_waiting_for_seconds():
    """The same report in the simulator: two families with 8,000 tokens in common, small batches."""

    def run(policy):
        families = arrivals(250, rate=30.0, groups=2, blocks=(125, 125), output=(64, 128))
        return simulated(families, policy, pods=(kind(max_num_seqs=8),) * 4)

    alone = run(PolicySource(name="prefix-only", text=PREFIX_ONLY, source="prefix only"))
    guarded = run("aibrix-prefix")
    assert hit_rate(alone) > hit_rate(guarded)
    tenth = len(alone) // 10
    assert first_tokens_s(alone)[-tenth] > 5 * first_tokens_s(guarded)[-tenth]
