"""Recordings of kind `ladder`: rising request rates on a pool, with round robin and with
prefix-aware routing.

`rates.csv` has one stage per row: rate, duration, and the published results of each of the two
arms. Stages follow each other on the same pods after a warm-up, and all requests of a stage end
before the next begins. Prompts are sent repeatedly in a shuffled order. Both arms are simulated in
the cluster of `sim replay` with its defaults. One arm uses round robin. The other uses the
production scheduler with weighted scores, as in the measured run. Times are those of the client.

Only `shared_context_factor` is fitted, to the prefix-aware output tokens/s of the odd rows. The fit
interpolates linearly between two runs for each row. The even rows are judged, and the TTFT cliff of
round robin on all rows.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from epp.core.expectation import misfit
from epp.core.types import Seconds
from sim.cluster.cluster import Cluster
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile, ProfileError, find_profile
from sim.measurement.measures import ttft_of
from sim.traces.arrival import Arrival
from sim.traces.prompts import request_of
from sim.truth.judgement import (
    Judgement,
    ReportProgress,
    TruthError,
    against,
    converted,
    fitted,
    tolerated,
)

ROUND_ROBIN_TOLERANCE: Final = 0.15
PREFIX_AWARE_TOLERANCE: Final = 0.07
CLIFF_RATES_PER_S: Final = (15.0, 20.0)
"""Request rates per second between which the TTFT of round robin rises far above the duration of a
prefill.
"""
CLIFF_TTFT_S: Final = 5.0
_FACTORS: Final = (0.35, 0.65)
_ROUND_ROBIN: Final = "round-robin"
_PREFIX_AWARE: Final = "weighted-scores"
_SEED: Final = 1


class Description(Struct, frozen=True, kw_only=True):
    """The content of a ladder recording's `engine.toml`."""

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
    """One stage of a ladder: a row of `rates.csv` with the published results of both arms."""

    rate_per_s: float
    duration_s: Seconds
    round_robin_output_tokens_per_s: float
    round_robin_ttft_mean_s: Seconds
    prefix_output_tokens_per_s: float
    prefix_ttft_mean_s: Seconds


class Outcomes(Struct, frozen=True, kw_only=True):
    """The simulated results of one stage of a ladder."""

    output_tokens_per_s: float
    """Output tokens divided by the time from the first arrival of the stage to its last completion."""
    ttft_mean_s: Seconds


def judge(
    folder: Path, description: dict[str, Any], report: ReportProgress, given: Profile | None = None
) -> Iterator[Judgement]:
    """Compare a ladder recording with its simulation: yield the fitted constant, then the results
    of both arms. Raises `TruthError`.

    A `given` profile, with its KV cache, replaces the recording's own. If it is an estimated one,
    the TTFT cliff is shown without a verdict, because its place depends on a few per cent of speed.
    """
    shape = converted(folder, description, Description)
    if given is not None:
        shape = msgspec.structs.replace(shape, kv_tokens_per_pod=given.kv_tokens)
    stages = _stages(folder / "rates.csv")
    try:
        found = given or find_profile(shape.profile)
    except ProfileError as problem:
        raise TruthError(f"{folder / 'engine.toml'}: profile: {problem}") from problem
    profile = msgspec.structs.replace(found, host_s=shape.host_ms / 1e3)
    requests = 2 * (_requests(shape, stages[::2]) + _requests(shape, stages))
    done = 0.0

    def ended(count: float) -> None:
        nonlocal done
        done += count
        report(done / requests)

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
        round_robin[1::2], tolerated(ROUND_ROBIN_TOLERANCE, given),
    )  # fmt: skip
    yield _mean_error(
        f"{folder.name}", "prefix aware, output tokens/s, even rows",
        [stage.prefix_output_tokens_per_s for stage in stages[1::2]],
        prefix_aware[1::2], tolerated(PREFIX_AWARE_TOLERANCE, given),
    )  # fmt: skip
    cliff = _cliff(folder.name, stages, round_robin)
    estimated = given is not None and given.estimated is not None
    yield msgspec.structs.replace(cliff, tolerance=None) if estimated else cliff


