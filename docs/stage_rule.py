"""Measure the rule by which a prompt is computed elsewhere: `python -m docs.stage_rule`.

Four prefill pods and four decode pods serve traffic with several rules, and with the same scorers.
The figures go to docs/stage-rule.json, from which functions below make tables. The measurement
takes about fifteen minutes on two idle cores; `--resume FILE` keeps the runs of an interrupted one.

1. `sweep`: prompts and answers of one length, without common parts, by load and network. Every second
   case was used to choose the constant of the rule (`chosen_on`).
2. `hold-out`: other lengths, loads and networks, which were measured once the rule was final.
3. `mixed`: chats, documents and short prompts together, by load and network.
4. The mixed traffic with one, two and four pickers that share their counts.
5. `links`: the cases of `tcp-25gbe` on which the constant was chosen, on three other networks. The
   rule has the default speed of the network, and keeps it or replaces it by the measured one.

In the other parts, the rule by time has a fixed speed, which is right unless it is called `default
link`.

`never` prefills every prompt at its decode pod, and leaves the prefill pods idle. `always` prefills
none there. `llm-d N` prefills elsewhere from N uncached tokens on. `dynamo` does not if fewer than
2,048 tokens are uncached and these are less than 0.7 of the prompt. AIBrix's `pd` is `always`.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from random import Random
from typing import Final, cast

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from docs.row_lines import row_lines
from epp.configuration.defaults import default_with_stages
from epp.core.decision.plugin import Scorer
from epp.core.decision.profile import SchedulingProfile, WeightedScorer
from epp.core.decision.stages import (
    PREFILL_DELAY,
    Always,
    ByTime,
    Order,
    PrefillRule,
    Stages,
    Uncached,
)
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds, Stage
from sim.cluster.cluster import Cluster
from sim.cluster.links import KVTransferSettings
from sim.cluster.peering import PeerSettings
from sim.cluster.policies import Policy, PolicySource, SchedulerPolicy
from sim.cluster.prefill_rules import DECODE, PREFILL
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.engine.links import link_named
from sim.engine.profiles import Profile, find_profile
from sim.measurement.measures import rounded, ttft_of
from sim.measurement.token_gaps import TokenGaps
from sim.output import write_whole
from sim.reports.report import markdown_table
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes, request_of

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "stage-rule.json"
PROFILE: Final = "qwen3-32b-h100-tp2"
PODS_OF_A_ROLE: Final = 4
BLOCK_TOKENS: Final = 64
SEEDS: Final = (1, 2, 3)
OTHER_DELAYS: Final = (0.3, 0.6)
"""Values of `prefillDelay` that were compared with the default."""

PROMPTS: Final = (256, 1_024, 4_096, 16_384, 32_768)
ANSWERS: Final = (32, 256)
LOADS: Final = (0.2, 0.5, 0.8)
NETWORKS: Final = ("roce200", "tcp-25gbe")
HOLD_OUT_PROMPTS: Final = (512, 2_048, 8_192, 24_576)
HOLD_OUT_ANSWERS: Final = (64, 512)
HOLD_OUT_LOADS: Final = (0.35, 0.65, 0.9)
HOLD_OUT_NETWORKS: Final = ("tcp-100gbe", "5:0.004")
"""Networks of the hold-out cases: a name of `LINKS`, and a network of 5 GB/s with a set-up time of
4 ms.
"""
LINKS_MEASURED: Final = {"0.625:0.006": 5, "2.5:0.006": 25, "10:0.006": 100}
"""Speed in Gbit/s of each network of the part `links`, by its name."""
LINK_SEEDS: Final = (1, 2)
SWEEP_REQUESTS: Final = 200
LEARNING_REQUESTS: Final = 50
"""Number of requests at the start of a run that `late_e2e_s` leaves out."""
MIXED_REQUESTS: Final = 600
MIXED_LOADS: Final = (0.4, 0.8, 1.2)
PICKERS: Final = (1, 2, 4)
PEER_DELAY_S: Final[Seconds] = 0.001

BATCH: Final = 32
"""Number of requests in the decode step that is assumed for the work of a request; the load is a
multiple of this work.
"""
CONFIDENCE_T: Final = 4.303
"""Student's t of a 95 % interval with three seeds."""

