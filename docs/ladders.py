"""Simulate two published benchmarks of llm-d with rising request rates: `python -m docs.ladders`,
about twenty minutes of one core.

Both use the workload with which llm-d publishes its routers: 150 prefixes of 6,000 tokens with five
questions of 1,200 each, and 1,000 output tokens. It runs on eight pods of Qwen3-32B on two H100s,
whose caches it fills to 73 %. Each step is run separately, after the workload's warm-up and until
its last answer, for which its load generator waits too. The figures go to docs/ladders.json, arm by
arm; existing ones are not measured again. `python -m docs.reference` makes the tables of
docs/ladders.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from docs.exact import PEER_DELAY_S
from docs.row_lines import row_lines
from epp.configuration.config import DEFAULT_CONFIG, DEFAULT_SOURCE
from sim.cluster.kv_events import KVEventSettings
from sim.cluster.peering import PeerSettings
from sim.cluster.policies import PolicySource
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import find_profile
from sim.experiments.jobs import Crew, Result
from sim.experiments.run import RunSettings
from sim.measurement.measures import mean, percentile, rounded
from sim.output import progress_bar, write_whole
from sim.reports.report import markdown_table
from sim.traces.capture import CaptureWriter
from sim.traces.standard import STANDARD
from sim.traces.workloads import OpenLoad, Stage, Workload, arrivals

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "ladders.json"
WORKLOAD: Final = STANDARD["b2b"]
PROFILE: Final = "qwen3-32b-h100-tp2"
PODS: Final = 8
WARM_UP: Final = Stage(rate_per_s=15.0, duration_s=50.0)
"""Load of the warm-up, in which each of the 750 prompts is sent once."""
GAP_S: Final = 60.0
"""Pause in seconds between the warm-up and the step; no request of the warm-up is running at its
end.
"""
DELAY_S: Final = 0.01
"""Delay of KV events from engines to pickers, in seconds."""
SEED: Final = 1
RATES: Final = (3, 10, 15, 20, 22, 25, 30, 35, 40, 43, 46, 49, 52, 55, 57, 60)
"""Request rates of the steps, in requests per second."""

_HEAD: Final = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
"""
_TOLD: Final = """\
- type: token-producer
  parameters:
    vllm:
      url: http://renderer:8000
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig:
      blockSizeTokens: 64
"""
_BELIEVED: Final = """\
- type: approx-prefix-cache-producer
  parameters:
    blockSizeTokens: 16
    maxPrefixBlocksToMatch: 256
"""
"""Plug-in of the "estimated" router as the benchmark configured it: it looks at no more than 4,096
tokens of a prompt of 7,200.
"""
_LOAD: Final = """\
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: {queue}
  - pluginRef: kv-cache-utilization-scorer
    weight: {cache}
  - pluginRef: max-score-picker
"""
_PREFIX: Final = """\
- type: prefix-cache-scorer
"""
_BY_PREFIX: Final = """\
  - pluginRef: prefix-cache-scorer
    weight: {prefix}
"""
_AFFINITY: Final = """\
- type: prefix-cache-affinity-filter
  parameters:
    maxTTFTPenaltyMs: 18000
    peakPrefillThroughput: 15926
- type: token-load-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-affinity-filter
  - pluginRef: token-load-scorer
  - pluginRef: max-score-picker
"""


def _weighed(index: str, prefix: int, queue: int, cache: int) -> str:
    """Return the configuration document of llm-d's guide with its three scorers and these weights.

    `index` is the plug-in that tracks prefixes; prefix weight 0 leaves it out.
    """
    load = _LOAD.format(queue=queue, cache=cache)
    if not prefix:
        return _HEAD + load
    return _HEAD + index + _PREFIX + load + _BY_PREFIX.format(prefix=prefix)


class Arm(Struct, frozen=True, kw_only=True):
    """A router that is compared: one row of the tables."""

    name: str
    config: str = ""
    """Configuration document of the router; "" for a baseline without one."""
    told: bool = False
    """True if engines send KV events to the pickers."""
    pickers: int = 1
    share: bool = True
    """True if several pickers share their decisions."""

    @property
    def policy(self) -> PolicySource:
        name = self.name if self.config else _BASELINES[self.name]
        return PolicySource(name=name, text=self.config, source=DEFAULT_SOURCE)

    def cluster(self) -> ClusterSettings:
        """Return the settings of the benchmark's pods, and of the router's pickers."""
        sharing = self.share and self.pickers > 1
        return ClusterSettings(
            pods=(PodKind.of(find_profile(PROFILE)),) * PODS,
            replicas=self.pickers,
            peers=PeerSettings(delay_s=PEER_DELAY_S) if sharing else None,
            kv_events=KVEventSettings(delay_s=DELAY_S) if self.told else None,
        )


