"""What there is to type behind `sim`."""

import re

import pytest

from sim.commands import run


def asked(capsys, *arguments):
    """What a command line that ends by itself has printed."""
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_every_command_says_what_it_is_for(capsys):
    """In the list of all of them, and when it is asked itself."""
    told = asked(capsys, "--help")
    commands = re.findall(r"^    (\w+)(?: |$)", told, re.MULTILINE)
    assert {"replay", "compare", "sweep", "tune", "size", "leaderboard"} <= set(commands)
    for command in commands:
        assert asked(capsys, command, "--help").startswith(f"usage: sim {command} ")
