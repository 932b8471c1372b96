"""Measure disaggregated serving beside published figures: `python -m docs.disaggregation_figures`.

Three comparisons are simulated. The figures go to docs/disaggregation-figures.json, and `python -m
docs.reference` makes the tables of docs/disaggregation-figures.md.

1. The guide `pd-disaggregation` of llm-d: gpt-oss-120b on 16 H200s, prompts of 5,000 tokens and
   answers of 250 tokens. Aggregated serving has 16 pods of one GPU behind a
   Kubernetes Service. 8P2D has 8 prefill pods of one GPU and 2 decode pods of four. 6P4D has 6
   prefill pods of one GPU and 4 decode pods of two, which is 14 GPUs; the guide does not say how
   its GPUs are divided.
2. The same 8P2D on each network.
3. Long prompts on 8 GPUs, 6P2D and 4P4D: which part of the time to first token is spent where.

No constant is fitted to a latency. The first comparison has two profiles. `estimated` is that of
`sim profile estimate`, without any measurement of this model on this GPU. `published prefill` takes
the prefill speed from the guide, which publishes it apart from the latencies.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from docs.row_lines import row_lines
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds
from sim.cluster.cluster import Cluster
from sim.cluster.links import LINKS, KVTransferSettings
from sim.cluster.policies import PolicySource
from sim.cluster.prefill_rules import DECODE, PREFILL, RoundRobinPrefill
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.engine.profiles import Profile
from sim.estimation.estimate import EstimateSettings, estimated_profile
from sim.estimation.gpus import gpu_named
from sim.estimation.model_config import read_config
from sim.measurement.measures import rounded, tpot_of, ttft_of
from sim.measurement.token_gaps import TokenGaps
from sim.output import write_whole
from sim.reports.report import markdown_table
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes, request_of

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "disaggregation-figures.json"
MODELS: Final = FOLDER / "examples" / "models"
SEED: Final = 1
LINK: Final = "roce200"
"""Network of the first comparison. The guide ran with RoCE."""

PROMPT_TOKENS: Final = 5_000
OUTPUT_TOKENS: Final = 250
RATES: Final = (15.0, 30.0, 45.0)
"""Requests per second. The guide publishes 45."""
GUIDE_RATE: Final = 45.0
DURATION_S: Final[Seconds] = 120.0
PREFILL_TOKENS_PER_S: Final = 33_821
"""`peakPrefillThroughput` of the guide's router configuration: one GPU, measured by its authors."""
BLOCK_TOKENS: Final = 128
"""`--block-size` of the guide."""

LONG_MODEL: Final = "qwen3-30b-a3b"
LONG_KV_BYTES: Final = 28e9
"""KV cache of one GPU in the study: two decode GPUs had about 56 GB."""
LONG_TOKENS_MEAN: Final = 33_600
"""Mean prompt of the study. Prompts are drawn from an exponential distribution."""
LONG_TOKENS_MAX: Final = 120_000
LONG_OUTPUT_TOKENS: Final = 400
LONG_REQUESTS: Final = 600
LONG_RATES: Final = (0.5, 1.0, 1.5, 2.0)

ESTIMATED: Final = "estimated"
PUBLISHED_PREFILL: Final = "published prefill"
AGGREGATED: Final = "aggregated"
SPLITS: Final = ("8P2D", "6P4D")


class Published(Struct, frozen=True, kw_only=True):
    """Published means of the guide at 45 requests/s in seconds, and the 95th percentile of TTFT."""

    e2e_s: Seconds
    itl_s: Seconds
    ttft_s: Seconds
    ttft_p95_s: Seconds


PUBLISHED: Final = {
    AGGREGATED: Published(e2e_s=6.7, itl_s=25e-3, ttft_s=0.532, ttft_p95_s=1.574),
    "8P2D": Published(e2e_s=2.775, itl_s=4.89e-3, ttft_s=1.157, ttft_p95_s=1.703),
}
"""The guide's report at 45 requests/s, and its comparison with 16 pods of one GPU."""


class Row(Struct, frozen=True, kw_only=True):
    """The means of one run in seconds, over all completed requests."""

    comparison: str
    profile: str
    setup: str
    link: str
    rate_per_s: float
    completed: int
    e2e_s: float
    itl_s: float
    tpot_s: float
    ttft_s: float
    ttft_p95_s: float
    prefill_s: float = 0.0
    """From the arrival at the picker to the end of the prefill leg."""
    reservation_s: float = 0.0
    """From the arrival at the decode engine to the reservation of its blocks."""
    transfer_s: float = 0.0
    """From the reservation to the end of the transfer."""
    other_s: float = 0.0
    """The rest of the time to first token: front ends, messages and the first decode step."""