WORSE: Final = 1.03
"""Ratio of the mean E2E of a rule to that of the better of `never` and `always`, above which the
rule counts as worse.
"""
RULE: Final = "time"
RULE_UNKNOWN_LINK: Final = "time, default link"
RULE_LEARNT_LINK: Final = "time, measured link"
NEVER: Final = "never"
ALWAYS: Final = "always"
DYNAMO: Final = "dynamo"
THRESHOLDS: Final = (16, 512, 2_048)
LINK_RULES: Final = (RULE_LEARNT_LINK, RULE_UNKNOWN_LINK, NEVER, ALWAYS)
SWEEP_RULES: Final = (RULE, NEVER, ALWAYS, RULE_UNKNOWN_LINK)
MIXED_RULES: Final = (RULE, NEVER, ALWAYS, *(f"llm-d {one}" for one in THRESHOLDS), DYNAMO)


class Dynamo(Struct, frozen=True):
    """Dynamo's `isl_bounding`: prefill at the decode pod if fewer than `tokens` tokens are uncached
    and these are less than `share` of the prompt.
    """

    tokens: int = 2_048
    share: float = 0.7

    def applies(self, request: InferenceRequest, cached_tokens: int) -> bool:
        """Return whether the prompt of `request` is computed at a prefill endpoint instead of the
        decode endpoint.
        """
        uncached = request.prompt_tokens - cached_tokens
        return uncached >= self.tokens or uncached >= self.share * request.prompt_tokens


class Case(Struct, frozen=True, kw_only=True):
    """The traffic, the network and the number of pickers of one run."""

    load: float
    """Work of the requests as a multiple of what the decode pods alone can do."""
    network: str
    prompt_tokens: int = 0
    """Length of every prompt; 0 for mixed traffic."""
    answer_tokens: int = 0
    pickers: int = 1


