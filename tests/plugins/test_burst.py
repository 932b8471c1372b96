"""Windows of requests that share, placed as they come."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import ConfigError, load_config
from epp.core.decision.inputs import PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.plugins.burst import BurstSettings
from epp.plugins.strategies import STRATEGIES
from epp.plugins.strategy import config_of, producer, step
from tests.builders import endpoint, request

BLOCK_BYTES = 256


def opened(**parameters):
    return msgspec.convert(parameters, BurstSettings).open()


def said(*letters):
    return request(prompts=(b"".join(letter.encode() * BLOCK_BYTES for letter in letters),))


def sent(index, slot, *letters, now=0.0):
    asked = said(*letters)
    return asked, index.record(asked, slot, now)


def matched(index, *letters, slots=3, now=0.0):
    known = index.match(said(*letters), slots, now)
    return known.matched.tolist(), known.total


def test_equal_prompts_go_where_the_first_of_them_went_until_the_window_is_over():
    """100 ms from its first request; the next begins cold."""
    index = opened()
    assert matched(index, "a", "b") == ([0, 0, 0], 2)
    sent(index, 1, "a", "b", now=5.0)
    assert matched(index, "a", "b", now=5.099) == ([0, 2, 0], 2)
    assert matched(index, "a", now=5.05) == ([0, 0, 0], 1), "a head is another prompt"
    assert matched(index, "a", "b", now=5.1) == ([0, 0, 0], 2)
    sent(index, 2, "a", "b", now=5.2)
    assert matched(index, "a", "b", now=5.25) == ([0, 0, 2], 2)


def test_a_group_fills_an_endpoint_and_then_the_least_loaded():
    """Two of it each; graded, because who is a candidate is not known: 2 holds nothing, 1 one."""
    index = opened(maxPerReplica=2)
    sent(index, 1, "x")
    for _ in range(2):
        assert matched(index, "a", "b", "c", "d")[0] != [0, 4, 0]
        sent(index, 0, "a", "b", "c", "d")
    spilled, total = matched(index, "a", "b", "c", "d")
    assert spilled[2] == total
    assert spilled[2] > spilled[1] > spilled[0] == 0
    sent(index, 2, "a", "b", "c", "d")
    assert matched(index, "a", "b", "c", "d")[0] == [0, 0, 4]


def test_prompts_that_share_enough_go_where_most_of_it_is_below_a_fair_share():
    """One of two blocks is not enough; two are; at ceil(5 / 3) = 2 requests there it has its share."""
    index = opened(minColocateBlocks=2)
    sent(index, 1, "a", "b", "c")
    sent(index, 0, "x")
    sent(index, 2, "y")
    assert matched(index, "a", "z") == ([0, 0, 0], 2)
    assert matched(index, "a", "b", "d", "e") == ([0, 4, 0], 4)
    sent(index, 1, "a", "b", "d", "e")
    assert matched(index, "a", "b", "f")[0][1] == 0
    assert matched(index, "a", "b", "f")[0][0] == matched(index, "a", "b", "f")[0][2] > 0


def test_tokens_count_what_an_endpoint_does_not_have_yet():
    """Charged once an endpoint: a block of three is new."""
    index = opened(minColocateBlocks=1, balanceBy="tokens")
    sent(index, 0, "a", "b", "c")
    sent(index, 1, "q", "r", "s", "t", "u")
    # ceil((3 + 5 + 3) / 3) = 4 blocks are a share, and three are there.
    assert matched(index, "a", "b", "x")[0] == [3, 0, 0]
    sent(index, 0, "a", "b", "x")
    # Four now, of ceil((4 + 5 + 3) / 3) = 4.
    assert matched(index, "a", "b", "y")[0][0] < 3


def test_a_window_takes_no_more_than_its_batch():
    """What comes later is nobody's concern."""
    index = opened(maxBatchSize=2)
    for _ in range(3):
        sent(index, 0, "a")
    assert index.requests == 2
    assert matched(index, "a") == ([0, 0, 0], 1)
    index.expire(1.0)
    assert index.requests == 0


def test_who_moved_or_left_is_no_part_of_the_window():
    """The group goes on where its members are."""
    index = opened()
    moved, recorded = sent(index, 0, "a")
    index.retract(moved, 0, recorded, 0.01)
    recorded = index.record(moved, 1, 0.01)
    assert matched(index, "a", now=0.02)[0] == [0, 1, 0]
    index.forget(1)
    assert matched(index, "a", now=0.02)[0] == [0, 0, 0]
    index.retract(moved, 1, recorded, 0.03)
    assert index.requests == 0


def test_prompts_without_a_full_block_share_nothing():
    """As in the field."""
    index = opened()
    index.record(request(prompts=(b"short",)), 0, 0.0)
    assert index.match(request(prompts=(b"short",)), 2, 0.0).total == 0


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["end", "move", "leave"]),
        st.integers(0, 3),
        st.lists(st.sampled_from("ab"), max_size=4),
        st.sampled_from([0.0, 0.02, 0.2]),
    ),
    max_size=30,
)


