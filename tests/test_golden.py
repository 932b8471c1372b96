"""Scripts of verbs with the transcript that they must give, in tests/golden/*.txt.

A script is blocks of commands, each followed by `----` and what the scheduler did. After a change
of behaviour `UPDATE_GOLDEN=1 pytest tests/test_golden.py` writes the transcripts anew; commit the
difference only if it can be explained.

    pool a b c                       the pool is now these endpoints
    profile queue-scorer=2 ...       scorers with weights; also filter and picker types, `lease-ttl=`
    metrics a waiting=3 running=1 kv=0.5 adapters=x,y/4
    refuse a, answer-badly a         a scrape that got no connection, one that got no page
    schedule 1 prompt=system*4+x     4 blocks of "system", then one of "x"; model= priority= subset=
    first-output 1, reschedule 1 b, complete 1 status=503 ending=unseen by=gateway
    advance 2.5                      seconds; ticks once
    show, standings                  requests in flight; who gets work first, and who is full
"""

import os
from pathlib import Path

import pytest

from epp.core.decision.inputs import (
    OutputStarted,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ScrapeFailed,
    ServedBy,
    Tick,
)
from epp.core.decision.profile import NamedFilter, SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.prompt.request import InferenceRequest
from epp.core.types import AdapterReport, ApiKind, Endpoint, EndpointMetrics
from epp.plugins import FILTERS, PICKERS, SCORERS

GOLDEN = Path(__file__).parent / "golden"
PREFIX = "approx-prefix-cache-producer"
BLOCK_BYTES = 256


