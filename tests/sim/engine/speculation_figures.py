"""Simulated speculative decoding beside published figures:
`python -m tests.sim.engine.speculation_figures`.

The published figures are those of SpecDecode-Bench/simulator (arXiv 2601.11580): vLLM 0.10.1 with EAGLE,
three draft tokens, Llama-3.1-8B on an H100.
"""

import sys
from typing import Final

from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.speculation import DRAFT_S, Speculation
from sim.engine.speculative_engine import SpeculativeEngine
from tests.sim.engine.test_engine import request_of, run

PROFILE: Final = find_profile(DEFAULT_PROFILE)
PUBLISHED_MS: Final = {1: 9.31, 8: 9.90, 16: 10.58, 32: 11.92, 64: 14.61, 128: 19.99}
"""Time of a pass in ms by the number of requests, with three draft tokens each, drafting included, and
without reading contexts: 5.886 + 0.02101 * 4 * requests + 1.207 + 2.135 + 0.003."""
PUBLISHED_GAIN: Final = 1.21
"""Throughput with speculative decoding relative to without, of 128 requests of GSM8K."""
PROMPT_TOKENS: Final = 16


def pass_ms(requests: int) -> float:
    """Return the simulated time of such a pass in ms."""
    engine = SpeculativeEngine(
        EngineSettings(blocks_total=1000),
        PROFILE,
        Speculation(acceptance=(0.0, 0.0, 0.0), draft_s=DRAFT_S),
    )
    for at in range(requests):
        engine.submit(request_of(str(at), PROMPT_TOKENS, 40), 0.0)
    step = run(engine)[1]
    if step.work.tokens != 4 * requests:
        raise AssertionError(f"the pass has {step.work.tokens} tokens, expected {4 * requests}")
    read_s = PROFILE.decode_s_per_context_token * (PROMPT_TOKENS + 1) * requests
    return (step.duration_s - read_s) * 1e3


def gain() -> float:
    """Return the throughput of 128 requests with speculative decoding, relative to without.

    Acceptance and lengths are those of the first 150 requests that the publication lists.
    """
    settings = EngineSettings(blocks_total=27_000)
    ended_s = []
    for engine in (
        Engine(settings, PROFILE),
        SpeculativeEngine(settings, PROFILE, Speculation(acceptance=(0.673, 0.442, 0.282))),
    ):
        for at in range(128):
            engine.submit(request_of(str(at), 93, 165), 0.0)
        ended_s.append(run(engine)[-1].ends_at)
    return ended_s[0] / ended_s[1]


def main() -> int:
    for requests, published_ms in PUBLISHED_MS.items():
        simulated_ms = pass_ms(requests)
        deviation = simulated_ms / published_ms - 1
        print(
            f"{requests:3} requests: {simulated_ms:5.2f} ms, published {published_ms:5.2f} ms, "
            f"{deviation:+.0%}"
        )
    print(f"gain of 128 requests: {gain():.2f}, published {PUBLISHED_GAIN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
