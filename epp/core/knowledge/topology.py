"""The places of endpoints, from region to host, and the nearest place that two endpoints share.

The labels of an endpoint name its places. An endpoint without a label of its host uses the address
of its Kubernetes node instead. Places are compared level by level, and an unknown place equals no
other.

Source of the levels and of the default labels: llm-d/llm-d-router, `datalayer/extractor/topology`.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from epp.core.parameters import Parameters
from epp.core.types import Endpoint


class Nearness(IntEnum):
    """The nearest place that an endpoint shares with another, in ascending order."""

    NONE = 0
    """The endpoints share no place, or their places are unknown."""
    REGION = 1
    ZONE = 2
    RACK = 3
    HOST = 4


class TopologyLabels(Parameters, frozen=True):
    """`topology-extractor`: the labels of an endpoint that name its host, rack, zone and region.

    The labels are those of the pod. `epp serve --node-labels` adds labels of the pod's node. An
    endpoint without a label of its host is at the host with its node's address. The topology plugins use
    the default labels if no `topology-extractor` is declared.
    """

    hostname: str = "kubernetes.io/hostname"
    """Key of the label whose value names the host of an endpoint."""
    rack: str = "topology.kubernetes.io/rack"
    """Key of the label whose value names the rack of an endpoint."""
    zone: str = "topology.kubernetes.io/zone"
    """Key of the label whose value names the zone of an endpoint."""
    region: str = "topology.kubernetes.io/region"
    """Key of the label whose value names the region of an endpoint."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the labels, from region to host as in `Nearness`."""
        return self.region, self.zone, self.rack, self.hostname


DEFAULT_TOPOLOGY: Final = TopologyLabels()
_LEVELS: Final = np.array([[level] for level in Nearness if level], dtype=np.int64)


def places_of(
    endpoints: Sequence[Endpoint | None], topology: TopologyLabels
) -> npt.NDArray[np.int64]:
    """Return int64[4, slots]: a number for the place of each endpoint on each level, region first.

    Equal places of a level have equal numbers. An unknown place is 0.
    """
    places = np.zeros((len(_LEVELS), len(endpoints)), dtype=np.int64)
    for level, label in enumerate(topology.names):
        numbers: dict[str, int] = {"": 0}
        for slot, endpoint in enumerate(endpoints):
            if endpoint is None:
                continue
            place = endpoint.labels.get(label, "")
            if not place and label == topology.hostname:
                place = endpoint.node_address
            places[level, slot] = numbers.setdefault(place, len(numbers))
    return places


def nearness_to(
    places: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], peer: int
) -> npt.NDArray[np.int64]:
    """Return int64[n]: the `Nearness` of the endpoint in each of `slots` to the one in slot `peer`.

    `places` is the result of `places_of`.
    """
    of_peer = places[:, peer : peer + 1]
    shared = (places[:, slots] == of_peer) & (of_peer > 0)
    found: npt.NDArray[np.int64] = (shared * _LEVELS).max(axis=0, initial=0)
    return found