class Run(Struct, frozen=True, kw_only=True):
    """One simulation of a rule of stages: its case, its rule, its seed and its value of
    `prefillDelay`.
    """

    part: str
    case: Case
    rule: str
    seed: int
    prefill_delay: float = PREFILL_DELAY


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The means of one run in seconds, over all completed requests."""

    part: str
    case: Case
    rule: str
    seed: int
    prefill_delay: float
    completed: int
    e2e_s: float
    ttft_s: float
    itl_s: float
    remote: float
    """Share of the requests whose prompt was computed at a prefill pod."""
    late_e2e_s: float = 0.0
    """Mean E2E of the requests after the first `LEARNING_REQUESTS`; 0 in rows of other parts than
    `links`.
    """


class Measured(Struct, frozen=True, kw_only=True):
    """The content of docs/stage-rule.json."""

    rows: list[Row]


def sweep_cases() -> list[Case]:
    """Return the cases of the sweep, sorted by prompt, answer, load and network."""
    return [
        Case(prompt_tokens=prompt, answer_tokens=answer, load=load, network=network)
        for prompt, answer, load, network in product(PROMPTS, ANSWERS, LOADS, NETWORKS)
    ]


def hold_out_cases() -> list[Case]:
    """Return cases that differ from those of the sweep in every property: every second combination,
    like the fields of one colour of a chess board.
    """
    places = product(range(4), range(2), range(3), range(2))
    return [
        Case(
            prompt_tokens=HOLD_OUT_PROMPTS[prompt],
            answer_tokens=HOLD_OUT_ANSWERS[answer],
            load=HOLD_OUT_LOADS[load],
            network=HOLD_OUT_NETWORKS[network],
        )
        for prompt, answer, load, network in places
        if (prompt + answer + load + network) % 2 == 0
    ]


def chosen_on(case: Case) -> bool:
    """Return whether `case` belongs to the half of the sweep on which the constant was chosen.

    The halves alternate in every property, like the colours of a chess board.
    """
    places = (
        PROMPTS.index(case.prompt_tokens),
        ANSWERS.index(case.answer_tokens),
        LOADS.index(case.load),
        NETWORKS.index(case.network),
    )
    return sum(places) % 2 == 0


# --- traffic --------------------------------------------------------------------------------------


def work_s(profile: Profile, prompt_tokens: int, answer_tokens: int) -> Seconds:
    """Return the time in seconds that a request takes from a pod that does nothing but such
    requests.
    """
    step_s = profile.decode_step_s(BATCH, prompt_tokens + answer_tokens // 2) / BATCH
    return prompt_tokens / profile.prefill_tokens_per_s(min(prompt_tokens, 8_192)) + (
        answer_tokens * step_s
    )


def alike(case: Case, profile: Profile, seed: int) -> Iterator[Arrival]:
    """Yield requests of one length without a common part, as a Poisson process."""
    random = Random(f"{seed}:alike:{case.prompt_tokens}:{case.answer_tokens}:{case.load}")
    busy_s = work_s(profile, case.prompt_tokens, case.answer_tokens)
    rate_per_s = case.load * PODS_OF_A_ROLE / busy_s
    time_s = 0.0
    for index in range(SWEEP_REQUESTS):
        time_s += random.expovariate(rate_per_s)
        yield Arrival(
            index=index,
            time_s=time_s,
            prompt_tokens=case.prompt_tokens,
            output_tokens=case.answer_tokens,
        )


_KINDS: Final = (
    (0.50, 0, 0),
    (0.20, 256, 256),
    (0.15, 4_096, 128),
    (0.10, 16_384, 64),
    (0.05, 32_768, 64),
)
"""Share of the requests, tokens of the prompt, and tokens of the answer, for each kind of mixed
request; the first kind are turns of chats.
"""
CHAT_HEAD_TOKENS: Final = 1_024
CHAT_TURN_TOKENS: Final = 256
CHAT_ANSWER_TOKENS: Final = 256
CHAT_TURNS: Final = 6
CHAT_PAUSE_S: Final[Seconds] = 5.0


def mixed(case: Case, profile: Profile, seed: int) -> list[Arrival]:
    """Return mixed requests. A chat has six turns, and each turn waits for the answer before it.

    All chats begin with the same 1,024 tokens.
    """
    random = Random(f"{seed}:mixed:{case.load}")
    turn_tokens = CHAT_TURN_TOKENS + CHAT_ANSWER_TOKENS
    mean_s = sum(
        share * work_s(profile, prompt or CHAT_TURN_TOKENS, answer or CHAT_ANSWER_TOKENS)
        for share, prompt, answer in _KINDS
    )
    rate_per_s = case.load * PODS_OF_A_ROLE / mean_s
    events: list[tuple[float, int, int, int]] = []
    time_s, chat = 0.0, 0
    weights = [share / (CHAT_TURNS if not prompt else 1) for share, prompt, _ in _KINDS]
    starts_per_s = rate_per_s * sum(weights)
    while sum(CHAT_TURNS if not one[1] else 1 for one in events) < MIXED_REQUESTS:
        time_s += random.expovariate(starts_per_s)
        _, prompt, answer = random.choices(_KINDS, weights)[0]
        chat += not prompt
        events.append((time_s, prompt, answer, chat))
    planned: list[tuple[float, int, int, int, int]] = []
    for at_s, prompt, answer, number in events:
        if prompt:
            planned.append((at_s, prompt, answer, 0, -1))
            continue
        planned += [
            (
                at_s + turn * CHAT_PAUSE_S,
                CHAT_HEAD_TOKENS + turn * turn_tokens + CHAT_TURN_TOKENS,
                CHAT_ANSWER_TOKENS,
                number,
                turn,
            )
            for turn in range(CHAT_TURNS)
        ]
    planned.sort()
    last: dict[int, int] = {}
    arrivals: list[Arrival] = []
    for index, (at_s, prompt, answer, number, turn) in enumerate(planned):
        plain = Arrival(index=index, time_s=at_s, prompt_tokens=prompt, output_tokens=answer)
        if turn < 0:
            arrivals.append(plain)
            continue
        ids = [1]
        lengths = [CHAT_HEAD_TOKENS]
        for before in range(turn + 1):
            ids.append(1_000 * number + 2 * before + 10)
            lengths.append(CHAT_TURN_TOKENS)
            if before < turn:
                ids.append(1_000 * number + 2 * before + 11)
                lengths.append(CHAT_ANSWER_TOKENS)
        arrivals.append(
            replace(
                plain,
                blocks=tuple(ids),
                lengths=tuple(lengths),
                answer=1_000 * number + 2 * turn + 11,
                session=f"chat-{number}",
                turn=turn,
                after=last.get(number),
                think_s=CHAT_PAUSE_S if number in last else 0.0,
            )
        )
        last[number] = index
    return arrivals


# --- runs -----------------------------------------------------------------------------------------


def stages_of(stages: Stages, rule: str, case: Case, prefill_delay: float) -> Stages:
    """Return the stages of the default by role with another rule, and with the speed of the network
    unless `rule` must not know it.
    """
    by_time = stages.prefill_if
    assert isinstance(by_time, ByTime)
    learns = rule == RULE_LEARNT_LINK
    by_time = replace(by_time, prefill_delay=prefill_delay, learn_link_speed=learns)
    assert stages.prefill is not None
    prefill = _with(stages.prefill, learn_link_speed=learns)
    decode = _with(stages.decode, prefill_delay=prefill_delay, learn_link_speed=learns)
    if rule not in {RULE_UNKNOWN_LINK, RULE_LEARNT_LINK}:
        link = link_named(case.network).bytes_per_s
        by_time = replace(by_time, link_bytes_per_s=link)
        prefill, decode = _linked(prefill, link), _linked(decode, link)
    stages = replace(stages, decode=decode, prefill=prefill)
    if rule == NEVER:
        return Stages(decode=decode)
    given: Mapping[str, PrefillRule] = {
        ALWAYS: Always(),
        DYNAMO: cast("PrefillRule", Dynamo()),
        **{f"llm-d {tokens}": Uncached(tokens) for tokens in THRESHOLDS},
    }
    if rule in given:
        order = Order.PREFILL_FIRST if rule == ALWAYS else Order.DECODE_FIRST
        return replace(stages, prefill_if=given[rule], order=order)
    return replace(stages, prefill_if=by_time)


def _linked(profile: SchedulingProfile, link: float) -> SchedulingProfile:
    return _with(profile, link_bytes_per_second=link)


def _with(profile: SchedulingProfile, **parameters: float) -> SchedulingProfile:
    scorers = tuple(
        WeightedScorer(one.name, _replaced(one.plugin, parameters), one.weight)
        for one in profile.scorers
    )
    return replace(profile, scorers=scorers)


def _replaced(scorer: Scorer, parameters: Mapping[str, float]) -> Scorer:
    return cast("Scorer", replace(cast("Struct", scorer), **parameters))


def simulated(run: Run) -> Row:
    """Simulate one run and return its figures: latencies, and the share of prompts that prefill
    pods computed.
    """
    case, profile = run.case, find_profile(PROFILE)
    kind = PodKind.of(profile)
    settings = ClusterSettings(
        pods=(
            *(kind.with_role(PREFILL),) * PODS_OF_A_ROLE,
            *(kind.with_role(DECODE),) * PODS_OF_A_ROLE,
        ),
        kv_transfer=KVTransferSettings(link=link_named(case.network)),
        replicas=case.pickers,
        peers=PeerSettings(delay_s=PEER_DELAY_S) if case.pickers > 1 else None,
    )
    source = PolicySource(
        name="by role", text=default_with_stages({Stage.PREFILL}).text, source="by role"
    )
    opened = settings.opener(source)(run.seed).settings
    assert opened is not None
    opened = replace(opened, stages=stages_of(opened.stages, run.rule, case, run.prefill_delay))

    def open_policy(seed: int) -> Policy:
        return SchedulerPolicy(opened, seed=seed)

    ended: list[SimulatedRequest] = []
    gaps = TokenGaps()
    traffic = alike if case.prompt_tokens else mixed
    Cluster(
        settings,
        open_policy,
        _parsed,
        list(traffic(case, profile, run.seed)),
        seed=run.seed,
        ended=ended.append,
        stepped=gaps.add,
    ).run()
    done = [request for request in ended if request.fate is Fate.COMPLETE]
    late = [one for one in done if one.arrival.index >= LEARNING_REQUESTS]
    return Row(
        part=run.part,
        case=case,
        rule=run.rule,
        seed=run.seed,
        prefill_delay=run.prefill_delay,
        completed=len(done),
        e2e_s=_e2e_s(done),
        ttft_s=_mean([ttft_of(one) for one in done]),
        itl_s=rounded(gaps.whole().mean_s) or 0.0,
        remote=_mean([float(one.handover is not None) for one in done]),
        late_e2e_s=_e2e_s(late) if run.part == "links" else 0.0,
    )


def _e2e_s(requests: Sequence[SimulatedRequest]) -> Seconds:
    return _mean([(one.ended_at or math.nan) - one.arrived_at for one in requests])


def _parsed(arrival: Arrival, hashes: PromptHashes) -> InferenceRequest:
    return request_of(arrival, (BLOCK_TOKENS,), hashes)


def _mean(values: Sequence[float]) -> float:
    return rounded(float(np.mean(values))) or 0.0


def sweep_runs() -> list[Run]:
    """Return the runs of the sweep. The default link is only run where it is wrong, and other values
    of `prefillDelay` on the half on which it was chosen.
    """
    cases = sweep_cases()
    runs = [
        Run(part="sweep", case=case, rule=rule, seed=seed)
        for case, rule, seed in product(cases, SWEEP_RULES, SEEDS)
        if rule != RULE_UNKNOWN_LINK or case.network != NETWORKS[0]
    ]
    others = [
        Run(part="sweep", case=case, rule=RULE, seed=seed, prefill_delay=delay)
        for case, delay, seed in product(cases, OTHER_DELAYS, SEEDS)
        if chosen_on(case)
    ]
    return [*runs, *others]


def hold_out_runs() -> list[Run]:
    """Return the runs of the hold-out cases, on which the rule was not chosen."""
    return [
        Run(part="hold-out", case=case, rule=rule, seed=seed)
        for case, rule, seed in product(hold_out_cases(), (RULE, NEVER, ALWAYS), SEEDS)
    ]


def link_cases() -> list[Case]:
    """Return the cases of the part `links`, by network."""
    half = [case for case in sweep_cases() if chosen_on(case) and case.network == NETWORKS[1]]
    return [replace(case, network=network) for network in LINKS_MEASURED for case in half]


def link_runs() -> list[Run]:
    """Return the runs of the rule by time with a network whose speed it does not know at first."""
    return [
        Run(part="links", case=case, rule=rule, seed=seed)
        for case, rule, seed in product(link_cases(), LINK_RULES, LINK_SEEDS)
    ]


def finished(file: Path) -> list[Row]:
    """Return the rows in a file of finished runs; none if it does not exist."""
    if not file.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in file.read_bytes().splitlines()]


def planned_runs() -> list[Run]:
    """Return all runs, those of the first seed first. Within a seed, the runs that only compare
    values of a parameter are last.
    """

    def place(run: Run) -> tuple[int, bool, bool]:
        compares = run.prefill_delay != PREFILL_DELAY or run.rule == RULE_UNKNOWN_LINK
        return run.seed, compares, run.part == "sweep" and chosen_on(run.case)

    return sorted([*hold_out_runs(), *sweep_runs(), *mixed_runs(), *link_runs()], key=place)


def mixed_runs() -> list[Run]:
    """Return the runs of the mixed traffic, the last ones with several pickers."""
    runs = [
        Run(part="mixed", case=Case(load=load, network=network), rule=rule, seed=seed)
        for load, network, rule, seed in product(MIXED_LOADS, NETWORKS, MIXED_RULES, SEEDS)
    ]
    several = [
        Run(
            part="mixed",
            case=Case(load=load, network=NETWORKS[0], pickers=pickers),
            rule=RULE,
            seed=seed,
        )
        for load, pickers, seed in product(MIXED_LOADS, PICKERS, SEEDS)
        if pickers > 1
    ]
    return [*runs, *several]


# --- comparisons ----------------------------------------------------------------------------------

FIGURES: Final[Mapping[str, Callable[[Row], float]]] = {
    "E2E": lambda row: row.e2e_s,
    "TTFT": lambda row: row.ttft_s,
    "ITL": lambda row: row.itl_s,
}
LATE_E2E: Final = "late E2E"
_VALUES: Final[Mapping[str, Callable[[Row], float]]] = {
    **FIGURES,
    LATE_E2E: lambda row: row.late_e2e_s,
}


class Ratio(Struct, frozen=True):
    """A ratio with its 95 % interval."""

    value: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.half_width:.3f}"


def ratio_of(ratios: np.ndarray) -> Ratio:
    """Return the mean of `ratios`, one for each seed, with its 95 % interval, which holds for three
    seeds.
    """
    error = float(ratios.std(ddof=1)) / math.sqrt(len(SEEDS))
    return Ratio(float(ratios.mean()), CONFIDENCE_T * error)


def by_seed(rows: Sequence[Row], case: Case, rule: str, figure: str) -> np.ndarray:
    """Return one figure of a rule in a case, in the order of the seeds."""
    value = _VALUES[figure]
    found = {row.seed: value(row) for row in rows if row.case == case and row.rule == rule}
    return np.array([found[seed] for seed in sorted(found)])


def better(rows: Sequence[Row], case: Case, figure: str = "E2E") -> str:
    """Return which of `never` and `always` has the lower mean of a figure in a case."""
    return min((NEVER, ALWAYS), key=lambda rule: by_seed(rows, case, rule, figure).mean())


def ratio(rows: Sequence[Row], case: Case, rule: str, to: str, figure: str = "E2E") -> Ratio:
    """Return the mean ratio of a figure of two rules over the seeds, which have equal traffic."""
    return ratio_of(by_seed(rows, case, rule, figure) / by_seed(rows, case, to, figure))


def read() -> Measured:
    """Return docs/stage-rule.json. Raise `OSError` if it does not exist."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Measured)


