"""Comparisons with other projects' routers: never part of `make test`."""

import os
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.peers.comparison import HEADINGS
from tests.peers.driver import PLACE

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    """All here need what `make peers` installs."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("peers")


@pytest.fixture(scope="session")
def versions():
    """Distribution -> version of what is installed for comparing."""
    assert PLACE.is_dir(), "the peers are not installed: make peers"
    return {found.name: found.version for found in distributions(path=[str(PLACE)])}


@pytest.fixture(scope="session")
def keep():
    """Keeps comparisons; at the end they are written to HOMING_PEERS_REPORT, if it is set."""
    kept = []
    yield kept.append
    report = os.environ.get("HOMING_PEERS_REPORT")
    if report and kept:
        _write(Path(report), kept)


def _write(path, kept):
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(one.row() for one in kept)]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    begin, end = "<!-- comparisons -->", "<!-- comparisons, end -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}")
