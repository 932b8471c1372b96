"""What the night believes of a command, and how a picker is made to stutter."""

import asyncio
import signal

import pytest

from docs.night import Night, stuttering
from docs.walkthrough import Walk


def night(folder):
    walk = Walk(folder, "/usr/bin:/bin", WHO="pod-3")
    return Night(walk, stage=None, config=folder / "config.yaml")


async def test_an_answer_is_on_the_page_with_what_it_took(tmp_path):
    played = night(tmp_path)
    assert await played.answers("echo $WHO is slow", "pod-3") == "pod-3 is slow\n"
    page = "\n".join(played.walk.page)
    assert "$ echo $WHO is slow\npod-3 is slow" in page
    assert "It took 0." in page


async def test_a_command_that_does_not_name_the_culprit_ends_the_night(tmp_path):
    """The page would say that it answers."""
    with pytest.raises(SystemExit, match=r"without \['pod-4'\]"):
        await night(tmp_path).answers("echo $WHO is slow", "is slow", "pod-4")


async def test_a_picker_that_stutters_runs_when_it_is_over():
    told, seen = [], asyncio.Event()

    class Picker:
        def signal(self, number):
            told.append(number)
            if len(told) == 3:
                seen.set()

    async with stuttering(Picker()):
        await seen.wait()
    assert told[:3] == [signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP]
    assert told[-1] == signal.SIGCONT
