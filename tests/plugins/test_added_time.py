"""The rule of our own, by hand and in the scheduler."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.types import BYTES_PER_TOKEN
from epp.plugins.added_time import ATTENTION_TOKENS, HALF_WEIGHT_S, AddedTime
from epp.plugins.cost import scores_of_cost
from tests.builders import candidates, lora, request, resident
from tests.sim.made import arrivals, kind, ran

BLOCKS = 10


def best(asked=None, plugin=None, prompt_tokens=640, **columns):
    """Positions of the cheapest endpoints for a prompt of ten blocks."""
    columns = {"total_blocks": BLOCKS} | columns
    pool = candidates(prompt_tokens=prompt_tokens, **columns)
    asked = asked or request(prompt_tokens=prompt_tokens)
    scores = (plugin or AddedTime()).score(asked, pool)
    assert np.all((scores >= 0) & (scores <= 1))
    return [at for at, score in enumerate(scores) if score == 1.0]


def test_among_idle_endpoints_the_prefix_decides():
    """Nothing else costs anything."""
    assert best(matched_blocks=[0, 9, 8]) == [1]


def test_where_nothing_is_cached_the_least_work_decides():
    """Pending prefill is waited for, and those who decode are disturbed."""
    assert best(matched_blocks=[0, 0], inflight_prefill_tokens=[100.0, 0.0]) == [1]
    assert best(matched_blocks=[0, 0], inflight_requests=[3, 2]) == [1]


def test_a_prefix_is_worth_what_it_saves_and_no_more():
    """640 tokens, and twice as many for what they evict: 1,920 tokens to wait for are a tie."""
    whole = 640 * (1 + 320 / ATTENTION_TOKENS) * 3.0
    held = {"matched_blocks": [BLOCKS, 0], "plugin": AddedTime(first_token_weight=0.0)}
    assert best(**held, inflight_prefill_tokens=[whole - 1.0, 0.0]) == [0]
    assert best(**held, inflight_prefill_tokens=[whole + 1.0, 0.0]) == [1]


@given(weight=st.floats(0.1, 10.0), prompt_blocks=st.integers(2, 200))
def test_a_prefix_is_worth_a_shorter_wait_the_more_the_first_token_weighs(weight, prompt_blocks):
    """A wait that lasts as long as the evictions do is too long with a weight, and short without one."""
    tokens = 64 * prompt_blocks
    alone = tokens * (1 + tokens / 2 / ATTENTION_TOKENS)
    pool = {"matched_blocks": [prompt_blocks, 0], "inflight_prefill_tokens": [2.99 * alone, 0.0]}
    for plugin, expected in (
        (AddedTime(first_token_weight=0.0), [0]),
        (AddedTime(first_token_weight=weight), [1]),
    ):
        columns = candidates(prompt_tokens=tokens, total_blocks=prompt_blocks, **pool)
        scores = plugin.score(request(prompt_tokens=tokens), columns)
        assert np.flatnonzero(scores == scores.max()).tolist() == expected


def test_one_waiting_for_memory_costs_more_the_more_of_it_a_prompt_takes():
    """The load is not bounded: a queue of a hundred is not bought back by a full match."""
    pool = {
        "waiting_requests": [100, 0],
        "running_requests": [40, 40],
        "kv_cache_usage": [1.0, 1.0],
    }
    columns = candidates(prompt_tokens=640, total_blocks=BLOCKS, matched_blocks=[BLOCKS, 0], **pool)
    columns._columns.kv_capacity_tokens[:2] = 100_000.0
    scores = AddedTime().score(request(prompt_tokens=640), columns)
    assert scores.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("usages", "prompt_tokens", "is_short"),
    [
        ([0.5, 0.5], 640, False),
        ([0.5, 0.9936], 640, False),
        ([0.5, 0.9937], 640, True),
        ([0.5, 0.5], 60_000, True),
        ([0.5, math.nan], 640, False),
    ],
)
def test_memory_costs_something_only_if_an_endpoint_has_less_than_the_prompt_takes(
    usages, prompt_tokens, is_short
):
    """The score is the same as by the parts of the cost, which always include the memory."""
    pool = candidates(
        prompt_tokens=prompt_tokens,
        kv_cache_usage=usages,
        waiting_requests=[0, 0],
        running_requests=[4, 9],
    )
    pool._columns.kv_capacity_tokens[:2] = 100_000.0
    asked = request(prompt_tokens=prompt_tokens)
    parts = AddedTime().cost_parts(asked, pool)
    assert (parts["memory"] > 0.0).any() == is_short
    expected = scores_of_cost(sum(parts.values()))
    assert AddedTime().score(asked, pool) == pytest.approx(expected, abs=1e-9)


def test_requests_of_others_count_where_scrapes_show_them():
    """A picker that is new, or one of several, counts less than there is."""
    assert best(matched_blocks=[0, 0], running_requests=[9.0, 1.0], waiting_requests=[0, 0]) == [1]


def test_an_adapter_is_loaded_only_where_that_is_cheaper_than_to_wait():
    """An active adapter is free, a free slot takes a load, and full slots take a wait."""
    busy = lora("b", "c", slots_max=2)
    for reports, expected in (
        ([lora("a", "b", slots_max=2), busy, lora("b", slots_max=2)], 0),
        ([busy, lora("b", slots_max=2)], 1),
        ([busy, resident(gpu=("b", "c"), active=("b",), slots_max=2)], 1),
    ):
        found = best(
            request(model="a", prompt_tokens=640),
            matched_blocks=[0] * len(reports),
            adapters=reports,
        )
        assert found == [expected]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([lora(slots_max=2), None], [0, 1]),
        ([lora("b", slots_max=2), None, lora("b", "c", slots_max=2)], [0]),
        ([lora("a", slots_max=2), None], [0, 1]),
        (
            [lora("b", "c", slots_max=2), lora("a", slots_max=2), lora("a", slots_max=2), None],
            [1, 2, 3],
        ),
    ],
)
def test_a_pod_that_reports_no_adapters_is_the_median_of_those_that_do(reports, expected):
    """A pod that is silent about adapters is neither better nor worse than the others."""
    asked = request(model="a", prompt_tokens=640)
    assert best(asked, matched_blocks=[0] * len(reports), adapters=reports) == expected


@pytest.mark.parametrize("weight", [0.0, 2.0, 7.5])
def test_the_weight_counts_what_the_request_waits_for_its_first_token(weight):
    """Queue, prefill and adapter count once more: `weight` times if long, less if short; nothing else does."""
    columns = candidates(
        matched_blocks=[BLOCKS, 0, 4],
        total_blocks=BLOCKS,
        prompt_tokens=640,
        waiting_requests=[3.0, 0.0, 1.0],
        running_requests=[5.0, 2.0, 1.0],
        inflight_requests=[2, 0, 1],
        inflight_prefill_tokens=[9_000.0, 100.0, 0.0],
        adapters=[lora("a", slots_max=2), lora("b", slots_max=2), lora("b", "c", slots_max=2)],
    )
    asked = request(model="a", prompt_tokens=640)
    plain = AddedTime(first_token_weight=0.0).cost_parts(asked, columns)
    parts = AddedTime(first_token_weight=weight).cost_parts(asked, columns)
    own = sum(plain[name] for name in AddedTime.first_token_parts)
    once_more = weight * own * own / (own + HALF_WEIGHT_S)
    np.testing.assert_allclose(parts.pop("first token weight"), once_more)
    assert not plain.pop("first token weight").any()
    for name, part in plain.items():
        np.testing.assert_array_equal(parts[name], part)
    scores = AddedTime(first_token_weight=weight).score(asked, columns)
    np.testing.assert_allclose(scores, scores_of_cost(sum(plain.values()) + once_more), atol=1e-9)


def test_the_greater_the_weight_the_sooner_the_first_token():
    """At one pod prompts wait, at the other requests decode: the weight decides between them."""
    pool = {
        "matched_blocks": [0, 0],
        "inflight_prefill_tokens": [900.0, 0.0],
        "inflight_requests": [0, 3],
    }
    assert best(plugin=AddedTime(first_token_weight=0.0), **pool) == [0]
    assert best(plugin=AddedTime(first_token_weight=10.0), **pool) == [1]


def test_pickers_that_do_not_hear_each_other_believe_alike():
    """Where all would send a prompt, it is cheap for each of them; a queue there is still a queue."""
    prompt = b"p" * 64 * BYTES_PER_TOKEN * BLOCKS
    asked = request(prompts=(prompt,), prompt_tokens=640, replicas_unheard=3)
    asked.chains_of(64 * BYTES_PER_TOKEN, 2048)
    [agreed] = best(asked, matched_blocks=[0] * 5)
    assert [agreed] == best(asked, matched_blocks=[0] * 5)
    pending = [0.0] * 5
    pending[agreed] = 5_000.0
    assert agreed not in best(asked, matched_blocks=[0] * 5, inflight_prefill_tokens=pending)
    asked = request(prompts=(prompt,), prompt_tokens=640)
    assert len(best(asked, matched_blocks=[0] * 5)) == 5


@given(
    waiting=st.one_of(st.just(math.nan), st.floats(0, 1e6)),
    running=st.one_of(st.just(math.nan), st.floats(0, 1e6)),
    usage=st.one_of(st.just(math.nan), st.floats(0, 1)),
    capacity=st.one_of(st.just(math.nan), st.floats(1, 1e9)),
    prompt_tokens=st.integers(0, 10**9),
)
def test_whatever_pods_tell_there_is_an_order(waiting, running, usage, capacity, prompt_tokens):
    """No number of theirs makes a cost that is none: both endpoints stay comparable."""
    pool = candidates(
        waiting_requests=[waiting, 0.0],
        running_requests=[running, 0.0],
        kv_cache_usage=[usage, 0.0],
        matched_blocks=[0, 0],
        total_blocks=BLOCKS,
    )
    pool._columns.kv_capacity_tokens[:2] = capacity
    scores = AddedTime().score(request(prompt_tokens=prompt_tokens), pool)
    assert np.isfinite(scores).all()
    if capacity >= 1 and usage >= 0:
        assert scores[1] == 1.0, "who has nothing to do never costs more"


@pytest.mark.parametrize(
    ("known", "as_if"),
    [
        ({"answer_tokens": 64.0}, 64),
        ({"answer_tokens": 900.0}, 256),
        ({"answer_tokens": 64.0, "output_tokens_max": 40}, 40),
        ({"answer_tokens": None}, 256),
    ],
)
def test_answers_are_as_long_as_engines_count_or_shorter(known, as_if):
    """Never longer than the request allows, or the configuration."""
    pool = candidates(running_requests=[1.0, 4.0], matched_blocks=[0, 9], total_blocks=BLOCKS)
    pool._columns.inflight_context_tokens[:2] = [0, 30_000]
    parts = AddedTime().cost_parts(request(prompt_tokens=6_400, **known), pool)
    others = AddedTime(decode_tokens=as_if).cost_parts(request(prompt_tokens=6_400), pool)
    assert parts["decoding"].tolist() == others["decoding"].tolist()


@given(
    waiting=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    pending=st.lists(st.integers(0, 100_000), min_size=4, max_size=4),
    speed=st.floats(1_000, 100_000),
)
def test_where_all_prefill_alike_tokens_say_what_seconds_say(waiting, pending, speed):
    """Nothing is divided there, unless an adapter adds seconds."""
    made = {}
    for alike in (True, False):
        pool = candidates(
            waiting_requests=list(map(float, waiting)),
            inflight_prefill_tokens=list(map(float, pending)),
            matched_blocks=[0, 1, 2, 3],
            total_blocks=BLOCKS,
        )
        pool._columns.prefill_tokens_per_s[:4] = speed
        pool._columns.prefill_alike = alike
        made[alike] = AddedTime().score(request(prompt_tokens=640), pool)
    assert made[True] == pytest.approx(made[False])


@pytest.mark.parametrize(
    "parameters", [{"adapterLoad": "-1s"}, {"prefillDelay": 2}, {"peerBelief": -1}]
)
def test_parameters_are_checked(parameters):
    """With what is expected."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(parameters, AddedTime)


