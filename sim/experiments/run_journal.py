"""A journal file of completed runs, one line for each, from which a stopped command resumes.

The first line describes the conditions of the runs. A journal cannot be opened under other
conditions, because figures of other traffic or other rules would be mixed in.
"""

import fcntl
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

import msgspec
from msgspec import Struct

from sim.interrupts import INTERRUPTED
from sim.measurement.summaries import KeptRun, RunSummary
from sim.output import OutputError

T = TypeVar("T")


class StoppedError(Exception):
    """Ctrl-C was pressed, so that some of the requested runs are missing."""


class _Line(Struct, frozen=True):
    key: str
    run: KeptRun


class RunJournal:
    """An open journal of completed runs, locked against other processes. Leaving the context closes
    it.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        """Open or create the journal, and delete an incomplete last line. `about` describes the
        conditions of the runs, as text by name.

        Raises `OSError`, and `OutputError` if the stored conditions differ from `about`, or if the
        file is damaged or open in another process.
        """
        self._path = path
        self._runs: dict[str, KeptRun] = {}
        # The file is neither truncated nor replaced, because its content is needed.
        self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            self._begin(about)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, key: str) -> KeptRun | None:
        """Return the run that the journal stores under `key`, or None if there is none."""
        return self._runs.get(key)

    def add(self, key: str, run: RunSummary) -> KeptRun:
        """Append a completed run to the journal. Return the figures of the run that the journal
        stores.
        """
        kept = KeptRun(**{name: getattr(run, name) for name in KeptRun.__struct_fields__})
        self._write(_Line(key, kept))
        self._runs[key] = kept
        return kept

    def runs(
        self,
        wanted: Sequence[tuple[str, T]],
        measured: Callable[[Sequence[T]], Iterable[tuple[int, RunSummary]]],
        advance: Callable[[], None],
    ) -> list[KeptRun]:
        """Return the run of each (key, item) in `wanted`, in the same order: stored runs from the
        journal, and the others from `measured`, which are then added to the journal.

        `measured` takes the items to run and yields (position among them, run) in any order; after
        Ctrl-C it may yield fewer. `advance` is called once for each available run. Raises
        `StoppedError` if runs are missing, and what `measured` raises.
        """
        new = {key: one for key, one in wanted if key not in self._runs}
        for _ in range(len(wanted) - len(new)):
            advance()
        keys = list(new)
        for place, run in measured(list(new.values())):
            self.add(keys[place], run)
            advance()
        found = [self._runs[key] for key, _ in wanted if key in self._runs]
        if len(found) < len(wanted):
            raise StoppedError
        return found

    def _begin(self, about: Mapping[str, str]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{self._path} is in use by another process") from None
        content = self._file.read()
        # A process that was killed may have left an incomplete line.
        whole = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        self._file.seek(len(whole))
        head, *lines = whole.splitlines() or [b""]
        if not head:
            self._write(dict(about))
            return
        self._check(self._decoded(head, 1, dict[str, str]), about)
        for number, line in enumerate(lines, start=2):
            one = self._decoded(line, number, _Line)
            self._runs[one.key] = one.run

    def _check(self, was: Mapping[str, str], about: Mapping[str, str]) -> None:
        for name in dict.fromkeys([*about, *was]):
            if was.get(name) != about.get(name):
                raise OutputError(
                    f"{self._path.parent} was started with {name} {was.get(name, 'none')}, not "
                    f"{about.get(name, 'none')}; choose another --out or start again with --force"
                )

    def _decoded(self, line: bytes, number: int, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as problem:
            raise self._damaged(number) from problem

    def _damaged(self, number: int) -> OutputError:
        return OutputError(
            f"{self._path}:{number} is not a completed run; start again with --force"
        )

    def _write(self, line: object) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()


def print_interrupted(journal: RunJournal) -> int:
    """Print how to resume the interrupted command that stores its runs in `journal`, and return the
    exit code of an interrupted command.
    """
    print(
        f"sim: interrupted, {len(journal):,} runs are stored: the same command resumes from there",
        file=sys.stderr,
    )
    return INTERRUPTED
