"""Results of comparing the simulator with a recording, and the reading of recordings."""

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

Told: TypeAlias = Callable[[float], None]
"""Callback that receives the completed share of a judge's work, now and then."""


class TruthError(Exception):
    """A recording cannot be used. The message is one sentence with the file and what was
    expected.
    """


class Judgement(Struct, frozen=True, kw_only=True):
    """A recorded number beside the simulated one, or a number that was fitted."""

    truth: str
    """Name of the folder."""
    what: str
    recorded: float | None
    """Recorded value; None for a fitted number, which no recording contains."""
    simulated: float
    unit: str
    error: float | None
    """Error as a signed share of `recorded`, or of the total if `what` counts agreements."""
    tolerance: float | None
    """Maximum of `abs(error)`; None if the number is only shown."""

    @property
    def passed(self) -> bool:
        if self.tolerance is None or self.error is None:
            return True
        return abs(self.error) <= self.tolerance


def against(
    truth: str, what: str, values: tuple[float, float], unit: str, tolerance: float | None
) -> Judgement:
    """Return a judgement of `values`: the recorded and the simulated value."""
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
    """Return the tolerance: that of an estimated profile is its published error if that is larger.

    `profile` replaces the recording's own profile; None if it does not.
    """
    if profile is None or profile.estimated is None:
        return usual
    return max(usual, profile.estimated.prefill, profile.estimated.decode)


def fitted(truth: str, what: str, value: float, unit: str, *, profile: float) -> Judgement:
    """Return a fitted constant beside the profile's value, which is shown without a verdict."""
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
    """Return a judgement that all of `total` items agree."""
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
    """Return the content of `engine.toml` in `folder`. Raises TruthError."""
    file = folder / "engine.toml"
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise TruthError(unread(file, problem, "TOML")) from problem


def converted(folder: Path, description: dict[str, Any], kind: type[T]) -> T:
    """Return the description as `kind`, ignoring fields that `kind` does not have. Raises
    TruthError.
    """
    try:
        return msgspec.convert(description, kind)
    except msgspec.ValidationError as problem:
        raise TruthError(f"{misfit(str(folder / 'engine.toml'), problem, kind)}.") from problem


def is_there(file: Path) -> bool:
    """Return whether a recording has this file, plain or compressed."""
    return file.is_file() or _packed(file).is_file()


def lines_of(file: Path, kind: type[T]) -> Sequence[T]:
    """Return the rows of a JSON-lines file, or of its .gz variant. Raises TruthError with
    the line.
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
