"""Places of endpoints, and the nearest place that two share."""

import numpy as np
import pytest

from epp.core.knowledge.topology import DEFAULT_TOPOLOGY, TopologyLabels, nearness_to, places_of
from tests.builders import endpoint

HOST, RACK = "kubernetes.io/hostname", "topology.kubernetes.io/rack"
ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
PLACE = {HOST: "h1", RACK: "r1", ZONE: "z1", REGION: "g1"}


def near(peer, *others, topology=DEFAULT_TOPOLOGY):
    """Return how near endpoints with the labels `others` are to one with the labels `peer`."""
    endpoints = [endpoint(at, labels=labels) for at, labels in enumerate((peer, *others))]
    return nearness_to(places_of(endpoints, topology), np.arange(1, 1 + len(others)), 0).tolist()


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({}, 4),
        ({HOST: "h2"}, 3),
        ({HOST: "h2", RACK: "r2"}, 2),
        ({HOST: "h2", RACK: "r2", ZONE: "z2"}, 1),
        ({HOST: "h2", RACK: "r2", ZONE: "z2", REGION: "g2"}, 0),
    ],
)
def test_the_nearest_common_place_counts(changed, level):
    assert near(PLACE, PLACE | changed) == [level]


def test_unknown_places_equal_no_other():
    """Neither a missing label nor an empty one."""
    assert near({}, {}, PLACE) == [0, 0]
    assert near({ZONE: ""}, {ZONE: ""}) == [0]
    assert near({ZONE: "z1"}, {}, {ZONE: "z1"}) == [0, 2]


def test_the_node_is_the_host_without_a_label_of_it():
    peer = endpoint(0, node_address="10.1.0.1")
    same, other = endpoint(1, node_address="10.1.0.1"), endpoint(2, node_address="10.1.0.2")
    places = places_of([peer, same, other], DEFAULT_TOPOLOGY)
    assert nearness_to(places, np.array([1, 2]), 0).tolist() == [4, 0]


def test_the_labels_can_have_other_names():
    topology = TopologyLabels(rack="nvlink-domain")
    assert near({"nvlink-domain": "a"}, {"nvlink-domain": "a"}, topology=topology) == [3]
    assert near({"nvlink-domain": "a"}, {"nvlink-domain": "a"}) == [0]


def test_empty_slots_have_no_place():
    places = places_of(
        [endpoint(0, labels=PLACE), None, endpoint(2, labels=PLACE)], DEFAULT_TOPOLOGY
    )
    assert places[:, 1].tolist() == [0, 0, 0, 0]
    assert places[:, 0].tolist() == places[:, 2].tolist()
