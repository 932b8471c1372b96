"""A request as the core sees it, and the chains of hashes that its prompts become."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from epp.core.prompt.blocks import KnownSegments, chain_seed, hash_blocks
from epp.core.session_tokens import NO_TOKENS, SessionTokens
from epp.core.types import ApiKind


class InferenceRequest(Struct, kw_only=True):
    """One request, parsed once.

    `prompts` are canonical bytes (`core/prompt/parse`), one item a prompt; `drop_prompts` lets them go
    once their chains are known, because the request outlives them inside its lease.
    """

    request_id: str
    api: ApiKind = ApiKind.OPAQUE
    model: str = ""
    """The model or adapter that is to serve, after any rewrite."""
    prompts: tuple[bytes, ...] = ()
    prompt_tokens: int = 0
    """Estimate: prompt bytes / 4, or the exact number of token ids."""
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
    recorded: dict[object, Any] = field(default_factory=dict)
    """What an affinity index noted when it recorded this request, to take exactly that back."""
    cold: bool = True
    """Set by the scheduler when it matches: no endpoint holds the head of any prompt."""
    segments: KnownSegments | None = None
    """Set by the scheduler: what is known of long prompts; it saves time and changes no chain."""
    session_tokens: SessionTokens = NO_TOKENS
    """Set by the scheduler: makes and reads the tokens by which a session finds its endpoint."""

    def chains_of(self, block_bytes: int, blocks_max: int) -> tuple[bytes, ...]:
        """Chained hashes of the full blocks of each prompt, 8 bytes a block, computed once."""
        known = self.chains.get(block_bytes)
        if known is None:
            seed = chain_seed(self.api, self.model, self.cache_salt)
            hashed = hash_blocks if self.segments is None else self.segments.hash_blocks
            known = tuple(
                hashed(prompt, seed=seed, block_bytes=block_bytes, blocks_max=blocks_max)
                if len(prompt) >= block_bytes
                else b""
                for prompt in self.prompts
            )
            self.chains[block_bytes] = known
        return known

    def drop_prompts(self) -> None:
        """Let the prompt bytes go; the chains stay."""
        self.prompts = ()
