"""The table of cases: what it must have, and that each row is what it says."""

import pytest

from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.protocol.messages import FLOW_HEADERS
from sim.cluster.policies import policy_source
from sim.cluster.simulated_pod import PodKind
from sim.engine.links import LINKS
from sim.engine.profiles import StepWork, find_profile
from sim.experiments.leaderboard.cases import (
    CASES,
    ENGINES,
    FURTHER_CASES,
    LADDERS,
    OVERLOAD_CASES,
    SCRAPES,
    STAGED_CASES,
)
from sim.traces.standard import STANDARD

WORKLOADS = {name: case for name, case in CASES.items() if case.workload is not None}


def test_every_generator_has_a_row():
    """Whoever adds one has to say at which load."""
    assert set(STANDARD) <= {*CASES, *OVERLOAD_CASES}


def test_the_table_has_what_strategies_differ_by():
    """Caches, pickers, scrapes, pods, adapters, each with another thing than usual."""
    assert {case.replicas for case in CASES.values()} >= {1, 4}
    assert {case.scrape_interval_s for case in CASES.values()} >= {0.05, 1.0, 10.0}
    assert {case.happens for case in CASES.values()} >= {"slow pod", "churn"}
    assert any(case.max_loras for case in CASES.values())
    assert sum(case.hold_out for case in CASES.values()) >= 5
    for case in CASES.values():
        assert case.cluster().peers is None, "pickers are blind to each other"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_case_has_as_many_requests_as_are_wanted(name):
    """Of every seed others, in order of time, that the pods can serve."""
    case = CASES[name]
    one, other = (list(case.arrivals(seed, 60)) for seed in (1, 2))
    assert len(one) == len(other) == 60
    assert one != other
    assert [arrival.time_s for arrival in one] == sorted(arrival.time_s for arrival in one)
    kind = case.cluster().pods[0]
    limit = min(kind.profile.max_model_len_tokens, kind.engine.kv_tokens)
    assert max(arrival.prompt_tokens + arrival.output_tokens for arrival in one) <= limit
    assert bool(kind.engine.max_loras) == any(arrival.adapter for arrival in one)


@pytest.mark.parametrize("name", CASES)
def test_pickers_believe_of_prefill_what_a_picker_without_a_configuration_does(name):
    """Whatever pods do; but where the case is that they are told."""
    case = CASES[name]
    cluster = case.cluster()
    settings = cluster.opener(policy_source("default"))(1).settings
    if case.speed_told:
        assert case.hold_out
        assert settings.prefill_tokens_per_s == cluster.pods[0].prefill_tokens_per_s
        assert settings.prefill_tokens_per_s > 2 * PREFILL_TOKENS_PER_S
    else:
        assert settings.prefill_tokens_per_s == PREFILL_TOKENS_PER_S


def test_every_engine_that_is_not_as_believed_has_a_hold_out():
    """On which nobody tunes."""
    cases = (*CASES.values(), *FURTHER_CASES.values())
    held = [case for case in cases if case.engines or case.scrapes]
    assert all(case.hold_out for case in held)
    assert [case.name for case in CASES.values() if case.cluster().response_chunks] == [
        "chunks-held"
    ]
    assert {case.engines for case in held if case.engines} == set(ENGINES)
    assert {case.scrapes for case in held if case.scrapes} == set(SCRAPES)


USUAL = PodKind.of(find_profile("qwen3-32b-h100-tp2"))
PROMPT = StepWork(tokens=8_192, prefills=1, attention_pairs=8_192**2 / 2, sequences=1)
ANSWERS = StepWork(tokens=32, decodes=32, decode_context_tokens=200_000, sequences=32)


@pytest.mark.parametrize(
    ("name", "prompt", "answers"),
    [("slow prefill", 2.0, 1.0), ("fast prefill", 0.5, 1.0), ("slow decode", 1.0, 2.0)],
)
def test_engines_are_slow_or_fast_at_what_their_case_says(name, prompt, answers):
    """And at the rest as usual; some of a step takes what it takes."""
    pods = ENGINES[name](USUAL, 3)
    assert len(pods) == 3
    for pod in pods:
        before, after = USUAL.profile, pod.profile
        assert after.step_s(PROMPT) / before.step_s(PROMPT) == pytest.approx(prompt, rel=0.05)
        assert after.step_s(ANSWERS) / before.step_s(ANSWERS) == pytest.approx(answers, rel=0.1)


def test_an_engine_holds_half_of_what_it_tells():
    """Pickers think that it holds more than it does."""
    (pod,) = ENGINES["half the cache"](USUAL, 1)
    assert pod.advertised_blocks == USUAL.engine.blocks_total
    assert pod.engine.blocks_total == USUAL.engine.blocks_total // 2


def test_half_of_the_pods_are_older():
    """Of an odd number the smaller half."""
    usual = PodKind.of(find_profile("llama-3.1-8b-h100-tp1"))
    pods = ENGINES["half A100"](usual, 5)
    assert [pod.profile.name for pod in pods] == [
        *["llama-3.1-8b-h100-tp1"] * 3, *["llama-3.1-8b-a100-tp1"] * 2,
    ]  # fmt: skip
    assert pods[0].prefill_tokens_per_s > 2 * pods[-1].prefill_tokens_per_s


