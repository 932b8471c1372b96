"""A strategy with pods under it, driven by hand."""

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.inflight import Outcome
from epp.core.types import EndpointMetrics
from sim.cluster.built_in import configurations
from tests.builders import endpoint, request


def settings_of(name):
    """Return the settings of the strategy `name`; `name` may also be a configuration's text."""
    text = configurations().get(name, name)
    return build_settings(load_config(text, "made", plugin_tables()))


def scheduler_of(name, seed=1):
    """Return a scheduler without endpoints for the strategy `name`, or for a configuration."""
    return Scheduler(settings_of(name), seed=seed)


class Driven:
    """The strategy `name`, or a configuration, over `pods` endpoints that were scraped once.

    Time stands still unless a test moves `now`.
    """

    def __init__(self, name, pods=2, seed=1):
        self.scheduler = scheduler_of(name, seed)
        self.now = 0.0
        self.leases = []
        self.sent = 0
        self.scheduler.take(PoolReplaced([endpoint(number) for number in range(pods)]), self.now)
        for slot in range(pods):
            self.report(slot)

    def report(self, slot, waiting=0.0, running=0.0, kv=0.0):
        """Report a scrape of the endpoint in `slot`."""
        metrics = EndpointMetrics(
            waiting_requests=waiting, running_requests=running, kv_cache_usage=kv
        )
        self.scheduler.take(PageScraped(slot, metrics), self.now)

    def send(self, text, **fields):
        """Send a prompt of `text` and return its slot; the request stays in flight."""
        self.sent += 1
        prompt = text.encode()
        given = {"prompts": (prompt,), "prompt_tokens": len(prompt) // 4} | fields
        decision = self.scheduler.schedule(request(request_id=f"{self.sent}", **given), self.now)
        self.leases.append(decision.lease)
        return decision.lease.slot

    def end(self):
        """End all requests in flight with status 200."""
        for lease in self.leases:
            self.scheduler.take(RequestEnded(lease, Outcome(status=200)), self.now)
        self.leases.clear()

    def ask(self, text, **fields):
        """Send a prompt of `text`, end it at once with status 200, and return its slot."""
        slot = self.send(text, **fields)
        lease = self.leases.pop()
        self.scheduler.take(RequestEnded(lease, Outcome(status=200)), self.now)
        return slot

    def index(self, type_name):
        """Return the affinity index of that type."""
        return self.scheduler.indexes[type_name]


def text(name, tokens):
    """Return `tokens` tokens of text that shares no block with the text of another name."""
    words = " ".join(f"{name}{at}" for at in range(tokens))
    return words[: 4 * tokens].ljust(4 * tokens)
