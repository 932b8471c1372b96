"""Cost of a capture (`--capture`) and of a shadow profile per decision: `python -m bench.capture`.

A request is measured from its prompt to its end: chains, decision, returned lease. Each further row
shows the difference from the first one, which is the cost on the event loop. The cost on the thread
that writes the capture is shown separately.
"""

import itertools
from collections.abc import Iterator
from random import Random

from msgspec import structs

from bench.timing import best_us
from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.journal.events import Note
from epp.core.journal.lines import Salt
from epp.core.journal.transcript import Transcript
from epp.core.journal.witness import CaptureWitness, Sample
from epp.core.knowledge.inflight import Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.types import ApiKind, Endpoint, EndpointMetrics
from epp.journal.frames import frame_of, framed, packed_frames

ENDPOINTS = 32
SIZES = {8: (500, 100), 440: (50, 20)}
"""Sizes of the prompts: KB of a prompt -> (conversations, requests per batch)."""
BATCHES = 30


def requests(prompt_bytes: int, conversations: int) -> Iterator[tuple[bytes, ...]]:
    """Yield `conversations` prompts of `prompt_bytes` bytes again and again. Ten of them on average
    share their first three quarters; the last quarter of each differs.
    """
    random = Random("bench:capture")
    heads = [random.randbytes(prompt_bytes * 3 // 4) for _ in range(conversations // 10)]
    prompts: list[tuple[bytes, ...]] = [
        (random.choice(heads) + random.randbytes(prompt_bytes // 4),) for _ in range(conversations)
    ]
    return itertools.cycle(prompts)


def ready(scheduler: Scheduler) -> Scheduler:
    scheduler.take(
        PoolReplaced(
            [
                Endpoint(endpoint_id=f"uid-{at}", name=f"pod-{at}", address=f"10.0.0.{at}:8000")
                for at in range(ENDPOINTS)
            ]
        ),
        0.0,
    )
    for slot in range(ENDPOINTS):
        metrics = EndpointMetrics(waiting_requests=0, running_requests=4, kv_cache_usage=0.3)
        scheduler.take(PageScraped(slot, metrics), 0.0)
    return scheduler


def request_us(scheduler: Scheduler, prompts: Iterator[tuple[bytes, ...]], calls: int) -> float:
    """Return the microseconds that a request costs `scheduler`, from its prompt to the end of its
    answer.
    """

    def one(prompt: tuple[bytes, ...]) -> None:
        request = InferenceRequest(
            request_id="one",
            api=ApiKind.COMPLETIONS,
            model="llama",
            prompts=prompt,
            prompt_tokens=len(prompt[0]) // 4,
            session_id="",
            segments=scheduler.segments,
        )
        decision = scheduler.schedule(request, 0.1)
        assert isinstance(decision, Decision)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 0.2)

    return best_us(one, lambda: list(itertools.islice(prompts, calls)), batches=BATCHES)


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the cost of a capture and of a shadow profile."""
    return [row for size_kb in SIZES for row in size_rows(size_kb)]


def size_rows(size_kb: int) -> list[tuple[str, str]]:
    """Return rows (what, how much) with the cost of a capture and of a shadow profile, for prompts
    of `size_kb` KB.
    """
    conversations, calls = SIZES[size_kb]
    config = default_config(plugin_tables())
    settings: SchedulerSettings = build_settings(config)
    notes: list[Note] = []

    def witnessed(share: float) -> Scheduler:
        notes.clear()
        scheduler = Scheduler(settings, seed=1)
        scheduler.witness = CaptureWitness(
            scheduler,
            sample=Sample(share, 1),
            tell=notes.append if share == 1.0 else lambda _: None,
            failed=lambda error: print(repr(error)),
        )
        return scheduler

    def took_us(scheduler: Scheduler) -> float:
        return request_us(ready(scheduler), requests(size_kb * 1024, conversations), calls)

    what = f"request of {size_kb} KB, {ENDPOINTS} endpoints"
    plain_us = took_us(Scheduler(settings, seed=1))
    rows = [(f"{what}, from prompt to end", f"{plain_us:.1f} µs")]
    shadowed = structs.replace(settings, shadow=settings.profile)
    for name, scheduler in (
        ("captured", witnessed(1.0)),
        ("a tenth of the sessions captured", witnessed(0.1)),
        ("with a shadow profile", Scheduler(shadowed, seed=1)),
    ):
        rows.append((f"{what}, {name}", f"{took_us(scheduler) - plain_us:+.1f} µs"))

    took_us(witnessed(1.0))
    told = notes[-2 * calls :]
    transcript = Transcript(Salt(b"of bench alone, 20"))
    frames_us = best_us(
        lambda note: frame_of(transcript.event(note)), lambda: told, batches=BATCHES
    )
    frames = b"".join(framed(frame_of(transcript.event(note))) for note in told)
    packed_us = best_us(
        lambda part: packed_frames(part, len(told)), lambda: [frames], batches=BATCHES
    )
    packed_bytes = len(packed_frames(frames, len(told)))
    rows.append((f"{what}, its records, on the thread", f"{2 * frames_us:.1f} µs"))
    rows.append((f"{what}, to pack them", f"{packed_us / calls:.1f} µs"))
    rows.append((f"{what}, its records, packed", f"{packed_bytes / calls:.0f} bytes"))
    return rows


if __name__ == "__main__":
    for what, cost in run():
        print(f"{what:76} {cost:>12}")
