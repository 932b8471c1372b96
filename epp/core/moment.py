"""What the picker knows beside the endpoints at the moment at which it decides."""

from typing import Final

from msgspec import Struct

from epp.core.session_tokens import NO_TOKENS, SessionTokens


class PlacedMedia(Struct, frozen=True, gc=False):
    """An image or the like, and the tokens of a prompt that stand in its place."""

    identifier: str
    """What the engine calls it: a hash of its content, or the client's name of it."""
    offset: int
    """Of the first of them."""
    length: int


class Moment(Struct, frozen=True, kw_only=True, gc=False):
    """Set by the scheduler with each request that it decides; plugins read it as `request.moment`."""

    replicas_unheard: int = 0
    """Other pickers of the pool that do not tell this one what they decide."""
    sessions_return: bool = False
    """Sessions that clients name come again here, as far as it matters."""
    answer_tokens: float | None = None
    """Of an answer of the pool on average, above 0, as its engines count; None: too little is known."""
    session_tokens: SessionTokens = NO_TOKENS
    """Makes and reads the tokens by which a session finds its endpoint."""
    cold: bool = True
    """No endpoint holds the head of any prompt of the request."""
    token_ids: tuple[bytes, ...] = ()
    """Of each prompt its tokens as the engine will have them, 4 little-endian bytes an id; (): not known.
    Set by a `Resolver` with the request that waited for them."""
    known_tokens: int = 0
    """How many ids the prompts have, once these are let go; 0: not known."""
    token_media: tuple[tuple[PlacedMedia, ...], ...] = ()
    """Of each prompt all media in it, in their order, set with `token_ids`; (): there are none. Of a
    prompt with media that are not known the tokens are not known either: all images have the same."""


NO_MOMENT: Final = Moment()