def rows_of(measured: Measured, part: str, delay: float = PREFILL_DELAY) -> list[Row]:
    """Return the rows of a part, those of the rule by time with one value of `prefillDelay`."""
    return [
        row
        for row in measured.rows
        if row.part == part and (row.rule != RULE or row.prefill_delay == delay)
    ]


# --- tables ---------------------------------------------------------------------------------------


def choice_table(measured: Measured) -> str:
    """Return the table of the values of `prefillDelay`, on the half of the sweep on which it was
    chosen.
    """
    half = [case for case in sweep_cases() if chosen_on(case)]
    table = [["`prefillDelay`", "E2E mean", "E2E worst", "above 1.03"]]
    for delay in (*OTHER_DELAYS, PREFILL_DELAY):
        rows = rows_of(measured, "sweep", delay)
        found = [ratio(rows, case, RULE, better(rows, case)).value for case in half]
        name = f"**{delay:g}**" if delay == PREFILL_DELAY else f"{delay:g}"
        table.append([name, *_shown_ratios(found)])
    return markdown_table(table)


def summary_table(measured: Measured) -> str:
    """Return the table of ratios to the better of `never` and `always`, over the hold-out cases, the
    whole sweep and parts of it.

    All prompts of a case have the same length, so a threshold of tokens is `never` or `always`.
    """
    rows = rows_of(measured, "sweep") + rows_of(measured, "hold-out")
    cases = sweep_cases()
    slow = [case for case in cases if case.network != NETWORKS[0]]
    lines: list[tuple[str, str, list[Case], Callable[[Case], str]]] = [
        (RULE, "hold-out", hold_out_cases(), lambda case: RULE),
        (RULE, "all", cases, lambda case: RULE),
        (RULE, "chosen on", [one for one in cases if chosen_on(one)], lambda case: RULE),
        (RULE, "slow network", slow, lambda case: RULE),
        (RULE_UNKNOWN_LINK, "slow network", slow, lambda case: RULE_UNKNOWN_LINK),
        (NEVER, "all", cases, lambda case: NEVER),
        ("always, llm-d 16, dynamo, AIBrix", "all", cases, lambda case: ALWAYS),
        ("llm-d 512", "all", cases, lambda case: NEVER if case.prompt_tokens < 512 else ALWAYS),
        ("llm-d 2048", "all", cases, lambda case: NEVER if case.prompt_tokens < 2_048 else ALWAYS),
    ]
    table = [
        ["rule", "cases", "E2E mean", "E2E worst", "above 1.03", "TTFT mean", "ITL mean"],
    ]
    for name, part, of, rule in lines:
        found = {
            figure: [ratio(rows, one, rule(one), better(rows, one), figure).value for one in of]
            for figure in FIGURES
        }
        others = [f"{_geometric(found[figure]):.3f}" for figure in ("TTFT", "ITL")]
        table.append([name, part, *_shown_ratios(found["E2E"]), *others])
    return markdown_table(table)


