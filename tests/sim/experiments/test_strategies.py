"""`sim strategies`: names, and configurations that epp serve takes."""

import json

import pytest

from epp.configuration.build import plugin_tables
from epp.configuration.config import load_config
from sim.__main__ import main
from sim.cluster.built_in import configurations
from sim.cluster.policies import built_in


def test_every_name_has_a_sentence(capsys):
    """One line each, and the same as JSON."""
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(built_in())
    assert main(["strategies", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == list(built_in())
    assert all(one["idea"].endswith(".") for one in told.values())
    assert "engines' events" in told["dynamo"]["omissions"]
    assert told["homing"]["omissions"] == ""
    assert lines[list(told).index("dynamo")].endswith(f"{told['dynamo']['omissions']}.")
    assert "Leaves out" not in lines[list(told).index("homing")]


@pytest.mark.parametrize("name", ["default", "homing"])
def test_a_name_gives_its_configuration(capsys, name):
    """As it is decided by."""
    assert main(["strategies", name]) == 0
    text = capsys.readouterr().out
    assert text == configurations()[name]
    assert load_config(text, name, plugin_tables()).profile.scorers
    assert main(["strategies", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == text


@pytest.mark.parametrize(
    ("name", "why"),
    [("homin", "did you mean `homing`?"), ("round-robin", "is a baseline of the simulator")],
)
def test_a_name_without_one_is_refused(capsys, name, why):
    """In a sentence, as any wrong argument."""
    assert main(["strategies", name]) == 2
    assert why in capsys.readouterr().err
