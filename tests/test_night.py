"""The parts of `make night`: its commands, its faults and one of its scenes."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest

from bench.chaos.load import Load
from bench.effect import NoEffectError, is_stopped
from docs.night import ORDINARY, Night, PromptTokens, opened, stuttering, which_pod, why_there
from docs.walkthrough import Walk
from tests.envoy.rig import ENVOY


def night(folder):
    walk = Walk(folder, "/usr/bin:/bin", WHO="pod-3")
    return Night(walk, stage=None, config=folder / "config.yaml")


async def test_an_answer_is_on_the_page_with_what_it_took(tmp_path):
    played = night(tmp_path)
    assert await played.answers("echo $WHO is slow", "pod-3") == "pod-3 is slow\n"
    page = "\n".join(played.walk.page)
    assert "$ echo $WHO is slow\npod-3 is slow" in page
    assert "`echo $WHO` took 0." in page


async def test_a_command_that_does_not_name_the_culprit_ends_the_night(tmp_path):
    """The page would say that it answers."""
    with pytest.raises(SystemExit, match=r"without \['pod-4'\]"):
        await night(tmp_path).answers("echo $WHO is slow", "is slow", "pod-4")


class Picker:
    """A process that can be stopped, in place of a picker."""

    def __init__(self, pid, *, obeys=True):
        self.pid = pid
        self.sent = []
        self.obeys = obeys

    def signal(self, number):
        self.sent.append(number)
        if self.obeys:
            os.kill(self.pid, number)


@contextlib.asynccontextmanager
async def process():
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; sys.stdin.read()", stdin=asyncio.subprocess.PIPE
    )
    try:
        yield child.pid
    finally:
        child.kill()
        await child.wait()


async def test_a_picker_that_stutters_is_stopped_and_runs_when_it_is_over():
    async with process() as pid:
        picker = Picker(pid)
        async with stuttering(picker):
            assert picker.sent[0] == signal.SIGSTOP
        assert picker.sent[-1] == signal.SIGCONT
        assert not is_stopped(pid)


async def test_a_picker_that_goes_on_ends_the_night():
    """Without this proof the page would show a healthy picker and call it slow."""
    async with process() as pid:
        picker = Picker(pid, obeys=False)
        with pytest.raises(NoEffectError, match="SIGSTOP to process"):
            async with stuttering(picker):
                pass


def test_the_mean_prompt_is_of_the_requests_since_then():
    before = PromptTokens(tokens=4_000, requests=10)
    assert PromptTokens(tokens=12_000, requests=12).mean_since(before) == 4_000
    assert before.mean_since(before) == 0


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
async def test_two_questions_of_the_night_are_answered(tmp_path):
    """Real pods, pickers and Envoy: the short form of `make night`, two scenes of it."""
    async with opened(tmp_path, stretch_s=8.0) as played:
        async with Load(played.stage.gateway, ORDINARY, seed=1).running():
            await why_there(played)
            await which_pod(played)
        page = "\n".join(played.walk.page)
    assert "## Why did it go there?" in page
    assert "## Which pod, and since when?" in page
    assert f"pod-{played.stage.pods.ports[1]} ejected since" in page
