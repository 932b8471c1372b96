"""What an operator reads."""

from typing import ClassVar

import msgspec
import numpy as np
import pytest
from msgspec import structs

from epp.core.abilities import Abilities
from epp.core.decision.account import Queued
from epp.core.decision.inputs import (
    PageScraped,
    PeersUnheard,
    PoolReplaced,
    Reconfigured,
    ServedBy,
)
from epp.core.decision.profile import NamedFilter, SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.shadow import ShadowVerdict
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Outcome
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.protocol.usage import Usage
from epp.core.types import BYTES_PER_TOKEN, EndpointMetrics
from epp.journal.records import EndpointState
from epp.plugins import PICKERS, SCORERS
from epp.plugins.added_time import ATTENTION_TOKENS, AddedTime
from epp.shell.operators.decisions.explanation import explanation
from epp.shell.operators.decisions.recent_decisions import (
    COMPARED_MAX,
    RecentDecisions,
    Wanted,
)
from tests.builders import PREFIX, endpoint, lora
from tests.builders import request as make_request
from tests.shell.operators.decisions.test_recent_decisions import Clock, exchange_of
from tests.shell.operators.pages.test_debug_pages import REFUSAL

QUEUED = Queued(
    waited_s=60.0,
    flow="small",
    priority=0,
    ahead=12,
    behind="big",
    behind_requests=9,
    charged_tokens=0.0,
    why="8 of 8 endpoints are full",
)
PROMPT = b"once upon a time" * (9 * 64 * BYTES_PER_TOKEN // 16)
WEIGHTS = {"prefix-cache-scorer": 3.0, "queue-scorer": 4.0}


class Told:
    """Three endpoints, and what is told of decisions among them."""

    def __init__(self, *scorers, waiting=(0.0, 0.0, 0.0)):
        self.settings = SchedulerSettings(
            stages=Stages(
                decode=SchedulingProfile(
                    name="default",
                    filters=(),
                    scorers=scorers
                    or tuple(
                        WeightedScorer(name, SCORERS[name](), at) for name, at in WEIGHTS.items()
                    ),
                    picker_name="max-score-picker",
                    picker=PICKERS["max-score-picker"](),
                )
            ),
            indexes={PREFIX: PrefixIndexSettings()},
            prefix=PREFIX,
        )
        self.scheduler = Scheduler(self.settings, seed=1)
        self.scheduler.take(PoolReplaced([endpoint(at) for at in range(len(waiting))]), 0.0)
        for slot, requests in enumerate(waiting):
            self.scheduler.take(
                PageScraped(
                    slot,
                    EndpointMetrics(
                        waiting_requests=requests, running_requests=requests, kv_cache_usage=0.5
                    ),
                ),
                0.0,
            )
        self.clock = Clock()
        self.recent = RecentDecisions(self.scheduler.pool, clock=self.clock)
        self.recent.configured(3, self.settings)

    def decide(self, at_s=0.25, queued=None, **fields):
        asked = {"prompts": (PROMPT,), "prompt_tokens": len(PROMPT) // BYTES_PER_TOKEN}
        decision = self.scheduler.schedule(make_request(**(asked | fields)), at_s)
        account = structs.replace(decision.account, queued=queued)
        self.recent.decided(structs.replace(decision, account=account))
        return decision

    async def lines(self):
        (row,) = await self.recent.rows(1, Wanted())
        return explanation(row).splitlines()


async def test_a_decision_is_told_in_words():
    """Where to, by what, who was next, what was known, what was predicted and how it ended."""
    told = Told()
    told.decide()
    decision = told.decide(request_id="r-7", model="llama")
    chosen = decision.endpoint.name
    told.recent.completed(
        exchange_of(decision, response_started_at_s=100.5, usage=Usage(cached_tokens=560)),
        Outcome(status=200),
        102.0,
    )
    told.clock.now_s += 14.0
    request, went, verdict, *known, scored, predicted, ended = await told.lines()
    assert request.startswith("request r-7 (model llama, priority 0), 2023-11-14T")
    assert request.endswith("14 s ago, decision 2, configuration generation 3")
    assert went == f"  routed to {chosen} at {decision.endpoint.address}"
    # Cold for this model: the load alone decides, and all are idle.
    assert "prefix-cache-scorer 0 (0 of 9 blocks)" in verdict
    assert len(known) == 2
    assert known[0] == (
        f"  {chosen} at that time: 0 waiting, 0 running, KV cache 50%, 0 in flight, "
        "0 tokens to prefill, metrics 0.25 s old"
    )
    assert scored == "  3 of 3 ready endpoints were scored"
    assert predicted == "  predicted 0 of 576 prompt tokens in its cache, the engine found 560"
    assert ended == "  ended: 200, complete after 2 s, headers after 0.5 s"


async def test_the_verdict_names_what_decided():
    """With its blocks, the next best, and a tie where it was one."""
    told = Told()
    first = told.decide().endpoint.name
    again = told.decide().endpoint.name
    assert again == first
    verdict = (await told.lines())[2]
    assert verdict.startswith(
        f"  {first}: 7, including prefix-cache-scorer 3 (9 of 9 blocks), queue-scorer 4; runner-up pod-"
    )
    assert verdict.endswith(": 4, including queue-scorer 4; prefix-cache-scorer decided")
    told.decide(prompts=(b"short",), prompt_tokens=2)
    assert (await told.lines())[2].endswith("; a tie, which the picker broke")


async def test_without_scorers_the_picker_broke_a_tie():
    told = Told()
    random = structs.replace(
        told.settings.stages.decode,
        scorers=(),
        picker_name="random-picker",
        picker=PICKERS["random-picker"](),
    )
    settings = structs.replace(told.settings, stages=Stages(decode=random))
    told.scheduler.take(Reconfigured(settings), 0.0)
    told.recent.configured(4, settings)
    chosen = told.decide().endpoint.name
    verdict = (await told.lines())[2]
    assert verdict.startswith(f"  {chosen}: 0; runner-up ")
    assert verdict.endswith(": 0; a tie, which the picker broke")


async def test_only_one_candidate_is_told_as_the_only_one():
    """A capture has the scores of none, but may have had several candidates."""
    alone = Told(waiting=(0.0,))
    alone.decide()
    assert (await alone.lines())[2].endswith("; it was the only candidate")
    told = Told()
    told.decide()
    (row,) = await told.recent.rows(1, Wanted())
    without = explanation(row | {"runner_up": None})
    assert "; the scores of others are not recorded\n" in without
    assert "only candidate" not in without


async def test_a_cost_is_told_by_its_parts():
    """A score of 1 among one scorer says nothing; what the cost was made of does, in its unit."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0), waiting=(0.0, 0.0))
    told.decide()
    decision = told.decide()
    name, other = decision.endpoint.name, 1 - int(decision.endpoint.name[-1])
    verdict, cost = (await told.lines())[2:4]
    assert verdict.startswith(f"  {name}: 1, including added-time 1; runner-up pod-{other}: 0")
    assert cost.startswith(f"  cost by added-time for {name}: ")
    first, second, decided = cost.split("; ")
    assert "prefill 0.0" not in first, "all of the prompt is there"
    assert second.startswith(f"for runner-up pod-{other}: 0.1")
    assert " s, including evictions 0.07" in second
    assert "prefill 0.03" in second
    assert decided == "evictions decided"


@pytest.mark.parametrize(("at_s", "computed"), [(1.9, False), (2.1, True)])
def test_costs_are_computed_during_a_decision_only_if_the_reports_are_old(at_s, computed):
    """A pool that is scraped once a second pays nothing for costs that can be computed later."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0))
    told.scheduler.placements.keeps_costs = True
    metrics = EndpointMetrics(
        waiting_requests=0.0,
        running_requests=0.0,
        kv_cache_usage=0.5,
        block_size_tokens=16,
        blocks_total=1000,
    )
    for slot in range(3):
        told.scheduler.take(PageScraped(slot, metrics), 0.0)
    assert (told.decide(at_s=at_s).leg.costs is not None) == computed


async def test_the_cost_of_an_adapter_is_among_its_parts():
    """Where adapters are reported, parts add up to what was decided by, at a silent endpoint too."""
    plugin = AddedTime(first_token_weight=0.0)
    told = Told(WeightedScorer("added-time", plugin, 1.0), waiting=(0.0, 0.0, 0.0))
    told.scheduler.placements.keeps_costs = True
    for slot, report in enumerate((lora("b", "c", slots_max=2), lora("a", slots_max=2))):
        metrics = EndpointMetrics(
            waiting_requests=0.0, running_requests=0.0, kv_cache_usage=0.5, adapters=report
        )
        told.scheduler.take(PageScraped(slot, metrics), 0.0)
    decision = told.decide(model="a")
    assert decision.endpoint.name == "pod-1"
    cost = (await told.lines())[3]
    assert cost.startswith("  cost by added-time for pod-1: ")
    assert "; for runner-up pod-2: " in cost
    assert "adapter 0.75" in cost, "the median of nothing and of a wait of 1.5 s"
    (row,) = await told.recent.rows(1, Wanted())
    chosen, second = (one["total"] for one in row["costs"][0]["endpoints"])
    assert second == pytest.approx(chosen + 0.75)
    others = [score for score in row["scores"] if score["endpoint"] == "pod-0"]
    assert others[0]["cost"] == pytest.approx(chosen + 1.5)


async def test_what_is_believed_of_peers_is_in_the_parts():
    """A picker that does not hear its peers expects the prompt at one endpoint, and says so."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0), waiting=(0.0, 0.0, 0.0))
    told.scheduler.placements.keeps_costs = True
    told.scheduler.take(PeersUnheard(2), 0.0)
    told.decide()
    (row,) = await told.recent.rows(1, Wanted())
    chosen, second = (one["parts"]["prefill"] for one in row["costs"][0]["endpoints"])
    assert chosen < 0.25 * second
    assert row["score"]["total"] == 1.0
    assert row["runner_up"]["total"] == 0.0


async def test_what_others_wait_for_is_what_nobody_holds():
    """The greatest match is at a third endpoint, and decides how much the others' requests compute."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0), waiting=(0.0, 0.0, 0.0))
    first = told.decide().leg.lease.slot
    loads = [9.0, 9.0, 9.0]
    loads[first] = 300.0
    for slot, load in enumerate(loads):
        metrics = EndpointMetrics(waiting_requests=load, running_requests=load, kv_cache_usage=0.5)
        told.scheduler.take(PageScraped(slot, metrics), 0.0)
    decision = told.decide()
    assert decision.leg.lease.slot != first
    (row,) = await told.recent.rows(1, Wanted())
    for one in row["costs"][0]["endpoints"]:
        assert one["parts"]["queue"] == 0.0, "the whole prompt is held somewhere"


async def test_the_first_token_is_told_as_expected_and_as_it_came():
    """The sum of what the request waits through, and when the first output was seen."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0))
    decision = told.decide()
    (row,) = await told.recent.rows(1, Wanted())
    prefill_s = row["costs"][0]["endpoints"][0]["parts"]["prefill"]
    assert row["expected_first_token_s"] == pytest.approx(prefill_s)
    expected = f"  first token expected after {round(prefill_s, 3):g} s"
    assert expected in await told.lines()
    told.recent.completed(
        exchange_of(decision, first_output_at_s=100.5), Outcome(status=200), 102.0
    )
    assert f"{expected}, observed after 0.5 s" in await told.lines()


async def test_the_wait_in_the_queue_is_no_part_of_the_first_token():
    """The expectation counts from the decision."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0))
    decision = told.decide(queued=QUEUED)
    exchange = exchange_of(decision, first_output_at_s=160.5)
    told.recent.completed(exchange, Outcome(status=200), 162.0)
    ((expected_s, observed_s),) = told.recent.first_tokens()
    assert observed_s == 0.5
    expected = f"  first token expected after {round(expected_s, 3):g} s"
    assert f"{expected}, observed after 0.5 s, without the wait in the queue" in await told.lines()


async def test_a_cost_that_cannot_be_told_hides_nothing_else(monkeypatch):
    """A plugin that fails costs only what it adds."""

    def broken(*_):
        raise KeyError("secret")

    monkeypatch.setattr(AddedTime, "cost_parts", broken)
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0))
    told.decide()
    lines = await told.lines()
    assert "  added-time could not list the parts of its cost: KeyError" in lines
    assert "secret" not in "".join(lines)
    assert lines[-1] == "  no end is recorded yet"


