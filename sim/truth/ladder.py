"""Kind `ladder`: rising request rates on a pool, round robin against prefix-aware routing.

`rates.csv` has a stage a row: rate, duration, and what was published of each arm. Stages follow
each other on the same pods, each drained before the next, after a warm-up; prompts are drawn in a
shuffled order, again and again. The prefix-aware arm is the production scheduler with the default
profile, which sees pods as production does, through pages scraped now and then.

Only `shared_context_factor` is fitted: to the prefix-aware output tokens/s of the odd rows, from
two runs with a straight line between them for each row. The even rows are judged.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.knowledge.inflight import Ending, Lease, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, ApiKind, Endpoint, EndpointMetrics, Seconds
from sim.engine.engine import Engine, EngineRequest, EngineSettings
from sim.engine.profiles import Profile, ProfileError, find_profile
from sim.truth.judgement import Judgement, Told, TruthError, against, converted, fitted

ROUND_ROBIN_TOLERANCE: Final = 0.15
PREFIX_AWARE_TOLERANCE: Final = 0.07
CLIFF_RATES_PER_S: Final = (15.0, 20.0)
"""Between these round robin's TTFT leaves the order of a prefill."""
CLIFF_TTFT_S: Final = 5.0
_FACTORS: Final = (0.35, 0.65)
_SCRAPE_INTERVAL_S: Final = 0.2
_BLOCK_TOKENS: Final = 64
"""Of the default profile's prefix index."""
_SEED: Final = 1
_DONE: Final = Outcome(ending=Ending.COMPLETE, status=200)