class Measured(Struct, frozen=True, kw_only=True):
    """The content of docs/disaggregation-figures.json."""

    rows: list[Row]


class Setup(Struct, frozen=True, kw_only=True):
    """The pods of a run."""

    name: str
    kinds: tuple[PodKind, ...]
    split: bool


# --- profiles and pods ----------------------------------------------------------------------------


def profile_of(model: str, gpu: str, degree: int, *, context_tokens: int) -> Profile:
    """Return the estimated profile of one of docs/examples/models."""
    shape = read_config(MODELS / f"{model}.json").shape
    settings = EstimateSettings(
        gpu=gpu_named(gpu), tensor_parallel=degree, context_tokens=context_tokens
    )
    return estimated_profile(shape, settings)


def guide_profile(degree: int) -> Profile:
    """Return the estimated profile of the guide's model on `degree` GPUs."""
    return profile_of("gpt-oss-120b", "h200", degree, context_tokens=PROMPT_TOKENS)


def with_published_prefill(profile: Profile, degree: int) -> Profile:
    """Return `profile` with the published prefill speed.

    A constant time per token is added to the linear layers, so that one prompt of `PROMPT_TOKENS` on
    one GPU has `PREFILL_TOKENS_PER_S`. `degree` GPUs add that time divided by `degree`.
    """
    estimated_tokens_per_s = guide_profile(1).prefill_tokens_per_s(PROMPT_TOKENS)
    per_token_s = (1 / PREFILL_TOKENS_PER_S - 1 / estimated_tokens_per_s) / degree
    return replace(
        profile,
        linear_s=tuple(
            seconds + tokens * per_token_s
            for tokens, seconds in zip(profile.linear_tokens, profile.linear_s, strict=True)
        ),
        linear_s_per_token=profile.linear_s_per_token + per_token_s,
    )


def guide_kind(degree: int, speed: str) -> PodKind:
    """Return a pod of the guide with `degree` GPUs."""
    profile = guide_profile(degree)
    if speed == PUBLISHED_PREFILL:
        profile = with_published_prefill(profile, degree)
    return PodKind.of(profile, block_size_tokens=BLOCK_TOKENS)


def guide_setups(speed: str) -> list[Setup]:
    """Return the three setups of the guide."""
    one, two, four = (guide_kind(degree, speed) for degree in (1, 2, 4))
    return [
        Setup(name=AGGREGATED, kinds=(one,) * 16, split=False),
        _split("8P2D", one, 8, four, 2, decode_nics=4),
        _split("6P4D", one, 6, two, 4, decode_nics=2),
    ]


def long_kind() -> PodKind:
    """Return a pod of the study of long prompts: one GPU with the KV cache that it had.

    The study does not name the GPU; an H100 stands for it.
    """
    profile = profile_of(LONG_MODEL, "h100", 1, context_tokens=LONG_TOKENS_MEAN)
    kv_tokens = int(LONG_KV_BYTES / profile.kv_bytes_per_token)
    length_max = LONG_TOKENS_MAX + LONG_OUTPUT_TOKENS
    return PodKind.of(replace(profile, kv_tokens=kv_tokens, max_model_len_tokens=length_max))


def long_setups() -> list[Setup]:
    """Return the setups of the study on 8 GPUs."""
    kind = long_kind()
    return [
        Setup(name=AGGREGATED, kinds=(kind,) * 8, split=False),
        _split("6P2D", kind, 6, kind, 2, decode_nics=1),
        _split("4P4D", kind, 4, kind, 4, decode_nics=1),
    ]


def _split(
    name: str, prefill: PodKind, prefills: int, decode: PodKind, decodes: int, *, decode_nics: int
) -> Setup:
    return Setup(
        name=name,
        kinds=(
            *(prefill.with_role(PREFILL),) * prefills,
            *(decode.with_role(DECODE, nics=decode_nics),) * decodes,
        ),
        split=True,
    )


# --- traffic --------------------------------------------------------------------------------------


