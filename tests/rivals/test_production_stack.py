"""production-stack's prefix-aware and load-aware policies."""

from collections import Counter

import numpy as np
import pytest

from epp.core.decision.inputs import PoolReplaced
from homing_rivals.production_stack import LongestPrefix, RelativeLoad
from homing_rivals.radix_tree import RadixTreeSettings
from tests.builders import affinity, candidates, request
from tests.rivals.driven import Driven, text
from tests.sim.made import arrivals, ran


def best(plugin, matched, *, prompt_tokens=640, **columns):
    some = candidates(
        affinities={RadixTreeSettings.type_name: affinity(matched, 10)},
        matched_blocks=matched,
        total_blocks=10,
        **columns,
    )
    scores = plugin.score(request(prompt_tokens=prompt_tokens), some)
    return np.flatnonzero(scores == 1.0).tolist()


def test_the_longest_match_however_short_or_busy():
    """One block is enough; without any all are alike."""
    assert best(LongestPrefix(), [1, 0, 0], inflight_requests=[500, 0, 0]) == [0]
    assert best(LongestPrefix(), [4, 4, 3]) == [0, 1]
    assert best(LongestPrefix(), [0, 0, 0]) == [0, 1, 2]


def test_those_that_tie_are_drawn():
    """By the picker: neither in turn nor always the first."""
    pods = Driven("production-stack-prefix-aware", pods=3)
    went = [pods.ask(text(f"cold{at}", 64)) for at in range(60)]
    assert set(went) == {0, 1, 2}
    assert went[:6] != [0, 1, 2, 0, 1, 2]


def test_whatever_endpoint_is_left_decides_how_far_a_prompt_matches():
    """The longest match leaves with its holder; the rest of the trie stays."""
    pods = Driven("production-stack-prefix-aware", pods=2)
    longest = pods.ask(text("a", 64) + text("b", 64))
    settled = Driven("production-stack-prefix-aware", pods=2)
    assert settled.ask(text("a", 64) + text("b", 64)) == longest, "the same dice"
    endpoints = [endpoint for _, endpoint in pods.scheduler.pool.endpoints()]
    pods.scheduler.take(PoolReplaced([endpoints[1 - longest]]), pods.now)
    asked = text("a", 64) + text("b", 64)
    assert pods.send(asked, subset=(endpoints[1 - longest].address,)) == 1 - longest


def test_a_shared_system_prompt_sends_everybody_to_one_endpoint():
    """production-stack #957, #959; within 1.25 times the mean load it does not."""
    preamble = text("system", 256)
    went = {}
    for name in ("production-stack-prefix-aware", "production-stack-prefix-aware-fixed"):
        pods = Driven(name, pods=4)
        went[name] = Counter(pods.send(preamble + text(f"u{at}", 64)) for at in range(80))
    assert list(went["production-stack-prefix-aware"].values()) == [80]
    bounded = went["production-stack-prefix-aware-fixed"]
    assert len(bounded) == 4
    assert max(bounded.values()) <= 26, "ceil(1.25 * 80 / 4) and what came before"


def test_in_a_cluster_the_shared_prompt_costs_what_the_bound_saves():
    """Simulated pods, one group: the holder does all of it, and requests wait for it."""
    given = list(arrivals(240, rate=60.0, groups=1, blocks=(8, 8), output=(16, 32)))
    waited = {}
    for name in ("production-stack-prefix-aware", "production-stack-prefix-aware-fixed"):
        requests, _ = ran(given, policy=name)
        pods = {one.pod for one in requests}
        assert (len(pods) == 1) is not name.endswith("-fixed")
        waited[name] = np.mean([one.first_token_at - one.arrived_at for one in requests])
    assert waited["production-stack-prefix-aware"] > waited["production-stack-prefix-aware-fixed"]


def test_the_bound_counts_this_request_and_leaves_somebody():
    """ceil(1.25 * (3 + 1) / 2) = 3."""
    fixed = LongestPrefix(load_factor=1.25)
    assert best(fixed, [9, 0], inflight_requests=[2, 1]) == [0]
    assert best(fixed, [9, 0], inflight_requests=[3, 0]) == [1]
    assert best(fixed, [9, 9, 0], inflight_requests=[1, 0, 0]) == [1], "of equals the idle one"
    assert best(LongestPrefix(load_factor=1.0), [9, 0], inflight_requests=[1, 1]) == [0]


@pytest.mark.parametrize(
    ("inflight", "expected"), [([1, 0], [0]), ([2, 0], [0, 1]), ([12, 0], [0, 1]), ([12, 4], [0])]
)
def test_of_two_endpoints_only_an_idle_one_outweighs_a_whole_prompt_at_half_a_beta(
    inflight, expected
):
    """(R - mean) / max(1, mean) is 1 and -1 at most, so the two terms differ by 1 at most."""
    weighed = {"prompt_tokens": 640, "inflight_requests": inflight}
    assert best(RelativeLoad(beta=0.5), [10, 0], **weighed) == expected


def test_beta_exchanges_cache_for_load():
    """A whole match against a load that is 2 means apart."""
    load = {"inflight_requests": [2, 1, 0]}
    assert best(RelativeLoad(beta=0.4), [10, 0, 0], **load) == [0]
    assert best(RelativeLoad(beta=0.6), [10, 0, 0], **load) == [2]
    assert best(RelativeLoad(beta=0.4), [7, 0, 0], **load) == [2]
    assert best(RelativeLoad(beta=0.0), [1, 0, 0], **load) == [0]
    assert best(RelativeLoad(), [0, 0, 0], prompt_tokens=0, **load) == [2]


def test_load_aware_leaves_a_hot_prefix_that_kv_aware_would_pile_on():
    """production-stack #1035: the only holder is above the mean, so others become holders."""
    pods = Driven("production-stack-load-aware", pods=4)
    went = Counter(pods.send(text("hot", 256)) for _ in range(80))
    assert len(went) == 4
    assert max(went.values()) <= 40