def test_an_engine_that_cuts_no_prompt_takes_any_in_one_step():
    """As long as the model allows it."""
    (pod,) = ENGINES["whole prompts"](USUAL, 1)
    assert pod.engine.max_num_batched_tokens == USUAL.profile.max_model_len_tokens


def test_who_asks_the_same_again_is_the_same_user():
    """So that sessions mean something; who shares nothing with anybody names none."""
    users = {}
    for arrival in CASES["pickers-1"].arrivals(1, 3_000):
        assert users.setdefault(arrival.session, arrival.blocks) == arrival.blocks
    assert 500 < len(users) < 3_000
    assert {one.session for one in CASES["zero-reuse"].arrivals(1, 60)} == {""}
    sessions = {one.session for one in CASES["multi-turn"].arrivals(1, 60)}
    assert len(sessions) == 20, "it has its own"


def used_tokens(name):
    """What would lie in one cache that forgets nothing."""
    held = {}
    for arrival in CASES[name].arrivals(1, 3_000):
        for part, tokens in arrival.spans():
            held[part] = max(tokens, held.get(part, 0))
    # Questions are small beside the prompts that they share.
    return sum(tokens for tokens in held.values() if tokens > 2_000)


def test_working_sets_are_below_at_and_above_one_cache():
    """And the hold-out is above the caches of all pods together."""
    kv_tokens = CASES["set-at"].cluster().pods[0].engine.kv_tokens
    below, at, above = (used_tokens(f"set-{name}") / kv_tokens for name in ("below", "at", "above"))
    assert below == pytest.approx(0.5, abs=0.05)
    assert at == pytest.approx(1.0, abs=0.05)
    assert above == pytest.approx(2.5, abs=0.1)
    assert used_tokens("set-held") > CASES["set-held"].pods * kv_tokens


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.happens])
def test_what_happens_fits_the_pool(name):
    """However long requests arrive."""
    case = CASES[name]
    for span_s in (0.5, 20.0, 4_000.0):
        scenario = case.scenario(span_s)
        scenario.check(kinds=case.cluster().pods, pickers=case.replicas)
        assert scenario.incidents
    assert case.cluster().clients.retries


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.title)
def test_the_cases_of_a_ladder_are_in_the_table(ladder):
    """In order of what they differ by."""
    assert [number for number, _ in ladder.steps] == sorted({number for number, _ in ladder.steps})
    assert {case for _, case in ladder.steps} <= set(CASES)


@pytest.mark.parametrize("name", FURTHER_CASES)
def test_a_further_case_runs_only_if_it_is_named(name):
    """It is a hold-out, and its requests can be drawn."""
    case = FURTHER_CASES[name]
    assert name not in CASES
    assert case.hold_out
    assert len(list(case.arrivals(1, 20))) == 20
    assert len(case.cluster().pods) == case.pods


def test_three_kinds_of_pods_are_as_many_of_each():
    pods = FURTHER_CASES["gpus-further"].cluster().pods
    speeds = [pod.prefill_tokens_per_s for pod in pods]
    assert len(set(speeds)) == 3
    assert all(speeds.count(speed) == 2 for speed in speeds)


@pytest.mark.parametrize("name", STAGED_CASES)
def test_a_case_with_roles_has_pods_that_transfer_over_its_link(name):
    """As many pods as it says; no other case has any."""
    case = STAGED_CASES[name]
    cluster = case.cluster()
    roles = [pod.role for pod in cluster.pods]
    assert [(role, roles.count(role)) for role in dict.fromkeys(roles)] == list(case.roles)
    assert len(cluster.pods) == case.pods
    assert all(pod.transfers for pod in cluster.pods)
    assert cluster.kv_transfer.link is LINKS[case.link]
    assert not set(STAGED_CASES) & {*CASES, *FURTHER_CASES}
    assert all(one.cluster().kv_transfer is None for one in CASES.values())
    assert len(list(case.arrivals(1, 60))) == 60


@pytest.mark.parametrize("name", OVERLOAD_CASES)
def test_a_case_of_overload_runs_only_if_it_is_named(name):
    """Its requests fit the pods one by one, and name what a queue tells them apart by."""
    case = OVERLOAD_CASES[name]
    assert name not in {*CASES, *FURTHER_CASES, *STAGED_CASES}
    requests = list(case.arrivals(1, 1_500))
    kind = case.cluster().pods[0]
    limit = min(kind.profile.max_model_len_tokens, kind.engine.kv_tokens)
    assert max(one.prompt_tokens + one.output_tokens for one in requests) <= limit


def test_one_tenant_sends_ten_times_as_many_tokens_as_the_other():
    sent = {}
    for one in OVERLOAD_CASES["two-tenants"].arrivals(1, 20_000):
        [(name, tenant)] = one.headers
        assert name in FLOW_HEADERS
        sent[tenant] = sent.get(tenant, 0) + one.prompt_tokens + one.output_tokens
    assert sent["large"] == pytest.approx(10 * sent["small"], rel=0.1)


def test_a_burst_is_ten_times_the_usual_rate():
    times_s = [one.time_s for one in OVERLOAD_CASES["one-burst"].arrivals(1, 3_000)]
    usual = sum(time_s < 20 for time_s in times_s) / 20
    burst = sum(20 <= time_s < 25 for time_s in times_s) / 5
    assert burst == pytest.approx(10 * usual, rel=0.15)
    assert sum(25 <= time_s < 45 for time_s in times_s) / 20 == pytest.approx(usual, rel=0.25)
