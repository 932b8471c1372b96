"""Recordings of kind `latency`: requests of one engine, with the arrival and the measured times of
each.

`requests.jsonl` has one request per line, with measured times. The engine's constants come from the
kernel timings in the same folder (`sim/engine/kernels.py`), or from the built-in `profile` that
`engine.toml` names. The simulation is first judged without a fit. With a recording of more than
`FITTED_ON` requests and its own profile, host time and skew are then fitted to the first ones, and
the results are judged on the others.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from epp.core.types import Seconds
from sim.cluster.cluster import Cluster
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.engine.engine import EngineSettings
from sim.engine.kernels import Card, profile_of_kernels
from sim.engine.least_squares import bounded_least_squares
from sim.engine.profiles import Profile, ProfileError, find_profile
from sim.traces.arrival import Arrival
from sim.traces.prompts import request_of
from sim.truth.judgement import (
    Judgement,
    ReportProgress,
    TruthError,
    against,
    converted,
    fitted,
    lines_of,
    tolerated,
)

BLIND_TOLERANCES: Final = {"TTFT": 0.15, "TPOT": 0.08, "E2E": 0.08}
FITTED_MEAN_TOLERANCE: Final = 0.08
FITTED_P99_TOLERANCE: Final = 0.12
FITTED_ON: Final = 150
"""Number of requests, the first in order of arrival, to which constants are fitted."""
_FIT_ROUNDS: Final = 4
_SIMULATIONS: Final = 2 + 3 * _FIT_ROUNDS
"""Number of simulations for one recording: one without a fit, three per round of the fit, and one
with the fitted constants.
"""
_HOST_S_MAX: Final = 0.02
_SKEW_MAX: Final = 0.5
_MEASURES: Final = ("TTFT", "TPOT", "E2E")
_ANY: Final = "round-robin"
"""Routing policy of the simulation; it makes no difference with one pod."""

_Floats = npt.NDArray[np.float64]


class Description(Struct, frozen=True, kw_only=True):
    """The content of a latency recording's `engine.toml`."""

    model: str
    num_gpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    layers: int = 0
    block_size_tokens: int = 16
    all_reduce_ms: float = 0.0
    all_reduce_us_per_token: float = 0.0
    profile: str | None = None

    @property
    def engine(self) -> EngineSettings:
        return EngineSettings(
            blocks_total=self.num_gpu_blocks,
            block_size_tokens=self.block_size_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


class RecordedRequest(Struct, frozen=True, kw_only=True):
    """A recorded request: a line of `requests.jsonl`, with times in seconds."""

    arrival_s: Seconds
    input_tokens: int
    output_tokens: int
    queued_s: Seconds
    first_token_s: Seconds
    last_token_s: Seconds


def judge(
    folder: Path, description: dict[str, Any], report: ReportProgress, given: Profile | None = None
) -> Iterator[Judgement]:
    """Compare a latency recording with its simulation: yield the results without a fit; then, for a
    recording of more than 150 requests, the fitted host time and skew, and the results with them.

    A `given` profile, with its KV cache, replaces the recording's own; nothing is fitted then.
    Raises `TruthError`.
    """
    shape = converted(folder, description, Description)
    served = sorted(
        lines_of(folder / "requests.jsonl", RecordedRequest), key=lambda row: row.arrival_s
    )
    profile = given or _profile(folder, shape)
    engine = shape.engine if given is None else _with_cache_of(given, shape.engine)
    recorded = _recorded(served)
    blind = simulate(profile, engine, served)
    report(1 / _SIMULATIONS)
    for at, measure in enumerate(_MEASURES):
        means = (recorded[at].mean(), blind[at].mean())
        tolerance = tolerated(BLIND_TOLERANCES[measure], given)
        yield against(folder.name, f"mean {measure}, nothing fitted", means, "s", tolerance)
    for at, measure in enumerate(_MEASURES):
        tails = (np.percentile(recorded[at], 99), np.percentile(blind[at], 99))
        yield against(folder.name, f"p99 {measure}, nothing fitted", tails, "s", None)
    if len(served) <= FITTED_ON or given is not None:
        return
    suited = fit(profile, shape.engine, served, report)
    yield fitted(folder.name, "host time, fitted", suited.host_s, "s", profile=profile.host_s)
    yield fitted(folder.name, "skew, fitted", suited.skew, "", profile=profile.skew)
    rest = simulate(suited, shape.engine, served)[:, FITTED_ON:]
    recorded = recorded[:, FITTED_ON:]
    for at, measure in enumerate(_MEASURES):
        means = (recorded[at].mean(), rest[at].mean())
        what = f"mean {measure} of the rest, fitted"
        yield against(folder.name, what, means, "s", FITTED_MEAN_TOLERANCE)
    for at, measure in enumerate(_MEASURES):
        tails = (np.percentile(recorded[at], 99), np.percentile(rest[at], 99))
        what = f"p99 {measure} of the rest, fitted"
        yield against(folder.name, what, tails, "s", FITTED_P99_TOLERANCE)


def _with_cache_of(profile: Profile, engine: EngineSettings) -> EngineSettings:
    """Return the engine settings with the number of blocks of the profile's KV cache."""
    return msgspec.structs.replace(
        engine, blocks_total=profile.kv_tokens // engine.block_size_tokens + 1
    )


def simulate(
    profile: Profile, engine: EngineSettings, served: Sequence[RecordedRequest]
) -> _Floats:
    """Return the simulated TTFT, TPOT and E2E as rows in seconds, with a column per request in
    order of arrival.

    The simulated pool has one pod. Prompts share nothing. Measured times begin in the engine's
    queue, so there is neither a network nor a front end. Raises `TruthError` if a simulated request
    fails.
    """
    alone = msgspec.structs.replace(
        profile,
        frontend_s=0.0,
        frontend_s_per_token=0.0,
        max_model_len_tokens=max(profile.max_model_len_tokens, engine.kv_tokens),
    )
    settings = ClusterSettings(pods=(PodKind(profile=alone, engine=engine),), network_delay_s=0.0)
    arrivals = [
        Arrival(
            index=number,
            time_s=row.arrival_s,
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
        )
        for number, row in enumerate(served)
    ]
    ended: list[SimulatedRequest] = []
    Cluster(
        settings,
        settings.opener(policy_source(_ANY)),
        lambda arrival, hashes: request_of(arrival, (), hashes),
        arrivals,
        seed=1,
        ended=ended.append,
    ).run()
    requests = sorted(ended, key=lambda request: request.sequence)
    return np.array([_measured(request) for request in requests]).T


def fit(
    profile: Profile,
    engine: EngineSettings,
    served: Sequence[RecordedRequest],
    report: ReportProgress,
) -> Profile:
    """Return `profile` with the host time and skew with which the simulation comes closest to the
    recording in the mean latencies of the first `FITTED_ON` requests.

    The method is Gauss-Newton on the relative errors of mean TTFT, TPOT and E2E, with numerical
    slopes.
    """
    wanted = _recorded(served)[:, :FITTED_ON].mean(axis=1)
    steps = np.array([2e-4, 0.01])
    limits = np.array([_HOST_S_MAX, _SKEW_MAX])

    def errors(at: _Floats) -> _Floats:
        tried = msgspec.structs.replace(profile, host_s=float(at[0]), skew=float(at[1]))
        means: _Floats = simulate(tried, engine, served)[:, :FITTED_ON].mean(axis=1)
        relative: _Floats = means / wanted
        return relative - 1.0

    at = np.array([profile.host_s, profile.skew])
    for done in range(_FIT_ROUNDS):
        here = errors(at)
        slopes = np.array([(errors(at + np.diag(steps)[k]) - here) / steps[k] for k in range(2)]).T
        at = bounded_least_squares(slopes, slopes @ at - here, limits)
        report((4 + 3 * done) / _SIMULATIONS)
    return msgspec.structs.replace(profile, host_s=float(at[0]), skew=float(at[1]))


def _profile(folder: Path, shape: Description) -> Profile:
    if shape.profile is not None:
        try:
            return find_profile(shape.profile)
        except ProfileError as problem:
            raise TruthError(f"{folder / 'engine.toml'}: profile: {problem}") from problem
    card = Card(
        name=folder.name,
        model=shape.model,
        layers=shape.layers,
        kv_tokens=shape.engine.kv_tokens,
        max_model_len_tokens=shape.engine.kv_tokens,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        all_reduce_s=shape.all_reduce_ms / 1e3,
        all_reduce_s_per_token=shape.all_reduce_us_per_token / 1e6,
    )
    try:
        return profile_of_kernels(folder, card)
    except (OSError, ValueError, KeyError) as problem:
        raise TruthError(f"{folder}: the kernel timings cannot be read: {problem}") from problem


def _recorded(served: Sequence[RecordedRequest]) -> _Floats:
    return np.array(
        [
            (
                row.first_token_s - row.queued_s,
                (row.last_token_s - row.first_token_s) / max(1, row.output_tokens - 1),
                row.last_token_s - row.queued_s,
            )
            for row in served
        ]
    ).T


def _measured(request: SimulatedRequest) -> tuple[float, float, float]:
    if request.fate is not Fate.COMPLETE:
        line = f"request {request.arrival.index}, in order of arrival"
        raise TruthError(
            f"{line}: expected a request that fits the engine; it failed: {request.failure}."
        )
    queued, first, last = request.submitted_at, request.first_token_at, request.finished_at
    assert queued is not None
    assert first is not None
    assert last is not None
    output_tokens = request.arrival.output_tokens
    return first - queued, (last - first) / max(1, output_tokens - 1), last - queued
