"""The state of the picker at the time of a decision, apart from the endpoints."""

from typing import Final

from msgspec import Struct

from epp.core.session_tokens import NO_TOKENS, SessionTokens


class PlacedMedia(Struct, frozen=True, gc=False):
    """An image or another medium in a prompt, and the position of the prompt tokens that stand for
    it.
    """

    identifier: str
    """Identifier that the engine uses for the medium: a hash of its content, or the name that the
    client gave.
    """
    offset: int
    """Position, in the prompt's tokens, of the first token that stands for the medium."""
    length: int


class Moment(Struct, frozen=True, kw_only=True, gc=False):
    """The state of the picker at the time of a decision.

    The scheduler sets it with each request that it decides, and plugins read it as
    `request.moment`.
    """

    replicas_unheard: int = 0
    """Number of other pickers that are expected in the pool and from which this picker receives
    nothing at present, so that their decisions are unknown.
    """
    sessions_return: bool = False
    """True if clients send further requests for the sessions that they name, judged by the last
    requests, so that scoring by session is useful.
    """
    answer_tokens: float | None = None
    """Median over the pool's endpoints of the average number of tokens in an answer, above 0, as
    counted by engines; None if too few answers are known.
    """
    session_tokens: SessionTokens = NO_TOKENS
    """Object that creates and reads the session tokens, which lead a session to its endpoint."""
    cold: bool = True
    """True if no endpoint of the pool, or at least no candidate, is estimated to have the beginning
    of any prompt of the request cached, also because no index knows it.
    """
    token_ids: tuple[bytes, ...] = ()
    """Token ids of each prompt as the engine will compute them, 4 little-endian bytes per id; () if
    unknown.

    A `Resolver` computes them while the request waits.
    """
    known_tokens: int = 0
    """Number of token ids of all prompts, set when `token_ids` is dropped; 0 before, or if unknown.
    """
    token_media: tuple[tuple[PlacedMedia, ...], ...] = ()
    """Media in each prompt, in order, set together with `token_ids`; () if no prompt has any.

    The tokens of a prompt with unknown media are unknown as well, because all images have the same
    token ids.
    """


NO_MOMENT: Final = Moment()