class Description(Struct, frozen=True, kw_only=True):
    """`engine.toml`."""

    pods: int
    profile: str
    kv_tokens_per_pod: int
    max_num_batched_tokens: int
    max_num_seqs: int
    host_ms: float
    warm_up_rate_per_s: float
    warm_up_s: Seconds
    groups: int
    prompts_per_group: int
    system_tokens: int
    question_tokens: int
    output_tokens: int
    block_size_tokens: int = 16

    @property
    def prompt_tokens(self) -> int:
        return self.system_tokens + self.question_tokens

    @property
    def engine(self) -> EngineSettings:
        return EngineSettings(
            blocks_total=self.kv_tokens_per_pod // self.block_size_tokens + 1,
            block_size_tokens=self.block_size_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


class Stage(Struct, frozen=True, kw_only=True):
    """A row of `rates.csv`."""

    rate_per_s: float
    duration_s: Seconds
    round_robin_output_tokens_per_s: float
    round_robin_ttft_mean_s: Seconds
    prefix_output_tokens_per_s: float
    prefix_ttft_mean_s: Seconds


class Outcomes(Struct, frozen=True, kw_only=True):
    """What a stage came to in the simulator."""

    output_tokens_per_s: float
    """Output tokens by the time from the first arrival to the last completion."""
    ttft_mean_s: Seconds


def judge(folder: Path, description: dict[str, Any], told: Told) -> Iterator[Judgement]:
    """The fit, then both arms. Raises TruthError."""
    shape = converted(folder, description, Description)
    stages = _stages(folder / "rates.csv")
    try:
        found = find_profile(shape.profile)
    except ProfileError as problem:
        raise TruthError(f"{folder / 'engine.toml'}: profile: {problem}") from problem
    profile = msgspec.structs.replace(found, host_s=shape.host_ms / 1e3)
    requests = 2 * (_requests(shape, stages[::2]) + _requests(shape, stages))
    done = 0.0

    def ended(count: float) -> None:
        nonlocal done
        done += count
        told(done / requests)

    factor = fit_shared_context_factor(shape, profile, stages[::2], ended)
    yield fitted(
        folder.name, "shared_context_factor, fitted on odd rows", factor, "",
        profile=profile.shared_context_factor,
    )  # fmt: skip
    profile = msgspec.structs.replace(profile, shared_context_factor=factor)
    round_robin = Ladder(shape, profile, prefix_aware=False).climb(stages, ended)
    prefix_aware = Ladder(shape, profile, prefix_aware=True).climb(stages, ended)
    yield from _rows(folder.name, stages, round_robin, prefix_aware)
    yield _mean_error(
        f"{folder.name}", "round robin, output tokens/s, even rows",
        [stage.round_robin_output_tokens_per_s for stage in stages[1::2]],
        round_robin[1::2], ROUND_ROBIN_TOLERANCE,
    )  # fmt: skip
    yield _mean_error(
        f"{folder.name}", "prefix aware, output tokens/s, even rows",
        [stage.prefix_output_tokens_per_s for stage in stages[1::2]],
        prefix_aware[1::2], PREFIX_AWARE_TOLERANCE,
    )  # fmt: skip
    yield _cliff(folder.name, stages, round_robin)


def fit_shared_context_factor(
    shape: Description, profile: Profile, stages: Sequence[Stage], ended: Callable[[float], None]
) -> float:
    """The factor with the least squares of the relative errors of prefix-aware tokens/s.

    `ended` is called as by `Ladder.climb`.
    """
    low, high = (
        np.array(
            [
                outcome.output_tokens_per_s / stage.prefix_output_tokens_per_s - 1.0
                for stage, outcome in zip(
                    stages,
                    Ladder(
                        shape,
                        msgspec.structs.replace(profile, shared_context_factor=factor),
                        prefix_aware=True,
                    ).climb(stages, ended),
                    strict=True,
                )
            ]
        )
        for factor in _FACTORS
    )
    slope = (high - low) / (_FACTORS[1] - _FACTORS[0])
    if not slope.any():
        return profile.shared_context_factor
    factor = _FACTORS[0] - float(slope @ low / (slope @ slope))
    return min(1.0, max(0.0, factor))


class _Prompt(Struct, frozen=True):
    keys: tuple[int, int]
    chain: bytes
    """As the picker's prefix index wants it: 8 bytes a block."""


class _Sent(Struct, eq=False):
    """A request on its way."""

    arrived_at: Seconds
    pod: int
    engine: EngineRequest
    lease: Lease | None


class Ladder:
    """The pool, its router and the clock of one arm."""

    def __init__(self, shape: Description, profile: Profile, *, prefix_aware: bool) -> None:
        self._shape = shape
        self._profile = profile
        self._random = Random(f"{_SEED}:ladder")
        self._engines = [Engine(shape.engine, profile) for _ in range(shape.pods)]
        self._busy = [False] * shape.pods
        self._epochs = [0] * shape.pods
        """A step's end that was put off is told from the one that counts by the epoch."""
        self._scheduler: Scheduler | None = None
        self._endpoints = [
            Endpoint(endpoint_id=f"pod-{at}", name=f"pod-{at}", address=f"10.0.0.{at + 1}:8000")
            for at in range(shape.pods)
        ]
        self._pod_of = {at.endpoint_id: number for number, at in enumerate(self._endpoints)}
        if prefix_aware:
            config = default_config(plugin_tables())
            settings = build_settings(config, refresh_interval_s=_SCRAPE_INTERVAL_S)
            self._scheduler = Scheduler(settings, seed=_SEED)
            self._scheduler.replace(self._endpoints, 0.0)
        self._prompts = _prompts(shape)
        self._random.shuffle(self._prompts)
        self._sent = 0
        self._by_id: dict[str, _Sent] = {}
        self._events: list[tuple[Seconds, int, str, int, Any]] = []
        self._sequence = 0
        self._now: Seconds = 0.0

    def climb(self, stages: Sequence[Stage], ended: Callable[[float], None]) -> list[Outcomes]:
        """The warm-up, then all stages; `ended` hears of how many requests, about, after each."""
        shape = self._shape
        self.stage(shape.warm_up_rate_per_s, shape.warm_up_s)
        ended(_requests(shape, ()))
        outcomes = []
        for stage in stages:
            outcomes.append(self.stage(stage.rate_per_s, stage.duration_s))
            ended(stage.rate_per_s * stage.duration_s)
        return outcomes

    def stage(self, rate_per_s: float, duration_s: Seconds) -> Outcomes:
        """Arrivals for `duration_s`, and on until all are answered."""
        start, at = self._now, self._now
        first_at = None
        ttft_s: list[float] = []
        last_at = start
        while (at := at + self._random.expovariate(rate_per_s)) < start + duration_s:
            first_at = at if first_at is None else first_at
            self._at(at, "arrive")
        if self._scheduler is not None:
            for pod in range(self._shape.pods):
                offset_s = _SCRAPE_INTERVAL_S * pod / self._shape.pods
                self._at(start + offset_s - _SCRAPE_INTERVAL_S, "scrape", pod, start + duration_s)
        handlers: dict[str, Callable[[int, Any], None]] = {
            "arrive": self._arrive,
            "submit": self._submit,
            "scrape": self._scrape,
        }
        tokens = 0
        while self._events:
            self._now, _, what, number, load = heappop(self._events)
            if what != "end":
                handlers[what](number, load)
                continue
            for sent in self._end_step(number, load):
                assert sent.engine.first_token_at is not None
                ttft_s.append(sent.engine.first_token_at - sent.arrived_at)
                tokens += sent.engine.output_tokens
                last_at = self._now
        span_s = last_at - (start if first_at is None else first_at)
        return Outcomes(
            output_tokens_per_s=tokens / span_s if span_s else 0.0,
            ttft_mean_s=float(np.mean(ttft_s)) if ttft_s else 0.0,
        )

    def _at(self, at: Seconds, what: str, number: int = 0, load: Any = None) -> None:
        heappush(self._events, (at, self._sequence, what, number, load))
        self._sequence += 1

    def _arrive(self, _: int, __: Any) -> None:
        shape = self._shape
        prompt = self._prompts[self._sent % len(self._prompts)]
        name = str(self._sent)
        ends = (
            shape.system_tokens // shape.block_size_tokens,
            shape.prompt_tokens // shape.block_size_tokens,
            (shape.prompt_tokens + shape.output_tokens) // shape.block_size_tokens,
        )
        pod, lease = self._route(name, prompt)
        engine = EngineRequest(
            name,
            prompt_tokens=shape.prompt_tokens,
            output_tokens=shape.output_tokens,
            chain=(*prompt.keys, -1 - self._sent),
            chain_ends=ends,
        )
        self._by_id[name] = sent = _Sent(self._now, pod, engine, lease)
        self._sent += 1
        self._at(self._now + self._profile.frontend_delay_s(shape.prompt_tokens), "submit", 0, sent)

    def _route(self, name: str, prompt: _Prompt) -> tuple[int, Lease | None]:
        if self._scheduler is None:
            return self._sent % self._shape.pods, None
        request = InferenceRequest(
            request_id=name,
            api=ApiKind.COMPLETIONS,
            prompt_tokens=self._shape.prompt_tokens,
            stream=True,
            chains={_BLOCK_TOKENS * BYTES_PER_TOKEN: (prompt.chain,)},
        )
        decision = self._scheduler.schedule(request, self._now)
        assert isinstance(decision, Decision), "requests of priority 0 are never refused"
        return self._pod_of[decision.endpoint.endpoint_id], decision.lease

    def _submit(self, _: int, sent: _Sent) -> None:
        engine = self._engines[sent.pod]
        engine.submit(sent.engine, self._now)
        self._await_end(sent.pod)

    def _scrape(self, pod: int, until: Seconds) -> None:
        scheduler, shape = self._scheduler, self._shape
        assert scheduler is not None
        shown = self._engines[pod].snapshot(self._now)
        slot = scheduler.pool.slot_of(self._endpoints[pod])
        assert slot is not None
        metrics = EndpointMetrics(
            waiting_requests=shown.waiting,
            running_requests=shown.running,
            kv_cache_usage=shown.kv_cache_usage,
            block_size_tokens=shape.block_size_tokens,
            blocks_total=shape.engine.blocks_total,
        )
        scheduler.observe(slot, metrics, self._now)
        if self._now < until:
            self._at(self._now + _SCRAPE_INTERVAL_S, "scrape", pod, until)

    def _await_end(self, pod: int) -> None:
        """Begin a step if none has begun; what `submit` did to it counts."""
        engine = self._engines[pod]
        ends_at = engine.ends_at if engine.ends_at is not None else engine.begin(self._now)
        self._epochs[pod] += 1
        if ends_at is not None:
            self._at(max(ends_at, self._now), "end", pod, self._epochs[pod])

    def _end_step(self, pod: int, epoch: int) -> Iterator[_Sent]:
        """The requests that are answered with the step that has ended."""
        if epoch != self._epochs[pod]:
            return
        for request in self._engines[pod].end().outputs:
            if not request.finished:
                continue
            sent = self._by_id.pop(request.request_id)
            if sent.lease is not None and self._scheduler is not None:
                self._scheduler.complete(sent.lease, _DONE, self._now)
            yield sent
        self._await_end(pod)


def _requests(shape: Description, stages: Sequence[Stage]) -> float:
    """Of a climb, as many as are expected."""
    counts = [stage.rate_per_s * stage.duration_s for stage in stages]
    return shape.warm_up_rate_per_s * shape.warm_up_s + sum(counts)


def _prompts(shape: Description) -> list[_Prompt]:
    blocks = shape.prompt_tokens // _BLOCK_TOKENS
    shared = shape.system_tokens // _BLOCK_TOKENS
    prompts: list[_Prompt] = []
    for group in range(shape.groups):
        for place in range(shape.prompts_per_group):
            number = group * shape.prompts_per_group + place
            # Any numbers do that are equal where the text is.
            hashes = [(1 + group) * blocks + index for index in range(shared)]
            hashes += [2**32 + number * blocks + index for index in range(shared, blocks)]
            chain = np.array(hashes, np.uint64).tobytes()
            prompts.append(_Prompt(keys=(group, shape.groups + number), chain=chain))
    return prompts


def _stages(file: Path) -> list[Stage]:
    try:
        with file.open(newline="") as lines:
            rows: list[Mapping[str, str]] = list(csv.DictReader(lines))
        stages = [msgspec.convert(row, Stage, strict=False) for row in rows]
    except (OSError, UnicodeDecodeError, msgspec.ValidationError) as problem:
        raise TruthError(f"{file}: {problem}") from problem
    if len(stages) < 2:
        raise TruthError(f"{file}: expected at least two rows.")
    return stages


def _rows(
    truth: str,
    stages: Sequence[Stage],
    round_robin: Sequence[Outcomes],
    prefix_aware: Sequence[Outcomes],
) -> Iterator[Judgement]:
    for stage, even, aware in zip(stages, round_robin, prefix_aware, strict=True):
        at = f"at {stage.rate_per_s:g}/s"
        pairs = (
            ("round robin, output tokens/s", stage.round_robin_output_tokens_per_s,
             even.output_tokens_per_s, ""),
            ("round robin, mean TTFT", stage.round_robin_ttft_mean_s, even.ttft_mean_s, "s"),
            ("prefix aware, output tokens/s", stage.prefix_output_tokens_per_s,
             aware.output_tokens_per_s, ""),
            ("prefix aware, mean TTFT", stage.prefix_ttft_mean_s, aware.ttft_mean_s, "s"),
        )  # fmt: skip
        for what, recorded, simulated, unit in pairs:
            yield against(truth, f"{what} {at}", (recorded, simulated), unit, None)


def _mean_error(
    truth: str,
    what: str,
    recorded: Sequence[float],
    simulated: Sequence[Outcomes],
    tolerance: float,
) -> Judgement:
    """The mean of the absolute relative errors."""
    ours = np.array([outcome.output_tokens_per_s for outcome in simulated])
    theirs = np.array(recorded)
    return Judgement(
        truth=truth,
        what=f"mean error: {what}",
        recorded=float(theirs.mean()),
        simulated=float(ours.mean()),
        unit="",
        error=float(np.abs(ours / theirs - 1.0).mean()),
        tolerance=tolerance,
    )


def _cliff(truth: str, stages: Sequence[Stage], round_robin: Sequence[Outcomes]) -> Judgement:
    """Round robin's TTFT must be short below the cliff and long above it."""
    below, above = CLIFF_RATES_PER_S
    wrong = sum(
        (outcome.ttft_mean_s < CLIFF_TTFT_S) != (stage.rate_per_s <= below)
        for stage, outcome in zip(stages, round_robin, strict=True)
        if not below < stage.rate_per_s < above
    )
    return Judgement(
        truth=truth,
        what=f"round robin's TTFT cliff between {below:g} and {above:g}/s: rows on their side",
        recorded=len(stages),
        simulated=len(stages) - wrong,
        unit="",
        error=-wrong / len(stages),
        tolerance=0.0,
    )