def _shown_ratios(found: Sequence[float]) -> list[str]:
    above = sum(one > WORSE for one in found)
    return [f"{_geometric(found):.3f}", f"{max(found):.3f}", f"{above} of {len(found)}"]


def links_table(measured: Measured) -> str:
    """Return the table of ratios to the better of `never` and `always` on networks whose speed is
    measured, for all requests and for those after the first `LEARNING_REQUESTS`.
    """
    rows = rows_of(measured, "links")
    table = [
        [
            *("network", "rule", "E2E mean", "E2E worst", "above 1.03"),
            *("later mean", "later worst", "later above 1.03"),
        ]
    ]
    for (network, gbit_per_s), rule in product(LINKS_MEASURED.items(), LINK_RULES):
        shown: list[str] = []
        for figure in ("E2E", LATE_E2E):
            found = [
                ratio(rows, case, rule, better(rows, case, figure), figure).value
                for case in link_cases()
                if case.network == network
            ]
            shown += _shown_ratios(found)
        table.append([f"{gbit_per_s} Gbit/s", rule, *shown])
    return markdown_table(table)


def hold_out_table(measured: Measured) -> str:
    """Return the table of all hold-out cases, with E2E, TTFT and ITL by rule."""
    rows = rows_of(measured, "hold-out")
    table = [
        [
            *("prompt, answer", "load", "network", "E2E `time`", "`never`", "`always`"),
            *("ratio to the better", "remote", "TTFT", "ITL"),
        ]
    ]
    for case in hold_out_cases():
        e2e, ttft, itl = (
            [by_seed(rows, case, rule, figure).mean() for rule in (RULE, NEVER, ALWAYS)]
            for figure in FIGURES
        )
        found = ratio(rows, case, RULE, better(rows, case))
        shown = f"**{found}**" if found.value > WORSE else str(found)
        table.append(
            [
                f"{case.prompt_tokens:,}, {case.answer_tokens}",
                f"{case.load:g}",
                link_named(case.network).name,
                *(f"{one:.3g} s" for one in e2e),
                shown,
                f"{_remote(rows, case, RULE):.0%}",
                " / ".join(f"{one:.3g}" for one in ttft) + " s",
                " / ".join(f"{one * 1e3:.3g}" for one in itl) + " ms",
            ]
        )
    return markdown_table(table)