def steady(rate_per_s: float) -> Iterator[Arrival]:
    """Yield the guide's requests, with prompts without a common part.

    inference-perf's load of the type `constant` has exponential gaps, which it scales so that all
    requests are sent within the duration.
    """
    random = Random(f"{SEED}:guide")
    gaps = [random.expovariate(1.0) for _ in range(int(rate_per_s * DURATION_S))]
    scale_s, time_s = DURATION_S / sum(gaps), 0.0
    for index, gap in enumerate(gaps):
        time_s += gap * scale_s
        yield Arrival(
            index=index,
            time_s=time_s,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )


def long(rate_per_s: float) -> Iterator[Arrival]:
    """Yield long prompts without a common part, as a Poisson process."""
    random = Random(f"{SEED}:long")
    time_s = 0.0
    for index in range(LONG_REQUESTS):
        time_s += random.expovariate(rate_per_s)
        tokens = int(random.expovariate(1 / LONG_TOKENS_MEAN))
        yield Arrival(
            index=index,
            time_s=time_s,
            prompt_tokens=min(LONG_TOKENS_MAX, max(32, tokens)),
            output_tokens=LONG_OUTPUT_TOKENS,
        )


# --- runs -----------------------------------------------------------------------------------------


def run(
    comparison: str, profile: str, setup: Setup, link: str, rate_per_s: float, given: list[Arrival]
) -> Row:
    """Return the figures of one run.

    Aggregated requests go to a random pod, as behind a Kubernetes Service. Decode pods are chosen
    by their requests in flight and prefill pods in turn, like the guide's scorers do with equal
    prompts.
    """
    ended: list[SimulatedRequest] = []
    gaps = TokenGaps()
    settings = ClusterSettings(
        pods=setup.kinds,
        kv_transfer=KVTransferSettings(link=LINKS[link]) if setup.split else None,
    )
    policy = PolicySource(name="least-requests" if setup.split else "random")
    Cluster(
        settings,
        settings.opener(policy),
        _parsed,
        given,
        seed=SEED,
        ended=ended.append,
        stepped=gaps.add,
        prefill_rule=RoundRobinPrefill() if setup.split else None,
    ).run()
    done = [request for request in ended if request.fate is Fate.COMPLETE]
    parts = _parts([request for request in done if request.handover is not None])
    ttft_s = np.array([ttft_of(request) for request in done])
    return Row(
        comparison=comparison,
        profile=profile,
        setup=setup.name,
        link=link if setup.split else "",
        rate_per_s=rate_per_s,
        completed=len(done),
        e2e_s=_mean([(one.ended_at or math.nan) - one.arrived_at for one in done]),
        itl_s=rounded(gaps.whole().mean_s) or 0.0,
        tpot_s=_mean([tpot_of(one) for one in done]),
        ttft_s=_mean(list(ttft_s)),
        ttft_p95_s=rounded(float(np.percentile(ttft_s, 95))) or 0.0,
        **parts,
    )


def _parsed(arrival: Arrival, hashes: PromptHashes) -> InferenceRequest:
    return request_of(arrival, (), hashes)


def _parts(done: Sequence[SimulatedRequest]) -> dict[str, float]:
    """Return the mean parts of the time to first token; none for aggregated requests."""
    if not done:
        return {}
    rows = []
    for request in done:
        handover, routed_at = request.handover, request.routed_at
        assert handover is not None
        assert routed_at is not None
        assert handover.prefilled_at is not None
        assert handover.reserved_at is not None
        assert handover.decode_since is not None
        assert handover.received_at is not None
        prefill_s = handover.prefilled_at - routed_at
        reservation_s = handover.reserved_at - handover.decode_since
        transfer_s = handover.received_at - handover.reserved_at
        other_s = ttft_of(request) - prefill_s - reservation_s - transfer_s
        rows.append((prefill_s, reservation_s, transfer_s, other_s))
    names = ("prefill_s", "reservation_s", "transfer_s", "other_s")
    return {
        name: _mean(list(values))
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }


def _mean(values: list[float]) -> float:
    return rounded(float(np.mean(values))) or 0.0


def measure() -> Iterator[Row]:
    """Yield the figures of all runs, in the order of the tables."""
    for speed in (ESTIMATED, PUBLISHED_PREFILL):
        for setup in guide_setups(speed):
            for rate_per_s in RATES:
                yield run("guide", speed, setup, LINK, rate_per_s, list(steady(rate_per_s)))
    split = guide_setups(PUBLISHED_PREFILL)[1]
    for link in LINKS:
        given = list(steady(GUIDE_RATE))
        yield run("links", PUBLISHED_PREFILL, split, link, GUIDE_RATE, given)
    for setup in long_setups():
        for rate_per_s in LONG_RATES:
            yield run("long", ESTIMATED, setup, LINK, rate_per_s, list(long(rate_per_s)))


