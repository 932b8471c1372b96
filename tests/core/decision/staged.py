"""A small pool with roles, for tests of stages."""

from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.profile import NamedFilter, SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Always, Stages
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.types import ApiKind, EndpointMetrics
from epp.plugins.filters import DecodeRole, EncodeRole, PrefillRole
from epp.plugins.pickers import MaxScore
from epp.plugins.scorers import ActiveRequests, PrefixCache
from tests.builders import PREFIX, endpoint, request

ROLE = "llm-d.ai/role"


def profile(name, *filters, scorers=(), picker=None):
    return SchedulingProfile(
        name=name,
        filters=tuple(NamedFilter(one.type_name, one) for one in filters),
        scorers=tuple(WeightedScorer(one.type_name, one, 1.0) for one in scorers),
        picker_name="picker",
        picker=picker or MaxScore(),
    )


DECODE = profile("decode", DecodeRole(), scorers=[PrefixCache()])
PREFILL = profile("prefill", PrefillRole(), scorers=[PrefixCache()])
ENCODE = profile("encode", EncodeRole())
BALANCED = profile("decode", DecodeRole(), scorers=[ActiveRequests()])
BOTH = Stages(decode=DECODE, prefill=PREFILL, prefill_if=Always())


def pool_of(roles, stages=BOTH, *, seed=1, indexes=None, **settings):
    """Return a scheduler of one endpoint for each of `roles`, in this order of slots."""
    indexes = {PREFIX: PrefixIndexSettings()} if indexes is None else indexes
    prefix = PREFIX if PREFIX in indexes else ""
    made = Scheduler(
        SchedulerSettings(
            stages=stages, indexes=indexes, prefix=prefix, beliefs=tuple(indexes), **settings
        ),
        seed=seed,
    )
    made.take(PoolReplaced([of_role(at, role) for at, role in enumerate(roles)]), 0.0)
    scrape(made, 0.0)
    return made


def of_role(number, role, **fields):
    return endpoint(number, labels={} if role is None else {ROLE: role}, **fields)


def scrape(scheduler, now, **metrics):
    """Apply an idle page of every endpoint."""
    given = {"waiting_requests": 0.0, "running_requests": 0.0, "kv_cache_usage": 0.0, **metrics}
    for slot, _ in scheduler.pool.endpoints():
        scheduler.take(PageScraped(slot, EndpointMetrics(**given)), now)


def chat(tokens=512, *, text=b"a", **fields):
    """Return a chat with `tokens` prompt tokens, all equal for equal `text`."""
    prompt = (text * (4 * tokens))[: 4 * tokens]
    return request(
        **({"api": ApiKind.CHAT, "prompts": (prompt,), "prompt_tokens": tokens} | fields)
    )


def sums(scheduler):
    """Return what the requests in flight add up to, over all endpoints."""
    columns = scheduler.pool.columns
    n = len(columns)
    moving = float(columns.receiving_tokens[:n].sum() + columns.sending_tokens[:n].sum())
    assert scheduler.ledger.open_leases or moving == 0.0
    return (
        int(columns.inflight_requests[:n].sum()),
        int(columns.inflight_context_tokens[:n].sum()),
        round(float(columns.prefill_backlog_tokens[:n].sum()), 6),
        scheduler.ledger.open_leases,
    )
