"""Several pickers on the command line: what is compared, told and refused."""

import json

import pytest
from msgspec import structs

from sim.__main__ import main
from sim.traces.capture import CaptureWriter
from tests.sim.made import arrivals


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "made.jsonl"
    with path.open("wb") as file:
        writer = CaptureWriter(file, source="test")
        for one in arrivals(120, groups=30, blocks=(20, 20)):
            # A capture wants an id for each full block.
            tokens = 64 * len(one.blocks) + 1
            writer.write_arrival(structs.replace(one, prompt_tokens=tokens))
    return path


def sim(*arguments):
    return main([str(argument) for argument in arguments])


def test_numbers_of_pickers_are_compared_on_the_same_requests(trace, tmp_path, capsys):
    """Each is a column of its own, the first is what the others are compared with."""
    out = tmp_path / "out"
    assert sim(
        "compare", trace, "--config", "default", "--replicas", "1,3", "--peer-delay", "0.005",
        "--seeds", "1", "--pods", "4", "--out", out,
    ) == 0  # fmt: skip
    summary = json.loads((out / "summary.json").read_bytes())
    assert list(summary["configs"]) == ["default, 1 picker", "default, 3 pickers"]
    assert summary["conditions"]["replicas"] == [1, 3]
    runs = {(one["config"], one["seed"]): one for one in summary["runs"]}
    assert len(runs) == 2
    for (config, _), one in runs.items():
        assert one["requests"]["complete"] == 120
        assert ("peers" in one) is (config == "default, 3 pickers")
    report = (out / "report.md").read_text()
    assert "| pickers | 1; 3 |" in report
    assert "| delay between pickers | 5 ms |" in report
    assert "default, 3 pickers: hit rate" in capsys.readouterr().out


def test_a_replay_says_what_pickers_told_each_other(trace, tmp_path, capsys):
    out = tmp_path / "out"
    assert sim(
        "replay", trace, "--replicas", "3", "--assignment", "skewed", "--peer-delay", "0.01",
        "--peer-loss", "0.5", "--peer-interval", "0.05", "--peer-partition", "1:2:0,1",
        "--peer-slow", "2:0.1", "--picker-away", "1:2:3", "--no-peer-snapshot", "--out", out,
    ) == 0  # fmt: skip
    summary = json.loads((out / "summary.json").read_bytes())
    conditions = summary["conditions"]
    assert conditions["assignment"] == "skewed"
    assert {name: conditions[name] for name in conditions if name.startswith("peer_")} == {
        "peer_delay_s": 0.01,
        "peer_loss": 0.5,
        "peer_interval_s": 0.05,
        "peer_snapshot": False,
        "peer_partitions": [{"from_s": 1.0, "to_s": 2.0, "side": [0, 1]}],
        "peer_slow": [{"replica": 2, "more_s": 0.1}],
    }
    assert conditions["pickers_away"] == [{"replica": 1, "from_s": 2.0, "to_s": 3.0}]
    told = summary["peers"]
    assert 0 < told["frames_lost"] < told["frames"]
    assert told["records_applied"] > 0
    for text in (capsys.readouterr().out, (out / "report.md").read_text()):
        assert f"{told['frames']:,} frames" in text
        assert "decisions received from other pickers" in text


def test_blind_pickers_tell_nothing(trace, tmp_path, capsys):
    out = tmp_path / "out"
    assert sim("replay", trace, "--replicas", "2", "--out", out) == 0
    summary = json.loads((out / "summary.json").read_bytes())
    assert summary["conditions"]["peer_delay_s"] is None
    assert "peers" not in summary
    assert "sent to other pickers" not in capsys.readouterr().out
    report = (out / "report.md").read_text()
    assert "| delay between pickers | pickers share nothing |" in report


SAME = """\
[pickers]
count = 3
assignment = "skewed"
fallback_endpoints_max = 1
peer_delay_s = 0.01
peer_loss = 0.5
peer_interval_s = 0.05
peer_snapshot = false
peer_slow = [{ picker = 2, more_s = 0.1 }]

[[events]]
kind = "picker-restart"
pickers = [1]
at_s = 2
startup_s = 1

[[events]]
kind = "peer-partition"
from_s = 1
to_s = 2
pickers = [0, 1]
"""
FLAGS = (
    "--replicas", "3", "--assignment", "skewed", "--fallback-endpoints-max", "1",
    "--peer-delay", "0.01", "--peer-loss", "0.5", "--peer-interval", "0.05", "--no-peer-snapshot",
    "--peer-slow", "2:0.1", "--picker-away", "1:2:3", "--peer-partition", "1:2:0,1",
)  # fmt: skip


