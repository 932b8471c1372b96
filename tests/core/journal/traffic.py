"""A busy pool whose scrapes, restarts, moves, failures and ends are all recorded."""

from random import Random

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import (
    LoadReported,
    OutputStarted,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ScrapeFailed,
    ServedBy,
    Tick,
)
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.journal.events import Configured, Level, Opened
from epp.core.journal.lines import Salt
from epp.core.journal.transcript import Transcript
from epp.core.journal.witness import CaptureWitness, Sample
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.types import AdapterReport, ApiKind, EndpointMetrics, MetricsTarget
from tests.builders import endpoint

DOCUMENT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: lora-affinity-scorer
- type: active-request-scorer
- type: PICKER
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: queue-scorer, weight: WEIGHT}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: lora-affinity-scorer}
  - {pluginRef: active-request-scorer}
  - pluginRef: PICKER
"""
KEY = b"a salt of twenty bytes"
PLUGINS = plugin_tables()


def document(*, picker="max-score-picker", weight=2):
    return DOCUMENT.replace("PICKER", picker).replace("WEIGHT", str(weight))


def settings_of(configured):
    config = load_config(configured.document, "here", PLUGINS)
    return build_settings(
        config,
        metrics_staleness_s=configured.metrics_staleness_s,
        refresh_interval_s=configured.refresh_interval_s,
    )


def configured(text, generation=1):
    return Configured(
        generation=generation,
        hash="0" * 12,
        document=text,
        metrics_staleness_s=2.0,
        refresh_interval_s=0.2,
    )


class Live:
    """A witnessed picker and the events of its journal; a failure of the witness is raised."""

    def __init__(self, text, *, seed=1, share=1.0):
        self.random = Random(f"{seed}:traffic")
        self.salt = salt = Salt(KEY)
        self.seed, self.share = seed, share
        self.transcript = Transcript(salt)
        self.events = []
        self.segments = 0
        self.begin_segment()
        self.notes = []
        self.tell(configured(text))
        self.scheduler = Scheduler(settings_of(configured(text)), seed=seed)
        self.scheduler.witness = self.witness = CaptureWitness(
            self.scheduler,
            sample=Sample(share, salt.secret()),
            tell=self.tell,
            failed=self.failed,
        )
        self.now = 0.0
        self.open = []
        self.decisions = []

    def tell(self, note):
        self.notes.append(note)
        self.events.append(self.transcript.event(note))

    def begin_segment(self):
        """Begin a segment, which repeats the state."""
        context = self.transcript.context()
        opened = Opened(
            level=Level.INPUTS,
            origin="live-0",
            segment=self.segments,
            unix_s=1000.0,
            context=len(context),
            seed=self.seed,
            salt=self.salt.identity,
            share=self.share,
            decisions=self.transcript.decisions,
            block_tokens=self.transcript.block_tokens(),
        )
        self.segments += 1
        self.events += [opened, *context]

    def failed(self, error):
        raise error

    def configure(self, text):
        self.scheduler.take(Reconfigured(settings_of(configured(text))), self.now)
        self.tell(configured(text, 2))

    def begin(self, endpoints):
        self.scheduler.take(
            PoolReplaced([self.endpoint(number) for number in range(endpoints)]), self.now
        )

    def endpoint(self, number, **fields):
        return endpoint(number, metrics=MetricsTarget(port=8000), **fields)

    def scrape(self):
        for slot, _ in self.scheduler.pool.endpoints():
            if self.random.random() < 0.1:
                self.scheduler.take(
                    ScrapeFailed(slot=slot, answered=self.random.random() < 0.5), 0.0
                )
                continue
            active = self.random.sample(["sql", "chat", "code"], self.random.randrange(3))
            self.scheduler.take(
                PageScraped(
                    slot,
                    EndpointMetrics(
                        waiting_requests=self.random.randrange(5),
                        running_requests=self.random.randrange(20),
                        kv_cache_usage=self.random.choice([self.random.random(), float("nan")]),
                        adapters=AdapterReport(active=frozenset(active), slots_max=4),
                        block_size_tokens=16,
                        blocks_total=2_000,
                        process_started_at_s=float(self.now > 20 and slot == 1),
                    ),
                ),
                self.now,
            )

    def ask(self, **fields):
        family = self.random.randrange(12)
        words = f"family {family} " * self.random.randrange(60, 400)
        request = InferenceRequest(
            **{
                "request_id": "r",
                "api": ApiKind.COMPLETIONS,
                "model": self.random.choice(["base", "sql", "chat"]),
                "prompts": (words.encode() + self.random.randbytes(500),),
                "prompt_tokens": (len(words) + 500) // 4,
                "priority": self.random.choice([0, 0, 0, -1]),
                "output_tokens_max": self.random.choice([None, 100]),
            }
            | fields
        )
        decision = self.scheduler.schedule(request, self.now)
        self.decisions.append(decision)
        if isinstance(decision, Decision):
            self.open.append(decision.lease)
        return decision

    def end(self):
        if not self.open:
            return
        lease = self.open.pop(self.random.randrange(len(self.open)))
        if self.random.random() < 0.3:
            self.scheduler.take(OutputStarted(lease), self.now)
        if self.random.random() < 0.05:
            others = [at.address for _, at in self.scheduler.pool.endpoints()]
            self.scheduler.take(ServedBy(lease, self.random.choice(others)), self.now)
        if self.random.random() < 0.1:
            self.scheduler.take(
                LoadReported(lease, "TEXT named_metrics.num_requests_waiting=3.0"), 0.0
            )
        status = self.random.choice([200, 200, 200, 503, None])
        ending = Ending.UNSEEN if status is None else Ending.COMPLETE
        outcome = Outcome(ending=ending, status=status, output_tokens=7 if status == 200 else None)
        self.scheduler.take(RequestEnded(lease, outcome), self.now)

    def run(self, steps, *, endpoints=5):
        if not self.now:
            self.begin(endpoints)
        for step in range(steps):
            self.now += self.random.random() * 0.1
            if step % 5 == 0:
                self.scrape()
            if step % 20 == 10:
                self.scheduler.take(Tick(), self.now)
            if step % 97 == 50:
                self.begin(endpoints - step % 2)
            self.ask()
            if self.random.random() < 0.9:
                self.end()
