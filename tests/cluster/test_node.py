"""Cluster that others bring up for a while: who takes it away."""

import pytest

from tests.cluster.node import Node
from tests.cluster.place import ClusterError


class Remembered(Node):
    """Node that only remembers whether it was told to run."""

    def __init__(self, *, runs):
        self.told = []
        self._runs = runs

    @property
    def runs(self):
        return self._runs

    def up(self):
        self.told.append("up")

    def down(self):
        self.told.append("down")


@pytest.mark.parametrize(("ran", "told"), [(False, ["up", "down"]), (True, ["up"])])
def test_a_cluster_is_left_as_it_was_found(ran, told):
    """A cluster of `make cluster` stays up, and a cluster that was started for the block is removed."""
    node = Remembered(runs=ran)
    with node.kept_up():
        assert node.told == ["up"]
    assert node.told == told


def test_it_is_taken_away_after_an_error_too():
    node = Remembered(runs=False)
    with pytest.raises(ClusterError), node.kept_up():
        raise ClusterError("the API server is away")
    assert node.told == ["up", "down"]
