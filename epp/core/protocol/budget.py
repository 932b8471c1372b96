"""What all streams together may hold of bodies that are not answered yet.

A limit for one body is none for many clients: 66 of them with 31 MB each held 2 GB. So each stream
takes what it keeps from one budget, and gives it back when the gateway has taken the answer or the
stream is over. Who comes when nothing is left is refused, and what others hold is not touched. An
eighth is for those who hold little: the few who hold much cannot keep the many out.
"""

from typing import Final

PIECE_BYTES: Final = 96
"""What keeping one piece of a body costs besides its bytes: an object and its place in a list."""


SMALL_BYTES: Final = 262_144
"""Who holds no more may use all of the budget; most prompts are shorter."""
RESERVED_SHARE: Final = 8
"""Of the budget so much, as a divisor, is for them alone."""


class BodyBudget:
    """Bytes of request bodies that are held, against the most that may be."""

    __slots__ = ("bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyBudget [{self.held_bytes} of {self.bytes_max} bytes held]>"

    def take(self, count_bytes: int, holding_bytes: int = 0) -> bool:
        """Hold `count_bytes` more for one that holds `holding_bytes` already.

        False: there is no room, and nothing was taken.
        """
        most = self.bytes_max
        if holding_bytes + count_bytes > SMALL_BYTES:
            most -= most // RESERVED_SHARE
        if self.held_bytes + count_bytes > most:
            return False
        self.held_bytes += count_bytes
        return True

    def give_back(self, count_bytes: int) -> None:
        """Hold `count_bytes` less, which were taken before."""
        assert count_bytes <= self.held_bytes, f"{count_bytes} of {self.held_bytes} given back"
        self.held_bytes -= count_bytes
