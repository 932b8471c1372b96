"""What a way to keep prompts is made of, and what all but one of them share."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from msgspec import Meta, Struct

from sim.engine.blocks import BlockPool, Holding
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest, PromptParts

PCIE_5_X16_BYTES_PER_S: Final = 63e9
"""32 GT/s * 16 lanes * 128/130 / 8 bits: what a card's slot carries one way at most, an H100's too.
Copies reach less; so what is restored through it takes no less than is told here."""

NOTHING: Final = Found()

Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
BytesPerSecond: TypeAlias = Annotated[float, Meta(ge=1e6, le=1e15)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]
Slots: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
"""Of parameters: nobody means what is outside."""
Stores: TypeAlias = dict[str, Any]
"""What the pods of a pool have in common, by a name that says what fits together."""


class CacheBehaviour(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to keep prompts; its fields are its parameters.

    A subclass says `frozen=True` again, which only type checkers need.
    """

    type_name: ClassVar[str]
    """As `--cache` names it."""

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> PromptCache:
        """An empty cache for one engine. `before`: that of the last process in the same place.

        The profile knows its `kv_bytes_per_token`.
        """
        raise NotImplementedError

    def open_in(
        self,
        stores: Stores,
        profile: Profile,
        settings: EngineSettings,
        before: PromptCache | None,
    ) -> PromptCache:
        """As `open`, among pods that have `stores` in common."""
        return self.open(profile, settings, before)

    def kv_tokens(self, profile: Profile) -> int:
        """What is left of the engine's KV cache for the requests that run."""
        return profile.kv_tokens

    def request_tokens_max(self, settings: EngineSettings) -> int:
        """Prompt and answer of one request together."""
        return settings.kv_tokens


class UnhashedPool(BlockPool):
    """Blocks for the requests that run, in which nothing is found again.

    What a request brings from elsewhere is copied into blocks of its own.
    """

    def match(self, keys: Sequence[int], ends: Sequence[int], blocks_max: int) -> tuple[int, int]:
        """Nothing."""
        return 0, 0

    def register(
        self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int
    ) -> None:
        """Nothing to be done: no block has a hash."""

    def extend(self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int) -> bool:
        """Likewise."""
        return True


def parts_of(request: EngineRequest) -> PromptParts:
    """Those of a request, which whoever has such an engine tells it."""
    assert request.parts is not None, "an engine with a prompt cache is told the parts of prompts"
    return request.parts


class Stored(Struct, eq=False):
    """The first `parts` parts of a request, kept as one piece."""

    text: PromptParts
    parts: int

    @property
    def key(self) -> int:
        return self.text.keys[self.parts - 1]

    @property
    def tokens(self) -> int:
        return self.text.ends[self.parts - 1]

    def begins(self, prompt: PromptParts) -> bool:
        """Whether a prompt begins with all of it, and it ends where a part of the prompt does."""
        at = self.parts - 1
        return (
            self.parts <= prompt.messages
            and prompt.keys[at] == self.key
            and prompt.ends[at] == self.tokens
        )

    def shared_tokens(self, prompt: PromptParts) -> int:
        """How many tokens from the beginning it has in common with a prompt."""
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
