"""The addresses where an engine publishes its KV-cache events, as the engine lists them in `GET
/kv_event_sources`.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from epp.core.address import address_of
from epp.core.knowledge.index import RANKS_MAX

_RANK: Final = re.compile(r"0|[1-9][0-9]{0,4}")


class Place(Struct, frozen=True):
    """The address where one rank of an endpoint publishes KV-cache events."""

    host: str
    port: int
    replay_port: int | None = None


def spelt(place: Place | None) -> str:
    return "" if place is None else f"tcp://{address_of(place.host, place.port)}"


class _Published(Struct, gc=False):
    """The publisher of one rank's KV-cache events, as an engine reports it."""

    endpoint: str | None = None
    replay_endpoint: str | None = None
    publisher: str | None = None
    enable_kv_cache_events: bool = True


def places_of(
    page: bytes, host: str, rank: int, endpoints: int, *, ranks_chosen: bool
) -> tuple[Place, ...] | str:
    """Return the addresses where an engine publishes KV-cache events according to its answer
    `page`, or a text that says why they are unknown.

    The host of the endpoint is used, because the engine cannot know its address for this picker. If
    a pod has at least as many `endpoints` as the engine has ranks, only the address of the
    endpoint's own `rank`, or of the only rank, is returned. An engine with more ranks distributes
    requests among them. Its cached blocks are then useful only if a plugin selects the rank
    (`ranks_chosen`) and the engine is one endpoint.
    """
    try:
        ranks = msgspec.json.decode(page, type=dict[str, _Published])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "answered with something other than sources by rank"
    if len(ranks) > max(endpoints, 1):
        why = unusable(len(ranks), endpoints, ranks_chosen=ranks_chosen)
        return f"lists {why}" if why else _places_of_all(ranks, host)
    config = ranks.get(str(rank))
    if config is None and len(ranks) == 1:
        config = next(iter(ranks.values()))
    if config is None:
        return f"lists no source of rank {rank}" if ranks else "lists no source"
    port = _port_of(config.endpoint)
    if not config.enable_kv_cache_events or config.publisher == "null" or port is None:
        return "lists no source that publishes to a TCP port"
    return (Place(host, port, _port_of(config.replay_endpoint)),)


def unusable(ranks: int, endpoints: int, *, ranks_chosen: bool) -> str:
    """Return why KV-cache events of an engine with more `ranks` than its pod has `endpoints` are
    unusable, or "" if they are usable.
    """
    what = f"{ranks} ranks behind {endpoints} endpoint{'s' * (endpoints != 1)}"
    if endpoints > 1:
        return f"{what}, which the engine's own balancer selects: give each rank a port of its own"
    if not ranks_chosen:
        return (
            f"{what}, which the engine's own balancer selects: declare a "
            "data-parallel-rank-producer, or give each rank a port of its own"
        )
    return f"{what}, at most {RANKS_MAX} are supported" if ranks > RANKS_MAX else ""


def _places_of_all(ranks: Mapping[str, _Published], host: str) -> tuple[Place, ...] | str:
    """Return the addresses of all ranks of an engine in order, or a text that says why they are
    unknown.
    """
    if not all(map(_RANK.fullmatch, ranks)):
        return "lists ranks that are not numbers"
    numbers = sorted(map(int, ranks))
    if numbers[-1] - numbers[0] != len(numbers) - 1:
        return "lists ranks that are not consecutive"
    places: list[Place] = []
    for number in numbers:
        config = ranks[str(number)]
        port = _port_of(config.endpoint)
        if not config.enable_kv_cache_events or config.publisher == "null" or port is None:
            return f"lists no source of rank {number} that publishes to a TCP port"
        places.append(Place(host, port, _port_of(config.replay_endpoint)))
    if len({place.port for place in places}) < len(places):
        return "lists one port for several ranks"
    return tuple(places)


def _port_of(endpoint: str | None) -> int | None:
    if endpoint is None or not endpoint.startswith("tcp://"):
        return None
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536 else None
