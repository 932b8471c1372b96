"""What one body can cost everybody else: the attacks of `bench/hostile_bodies`, each at its worst."""

import json
import time

import pytest

from bench.decision import Chats
from bench.hostile_bodies import ATTACKS, MB, Loop, most_let_in, serving_garbage_collector

COST_MAX = 40
"""In units of decoding an ordinary chat of the same length with the standard library: twice what the
worst takes, and about 50 ms."""
PEAK_MAX = 24
"""Bytes allocated for a byte of the body."""
ORDINARY = Chats(MB, 600).body()


def ordinary_s():
    started = time.thread_time()
    json.loads(ORDINARY)
    return time.thread_time() - started


def cost(loop, attack, body):
    """Of the best of some repetitions, as many as it takes to be sure that it is too much."""
    with serving_garbage_collector():
        unit_s = served_s = float("inf")
        for _ in range(12):
            unit_s = min(unit_s, ordinary_s())
            served_s = min(served_s, loop.serve(attack, body))
            if served_s <= COST_MAX / 2 * unit_s:
                break
        return served_s / unit_s


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_megabyte_stops_the_loop_for_long(attack):
    """Neither as many pieces as fit nor the most that are let in cost more than an ordinary chat by
    some factor, in time and in memory.
    """
    loop = Loop()
    _, most = most_let_in(attack, MB)
    flood = attack.body(MB, attack.pieces_max(MB))
    for body in filter(None, (flood, most)):
        assert cost(loop, attack, body) <= COST_MAX
        assert loop.peak_bytes(attack, body) <= PEAK_MAX * len(body)
