"""What is kept of a board, and what is taken from it again."""

import pytest
from msgspec.structs import replace

from sim.experiments.leaderboard.cases import Case
from sim.experiments.leaderboard.cell import CellResult
from sim.experiments.leaderboard.folder import CellFolder
from sim.measurement.summaries import RunSummary
from sim.output import OutputError
from tests.sim.experiments.leaderboard.test_cell import cell
from tests.sim.made import filled


def test_a_result_is_known_until_its_inputs_change(tmp_path):
    """Another seed, or the same under other inputs, is not."""
    folder = CellFolder(tmp_path / "out", anew=False)
    one = cell()
    assert folder.stored(one) is None
    result = CellResult(inputs=one.inputs, summary=filled(RunSummary, digest="1"))
    folder.store(one, result)
    again = CellFolder(tmp_path / "out", anew=False)
    assert again.stored(one) == result
    assert again.stored(cell(seed=2)) is None
    assert again.stored(replace(one, inputs="other")) is None
    assert CellFolder(tmp_path / "out", anew=True).stored(one) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"inputs": 1}', b"\xff"])
def test_a_file_that_is_no_result_is_none(tmp_path, content):
    """It is run again, and replaced."""
    folder = CellFolder(tmp_path, anew=False)
    one = cell()
    folder._file(one).write_bytes(content)
    assert folder.stored(one) is None


def test_names_of_users_stay_inside_the_folder(tmp_path):
    """Whatever a trace or a configuration is called."""
    folder = CellFolder(tmp_path, anew=False)
    one = cell()
    odd = replace(one, case=Case(name="../../etc", says="", file="x"))
    assert folder._file(odd).parent == tmp_path / "cells"


def test_a_folder_with_something_else_is_refused(tmp_path):
    """And left as it is."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="other content than a leaderboard"):
        CellFolder(tmp_path, anew=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
