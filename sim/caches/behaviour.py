"""The interface of the prompt caches that `--cache` names, and the code that most of them share."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from msgspec import Meta, Struct

from sim.engine.blocks import BlockPool, Holding
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest, PromptParts

PCIE_5_X16_BYTES_PER_S: Final = 63e9
"""Peak speed in bytes per second of a PCIe 5.0 slot with 16 lanes in one direction: 32 GT/s * 16 *
128/130 / 8 bits. An H100 has such a slot. Real copies are slower, so restoring takes at least the
time computed here.
"""

NOTHING: Final = Found()

Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
BytesPerSecond: TypeAlias = Annotated[float, Meta(ge=1e6, le=1e15)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]
Slots: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
"""Number of slots of a cache; the limits exclude implausible values."""
Stores: TypeAlias = dict[str, Any]
"""Stores of cached data that the pods of a pool share. Compatible stores have the same name."""


class CacheBehaviour(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of prompt cache that `--cache` can name; the fields are its parameters.

    Subclasses repeat `frozen=True`, which only type checkers need.
    """

    type_name: ClassVar[str]
    """Name by which the flag `--cache` selects this kind of prompt cache."""

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> PromptCache:
        """Return a new prompt cache for one engine. `before` is the cache of the engine's previous
        process in the same pod, or None.

        The profile must have `kv_bytes_per_token`.
        """
        raise NotImplementedError

    def open_in(
        self, stores: Stores, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> PromptCache:
        """Return a new prompt cache as `open` does. A cache with parts that pods share takes these
        from `stores`.
        """
        return self.open(profile, settings, before)

    def kv_tokens(self, profile: Profile) -> int:
        """Return the number of tokens in the engine's KV cache that remain for running requests."""
        return profile.kv_tokens

    def request_tokens_max(self, settings: EngineSettings) -> int:
        """Return the maximum number of tokens in prompt and answer of one request."""
        return settings.kv_tokens


class UnhashedPool(BlockPool):
    """A pool of KV blocks for running requests in which no block can be hit.

    Data from a prompt cache is copied into blocks of the request's own.
    """

    def match(self, keys: Sequence[int], ends: Sequence[int], blocks_max: int) -> tuple[int, int]:
        """Return (0, 0): no block of a prompt is cached here, because blocks of this pool have no
        hash.
        """
        return 0, 0

    def register(
        self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int
    ) -> None:
        """Register nothing, because blocks of this pool have no hash and cannot be hit."""

    def extend(self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int) -> bool:
        """Return True: nothing needs to be registered, because blocks of this pool have no hash."""
        return True


def parts_of(request: EngineRequest) -> PromptParts:
    """Return the parts of a request's prompt, with the answer as the last part (`request.parts`).
    Raises AssertionError if the request has none; only requests of engines without a prompt cache
    may have none.
    """
    assert request.parts is not None, "an engine with a prompt cache is told the parts of prompts"
    return request.parts


class Stored(Struct, eq=False):
    """The beginning of a prompt with its answer, up to part number `parts`, that a cache stores as
    one piece.
    """

    text: PromptParts
    parts: int

    @property
    def key(self) -> int:
        return self.text.keys[self.parts - 1]

    @property
    def tokens(self) -> int:
        return self.text.ends[self.parts - 1]

    def begins(self, prompt: PromptParts) -> bool:
        """Return whether `prompt` begins with the whole stored text, and that text ends at the end
        of a part of the prompt.
        """
        at = self.parts - 1
        return (
            self.parts <= prompt.messages
            and prompt.keys[at] == self.key
            and prompt.ends[at] == self.tokens
        )

    def shared_tokens(self, prompt: PromptParts) -> int:
        """Return how many tokens at the beginning of the stored text and of `prompt` are the
        same.
        """
        shared = 0
        ours = zip(self.text.keys[: self.parts], self.text.ends, strict=False)
        theirs = zip(prompt.keys[: prompt.messages], prompt.ends, strict=False)
        for (key, end), (other, other_end) in zip(ours, theirs, strict=False):
            if key != other:
                break
            shared = min(end, other_end)
            if end != other_end:
                break
        return shared
