"""`sim calibrate`: a profile for your own hardware from a few measured points.

Measure two things on an idle pod. One is the TTFT of single requests without any cached prefix, by
prompt length. The other is the inter-token latency of batches, by the number of requests and their
context length. The points are a TOML file, say points.toml:

    name = "my-card"                      # of the profile
    like = "llama-3.1-8b-h100-tp1"        # source of all values that are not fitted
    ttft = [
      { prompt_tokens = 128, seconds = 0.021 },
      { prompt_tokens = 1024, seconds = 0.046 },
      { prompt_tokens = 4096, seconds = 0.152 },
      { prompt_tokens = 16_384, seconds = 0.690 },
    ]
    itl = [                               # context_tokens: of each request
      { requests = 1, context_tokens = 1024, seconds = 0.0085 },
      { requests = 32, context_tokens = 1024, seconds = 0.0101 },
      { requests = 128, context_tokens = 1024, seconds = 0.0148 },
    ]
    [profile]                             # known fields of the profile, if any
    kv_tokens = 120_000

Fit the profile to these points, and use it:

    sim calibrate points.toml --out my-card.toml
    sim replay TRACE --profile my-card.toml

The command fits five constants, none below zero, by least squares of the relative errors:
`weight_read_s`, `linear_s_per_token`, `decode_s_per_context_token`, `pair_s` and `frontend_s`. The
time of the linear layers is the greater of two lines, so the fit is repeated until each point stays
on its line.

`like` may name the file of an estimated profile (`sim profile estimate`). Then one point is enough.
The fit starts from the estimate and moves towards the points, weighted by the error of the
estimate. The resulting profile states its remaining error.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from epp.core.expectation import misfit
from epp.core.types import Seconds
from sim.engine.least_squares import bounded_least_squares
from sim.engine.profiles import (
    DEFAULT_PROFILE,
    EstimateError,
    Profile,
    ProfileError,
    StepWork,
    find_profile,
    profile_as_toml,
    toml_in,
)

FITTED: Final = (
    "weight_read_s",
    "linear_s_per_token",
    "decode_s_per_context_token",
    "pair_s",
    "frontend_s",
)
LENGTHS_MIN: Final = 3
"""Minimum number of distinct prompt lengths among the TTFT points: enough for a base, a slope and a
bend.
"""
BATCHES_MIN: Final = 2
"""Minimum number of distinct decode contexts (requests times context tokens) among the ITL points:
enough for a base and a slope.
"""
NOISE: Final = 0.05
"""Assumed error of a measured time, as a share of that time."""
_ROUNDS_MAX: Final = 20
_STEP: Final = 1e-4
_UNITS: Final = dict(zip(FITTED, (1e-2, 1e-5, 1e-7, 1e-9, 1e-2), strict=True))
"""Typical size of each fitted constant, which is its unit in the fit if it is 0 in the initial
profile.
"""

_Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=10_000_000)]
_Measured: TypeAlias = Annotated[float, Meta(ge=1e-6, le=3_600.0)]
"""A measured time in seconds. An engine's step is longer than a microsecond and shorter than an
hour; the range excludes nan.
"""
_Floats = npt.NDArray[np.float64]


class TtftPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured time to first token of one request, by prompt length."""

    prompt_tokens: _Tokens
    seconds: _Measured


class ItlPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured inter-token latency of a batch, by number of requests and context of each."""

    requests: _Tokens
    context_tokens: _Tokens
    seconds: _Measured


class Points(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a points file: the measured points, and known fields of the profile."""

    name: str
    ttft: list[TtftPoint] = []
    itl: list[ItlPoint] = []
    like: str = DEFAULT_PROFILE
    profile: dict[str, Any] = {}

    @property
    def enough_ttft(self) -> bool:
        """True if the TTFT points have at least `LENGTHS_MIN` different prompt lengths."""
        return len({point.prompt_tokens for point in self.ttft}) >= LENGTHS_MIN

    @property
    def enough_itl(self) -> bool:
        """True if the ITL points have at least `BATCHES_MIN` different decode contexts."""
        return len({point.requests * point.context_tokens for point in self.itl}) >= BATCHES_MIN


