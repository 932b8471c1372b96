"""The interface of cache behaviours, and the code that most of them share."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from msgspec import Meta, Struct

from sim.engine.blocks import BlockPool, Holding
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest, PromptParts

PCIE_5_X16_BYTES_PER_S: Final = 63e9
"""Peak speed of a PCIe 5.0 slot with 16 lanes in one direction: 32 GT/s * 16 * 128/130 / 8 bits. An
H100 has such a slot. Real copies are slower, so restoring takes at least the time computed here."""

NOTHING: Final = Found()

Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
BytesPerSecond: TypeAlias = Annotated[float, Meta(ge=1e6, le=1e15)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]
Slots: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
"""Number of slots; the limits exclude implausible values."""
Stores: TypeAlias = dict[str, Any]
"""Stores that the pods of a pool share, by a name that is equal for compatible stores."""


class CacheBehaviour(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cache behaviour; its fields are its parameters.

    Subclasses repeat `frozen=True`, which only type checkers need.
    """

    type_name: ClassVar[str]
    """Name of the behaviour in `--cache`."""

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> PromptCache:
        """Return an empty cache for one engine; `before` is the cache of the previous process in
        the same place.

        The profile must have `kv_bytes_per_token`.
        """
        raise NotImplementedError

    def open_in(
        self, stores: Stores, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> PromptCache:
        """Return a cache like `open`, for pods that share `stores`."""
        return self.open(profile, settings, before)

    def kv_tokens(self, profile: Profile) -> int:
        """Return the tokens of the engine's KV cache that remain for running requests."""
        return profile.kv_tokens

    def request_tokens_max(self, settings: EngineSettings) -> int:
        """Return the maximum tokens of prompt and answer of one request."""
        return settings.kv_tokens


class UnhashedPool(BlockPool):
    """A pool of blocks for running requests, without hits.

    Cached data of a request is copied into blocks of its own.
    """

    def match(self, keys: Sequence[int], ends: Sequence[int], blocks_max: int) -> tuple[int, int]:
        """Return no hit."""
        return 0, 0

    def register(
        self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int
    ) -> None:
        """Do nothing, because no block has a hash."""

    def extend(self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int) -> bool:
        """Do nothing, because no block has a hash."""
        return True


def parts_of(request: EngineRequest) -> PromptParts:
    """Return the parts of a request, which engines with a prompt cache must have."""
    assert request.parts is not None, "an engine with a prompt cache is told the parts of prompts"
    return request.parts


class Stored(Struct, eq=False):
    """The first `parts` parts of a request, stored as one piece."""

    text: PromptParts
    parts: int

    @property
    def key(self) -> int:
        return self.text.keys[self.parts - 1]

    @property
    def tokens(self) -> int:
        return self.text.ends[self.parts - 1]

    def begins(self, prompt: PromptParts) -> bool:
        """Return whether a prompt begins with all of it, and it ends at the end of a part of the
        prompt.
        """
        at = self.parts - 1
        return (
            self.parts <= prompt.messages
            and prompt.keys[at] == self.key
            and prompt.ends[at] == self.tokens
        )

    def shared_tokens(self, prompt: PromptParts) -> int:
        """Return how many tokens from the beginning it shares with a prompt."""
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
