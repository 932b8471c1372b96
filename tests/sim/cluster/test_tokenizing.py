"""Prompts that a renderer makes tokens of before they are placed."""

import pytest

from epp.core.protocol.waiting import Resolver
from sim.cluster.loop import Loop
from sim.cluster.simulated_request import Fate
from sim.cluster.tokenizing import SimulatedRenderer, TokenizeSettings
from tests.builders import request
from tests.sim.made import arrivals, cluster, ran


class Asked:
    def __init__(self, timeout_s=1.0):
        self.loop = Loop()
        settings = TokenizeSettings(seconds_per_token=0.001, timeout_s=timeout_s)
        self.renderer: Resolver = SimulatedRenderer(settings, self.loop)
        self.resumed = []

    def ask(self, tokens):
        def resume(_):
            self.resumed.append(self.loop.now)

        return self.renderer.begin(request(prompt_tokens=tokens), b"", resume)


def test_one_prompt_after_the_other():
    """Each takes its time."""
    asked = Asked()
    asked.ask(100)
    asked.ask(200)
    asked.loop.run()
    assert asked.resumed == pytest.approx([0.1, 0.3])
    assert (asked.renderer.found, asked.renderer.timeouts) == (2, 0)


def test_nobody_waits_longer_than_the_deadline():
    """The renderer works on all the same, and the next one waits for it too."""
    asked = Asked(timeout_s=0.25)
    asked.ask(300)
    asked.ask(10)
    asked.loop.run()
    assert asked.resumed == pytest.approx([0.25, 0.25])
    assert (asked.renderer.found, asked.renderer.timeouts) == (0, 2)


def test_who_left_is_not_resumed():
    """And who has no tokens does not wait."""
    asked = Asked()
    asked.ask(100).cancel()
    assert asked.ask(0) is None
    asked.loop.run()
    assert asked.resumed == []


def test_requests_are_served_later_and_all_the_same():
    """By as much as their prompt takes."""
    given = list(arrivals(1))
    (plain,), _ = ran(given)
    tokenize = TokenizeSettings(seconds_per_token=1e-4, timeout_s=60.0)
    requests = []
    one = cluster(given, ended=requests.append, tokenize=tokenize)
    one.run()
    (waited,) = requests
    assert waited.fate is plain.fate is Fate.COMPLETE
    expected_s = 1e-4 * given[0].prompt_tokens
    assert waited.finished_at - plain.finished_at == pytest.approx(expected_s, abs=0.05)