def mixed_table(measured: Measured) -> str:
    """Return the table of the mixed traffic by load, network and rule."""
    rows = rows_of(measured, "mixed")
    table = [["load", "network", "rule", "E2E", "TTFT", "ITL", "E2E to `time`", "remote"]]
    for load, network in product(MIXED_LOADS, NETWORKS):
        case = Case(load=load, network=network)
        for rule in MIXED_RULES:
            e2e, ttft, itl = (by_seed(rows, case, rule, figure).mean() for figure in FIGURES)
            to = "" if rule == RULE else str(ratio(rows, case, rule, RULE))
            table.append(
                [
                    *(f"{load:g}", network, f"**{rule}**" if rule == RULE else rule),
                    *(f"{e2e:.3g} s", f"{ttft:.3g} s", f"{itl * 1e3:.3g} ms", to),
                    f"{_remote(rows, case, rule):.0%}",
                ]
            )
    return markdown_table(table)


def picker_table(measured: Measured) -> str:
    """Return the table that compares one, two and four pickers with the rule `time` for the mixed
    traffic.
    """
    rows = rows_of(measured, "mixed")
    table = [["load", "pickers", "E2E", "TTFT", "ITL", "E2E to one picker"]]
    for load in MIXED_LOADS:
        one = Case(load=load, network=NETWORKS[0])
        for pickers in PICKERS:
            case = replace(one, pickers=pickers)
            e2e, ttft, itl = (by_seed(rows, case, RULE, figure) for figure in FIGURES)
            found = ratio_of(e2e / by_seed(rows, one, RULE, "E2E"))
            table.append(
                [
                    *(f"{load:g}", str(pickers), f"{e2e.mean():.3g} s", f"{ttft.mean():.3g} s"),
                    *(f"{itl.mean() * 1e3:.3g} ms", "" if pickers == 1 else str(found)),
                ]
            )
    return markdown_table(table)