def read() -> Measured:
    """Return docs/disaggregation-figures.json. Raise `OSError` if it does not exist."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Measured)


# --- tables ---------------------------------------------------------------------------------------


def guide_table(measured: Measured) -> str:
    """Return the table of the guide's means, published and simulated."""
    rows = [["setup, requests/s", "profile", "E2E", "ITL", "TTFT", "TTFT p95"]]
    for name, published in PUBLISHED.items():
        rows.append(
            [
                f"{name}, {GUIDE_RATE:g}",
                "**published**",
                _s(published.e2e_s),
                _ms(published.itl_s),
                _s(published.ttft_s),
                _s(published.ttft_p95_s),
            ]
        )
    rows += [
        [
            f"{row.setup}, {row.rate_per_s:g}",
            row.profile,
            _s(row.e2e_s),
            _ms(row.itl_s),
            _s(row.ttft_s),
            _s(row.ttft_p95_s),
        ]
        for row in _rows(measured, "guide")
    ]
    return markdown_table(rows)


def sign_table(measured: Measured) -> str:
    """Return the table of ratios to aggregated serving, published and simulated."""
    rows = [["setup, requests/s", "profile", "E2E", "ITL falls by", "TTFT rises by"]]
    whole, split = PUBLISHED[AGGREGATED], PUBLISHED["8P2D"]
    rows.append(
        [
            f"8P2D, {GUIDE_RATE:g}",
            "**published**",
            f"{split.e2e_s / whole.e2e_s:.2f} x",
            f"{whole.itl_s / split.itl_s:.1f} x",
            f"{split.ttft_s / whole.ttft_s:.2f} x",
        ]
    )
    guide = _rows(measured, "guide")
    base = {(row.profile, row.rate_per_s): row for row in guide if row.setup == AGGREGATED}
    for row in guide:
        if row.setup != AGGREGATED:
            against = base[row.profile, row.rate_per_s]
            rows.append(
                [
                    f"{row.setup}, {row.rate_per_s:g}",
                    row.profile,
                    f"{row.e2e_s / against.e2e_s:.2f} x",
                    f"{against.itl_s / row.itl_s:.1f} x",
                    f"{row.ttft_s / against.ttft_s:.2f} x",
                ]
            )
    return markdown_table(rows)


def link_table(measured: Measured) -> str:
    """Return the table of 8P2D by network."""
    rows = [
        [row.link, _ms(row.transfer_s), _s(row.ttft_s), _s(row.e2e_s)]
        for row in _rows(measured, "links")
    ]
    return markdown_table([["network", "transfer", "TTFT", "E2E"], *rows])


def part_table(measured: Measured) -> str:
    """Return the table of the parts of the time to first token with long prompts."""
    rows = [
        [
            "setup, requests/s",
            *("TTFT", "prefill", "waiting for decode memory", "transfer", "other"),
            "share of decode memory",
        ]
    ]
    for row in _rows(measured, "long"):
        parts = ["", "", "", "", ""]
        if row.setup != AGGREGATED:
            parts = [
                _s(row.prefill_s),
                _s(row.reservation_s),
                _s(row.transfer_s),
                _s(row.other_s),
                f"{row.reservation_s / row.ttft_s:.0%}",
            ]
        rows.append([f"{row.setup}, {row.rate_per_s:g}", _s(row.ttft_s), *parts])
    return markdown_table(rows)


def _rows(measured: Measured, comparison: str) -> list[Row]:
    return [row for row in measured.rows if row.comparison == comparison]


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def main() -> int:
    """Measure everything, and write docs/disaggregation-figures.json after each run."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.disaggregation_figures", description=__doc__
    )
    parser.parse_args()
    rows: list[Row] = []
    for row in measure():
        rows.append(row)
        print(
            f"{row.comparison}: {row.profile}, {row.setup}, {row.link}, {row.rate_per_s:g}/s: "
            f"E2E {_s(row.e2e_s)}, ITL {_ms(row.itl_s)}, TTFT {_s(row.ttft_s)}",
            file=sys.stderr,
        )
    write_whole(RESULTS, row_lines(msgspec.to_builtins(Measured(rows=rows))).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
