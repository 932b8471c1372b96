"""A simulated tokenizer in which four bytes are a token, so that token sequences are plain bytes.

A real tokenizer separates messages by special tokens, so each text is tokenized by itself. A text
of n bytes is ceil(n / 4) tokens, the last one padded. Every generated token is exactly four bytes
of text. An answer that returns as content of the next turn therefore gives the same tokens as when
it was generated, and its blocks are cache hits. The picker also counts 4 bytes a token, but of its
own rendering of a request. The two counts are close, but not equal.
"""

import math
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

import numpy as np
import xxhash

TOKEN_BYTES: Final = 4

_START: Final = b"\xff\x01\x00\x00"
_END: Final = b"\xff\x02\x00\x00"
"""Special tokens around each message. No text contains them, because UTF-8 has no byte 0xFF."""

_WORDS: Final = (
    "theandyouforarebutnotallcanherwasoneouroutdayhadhashimhishowmannew"
    "nowoldseetwowhoboydiditsletputsayshetoouseairaskbadbigboxcarcatcut"
    "dogdryeatendeyefarfewflyfungothotjobkeylawlaylegliemaymixoilownpay"
    "perredrunseasetsitsixskysonsuntentoptrywarwetwhywinyesyetaddageago"
)
_VOCABULARY: Final = tuple(_WORDS[at : at + 3] + " " for at in range(0, len(_WORDS), 3))
"""Tokens of simulated answers: three letters and a space each."""
_WORDS_MEDIAN: Final = 129
_WORDS_SIGMA: Final = 0.93
_WORDS_MAX: Final = 1000
"""Parameters of the lognormal length of answers in tokens, as in the Azure 2023 conversation trace:
p50 129, p90 424, longest 1,000.
"""


def encode_text(text: str) -> bytes:
    """Return the tokens of one text, 4 bytes a token; the last token is padded."""
    encoded = text.encode("utf-8", "surrogatepass")
    return encoded + bytes(-len(encoded) % TOKEN_BYTES)


def encode_ids(token_ids: Iterable[int]) -> bytes:
    """Return token ids as tokens of 4 little-endian bytes each.

    Raises `ValueError` for an id outside 0 to 2**32 - 1.
    """
    try:
        return b"".join(token_id.to_bytes(TOKEN_BYTES, "little") for token_id in token_ids)
    except OverflowError:
        raise ValueError("A token id is an integer from 0 to 4294967295.") from None


def decode_ids(tokens: bytes) -> list[int]:
    """Return the ids of the tokens in `tokens`; this is the inverse of `encode_ids`."""
    token_ids: list[int] = np.frombuffer(tokens, "<u4").tolist()
    return token_ids


def render_chat(messages: Sequence[tuple[str, str]], preamble: str = "") -> bytes:
    """Return the tokens of a conversation of (role, text) messages by the simulated chat template,
    ending with the head of the answer.

    `preamble`, the definitions of tools, comes first.
    """
    parts = [_START, encode_text(preamble), _END] if preamble else []
    for role, text in messages:
        parts += (_START, encode_text(role), encode_text(text), _END)
    parts += (_START, encode_text("assistant"))
    return b"".join(parts)


def hash_chain(tokens: bytes, *, block_size_tokens: int, seed: int = 0) -> list[int]:
    """Return the chained hash of each full block of `tokens`. `seed` is the hash before the first
    block.
    """
    xxh64 = xxhash.xxh64_intdigest
    size = block_size_tokens * TOKEN_BYTES
    chain: list[int] = []
    for end in range(size, len(tokens) + 1, size):
        seed = xxh64(tokens[end - size : end], seed)
        chain.append(seed)
    return chain


def chain_seed(adapter: str, cache_salt: str) -> int:
    """Return the seed for the hash of the first block.

    It differs by adapter and salt, so that these do not share blocks.
    """
    return xxhash.xxh64_intdigest(f"{len(adapter)}:{adapter}{cache_salt}".encode(errors="replace"))


def draw_words(random: Random, tokens: int) -> str:
    """Return random words that are exactly `tokens` tokens."""
    return "".join(random.choices(_VOCABULARY, k=tokens))


class Answer:
    """The simulated answer to a prompt. It depends only on prompt, limit, `ignore_eos` and seed."""

    __slots__ = ("stopped", "text", "tokens")

    def __init__(self, prompt: bytes, *, tokens_max: int, ignore_eos: bool, seed: int) -> None:
        """Create an answer of `tokens_max` tokens, or fewer if it ends naturally before and
        `ignore_eos` is False.
        """
        random = Random(xxhash.xxh64_intdigest(prompt, seed))
        natural = round(random.lognormvariate(math.log(_WORDS_MEDIAN), _WORDS_SIGMA))
        natural = max(1, min(natural, _WORDS_MAX))
        self.stopped = not ignore_eos and natural <= tokens_max
        """True if the answer ended naturally (finish reason `stop`), False if it ended at its limit
        (`length`).
        """
        self.tokens = natural if self.stopped else tokens_max
        self.text = draw_words(random, self.tokens)

    def part(self, start: int, end: int) -> str:
        """Return the text of the answer's tokens `start` to `end`."""
        return self.text[start * TOKEN_BYTES : end * TOKEN_BYTES]
