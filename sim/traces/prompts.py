"""Block ids to prompts, in two ways that share in exactly the same places.

Fast: hashes, without any text. The base of a block is made of the base before it, of where it starts
and of its id; the hash at any token is the base of its block plus an odd constant for each token
from the start. So one list of ids gives hashes for blocks of any size, for the picker and for an
engine, and blocks of one id and different lengths share the shorter's.

Through bytes: a text of four bytes a token for `/v1/completions`, to be parsed and hashed as in
production. A block's text begins with a token that no other place of a text has, and goes on with
the rest of its id. The two ways agree because the text can be cut back into its blocks; a hash
covers whole tokens, so it must cover the whole id of a block to tell it from another: with blocks
of a multiple of 64 tokens, or of a divisor of 64, it always does. Of stretches of any length it may
cover one token, so that their ids must fit into one: those of generated workloads do.

What follows the last block is the request's own, and so is the answer unless the trace gives it an
id. Answers are no part of what the picker hashes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, compress
from operator import gt, sub
from struct import Struct
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import structs

from epp.core.prompt.blocks import chain_seed
from epp.core.prompt.parse import parse_request
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, ApiKind, Refusal
from sim.traces.arrival import Arrival

COMPLETIONS_PATH: Final = "/v1/completions"
DEFAULT_MODEL: Final = "trace"
"""The model of a request whose trace names none."""
PICKER_BLOCK_TOKENS: Final = 64

_WORD: Final = 2**64 - 1
_STRIDE: Final = 0x9E3779B97F4A7C15
"""Odd, so that the hashes inside a block all differ."""
_SEEDS_KEPT_MAX: Final = 64
"""Of models and salts; a trace names few."""
_STRIDES_KEPT_MAX: Final = 4096
"""Blocks of 8 bytes, for each of as many block sizes as follow."""
_STRIDE_SIZES_MAX: Final = 16
_PART: Final = Struct("=QQ")
"""Its number and its first token."""
_OWN_PROMPT: Final = b"prompt"
_OWN_ANSWER: Final = b"answer"

_SHARED_FIRST: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_OWN_FIRST: Final = "!#$%&()*+,;<=>?@"
"""Neither has a blank: that begins all other tokens."""
_DIGIT_BITS: Final = 6
_FIRST_TOKEN_IDS: Final = 2**24
_SECOND_TOKEN_IDS: Final = 2**42
_FIRST_TOKEN_OWN: Final = 2**22


def model_of(arrival: Arrival) -> str:
    """The name in the body: the adapter, else the model, else `DEFAULT_MODEL`."""
    return arrival.adapter or arrival.model or DEFAULT_MODEL


def request_of(
    arrival: Arrival,
    block_tokens: Sequence[int] = (PICKER_BLOCK_TOKENS,),
    hashes: "PromptHashes | None" = None,
    *,
    told_block_tokens: Sequence[int] = (),
) -> InferenceRequest:
    """The request as the picker sees it, without text.

    `block_tokens` are all the block sizes in which affinity indexes will look: for any other they
    would find a prompt without blocks. `told_block_tokens`: those in which indexes look that engines
    tell what they hold, where the tokens of prompts are known. `hashes`, if they are made already, are
    those of `arrival`.
    """
    hashes = hashes or PromptHashes(arrival)
    return InferenceRequest(
        request_id=str(arrival.index),
        api=ApiKind.COMPLETIONS,
        model=model_of(arrival),
        prompt_tokens=arrival.prompt_tokens,
        cache_salt=arrival.cache_salt,
        headers=dict(arrival.headers),
        priority=arrival.priority,
        stream=True,
        output_tokens_max=arrival.output_tokens_max,
        session_id=arrival.session,
        chains={size * BYTES_PER_TOKEN: (hashes.picker_chain(size),) for size in block_tokens},
        token_chains={size: (hashes.picker_chain(size),) for size in told_block_tokens},
    )


def engine_chain(arrival: Arrival, block_size_tokens: int) -> list[int]:
    """The hash of every full block of prompt and answer together, as an engine wants them."""
    return PromptHashes(arrival).engine_chain(block_size_tokens)


def request_through_bytes(arrival: Arrival) -> InferenceRequest:
    """The request as production reads it from the body; ValueError if it refuses the body."""
    parsed = parse_request(
        path=arrival.path or COMPLETIONS_PATH,
        headers=dict(arrival.headers),
        body=body_of(arrival),
        request_id=str(arrival.index),
    )
    if isinstance(parsed, Refusal):
        # The type is right; it is the body that is not.
        raise ValueError(  # noqa: TRY004
            f"Request {arrival.index} is refused: {parsed.message}."
        )
    return structs.replace(parsed.request, priority=arrival.priority, session_id=arrival.session)


def body_of(arrival: Arrival) -> bytes:
    """The body of the request: the raw one, else one for `COMPLETIONS_PATH`.

    Raises ValueError if the ids are too large for the text to tell blocks apart.
    """
    if arrival.body:
        return arrival.body
    body: dict[str, object] = {
        "model": model_of(arrival),
        "prompt": prompt_text(arrival),
        "stream": True,
    }
    if arrival.output_tokens_max is not None:
        body["max_tokens"] = arrival.output_tokens_max
    if arrival.cache_salt:
        body["cache_salt"] = arrival.cache_salt
    return msgspec.json.encode(body)


def prompt_text(arrival: Arrival) -> str:
    """Four ASCII characters a token. Raises ValueError as `body_of` does."""
    # A hash of the picker may end as early as this many tokens into a block.
    shortest = 1 if arrival.lengths else arrival.block_tokens
    limit = {1: _FIRST_TOKEN_IDS, 2: _SECOND_TOKEN_IDS}.get(shortest, _WORD + 1)
    if arrival.blocks and max(arrival.blocks) >= limit:
        raise ValueError(
            f"Request {arrival.index} has a block id of {max(arrival.blocks)}; expected ids below "
            f"{limit} where a block may be as short as {shortest} tokens."
        )
    parts: list[str] = []
    left = arrival.prompt_tokens
    for block, tokens in arrival.spans():
        parts.append(_text(_SHARED_FIRST, block, tokens))
        left -= tokens
    if left:
        if shortest == 1 and arrival.index >= _FIRST_TOKEN_OWN:
            raise ValueError(
                f"Request {arrival.index} ends in text of its own behind stretches of any length; "
                f"expected at most {_FIRST_TOKEN_OWN:,} requests of this kind."
            )
        parts.append(_text(_OWN_FIRST, arrival.index, left))
    return "".join(parts)


def _text(first: str, number: int, tokens: int) -> str:
    """`tokens` tokens that say `number`: its low bits in the first, three digits in each other."""
    low, high = divmod(number, len(first))[::-1]
    word = first[low]
    for _ in range(3):
        word += _SHARED_FIRST[high & 63]
        high >>= _DIGIT_BITS
    others = ""
    for _ in range(3):
        others += " "
        for _ in range(3):
            others += _SHARED_FIRST[high & 63]
            high >>= _DIGIT_BITS
    rest = (tokens - 1) * BYTES_PER_TOKEN
    return word + (others * (rest // len(others) + 1))[:rest]


def block_hashes(
    keys: Sequence[int], ends: Sequence[int], start: int, end: int, block_tokens: int
) -> list[int]:
    """The hashes of blocks `start` to `end` of a chain in pieces, as `PromptHashes.chain` has them."""
    stride = block_tokens * _STRIDE
    found: list[int] = []
    piece = bisect_right(ends, start)
    while start < end:
        stop = min(end, ends[piece])
        base = keys[piece]
        found += [(base + number * stride) & _WORD for number in range(start + 1, stop + 1)]
        start = stop
        piece += 1
    return found


class PromptHashes:
    """The hashes of one prompt and its answer, for blocks of any size; made once, asked often."""

    __slots__ = ("_ends", "bases", "prompt_tokens", "tokens")

    def __init__(self, arrival: Arrival) -> None:
        """Hash the ids; a hash at token t is the base of the part that holds t, plus t strides."""
        self.prompt_tokens = arrival.prompt_tokens
        self.tokens = arrival.prompt_tokens + arrival.output_tokens
        numbers, self._ends = _parts(arrival)
        seed = _seed(model_of(arrival), arrival.cache_salt)
        xxh64, pack = xxhash.xxh64_intdigest, _PART.pack
        self.bases = [
            seed := xxh64(pack(number, start), seed)
            for number, start in zip(numbers, (0, *self._ends), strict=False)
        ]
        """One for each of `Arrival.spans`, then the request's own part if there is one, then the
        answer. Equal bases: equal text from the start to as far as the shorter of the parts goes.
        """

    def chain(self, block_tokens: int, tokens: int) -> npt.NDArray[np.uint64]:
        """The hash at the end of each full block within the first `tokens` tokens."""
        last = tokens // block_tokens
        ends = [end // block_tokens for end in self._ends]
        while ends and ends[-1] > last:
            del ends[-1]
        if not ends or ends[-1] < last:
            # The rest is in the first part that ends behind it.
            ends.append(last)
        counts = np.array(list(map(sub, ends, (0, *ends))))
        bases = np.array(self.bases[: len(ends)], np.uint64)
        hashes: npt.NDArray[np.uint64] = bases.repeat(counts)
        kept = last <= _STRIDES_KEPT_MAX
        strides = _strides(block_tokens) if kept else _strides_of(block_tokens, last)
        hashes += strides[:last]
        return hashes

    def picker_chain(self, block_tokens: int) -> bytes:
        """Of the prompt, as `InferenceRequest.chains` holds it: 8 bytes a block."""
        return self.chain(block_tokens, self.prompt_tokens).tobytes()

    def engine_chain(self, block_tokens: int) -> list[int]:
        """Of prompt and answer together, as `EngineRequest` wants it."""
        hashes: list[int] = self.chain(block_tokens, self.tokens).tolist()
        return hashes

    def engine_pieces(self, block_tokens: int) -> tuple[list[int], list[int]]:
        """The same told shorter, as `EngineRequest` takes it: a key for all blocks that end in one
        part, and how many blocks there are up to the end of each.
        """
        ends = [end // block_tokens for end in self._ends]
        longer = list(map(gt, ends, (0, *ends)))
        if all(longer):
            return self.bases, ends
        return list(compress(self.bases, longer)), list(compress(ends, longer))


def _parts(arrival: Arrival) -> tuple[list[int], list[int]]:
    """What the parts of the prompt, then the answer, are known by, and where each ends in tokens."""
    numbers: list[int] = []
    ends: list[int] = []
    if arrival.lengths:
        numbers.extend(arrival.blocks)
        ends.extend(accumulate(arrival.lengths))
    elif arrival.blocks:
        size = arrival.block_tokens
        numbers.extend(arrival.blocks[: arrival.prompt_tokens // size])
        ends.extend(range(size, size * len(numbers) + 1, size))
    if not ends or ends[-1] < arrival.prompt_tokens:
        numbers.append(_own(_OWN_PROMPT, arrival.index))
        ends.append(arrival.prompt_tokens)
    answer = arrival.answer
    numbers.append(_own(_OWN_ANSWER, arrival.index) if answer is None else answer)
    ends.append(arrival.prompt_tokens + arrival.output_tokens)
    return numbers, ends


def _strides_of(block_tokens: int, blocks: int) -> npt.NDArray[np.uint64]:
    """What is added to the base of a part at the end of each block."""
    ends = np.arange(1, blocks + 1, dtype=np.uint64)
    ends *= np.uint64(block_tokens * _STRIDE & _WORD)
    return ends


@lru_cache(_STRIDE_SIZES_MAX)
def _strides(block_tokens: int) -> npt.NDArray[np.uint64]:
    """The same for every prompt: kept for those that are not too long."""
    return _strides_of(block_tokens, _STRIDES_KEPT_MAX)


@lru_cache(_SEEDS_KEPT_MAX)
def _seed(model: str, cache_salt: str) -> int:
    return chain_seed(ApiKind.COMPLETIONS, model, cache_salt)


def _own(what: bytes, index: int) -> int:
    """Stands for text that no other request has."""
    return xxhash.xxh64_intdigest(what, index)
