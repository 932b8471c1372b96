"""The folder of a leaderboard. It has a file for the result of each cell, so that no cell is run
twice.
"""

from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from sim.experiments.leaderboard.cell import Cell, CellResult
from sim.output import OutputError, write_whole

_CELLS: Final = "cells"


class CellFolder:
    """The stored results of a leaderboard's cells, one file each in `path`/cells. The folder is
    created if it does not exist.
    """

    def __init__(self, path: Path, *, anew: bool) -> None:
        """Open the folder. If `anew` is true, delete the stored results. Raises `OSError`, and
        `OutputError` if the folder contains something else than a leaderboard.
        """
        self._cells = path / _CELLS
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()) and not self._cells.is_dir():
            raise OutputError(f"{path} has other content than a leaderboard; choose another --out")
        self._cells.mkdir(exist_ok=True)
        if anew:
            for file in self._cells.glob("*.json"):
                file.unlink()

    def stored(self, cell: Cell) -> CellResult | None:
        """Return the stored result of a cell. None if the cell has not run, if the file is damaged,
        or if the stored result has other inputs (code, trace or parameters).
        """
        try:
            found = msgspec.json.decode(self._file(cell).read_bytes(), type=CellResult)
        except (FileNotFoundError, msgspec.DecodeError):
            # A file that was changed by hand is not a result.
            return None
        return found if found.inputs == cell.inputs else None

    def store(self, cell: Cell, result: CellResult) -> None:
        """Store the result of a cell, replacing a stored result of the same case, strategy and
        seed. Raises `OSError`.
        """
        write_whole(self._file(cell), msgspec.json.encode(result))

    def _file(self, cell: Cell) -> Path:
        # Names may be file names of a user, so they are quoted.
        names = (quote(name, safe="") for name in (cell.case.name, cell.policy.name))
        return self._cells / f"{'@'.join(names)}@{cell.seed}.json"
