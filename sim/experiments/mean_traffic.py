"""Synthetic traffic described by three means: requests per second, prompt tokens and output tokens
per request.

The traffic becomes an inference-perf workload file. Requests arrive as a Poisson process. No prompt
shares text with another, so no prompt cache helps. Lengths are lognormal with a standard deviation
as large as the mean, which makes p90 2.0 and p99 4.9 times the mean. In the published hours of
Azure and Mooncake, p90 of the prompts is 2.3 to 2.5 times the mean, p99 3.6 to 7.1 times, and p90
of the outputs 1.7 to 2.0 times.
"""

from collections.abc import Sequence
from typing import Any, Final

import yaml
from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.profiles import Profile

LONGEST: Final = 8.0
"""Maximum length of a prompt or an output in synthetic traffic, as a multiple of the mean length.
"""
_LONGEST_MIN: Final = 1.5
"""Smallest accepted maximum length of a request (prompt and output) in synthetic traffic, as a
multiple of the mean length. If requests were limited to less, hardly any length would exceed the
mean.
"""
REQUESTS_WANTED: Final = 2_000
_DURATION_S_MIN: Final[Seconds] = 120.0
_DURATION_S_MAX: Final[Seconds] = 3600.0


class MeanTrafficError(ValueError):
    """The traffic that three means describe cannot be simulated. The message is one sentence."""


class MeanTraffic(Struct, frozen=True, kw_only=True):
    """Traffic described by its mean request rate, prompt length and output length."""

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
        """Duration of the traffic in seconds: the time in which about 2,000 requests arrive, but at
        least two minutes and at most an hour.
        """
        return min(max(REQUESTS_WANTED / self.requests_per_s, _DURATION_S_MIN), _DURATION_S_MAX)

    def document(self, profiles: Sequence[Profile]) -> bytes:
        """Return the traffic as an inference-perf workload file in YAML. Lengths are limited to 8
        times their mean, and so that every request fits into the context and the KV cache of each
        profile.

        Raises `MeanTrafficError` if a profile does not allow requests of 1.5 times the mean length,
        prompt and output together.
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
                    f"a mean of {tokens:,} tokens a request is too large for {profile.name}: its "
                    f"maximum, {limit:,} tokens, must be at least {_LONGEST_MIN:g} times the mean; "
                    f"expected a mean of at most {int(limit / _LONGEST_MIN):,} tokens"
                )
        limits = (min(one.max_model_len_tokens, one.kv_tokens) for one in profiles)
        return min(LONGEST, min(limits) / tokens)
