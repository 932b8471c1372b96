"""What all streams together may hold of bodies that are not answered yet.

A limit for one body is none for many clients: 66 of them with 31 MB each held 2 GB. So each stream
takes what it keeps from one budget, and gives it back when the gateway has taken the answer or the
stream is over. Who comes when nothing is left is refused, and what others hold is not touched.
"""

from typing import Final

PIECE_BYTES: Final = 96
"""What keeping one piece of a body costs besides its bytes: an object and its place in a list."""


class BodyBudget:
    """Bytes of request bodies that are held, against the most that may be."""

    __slots__ = ("bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyBudget [{self.held_bytes} of {self.bytes_max} bytes held]>"

    def take(self, count_bytes: int) -> bool:
        """Hold `count_bytes` more; False: there is no room, and nothing was taken."""
        if self.held_bytes + count_bytes > self.bytes_max:
            return False
        self.held_bytes += count_bytes
        return True

    def give_back(self, count_bytes: int) -> None:
        """Hold `count_bytes` less, which were taken before."""
        assert count_bytes <= self.held_bytes, f"{count_bytes} of {self.held_bytes} given back"
        self.held_bytes -= count_bytes