async def test_a_request_that_went_elsewhere_is_found():
    """The gateway did not do what it was told."""
    told = Told()
    decision = told.decide()
    (other, *_) = (
        at for _, at in told.scheduler.pool.endpoints() if at.name != decision.endpoint.name
    )
    told.scheduler.take(ServedBy(decision.lease, other.address), 1.0)
    told.recent.served(exchange_of(decision, served=other.address))
    assert (await told.lines())[-1] == (
        f"  the gateway used {other.address} instead; no end is recorded yet"
    )
    told.recent.completed(exchange_of(decision), Outcome(status=503, by_gateway=True), 101.0)
    assert (await told.lines())[-1] == (
        f"  the gateway used {other.address} instead; "
        "ended: 503 by the gateway itself, complete after 1 s"
    )


async def test_a_refusal_is_told_in_words():
    """With its reason, and without the sentence."""
    told = Told()
    told.recent.refused(REFUSAL, None, request_id="r-9", path="/v1/completions")
    assert await told.lines() == [
        "request r-9 (priority 0), path /v1/completions, 2023-11-14T22:13:20.000+00:00",
        "  refused with 503: rejected-no-endpoints",
    ]


@pytest.mark.parametrize(
    ("changes", "behind"),
    [
        ({}, "behind 12 requests (9 of flow big, the largest group of its band)"),
        ({"behind": ""}, "behind 12 requests (9 without a flow, the largest group of its band)"),
        ({"behind": "", "behind_requests": 0}, "behind 12 requests"),
    ],
)
async def test_a_refusal_of_the_queue_tells_of_the_wait(changes, behind):
    """And behind which flow the request waited."""
    told = Told()
    queued = structs.replace(QUEUED, **changes)
    told.recent.refused(REFUSAL, None, request_id="r-9", queued=queued)
    assert (await told.lines())[2:] == [
        f"  waited 60 s in the queue of flow small, {behind}, because 8 of 8 endpoints are full",
    ]