def test_no_pod_queues_while_others_are_empty():
    """One hot prefix and more load than a pod can bear: weights let it queue, this does not."""

    def worst_queue_s(policy):
        worst_s = 0.0
        for seed in range(1, 4):
            requests, _ = ran(
                arrivals(400, rate=160.0, groups=1, blocks=(40, 60), output=(100, 200), seed=seed),
                policy=policy,
                pods=(kind(blocks_total=4_000),) * 4,
                seed=seed,
            )
            took_s = sorted(request.first_token_at - request.arrived_at for request in requests)
            worst_s += took_s[-20]
        return worst_s

    assert worst_queue_s("homing") <= worst_queue_s("weighted-scores")


UNKNOWN_OR = st.just(math.nan) | st.floats(0, 300)
ROW = st.tuples(
    UNKNOWN_OR, UNKNOWN_OR, st.just(math.nan) | st.floats(0, 1), st.integers(0, 50),
    st.floats(0, 1e5), st.integers(0, BLOCKS), st.sampled_from([0.0, 1.0, 9.0]), st.booleans(),
)  # fmt: skip


@given(
    rows=st.lists(ROW, min_size=1, max_size=5),
    output=st.none() | st.integers(1, 900),
    weight=st.floats(0, 10),
)
def test_the_parts_of_the_cost_add_up_to_what_the_score_goes_by(rows, output, weight):
    """Whatever is known of the pool: what is told afterwards is what decided."""
    waiting, running, usage, inflight, tokens, matched, age, sized = zip(*rows, strict=True)
    reports = [lora("a", "b", slots_max=2) if big else None for big in sized]
    columns = candidates(
        waiting_requests=list(waiting),
        running_requests=list(running),
        kv_cache_usage=list(usage),
        inflight_requests=list(inflight),
        inflight_prefill_tokens=list(tokens),
        matched_blocks=list(matched),
        metrics_age_s=list(age),
        adapters=reports,
        total_blocks=BLOCKS,
        prompt_tokens=640,
    )
    columns._columns.kv_capacity_tokens[: len(rows)] = [
        50_000.0 if big else math.nan for big in sized
    ]
    asked = request(model="c", prompt_tokens=640, output_tokens_max=output)
    plugin = AddedTime(first_token_weight=weight)
    parts = plugin.cost_parts(asked, columns)
    assert all((part >= 0).all() for part in parts.values())
    expected = plugin.score(asked, columns)
    np.testing.assert_allclose(scores_of_cost(sum(parts.values())), expected, atol=1e-6)


