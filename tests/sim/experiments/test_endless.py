"""Runs in which requests would wait for ever are ended, and said to have failed."""

import re

import pytest

from sim.__main__ import main
from sim.cluster.built_in import configurations
from tests.sim.experiments.test_replay import written

NO_PAGES = """\
[[events]]
kind = "scrapes"
from_s = 0
to_s = 1000000
loss = 1.0
"""


@pytest.fixture
def replayed(tmp_path):
    """A function that replays four seconds of requests before a gate that closes after one for good,
    because no further page is read.
    """
    trace = written(tmp_path / "trace.jsonl", 80)
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(NO_PAGES)

    def replay(limit, *command):
        config = tmp_path / "config.yaml"
        text = configurations()["llm-d-gate"].replace("defaultRequestTTL: 60s", limit)
        assert limit in text
        config.write_text(text)
        options = ["--config", str(config), "--scenario", str(scenario), "--block-tokens", "64"]
        return main([*command, str(trace), *options])

    return replay


@pytest.mark.parametrize("command", [["replay"], ["compare", "--config=default", "--seeds=1"]])
def test_a_run_in_which_requests_wait_for_ever_fails(replayed, command, capsys):
    assert replayed("defaultRequestTTL: 0s", *command) == 1
    told = capsys.readouterr().err
    found = re.search(r"(\d+) requests wait in the picker after 28,800 s of simulated time", told)
    assert found
    assert 40 < int(found[1]) < 70
    assert "`defaultRequestTTL`" in told


def test_a_run_whose_requests_are_refused_in_time_ends(replayed, capsys):
    """After seven hours in which nothing else happened."""
    assert replayed("defaultRequestTTL: 7h", "replay") == 0
    assert "80 requests replayed" in capsys.readouterr().out
