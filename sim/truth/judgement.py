"""What comparing the simulator with a recording says, and how a recording's description is read."""

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
"""Hears from a judge, now and then, which share of its work is done."""


class TruthError(Exception):
    """A truth folder cannot be used: one sentence with the file and what was expected."""


class Judgement(Struct, frozen=True, kw_only=True):
    """One number of a recording beside the simulator's, or one that was fitted to it."""

    truth: str
    """The folder's name."""
    what: str
    recorded: float | None
    """None: fitted, no recording has it."""
    simulated: float
    unit: str
    error: float | None
    """As a share of `recorded`, signed, or of the whole where `what` counts agreements."""
    tolerance: float | None
    """Most that `abs(error)` may be; None: shown, not judged."""

    @property
    def passed(self) -> bool:
        if self.tolerance is None or self.error is None:
            return True
        return abs(self.error) <= self.tolerance


def against(
    truth: str, what: str, values: tuple[float, float], unit: str, tolerance: float | None
) -> Judgement:
    """`values`: recorded, simulated."""
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
    """The tolerance of a judgement: of an estimated profile its published error, where that is more.

    `profile` stands in the place of what the recording names; None if it does not.
    """
    if profile is None or profile.estimated is None:
        return usual
    return max(usual, profile.estimated.prefill, profile.estimated.decode)


def fitted(truth: str, what: str, value: float, unit: str, *, profile: float) -> Judgement:
    """A constant that was fitted, and what the profile has: nothing that could be right or wrong."""
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
    """All of `total` must agree."""
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
    """The `engine.toml` of `folder`. Raises TruthError."""
    file = folder / "engine.toml"
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise TruthError(unread(file, problem, "TOML")) from problem


def converted(folder: Path, description: dict[str, Any], kind: type[T]) -> T:
    """The description as `kind`; fields that `kind` does not have are for others. TruthError."""
    try:
        return msgspec.convert(description, kind)
    except msgspec.ValidationError as problem:
        raise TruthError(f"{misfit(str(folder / 'engine.toml'), problem, kind)}.") from problem


def is_there(file: Path) -> bool:
    """Whether a recording has this file, plain or packed."""
    return file.is_file() or _packed(file).is_file()


def lines_of(file: Path, kind: type[T]) -> Sequence[T]:
    """A JSON-lines file, or the one beside it that ends in .gz. Raises TruthError, with the line."""
    rows: list[T] = []
    try:
        with _opened(file) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    rows.append(msgspec.json.decode(line, type=kind))
                except msgspec.DecodeError as problem:
                    raise TruthError(f"{misfit(f'{file}:{number}', problem, kind)}.") from problem
    except (OSError, EOFError, zlib.error) as problem:
        raise TruthError(unread(file, problem, "JSON lines, or the same packed")) from problem
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
