"""`sim calibrate`: a profile of one's own from a few measured points.

Measured are, on an idle pod, the TTFT of single requests without any cached prefix, by their prompt
length, and the inter-token latency of batches, by the number of requests and their context. The
points are a TOML file, say points.toml:

    name = "my-card"                      # of the profile
    like = "llama-3.1-8b-h100-tp1"        # what the points do not tell is taken from here
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
    [profile]                             # fields of the profile that are known, if any
    kv_tokens = 120_000

From these points, and with the profile that comes of them:

    sim calibrate points.toml --out my-card.toml
    sim replay TRACE --profile my-card.toml

Five constants are fitted, none below zero, by least squares of the relative errors: `weight_read_s`,
`linear_s_per_token`, `decode_s_per_context_token`, `pair_s` and `frontend_s`. The time of the linear
layers is the greater of two lines, so the fit is repeated until each point stays on its line.
"""

import argparse
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
"""Different prompt lengths: base, slope and bend."""
BATCHES_MIN: Final = 2
"""Different decode contexts: base and slope."""
_ROUNDS_MAX: Final = 20
_STEP: Final = 1e-4
_UNITS: Final = dict(zip(FITTED, (1e-2, 1e-5, 1e-7, 1e-9, 1e-2), strict=True))
"""Where the profile to begin with has none."""

_Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=10_000_000)]
_Measured: TypeAlias = Annotated[float, Meta(ge=1e-6, le=3_600.0)]
"""Seconds: neither a microsecond nor an hour is a step of an engine, and no range holds nan."""
_Floats = npt.NDArray[np.float64]


class TtftPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured first token."""

    prompt_tokens: _Tokens
    seconds: _Measured


class ItlPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured inter-token latency."""

    requests: _Tokens
    context_tokens: _Tokens
    seconds: _Measured


class Points(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured, and what is known besides."""

    name: str
    ttft: list[TtftPoint]
    itl: list[ItlPoint]
    like: str = DEFAULT_PROFILE
    profile: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if len({point.prompt_tokens for point in self.ttft}) < LENGTHS_MIN:
            raise ValueError(f"ttft: expected at least {LENGTHS_MIN} different prompt lengths")
        if len({point.requests * point.context_tokens for point in self.itl}) < BATCHES_MIN:
            raise ValueError(f"itl: expected at least {BATCHES_MIN} different decode contexts")


class Residual(Struct, frozen=True, kw_only=True):
    """A point and what the fitted profile says of it."""

    what: str
    measured_s: Seconds
    fitted_s: Seconds

    @property
    def error(self) -> float:
        return self.fitted_s / self.measured_s - 1.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to those of `sim`."""
    parser = commands.add_parser(
        "calibrate",
        help="a profile of your own from a few measured points",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("points", type=Path, metavar="POINTS.toml", help="as above")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the profile there (default: stdout)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command: 0 done, 1 the profile cannot be written, 2 the points are no good."""
    try:
        points = points_in(options.points)
        profile, residuals = calibrate(points)
    except ProfileError as problem:
        sys.stderr.write(f"sim: {problem}\n")
        return 2
    worst = max(abs(residual.error) for residual in residuals)
    comments = dict.fromkeys(FITTED, f"fitted to {options.points.name}")
    text = f"# Worst residual of {len(residuals)} points: {worst:.1%}.\n"
    text += profile_as_toml(profile, comments)
    _print_residuals(residuals)
    if options.out is None:
        sys.stdout.write(text)
        return 0
    options.out.write_text(text)
    return 0


def points_in(path: Path) -> Points:
    """The points of a file. Raises ProfileError."""
    try:
        return msgspec.convert(toml_in(path), Points)
    except msgspec.ValidationError as problem:
        raise ProfileError(f"{misfit(str(path), problem, Points)}.") from problem


def calibrate(points: Points) -> tuple[Profile, list[Residual]]:
    """The fitted profile and how far it is from each point. Raises ProfileError."""
    base = msgspec.to_builtins(find_profile(points.like))
    # The line behind a table's last point is all that is kept of the table.
    base.update(linear_tokens=(), linear_s=(), linear_base_s=0.0, **points.profile)
    try:
        profile = msgspec.convert({**base, "name": points.name}, Profile)
    except (msgspec.ValidationError, TypeError) as problem:
        raise ProfileError(f"{misfit('profile', problem, Profile)}.") from problem
    seconds = [p.seconds for p in points.ttft] + [p.seconds for p in points.itl]
    measured = np.array(seconds)
    # In units of where the fit begins: the constants are of very different sizes.
    units = np.array([getattr(profile, field) or _UNITS[field] for field in FITTED])

    def with_constants(at: _Floats) -> Profile:
        values = dict(zip(FITTED, (at * units).tolist(), strict=True))
        return msgspec.structs.replace(profile, **values)

    def errors(at: _Floats) -> _Floats:
        relative: _Floats = _predicted(points, with_constants(at)) / measured
        return relative - 1.0

    try:
        profile = with_constants(_least_squares(errors))
        # What cannot be read back is no profile either.
        msgspec.convert(msgspec.to_builtins(profile), Profile)
    except ValueError as problem:
        place = f"{points.name}: the points are those of no engine"
        raise ProfileError(f"{misfit(place, problem, Profile)}.") from problem
    names = [f"TTFT of {point.prompt_tokens} tokens" for point in points.ttft]
    names += [f"ITL of {p.requests} requests, {p.context_tokens} tokens each" for p in points.itl]
    residuals = [
        Residual(what=what, measured_s=was, fitted_s=now)
        for what, was, now in zip(
            names, measured.tolist(), _predicted(points, profile).tolist(), strict=True
        )
    ]
    return profile, residuals


def _least_squares(errors: Callable[[_Floats], _Floats]) -> _Floats:
    """The constants, in their units, with the least squares of `errors`: lines between its bends."""
    at = np.ones(len(FITTED))
    for _ in range(_ROUNDS_MAX):
        here, before = errors(at), at
        slopes = np.array([errors(at + step) - here for step in np.eye(len(FITTED)) * _STEP]).T
        at = bounded_least_squares(slopes / _STEP, slopes @ at / _STEP - here, np.full(5, np.inf))
        if np.allclose(at, before, rtol=1e-6, atol=1e-9):
            break
    return at


def _predicted(points: Points, profile: Profile) -> _Floats:
    """What the profile says of each point, as the engine would step through it."""
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
    for batch in points.itl:
        work = StepWork(
            tokens=batch.requests,
            decodes=batch.requests,
            decode_context_tokens=batch.requests * batch.context_tokens,
            longest_context_tokens=batch.context_tokens,
            sequences=batch.requests,
        )
        seconds.append(profile.step_s(work))
    return np.array(seconds)


def _print_residuals(residuals: Sequence[Residual]) -> None:
    width = max(len(residual.what) for residual in residuals)
    for residual in residuals:
        sys.stderr.write(
            f"{residual.what:<{width}}  measured {residual.measured_s * 1e3:9.2f} ms"
            f"  fitted {residual.fitted_s * 1e3:9.2f} ms  {residual.error:+.1%}\n"
        )
    if len(residuals) <= len(FITTED):
        sys.stderr.write(
            f"{len(residuals)} points for {len(FITTED)} constants: the residuals say nothing of "
            "how good the fit is.\n"
        )