def _remote(rows: Sequence[Row], case: Case, rule: str) -> float:
    return float(np.mean([row.remote for row in rows if row.case == case and row.rule == rule]))


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate all runs that the file of `--resume` lacks, and write docs/stage-rule.json. Return
    the exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m docs.stage_rule",
        description="measure the rule by which a prompt is computed elsewhere",
    )
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default: 2)")
    resumed = "JSON lines of finished runs; runs that it has are not made again"
    parser.add_argument("--resume", type=Path, metavar="FILE", help=resumed)
    given = parser.parse_args(arguments)
    made = [] if given.resume is None else finished(given.resume)
    known = {(row.case, row.rule, row.seed, row.prefill_delay) for row in made}
    runs = [
        run
        for run in planned_runs()
        if (run.case, run.rule, run.seed, run.prefill_delay) not in known
    ]
    with ProcessPoolExecutor(given.workers) as pool:
        for number, row in enumerate(pool.map(simulated, runs, chunksize=2), 1):
            made.append(row)
            if given.resume is not None:
                with given.resume.open("ab") as file:
                    file.write(msgspec.json.encode(row) + b"\n")
            if number % 50 == 0:
                print(f"{number} of {len(runs)} runs", file=sys.stderr, flush=True)
    write_whole(RESULTS, row_lines(msgspec.to_builtins(Measured(rows=made))).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
