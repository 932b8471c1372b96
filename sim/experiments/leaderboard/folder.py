"""The folder of a leaderboard: a file a cell, so that what has been run need not be run again."""

from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from sim.experiments.leaderboard.cell import Cell, CellResult
from sim.output import OutputError, write_whole

_CELLS: Final = "cells"


class CellFolder:
    """Results of cells in `path`/cells; made if need be."""

    def __init__(self, path: Path, *, anew: bool) -> None:
        """`anew`: forget what is there. Raises `OutputError` if something else is, and `OSError`."""
        self._cells = path / _CELLS
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()) and not self._cells.is_dir():
            raise OutputError(
                f"{path} holds something else than a leaderboard; choose another --out"
            )
        self._cells.mkdir(exist_ok=True)
        if anew:
            for file in self._cells.glob("*.json"):
                file.unlink()

    def known(self, cell: Cell) -> CellResult | None:
        """What this very cell has shown: None if it has not run, or with other inputs."""
        try:
            found = msgspec.json.decode(self._file(cell).read_bytes(), type=CellResult)
        except (FileNotFoundError, msgspec.DecodeError):
            # A file that somebody else has changed is no result.
            return None
        return found if found.inputs == cell.inputs else None

    def keep(self, cell: Cell, result: CellResult) -> None:
        """In the place of what the cell has shown before. Raises `OSError`."""
        write_whole(self._file(cell), msgspec.json.encode(result))

    def _file(self, cell: Cell) -> Path:
        # Names may be those of files of a user.
        names = (quote(name, safe="") for name in (cell.case.name, cell.policy.name))
        return self._cells / f"{'@'.join(names)}@{cell.seed}.json"