class Step(Struct, frozen=True, kw_only=True):
    """Results of one router at one request rate, published or simulated."""

    rate_per_s: float
    output_tokens_per_s: float
    """Output tokens per second, from the first request to the last answer."""
    ttft_p90_s: float
    ttft_mean_s: float | None = None


class Climbed(Struct, frozen=True, kw_only=True):
    """Results of one router at all request rates."""

    arm: str
    config: str
    steps: list[Step]


class Measured(Struct, frozen=True, kw_only=True):
    """The content of docs/ladders.json."""

    arms: list[Climbed]

    def of(self, arm: "Arm") -> list[Step]:
        """Return the results of `arm` at all rates.

        Raise `LookupError` if it was measured with another configuration or not at all.
        """
        for one in self.arms:
            if one.arm == arm.name and one.config == arm.config:
                return one.steps
        raise LookupError(f"{RESULTS.name} has no {arm.name!r}: run `python -m docs.ladders`")


def _published(tokens_per_s: Sequence[float], ttft_p90_s: Sequence[float]) -> list[Step]:
    return [
        Step(rate_per_s=rate, output_tokens_per_s=tokens, ttft_p90_s=ttft_s)
        for rate, tokens, ttft_s in zip(RATES, tokens_per_s, ttft_p90_s, strict=True)
    ]


_BASELINES: Final = {"random": "random", "Kubernetes Service": "round-robin"}

PRECISE: Final = Arm(name="precise", config=_weighed(_TOLD, 3, 2, 2), told=True)
ESTIMATED: Final = Arm(name="estimated", config=_weighed(_BELIEVED, 1, 1, 1))
LOAD: Final = Arm(name="load", config=_weighed("", 0, 1, 1))
RANDOM: Final = Arm(name="random")
OURS: Final = (
    Arm(name="Homing without a configuration", config=DEFAULT_CONFIG),
    Arm(
        name="Homing, exact",
        config=(FOLDER / "examples" / "exact.yaml").read_text(encoding="utf-8"),
        told=True,
    ),
)

CAPACITY_73: Final[Mapping[str, list[Step]]] = {
    "precise": _published(
        (1219, 3902, 5761, 9184, 9382, 9242, 9222, 9781, 10271, 10055, 10129, 10296, 10285, 10141, 10314, 10497),
        (0.50, 0.60, 0.40, 0.60, 0.50, 0.58, 0.51, 0.50, 0.49, 0.50, 0.59, 0.60, 0.51, 0.60, 0.60, 0.50),
    ),
    "estimated": _published(
        (1311, 3842, 5153, 8083, 8416, 8445, 8436, 7444, 8046, 7970, 7695, 7456, 7452, 7101, 7014, 7248),
        (0.50, 0.50, 0.40, 0.60, 0.70, 0.61, 0.71, 2.46, 43.0, 43.5, 44.9, 46.3, 47.3, 50.1, 49.9, 50.2),
    ),
    "load": _published(
        (1275, 3607, 3348, 4902, 4786, 4873, 4889, 4661, 4946, 4973, 4724, 4005, 3991, 4672, 3866, 4745),
        (1.61, 4.12, 7.00, 77.7, 73.0, 86.0, 83.8, 88.1, 101, 102, 106, 105, 109, 111, 113, 110),
    ),
    "random": _published(
        (1314, 3568, 3791, 4933, 4765, 4781, 4636, 4333, 4774, 4845, 4970, 4783, 4845, 4922, 4764, 4835),
        (0.82, 1.40, 2.30, 70.3, 78.4, 82.9, 86.2, 91.5, 101, 101, 101, 104, 105, 104, 107, 106),
    ),
}  # fmt: skip
"""Published results by router: llm-d-kv-cache v0.9.0, benchmarking/73-capacity/README.md, "Per-QPS
Results".
"""

