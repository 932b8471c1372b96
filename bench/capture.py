"""What a capture and a shadow profile cost a decision: `python -m bench.capture`.

One request is parsed to the end of it: chains, decision, lease given back. What a row adds to the
first is what the event loop pays; what the thread pays beside it is told apart.
"""

import gzip
import itertools
from collections.abc import Iterator
from random import Random

from msgspec import structs

from bench.timing import best_us
from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.capture.events import Configured, Note
from epp.core.capture.lines import Salt
from epp.core.capture.transcript import Origin, Transcript
from epp.core.capture.witness import Sample, WitnessedScheduler
from epp.core.decision.scheduler import Decision, Scheduler, SchedulerSettings
from epp.core.knowledge.inflight import Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.types import ApiKind, Endpoint, EndpointMetrics
from epp.shell.files.capture_folder import PACKING_LEVEL

ENDPOINTS = 32
PROMPT_BYTES = 8_192
CONVERSATIONS = 500
CALLS = 100
BATCHES = 30


def requests() -> Iterator[tuple[bytes, ...]]:
    """Prompts that each begin like others and end alone."""
    random = Random("bench:capture")
    heads = [random.randbytes(PROMPT_BYTES * 3 // 4) for _ in range(CONVERSATIONS // 10)]
    prompts: list[tuple[bytes, ...]] = [
        (random.choice(heads) + random.randbytes(PROMPT_BYTES // 4),) for _ in range(CONVERSATIONS)
    ]
    return itertools.cycle(prompts)


def ready(scheduler: Scheduler) -> Scheduler:
    scheduler.replace(
        [
            Endpoint(endpoint_id=f"uid-{at}", name=f"pod-{at}", address=f"10.0.0.{at}:8000")
            for at in range(ENDPOINTS)
        ],
        0.0,
    )
    for slot in range(ENDPOINTS):
        metrics = EndpointMetrics(waiting_requests=0, running_requests=4, kv_cache_usage=0.3)
        scheduler.observe(slot, metrics, 0.0)
    return scheduler


def request_us(scheduler: Scheduler) -> float:
    """From the prompt to the end of the answer."""
    prompts = requests()

    def one(prompt: tuple[bytes, ...]) -> None:
        request = InferenceRequest(
            request_id="one",
            api=ApiKind.COMPLETIONS,
            model="llama",
            prompts=prompt,
            prompt_tokens=PROMPT_BYTES // 4,
            session_id="",
        )
        decision = scheduler.schedule(request, 0.1)
        assert isinstance(decision, Decision)
        scheduler.complete(decision.lease, Outcome(status=200), 0.2)

    return best_us(one, lambda: list(itertools.islice(prompts, CALLS)), batches=BATCHES)


def run() -> list[tuple[str, str]]:
    """(what, how much)."""
    config = default_config(plugin_tables())
    settings: SchedulerSettings = build_settings(config)
    notes: list[Note] = []

    def witnessed(share: float) -> Scheduler:
        notes.clear()
        return WitnessedScheduler(
            settings,
            seed=1,
            sample=Sample(share, 1),
            tell=notes.append if share == 1.0 else lambda _: None,
            failed=lambda error: print(repr(error)),
        )

    what = f"request of {PROMPT_BYTES // 1024} KB, {ENDPOINTS} endpoints"
    plain_us = request_us(ready(Scheduler(settings, seed=1)))
    rows = [(f"{what}, from prompt to end", f"{plain_us:.1f} µs")]
    shadowed = structs.replace(settings, shadow=settings.profile)
    for name, scheduler in (
        ("captured", witnessed(1.0)),
        ("a tenth of the sessions captured", witnessed(0.1)),
        ("with a shadow profile", Scheduler(shadowed, seed=1)),
    ):
        took_us = request_us(ready(scheduler))
        rows.append((f"{what}, {name}", f"{took_us - plain_us:+.1f} µs"))

    request_us(ready(witnessed(1.0)))
    told = notes[-2 * CALLS :]
    transcript = Transcript(
        Origin(name="bench", seed=1, share=1.0, unix_s=0.0), Salt(b"of bench alone, 20")
    )
    transcript.begin_file(0.0)
    transcript.note(
        Configured(
            generation=1, hash="", document="", metrics_staleness_s=2.0, refresh_interval_s=0.2
        )
    )
    took_us = best_us(transcript.note, lambda: told, batches=BATCHES) * 2
    transcript.take()
    for note in told:
        transcript.note(note)
    lines = transcript.take()
    packed = sum(len(gzip.compress(part, PACKING_LEVEL)) for part in lines)
    rows.append((f"{what}, its lines, on the thread", f"{took_us:.1f} µs"))
    rows.append((f"{what}, its lines, packed", f"{packed / CALLS:.0f} bytes"))
    return rows


if __name__ == "__main__":
    for what, cost in run():
        print(f"{what:76} {cost:>12}")
