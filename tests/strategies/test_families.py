"""What every strategy keeps to, driven by the scheduler as the shells drive it."""

from random import Random

import numpy as np
import pytest

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.knowledge.inflight import Outcome
from epp.core.types import EndpointMetrics
from epp.strategies import FAMILIES, STRATEGIES, plugin_classes
from tests.builders import endpoint, request

STEPS = 300
PODS = 5


def scheduler_of(name, seed=1):
    text = STRATEGIES[name].config
    return Scheduler(build_settings(load_config(text, name, plugin_tables())), seed=seed)


def said(random):
    """A prompt that shares what comes first with some others, of 0 to 40 blocks of 64 tokens."""
    preamble = random.randrange(3)
    turn = random.randrange(4)
    shared = f"system {preamble} " * 60 + f"user {turn} " * (10 * turn)
    own = f"question {random.randrange(30)} " * random.randrange(120)
    return (shared + own).encode()


def run(name, seed=1, dice=2):
    """Hostile days in little: pods come, go and restart; requests end well, badly or in silence.

    Returns the scheduler and where each request went.
    """
    scheduler = scheduler_of(name, seed)
    random = Random(f"{dice}")
    ready = list(range(PODS))
    scheduler.replace([endpoint(number) for number in ready], 0.0)
    leases = []
    went = []
    now = 0.0
    for step in range(STEPS):
        now += random.expovariate(20.0)
        asked = request(
            request_id=f"{step}",
            prompts=(said(random),),
            prompt_tokens=random.randrange(4000),
            session_id=random.choice(["", "s1", "s2", "s3"]),
            headers=random.choice([{}, {"x-user-id": "u1"}, {"x-user-id": "u2"}]),
            output_tokens_max=random.choice([None, 16, 4096]),
        )
        decision = scheduler.schedule(asked, now)
        if isinstance(decision, Decision):
            leases.append(decision.lease)
            went.append(decision.endpoint.endpoint_id)
        else:
            went.append("")
        if leases and random.random() < 0.9:
            lease = leases.pop(random.randrange(len(leases)))
            scheduler.first_output(lease, now)
            scheduler.complete(lease, Outcome(status=random.choice([200, 500, None])), now)
        if random.random() < 0.05:
            number = random.randrange(PODS)
            ready = [n for n in ready if n != number] if number in ready else [*ready, number]
            scheduler.replace([endpoint(n) for n in ready], now)
        for slot, _ in list(scheduler.pool.endpoints()):
            scheduler.observe(
                slot,
                EndpointMetrics(
                    waiting_requests=random.randrange(6),
                    running_requests=random.randrange(20),
                    kv_cache_usage=random.random(),
                ),
                now,
            )
        if random.random() < 0.2:
            scheduler.tick(now)
    for lease in leases:
        scheduler.complete(lease, Outcome(), now)
    return scheduler, went


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_decides_whatever_happens(name):
    """No plugin fails, nobody is refused while a pod is there, and the same dice fall the same."""
    scheduler, went = run(name)
    assert list(scheduler.failures) == []
    assert len(went) == STEPS
    assert all(went)
    assert scheduler.ledger.open_leases == 0
    assert run(name)[1] == went


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_endpoint_that_left_is_forgotten(name):
    """What comes into its slot is a stranger: it has nothing that the other had."""
    scheduler, _ = run(name)
    now = 1_000.0
    scheduler.replace([endpoint(100 + number) for number in range(PODS)], now)
    for index in scheduler.indexes.values():
        known = index.match(request(prompts=(said(Random(5)),)), len(scheduler.pool.columns), now)
        assert len(set(known.matched.tolist())) == 1, "all are alike"
        for name_of_column, column in known.columns.items():
            assert len(np.unique(column)) == 1, name_of_column


def test_names_are_told_apart():
    """Strategies and plugins: no family hides another's."""
    names = [strategy.name for family in FAMILIES for strategy in family.STRATEGIES]
    assert len(names) == len(set(names))
    for kind in ("FILTERS", "SCORERS", "PICKERS", "INDEXES"):
        listed = [plugin.type_name for family in FAMILIES for plugin in getattr(family, kind, ())]
        assert len(listed) == len(set(listed)) == len(plugin_classes(kind))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_says_whose_idea_it_is(name):
    """In a sentence for tables; names are as on a command line."""
    strategy = STRATEGIES[name]
    assert strategy.idea.endswith(".")
    assert name == name.lower()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
