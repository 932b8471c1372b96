"""Output folders and progress bars of commands of `sim`, such as `replay`, `compare` and `size`."""

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
"""Names of all files that the commands write into the output folder; no command writes all of them."""


class Printer(Console):
    """A console on standard output that raises `BrokenPipeError` if the reader of the output has
    closed it, as `print` does.
    """

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  rich calls this in the handler of the error


class OutputError(Exception):
    """Raised if a command cannot use its output folder, or a file or flag that it reads. The
    message is one sentence.
    """


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags `--out` and `--force`, which `open_folder` evaluates."""
    add = parser.add_argument_group("Output").add_argument
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the results; it must be empty or not exist",
    )
    add("--force", action="store_true", help="replace the results of an earlier run in DIR")


def open_folder(options: argparse.Namespace, *, goes_on: str = "") -> Path | None:
    """Return the folder of `--out` for results, created if needed, or None if `--out` is not given.
    A folder that is not empty is refused with `OutputError`.

    With `--force`, a folder that is not empty is accepted too, and the results of earlier runs are
    removed from it. A command that can resume passes the name of its journal as `goes_on`; a folder
    with this file is then accepted. Raises `OutputError` and `OSError`.
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
    """Replace the content of a file atomically: a reader finds either all of the old content or all
    of the new.
    """
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(content)
    beside.replace(path)


def progress_bar(title: str) -> Progress:
    """Return a progress bar that is visible only if stderr is a terminal."""
    return Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
