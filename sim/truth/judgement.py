"""Results of comparing the simulator with a recording of a real engine, and functions that read
recordings.
"""

import gzip
import tomllib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from epp.core.expectation import misfit
from sim.engine.profiles import Profile
from sim.sentences import unread

T = TypeVar("T")

ReportProgress: TypeAlias = Callable[[float], None]
"""Callback that receives the progress of a comparison as a share from 0 to 1."""


class TruthError(Exception):
    """A recording cannot be used. The error is one sentence with the file and what was expected in
    it.
    """


class Judgement(Struct, frozen=True, kw_only=True):
    """One number of a recording beside the simulated number, or a constant that was fitted to the
    recording.
    """

    truth: str
    """Name of the folder of the recording with which the simulation is compared."""
    what: str
    recorded: float | None
    """Recorded value; None for a fitted constant, which no recording contains."""
    simulated: float
    unit: str
    error: float | None
    """Relative error: simulated / recorded - 1. It is minus the share of disagreements if `what`
    counts agreements (1 if there is nothing to count), the mean of absolute relative errors if `what` is a mean error, and None for
    a fitted constant.
    """
    tolerance: float | None
    """Maximum of `abs(error)`; None if the number is shown without a verdict."""

    @property
    def passed(self) -> bool:
        if self.tolerance is None or self.error is None:
            return True
        return abs(self.error) <= self.tolerance


def against(
    truth: str, what: str, values: tuple[float, float], unit: str, tolerance: float | None
) -> Judgement:
    """Return the comparison of the two numbers in `values`, which are (recorded, simulated)."""
    recorded, simulated = float(values[0]), float(values[1])
    return Judgement(
        truth=truth,
        what=what,
        recorded=recorded,
        simulated=simulated,
        unit=unit,
        error=simulated / recorded - 1.0,
        tolerance=tolerance,
    )


def tolerated(usual: float, profile: Profile | None) -> float:
    """Return the tolerance of a relative error: the usual one, or the published error of an
    estimated `profile` if that is larger.

    `profile` is the one that replaces the recording's own; None if none does.
    """
    if profile is None or profile.estimated is None:
        return usual
    return max(usual, profile.estimated.prefill, profile.estimated.decode)


def fitted(truth: str, what: str, value: float, unit: str, *, profile: float) -> Judgement:
    """Return a fitted constant beside the profile's value of it, which is shown without a verdict."""
    return Judgement(
        truth=truth,
        what=f"{what} ({profile:.5g}{f' {unit}' if unit else ''} in the profile)",
        recorded=None,
        simulated=value,
        unit=unit,
        error=None,
        tolerance=None,
    )


def all_of(truth: str, what: str, total: int, agreed: int) -> Judgement:
    """Return the comparison of `total` recorded items, of which `agreed` are equal in the
    simulation. It passes only if there are some and all are equal.
    """
    return Judgement(
        truth=truth,
        what=what,
        recorded=total,
        simulated=agreed,
        unit="",
        error=agreed / total - 1.0 if total else 1.0,
        tolerance=0.0,
    )


def described(folder: Path) -> dict[str, Any]:
    """Return the content of `engine.toml` in a recording's folder. Raises `TruthError`."""
    file = folder / "engine.toml"
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise TruthError(unread(file, problem, "TOML")) from problem


def converted(folder: Path, description: dict[str, Any], kind: type[T]) -> T:
    """Return the description of a recording as an instance of `kind`, without fields that `kind`
    does not have. Raises `TruthError` if a field is invalid.
    """
    try:
        return msgspec.convert(description, kind)
    except msgspec.ValidationError as problem:
        raise TruthError(f"{misfit(str(folder / 'engine.toml'), problem, kind)}.") from problem


def is_there(file: Path) -> bool:
    """Return whether a file of a recording exists, either plain or compressed as `.gz`."""
    return file.is_file() or _packed(file).is_file()


def lines_of(file: Path, kind: type[T]) -> Sequence[T]:
    """Return the rows of a JSON-lines file, or of its `.gz` variant.

    Raises `TruthError`, which names the number of an invalid line.
    """
    rows: list[T] = []
    try:
        with _opened(file) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    rows.append(msgspec.json.decode(line, type=kind))
                except msgspec.DecodeError as problem:
                    raise TruthError(f"{misfit(f'{file}:{number}', problem, kind)}.") from problem
    except (OSError, EOFError, zlib.error) as problem:
        raise TruthError(unread(file, problem, "JSON lines, plain or compressed")) from problem
    if not rows:
        raise TruthError(f"{file}: expected at least one line.")
    return rows


def _packed(file: Path) -> Path:
    return file.with_name(f"{file.name}.gz")


def _opened(file: Path) -> BinaryIO | gzip.GzipFile:
    packed = _packed(file)
    if not file.exists() and packed.exists():
        return gzip.open(packed)
    return file.open("rb")