class Residual(Struct, frozen=True, kw_only=True):
    """A measured point, and the time that the fitted profile gives for it."""

    what: str
    measured_s: Seconds
    fitted_s: Seconds

    @property
    def error(self) -> float:
        return self.fitted_s / self.measured_s - 1.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim calibrate`."""
    parser = commands.add_parser(
        "calibrate",
        help="create a profile from a few measured points",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "points",
        type=Path,
        metavar="POINTS.toml",
        help="file with the measured points (TTFT and inter-token latency)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write the profile to (default: standard output)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim calibrate`. Return exit code 0 on success, and 2 if the points are unreadable,
    invalid, too few, or fit no engine. Raises `OSError` if the profile cannot be written.
    """
    try:
        points = points_in(options.points)
        profile, residuals = calibrate(points)
    except ProfileError as problem:
        sys.stderr.write(f"sim: {problem}\n")
        return 2
    worst = max(abs(residual.error) for residual in residuals)
    comments = dict.fromkeys(FITTED, f"fitted to {options.points.name}")
    if profile.estimated is not None:
        comments["estimated"] = "remaining error of the estimate"
    text = f"# Worst residual of {len(residuals)} points: {worst:.1%}.\n"
    text += profile_as_toml(profile, comments)
    _print_residuals(residuals, estimated=profile.estimated is not None)
    if options.out is None:
        sys.stdout.write(text)
        return 0
    options.out.write_text(text)
    return 0


def points_in(path: Path) -> Points:
    """Return the measured points in a TOML file. Raises `ProfileError` if the file is unreadable or
    invalid.
    """
    try:
        return msgspec.convert(toml_in(path), Points)
    except msgspec.ValidationError as problem:
        raise ProfileError(f"{misfit(str(path), problem, Points)}.") from problem


def calibrate(points: Points) -> tuple[Profile, list[Residual]]:
    """Return the profile fitted to the points, and its residual at each point. Raises
    `ProfileError` if points are missing or fit no engine.
    """
    base = find_profile(points.like)
    if base.estimated is None:
        profile = _fitted(points, base)
    else:
        profile = _moved(points, base, base.estimated)
    names = [f"TTFT of {point.prompt_tokens} tokens" for point in points.ttft]
    names += [f"ITL of {p.requests} requests, {p.context_tokens} tokens each" for p in points.itl]
    residuals = [
        Residual(what=what, measured_s=was, fitted_s=now)
        for what, was, now in zip(
            names, _measured(points).tolist(), _predicted(points, profile).tolist(), strict=True
        )
    ]
    if base.estimated is not None:
        error = _error_left(points, base.estimated, residuals)
        profile = msgspec.structs.replace(profile, estimated=error)
    return profile, residuals


def _fitted(points: Points, base: Profile) -> Profile:
    """Return `base` with the five fitted constants replaced by those that fit the points, and
    without a table of times of the linear layers. Raises `ProfileError` if there are too few points
    or no engine fits them.
    """
    if not points.enough_ttft:
        raise ProfileError(
            f"{points.name}: ttft: expected at least {LENGTHS_MIN} different prompt lengths, or an "
            "estimated profile as `like`."
        )
    if not points.enough_itl:
        raise ProfileError(
            f"{points.name}: itl: expected at least {BATCHES_MIN} different decode contexts, or an "
            "estimated profile as `like`."
        )
    # Only the line beyond a table's last point is kept from the table.
    profile = _with_known(points, base, {"linear_tokens": (), "linear_s": (), "linear_base_s": 0.0})
    measured = _measured(points)
    # The unknowns are multiples of the initial values, because the constants differ widely in size.
    units = np.array([getattr(profile, field) or _UNITS[field] for field in FITTED])

    def with_constants(at: _Floats) -> Profile:
        values = dict(zip(FITTED, (at * units).tolist(), strict=True))
        return msgspec.structs.replace(profile, **values)

    def errors(at: _Floats) -> _Floats:
        relative: _Floats = _predicted(points, with_constants(at)) / measured
        return relative - 1.0

    return _checked(points, lambda: with_constants(_least_squares(errors)))


def _moved(points: Points, base: Profile, error: EstimateError) -> Profile:
    """Return the estimated profile `base`, moved towards the points. Raises `ProfileError` if there
    is no point or no engine fits them.

    The result minimises the squares of two kinds of errors. The relative errors of the points are
    in units of `NOISE`. The logarithm of the factor on each constant is in units of half the
    estimate's error, because 95 % of normal errors are within two of these units; for the front
    end, the unit is log 2.
    """
    if not (points.ttft or points.itl):
        raise ProfileError(f"{points.name}: expected at least one point, of ttft or itl.")
    profile = _with_known(points, base, {})
    measured = _measured(points)
    spreads = np.array([
        error.decode / 2, error.prefill / 2, error.decode / 2, error.prefill / 2, math.log(2.0),
    ])  # fmt: skip

    def with_factors(logs: _Floats) -> Profile:
        few, many, context, pairs, frontend = np.exp(logs).tolist()
        return msgspec.structs.replace(
            profile,
            linear_s=tuple(
                seconds * _between(few, many, tokens)
                for tokens, seconds in zip(profile.linear_tokens, profile.linear_s, strict=True)
            ),
            linear_s_per_token=profile.linear_s_per_token * many,
            decode_s_per_context_token=profile.decode_s_per_context_token * context,
            pair_s=profile.pair_s * pairs,
            frontend_s=profile.frontend_s * frontend,
        )

    def errors(logs: _Floats) -> _Floats:
        relative = _predicted(points, with_factors(logs)) / measured - 1.0
        return np.concatenate([relative / NOISE, logs / spreads])

    def moved() -> Profile:
        at = np.zeros(len(spreads))
        for _ in range(_ROUNDS_MAX):
            here = errors(at)
            slopes = np.array([(errors(at + step) - here) / _STEP for step in np.eye(5) * _STEP]).T
            move = np.linalg.lstsq(slopes, -here, rcond=None)[0]
            at = np.clip(at + np.clip(move, -0.5, 0.5), -3.0, 3.0)
            if np.abs(move).max() < 1e-6:
                break
        return with_factors(at)

    return _checked(points, moved)


def _between(few: float, many: float, tokens: int) -> float:
    """Return the factor on the time of the linear layers at `tokens` tokens: `few` up to 64 tokens,
    `many` from 1,024 on, in between interpolated over the logarithm of the tokens.
    """
    share = min(1.0, max(0.0, math.log(tokens / 64) / math.log(1024 / 64)))
    return float(few ** (1.0 - share) * many**share)


def _error_left(
    points: Points, error: EstimateError, residuals: Sequence[Residual]
) -> EstimateError:
    """Return the error that an estimated profile has after it was moved to the points.

    With enough points of a kind, it is their largest residual, and at least `NOISE`; otherwise it
    is the estimate's own error. The error of the KV-cache size is 0 if the points file has
    `kv_tokens`, else the estimate's own.
    """
    count = len(points.ttft)
    ttft = max([NOISE, *(abs(one.error) for one in residuals[:count])])
    itl = max([NOISE, *(abs(one.error) for one in residuals[count:])])
    return EstimateError(
        prefill=round(ttft, 3) if points.enough_ttft else error.prefill,
        decode=round(itl, 3) if points.enough_itl else error.decode,
        kv_tokens=0.0 if "kv_tokens" in points.profile else error.kv_tokens,
    )


def _with_known(points: Points, base: Profile, changed: dict[str, Any]) -> Profile:
    """Return `base` with the fields in `changed`, and with the name and the known fields of the
    points file. Raises `ProfileError` if the fields are invalid.
    """
    fields = {**msgspec.to_builtins(base), **changed, **points.profile, "name": points.name}
    try:
        return msgspec.convert(fields, Profile)
    except (msgspec.ValidationError, TypeError) as problem:
        raise ProfileError(f"{misfit('profile', problem, Profile)}.") from problem


def _checked(points: Points, fit: Callable[[], Profile]) -> Profile:
    """Return the profile that `fit` computes. Raises `ProfileError` if it is not valid."""
    try:
        profile = fit()
        msgspec.convert(msgspec.to_builtins(profile), Profile)
    except ValueError as problem:
        place = f"{points.name}: the points do not fit any engine"
        raise ProfileError(f"{misfit(place, problem, Profile)}.") from problem
    return profile


def _measured(points: Points) -> _Floats:
    return np.array([p.seconds for p in points.ttft] + [p.seconds for p in points.itl])


def _least_squares(errors: Callable[[_Floats], _Floats]) -> _Floats:
    """Return the fitted constants that minimise the squares of the piecewise linear `errors`, each
    as a multiple of its initial value (or typical size).
    """
    at = np.ones(len(FITTED))
    for _ in range(_ROUNDS_MAX):
        here, before = errors(at), at
        slopes = np.array([errors(at + step) - here for step in np.eye(len(FITTED)) * _STEP]).T
        at = bounded_least_squares(slopes / _STEP, slopes @ at / _STEP - here, np.full(5, np.inf))
        if np.allclose(at, before, rtol=1e-6, atol=1e-9):
            break
    return at


def _predicted(points: Points, profile: Profile) -> _Floats:
    """Return the time in seconds that the profile gives for each point: the TTFT points in the
    engine's steps, then the ITL points.
    """
    seconds: list[Seconds] = []
    for measured in points.ttft:
        total, done = profile.frontend_delay_s(measured.prompt_tokens), 0
        while done < measured.prompt_tokens:
            tokens = min(profile.max_num_batched_tokens, measured.prompt_tokens - done)
            pairs = tokens * (done + tokens / 2)
            done += tokens
            last = int(done == measured.prompt_tokens)
            work = StepWork(tokens=tokens, prefills=1, attention_pairs=pairs, sequences=last)
            total += profile.step_s(work)
        seconds.append(total)
    seconds += [profile.decode_step_s(one.requests, one.context_tokens) for one in points.itl]
    return np.array(seconds)


def _print_residuals(residuals: Sequence[Residual], *, estimated: bool) -> None:
    width = max(len(residual.what) for residual in residuals)
    for residual in residuals:
        sys.stderr.write(
            f"{residual.what:<{width}}  measured {residual.measured_s * 1e3:9.2f} ms"
            f"  fitted {residual.fitted_s * 1e3:9.2f} ms  {residual.error:+.1%}\n"
        )
    if len(residuals) <= len(FITTED) and not estimated:
        sys.stderr.write(
            f"{len(residuals)} points for {len(FITTED)} constants: the residuals do not show "
            "how good the fit is.\n"
        )
