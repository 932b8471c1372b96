"""A request inside a simulated engine, and the parts of its prompt."""

from collections.abc import Sequence

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.blocks import Holding


class PromptParts(Struct, frozen=True):
    """A prompt and its answer as parts of text. The parts are chat messages if the trace contains
    these.

    The last part is the answer. The prompt has at least one part.
    """

    keys: Sequence[int]
    """Key of each part, which stands for all text from the beginning to the end of the part. Two
    parts with equal keys have the same text up to the end of the shorter one.
    """
    ends: Sequence[int]
    """Number of tokens from the beginning of the prompt to the end of each part, ascending."""

    @property
    def messages(self) -> int:
        """Number of parts in the prompt, without the answer."""
        return len(self.keys) - 1


class EngineRequest:
    """One request inside the engine. The caller creates it, and the engine records its progress.

    `chain` has a key for every piece of prompt and answer together, in whole blocks. The key is the
    hash of each full block, or of longer pieces with `chain_ends` (see `sim/engine/blocks.py`).
    `chain_ends` contains, for each piece, the number of blocks up to its end. Times are values of
    the caller's `now`, and None before the event.

    In a decode step of many passes, `generated_tokens`, `computed_tokens`, `last_token_at` and
    `token_gap_s` have their values of the first token since admission. They are current again when
    the request ends, is preempted or leaves, and after every `Engine.step`.
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
        "fetched_tokens",
        "fetches",
        "first_token_at",
        "generated_tokens",
        "gone",
        "hands_over",
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
        """Create a request that generates exactly `output_tokens` tokens. Prompt and output must
        have at least one token each.

        `parts` is required only by engines with a `PromptCache`.
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
        """Time when the request arrived at the server, before its front end. The engine sets it if
        the caller did not.
        """
        self.queued_at: Seconds = 0.0
        self.scheduled_at: Seconds | None = None
        self.first_token_at: Seconds | None = None
        self.last_token_at: Seconds | None = None
        self.token_gap_s: Seconds = 0.0
        """Time in seconds between the request's last two tokens."""
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.cached_tokens = 0
        """Number of prompt tokens found in the cache when the request was first admitted, or when
        the blocks of a decode leg were reserved; `usage` reports them.
        """
        self.preemptions = 0
        self.hands_over = False
        """True for the prefill leg of a disaggregated request. The creator sets it before `submit`,
        and gives the leg one output token."""
        self.fetches = False
        """True for a decode leg whose prompt's blocks have not arrived from another engine. The
        creator sets it before `submit`."""
        self.fetched_tokens = 0
        """Prompt tokens that another engine computed, set when their blocks are reserved."""
        # Fields for the engine only.
        self.holding = Holding()
        self.admission = 0
        self.shared_blocks = 0
        self.lead = 0
        self.due = -1
        self.gone = False

    @property
    def known_tokens(self) -> int:
        """Number of tokens of the prompt and of the answer generated so far, together."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def finished(self) -> bool:
        return self.generated_tokens >= self.output_tokens