@pytest.mark.parametrize("hostile", ["\x1b[2J\n", "a\u202eb", "\ud800"])
async def test_what_clients_write_cannot_steer_a_terminal(hostile):
    """Line for line, whatever the request was called."""
    told = Told()
    told.decide(request_id=hostile, model=hostile)
    lines = await told.lines()
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 8


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (
            "differed",
            (
                "  the shadow profile would have chosen pod-9: 64 uncached tokens there, 576 where it "
                "went; 2 in flight there, 1 where it went"
            ),
        ),
        ("agreed", "  the shadow profile agreed"),
        ("failed", "  the shadow profile made no choice: failed"),
    ],
)
async def test_a_shadow_profile_is_told_of(verdict, line):
    told = Told()
    decision = told.scheduler.schedule(make_request(prompts=(PROMPT,)), 0.25)
    judged = ShadowVerdict(
        verdict=verdict,
        endpoint=msgspec.structs.replace(endpoint(9), name="pod-9"),
        uncached_tokens=64.0,
        live_uncached_tokens=576.0,
        inflight_requests=2,
        live_inflight_requests=1,
    )
    account = msgspec.structs.replace(decision.account, shadow=judged)
    decision = msgspec.structs.replace(decision, account=account)
    told.recent.decided(decision)
    assert line in await told.lines()


