"""The state of the picker at the time of a decision, apart from the endpoints."""

from typing import Final

from msgspec import Struct

from epp.core.session_tokens import NO_TOKENS, SessionTokens


class PlacedMedia(Struct, frozen=True, gc=False):
    """An image or another medium, and the prompt tokens that stand in its place."""

    identifier: str
    """Identifier that the engine uses: a hash of the content, or the name that the client gave."""
    offset: int
    """Position of the first token."""
    length: int


class Moment(Struct, frozen=True, kw_only=True, gc=False):
    """The state of the picker at the time of a decision.

    The scheduler sets it with each request that it decides, and plugins read it as
    `request.moment`.
    """

    replicas_unheard: int = 0
    """Number of other pickers of the pool that do not share their decisions with this one."""
    sessions_return: bool = False
    """True if clients return to the sessions that they name, as far as that matters for scoring."""
    answer_tokens: float | None = None
    """Average number of tokens in an answer of the pool, above 0, as counted by engines; None if
    too little is known.
    """
    session_tokens: SessionTokens = NO_TOKENS
    """Creator and reader of the session tokens that lead a session to its endpoint."""
    cold: bool = True
    """True if no endpoint has the beginning of any prompt of the request cached."""
    token_ids: tuple[bytes, ...] = ()
    """Token ids of each prompt as the engine will compute them, 4 little-endian bytes per id; () if
    unknown.

    A `Resolver` sets them with the request that waited for them.
    """
    known_tokens: int = 0
    """Number of token ids of the prompts, also after `token_ids` is dropped; 0 if unknown."""
    token_media: tuple[tuple[PlacedMedia, ...], ...] = ()
    """Media in each prompt, in order, set together with `token_ids`; () if there are none.

    The tokens of a prompt with unknown media are unknown too, because all images have the same
    token ids.
    """


NO_MOMENT: Final = Moment()
