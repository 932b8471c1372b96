"""Cluster of these tests, which is up: `python -m tests.cluster test` sees to that."""

import os
from pathlib import Path

import pytest

from tests.cluster.node import Node, missing
from tests.cluster.place import Place
from tests.cluster.rows import Rows

ALONE = "alone_in_cluster"
"""Mark of a test that takes from others what they need: the API server, the node."""
MINUTES = "minutes_in_cluster"
"""Mark of a test of minutes, as those are that watch streams to their end."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{ALONE}: no other test of the cluster runs beside it")
    config.addinivalue_line("markers", f"{MINUTES}: `python -m tests.cluster brief` leaves it out")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of the cluster: they share one node, and are asked for."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "node" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def node() -> Node:
    """Return the node, ready, with images of this tree."""
    if lacking := missing():
        pytest.skip(lacking)
    found = Node(Place.of(os.environ), os.environ, print)
    if not found.runs:
        pytest.skip("no cluster runs: `make test-cluster` brings it up for its tests")
    return found


@pytest.fixture(scope="session")
def rows() -> Rows:
    """Return the rows in which counts are kept for the docs."""
    return Rows(Place.of(os.environ).root / "rows")