GUIDE: Final = Arm(name="the guide", config=_HEAD + _TOLD + _AFFINITY, told=True)
SERVICE: Final = Arm(name="Kubernetes Service")
GUIDES: Final[Mapping[str, Arm]] = {
    "Kubernetes Service": SERVICE,
    "the guide, one picker": GUIDE,
    "the guide, four without sharing": replace(
        GUIDE, name="the guide, four blind pickers", pickers=4, share=False
    ),
    "the guide, four that share": replace(GUIDE, name="the guide, four pickers", pickers=4),
    "Homing without a configuration, four that share": replace(
        OURS[0], name="Homing, four pickers", pickers=4
    ),
    "Homing, exact, four that share": replace(
        OURS[1], name="Homing, exact, four pickers", pickers=4
    ),
}
PEAKS: Final[Mapping[str, Step]] = {
    "Kubernetes Service": Step(rate_per_s=60.0, output_tokens_per_s=6986.0, ttft_p90_s=135.5),
    "the guide, one picker": Step(rate_per_s=60.0, output_tokens_per_s=14_892.0, ttft_p90_s=0.26),
}
"""Published results of llm-d/llm-d#2071 by router: the highest output tokens per second of all
rates, and TTFT p90.
"""
ARMS: Final = (PRECISE, ESTIMATED, LOAD, RANDOM, *OURS, *GUIDES.values())


def ladder() -> dict[float, Workload]:
    """Return the workload for each request rate: the warm-up, a pause, and the step with that rate."""
    assert isinstance(WORKLOAD.load, OpenLoad)
    _, *steps = WORKLOAD.load.stages
    return {
        step.rate_per_s: replace(WORKLOAD, load=OpenLoad(stages=(WARM_UP, step), gap_s=GAP_S))
        for step in steps
    }


def measure(arms: Sequence[Arm], rates: Sequence[float], *, workers: int = 1) -> Iterator[Climbed]:
    """Yield the results of each router when all its steps have run.

    All routers get the same requests at the same times.
    """
    with tempfile.TemporaryDirectory(prefix="docs-ladders-") as name:
        traces = {rate: _drawn(ladder()[rate], Path(name) / f"{rate:g}.jsonl") for rate in rates}
        jobs = [
            RunSettings(
                trace=traces[rate],
                policy=arm.policy,
                cluster=arm.cluster(),
                seed=SEED,
                warm_up_s=WARM_UP.duration_s + GAP_S / 2,
            )
            for arm, rate in product(arms, rates)
        ]
        found: dict[int, Step] = {}
        with Crew(max(1, min(workers, len(jobs)))) as crew, progress_bar("ladders") as bar:
            for number, result in bar.track(crew.results(jobs), total=len(jobs)):
                found[number] = _step(rates[number % len(rates)], result)
                at = number // len(rates)
                of_arm = range(at * len(rates), (at + 1) * len(rates))
                if all(each in found for each in of_arm):
                    steps = [found[each] for each in of_arm]
                    yield Climbed(arm=arms[at].name, config=arms[at].config, steps=steps)


def _drawn(workload: Workload, path: Path) -> str:
    """Write the generated requests of `workload` to the file `path`, and return its name."""
    with path.open("wb") as file:
        writer = CaptureWriter(file, source=f"docs/ladders.py, seed {SEED}")
        for arrival in arrivals(workload, SEED):
            writer.write_arrival(arrival)
    return str(path)


def _step(rate_per_s: float, result: Result) -> Step:
    series = result.series
    took_s = float((series.arrived_s + series.e2e_s).max() - series.arrived_s.min())
    return Step(
        rate_per_s=rate_per_s,
        output_tokens_per_s=rounded(float(series.output_tokens.sum()) / took_s) or 0.0,
        ttft_p90_s=rounded(percentile(series.ttft_s, 90)) or 0.0,
        ttft_mean_s=rounded(mean(series.ttft_s)),
    )


# --- tables ---------------------------------------------------------------------------------------


def mean_table(measured: Measured) -> str:
    """Return the table of the benchmark 73-capacity with the means over all rates: published,
    simulated, and the deviation.
    """
    rows = [
        [
            "picker",
            *("output tokens/s, published", "simulated", "deviation"),
            *("TTFT p90, published", "simulated"),
        ]
    ]
    for arm in (PRECISE, ESTIMATED, LOAD, RANDOM, *OURS):
        steps = measured.of(arm)
        published = CAPACITY_73.get(arm.name)
        tokens, ttft_s = _means(steps)
        if published is None:
            rows.append([arm.name, "", f"{tokens:,.0f}", "", "", _seconds(ttft_s)])
            continue
        published_tokens, published_ttft_s = _means(published)
        rows.append(
            [
                arm.name,
                *(f"{published_tokens:,.0f}", f"{tokens:,.0f}"),
                f"{tokens / published_tokens - 1:+.0%}",
                *(_seconds(published_ttft_s), _seconds(ttft_s)),
            ]
        )
    return markdown_table(rows)