class Asked:
    """A decision among three, and why it was not another."""

    def __init__(self, *scorers, waiting=(0.0, 0.0, 0.0), filters=()):
        self.told = Told(*scorers, waiting=waiting)
        profile = msgspec.structs.replace(self.told.settings.profile, filters=filters)
        self.told.scheduler.take(
            Reconfigured(
                msgspec.structs.replace(self.told.settings, stages=Stages(decode=profile))
            ),
            0.1,
        )

    async def why_not(self, name):
        (row,) = await self.told.recent.rows(1, Wanted(), name)
        (line,) = [line for line in explanation(row).splitlines() if "why not" in line]
        return line.strip().removeprefix(f"why not {name}: ")


async def test_why_not_tells_by_how_much_it_was_behind():
    """And by what; of a cost in its unit, of any candidate, not of the next best alone."""
    asked = Asked(WeightedScorer("added-time", AddedTime(), 1.0), waiting=(0.0, 5.0, 50.0))
    asked.told.decide()
    assert await asked.why_not("pod-0") == "it was chosen"
    worst = await asked.why_not("pod-2")
    assert worst.startswith("pod-2 had 0 against 1, 1 less: added-time 1; it cost ")
    cost_s, chosen_s = (float(at.split()[0]) for at in worst.split("it cost ")[1].split("against "))
    (row,) = await asked.told.recent.rows(1, Wanted())
    assert row["costs"][0]["endpoints"][0]["total"] == pytest.approx(chosen_s, abs=1e-3)
    between = row["costs"][0]["endpoints"][1]["total"]
    assert chosen_s < between < cost_s
    assert "other candidates: pod-2 " in explanation(row)


