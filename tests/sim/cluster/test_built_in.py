"""Configurations that others publish, by their names."""

from importlib.metadata import EntryPoint

import pytest

from epp.configuration.config import ConfigError
from epp.core.decision.scheduler import Decision
from epp.plugins.contract import Strategy, config_of
from sim.__main__ import main
from sim.cluster import built_in as module
from sim.cluster.built_in import configurations, strategies
from sim.cluster.policies import built_in, policy_source
from tests.sim.made import arrival, arrivals, ran


@pytest.mark.parametrize("name", built_in())
def test_every_built_in_serves(name):
    """By its name, to the end; each with a text has the hash of it."""
    requests, cluster = ran(arrivals(40), policy=name)
    assert len(requests) == 40
    assert not cluster.clients.requests
    assert (policy_source(name).hash is None) == (name not in configurations())


def test_llm_d_weighs_three_two_two():
    """And nothing else."""
    requests, _ = ran(arrivals(3), policy="llm-d-3-2-2")
    decision = requests[0].route.decision
    assert isinstance(decision, Decision)
    assert decision.leg.scorers == (
        "prefix-cache-scorer", "queue-scorer", "kv-cache-utilization-scorer",
    )  # fmt: skip
    assert decision.leg.scored.parts.max(axis=1).tolist() == [0, 2, 2]


def prompts(count, *, tokens, at_s=0.0):
    """One text for all, as long as it is told, sent one after another."""
    blocks = tuple(range(1, tokens // 64 + 1))
    return [
        arrival(
            at, time_s=at_s + 0.001 * at, prompt_tokens=tokens, output_tokens=200,
            blocks=blocks, block_tokens=64,
        )
        for at in range(count)
    ]  # fmt: skip


def test_who_holds_the_prompt_keeps_it_until_saturated():
    """All go where the first went; once 18 s of uncached prompts wait there, elsewhere too."""
    requests, _ = ran(prompts(30, tokens=6_400), policy="sticky-until-saturated", pods=4)
    assert len({one.pod.number for one in requests}) == 1
    heavy = []
    for at in range(24):
        # Nine tenths are shared, so that each adds 20,000 tokens to compute.
        shared = tuple(range(1, 2_001))
        own = tuple(range(10_000 * (at + 1), 10_000 * (at + 1) + 310))
        heavy.append(
            arrival(
                at, time_s=0.001 * at, prompt_tokens=64 * 2_310, output_tokens=2,
                blocks=shared + own, block_tokens=64,
            )
        )  # fmt: skip
    requests, _ = ran(heavy, policy="sticky-until-saturated", pods=2)
    (first, *_), pods = requests, [one.pod.number for one in requests]
    assert pods[1:8].count(first.pod.number) == 7
    assert len(set(pods)) == 2


@pytest.fixture
def offered(monkeypatch):
    """Sets what the entry points of installed distributions are."""

    def offer(**entries):
        found = [EntryPoint(name, value, module.ENTRY_POINTS) for name, value in entries.items()]
        monkeypatch.setattr(
            module,
            "entry_points",
            lambda group, name=None: [one for one in found if name in {None, one.name}],
        )
        for each in (strategies, configurations):
            each.cache_clear()

    yield offer
    monkeypatch.undo()
    for each in (strategies, configurations):
        each.cache_clear()


MINE = (Strategy(name="mine", idea="Any.", config=config_of()),)
TAKEN = (Strategy(name="homing", idea="Any.", config=config_of()),)


def test_another_distribution_s_strategies_have_names(offered):
    """After ours, which are there anyhow."""
    offered(some=f"{__name__}:MINE")
    names = list(strategies())
    assert (names[0], names[-1]) == ("homing", "mine")
    assert policy_source("mine").text == MINE[0].config


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (f"{__name__}:TAKEN", "has strategy homing, whose name is already in use"),
        (f"{__name__}:policy_source", "is not a tuple of Strategy"),
        ("nowhere_at_all:X", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_is_no_strategy_is_a_problem(offered, value, problem):
    """Named by its entry point."""
    offered(some=value)
    with pytest.raises(ConfigError, match=problem):
        strategies()


@pytest.mark.parametrize(
    "arguments",
    [
        ["strategies", "lpwl"],
        ["compare", "none.jsonl", "--config", "lpwl", "--config", "homing"],
        ["leaderboard", "--strategies", "lpwl,homing"],
        ["leaderboard"],
    ],
    ids=" ".join,
)
def test_without_rivals_their_names_say_what_to_install(offered, capsys, arguments):
    """In a sentence; the command line is wrong."""
    offered()
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.endswith("pip install 'homing-epp[rivals]'\n")