def step_table(measured: Measured) -> str:
    """Return the table of the benchmark 73-capacity by rate: published results, then simulated
    ones.
    """
    arms = (PRECISE, ESTIMATED, LOAD, RANDOM)
    rows = [["requests/s", *(f"{arm.name}{what}" for what in _WHAT for arm in arms)]]
    found = {arm.name: measured.of(arm) for arm in arms}
    for at, rate in enumerate(RATES):
        pairs = [(CAPACITY_73[arm.name][at], found[arm.name][at]) for arm in arms]
        tokens = [
            f"{published.output_tokens_per_s:,.0f} \N{RIGHTWARDS ARROW} {ours.output_tokens_per_s:,.0f}"
            for published, ours in pairs
        ]
        ttfts = [
            f"{_seconds(published.ttft_p90_s)} \N{RIGHTWARDS ARROW} {_seconds(ours.ttft_p90_s)}"
            for published, ours in pairs
        ]
        rows.append([str(rate), *tokens, *ttfts])
    return markdown_table(rows)


def order_table(measured: Measured) -> str:
    """Return the table of the benchmark 73-capacity that counts the rates at which the simulation
    ranks two routers as published.
    """
    arms = (PRECISE, ESTIMATED, LOAD, RANDOM)
    rows = [["pair", "output tokens/s agree", "TTFT p90 agree", "of steps"]]
    for number, one in enumerate(arms):
        for other in arms[number + 1 :]:
            agreed = [
                sum(
                    _order(theirs, others, measure) == _order(ours, our_others, measure)
                    for theirs, others, ours, our_others in zip(
                        CAPACITY_73[one.name],
                        CAPACITY_73[other.name],
                        measured.of(one),
                        measured.of(other),
                        strict=True,
                    )
                )
                for measure in ("output_tokens_per_s", "ttft_p90_s")
            ]
            rows.append([f"{one.name}, {other.name}", *map(str, agreed), str(len(RATES))])
    return markdown_table(rows)


def peak_table(measured: Measured) -> str:
    """Return the table of llm-d#2071: the highest throughput of all rates, and TTFT p90 at the last
    rate.
    """
    rows = [
        [
            "pickers",
            *("most output tokens/s, published", "simulated"),
            *("TTFT p90, published", "simulated, at 60/s"),
        ]
    ]
    for name, arm in GUIDES.items():
        steps, published = measured.of(arm), PEAKS.get(name)
        rows.append(
            [
                name,
                f"{published.output_tokens_per_s:,.0f}" if published else "",
                f"{max(step.output_tokens_per_s for step in steps):,.0f}",
                _seconds(published.ttft_p90_s) if published else "",
                _seconds(steps[-1].ttft_p90_s),
            ]
        )
    return markdown_table(rows)


_WHAT: Final = (", tokens/s", ", TTFT p90")
_ALIKE: Final = 0.05
"""Relative difference up to which two results count as equal."""


def _order(one: Step, other: Step, measure: str) -> int:
    """Return -1 if `one` has the lower value of `measure`, 1 if it has the higher value, and 0 if
    both count as equal.
    """
    share = getattr(one, measure) / getattr(other, measure) - 1
    return 0 if abs(share) <= _ALIKE else -1 if share < 0 else 1


def _means(steps: Sequence[Step]) -> tuple[float, float]:
    tokens = sum(step.output_tokens_per_s for step in steps) / len(steps)
    return tokens, sum(step.ttft_p90_s for step in steps) / len(steps)


def _seconds(value_s: float) -> str:
    return f"{value_s:.3g} s"


def read() -> Measured:
    """Return the content of docs/ladders.json from the last measurement."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Measured)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate routers without stored results, and store their results in docs/ladders.json. Return
    the exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.ladders", description=__doc__)
    parser.add_argument(
        "--anew", action="store_true", help="simulate routers with stored results again"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    options = parser.parse_args(arguments)
    kept: dict[tuple[str, str], Climbed] = {}
    if RESULTS.exists() and not options.anew:
        kept = {(one.arm, one.config): one for one in read().arms}
    missing = [arm for arm in ARMS if (arm.name, arm.config) not in kept]
    for climbed in measure(missing, [*ladder()], workers=options.workers):
        kept[climbed.arm, climbed.config] = climbed
        there = [kept[key] for arm in ARMS if (key := (arm.name, arm.config)) in kept]
        write_whole(RESULTS, row_lines(msgspec.to_builtins(Measured(arms=there))).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