def fit_shared_context_factor(
    shape: Description, profile: Profile, stages: Sequence[Stage], ended: Callable[[float], None]
) -> float:
    """Return the `shared_context_factor` (0 to 1) with the least squares of the relative errors of
    prefix-aware output tokens/s, or the profile's own factor if the factor has no effect.

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


class Ladder:
    """One arm of a ladder: a simulated pool with its picker, on which the stages follow each other."""

    def __init__(self, shape: Description, profile: Profile, *, prefix_aware: bool) -> None:
        self._shape = shape
        self._random = Random(f"{_SEED}:ladder")
        self._prompts = _prompts(shape)
        self._random.shuffle(self._prompts)
        self._sent = 0
        self._ended: list[SimulatedRequest] = []
        settings = ClusterSettings(
            pods=(PodKind(profile=profile, engine=shape.engine),) * shape.pods
        )
        policy = policy_source(_PREFIX_AWARE if prefix_aware else _ROUND_ROBIN)
        self._cluster = Cluster(
            settings,
            settings.opener(policy),
            lambda arrival, hashes: request_of(arrival, hashes=hashes),
            (),
            seed=_SEED,
            ended=self._ended.append,
        )

    def climb(self, stages: Sequence[Stage], ended: Callable[[float], None]) -> list[Outcomes]:
        """Simulate the warm-up and all stages, and return the results of the stages.

        `ended` is called after each with its approximate number of requests.
        """
        shape = self._shape
        self.stage(shape.warm_up_rate_per_s, shape.warm_up_s)
        ended(_requests(shape, ()))
        outcomes = []
        for stage in stages:
            outcomes.append(self.stage(stage.rate_per_s, stage.duration_s))
            ended(stage.rate_per_s * stage.duration_s)
        return outcomes

    def stage(self, rate_per_s: float, duration_s: Seconds) -> Outcomes:
        """Send requests at `rate_per_s` for `duration_s` seconds to the arm's pool, simulate until
        all are answered, and return the results; they are 0 if no request arrived.
        """
        self._ended.clear()
        self._cluster.clients.go_on(self._arrivals(rate_per_s, duration_s))
        self._cluster.run()
        if not self._ended:
            return Outcomes(output_tokens_per_s=0.0, ttft_mean_s=0.0)
        assert all(request.fate is Fate.COMPLETE for request in self._ended), (
            "no request is refused"
        )
        span_s = self._cluster.loop.now - min(request.arrived_at for request in self._ended)
        return Outcomes(
            output_tokens_per_s=len(self._ended) * self._shape.output_tokens / span_s,
            ttft_mean_s=float(np.mean([ttft_of(request) for request in self._ended])),
        )

    def _arrivals(self, rate_per_s: float, duration_s: Seconds) -> Iterator[Arrival]:
        shape, at = self._shape, self._cluster.loop.now
        until = at + duration_s
        while (at := at + self._random.expovariate(rate_per_s)) < until:
            yield Arrival(
                index=self._sent,
                time_s=at,
                prompt_tokens=shape.prompt_tokens,
                output_tokens=shape.output_tokens,
                blocks=self._prompts[self._sent % len(self._prompts)],
                lengths=(shape.system_tokens, shape.question_tokens),
            )
            self._sent += 1


def _requests(shape: Description, stages: Sequence[Stage]) -> float:
    """Return the expected number of requests of the warm-up and `stages`."""
    counts = [stage.rate_per_s * stage.duration_s for stage in stages]
    return shape.warm_up_rate_per_s * shape.warm_up_s + sum(counts)


def _prompts(shape: Description) -> list[tuple[int, int]]:
    """Return the block ids of each prompt: the prefix that its group shares, and its own question."""
    numbers = range(shape.groups * shape.prompts_per_group)
    return [(at // shape.prompts_per_group, shape.groups + at) for at in numbers]


def _stages(file: Path) -> list[Stage]:
    try:
        with file.open(newline="") as lines:
            rows: list[Mapping[str, str]] = list(csv.DictReader(lines))
        stages = [msgspec.convert(row, Stage, strict=False) for row in rows]
    except (OSError, UnicodeDecodeError, msgspec.ValidationError) as problem:
        raise TruthError(misfit(str(file), problem, Stage)) from problem
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
    """Return a comparison of the output rate (tokens/s) over the stages of the rows given. Its
    error is the mean of the stages' absolute relative errors.
    """
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
    """Return the comparison of the TTFT cliff: round robin's mean TTFT must be below 5 s at the
    rates before the cliff and above it after the cliff.
    """
    below, above = CLIFF_RATES_PER_S
    wrong = sum(
        (outcome.ttft_mean_s < CLIFF_TTFT_S) != (stage.rate_per_s <= below)
        for stage, outcome in zip(stages, round_robin, strict=True)
        if not below < stage.rate_per_s < above
    )
    return Judgement(
        truth=truth,
        what=f"round robin's TTFT cliff between {below:g} and {above:g}/s: rows on the expected side",
        recorded=len(stages),
        simulated=len(stages) - wrong,
        unit="",
        error=-wrong / len(stages),
        tolerance=0.0,
    )
