"""What an engine is asked for."""

from collections.abc import Sequence

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.blocks import Holding


class PromptParts(Struct, frozen=True):
    """A prompt and its answer as stretches of text: messages, where the trace knows them.

    The last part is the answer; the prompt has one at least.
    """

    keys: Sequence[int]
    """Each stands for all text up to and with its part. Two parts with one key have the same text
    as far as the shorter of them goes."""
    ends: Sequence[int]
    """Tokens up to the end of each part, ascending."""

    @property
    def messages(self) -> int:
        """Parts of the prompt."""
        return len(self.keys) - 1


class EngineRequest:
    """One request inside the engine; the caller makes it, the engine fills in what happens to it.

    `chain` has a key for every piece of prompt and answer together, in whole blocks: the hash of
    each full block, or, with `chain_ends`, of longer pieces (see `sim/engine/blocks.py`); `chain_ends`
    says, for each piece, how many blocks there are up to its end. Times are the `now` of the
    engine's caller, NaN-free: None until it happened.

    While it decodes in a step of many passes, `generated_tokens`, `computed_tokens`,
    `last_token_at` and `token_gap_s` are those at its first token; they are right again when it is
    done, preempted or gone, and after every `Engine.step`.
    """

    __slots__ = (
        "adapter",
        "admission",
        "arrived_at",
        "cached_tokens",
        "chain",
        "chain_ends",
        "computed_tokens",
        "due",
        "first_token_at",
        "generated_tokens",
        "holding",
        "last_token_at",
        "lead",
        "output_tokens",
        "parts",
        "preemptions",
        "prompt_tokens",
        "queued_at",
        "request_id",
        "scheduled_at",
        "shared_blocks",
        "token_gap_s",
    )

    def __init__(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        chain: Sequence[int],
        chain_ends: Sequence[int] | None = None,
        adapter: str = "",
        parts: PromptParts | None = None,
    ) -> None:
        """`output_tokens` are generated, no more and no fewer; at least one of each kind.

        `parts` are for engines with a `PromptCache`.
        """
        assert prompt_tokens > 0
        assert output_tokens > 0
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.chain = chain
        self.chain_ends = range(1, len(chain) + 1) if chain_ends is None else chain_ends
        self.adapter = adapter
        self.parts = parts
        self.arrived_at: Seconds | None = None
        """At the server, before its front end; the engine sets it if the caller did not."""
        self.queued_at: Seconds = 0.0
        self.scheduled_at: Seconds | None = None
        self.first_token_at: Seconds | None = None
        self.last_token_at: Seconds | None = None
        self.token_gap_s: Seconds = 0.0
        """Between the last two tokens."""
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens found in the cache at the first admission, as `usage` reports them."""
        self.preemptions = 0
        # The engine's own.
        self.holding = Holding()
        self.admission = 0
        self.shared_blocks = 0
        self.lead = 0
        self.due = -1

    @property
    def known_tokens(self) -> int:
        """Prompt and what was generated so far."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def finished(self) -> bool:
        return self.generated_tokens >= self.output_tokens
