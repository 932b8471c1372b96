"""Measure disaggregated serving beside published figures: `python -m docs.disaggregation_figures`.

Three comparisons are simulated. The figures go to docs/disaggregation-figures.json, and `python -m
docs.reference` makes the tables of docs/disaggregation-figures.md. `--only guide` measures one
comparison again and keeps the figures of the others.

1. `guide`: the guide `pd-disaggregation` of llm-d. It serves gpt-oss-120b on 16 H200s, with prompts
   of 5,000 tokens and answers of 250 tokens. Aggregated serving has 16 pods of one GPU behind a
   Kubernetes Service. 8P2D has 8 prefill pods of one GPU and 2 decode pods of four. 6P4D has 6
   prefill pods of one GPU and 4 decode pods of two; the guide does not say how its GPUs are divided.
2. `links`: the same 8P2D on each network.
3. `long`: long prompts on 8 GPUs, 6P2D and 4P4D. It shows the parts of the time to first token.

No constant is fitted to a latency. The first comparison has several profiles (`GUIDE_PROFILES`).
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from docs.disaggregation_kernels import estimated, kernel_profile
from docs.row_lines import row_lines
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, Seconds
from sim.cluster.cluster import Cluster
from sim.cluster.links import KVTransferSettings
from sim.cluster.policies import PolicySource
from sim.cluster.prefill_rules import DECODE, PREFILL, PrefillRule, RoundRobinPrefill
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.engine.links import LINKS
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
"""Network of the comparisons `guide` and `long`. The guide ran with RoCE."""

PROMPT_TOKENS: Final = 5_000
OUTPUT_TOKENS: Final = 250
GUIDE_RATE: Final = 45.0
"""Requests per second that the guide's benchmark sends."""
DURATION_S: Final[Seconds] = 120.0
PREFILL_TOKENS_PER_S: Final = 33_821
"""`peakPrefillThroughput` of the guide's router configuration: one GPU, measured by its authors."""
BLOCK_TOKENS: Final = 128
"""Number of tokens in a KV block (`--block-size`) of the engines in the guide."""

LONG_MODEL: Final = "qwen3-30b-a3b"
LONG_KV_BYTES: Final = 28e9
"""Bytes of KV cache on one GPU in the comparison `long`; two decode GPUs of the study had about 56
GB.
"""
LONG_TOKENS_MEAN: Final = 33_600
"""Mean of the exponential distribution from which the numbers of prompt tokens in the comparison
`long` are drawn; `LONG_TOKENS_MAX` then limits them.
"""
LONG_TOKENS_MAX: Final = 120_000
LONG_OUTPUT_TOKENS: Final = 400
LONG_REQUESTS: Final = 600
LONG_RATES: Final = (0.5, 1.0, 1.5, 2.0)

ESTIMATED: Final = "estimated"
KERNEL_TIMES: Final = "kernel times"
PUBLISHED_PREFILL: Final = "published prefill"
NO_HOST_TIME: Final = "no host time"
AGGREGATED: Final = "aggregated"
SPLITS: Final = ("8P2D", "6P4D")
RANDOM_PREFILL: Final = "8P2D, random prefill pod"
GUIDE_PROFILES: Final = (PUBLISHED_PREFILL, KERNEL_TIMES, NO_HOST_TIME, ESTIMATED)
"""Names of the profiles in the comparison `guide`; `guide_profile` makes the profiles."""
LINK_DURATION_S: Final[Seconds] = 30.0
"""Duration in seconds of the traffic in the comparison `links`, which is the first part of the
traffic of `guide`.
"""


class Published(Struct, frozen=True, kw_only=True):
    """Means and 95th percentiles that llm-d publishes for 45 requests/s, in seconds."""

    setup: str
    name: str
    e2e_s: Seconds
    ttft_s: Seconds
    ttft_p95_s: Seconds

    @property
    def tpot_s(self) -> Seconds:
        """Time per output token after the first one. It does not depend on how a client counts
        gaps between tokens.
        """
        return (self.e2e_s - self.ttft_s) / (OUTPUT_TOKENS - 1)


PUBLISHED: Final = (
    Published(setup=AGGREGATED, name="April", e2e_s=6.7, ttft_s=0.532, ttft_p95_s=1.574),
    Published(setup="8P2D", name="April", e2e_s=3.538, ttft_s=1.444, ttft_p95_s=2.982),
    Published(setup="8P2D", name="August", e2e_s=2.775, ttft_s=1.157, ttft_p95_s=1.703),
    Published(setup="8P2D", name="vLLM 0.27.1", e2e_s=2.355, ttft_s=0.518, ttft_p95_s=1.052),
)
"""The published runs of the guide's traffic, the oldest first: two versions of the guide's README,
and the arm `PD NIXL` of its report vllm-gpt-oss-120b-h200-multi-tier."""


