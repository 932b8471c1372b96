"""Pods with roles, and the network and connector over which they transfer KV blocks, as flags and
scenario files describe them.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.cluster.links import KVTransferSettings
from sim.cluster.simulated_pod import PodKind
from sim.cluster.windows import Duration
from sim.engine.legs import KVConnector
from sim.engine.links import DEFAULT_LINK, LinkError, link_named, link_of
from sim.pods.roles import ROLES, roles_named

MODELLED: Final = tuple(role for role in ROLES if "encode" not in role)
"""Roles of pods in simulated time. Roles that encode images are missing, because requests in
simulated time have no images.
"""
_LEASE_S: Final[Seconds] = KVConnector().lease_s


class RoleError(ValueError):
    """A role is unknown or not modelled. The message is a phrase that says what was expected."""


class Legs(StrEnum):
    """The order in which the sidecar of a decode pod sends the two legs of a request."""

    SERIAL = "serial"
    """The sidecar sends the prefill leg first and the decode leg after its end, as llm-d's
    connector `nixlv2` does.
    """
    CONCURRENT = "concurrent"
    """The sidecar sends both legs at once, as the connectors for SGLang and Mooncake do."""


class KVTransferTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table `[kv_transfer]` of a scenario file. Raises `ValueError` for settings that contradict
    each other.
    """

    link: str = ""
    """Network in the form of `--kv-link`; "" for the default, or for `gigabytes_per_s`."""
    gigabytes_per_s: Annotated[float, Meta(gt=0.0, le=100_000.0)] | None = None
    """Bandwidth of one NIC in GB/s; None to use `link`."""
    setup_s: Annotated[float, Meta(ge=0.0, le=60.0)] | None = None
    """Time in seconds before the first byte of a transfer, given together with `gigabytes_per_s`;
    None to use `link`.
    """
    legs: Legs = Legs.SERIAL
    push: bool = False
    """True if the prefill engine sends each layer when it is computed. It needs concurrent legs."""
    hop_s: Duration = 0.001
    first_contact_s: Duration = 0.0
    lease_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = _LEASE_S

    def __post_init__(self) -> None:
        if (self.gigabytes_per_s is None) is not (self.setup_s is None):
            raise ValueError("expected gigabytes_per_s and setup_s together, got one of them")
        if self.link and self.gigabytes_per_s is not None:
            raise ValueError("expected link or gigabytes_per_s with setup_s, got both")
        if self.push and self.legs is Legs.SERIAL:
            raise ValueError('push: expected legs = "concurrent" with it, got serial legs')
        if self.link:
            try:
                link_named(self.link)
            except LinkError as problem:
                raise ValueError(f"link: {problem}") from problem

    def settings(self) -> KVTransferSettings:
        """Return the network and the connector that the table describes."""
        if self.gigabytes_per_s is not None and self.setup_s is not None:
            link = link_of(gigabytes_per_s=self.gigabytes_per_s, setup_s=self.setup_s)
        else:
            link = link_named(self.link or DEFAULT_LINK)
        return KVTransferSettings(
            link=link,
            hop_s=self.hop_s,
            concurrent=self.legs is Legs.CONCURRENT,
            push=self.push,
            first_contact_s=self.first_contact_s,
        )


def with_role(kind: PodKind, role: str, *, nics: int = 1, lease_s: Seconds = _LEASE_S) -> PodKind:
    """Return this kind of pod with a role. Raises `RoleError` if the role is not modelled."""
    if role not in MODELLED:
        raise RoleError(f"expected one of {', '.join(MODELLED)}, got {role!r}")
    return kind.with_role(role, nics=nics, connector=KVConnector(lease_s=lease_s))


def modelled_roles(text: str, *, pods_max: int) -> tuple[str, ...]:
    """Return the role of each pod that a text ROLE=N,... describes. Raises `ValueError` with one
    sentence.
    """
    roles = roles_named(text, pods_max=pods_max)
    for role in roles:
        if role not in MODELLED:
            raise RoleError(f"expected roles of {', '.join(MODELLED)}, got {role!r}")
    return roles


def roles_spelt(kinds: Iterable[PodKind]) -> dict[str, int]:
    """Return the number of pods of each role, in the order of the pods; "none" for pods without
    one.
    """
    roles = [kind.role or "none" for kind in kinds]
    return {role: roles.count(role) for role in dict.fromkeys(roles)}
