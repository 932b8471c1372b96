"""Traffic of which a planner knows three means: requests a second, prompt tokens and output tokens.

It becomes an inference-perf workload file. Requests arrive as a Poisson process, and no prompt shares
anything with another, so that no prompt cache helps. Lengths are lognormal with a standard deviation
as large as the mean: p90 is 2.0 and p99 4.9 times the mean then. In the published hours of Azure and
Mooncake p90 of the prompts is 2.3 to 2.5 times the mean, p99 3.6 to 7.1 times, and p90 of the
outputs 1.7 to 2.0 times.
"""

from collections.abc import Sequence
from typing import Any, Final

import yaml
from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.profiles import Profile

LONGEST: Final = 8.0
"""Times the mean that a prompt or an output is at most."""
_LONGEST_MIN: Final = 1.5
"""With a shorter limit hardly any length would be above the mean."""
REQUESTS_WANTED: Final = 2_000
_DURATION_S_MIN: Final[Seconds] = 120.0
_DURATION_S_MAX: Final[Seconds] = 3600.0


class MeanTrafficError(ValueError):
    """The traffic cannot be simulated: one sentence."""


class MeanTraffic(Struct, frozen=True, kw_only=True):
    """The three means."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.requests_per_s:g} requests/s, {self.prompt_tokens:,} prompt and "
            f"{self.output_tokens:,} output tokens"
        )

    @property
    def duration_s(self) -> Seconds:
        """Return how long the traffic lasts: some 2,000 requests, from two minutes to an hour."""
        return min(max(REQUESTS_WANTED / self.requests_per_s, _DURATION_S_MIN), _DURATION_S_MAX)

    def document(self, profiles: Sequence[Profile]) -> bytes:
        """Return the workload file; every request fits into the context and KV cache of each profile.

        Raises `MeanTrafficError` if requests of this length do not fit.
        """
        longest = self._longest(profiles)

        def lengths(mean: int) -> dict[str, Any]:
            spread = {"mean": mean, "std_dev": mean, "min": 1, "max": int(longest * mean)}
            return {"type": "lognormal", **spread}

        told = {
            "data": {
                "type": "random",
                "input_distribution": lengths(self.prompt_tokens),
                "output_distribution": lengths(self.output_tokens),
            },
            "load": {
                "type": "poisson",
                "stages": [{"rate": self.requests_per_s, "duration": self.duration_s}],
            },
        }
        head = f"# An inference-perf workload of {self}.\n"
        return (head + yaml.safe_dump(told, sort_keys=False)).encode()

    def _longest(self, profiles: Sequence[Profile]) -> float:
        tokens = self.prompt_tokens + self.output_tokens
        for profile in profiles:
            limit = min(profile.max_model_len_tokens, profile.kv_tokens)
            if limit < _LONGEST_MIN * tokens:
                raise MeanTrafficError(
                    f"a request of {tokens:,} tokens on average does not fit {profile.name}, which "
                    f"takes {limit:,} tokens; expected at most {int(limit / _LONGEST_MIN):,}"
                )
        limits = (min(one.max_model_len_tokens, one.kv_tokens) for one in profiles)
        return min(LONGEST, min(limits) / tokens)