class Stage:
    """Plays one script."""

    def __init__(self):
        self.now = 0.0
        self.decisions = {}
        self.scheduler = None
        self.endpoints = []
        self.profile("queue-scorer=1")

    def play(self, line):
        verb, *words = line.split()
        return getattr(self, verb.replace("-", "_"))(*words) or []

    def profile(self, *words):
        filters, scorers, picker, ttl_s = [], [], "max-score-picker", 60.0
        for word in words:
            name, _, value = word.partition("=")
            if name == "lease-ttl":
                ttl_s = float(value)
            elif name in FILTERS:
                filters.append(NamedFilter(name, FILTERS[name]()))
            elif name in PICKERS:
                picker = name
            else:
                scorers.append(WeightedScorer(name, SCORERS[name](), float(value)))
        settings = SchedulerSettings(
            stages=Stages(
                decode=SchedulingProfile(
                    name="golden",
                    filters=tuple(filters),
                    scorers=tuple(scorers),
                    picker_name=picker,
                    picker=PICKERS[picker](),
                )
            ),
            indexes={PREFIX: PrefixIndexSettings()},
            prefix=PREFIX,
            lease_ttl_without_response_phase_s=ttl_s,
        )
        if self.scheduler is None or not self.endpoints:
            self.scheduler = Scheduler(settings, seed=1)
            return []
        restarted = self.scheduler.take(Reconfigured(settings), self.now).restarted
        return [f"configured; started anew: {', '.join(restarted) or 'nothing'}"]

    def pool(self, *names):
        self.endpoints = [
            Endpoint(
                endpoint_id=name.split("#")[0],
                incarnation=name.partition("#")[2],
                name=name.split("#")[0],
                address=f"10.0.0.{ord(name[0]) - 96}:8000",
            )
            for name in names
        ]
        self.scheduler.take(PoolReplaced(self.endpoints), self.now)

    def metrics(self, name, *words):
        values = dict(word.split("=") for word in words)
        adapters = None
        if "adapters" in values:
            names, _, slots = values["adapters"].partition("/")
            active = frozenset(name for name in names.split(",") if name)
            adapters = AdapterReport(active=active, slots_max=int(slots))
        found = EndpointMetrics(
            waiting_requests=float(values.get("waiting", 0)),
            running_requests=float(values.get("running", 0)),
            kv_cache_usage=float(values.get("kv", 0)),
            adapters=adapters,
            process_started_at_s=float(values["started"]) if "started" in values else None,
        )
        self.scheduler.take(PageScraped(self.slot(name), found), self.now)

    def refuse(self, name):
        self.scheduler.take(ScrapeFailed(slot=self.slot(name), answered=False), 0.0)

    def answer_badly(self, name):
        self.scheduler.take(ScrapeFailed(slot=self.slot(name), answered=True), 0.0)

    def schedule(self, number, *words):
        values = dict(word.split("=") for word in words)
        prompt = b"".join(blocks(part) for part in values.get("prompt", "").split("+") if part)
        request = InferenceRequest(
            request_id=number,
            api=ApiKind.CHAT,
            model=values.get("model", "base"),
            prompts=(prompt,),
            prompt_tokens=len(prompt) // 4,
            priority=int(values.get("priority", 0)),
            subset=tuple(values["subset"].split(",")) if "subset" in values else None,
        )
        decision = self.scheduler.schedule(request, self.now)
        if not isinstance(decision, Decision):
            return [f"{number} refused: {decision.status} {decision.reason}: {decision.message}"]
        self.decisions[number] = decision
        return [
            f"{number} -> {decision.endpoint.name}  prefix "
            f"{decision.leg.matched_blocks}/{decision.leg.total_blocks}"
            + "".join(f", {name} dropped {n}" for name, n in decision.leg.eliminated.items()),
            *(f"    {row}" for row in table(decision)),
        ]

    def first_output(self, number):
        self.scheduler.take(OutputStarted(self.decisions[number].lease), self.now)

    def reschedule(self, number, name):
        address = self.scheduler.pool.columns.endpoints[self.slot(name)].address
        self.scheduler.take(ServedBy(self.decisions[number].lease, address), self.now)

    def complete(self, number, *words):
        values = dict(word.split("=") for word in words)
        status = int(values["status"]) if "status" in values else None
        outcome = Outcome(
            ending=Ending(values.get("ending", "complete")),
            status=status,
            by_gateway=values.get("by") == "gateway",
        )
        self.scheduler.take(RequestEnded(self.decisions[number].lease, outcome), self.now)

    def advance(self, seconds):
        self.now += float(seconds)
        self.scheduler.take(Tick(), self.now)

    def show(self):
        columns = self.scheduler.pool.columns
        ready = set(self.scheduler.pool.ready(None, self.now).tolist())
        return [
            f"{endpoint.name}: {columns.inflight_requests[slot]} in flight"
            + ("" if slot in ready else ", not ready")
            for slot, endpoint in self.scheduler.pool.endpoints()
        ]

    def standings(self):
        saturated = self.scheduler.pool.columns.saturated
        return [
            f"{self.endpoint(slot).name}: {standing}" + (", saturated" if saturated[slot] else "")
            for slot, standing in self.scheduler.standings(self.now).items()
        ]

    def endpoint(self, slot):
        return self.scheduler.pool.columns.endpoints[slot]

    def slot(self, name):
        return next(s for s, e in self.scheduler.pool.endpoints() if e.name == name)


def blocks(part):
    word, _, times = part.partition("*")
    block = (word.encode() + b" ") * BLOCK_BYTES
    return b"".join(f"{i:04d}".encode() + block[: BLOCK_BYTES - 4] for i in range(int(times or 1)))


def table(decision):
    parts, total = decision.leg.scored.parts, decision.leg.scored.total
    for position, endpoint in enumerate(decision.leg.candidates.endpoints):
        scores = ", ".join(
            f"{name.removesuffix('-scorer')} {parts[row, position]:.2f}"
            for row, name in enumerate(decision.leg.scorers)
        )
        yield f"{endpoint.name}={total[position]:.2f} ({scores})"


def transcript(script):
    """The script with what really happens behind each of its commands."""
    stage, lines, skipping = Stage(), [], False
    for line in script.splitlines():
        if line == "----":
            skipping = True
        elif not line.strip():
            skipping = False
            lines.append("")
        elif not skipping:
            lines.append(line)
            happened = [] if line.startswith("#") else stage.play(line)
            if happened:
                lines += ["----", *happened]
    return "\n".join(lines).strip() + "\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_the_scheduler_decides_as_written(path):
    """Every decision, with all its score parts, is the one in the transcript."""
    written = path.read_text()
    played = transcript(written)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(played)
    assert played == written