def test_the_parts_say_what_is_bought_and_what_is_lost():
    """In seconds: what is cached is not prefilled, and who runs there is delayed."""
    columns = candidates(
        matched_blocks=[BLOCKS, 0],
        total_blocks=BLOCKS,
        prompt_tokens=640,
        inflight_requests=[2, 0],
        inflight_prefill_tokens=[0.0, 15_928.0],
    )
    parts = AddedTime().cost_parts(request(prompt_tokens=640), columns)
    assert AddedTime.cost_unit == "s"
    assert parts["prefill"][0] == 0.0
    assert parts["queue"].tolist() == [0.0, 1.0]
    assert parts["evictions"][1] == pytest.approx(2 * parts["prefill"][1])
    assert parts["delay of others"].tolist() == [0.0, 0.0], (
        "nothing is computed, or nobody is there"
    )


@pytest.mark.parametrize("column", ["waiting_requests", "running_requests", "kv_cache_usage"])
def test_who_is_silent_is_not_idle(column):
    """Of three it ranks between the one that is idle and the one that is busy."""
    busy = {"kv_cache_usage": 1.0}.get(column, 9.0)
    columns = {
        "waiting_requests": [0.0] * 3,
        "running_requests": [9.0] * 3,
        "kv_cache_usage": [1.0] * 3,
    }
    pool = candidates(3, **(columns | {column: [0.0, math.nan, busy]}))
    pool._columns.kv_capacity_tokens[:3] = 4_096.0
    scores = AddedTime().score(request(prompt_tokens=4_000), pool)
    assert scores[0] > scores[1] >= scores[2]
