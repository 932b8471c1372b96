"""The request as the scheduler sees it, and the hash chains of its prompts."""

import sys
from collections.abc import Mapping
from typing import Final

import xxhash
from msgspec import Struct, field, structs

from epp.core.moment import NO_MOMENT, Moment
from epp.core.prompt.blocks import HASH_BYTES, KnownSegments, chain_seed, hash_blocks
from epp.core.prompt.canonical import TERMINATORS, TEXT, media_digests, opening_of
from epp.core.prompt.token_blocks import TOKEN_BYTES, hash_tokens, token_seed
from epp.core.types import ApiKind

_CONVERSATIONS: Final = frozenset({ApiKind.CHAT, ApiKind.RESPONSES, ApiKind.MESSAGES})
"""API kinds whose prompts are conversations, which consist of messages."""
_TOKENS: Final = ApiKind.TOKENS
"""Member of `ApiKind`, which takes a tenth of the time to read as a constant (`core/types`)."""
_CHARACTER_BYTES_MAX: Final = 4
"""Maximum number of bytes of a character in UTF-8."""


class InferenceRequest(Struct, frozen=True, kw_only=True, gc=False):
    """One parsed request. It is a value, except for tables that cache what was computed from it.

    `prompts` are canonical bytes (`core/prompt/parse`), one item per prompt. `without_prompts`
    drops them once their chains are known, because the request outlives them inside its lease.
    """

    request_id: str
    api: ApiKind = ApiKind.OPAQUE
    model: str = ""
    """Model or LoRA adapter that must serve the request, after any rewrite."""
    prompts: tuple[bytes, ...] = ()
    prompt_tokens: int = 0
    """Estimated number of prompt tokens: prompt bytes / 4, or the exact number of token ids.

    If an index of token ids determines the cached part, this is the number of ids. Prompts and
    their cached parts are then counted in the same unit.
    """
    prompt_bytes: int = 0
    """Size of the prompts in bytes; 0 means four bytes for each of `prompt_tokens`."""
    cache_salt: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the request, with lower-case names."""
    subset: tuple[str, ...] | None = None
    """Addresses to which the gateway limits the request, as "ip:port" or a bare IP address. None if
    it gives no hint, () if it allows none.
    """
    priority: int = 0
    stream: bool = False
    output_tokens_max: int | None = None
    session_id: str = ""
    chains: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Chain of block hashes of each prompt, by block size in bytes. A replayed trace fills it
    instead of `prompts`.
    """
    tails: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    """Hash of the rest of each prompt after its last full block, by block size in bytes; None for a
    prompt without a rest.
    """
    token_chains: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Chain of block hashes over the token ids of each prompt, by number of tokens in a block."""
    media: list[tuple[bytes, ...]] = field(default_factory=list)
    """Result of `media_items` as its only member, once it was computed. A re-enacted capture fills
    it.
    """
    segments: KnownSegments | None = None
    """Cache of the hashes of long prompts, or None to compute all hashes; the chains are the same."""
    moment: Moment = NO_MOMENT
    """State of the picker at the time of the decision, for plugins."""

    def chains_of(self, block_bytes: int, blocks_max: int) -> tuple[bytes, ...]:
        """Return the chained hashes of the first `blocks_max` full blocks of each prompt, 8 bytes
        per block. They are computed once; a later call returns them, even with another
        `blocks_max`.
        """
        known = self.chains.get(block_bytes)
        if known is None:
            seed = chain_seed(self.api, self.model, self.cache_salt)
            hashed = hash_blocks if self.segments is None else self.segments.hash_blocks
            chains: list[bytes] = []
            for prompt in self.prompts:
                chain = hashed(prompt, seed=seed, block_bytes=block_bytes, blocks_max=blocks_max)
                chains.append(chain)
            known = self.chains[block_bytes] = tuple(chains)
        return known

    def token_chains_of(
        self, block_tokens: int, blocks_max: int, *, adapter: str = ""
    ) -> tuple[bytes, ...]:
        """Return the chained hashes of the first `blocks_max` full blocks of the token ids of each
        prompt. They are computed once; a later call returns them, even with another `blocks_max` or
        `adapter`.

        `adapter` is the LoRA adapter that must serve the request, or "" for the base model. Return
        () if the ids are unknown.
        """
        known = self.token_chains.get(block_tokens)
        if known is None:
            prompts = self.token_ids
            if not prompts:
                return ()
            seed = token_seed(adapter, self.cache_salt)
            media = self.moment.token_media or ((),) * len(prompts)
            known = tuple(
                hash_tokens(
                    ids, media=placed, seed=seed, block_tokens=block_tokens, blocks_max=blocks_max
                )
                for ids, placed in zip(prompts, media, strict=False)
            )
            self.token_chains[block_tokens] = known
        return known

    def tails_of(self, block_bytes: int, blocks_max: int) -> tuple[int | None, ...]:
        """Return the hash of the rest of each prompt after its last full block; computed once.

        A hash is None if there is no rest, or if there are more than `blocks_max` full blocks.
        """
        known = self.tails.get(block_bytes)
        if known is None:
            seed = chain_seed(self.api, self.model, self.cache_salt)
            chains = self.chains_of(block_bytes, blocks_max)
            tails: list[int | None] = []
            for prompt, chain in zip(self.prompts, chains, strict=False):
                rest = prompt[len(chain) // HASH_BYTES * block_bytes :]
                last = int.from_bytes(chain[-HASH_BYTES:], sys.byteorder) if chain else seed
                whole = 0 < len(rest) < block_bytes
                tails.append(xxhash.xxh64_intdigest(rest, last) if whole else None)
            known = self.tails[block_bytes] = tuple(tails)
        return known

    def media_items(self) -> tuple[bytes, ...]:
        """Return a digest of up to 16 bytes of each distinct image, audio or video in the prompts;
        computed once. Return () if the prompts are token ids.
        """
        if not self.media:
            by_ids = self.api is ApiKind.TOKENS
            self.media.append(() if by_ids else media_digests(self.prompts))
        return self.media[0]

    def opening(self) -> tuple[int, int] | None:
        """Return the number of bytes before the user's first message of a conversation, and a hash
        of everything up to the end of that message.

        Both are the same at each turn. The hash has 64 bits, and depends on the model, the salt and
        the API kind. Return None if the request is not a conversation, or has no prompt or no
        message of the user.
        """
        if self.api not in _CONVERSATIONS or not self.prompts:
            return None
        prompt = self.prompts[0]
        found = opening_of(prompt)
        if found is None:
            return None
        start, end = found
        seed = chain_seed(self.api, self.model, self.cache_salt)
        return start, xxhash.xxh64_intdigest(memoryview(prompt)[:end], seed)

    def first_text(self, characters: int) -> str | None:
        """Return the first characters, at most `characters`, of the user's first message or of a
        completion's prompt.

        Return "" if it has no text, and None for another kind of request or without a prompt.
        """
        if not self.prompts:
            return None
        prompt = self.prompts[0]
        start = 0
        if self.api in _CONVERSATIONS:
            begin, after = opening_of(prompt) or (0, 0)
            prompt = prompt[begin:after]
            # The text begins after the previous field: the role or a name.
            start = max(prompt.rfind(byte, 0, prompt.find(TEXT)) for byte in TERMINATORS) + 1
        elif self.api is not ApiKind.COMPLETIONS:
            return None
        end = min(prompt.find(TEXT), start + characters * _CHARACTER_BYTES_MAX)
        return prompt[start:end].decode(errors="replace")[:characters] if end > start else ""

    def block_hash(self, block_bytes: int, blocks: int) -> int | None:
        """Return the 64-bit hash of the first prompt up to the end of block number `blocks`, or of
        its last full block if it is shorter.

        Return None if the chain is not computed yet, or the prompt has no full block.
        """
        chains = self.chains.get(block_bytes)
        chain = chains[0] if chains else b""
        end = min(blocks * HASH_BYTES, len(chain))
        return int.from_bytes(chain[end - HASH_BYTES : end], sys.byteorder) if end else None

    @property
    def token_ids(self) -> tuple[bytes, ...]:
        """Return the token ids of each prompt, 4 little-endian bytes per id, as the client sent
        them or as a `token-producer` computed them; () if unknown.
        """
        return self.prompts if self.api is _TOKENS else self.moment.token_ids

    @property
    def known_tokens(self) -> int:
        """Return the number of token ids of all prompts, even after the ids were dropped; 0 if
        unknown.
        """
        ids = self.token_ids
        return sum(map(len, ids)) // TOKEN_BYTES if ids else self.moment.known_tokens

    @property
    def prompt_count(self) -> int:
        """Return the number of prompts, each of which an engine counts as a request."""
        if self.prompts:
            return len(self.prompts)
        return max((len(chains) for chains in self.chains.values()), default=1)

    def without_prompts(self) -> "InferenceRequest":
        """Return a copy of the request without prompt bytes and token ids; the chains and the
        number of ids stay.
        """
        moment = self.moment
        if moment.token_ids or self.api is _TOKENS:
            known = self.known_tokens
            moment = structs.replace(moment, token_ids=(), token_media=(), known_tokens=known)
        return structs.replace(self, prompts=(), moment=moment)
