"""Pools that `sim size` splits into prefill and decode pods."""

import json

import pytest
from msgspec import structs

from sim.__main__ import main
from sim.cluster.links import KVTransferSettings
from sim.cluster.prefill_rules import DECODE, PREFILL
from sim.engine.links import LINKS
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.demand import busy_times, demand_of
from sim.experiments.pool_split import CACHED_SHARES, Split, splits_for
from sim.experiments.sizing import GROWTH, LOADS, ONE_LOST, Sizing
from tests.sim.experiments.test_sizing import MadeUpRuns, option, task
from tests.sim.made import arrival, kind
from tests.sim.staged import DISAGGREGATED

PAIR = (kind().with_role(PREFILL), kind().with_role(DECODE))


def roles(pods):
    return [pod.role for pod in pods]


@pytest.mark.parametrize(
    ("share", "pods", "prefill"),
    [(0.5, 2, 1), (0.1, 2, 1), (0.9, 2, 1), (0.25, 8, 2), (0.9, 8, 7), (0.1, 8, 1)],
)
def test_a_split_pool_has_a_pod_of_each_role(share, pods, prefill):
    divided = Split(prefill_share=share).divided(pods, PAIR)
    assert roles(divided) == [PREFILL] * prefill + [DECODE] * (pods - prefill)


def stretch(prompt_tokens, output_tokens):
    arrivals = [
        arrival(at, time_s=at, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        for at in range(100)
    ]
    return demand_of(arrivals, sized_s_max=3600.0).sized_for


def test_longer_prompts_need_a_larger_share_of_prefill_pods():
    profile = find_profile(DEFAULT_PROFILE)
    short, long = (splits_for(stretch(tokens, 200), profile) for tokens in (500, 8_000))
    assert len(long) == len(CACHED_SHARES)
    assert max(one.prefill_share for one in short) < max(one.prefill_share for one in long)
    prefill_s, decode_s = busy_times(stretch(8_000, 200), profile, 0.0)
    assert long[-1].prefill_share == pytest.approx(prefill_s / (prefill_s + decode_s), abs=0.01)


def split_option(share):
    made = option()
    cluster = structs.replace(
        made.settings.cluster, pods=PAIR, kv_transfer=KVTransferSettings(link=LINKS["nvlink"])
    )
    settings = structs.replace(made.settings, cluster=cluster)
    return structs.replace(made, settings=settings, split=Split(prefill_share=share))


def carried_out(ttft_s, options):
    runs = MadeUpRuns(ttft_s)
    sizing = Sizing(task(options), runs)
    sizing.carry_out()
    return sizing, runs


def needs(settings, *, whole=6, prefill=2, decode=3):
    """Return a TTFT that keeps the bound with this many pods of each kind."""
    of = roles(settings.cluster.pods)
    if "" in of:
        used = whole / len(of)
    else:
        used = max(prefill / of.count(PREFILL), decode / of.count(DECODE))
    return used - 0.001 * (5 + settings.repetition)


def test_the_split_with_the_fewest_pods_is_chosen():
    """Two prefill and three decode pods are enough, where six whole ones are needed."""
    sizing, _ = carried_out(needs, [option(), split_option(0.2), split_option(0.4)])
    assert [search.pods for search in sizing.options] == [6, 8, 5]
    assert sizing.chosen == 2
    assert sizing.autoscaled is None


def test_no_split_is_chosen_if_whole_pods_need_fewer():
    sizing, _ = carried_out(lambda one: needs(one, whole=3), [option(), split_option(0.4)])
    assert sizing.chosen == 0
    assert sizing.autoscaled is not None


def test_a_split_pool_is_compared_with_a_whole_one_of_the_same_size_at_several_loads():
    """With as many pods as the one of them needs that needs more."""
    sizing, runs = carried_out(needs, [option(), split_option(0.4)])
    assert [(at, pods, load) for at, pods, load, _ in sizing.loads] == [
        (at, 6, load) for load in LOADS for at in (0, 1)
    ]
    asked = runs.asked[-2 * len(LOADS) :]
    assert {len(one.cluster.pods) for one in asked} == {6}
    assert sorted({one.speed for one in asked}) == list(LOADS)


def test_headroom_of_a_split_pool_is_a_pod_of_each_role():
    sizing, runs = carried_out(needs, [option(), split_option(0.4)])
    lost = [one.scenario.incidents for one in runs.asked if one.scenario is not None]
    assert lost
    for incidents in lost:
        assert [(leave.role, leave.pods) for leave in incidents] == [
            (PREFILL, (0,)),
            (DECODE, (0,)),
        ]
    assert set(sizing.headroom) == {ONE_LOST, GROWTH}


def test_without_a_split_no_loads_are_compared():
    sizing, _ = carried_out(needs, [option()])
    assert sizing.loads == []


@pytest.fixture
def staged(tmp_path):
    path = tmp_path / "staged.yaml"
    path.write_text(DISAGGREGATED)
    return path


MEANS = ("--requests-per-s", "4", "--prompt-tokens", "3000", "--output-tokens", "60")


@pytest.mark.parametrize("named", ["staged.yaml", "default"])
def test_a_split_is_proposed_and_shown(named, tmp_path, staged, capsys, monkeypatch):
    """Both kinds of pools are in the summary and in the reports."""
    monkeypatch.chdir(staged.parent)
    out = tmp_path / "out"
    assert main([
        "size", *MEANS, "--requests", "60", "--slo", "ttft-p90=2", "--split", named,
        "--kv-link", "nvlink", "--seeds", "3", "--pods-max", "4", "--answer-only", "--out", str(out),
        "--workers", "1",
    ]) == 0  # fmt: skip
    summary = json.loads((out / "summary.json").read_bytes())
    whole, *split = summary["options"]
    assert "prefill_share" not in whole
    assert len(split) == 3
    for one in split:
        assert 1 <= one["prefill_pods"] < one["pods"]
        assert 0 < one["prefill_share"] < 1
    assert {one["load"] for one in summary["loads"]} == set(LOADS)
    assert summary["conditions"]["kv_link"] == "nvlink"
    shown = capsys.readouterr().out
    assert "prefill pods" in shown
    page = (out / "report.html").read_text()
    assert "over the load" in page
    assert "## Split or not, by load" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--roles", "prefill=1,decode=1"), "--split lets it propose roles"),
        (("--kv-link", "nvlink"), "give --split too"),
        (("--split", "homing"), "--split homing: expected a configuration with a prefill stage"),
        (("--split", "random"), "--split random: expected a configuration with a prefill stage"),
    ],
)
def test_what_splits_no_pool_is_refused(tmp_path, flags, says, capsys):
    out = ("--slo", "ttft-p90=2", "--out", str(tmp_path / "out"))
    assert main(["size", *MEANS, *out, *flags]) in {1, 2}
    assert says in " ".join(capsys.readouterr().err.split())
