"""Sets of endpoint slots as the bits of one number, as tables and trees of blocks keep them."""

from collections.abc import Iterator


def slots_of(holders: int) -> Iterator[int]:
    """The slots in `holders`, ascending."""
    while holders:
        lowest = holders & -holders
        yield lowest.bit_length() - 1
        holders ^= lowest
