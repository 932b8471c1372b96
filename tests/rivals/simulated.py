"""Small simulations of a strategy, with prompts in blocks of the sizes that its indexes look for."""

from tests.sim.made import ran


def simulated(given, policy, **fields):
    """Run `given` through `policy`, a name or a source; the requests in order of arrival."""
    requests, _ = ran(given, policy=policy, **fields)
    return requests


def hit_rate(requests):
    """Cached share of all prompt tokens."""
    cached = sum(one.engine.cached_tokens for one in requests)
    return cached / sum(one.arrival.prompt_tokens for one in requests)


def first_tokens_s(requests):
    """Time to the first token of each, ascending."""
    return sorted(one.first_token_at - one.arrived_at for one in requests)
