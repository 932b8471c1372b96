"""What clients do when an answer does not come, or is none."""

from typing import Annotated, Final

from msgspec import Meta, Struct

RETRIED: Final = frozenset({429, 503})
"""What a server says that is worth asking again."""


class Clients(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All clients of a run; each request is one to its client, however often it is sent."""

    retries: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """How often one is sent again that was refused with 429 or 503, that met no picker, or whose
    pod died.
    """
    pause_s: Annotated[float, Meta(ge=0.01, le=1e6)] = 1.0
    """Before the first of them; twice as long before each further one."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    """The client leaves if the whole answer is not there by then, and does not come again."""

    def pause_before_s(self, retry: int) -> float:
        """Before the `retry`-th time again, from 0."""
        return self.pause_s * 2.0 ** min(retry, 30)