class Row(Struct, frozen=True, kw_only=True):
    """The figures of one run over all completed requests: means in seconds, and one 95th
    percentile.
    """

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
    """Mean time in seconds from the placement by the picker to the end of the prefill leg; 0 for
    aggregated serving.
    """
    reservation_s: float = 0.0
    """Mean time in seconds from the arrival at the decode engine to the reservation of its blocks;
    0 for aggregated serving.
    """
    transfer_s: float = 0.0
    """Mean time in seconds from the reservation of blocks at the decode engine to the end of the KV
    transfer; 0 for aggregated serving.
    """
    other_s: float = 0.0
    """Mean time to first token in seconds without prefill, reservation and transfer: front ends,
    messages and the first decode step; 0 for aggregated serving.
    """


class Measured(Struct, frozen=True, kw_only=True):
    """The content of docs/disaggregation-figures.json."""

    rows: list[Row]


class Setup(Struct, frozen=True, kw_only=True):
    """The pods of a run, and the rule that chooses their prefill pods."""

    name: str
    kinds: tuple[PodKind, ...]
    open_rule: Callable[[], PrefillRule] | None = None
    """Function that creates the rule by which prefill pods are chosen; None for aggregated serving.
    """


class RandomPrefill:
    """A rule that takes a random prefill endpoint."""

    def __init__(self) -> None:
        """Create a rule that makes the same choices in every run."""
        self._random = Random(f"{SEED}:prefill")

    def choose(
        self, request: InferenceRequest, decode: Endpoint, prefill: Sequence[Endpoint]
    ) -> Endpoint | None:
        return self._random.choice(prefill) if prefill else None


# --- profiles and pods ----------------------------------------------------------------------------


def profile_of(model: str, gpu: str, degree: int, *, context_tokens: int) -> Profile:
    """Return the estimated profile of one of docs/examples/models."""
    shape = read_config(MODELS / f"{model}.json").shape
    settings = EstimateSettings(
        gpu=gpu_named(gpu), tensor_parallel=degree, context_tokens=context_tokens
    )
    return estimated_profile(shape, settings)


def guide_profile(name: str, degree: int) -> Profile:
    """Return a profile of the guide's model on `degree` GPUs; `name` is one of `GUIDE_PROFILES`.

    `estimated` is that of `sim profile estimate`. `kernel times` has kernel times published for
    this model. `published prefill` is that with the prefill speed which the guide publishes.
    `no host time` is `kernel times` without the time for scheduling and launching a step.
    """
    if name == ESTIMATED:
        return estimated(degree, PROMPT_TOKENS)
    profile = kernel_profile(degree, PROMPT_TOKENS)
    if name == NO_HOST_TIME:
        return replace(profile, host_s=0.0)
    return profile if name == KERNEL_TIMES else with_published_prefill(profile, degree)


def with_published_prefill(profile: Profile, degree: int) -> Profile:
    """Return `profile`, which has kernel times, with the published prefill speed.

    A constant time per token is added to the linear layers, so that one prompt of `PROMPT_TOKENS` on
    one GPU has `PREFILL_TOKENS_PER_S`. `degree` GPUs add that time divided by `degree`.
    """
    tokens_per_s = kernel_profile(1, PROMPT_TOKENS).prefill_tokens_per_s(PROMPT_TOKENS)
    per_token_s = (1 / PREFILL_TOKENS_PER_S - 1 / tokens_per_s) / degree
    return replace(
        profile,
        linear_s=tuple(
            seconds + tokens * per_token_s
            for tokens, seconds in zip(profile.linear_tokens, profile.linear_s, strict=True)
        ),
        linear_s_per_token=profile.linear_s_per_token + per_token_s,
    )


