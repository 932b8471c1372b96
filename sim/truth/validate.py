"""`sim validate`: compare the simulator with every available recording of a real engine, and print
the errors.

A recording is a folder with an `engine.toml` whose `kind` names a module of `sim/truth`. New
recordings of a known kind need no code. Two recordings come with the simulator, in
`sim/truth/recordings`: one made for it, and a published table. Recordings of other projects are not
included. A run without them and without --truth names them and the places where they are searched.

Exit codes: 0 if all errors are within the tolerances, 1 if not, if a recording is unreadable, or if
the file of `--json` cannot be written, 2 if there is no recording in the folders of `--truth`
(without it, in the shared folder, if there is one), and 130 if interrupted. An interrupted run
prints the completed recordings.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from epp.core.failures import Interrupted
from sim.engine.profiles import Profile, profile_named
from sim.interrupts import INTERRUPTED, interrupts_call
from sim.output import progress_bar
from sim.sentences import sentence_of
from sim.truth import ladder, latency, prefix_cache
from sim.truth.judgement import Judgement, ReportProgress, TruthError, described


class Kind(Struct, frozen=True):
    """A kind of recording: how it is compared, and how long that takes."""

    judge: Callable[[Path, dict[str, Any], ReportProgress, Profile | None], Iterator[Judgement]]
    work: float
    """Approximate duration of comparing one recording, relative to other kinds."""


KINDS: Final[Mapping[str, Kind]] = {
    "prefix_cache": Kind(prefix_cache.judge, 1.0),
    "latency": Kind(latency.judge, 1.0),
    "ladder": Kind(ladder.judge, 25.0),
}
"""Kinds of recordings in the order in which they are compared, the fastest first."""

RECORDINGS: Final = Path(__file__).with_name("recordings")
"""Folder of the recordings that are distributed with the simulator."""
ELSEWHERE: Final = ("rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b")
"""Names of recordings that cannot be distributed with the simulator, although figures in README are
based on them.
"""

_NOT_JUDGED: Final = "not judged"
_HEADINGS: Final = ("truth", "what", "recorded", "simulated", "error", "tolerance", "")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `sim validate`."""
    parser = commands.add_parser(
        "validate",
        help="compare the simulator with recordings of real engines",
        description="Simulate every recording, print the errors, and fail if one exceeds its tolerance.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--truth",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder of a recording, or a folder of such folders; repeatable "
        "(default: the included recordings, and those in $HOMING_SHARED/truth or else "
        "../shared/truth)",
    )
    parser.add_argument(
        "--profile",
        type=profile_named,
        metavar="NAME|FILE.toml",
        help="engine profile that replaces each recording's own; if it is an estimated one, each "
        "tolerance is at least its published error",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file to which the results are written as JSON"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim validate` with the parsed flags: print the results, write them to the file of
    `--json`, and return the exit code.
    """
    roots: list[Path] = options.truth or _shared_roots()
    folders = sorted({folder for root in roots for folder in folders_in(root)})
    if roots and not folders:
        places = ", ".join(str(root) for root in roots)
        return _fail(f"No recording in {places}; expected folders with an engine.toml.", code=2)
    if not options.truth:
        found = {folder.name for folder in folders}
        folders += [folder for folder in folders_in(RECORDINGS) if folder.name not in found]
    findings = Findings()
    try:
        with interrupts_call(_interrupt):
            findings.judge_all(folders, options.profile)
    except KeyboardInterrupt:
        # The completed recordings are still printed.
        pass
    _print_table(findings.judgements)
    if not options.truth:
        _say_missing({folder.name for folder in folders})
    for sentence in findings.problems:
        _fail(sentence, code=1)
    complete = findings.done == len(folders)
    if options.json is not None:
        try:
            options.json.write_bytes(as_json(findings, complete=complete))
        except OSError as problem:
            return _fail(sentence_of(problem), code=1)
    if not complete:
        sentence = f"interrupted, {findings.done} of {len(folders)} recordings are done"
        return _fail(sentence, code=INTERRUPTED)
    return 0 if findings.passed else 1


class Findings:
    """The results for the completed recordings of a `sim validate` run."""

    def __init__(self) -> None:
        self.judgements: list[Judgement] = []
        self.problems: list[str] = []
        self.done = 0
        """Number of completed recordings, including those that could not be read."""

    @property
    def passed(self) -> bool:
        return not self.problems and all(judgement.passed for judgement in self.judgements)

    def judge_all(self, folders: Sequence[Path], given: Profile | None = None) -> None:
        """Compare recordings one after the other, the fastest kind first, with a progress bar. Add
        the results to `judgements`, and a sentence to `problems` for each recording that cannot be
        used.

        A `given` profile replaces each recording's own.
        """
        order = list(KINDS)
        ranked: list[tuple[int, float, Path]] = []
        for folder in folders:
            try:
                kind = str(described(folder).get("kind"))
            except TruthError as problem:
                self.problems.append(str(problem))
                self.done += 1
                continue
            known = kind in KINDS
            work = KINDS[kind].work if known else 0.0
            ranked.append((order.index(kind) if known else len(order), work, folder))
        whole = sum(work for _, work, _ in ranked) or 1.0
        before = 0.0
        with progress_bar("{task.description}") as bar:
            task = bar.add_task("validate", total=100.0)
            for _, work, folder in sorted(ranked):
                # The name is shown at once, because the bar's refresh interval would miss the fast
                # recordings.
                bar.update(task, description=folder.name, refresh=True)

                def report(share: float, start: float = before, work: float = work) -> None:
                    bar.update(task, completed=100.0 * (start + share * work) / whole)

                try:
                    self.judgements += list(judge(folder, report, given))
                except TruthError as problem:
                    self.problems.append(str(problem))
                report(1.0)
                self.done += 1
                before += work


def _interrupt() -> NoReturn:
    raise Interrupted


def folders_in(root: Path) -> list[Path]:
    """Return `root` if it is a recording (has an engine.toml), else the recordings directly inside
    it.
    """
    if (root / "engine.toml").is_file():
        return [root]
    return sorted(file.parent for file in root.glob("*/engine.toml"))


def judge(
    folder: Path, report: ReportProgress, given: Profile | None = None
) -> Iterator[Judgement]:
    """Yield all comparisons of one recording. Raises `TruthError` if the recording cannot be used.

    A `given` profile replaces the recording's own.
    """
    description = described(folder)
    kind = description.get("kind")
    known = KINDS.get(str(kind))
    if known is None:
        raise TruthError(
            f"{folder / 'engine.toml'}: kind: expected one of {', '.join(KINDS)}, got {kind!r}."
        )
    yield from known.judge(folder, description, report, given)


def as_json(findings: Findings, *, complete: bool) -> bytes:
    """Return the results as JSON: `{schema, complete, passed, problems, judgements: [{...,
    passed}]}`.

    `complete` is False if the run was interrupted; `passed` is then false too.
    """
    document = {
        "schema": 1,
        "complete": complete,
        "passed": complete and findings.passed,
        "problems": findings.problems,
        "judgements": [
            {**msgspec.to_builtins(judgement), "passed": judgement.passed}
            for judgement in findings.judgements
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document)) + b"\n"


def _shared_roots() -> list[Path]:
    """Return the folders in which recordings that are not distributed are searched:
    `$HOMING_SHARED/truth`, or else `../shared/truth` if it exists.
    """
    shared = os.environ.get("HOMING_SHARED")
    if shared:
        return [Path(shared) / "truth"]
    beside = Path("../shared/truth")
    return [beside] if beside.is_dir() else []


def _say_missing(found: Collection[str]) -> None:
    missing = [name for name in ELSEWHERE if name not in found]
    if missing:
        sys.stdout.write(
            f"Not run: {' and '.join(missing)}, runs of GPUs that casys-kaist/LLMServingSim "
            "published. They are not included. With engine.toml, requests.jsonl and "
            "kernels_*.csv as described in sim/truth/latency.py, they are found in "
            "$HOMING_SHARED/truth, in ../shared/truth, or in the folder given by --truth.\n"
        )


def _print_table(judgements: Sequence[Judgement]) -> None:
    rows = [_cells(judgement) for judgement in judgements]
    if sys.stdout.isatty():
        table = Table(*_HEADINGS[:2])
        for heading in _HEADINGS[2:]:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*row, style="bold red" if row[-1] == "FAILED" else None)
        Console().print(table)
    else:
        _print_plain(rows)
    if any(row[-1] == _NOT_JUDGED for row in rows):
        sys.stdout.write(
            f"{_NOT_JUDGED}: the number has no tolerance. Judgements cover the means of a run, its "
            "p99 after the fit, and the mean error and the cliff over the rates of a ladder.\n"
        )


def _print_plain(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for row in (_HEADINGS, *rows):
        left = zip(row[:2], widths, strict=False)
        right = zip(row[2:], widths[2:], strict=True)
        cells = [f"{cell:<{width}}" for cell, width in left]
        cells += [f"{cell:>{width}}" for cell, width in right]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _cells(judgement: Judgement) -> tuple[str, ...]:
    tolerance, recorded, error = judgement.tolerance, judgement.recorded, judgement.error
    unit = f" {judgement.unit}" if judgement.unit else ""
    if recorded is None:
        verdict = "fitted"
    elif tolerance is None:
        verdict = _NOT_JUDGED
    else:
        verdict = "ok" if judgement.passed else "FAILED"
    return (
        judgement.truth,
        judgement.what,
        "" if recorded is None else f"{recorded:.5g}{unit}",
        f"{judgement.simulated:.5g}{unit}",
        "" if error is None else f"{error:+.1%}",
        "" if tolerance is None else f"{tolerance:.0%}",
        verdict,
    )


def _fail(sentence: str, *, code: int) -> int:
    sys.stderr.write(f"sim: {sentence}\n")
    return code