async def test_why_not_names_the_filter_that_dropped_it():
    """The very one, where several dropped somebody."""

    class Drops(msgspec.Struct, frozen=True):
        name: str
        type_name = "drops"
        abilities: ClassVar[Abilities] = Abilities()

        def keep(self, _, candidates, /):
            return np.array([one.name != self.name for one in candidates.endpoints])

    filters = [NamedFilter(f"no-{at}", Drops(f"pod-{at}")) for at in (1, 2)]
    asked = Asked(filters=tuple(filters))
    asked.told.decide()
    assert await asked.why_not("pod-1") == "no-1 dropped it"
    assert await asked.why_not("pod-2") == "no-2 dropped it"


async def test_why_not_tells_of_who_was_not_ready_and_of_who_was_not_allowed():
    """As it was then, not as it is now."""
    asked = Asked()
    told = asked.told
    told.recent.know_states({"pod-2": EndpointState("asleep", "its engine says so", 7_267.0)})
    told.scheduler.take(PageScraped(2, EndpointMetrics(asleep=True)), 0.2)
    told.decide(subset=(told.scheduler.pool.columns.endpoints[0].address,))
    told.recent.know_states({})
    assert await asked.why_not("pod-2") == (
        "it was not ready; it was asleep since 02:01:07: its engine says so"
    )
    assert await asked.why_not("pod-1") == (
        "it was ready, and not in the subset that the gateway allows"
    )
    assert await asked.why_not("pod-9") == "it was not in the pool then"
    told.recent.refused(REFUSAL, make_request())
    assert (
        await asked.why_not("pod-2")
        == "no endpoint was chosen, and no problem of this one is known"
    )


async def test_candidates_that_were_slow_are_marked():
    """In the verdict, as they were when it was decided."""
    told = Told()
    told.recent.know_states({f"pod-{at}": EndpointState("slow", "slow", 1.0) for at in (0, 1, 2)})
    told.decide()
    assert (await told.lines())[2].count(" (slow)") == 2


def test_what_was_expected_is_compared_with_what_came():
    """Requests are compared that ended since the last call and whose first output was seen."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0))
    seen, unseen = told.decide(), told.decide()
    assert told.recent.first_tokens() == []
    for decision, output_at_s in ((seen, 100.5), (unseen, None)):
        exchange = exchange_of(decision, first_output_at_s=output_at_s)
        told.recent.completed(exchange, Outcome(status=200), 102.0)
    ((expected_s, observed_s),) = told.recent.first_tokens()
    assert expected_s == pytest.approx(576 * (1 + 288 / ATTENTION_TOKENS) / 15_928, rel=1e-4)
    assert observed_s == 0.5
    assert told.recent.first_tokens() == []


def test_a_request_that_went_elsewhere_is_not_compared():
    """The expectation is of the chosen endpoint and says nothing of the one that served."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0))
    decision = told.decide()
    (other, *_) = (
        at for _, at in told.scheduler.pool.endpoints() if at.name != decision.endpoint.name
    )
    told.scheduler.take(ServedBy(decision.lease, other.address), 1.0)
    exchange = exchange_of(decision, first_output_at_s=100.5)
    told.recent.completed(exchange, Outcome(status=200), 102.0)
    assert told.recent.first_tokens() == []


def test_as_many_are_compared_as_cost_little():
    """However many requests end between two ticks."""
    told = Told(WeightedScorer("added-time", AddedTime(), 1.0))
    for _ in range(3 * COMPARED_MAX):
        exchange = exchange_of(told.decide(), first_output_at_s=100.5)
        told.recent.completed(exchange, Outcome(status=200), 102.0)
    assert len(told.recent.first_tokens()) == COMPARED_MAX