def guide_setups(profile: str) -> list[Setup]:
    """Return the three setups of the guide, and 8P2D with random prefill pods; `profile` is one
    of `GUIDE_PROFILES`.
    """
    one, two, four = (
        PodKind.of(guide_profile(profile, degree), block_size_tokens=BLOCK_TOKENS)
        for degree in (1, 2, 4)
    )
    split = _split("8P2D", one, 8, four, 2, decode_nics=4)
    return [
        Setup(name=AGGREGATED, kinds=(one,) * 16),
        split,
        replace(split, name=RANDOM_PREFILL, open_rule=RandomPrefill),
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
    """Return the setups of the comparison `long`, each on 8 GPUs."""
    kind = long_kind()
    return [
        Setup(name=AGGREGATED, kinds=(kind,) * 8),
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
        open_rule=RoundRobinPrefill,
    )


# --- traffic --------------------------------------------------------------------------------------


def steady(rate_per_s: float) -> Iterator[Arrival]:
    """Yield the requests of llm-d's guide, with prompts without a common part.

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
    by their requests in flight, like the guide's scorers do with equal prompts.
    """
    ended: list[SimulatedRequest] = []
    gaps = TokenGaps()
    settings = ClusterSettings(
        pods=setup.kinds,
        kv_transfer=KVTransferSettings(link=LINKS[link]) if setup.open_rule else None,
    )
    policy = PolicySource(name="least-requests" if setup.open_rule else "random")
    Cluster(
        settings,
        settings.opener(policy),
        _parsed,
        given,
        seed=SEED,
        ended=ended.append,
        stepped=gaps.add,
        prefill_rule=setup.open_rule() if setup.open_rule else None,
    ).run()
    done = [request for request in ended if request.fate is Fate.COMPLETE]
    parts = _parts([request for request in done if request.handover is not None])
    ttft_s = np.array([ttft_of(request) for request in done])
    return Row(
        comparison=comparison,
        profile=profile,
        setup=setup.name,
        link=link if setup.open_rule else "",
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
    """Return the mean parts of the time to first token of the requests `done`, by the name of their
    field in `Row`; empty if there are none.
    """
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


def measure_guide() -> Iterator[Row]:
    """Yield the figures of the comparison `guide`. Only `published prefill` has random prefill
    pods.
    """
    given = list(steady(GUIDE_RATE))
    for profile in GUIDE_PROFILES:
        for setup in guide_setups(profile):
            if setup.name != RANDOM_PREFILL or profile == PUBLISHED_PREFILL:
                yield run("guide", profile, setup, LINK, GUIDE_RATE, given)


def measure_links() -> Iterator[Row]:
    """Yield the figures of the comparison `links`: 8P2D on each network."""
    split = guide_setups(PUBLISHED_PREFILL)[1]
    given = [one for one in steady(GUIDE_RATE) if one.time_s < LINK_DURATION_S]
    for link in LINKS:
        yield run("links", PUBLISHED_PREFILL, split, link, GUIDE_RATE, given)


def measure_long() -> Iterator[Row]:
    """Yield the figures of the comparison `long`: each setup at each rate."""
    for setup in long_setups():
        for rate_per_s in LONG_RATES:
            yield run("long", ESTIMATED, setup, LINK, rate_per_s, list(long(rate_per_s)))


COMPARISONS: Final[Mapping[str, Callable[[], Iterator[Row]]]] = {
    "guide": measure_guide,
    "links": measure_links,
    "long": measure_long,
}
"""Functions that yield the figures of each comparison, in the order of the tables."""


def read() -> Measured:
    """Return docs/disaggregation-figures.json. Raise `OSError` if it does not exist."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Measured)


# --- tables ---------------------------------------------------------------------------------------


def guide_table(measured: Measured) -> str:
    """Return the table of latencies in the setups of llm-d's guide, published and simulated."""
    rows = [["setup", "profile", "E2E", "time per token", "TTFT", "TTFT p95"]]
    rows += [
        [
            one.setup,
            f"**published, {one.name}**",
            *_levels(one),
        ]
        for one in PUBLISHED
    ]
    rows += [[row.setup, row.profile, *_levels(row)] for row in _rows(measured, "guide")]
    return markdown_table(rows)


def _levels(row: Published | Row) -> list[str]:
    return [_s(row.e2e_s), _ms(row.tpot_s), _s(row.ttft_s), _s(row.ttft_p95_s)]


def sign_table(measured: Measured) -> str:
    """Return the table of latencies of disaggregated serving as ratios to aggregated serving,
    published and simulated.
    """
    rows = [["setup", "profile", "E2E", "time per token falls by", "TTFT rises by"]]
    base, *others = PUBLISHED
    rows += [
        [
            one.setup,
            f"**published, {one.name}**",
            *_ratios(one, base),
        ]
        for one in others
    ]
    guide = _rows(measured, "guide")
    bases = {row.profile: row for row in guide if row.setup == AGGREGATED}
    rows += [
        [
            row.setup,
            row.profile,
            *_ratios(row, bases[row.profile]),
        ]
        for row in guide
        if row.setup != AGGREGATED
    ]
    return markdown_table(rows)


def _ratios(row: Published | Row, base: Published | Row) -> list[str]:
    return [
        f"{row.e2e_s / base.e2e_s:.2f} x",
        f"{base.tpot_s / row.tpot_s:.1f} x",
        f"{row.ttft_s / base.ttft_s:.2f} x",
    ]


def link_table(measured: Measured) -> str:
    """Return the table of latencies of 8 prefill and 2 decode pods (8P2D) by network."""
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
    """Measure the comparisons, or only the one that `--only` names, and write
    docs/disaggregation-figures.json at the end. Return 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m docs.disaggregation_figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    only = "measure this comparison and keep the figures of the others"
    parser.add_argument("--only", choices=COMPARISONS, help=only)
    options = parser.parse_args()
    rows: list[Row] = []
    for comparison, measure in COMPARISONS.items():
        if options.only in {None, comparison}:
            rows += map(_shown, measure())
        else:
            rows += _rows(read(), comparison)
    write_whole(RESULTS, row_lines(msgspec.to_builtins(Measured(rows=rows))).encode())
    return 0


def _shown(row: Row) -> Row:
    """Return `row` after writing its figures to stderr, as progress."""
    print(
        f"{row.comparison}: {row.profile}, {row.setup}, {row.link}, {row.rate_per_s:g}/s: "
        f"E2E {_s(row.e2e_s)}, time per token {_ms(row.tpot_s)}, TTFT {_s(row.ttft_s)}",
        file=sys.stderr,
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
