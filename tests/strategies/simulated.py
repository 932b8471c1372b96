"""Small simulations of a strategy, with prompts in blocks of the sizes that its indexes look for."""

from sim.cluster.cluster import Cluster, ClusterSettings
from sim.cluster.policies import policy_source
from sim.traces.prompts import request_of
from tests.sim.made import kind


def simulated(given, policy, *, pods=4, seed=1, kinds=None, **settings):
    """Run `given` through `policy`, a name or a source; the requests in order of arrival."""
    made = ClusterSettings(pods=kinds or (kind(),) * pods, **settings)
    source = policy_source(policy) if isinstance(policy, str) else policy
    opener = source.opener(made.refresh_interval_s, made.prefill_tokens_per_s)
    indexes = opener(seed).settings.indexes.values()
    sizes = tuple(sorted({at.block_tokens for at in indexes if hasattr(at, "block_tokens")}))
    requests = []
    Cluster(
        made,
        opener,
        lambda one, hashes: request_of(one, sizes, hashes),
        given,
        seed=seed,
        ended=requests.append,
    ).run()
    return sorted(requests, key=lambda request: request.sequence)


def hit_rate(requests):
    """Cached share of all prompt tokens."""
    cached = sum(one.engine.cached_tokens for one in requests)
    return cached / sum(one.arrival.prompt_tokens for one in requests)


def first_tokens_s(requests):
    """Time to the first token of each, ascending."""
    return sorted(one.first_token_at - one.arrived_at for one in requests)
