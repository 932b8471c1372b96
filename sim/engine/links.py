"""Kinds of networks that carry KV blocks between engines, and the text that names one: `--kv-link`."""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds


class Link(Struct, frozen=True, kw_only=True):
    """One kind of network between pods. Its bandwidth is what payloads get, without protocol
    overhead.
    """

    name: str
    bytes_per_s: float
    """Bandwidth of one NIC in one direction, in bytes per second."""
    setup_s_min: Seconds
    setup_s_max: Seconds
    source: str

    @property
    def setup_s(self) -> Seconds:
        """Seconds from the start of a transfer to its first byte: the middle of the published
        range, `setup_s_min` to `setup_s_max`.
        """
        return (self.setup_s_min + self.setup_s_max) / 2

    def transfer_s(self, size_bytes: float) -> Seconds:
        """Return the time in seconds of a transfer of this many bytes that shares no bandwidth."""
        return self.setup_s + size_bytes / self.bytes_per_s


_PUBLISHED: Final = "latency profiles of llm-d/llm-d-inference-sim (docs/latency-profiles.md)"

LINKS: Final[Mapping[str, Link]] = {
    link.name: link
    for link in (
        Link(
            name="nvlink",
            bytes_per_s=600e9,
            setup_s_min=0.1e-3,
            setup_s_max=0.5e-3,
            source=f"{_PUBLISHED}; the mocker of ai-dynamo/dynamo has about 450 GB/s",
        ),
        Link(
            name="ib-ndr400",
            bytes_per_s=40e9,
            setup_s_min=0.5e-3,
            setup_s_max=2e-3,
            source=_PUBLISHED,
        ),
        Link(
            name="roce200",
            bytes_per_s=20e9,
            setup_s_min=0.5e-3,
            setup_s_max=2e-3,
            source=_PUBLISHED,
        ),
        Link(
            name="tcp-100gbe",
            bytes_per_s=10e9,
            setup_s_min=2e-3,
            setup_s_max=10e-3,
            source=_PUBLISHED,
        ),
        Link(
            name="tcp-25gbe",
            bytes_per_s=2.5e9,
            setup_s_min=2e-3,
            setup_s_max=10e-3,
            source=_PUBLISHED,
        ),
    )
}
"""Kinds of networks between pods for KV transfers, by name."""

ACROSS_ZONES_S_MIN: Final[Seconds] = 10e-3
ACROSS_ZONES_S_MAX: Final[Seconds] = 50e-3
"""This and `ACROSS_ZONES_S_MIN` are the range of the additional set-up time in seconds of a
transfer between two zones. The source is `_PUBLISHED`.
"""
ACROSS_ZONES_S: Final[Seconds] = (ACROSS_ZONES_S_MIN + ACROSS_ZONES_S_MAX) / 2


DEFAULT_LINK: Final = "roce200"
"""Name of the network that KV transfers have by default."""
_GIGABYTES_PER_S_MAX: Final = 100_000.0
_SETUP_S_MAX: Final[Seconds] = 60.0


class LinkError(ValueError):
    """A text describes no network. The message is a phrase that says what was expected."""


def link_of(*, gigabytes_per_s: float, setup_s: Seconds) -> Link:
    """Return a network with this bandwidth of one NIC in GB/s, and this set-up time in seconds."""
    return Link(
        name=f"{gigabytes_per_s:g} GB/s, {setup_s * 1e3:g} ms",
        bytes_per_s=gigabytes_per_s * 1e9,
        setup_s_min=setup_s,
        setup_s_max=setup_s,
        source="given",
    )


def link_named(text: str) -> Link:
    """Return the network that a text NAME or GB/S:S describes: a name of `LINKS`, or the bandwidth
    of one NIC in GB/s and the set-up time in seconds. Raises `LinkError`.
    """
    if text in LINKS:
        return LINKS[text]
    bandwidth, _, setup = text.partition(":")
    try:
        gigabytes_per_s, setup_s = float(bandwidth), float(setup)
    except ValueError:
        gigabytes_per_s = setup_s = -1.0
    if not 0 < gigabytes_per_s <= _GIGABYTES_PER_S_MAX or not 0 <= setup_s <= _SETUP_S_MAX:
        raise LinkError(
            f"expected one of {', '.join(LINKS)}, or GB/S:S with a bandwidth of up to "
            f"{_GIGABYTES_PER_S_MAX:,.0f} GB/s and a set-up time of 0 to {_SETUP_S_MAX:g} s, got {text!r}"
        )
    return link_of(gigabytes_per_s=gigabytes_per_s, setup_s=setup_s)
