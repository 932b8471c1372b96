"""What docs/leaderboard.md and the README show of a board, and how it comes there."""

import pytest
from msgspec.structs import replace

from docs import leaderboard
from docs.leaderboard import Board, Boards, NoBoardError, board_in, main, read
from docs.reference import refreshed
from sim.cluster.built_in import strategies
from sim.experiments.leaderboard.cases import CASES
from sim.experiments.leaderboard.standings import case_rows
from sim.measurement.ranking import scopes_of, totals
from sim.measurement.summaries import (
    CaseSummary,
    FailedCell,
    LeaderboardSummary,
    StrategySummary,
    as_json,
)
from sim.reports.leaderboard_report import Part, ranking_parts
from tests.sim.experiments.leaderboard.test_standings import e2e
from tests.sim.made import filled

NAMES = ["homing", *(f"rival-{number}" for number in range(9)), "round-robin-live"]


@pytest.fixture
def summary():
    """Eleven strategies in two cases, of which one has adapters: each in it as good as its number."""
    cases = [
        filled(CaseSummary, name="plain", says="plain"),
        filled(CaseSummary, name="lora", says="lora", max_loras=4),
    ]
    rows = []
    for case in cases:
        runs = [e2e(name, *[1.0 + at] * 3) for at, name in enumerate(NAMES)]
        rows += case_rows(case.name, runs if case.name == "plain" else runs[::-1], 1)
    return filled(
        LeaderboardSummary,
        complete=True,
        seeds=3,
        first_seed=1,
        requests=400,
        cases=cases,
        strategies=[
            filled(StrategySummary, name=name, idea="An idea.", omissions="half of it")
            for name in NAMES
        ],
        totals=totals(rows, scopes_of(cases)),
        rows=rows,
    )


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The file of the tables, with those of the repository in it."""
    path = tmp_path / "leaderboard.json"
    path.write_bytes(leaderboard.RESULTS.read_bytes())
    monkeypatch.setattr(leaderboard, "RESULTS", path)
    return path


def written(folder, summary):
    folder.mkdir()
    (folder / "summary.json").write_bytes(as_json(summary))
    return str(folder)


def test_a_board_that_was_written_is_read_whole(summary, tmp_path):
    """Every table is as the report has it, the one without adapters first."""
    board = board_in(tmp_path / written(tmp_path / "board", summary))
    assert board == Board.of(summary)
    assert [part.title for part in board.ranking] == [
        "All cases without LoRA: ratio to the best",
        "All cases without LoRA: level with the best",
        "All cases with LoRA: ratio to the best",
        "All cases with LoRA: level with the best",
    ]
    assert board.strategies.rows[1][:3] == ["homing", "An idea.", "half of it"]


def test_one_command_puts_both_boards_on_the_pages(summary, results, tmp_path):
    """What is not given stays as it was."""
    before = read()
    small = written(tmp_path / "board", summary)
    assert main([small]) == 0
    assert read() == replace(before, small=Board.of(summary))
    full = replace(summary, requests=2_000)
    assert main([small, "--full", written(tmp_path / "full", full)]) == 0
    assert read().full == Board.of(full)
    other = replace(summary, requests=3_000)
    assert main(["--full", written(tmp_path / "other", other)]) == 0
    assert read() == Boards(small=Board.of(summary), full=Board.of(other))
    assert main(["--full", str(tmp_path / "full")]) == 0
    page = refreshed(
        "<!-- begin board-full-ranking -->\n<!-- end board-full-ranking -->\n"
        "<!-- begin board-behind -->\n<!-- end board-behind -->\n"
    )
    assert "2,000 requests each" in page
    assert "### All cases without LoRA: ratio to the best\n" in page
    assert "There is none among the 2 cases" in page


def test_the_readme_shows_the_ranking_without_adapters(summary, results, tmp_path):
    """The best five, and whom a reader looks for, wherever they stand."""
    main([written(tmp_path / "board", summary)])
    part = refreshed("<!-- begin board-short -->\n<!-- end board-short -->\n")
    assert f'rows are from the leaderboard\'s table "{ranking_parts(summary)[0].title}".' in part
    rows = [line.split(" | ")[0].strip("| ") for line in part.splitlines() if line[:1] == "|"]
    assert rows[2:] == ["homing", "rival-0", "rival-1", "rival-2", "rival-3", "round-robin-live"]


def test_texts_are_those_of_the_code_and_not_of_the_measurement(summary, results, tmp_path):
    """A corrected text needs no new measurement; unknown names keep the texts that were stored."""
    name, case = next(iter(CASES.items()))
    main(
        [
            written(
                tmp_path / "board",
                replace(
                    summary,
                    cases=[
                        replace(summary.cases[0], name=name, says="an old text"),
                        summary.cases[1],
                    ],
                    rows=[
                        replace(row, case=name) if row.case == "plain" else row
                        for row in summary.rows
                    ],
                ),
            )
        ]
    )
    part = refreshed("<!-- begin board-cases -->\n<!-- end board-cases -->\n")
    assert f"| {name} | {case.says} |" in part
    assert "| lora (LoRA) | lora |" in part
    part = refreshed("<!-- begin board-strategies -->\n<!-- end board-strategies -->\n")
    assert f"| homing | {strategies()['homing'].idea} | - |" in part
    assert "| rival-0 | An idea. | half of it |" in part
    stored = results.read_text()
    assert "geometric mean" in ranking_parts(summary)[0].text
    assert "geometric mean" not in stored


def test_a_board_that_is_not_whole_is_refused(summary, results, tmp_path, capsys):
    """In a sentence with the file; what is there stays."""
    before = results.read_bytes()
    failed = FailedCell(case="plain", strategy="homing", seed=1, problem="it died")
    partly = written(tmp_path / "partly", replace(summary, complete=False, failed=[failed]))
    with pytest.raises(NoBoardError, match="expected a complete board"):
        board_in(tmp_path / "partly")
    with pytest.raises(SystemExit) as ended:
        main([partly])
    assert ended.value.code == 2
    assert "expected a complete board" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "expected a board, --full or both" in capsys.readouterr().err
    with pytest.raises(
        NoBoardError, match=r"absent/summary\.json: expected the summary of a board"
    ):
        board_in(tmp_path / "absent")
    assert results.read_bytes() == before


def test_the_tables_of_the_repository_are_whole():
    """Every row of a table has as many cells as its head."""
    boards = read()
    for board in (boards.small, boards.full):
        for part in [*board.ranking, board.behind, board.cases, board.strategies]:
            assert isinstance(part, Part)
            assert len({len(row) for row in part.rows}) <= 1, part.title
    assert set(CASES) >= {row[0].partition(" ")[0] for row in boards.small.cases.rows[1:]}
