"""Requests that may be shed are refused at random, the more the higher the pool is loaded."""

import pytest
from msgspec import structs

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.decision import Decision
from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.probabilistic_admitter import ProbabilisticAdmitter
from epp.core.decision.scheduler import Scheduler
from epp.core.types import EndpointMetrics, RefusalReason
from tests.builders import endpoint, request

DEFAULTS = build_settings(default_config(plugin_tables()))
REQUESTS = 400


def scheduler(*pages, seed=1, **parameters):
    """Return a scheduler with one endpoint for each of `pages`; None is an endpoint without one."""
    settings = structs.replace(DEFAULTS, admitter=ProbabilisticAdmitter(**parameters))
    made = Scheduler(settings, seed=seed)
    made.take(PoolReplaced([endpoint(at) for at in range(len(pages))]), 0.0)
    for slot, page in enumerate(pages):
        if page is not None:
            made.take(PageScraped(slot, page), 0.0)
    return made


def busy(waiting=0.0, kv=0.0):
    return EndpointMetrics(waiting_requests=waiting, running_requests=1.0, kv_cache_usage=kv)


def admitted(made, priority=-1):
    """Return the numbers of the requests that are placed, of `REQUESTS`."""
    placed = []
    for number in range(REQUESTS):
        result = made.schedule(request(request_id=f"{number}", priority=priority), 0.1)
        if isinstance(result, Decision):
            placed.append(number)
        else:
            assert (result.reason, result.status) == (RefusalReason.SATURATED, 429)
    return placed


@pytest.mark.parametrize(
    ("load", "share"), [(0.0, 0.0), (0.15, 0.023), (0.2, 0.096), (0.3, 0.729), (0.35, 1.0), (9, 1)]
)
def test_the_refused_share_is_that_of_the_field(load, share):
    assert ProbabilisticAdmitter().refused_share(load) == pytest.approx(share, abs=0.001)


def test_an_extreme_power_does_not_overflow():
    assert ProbabilisticAdmitter(power=1e9).refused_share(1e9) == 1.0
    assert ProbabilisticAdmitter(power=1e9).refused_share(1e-9) == 0.0


def test_the_share_of_refusals_follows_the_load():
    """The scarcer one of queue and cache counts, and then the mean over the endpoints."""
    made = scheduler(busy(waiting=1.0), busy(kv=0.32))
    assert 1 - len(admitted(made)) / REQUESTS == pytest.approx(0.729, abs=0.06)


def test_requests_that_must_not_be_shed_are_always_admitted():
    made = scheduler(busy(waiting=50.0))
    assert len(admitted(made, priority=0)) == REQUESTS


def test_an_endpoint_without_a_page_counts_as_loaded():
    """Half of two endpoints is enough for a share of 1."""
    assert admitted(scheduler(busy(), None)) == []


def test_an_idle_pool_refuses_nothing():
    assert len(admitted(scheduler(busy()))) == REQUESTS


def test_the_same_seed_refuses_the_same_requests():
    first, again, other = (admitted(scheduler(busy(waiting=1.4), seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_refusal_says_how_loaded_the_pool_is():
    made = scheduler(busy(waiting=5.0))
    refusal = made.schedule(request(priority=-1), 0.1)
    assert refusal.message.startswith("the pool is loaded to 1.00, at which 100% of the requests")


def test_stages_are_judged_too():
    """By the endpoints of all roles."""
    settings = structs.replace(
        DEFAULTS,
        admitter=ProbabilisticAdmitter(),
        stages=structs.replace(DEFAULTS.stages, prefill=DEFAULTS.profile),
    )
    made = Scheduler(settings, seed=1)
    made.take(PoolReplaced([endpoint(0)]), 0.0)
    made.take(PageScraped(0, busy(waiting=5.0)), 0.0)
    assert admitted(made) == []
