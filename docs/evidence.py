"""Measure the figures of the documentation again, by the inventory in docs/evidence.toml.

python -m docs.evidence              list the entries
python -m docs.evidence check        compare the inventory with the tree, and print stale entries
python -m docs.evidence measure      measure stale entries again, the shortest first
python -m docs.evidence record NAME  mark an entry as measured once a person has edited its page
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from docs.inventory import (
    INVENTORY,
    ROOT,
    Entry,
    EvidenceError,
    digest,
    duration,
    entry_named,
    git,
    objects,
    problems,
    read,
    stale,
    steps,
    write_entry,
)
from epp.reader_left import until_reader_leaves
from sim.output import write_whole

LOGS: Final = "evidence"
"""Folder of logs, of files that measuring commands write, and of figures that a person has not yet
copied to a page.
"""
GRACE_S: Final = 20.0
"""Time in seconds that an interrupted command has to end after each signal."""
_EXIT_INTERRUPTED: Final = 130


def _has_program(name: str) -> bool:
    beside = Path(sys.executable).with_name(name)
    return bool(shutil.which(beside) or shutil.which(name))


def _exits_with_0(*words: str) -> bool:
    command = (sys.executable, *words)
    return not subprocess.run(command, cwd=ROOT, capture_output=True).returncode  # noqa: S603, PLW1510


_API_SERVER: Final = "import os; from tests.apiserver.binaries import find; find(os.environ)"
_HAS: Final[Mapping[str, Callable[[], bool]]] = {
    "6-gb": lambda: shutil.disk_usage(Path.home()).free >= 6_000_000_000,
    "cluster": partial(_exits_with_0, "-m", "tests.cluster", "kept"),
    "kube-apiserver": partial(_exits_with_0, "-c", _API_SERVER),
    **{name: partial(_has_program, name) for name in ("chromium", "envoy", "go", "npm")},
}
"""Functions that return whether this machine has what a command needs, by need. The needs "quiet"
and "network" are not checked.
"""


class Measurement(Struct, frozen=True):
    """A measurement: the commit and the digest of the measured sources, its date and its duration."""

    commit: str
    date: date
    duration_s: int
    digest: str


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line of `python -m docs.evidence`, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = ("list", "check", "measure", "record")
    parser.add_argument("action", nargs="?", choices=actions, default="list")
    parser.add_argument("name", nargs="?", help="entry for `record`")
    parser.add_argument("--only", metavar="NAME,...", help="measure only these entries")
    only = "start no entry that would end after M minutes"
    parser.add_argument("--minutes", type=float, metavar="M", help=only)
    parser.add_argument("--list", action="store_true", help="list the entries, measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, measure nothing")
    parser.add_argument("--force", action="store_true", help="measure fresh entries too")
    options = parser.parse_args(arguments)
    if options.action == "record" and options.name is None:
        parser.error("`record` needs the NAME of an entry")
    try:
        match "list" if options.list else options.action:
            case "check":
                return _check(root)
            case "measure":
                return _measure(root, options)
            case "record":
                _record(root, options.name)
            case _:
                _list(root)
    except EvidenceError as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; finished measurements are in {INVENTORY}", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return 0


def _check(root: Path) -> int:
    inventory = read(root)
    found = list(problems(root, inventory))
    for problem in found:
        print(f"{INVENTORY}: {problem}", file=sys.stderr)
    reasons, known = stale(root, inventory.evidence, _today())
    for name, reason in reasons.items():
        print(f"stale evidence: {name}, {reason}")
    unknown = "" if known else "; which sources changed is unknown, this is no git repository"
    print(f"{len(inventory.evidence)} entries of evidence, {len(reasons)} stale{unknown}")
    return 1 if found else 0


def _list(root: Path) -> None:
    entries = read(root).evidence
    reasons, known = stale(root, entries, _today())
    for entry in sorted(entries, key=lambda one: one.duration_s):
        state = "stale" if entry.name in reasons else "fresh" if known else "unknown"
        takes = duration(entry.duration_s) if entry.command else ""
        command = entry.command if len(entry.command) <= 80 else f"{entry.command[:77]}..."
        told = f"{entry.name:21} {state:7} {takes:>7}  {entry.date}  {entry.commit[:9]}"
        print(f"{told}  {command or 'by hand'}")


def _today() -> date:
    return datetime.now(UTC).date()


def _measure(root: Path, options: argparse.Namespace) -> int:
    """Measure stale entries of the inventory, with `--force` fresh ones too, the shortest first.
    Return 1 if a measurement failed,
    else 0.
    """
    began_s = time.monotonic()
    names = options.only.split(",") if options.only else []
    entries = [entry_named(root, name) for name in names] or read(root).evidence
    reasons, known = stale(root, entries, _today())
    if not known:
        raise EvidenceError("no git repository: nothing tells which entries are stale")
    failed = []
    planned_s = 0
    for entry in sorted(entries, key=lambda one: one.duration_s):
        if entry.name not in reasons and not options.force:
            continue
        ends_s = time.monotonic() - began_s + planned_s + entry.duration_s
        try:
            if why := _hindrance(root, entry, force=options.force):
                print(f"{entry.name}: skipped, {why}")
            elif options.minutes is not None and ends_s > options.minutes * 60:
                print(f"{entry.name}: skipped, it would end after {options.minutes:g} minutes")
            elif options.dry_run:
                print(f"{entry.name}: {duration(entry.duration_s)}, {entry.command}")
                planned_s += entry.duration_s
            else:
                _measure_entry(root, entry)
        except EvidenceError as problem:
            print(f"{entry.name}: not measured, {problem}")
            failed.append(entry.name)
    if failed:
        print(f"not measured: {', '.join(failed)}")
    return 1 if failed else 0


def _hindrance(root: Path, entry: Entry, *, force: bool) -> str:
    """Return the reason why an entry cannot be measured on this machine now, or "" if it can."""
    if not entry.command:
        return f"it has no command: repeat it by hand, edit the page, run {_typed(entry)}"
    for need in entry.needs:
        if need in _HAS and not _HAS[need]():
            return f"this machine lacks {need}"
    for word in shlex.split(entry.command):
        if word.startswith("../") and not (root / word).exists():
            return f"this machine lacks {word}"
    waits = _waiting(root, entry)
    if waits and not force and waits.digest == _now(root, entry).digest:
        return f"it is measured: edit the page by {_log(root, entry)}, run {_typed(entry)}"
    return ""


def _typed(entry: Entry) -> str:
    return f"`python -m docs.evidence record {entry.name}`"


def _log(root: Path, entry: Entry) -> Path:
    return root / LOGS / f"{entry.name}.log"


def _now(root: Path, entry: Entry) -> Measurement:
    """Return what a measurement of the present tree would record.

    Raise `EvidenceError` if a source is not committed.
    """
    ids = objects(root, [f"HEAD:{one}" for one in entry.sources])
    if ids is None:
        raise EvidenceError("no git repository: nothing tells which sources are measured")
    changes = git(root, "status", "--porcelain", "--", *entry.sources) if entry.sources else ""
    if changes:
        first = changes.splitlines()[0][3:]
        raise EvidenceError(f"source {first} has uncommitted changes: commit or stash them")
    commit = (git(root, "rev-parse", "--short=12", "HEAD") or "").strip()
    return Measurement(commit, _today(), entry.duration_s, digest(ids, entry.sources))


def _measure_entry(root: Path, entry: Entry) -> None:
    """Run the command of an entry, and record the measured tree in the inventory. If a person
    copies the figures to the page, the measurement is stored until `record`.

    Raise `EvidenceError` if the command fails, if a source is not committed, or if a source changes
    meanwhile.
    """
    before, log = _now(root, entry), _log(root, entry)
    folder = log.with_suffix("")
    begun = folder / ".digest"
    # An interrupted command finds its files again, unless the sources have changed since.
    if not begun.exists() or begun.read_text() != before.digest:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun.write_text(before.digest)
    print(
        f"{entry.name}: {entry.command} ({duration(entry.duration_s)}, output in {log})", flush=True
    )
    began_s = time.monotonic()
    with log.open("wb") as output:
        for program, *words in steps(entry.command):
            code = _run(
                [sys.executable if program == "python" else program, *words], root, output.fileno()
            )
            if code:
                raise EvidenceError(f"{program} {shlex.join(words)} exited with {code}, see {log}")
    begun.unlink()
    if _now(root, entry).digest != before.digest:
        raise EvidenceError("its sources changed while it was measured")
    took = replace(before, duration_s=round(time.monotonic() - began_s))
    if entry.by_hand:
        write_whole(log.with_suffix(".json"), msgspec.json.encode(took))
        print(
            f"{entry.name}: measured; edit {', '.join(entry.pages)} by {log}, run {_typed(entry)}"
        )
    else:
        write_entry(root, replace(entry_named(root, entry.name), **asdict(took)))


def _waiting(root: Path, entry: Entry) -> Measurement | None:
    """Return a measurement of the entry that a person has not yet copied to its page, or None if
    there is none.
    """
    with suppress(FileNotFoundError):
        content = _log(root, entry).with_suffix(".json").read_bytes()
        return msgspec.json.decode(content, type=Measurement)
    return None


def _record(root: Path, name: str) -> None:
    entry = entry_named(root, name)
    took = _waiting(root, entry) or _now(root, entry)
    write_entry(root, replace(entry, **asdict(took)))
    _log(root, entry).with_suffix(".json").unlink(missing_ok=True)


def _run(words: Sequence[str], root: Path, output: int) -> int:
    """Run a command in a process group of its own, which Ctrl-C ends. Return the command's exit
    code.
    """
    process = subprocess.Popen(  # noqa: S603 - the commands of the inventory
        words,
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        return process.wait()
    except KeyboardInterrupt:
        _end(process)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process group by the signals interrupt, terminate and kill; the group has `GRACE_S` to
    end before the next one.

    A second Ctrl-C kills it at once.
    """
    with suppress(ProcessLookupError):  # raised when none of the group is left
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.killpg(process.pid, number)
                until_s = time.monotonic() + GRACE_S
                while time.monotonic() < until_s:
                    process.poll()
                    os.killpg(process.pid, 0)
                    time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(until_reader_leaves(main))
