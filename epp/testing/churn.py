"""Short random runs of a scheduler in which endpoints come and go, driven as the picker and the
simulator drive it.

Endpoints leave and join again. Requests end well, with an error or without any notice. Engines
report random values.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from epp.core.decision.inputs import OutputStarted, PageScraped, PoolReplaced, RequestEnded, Tick
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.inflight import Lease, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.session_tokens import SessionTokens
from epp.core.types import EndpointMetrics, Seconds
from epp.testing.builders import endpoint, request

PODS: Final = 5
_STEPS: Final = 300
_STATUSES: Final = (200, 500, None)
_USERS: Final[tuple[Mapping[str, str], ...]] = ({}, {"x-user-id": "u1"}, {"x-user-id": "u2"})


class Churn(Struct, frozen=True, kw_only=True):
    """The result of a random run of a scheduler in which all requests have ended."""

    scheduler: Scheduler
    went: tuple[str, ...]
    """Id of the endpoint to which each request was routed, in order; "" for a refused request."""
    ended_s: Seconds


def churn(
    settings: SchedulerSettings,
    *,
    seed: int = 1,
    dice: int = 2,
    steps: int = _STEPS,
    labels: Sequence[Mapping[str, str]] = (),
    headers: Sequence[Mapping[str, str]] = (),
) -> Churn:
    """Send `steps` requests through a new scheduler with `settings`, and return the result.

    `dice` seeds the random events of the run, and `seed` the scheduler. `labels` are assigned to
    the endpoints round robin. Each request gets one of `headers`, or of those that every run uses,
    at random.
    """
    settings = replace(settings, session_tokens=SessionTokens((b"of this test",)))
    scheduler = Scheduler(settings, seed=seed)
    random = Random(f"{dice}")  # noqa: S311  not for security
    endpoints = [
        endpoint(number, labels=dict(labels[number % len(labels)]) if labels else {})
        for number in range(PODS)
    ]
    ready = list(range(PODS))
    scheduler.take(PoolReplaced(endpoints), 0.0)
    leases: list[Lease] = []
    went: list[str] = []
    now = 0.0
    for step in range(steps):
        now += random.expovariate(20.0)
        decision = scheduler.schedule(_asked(step, random, [*_USERS, *headers]), now)
        if isinstance(decision, Decision):
            leases.append(decision.lease)
            went.append(decision.endpoint.endpoint_id)
        else:
            went.append("")
        if leases and random.random() < 0.9:
            lease = leases.pop(random.randrange(len(leases)))
            scheduler.take(OutputStarted(lease), now)
            scheduler.take(RequestEnded(lease, Outcome(status=random.choice(_STATUSES))), now)
        if random.random() < 0.05:
            number = random.randrange(PODS)
            ready = [n for n in ready if n != number] if number in ready else [*ready, number]
            ready = ready or [number]
            scheduler.take(PoolReplaced([endpoints[n] for n in ready]), now)
        for slot, _ in list(scheduler.pool.endpoints()):
            scheduler.take(PageScraped(slot, _metrics(random)), now)
        if random.random() < 0.2:
            scheduler.take(Tick(), now)
    for lease in leases:
        scheduler.take(RequestEnded(lease, Outcome()), now)
    return Churn(scheduler=scheduler, went=tuple(went), ended_s=now)


def inherited_column(after: Churn) -> str:
    """Replace all endpoints by new ones. Return the index and the column that differ between the
    new ones, as "index, column", or "" if none does.

    The new endpoints occupy the slots of the old ones and must not inherit anything from them.
    """
    scheduler, now = after.scheduler, after.ended_s + 1_000.0
    scheduler.take(PoolReplaced([endpoint(100 + number) for number in range(PODS)]), now)
    for name, index in scheduler.indexes.items():
        asked = request(prompts=(prompt(Random(5)),), session_id="s1")  # noqa: S311  as above
        known = index.match(asked, len(scheduler.pool.columns), now)
        columns = {"matched": known.matched, **known.columns}
        for column, values in columns.items():
            told = values.astype(float)
            if not ((told == told[0]) | ((told != told) & (told[0] != told[0]))).all():  # noqa: PLR0124  NaN
                return f"{name}, {column}"
    return ""


def prompt(random: Random) -> bytes:
    """Return a random prompt of 2 to 8 full blocks of 64 tokens, whose beginning equals that of
    some other prompts.
    """
    preamble = random.randrange(3)
    turn = random.randrange(4)
    shared = f"system {preamble} " * 60 + f"user {turn} " * (10 * turn)
    own = f"question {random.randrange(30)} " * random.randrange(120)
    return (shared + own).encode()


def _asked(step: int, random: Random, headers: Sequence[Mapping[str, str]]) -> InferenceRequest:
    return request(
        request_id=f"{step}",
        prompts=(prompt(random),),
        prompt_tokens=random.randrange(4_000),
        session_id=random.choice(["", "s1", "s2", "s3"]),
        headers=dict(random.choice(headers)),
        output_tokens_max=random.choice([None, 16, 4_096]),
    )


def _metrics(random: Random) -> EndpointMetrics:
    return EndpointMetrics(
        waiting_requests=float(random.randrange(6)),
        running_requests=float(random.randrange(20)),
        kv_cache_usage=random.random(),
    )
