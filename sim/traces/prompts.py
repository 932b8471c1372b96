"""Conversion of the block ids of a request to a prompt, in two ways that share the same prefixes.

Fast: hashes without text. The base of a block is a hash of the base before it, its start and its
id. The hash at any token is the base of its block plus an odd constant for each token from the
start. One list of ids therefore gives hashes for blocks of any size, for the picker and for an
engine. Blocks with the same id and different lengths share as many tokens as the shorter one has.

Through bytes: a text of four bytes a token for `/v1/completions`, which is parsed and hashed as in
production. The text of a block begins with a token that occurs nowhere else in a text, and
continues with the rest of its id. The two ways agree because the text can be split into its blocks
again. A hash covers whole tokens, so it must cover the whole id of a block to distinguish it from
others. It does if the block size is a multiple or a divisor of 64 tokens. For blocks of any length
it may cover one token, so their ids must fit into one; ids of generated workloads do.

Text after the last block is unique to the request, and so is the answer unless the trace gives it
an id. Answers are not part of the picker's hashes.
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
"""Model name of requests whose trace names no model."""
PICKER_BLOCK_TOKENS: Final = 64

_WORD: Final = 2**64 - 1
_STRIDE: Final = 0x9E3779B97F4A7C15
"""Odd constant that is added to a block's base hash for each token, so that the hashes at all
tokens of a block differ.
"""
_SEEDS_KEPT_MAX: Final = 64
"""Maximum number of hash seeds that are cached; there is one for each pair of model and salt in a
trace.
"""
_STRIDES_KEPT_MAX: Final = 4096
"""Number of blocks (of 8 bytes each) for which strides are cached, for each block size.
`_STRIDE_SIZES_MAX` limits the number of block sizes.
"""
_STRIDE_SIZES_MAX: Final = 16
_PART: Final = Struct("=QQ")
"""Binary form of (block id, number of the block's first token) that is hashed for the base of a
block.
"""
_OWN_PROMPT: Final = b"prompt"
_OWN_ANSWER: Final = b"answer"

_SHARED_FIRST: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_OWN_FIRST: Final = "!#$%&()*+,;<=>?@"
"""First characters of the text of a shared block and of a request's own text. Neither has a blank,
which begins all other tokens.
"""
_DIGIT_BITS: Final = 6
_FIRST_TOKEN_IDS: Final = 2**24
_SECOND_TOKEN_IDS: Final = 2**42
_FIRST_TOKEN_OWN: Final = 2**22


def model_of(arrival: Arrival) -> str:
    """Return the model name in the request body: the adapter, else the model, else `DEFAULT_MODEL`."""
    return arrival.adapter or arrival.model or DEFAULT_MODEL


def request_of(
    arrival: Arrival,
    block_tokens: Sequence[int] = (PICKER_BLOCK_TOKENS,),
    hashes: "PromptHashes | None" = None,
    *,
    told_block_tokens: Sequence[int] = (),
) -> InferenceRequest:
    """Return the request as the picker sees it, with hashes instead of text.

    `block_tokens` are the block sizes in which affinity indexes look up prompts; an index with
    another size would find no blocks. `told_block_tokens` are the block sizes of indexes that
    receive KV-cache events, for requests with known tokens. `hashes` are the hashes of `arrival`,
    if they were computed before.
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
    """Return the hash of every full block of prompt and answer together, as engines use them."""
    return PromptHashes(arrival).engine_chain(block_size_tokens)


def request_through_bytes(arrival: Arrival) -> InferenceRequest:
    """Return the request as the picker parses it from its body. Raises `ValueError` if the picker
    rejects the body.
    """
    parsed = parse_request(
        path=arrival.path or COMPLETIONS_PATH,
        headers=dict(arrival.headers),
        body=body_of(arrival),
        request_id=str(arrival.index),
    )
    if isinstance(parsed, Refusal):
        # The type is right, but the value is not.
        raise ValueError(  # noqa: TRY004
            f"Request {arrival.index} is refused: {parsed.message}."
        )
    return structs.replace(parsed.request, priority=arrival.priority, session_id=arrival.session)


def body_of(arrival: Arrival) -> bytes:
    """Return the request's body: its raw body, else a generated one for `COMPLETIONS_PATH`.

    Raises `ValueError` as `prompt_text` does.
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
    """Return the generated text of the prompt, four ASCII characters a token.

    Raises `ValueError` if block ids, or the number of a request with own text, are too large to be
    encoded.
    """
    # A hash of the picker may end this many tokens after the start of a block.
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
                f"Request {arrival.index} ends in text of its own after blocks of different lengths; "
                f"expected this only for the first {_FIRST_TOKEN_OWN:,} requests."
            )
        parts.append(_text(_OWN_FIRST, arrival.index, left))
    return "".join(parts)


def _text(first: str, number: int, tokens: int) -> str:
    """Return text of `tokens` tokens that encodes `number`.

    The first token has its low bits; each further token has a blank and three digits.
    """
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
    """Return the hashes of blocks `start` to `end` from the result of `PromptHashes.engine_pieces`.

    They equal those of `PromptHashes.chain`.
    """
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
    """The hashes of one prompt and its answer, for blocks of any size."""

    __slots__ = ("_ends", "bases", "prompt_tokens", "tokens")

    def __init__(self, arrival: Arrival) -> None:
        """Hash the block ids of `arrival`.

        The hash at token t is the base of the part that contains t, plus t strides.
        """
        self.prompt_tokens = arrival.prompt_tokens
        self.tokens = arrival.prompt_tokens + arrival.output_tokens
        numbers, self._ends = _parts(arrival)
        seed = _seed(model_of(arrival), arrival.cache_salt)
        xxh64, pack = xxhash.xxh64_intdigest, _PART.pack
        self.bases = [
            seed := xxh64(pack(number, start), seed)
            for number, start in zip(numbers, (0, *self._ends), strict=False)
        ]
        """Base hash of each part in `Arrival.spans`, then of the request's own text if there is
        some, then of the answer. Two parts with equal bases have the same text up to the end of the
        shorter one.
        """

    def chain(self, block_tokens: int, tokens: int) -> npt.NDArray[np.uint64]:
        """Return the hash at the end of each full block within the first `tokens` tokens of prompt
        and answer.
        """
        last = tokens // block_tokens
        ends = [end // block_tokens for end in self._ends]
        while ends and ends[-1] > last:
            del ends[-1]
        if not ends or ends[-1] < last:
            # The rest is in the first part that ends after it.
            ends.append(last)
        counts = np.array(list(map(sub, ends, (0, *ends))))
        bases = np.array(self.bases[: len(ends)], np.uint64)
        hashes: npt.NDArray[np.uint64] = bases.repeat(counts)
        kept = last <= _STRIDES_KEPT_MAX
        strides = _strides(block_tokens) if kept else _strides_of(block_tokens, last)
        hashes += strides[:last]
        return hashes

    def picker_chain(self, block_tokens: int) -> bytes:
        """Return the block hashes of the prompt as `InferenceRequest.chains` stores them: 8 bytes
        for each block.
        """
        return self.chain(block_tokens, self.prompt_tokens).tobytes()

    def engine_chain(self, block_tokens: int) -> list[int]:
        """Return the block hashes of prompt and answer together, as `EngineRequest` stores them."""
        hashes: list[int] = self.chain(block_tokens, self.tokens).tolist()
        return hashes

    def engine_pieces(self, block_tokens: int) -> tuple[list[int], list[int]]:
        """Return the hashes of `engine_chain` in a shorter form, which `EngineRequest` accepts too.

        The first list has one key for all blocks that end in one part, the second the number of
        blocks up to the end of that part.
        """
        ends = [end // block_tokens for end in self._ends]
        longer = list(map(gt, ends, (0, *ends)))
        if all(longer):
            return self.bases, ends
        return list(compress(self.bases, longer)), list(compress(ends, longer))


def _parts(arrival: Arrival) -> tuple[list[int], list[int]]:
    """Return the ids of the parts of a prompt and its answer, and the number of tokens from the
    beginning of the prompt to the end of each part. The answer is the last part.
    """
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
    """Return the numbers that are added to the base of a part to get the hash at the end of each
    block: block size times `_STRIDE` times 1, 2, 3 and so on, modulo 2^64.
    """
    ends = np.arange(1, blocks + 1, dtype=np.uint64)
    ends *= np.uint64(block_tokens * _STRIDE & _WORD)
    return ends


@lru_cache(_STRIDE_SIZES_MAX)
def _strides(block_tokens: int) -> npt.NDArray[np.uint64]:
    """Return `_strides_of` for the first 4096 blocks, cached because it is the same for every
    prompt.
    """
    return _strides_of(block_tokens, _STRIDES_KEPT_MAX)


@lru_cache(_SEEDS_KEPT_MAX)
def _seed(model: str, cache_salt: str) -> int:
    return chain_seed(ApiKind.COMPLETIONS, model, cache_salt)


def _own(what: bytes, index: int) -> int:
    """Return the id of a text that only request number `index` has. `what` says whether the text is
    in the prompt or is the answer.
    """
    return xxhash.xxh64_intdigest(what, index)
