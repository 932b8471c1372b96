"""A request as the core sees it, and the chains of hashes that its prompts become."""

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
"""Kinds whose prompts are made of messages."""
_CHARACTER_BYTES_MAX: Final = 4
"""Of one in UTF-8."""


class InferenceRequest(Struct, frozen=True, kw_only=True, gc=False):
    """One request, parsed once: a value, of which two tables keep what was computed of it.

    `prompts` are canonical bytes (`core/prompt/parse`), one item a prompt; `without_prompts` lets
    them go once their chains are known, because the request outlives them inside its lease.
    """

    request_id: str
    api: ApiKind = ApiKind.OPAQUE
    model: str = ""
    """The model or adapter that is to serve, after any rewrite."""
    prompts: tuple[bytes, ...] = ()
    prompt_tokens: int = 0
    """Estimate: prompt bytes / 4, or the exact number of token ids.

    Of a request that is decided by an index that has looked up its ids it is their number, so that what
    endpoints hold of a prompt and its length are counted alike."""
    prompt_bytes: int = 0
    """0: four for each of `prompt_tokens`."""
    cache_salt: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names."""
    subset: tuple[str, ...] | None = None
    """Addresses the gateway allows: "ip:port" or a bare ip. None: no hint; (): nothing allowed."""
    priority: int = 0
    stream: bool = False
    output_tokens_max: int | None = None
    session_id: str = ""
    chains: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Block size in bytes -> one chain a prompt. A replayed trace fills it instead of `prompts`."""
    tails: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    """Block size in bytes -> the hash of what is left of each prompt behind its last full block."""
    token_chains: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Tokens in a block -> one chain a prompt, over the ids that the engine reads."""
    media: list[tuple[bytes, ...]] = field(default_factory=list)
    """What `media_items` found, once it has looked. A capture that is decided again fills it."""
    segments: KnownSegments | None = None
    """What is known of long prompts; it saves time and changes no chain."""
    moment: Moment = NO_MOMENT
    """What the picker knew when it decided."""

    def chains_of(self, block_bytes: int, blocks_max: int) -> tuple[bytes, ...]:
        """Chained hashes of the full blocks of each prompt, 8 bytes a block, computed once."""
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
        """Chained hashes of the full blocks of token ids of each prompt, computed once.

        `adapter`: the LoRA adapter that is to serve; "": the model itself. (): the ids are not known.
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
        """The hash of what is left of each prompt behind its last full block, computed once.

        None: nothing is left, or there are more than `blocks_max` full blocks.
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
        """Up to 16 bytes for each distinct image, audio or video in the prompts, computed once."""
        if not self.media:
            by_ids = self.api is ApiKind.TOKENS
            self.media.append(() if by_ids else media_digests(self.prompts))
        return self.media[0]

    def opening(self) -> tuple[int, int] | None:
        """Of a conversation: bytes before the user's first message, and 64 bits for all up to its end.

        Both are the same at each turn; the hash is under the model, the salt and the kind of API.
        None: it is no conversation, or the prompt is not there.
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
        """At most so many of the user's first message, or of a completion's prompt.

        "": that has no text. None: the prompt is of another kind, or not there.
        """
        if not self.prompts:
            return None
        prompt = self.prompts[0]
        start = 0
        if self.api in _CONVERSATIONS:
            begin, after = opening_of(prompt) or (0, 0)
            prompt = prompt[begin:after]
            # The text begins behind the field before it: the role, or a name.
            start = max(prompt.rfind(byte, 0, prompt.find(TEXT)) for byte in TERMINATORS) + 1
        elif self.api is not ApiKind.COMPLETIONS:
            return None
        end = min(prompt.find(TEXT), start + characters * _CHARACTER_BYTES_MAX)
        return prompt[start:end].decode(errors="replace")[:characters] if end > start else ""

    def block_hash(self, block_bytes: int, blocks: int) -> int | None:
        """64 bits for the first prompt up to and with block number `blocks`, or its last full one.

        None: the chain is not made yet, or the prompt has no full block.
        """
        chains = self.chains.get(block_bytes)
        chain = chains[0] if chains else b""
        end = min(blocks * HASH_BYTES, len(chain))
        return int.from_bytes(chain[end - HASH_BYTES : end], sys.byteorder) if end else None

    @property
    def token_ids(self) -> tuple[bytes, ...]:
        """Of each prompt its tokens, 4 little-endian bytes an id, as they came or as they were found out.

        (): not known.
        """
        return self.prompts if self.api is ApiKind.TOKENS else self.moment.token_ids

    @property
    def known_tokens(self) -> int:
        """How many `token_ids` all prompts have, also where these are gone; 0: not known."""
        ids = self.token_ids
        return sum(map(len, ids)) // TOKEN_BYTES if ids else self.moment.known_tokens

    @property
    def prompt_count(self) -> int:
        """How many prompts an engine gets with it, each of which it counts as a request."""
        if self.prompts:
            return len(self.prompts)
        return max((len(chains) for chains in self.chains.values()), default=1)

    def without_prompts(self) -> "InferenceRequest":
        """The same without the prompt bytes and ids; the chains stay, and how many ids there were."""
        moment = self.moment
        if moment.token_ids or self.api is ApiKind.TOKENS:
            known = self.known_tokens
            moment = structs.replace(moment, token_ids=(), token_media=(), known_tokens=known)
        return structs.replace(self, prompts=(), moment=moment)
