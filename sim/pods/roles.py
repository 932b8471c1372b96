"""Roles of simulated pods: which stages of a disaggregated request each pod of `sim serve` serves.

A role is a value of the pod label `llm-d.ai/role`. The filters of the picker define the values.
"""

from typing import Final

from epp.plugins.filters import DecodeRole, EncodeRole, PrefillRole

ROLES: Final[tuple[str, ...]] = tuple(
    sorted(filter(None, DecodeRole.roles | PrefillRole.roles | EncodeRole.roles))
)
"""All roles that a pod of `sim serve` can have, in alphabetical order."""


def decodes(role: str) -> bool:
    """Return whether a pod with this role decodes, so that it has a sidecar."""
    return role in DecodeRole.roles


def transfers(role: str) -> bool:
    """Return whether the engine of a pod with this role sends or receives KV blocks."""
    return decodes(role) or role in PrefillRole.roles


def roles_named(text: str, *, pods_max: int) -> tuple[str, ...]:
    """Return the role of each pod that a text ROLE=COUNT,... describes, in its order.

    Raises `ValueError` with one sentence if a role is unknown or named twice, if a count is not a
    positive integer, or if there are more than `pods_max` pods.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        role, _, count = part.partition("=")
        if role not in ROLES:
            raise ValueError(f"{part!r} names no role; expected one of {', '.join(ROLES)}")
        if role in counts:
            raise ValueError(f"the role {role} is given twice; expected once")
        digits = count.lstrip("0")
        if not count.isascii() or not count.isdigit() or not digits:
            raise ValueError(f"{part!r} has no number of pods above 0; expected {role}=COUNT")
        if len(digits) > len(str(pods_max)):
            raise ValueError(f"{part!r} is more than {pods_max} pods; expected at most {pods_max}")
        counts[role] = int(digits)
    if sum(counts.values()) > pods_max:
        raise ValueError(f"{text!r} is {sum(counts.values())} pods; expected at most {pods_max}")
    return tuple(role for role, count in counts.items() for _ in range(count))


def names_of(roles: tuple[str, ...]) -> list[str]:
    """Return a name for each pod: its role, and its number among the pods of that role."""
    return [f"{role}-{roles[:at].count(role)}" for at, role in enumerate(roles)]
