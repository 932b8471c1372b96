"""Configurations with the lines of the field's samples and guides for several stages.

After a wanted change of the texts, `UPDATE_GOLDEN=1 pytest tests/configuration/test_staged_samples.py`
writes the explanations again; commit them, so that they can be reviewed.
"""

import io
import os

import pytest

from epp.commands.check_config import check_config
from epp.flags.subcommands import CheckFlags
from tests.configuration.staged_samples import path_of, supported


@pytest.mark.parametrize("name", supported())
def test_a_sample_loads_and_is_explained(name):
    """Its warnings come first."""
    path, out, err = path_of(name), io.StringIO(), io.StringIO()
    assert check_config(CheckFlags(file=str(path), explain=True), out, err) == 0
    told = (err.getvalue() + out.getvalue()).replace(str(path), path.name)
    golden = path.with_suffix(".txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(told)
    assert told == golden.read_text()