def test_a_scenario_says_of_pickers_what_flags_say(trace, tmp_path):
    """The same run to the last digit; only the name of the file tells them apart."""
    file = tmp_path / "pickers.toml"
    file.write_text(SAME)
    told = []
    for name, arguments in (("flags", FLAGS), ("file", ("--scenario", file))):
        assert sim("replay", trace, *arguments, "--out", tmp_path / name) == 0
        told.append(json.loads((tmp_path / name / "summary.json").read_bytes()))
    flags, scenario = told
    assert scenario["conditions"].pop("scenario") == "pickers.toml"
    assert flags["conditions"].pop("scenario") is None
    assert flags == scenario
    assert flags["rescheduled"] == 0
    assert flags["peers"]["frames_lost"] > 0


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (SAME, ("--replicas", "3"), "p.toml defines the pickers: leave out --replicas"),
        (SAME, FLAGS, "leave out --replicas, --assignment, --fallback-endpoints-max, --peer-delay"),
        (
            "[[events]]\nkind = 'picker-restart'\nat_s = 1",
            ("--replicas", "2", "--no-peer-snapshot"),
            "leave out --replicas, --peer-snapshot",
        ),
        ("[pickers]\ncount = 2\npeer_loss = 0.1", (), "need --peer-delay (peer_delay_s)"),
        ("[pickers]\npeer_delay_s = 0.1", (), "needs at least two pickers"),
        (
            "[[events]]\nkind = 'peer-partition'\nfrom_s = 1\nto_s = 2\npickers = [0]",
            (),
            "need --peer-delay (peer_delay_s)",
        ),
        (
            "[[events]]\nkind = 'picker-restart'\nat_s = 1\npickers = [1]",
            (),
            "picker-restart at 1 s: expected a picker from 0 to 0, got 1",
        ),
        (
            "[[events]]\nkind = 'picker-restart'\nat_s = 1\nstartup_s = 0.1",
            (),
            "expected an absence of at least 0.4 s, got 0.1 s",
        ),
        (
            "[[events]]\nkind = 'reschedule'\nfrom_s = 1\nto_s = 2",
            (),
            "reschedule at 1 s: expected fallback_endpoints_max",
        ),
        (
            "[[events]]\nkind = 'reschedule'\nfrom_s = 1\nto_s = 2",
            ("--config", "random", "--fallback-endpoints-max", "1"),
            "random names only one",
        ),
    ],
)
def test_a_scenario_and_flags_do_not_speak_of_the_same(
    trace, tmp_path, text, arguments, said, capsys
):
    """One sentence, exit code 2."""
    file = tmp_path / "p.toml"
    file.write_text(text)
    assert sim("replay", trace, "--scenario", file, *arguments) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "p.toml" not in told or str(file) in told, "which of the files of that name?"


def test_a_comparison_takes_pickers_from_the_scenario(trace, tmp_path, capsys):
    """As many for every configuration; several numbers of them are for flags."""
    file = tmp_path / "p.toml"
    file.write_text("[pickers]\ncount = 2\n")
    shared = ("compare", trace, "--config", "default", "--config", "random", "--seeds", "1",
              "--pods", "4", "--scenario", file)  # fmt: skip
    assert sim(*shared, "--out", tmp_path / "out") == 0
    summary = json.loads((tmp_path / "out/summary.json").read_bytes())
    assert list(summary["configs"]) == ["default", "random"]
    assert summary["conditions"]["replicas"] == 2
    assert sim(*shared, "--replicas", "1,2") == 2
    assert "leave out --replicas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("replay", "--peer-loss", "0.1"), "need --peer-delay"),
        (
            ("replay", "--peer-delay", "0.1"),
            "--peer-delay (peer_delay_s) needs at least two pickers",
        ),
        (
            (
                "compare",
                "--config",
                "default",
                "--config",
                "random",
                "--replicas",
                "1",
                "--peer-delay",
                "0.1",
            ),
            "needs at least two pickers",
        ),
        (("replay", "--picker-away", "0:5:5"), "expected an end after 5 s, got 5 s"),
        (("replay", "--replicas", "1001"), "'1001' is not an integer from 1 to 1,000"),
        (
            ("replay", "--replicas", "2", "--picker-away", "2:1:5"),
            "--picker-away (picker-restart): expected a picker from 0 to 1, got 2",
        ),
        (("replay", "--picker-away", "1:5"), "'1:5' is not N:FROM:TO"),
        (("replay", "--peer-delay", "-1"), "'-1' is not a number from 0 to 1,000,000,000"),
        (("replay", "--peer-partition", "1:2:x"), "'x' is not an integer"),
        (("replay", "--assignment", "even"), "even"),
        (("replay", "--replicas", "1,2"), "'1,2' is not an integer"),
        (("compare", "--config", "default"), "give --config at least twice, or --replicas"),
        (("compare", "--config", "default", "--replicas", "1,0"), "'0' is not an integer"),
    ],
)
def test_what_does_not_go_together_is_refused(trace, arguments, said, capsys):
    command, *rest = arguments
    try:
        code = sim(command, trace, *rest)
    except SystemExit as usage:
        code = usage.code
    assert code == 2
    assert said in capsys.readouterr().err
