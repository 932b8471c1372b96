"""The cluster of these tests: the one that runs, else one for as long as they take."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.node import Node, missing
from tests.cluster.place import Place


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They share one node of a few pods: one after the other, and asked for."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "node" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """Ready, with images of this tree."""
    if lacking := missing():
        pytest.skip(lacking)
    found = Node(Place.of(os.environ), os.environ, print)
    if not found.built:
        pytest.skip("no Kubernetes is built here: run `make cluster`")
    ran = found.runs
    found.up()
    try:
        yield found
    finally:
        if not ran:
            found.down()