@given(
    actions=ACTIONS,
    most=st.sampled_from([-1, 1, 2]),
    colocate=st.integers(0, 2),
    balance=st.sampled_from(["requests", "tokens", ""]),
)
def test_it_stays_within_its_batch_and_its_blocks(actions, most, colocate, balance):
    """Whatever comes, moves and leaves."""
    index = opened(
        maxPerReplica=most, minColocateBlocks=colocate, balanceBy=balance, maxBatchSize=6
    )
    now = 0.0
    for verb, slot, letters, passed in actions:
        now += passed
        found, total = matched(index, *letters, slots=4, now=now)
        assert all(0 <= each <= total for each in found)
        asked, recorded = sent(index, slot, *letters, now=now)
        if verb == "move":
            index.retract(asked, slot, recorded, now)
        elif verb == "leave":
            index.forget(slot)
        assert 0 <= index.requests <= 6
    index.expire(now + 1.0)
    assert index.requests == 0


def rollout(settings, samples=8, groups=4):
    """Where the samples of each prompt go that arrive in one instant, interleaved."""
    scheduler = Scheduler(settings, seed=1)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(groups)]), 0.0)
    went = {group: Counter() for group in range(groups)}
    for at in range(samples * groups):
        text = b"%d" % (at % groups) * 4 * BLOCK_BYTES
        decision = scheduler.schedule(request(prompts=(text,), prompt_tokens=256), at * 1e-3)
        went[at % groups][decision.endpoint.name] += 1
    return went


def settings_of(text):
    return build_settings(load_config(text, "made", plugin_tables()))


@pytest.mark.parametrize("beside", [False, True])
def test_the_samples_of_a_rollout_step_are_prefilled_once(beside):
    """All eight of a prompt at one endpoint, and the four prompts at four; with and without an index."""
    alone = config_of(
        producer("burst-prefix-cache-producer"),
        step("prefix-cache-scorer", prefixMatchInfoProducerName="burst-prefix-cache-producer"),
    )
    went = rollout(settings_of(STRATEGIES["llm-d-burst"].config if beside else alone))
    assert [len(group) for group in went.values()] == [1, 1, 1, 1]
    assert len({name for group in went.values() for name in group}) == 4


def test_a_cap_spreads_a_group_over_as_many_endpoints_as_it_needs():
    """Two of each prompt at each of four."""
    capped = config_of(
        producer("burst-prefix-cache-producer", maxPerReplica=2),
        step("prefix-cache-scorer", prefixMatchInfoProducerName="burst-prefix-cache-producer"),
    )
    went = rollout(settings_of(capped))
    assert [sorted(group.values()) for group in went.values()] == [[2, 2, 2, 2]] * 4


def of_the_field(*names):
    """As llm-d's documentation points the scorer at it."""
    return config_of(
        *(producer(name) for name in names),
        step("prefix-cache-scorer", prefixMatchInfoProducerName="burst-prefix-cache-producer"),
        step("token-load-scorer"),
    )


def test_a_configuration_of_the_field_loads_and_says_what_differs():
    """Beside a prefix index, in either order, it is not taken for one."""
    for names in (
        ("burst-prefix-cache-producer", "approx-prefix-cache-producer"),
        ("approx-prefix-cache-producer", "burst-prefix-cache-producer"),
        ("burst-prefix-cache-producer",),
    ):
        config = load_config(of_the_field(*names), "file", plugin_tables())
        assert set(config.indexes) == {
            "burst-prefix-cache-producer", "approx-prefix-cache-producer",
        }  # fmt: skip
        assert config.prefix == "approx-prefix-cache-producer"
        assert len(config.warnings) == 1
        assert "not held back" in config.warnings[0]


def test_a_producer_of_another_name_is_found_by_it():
    """As `approx-prefix-cache-producer` is."""
    text = of_the_field("burst-prefix-cache-producer").replace(
        "- type: burst-prefix-cache-producer", "- type: burst-prefix-cache-producer\n  name: mine"
    )
    text = text.replace(
        "prefixMatchInfoProducerName: burst-prefix-cache-producer",
        "prefixMatchInfoProducerName: mine",
    )
    assert "mine" in load_config(text, "file", plugin_tables()).indexes


@pytest.mark.parametrize(
    "parameters", [{"maxPerReplica": 0}, {"maxBatchSize": 0}, {"windowDurationMs": 10_001}]
)
def test_parameters_that_mean_nothing_are_refused(parameters):
    """In a sentence."""
    with pytest.raises(ConfigError):
        load_config(
            config_of(producer("burst-prefix-cache-producer", **parameters), step("queue-scorer")),
            "file",
            plugin_tables(),
        )


def test_settings_that_change_begin_anew():
    """Windows are short."""
    index = opened()
    assert BurstSettings().adopt(index)
    assert not BurstSettings(max_per_replica=2).adopt(index)
