"""A busy pool in a few hundred requests; prints the digest of the log of its decisions.

`python -m tests.decision_digest SEED PICKER...` prints a line for each picker: its name, how many
lines the log has, their digest.
"""

import hashlib
import json
import sys
from random import Random

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded, Tick
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.types import AdapterReport, ApiKind, EndpointMetrics
from epp.shell.operators.logs.decision_log import DecisionLog
from tests.builders import endpoint

REQUESTS = 400
ENDPOINTS = 12
ADAPTERS = ("base", "sql", "chat", "code", "math")
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: lora-capacity-filter
- type: prefix-cache-scorer
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: lora-affinity-scorer
- type: active-request-scorer
- type: token-load-scorer
- type: no-hit-lru-scorer
- type: PICKER
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: lora-capacity-filter
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: lora-affinity-scorer}
  - {pluginRef: active-request-scorer}
  - {pluginRef: token-load-scorer}
  - {pluginRef: no-hit-lru-scorer}
  - pluginRef: PICKER
"""


class Digest:
    """A logger that keeps nothing but the hash of its lines."""

    def __init__(self):
        self._hash = hashlib.sha256()
        self.lines = 0

    def debug(self, event, **line):
        self.lines += 1
        # In the order in which they come: it is part of the log.
        self._hash.update(json.dumps([event, line]).encode() + b"\n")

    info = debug

    def hexdigest(self):
        return self._hash.hexdigest()


def decision_digest(seed, picker):
    """(lines, digest) of the scenario under `seed`."""
    config = load_config(CONFIG.replace("PICKER", picker), "scenario", plugin_tables())
    scheduler = Scheduler(build_settings(config), seed=seed)
    digest = Digest()
    log = DecisionLog(digest, level="debug")
    traffic = Random("traffic")
    now = 0.0
    open_leases = []
    scheduler.take(PoolReplaced([endpoint(i) for i in range(ENDPOINTS)]), now)
    for number in range(REQUESTS):
        now += traffic.expovariate(50.0)
        if number % 10 == 0:
            _scrape(scheduler, traffic, now)
        if number % 100 == 99:
            # One leaves, another restarts.
            staying = [i for i in range(ENDPOINTS) if i != number // 100]
            scheduler.take(
                PoolReplaced(
                    [endpoint(i, incarnation=str(number if i == 7 else 0)) for i in staying]
                ),
                now,
            )
        while open_leases and traffic.random() < 0.5:
            lease = open_leases.pop(traffic.randrange(len(open_leases)))
            outcome = Outcome(
                ending=traffic.choice(list(Ending)), status=traffic.choice([200, 200, 503])
            )
            scheduler.take(RequestEnded(lease, outcome), now)
        scheduler.take(Tick(), now)
        request = _request(number, traffic)
        decided = scheduler.schedule(request, now)
        if isinstance(decided, Decision):
            open_leases.append(decided.lease)
            log.decided(decided)
        else:
            log.refused(decided, now, request)
    return digest.lines, digest.hexdigest()


def _scrape(scheduler, traffic, now):
    for slot, _ in scheduler.pool.endpoints():
        if traffic.random() < 0.8:
            found = EndpointMetrics(
                waiting_requests=traffic.randrange(8),
                running_requests=traffic.randrange(32),
                kv_cache_usage=traffic.random(),
                adapters=AdapterReport(
                    active=frozenset(traffic.sample(ADAPTERS, 2)), slots_max=traffic.choice([2, 4])
                ),
            )
            scheduler.take(PageScraped(slot, found), now)


def _request(number, traffic):
    conversation = traffic.randrange(40)
    prompt = f"conversation {conversation} ".encode() * (20 * (1 + traffic.randrange(20)))
    return InferenceRequest(
        request_id=str(number),
        api=ApiKind.CHAT,
        model=traffic.choice(ADAPTERS),
        prompts=(prompt,),
        prompt_tokens=len(prompt) // 4,
        priority=traffic.choice([-1, 0, 0]),
    )


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(name, *decision_digest(int(sys.argv[1]), name))
