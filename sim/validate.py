"""`sim validate`: the simulator against every recording there is, and how far off it may be.

A recording is a folder with an `engine.toml` of which `kind` names a module of `sim/truth`; new
recordings of a known kind need no code.

Exit codes: 0 all within the tolerances, 1 not, or a recording cannot be read, 2 none was found.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sim.sentences import sentence_of
from sim.truth import ladder, latency, prefix_cache
from sim.truth.judgement import Judgement, TruthError, described

KINDS: Final[Mapping[str, Callable[[Path, dict[str, Any]], Iterator[Judgement]]]] = {
    "prefix_cache": prefix_cache.judge,
    "latency": latency.judge,
    "ladder": ladder.judge,
}
"""In the order in which they are run: the quick ones first."""

_HEADINGS: Final = ("truth", "what", "recorded", "simulated", "error", "tolerance", "")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to those of `sim`."""
    parser = commands.add_parser(
        "validate",
        help="the simulator against recordings of real engines",
        description="Run every recording found, print the errors, fail outside the tolerances.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--truth",
        type=Path,
        action="append",
        metavar="DIR",
        help="a recording, or a folder of recordings; repeatable "
        "(default: $HOMING_SHARED/truth, else ../shared/truth)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the judgements there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command."""
    roots: list[Path] = options.truth or [_default_root()]
    folders = sorted({folder for root in roots for folder in folders_in(root)})
    if not folders:
        places = ", ".join(str(root) for root in roots)
        return _fail(f"No recording in {places}; expected folders with an engine.toml.", code=2)
    judgements: list[Judgement] = []
    problems: list[str] = []
    for folder in _quick_first(folders, problems):
        _say(f"{folder.name} ...")
        try:
            judgements.extend(judge(folder))
        except TruthError as problem:
            problems.append(str(problem))
    passed = not problems and all(judgement.passed for judgement in judgements)
    _print_table(judgements)
    for sentence in problems:
        _fail(sentence, code=1)
    if options.json is not None:
        try:
            options.json.write_bytes(as_json(judgements, problems, passed=passed))
        except OSError as problem:
            return _fail(sentence_of(problem), code=1)
    return 0 if passed else 1


def folders_in(root: Path) -> list[Path]:
    """`root` if it is a recording, else the recordings right inside it."""
    if (root / "engine.toml").is_file():
        return [root]
    return sorted(file.parent for file in root.glob("*/engine.toml"))


def judge(folder: Path) -> Iterator[Judgement]:
    """All that is to be said of one recording. Raises TruthError."""
    description = described(folder)
    kind = description.get("kind")
    judges = KINDS.get(str(kind))
    if judges is None:
        raise TruthError(
            f"{folder / 'engine.toml'}: kind: expected one of {', '.join(KINDS)}, got {kind!r}."
        )
    yield from judges(folder, description)


def as_json(judgements: Sequence[Judgement], problems: Sequence[str], *, passed: bool) -> bytes:
    """`{schema, passed, problems, judgements: [{..., passed}]}`."""
    rows = [
        {**msgspec.to_builtins(judgement), "passed": judgement.passed} for judgement in judgements
    ]
    document = {"schema": 1, "passed": passed, "problems": list(problems), "judgements": rows}
    return msgspec.json.format(msgspec.json.encode(document)) + b"\n"


def _quick_first(folders: Sequence[Path], problems: list[str]) -> list[Path]:
    order = list(KINDS)
    ranked: list[tuple[int, Path]] = []
    for folder in folders:
        try:
            kind = described(folder).get("kind")
        except TruthError as problem:
            problems.append(str(problem))
            continue
        ranked.append((order.index(kind) if kind in order else len(order), folder))
    return [folder for _, folder in sorted(ranked)]


def _default_root() -> Path:
    shared = os.environ.get("HOMING_SHARED")
    return (Path(shared) if shared else Path("../shared")) / "truth"


def _print_table(judgements: Sequence[Judgement]) -> None:
    rows = [_cells(judgement) for judgement in judgements]
    if sys.stdout.isatty():
        try:
            _print_rich(rows)
        except ImportError:
            pass
        else:
            return
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for row in (_HEADINGS, *rows):
        left = zip(row[:2], widths, strict=False)
        right = zip(row[2:], widths[2:], strict=True)
        cells = [f"{cell:<{width}}" for cell, width in left]
        cells += [f"{cell:>{width}}" for cell, width in right]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _print_rich(rows: Sequence[tuple[str, ...]]) -> None:
    # Of the extra `sim`: the command works without it.
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(*_HEADINGS[:2])
    for heading in _HEADINGS[2:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row, style="bold red" if row[-1] == "FAILED" else None)
    Console().print(table)


def _cells(judgement: Judgement) -> tuple[str, ...]:
    tolerance = judgement.tolerance
    unit = f" {judgement.unit}" if judgement.unit else ""
    verdict = "" if tolerance is None else "ok" if judgement.passed else "FAILED"
    return (
        judgement.truth,
        judgement.what,
        f"{judgement.recorded:.5g}{unit}",
        f"{judgement.simulated:.5g}{unit}",
        f"{judgement.error:+.1%}",
        "" if tolerance is None else f"{tolerance:.0%}",
        verdict,
    )


def _say(sentence: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{sentence}\n")


def _fail(sentence: str, *, code: int) -> int:
    sys.stderr.write(f"sim: {sentence}\n")
    return code
