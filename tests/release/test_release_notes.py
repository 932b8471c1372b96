"""The notes of a release, and when there must be none."""

import shutil
from pathlib import Path

import pytest

from docs.release_notes import ReleaseError, main, notes_of

ROOT = Path(__file__).parents[2]
CHANGELOG = """\
# Changelog

## [Unreleased]

## [0.2.0] - 2026-03-01

### Added

- A thing.

## [0.1.0] - 2026-01-01

- The first.
"""


@pytest.fixture
def tree(tmp_path):
    """This one, as if it were of version 0.2.0."""
    for name in (
        *("pyproject.toml", "rivals/pyproject.toml"),
        *("epp/__init__.py", "charts/homing/Chart.yaml"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text().replace("0.1.0", "0.2.0")
        (tmp_path / name).write_text(text)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_the_notes_are_the_section_of_the_version(tree):
    assert notes_of("v0.2.0", tree) == "### Added\n\n- A thing.\n"


@pytest.mark.parametrize(
    ("tag", "sentence"),
    [
        ("0.2.0", "is no version"),
        ("v0.2", "is no version"),
        ("v0.2.0; rm -rf /", "is no version"),
        ("v0.3.0", "pyproject.toml says 0.2.0"),
    ],
)
def test_a_tag_that_is_not_the_version_is_refused(tag, sentence, tree):
    with pytest.raises(ReleaseError, match=sentence):
        notes_of(tag, tree)


@pytest.mark.parametrize(
    "name", ["rivals/pyproject.toml", "epp/__init__.py", "charts/homing/Chart.yaml"]
)
def test_every_place_that_says_the_version_must_agree(name, tree):
    """A chart of another version would install another image."""
    shutil.copyfile(ROOT / name, tree / name)
    with pytest.raises(ReleaseError, match=r"says 0\.1\.0, expected 0\.2\.0"):
        notes_of("v0.2.0", tree)


def test_a_version_without_notes_is_refused(tree):
    (tree / "CHANGELOG.md").write_text(CHANGELOG.replace("## [0.2.0] - 2026-03-01", ""))
    with pytest.raises(ReleaseError, match="has no section"):
        notes_of("v0.2.0", tree)


def test_what_is_not_released_yet_has_no_notes(capsys):
    """This tree, until its section has a date."""
    assert main(["v9.9.9"]) == 1
    assert "expected 9.9.9" in capsys.readouterr().err
    assert main([]) == 2
