"""Parse a renderer's answer into token ids, in steps that are short for the event loop.

The answer is not trusted. Its size was limited when it was received. Here its members are checked,
and ids are decoded in pieces, because a hundred thousand of them take some milliseconds. This
module performs no I/O.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from epp.core.kv_events.payload import NAME_CHARACTERS_MAX
from epp.core.moment import PlacedMedia
from epp.core.prompt.token_ids import ID_BYTES, packed

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum size of a renderer's answer in bytes: some 600,000 ids of six digits, whose members are
found in 2 ms.
"""
PIECE_BYTES: Final = 64 * 1024
"""Size in bytes of the pieces of token ids that are decoded at once, which takes half a millisecond
each.
"""
MEDIA_MAX: Final = 1_024
"""Maximum number of media, such as images, in one prompt of a renderer's answer."""
_NOTHING: Final = Raw(b"")

_TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class _Rendered(Struct, gc=False):
    """A renderer's response for one prompt, of /render (`token_ids`) or of /tokenize (`tokens`)."""

    token_ids: Raw = _NOTHING
    tokens: Raw = _NOTHING
    features: Raw = _NOTHING


_decode_one = Decoder(_Rendered).decode
_decode_all = Decoder(list[_Rendered]).decode
_decode_ids = Decoder(list[_TokenId]).decode
_COMMA: Final = re.compile(rb",")


class _Placeholder(Struct, gc=False):
    offset: Annotated[int, Meta(ge=0, le=2**31)]
    length: Annotated[int, Meta(ge=1, le=2**31)]


class _Features(Struct, gc=False):
    """The media of one prompt in a renderer's answer: hashes and positions by modality, such as
    "image".
    """

    mm_hashes: dict[str, list[str | None]] | None = None
    mm_placeholders: dict[str, list[_Placeholder]] | None = None


_decode_features = Decoder(_Features).decode


class RenderedPrompt(Struct, frozen=True, gc=False):
    """One prompt of a renderer's answer, whose token ids are not decoded yet."""

    ids: bytes
    """JSON array of the prompt's token ids."""
    media: tuple[PlacedMedia, ...] = ()
    """Media of the prompt, in the order of their positions."""


class BadAnswerError(Exception):
    """Raised if a renderer's answer is invalid. The message describes the problem without quoting
    the answer.
    """


class UnidentifiedMediaError(Exception):
    """Raised if a prompt has media, such as an image, that neither its token ids nor identifiers in
    the renderer's answer distinguish from other media, or more than `MEDIA_MAX` media.
    """


def rendered_prompts(answer: bytes, prompts: int) -> list[RenderedPrompt]:
    """Return the first `prompts` prompts of a renderer's `answer`. Raises `BadAnswerError` and
    `UnidentifiedMediaError`.
    """
    try:
        listed = answer.lstrip()[:1] == b"["
        rendered = _decode_all(answer) if listed else [_decode_one(answer)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswerError("is not the JSON of a rendered request") from error
    if len(rendered) < prompts:
        raise BadAnswerError(f"has {len(rendered)} prompts, expected {prompts}")
    found: list[RenderedPrompt] = []
    for one in rendered[:prompts]:
        array = bytes(one.token_ids if one.tokens is _NOTHING else one.tokens)
        if not (array.startswith(b"[") and array.endswith(b"]")) or not array[1:-1].strip():
            raise BadAnswerError("has no token ids")
        found.append(RenderedPrompt(array, _media(bytes(one.features))))
    return found


def _media(features: bytes) -> tuple[PlacedMedia, ...]:
    if features in {b"", b"null", b"{}"}:
        return ()
    try:
        read = _decode_features(features)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswerError("has invalid features") from error
    hashes, places = read.mm_hashes or {}, read.mm_placeholders or {}
    placed: list[PlacedMedia] = []
    for modality in hashes.keys() | places.keys():
        identifiers, ranges = hashes.get(modality, ()), places.get(modality, ())
        if len(identifiers) != len(ranges) or len(placed) + len(ranges) > MEDIA_MAX:
            raise UnidentifiedMediaError
        for identifier, place in zip(identifiers, ranges, strict=True):
            if not identifier or len(identifier) > NAME_CHARACTERS_MAX:
                raise UnidentifiedMediaError
            placed.append(PlacedMedia(identifier, place.offset, place.length))
    if not placed:
        raise UnidentifiedMediaError
    return tuple(sorted(placed, key=lambda one: one.offset))


def check_placed(media: Sequence[PlacedMedia], ids: bytes) -> None:
    """Raise `BadAnswerError` unless all `media` are within the prompt that has the packed token
    `ids`.
    """
    if any(one.offset + one.length > len(ids) // ID_BYTES for one in media):
        raise BadAnswerError("has media beyond the end of the prompt")


def pieces_of(array: bytes) -> Iterator[bytes]:
    """Divide the JSON array of a prompt's token ids into JSON arrays of at most about
    `PIECE_BYTES`, and yield them in order.
    """
    start, end = 1, len(array) - 1
    while end - start > PIECE_BYTES:
        comma = _COMMA.search(array, start + PIECE_BYTES, end)
        if comma is None:
            break
        yield b"[%b]" % array[start : comma.start()]
        start = comma.end()
    yield b"[%b]" % array[start:end]


def ids_of(piece: bytes) -> bytes:
    """Decode a JSON array of token ids and return them packed, 4 bytes each. Raises
    `BadAnswerError` if `piece` is something else.
    """
    try:
        return packed(_decode_ids(piece))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswerError("has something other than token ids from 0 to 2**32 - 1") from error


def too_many(ids: bytes, body: bytes) -> bool:
    """Return True if `ids` has more token ids than the request `body` has bytes, by more than
    `TEMPLATE_TOKENS_MAX`, the assumed maximum that a chat template adds.
    """
    return len(ids) // ID_BYTES > len(body) + TEMPLATE_TOKENS_MAX


TEMPLATE_TOKENS_MAX: Final = 65_536
