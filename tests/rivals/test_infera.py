"""Infera's cost, and what its decayed misses are for."""

from collections import Counter
from random import Random

import numpy as np

from epp.core.decision.inputs import OutputStarted, PoolReplaced, RequestEnded
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Outcome
from homing_rivals.infera import DecayedMisses
from tests.builders import candidates, endpoint, request
from tests.rivals.driven import scheduler_of

BLOCK_BYTES = 256


def scores(plugin=None, *, matched, active, missed):
    columns = {"active_blocks": active, "new_blocks": active, "recent_miss_blocks": missed}
    known = Affinity(
        np.array(matched, dtype=np.int64),
        10,
        {name: np.array(column, dtype=np.float64) for name, column in columns.items()},
    )
    some = candidates(len(matched), affinities={"block-load-producer": known})
    return (plugin or DecayedMisses()).score(request(), some).tolist()


def test_cost_adds_up_blocks():
    """10 - 4 + 5 + 1 = 12; 10 + 0 + 1 = 11; 10 + 0 + 3 = 13."""
    assert scores(matched=[4, 0, 0], active=[5, 0, 0], missed=[1, 1, 3]) == [0.5, 1.0, 0.0]


def test_of_equals_the_one_that_runs_less():
    """10 - 4 + 4 against 10."""
    assert scores(matched=[4, 0], active=[4, 0], missed=[0, 0]) == [0.0, 1.0]


def test_the_weight_is_of_misses_alone():
    """20 for pods that only prefill."""
    heavy = DecayedMisses(overlap_weight=20.0)
    assert scores(heavy, matched=[1, 0], active=[15, 0], missed=[0, 0]) == [1.0, 0.0]


def paced(name, requests=80):
    """Agents whose requests share a preamble, each over before the next comes."""
    scheduler = scheduler_of(name)
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1)]), 0.0)
    random = Random(5)
    went = Counter()
    for at in range(requests):
        text = b"tools" * 256 + random.randbytes(8 * BLOCK_BYTES)
        asked = request(prompts=(text,), prompt_tokens=len(text) // 4)
        decision = scheduler.schedule(asked, float(at))
        went[decision.endpoint.name] += 1
        scheduler.take(OutputStarted(decision.lease), at + 0.1)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), at + 0.5)
    return sorted(went.values())


def test_paced_traffic_with_a_common_head_no_longer_stays_on_one_endpoint():
    """A load term of what is in flight is 0 whenever one asks; decayed misses are not."""
    least, most = paced("infera")
    assert least + most == 80
    assert least >= 30


def test_without_its_index_everybody_is_unknown():
    """Another configuration declared another one."""
    assert DecayedMisses().score(request(), candidates(2)) is None
