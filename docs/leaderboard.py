"""Store the tables of a leaderboard for the documentation: `python -m docs.leaderboard BOARD`.

BOARD is a folder that `sim leaderboard --out` has written. Its tables go to docs/leaderboard.json, and
`python -m docs.reference` writes them to docs/leaderboard.md and the README. Explanations of tables,
and descriptions of cases and strategies, are not those of the measurement but the present ones.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from docs.row_lines import row_lines
from sim.cluster.built_in import strategies
from sim.experiments.leaderboard.cases import CASES
from sim.measurement.summaries import LeaderboardSummary
from sim.output import write_whole
from sim.reports.leaderboard_report import (
    Part,
    basis,
    behind_part,
    cases_part,
    ranking_parts,
    strategies_part,
)

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "leaderboard.json"
_FIRST: Final = 5
_KNOWN: Final = frozenset(
    {
        "dynamo",
        "llm-d-3-2-2",
        "production-stack-load-aware",
        "round-robin-live",
        "smg-cache-aware-4",
        "sticky-until-saturated",
    }
)
"""Names of well-known strategies, which the README shows at any rank."""


class Board(Struct, frozen=True, kw_only=True):
    """The tables of one leaderboard."""

    basis: str
    ranking: list[Part]
    """Rankings of the strategies; the one over cases without adapters is first."""
    behind: Part
    cases: Part
    strategies: Part

    @classmethod
    def of(cls, summary: LeaderboardSummary) -> "Board":
        """Return the tables of a complete leaderboard."""
        return cls(
            basis=basis(summary),
            ranking=ranking_parts(summary),
            behind=behind_part(summary),
            cases=cases_part(summary),
            strategies=strategies_part(summary),
        )


class Boards(Struct, frozen=True, kw_only=True):
    """The content of docs/leaderboard.json."""

    small: Board
    """Leaderboard of all strategies."""
    full: Board
    """Leaderboard of some strategies, on more requests."""


def read() -> Boards:
    """Return the stored tables of both leaderboards."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Boards)


def ranking(board: Board) -> str:
    """Return the description and all rankings of a leaderboard as Markdown."""
    return "\n\n".join([board.basis, *(part.as_markdown(level=3) for part in board.ranking)])


def short_ranking(board: Board) -> str:
    """Return the first ranking of a leaderboard for the README, with only the five best and the
    well-known strategies.
    """
    (head, *rows), says = board.ranking[0].rows, board.ranking[0].title
    kept = [row for at, row in enumerate(rows) if at < _FIRST or row[0] in _KNOWN]
    basis = f'{board.basis} These rows are from the leaderboard\'s table "{says}".'
    short = Part(title=says, says=basis, rows=[head, *kept])
    return short.as_markdown(level=0)


def body(part: Part) -> str:
    """Return a section of a leaderboard as Markdown, without its heading."""
    return part.as_markdown(level=0)


def cases(board: Board) -> str:
    """Return the table of the cases as Markdown, with the present description of each case."""
    says = {name: [case.says] for name, case in CASES.items()}
    return body(_described(board.cases, says))


def strategy_table(board: Board) -> str:
    """Return the table of the strategies as Markdown, with the present texts about each strategy."""
    texts = {name: [one.idea, one.omissions or "-"] for name, one in strategies().items()}
    return body(_described(board.strategies, texts))


def _described(part: Part, texts: Mapping[str, list[str]]) -> Part:
    """Return `part` with the texts of each name instead of those after the name in its row. A name
    without texts keeps the stored ones.
    """
    head, *rows = part.rows
    told = []
    for name, *cells in rows:
        now = texts.get(name.partition(" ")[0], [])
        told.append([name, *now, *cells[len(now) :]])
    return replace(part, rows=[head, *told])


class NoBoardError(ValueError):
    """The error of a folder that does not contain a complete leaderboard; its text is one sentence."""


def board_in(folder: Path) -> Board:
    """Return the tables of the leaderboard in `folder`. Raise `NoBoardError` if it is missing or
    not complete.
    """
    path = folder / "summary.json"
    try:
        summary = msgspec.json.decode(path.read_bytes(), type=LeaderboardSummary)
    except (OSError, msgspec.DecodeError) as problem:
        raise NoBoardError(
            f"{path}: expected the summary of a board as this release writes it: {problem}"
        ) from problem
    if not summary.complete:
        raise NoBoardError(f"{path}: cells are missing or failed, expected a complete board")
    return Board.of(summary)


def main(arguments: Sequence[str] | None = None) -> int:
    """Store the tables of one leaderboard or both in docs/leaderboard.json, and return the exit
    code.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.leaderboard", description=__doc__)
    keeps = "(default: the stored one)"
    parser.add_argument(
        "board", type=Path, nargs="?", help=f"folder of the leaderboard of all strategies {keeps}"
    )
    parser.add_argument(
        "--full", type=Path, help=f"folder of the leaderboard on more requests {keeps}"
    )
    options = parser.parse_args(arguments)
    try:
        given = {
            name: board_in(folder)
            for name, folder in (("small", options.board), ("full", options.full))
            if folder is not None
        }
    except NoBoardError as problem:
        parser.error(str(problem))
    if not given:
        parser.error("expected a board, --full or both")
    boards = Boards(**given) if len(given) == 2 else replace(read(), **given)
    write_whole(RESULTS, row_lines(msgspec.to_builtins(boards)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
