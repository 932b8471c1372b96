"""What `sim replay`, `compare`, `sweep`, `tune` and `size` leave behind: a folder, and a bar while they work."""

import argparse
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

REQUESTS: Final = "requests.parquet"
DECISIONS: Final = "decisions.jsonl"
RUNS: Final = "runs.jsonl"
TUNED: Final = "tuned.yaml"
TUNED_CONFIG_MAP: Final = "tuned-configmap.yaml"
BEST_SO_FAR: Final = "best-so-far.yaml"
AUTOSCALING: Final = "autoscaling.yaml"
TRAFFIC: Final = "traffic.yaml"
_WRITTEN: Final = (
    *("summary.json", "report.md", "report.html", REQUESTS, DECISIONS),
    *(RUNS, TUNED, TUNED_CONFIG_MAP, BEST_SO_FAR, AUTOSCALING, TRAFFIC),
)
"""What the commands write; no command writes all of it."""


class Printer(Console):
    """Writes to standard output. A reader that left is a `BrokenPipeError`, as with `print`."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  it is called where that was caught


class OutputError(Exception):
    """The output folder cannot be used: one sentence."""


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where to write; `open_folder` takes them."""
    add = parser.add_argument_group("Output").add_argument
    add("--out", type=Path, metavar="DIR", help="write the results there; must be empty")
    add("--force", action="store_true", help="replace the results that are in DIR already")


def open_folder(options: argparse.Namespace, *, goes_on: str = "") -> Path | None:
    """An empty folder for results, made if need be; None: none is wanted.

    `--force` takes a non-empty one too, and removes what earlier runs have written there: nothing
    of two runs stands side by side. A command that can go on where it was stopped takes one with the
    file `goes_on` too. Raises `OutputError` and `OSError`.
    """
    path: Path | None = options.out
    if path is None:
        return None
    if path.is_file():
        raise OutputError(f"--out {path}: expected a folder, got a file")
    path.mkdir(parents=True, exist_ok=True)
    if options.force:
        for name in _WRITTEN:
            (path / name).unlink(missing_ok=True)
    elif not (goes_on and (path / goes_on).exists()) and any(path.iterdir()):
        raise OutputError(f"{path} is not empty; choose another --out or overwrite with --force")
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one go: whoever opens it finds all of the old or all of the new."""
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(content)
    beside.replace(path)


def progress_bar(title: str) -> Progress:
    """On a terminal; silent elsewhere."""
    return Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
