"""What `sim replay`, `compare` and `sweep` leave behind: a folder, and a bar while they work."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class OutputError(Exception):
    """The output folder cannot be used: one sentence."""


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where to write; `open_folder` takes them."""
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="write the results there; must be empty")
    add("--force", action="store_true", help="write into DIR even if it is not empty")


def open_folder(options: argparse.Namespace) -> Path | None:
    """An empty folder for results, made if need be; None: none is wanted.

    `--force` takes a non-empty one too. Raises `OutputError` and `OSError`.
    """
    path: Path | None = options.out
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        if not options.force and any(path.iterdir()):
            raise OutputError(
                f"{path} is not empty; choose another --out or overwrite with --force"
            )
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one go: whoever opens it finds all of the old or all of the new."""
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(content)
    beside.replace(path)


def as_json(summary: dict[str, Any]) -> bytes:
    """summary.json. The same summary gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n"


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
