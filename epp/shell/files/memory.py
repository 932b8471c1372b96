"""How much memory this process may use, as the kernel tells."""

import os
from pathlib import Path
from typing import Final

_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of version 2 and 1 of control groups; a container sees its own."""


def memory_limit_bytes(control_group: Path = _CONTROL_GROUP) -> int:
    """The least of what the container may use and what the machine has."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _LIMITS:
        try:
            told = (control_group / name).read_text(encoding="ascii").strip()
        except OSError:
            # The other version, or no control groups.
            continue
        if told.isdecimal():
            limits.append(int(told))
    return min(limits)
