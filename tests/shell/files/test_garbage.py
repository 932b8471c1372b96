"""Freeing soon what only the garbage collector frees."""

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from epp.shell.files.garbage import PAUSE_S_MIN, SHARE_MAX, GarbageCollection


class Cycle:
    """It holds itself."""

    def __init__(self):
        self.itself = self


def test_a_look_frees_a_cycle():
    """Whatever the collector's own thresholds are."""
    gc.disable()
    try:
        lost = weakref.ref(Cycle())
        assert lost() is not None
        GarbageCollection().look()
        assert lost() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("took_s", [0.0, 0.0001, 0.005, 0.3])
def test_looks_take_a_bounded_share_of_the_loop(took_s):
    """Where there is much to look at they are rare; the usual one is each second."""
    now = 0.0

    def collect():
        nonlocal now
        now += took_s

    garbage = GarbageCollection(collect, lambda: now)
    garbage.look()
    assert garbage.pause_s >= PAUSE_S_MIN
    assert now <= SHARE_MAX * garbage.pause_s * (1 + 1e-9)
    took_s = 0.0
    garbage.look()
    assert garbage.pause_s == PAUSE_S_MIN


async def test_it_looks_until_it_is_cancelled():
    """Again and again."""
    looked = asyncio.Queue()
    garbage = GarbageCollection(lambda: looked.put_nowait(None), lambda: 0.0)
    garbage.look()
    garbage.pause_s = 0.0
    running = asyncio.create_task(garbage.run())
    for _ in range(2):
        await asyncio.wait_for(looked.get(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_what_is_there_at_the_start_is_spared():
    """In a process of its own: what is frozen stays so."""
    asked = (
        "import gc; from epp.shell.files.garbage import spare_what_is_there; "
        "before = len(gc.get_objects()); spare_what_is_there(); "
        "print(before, len(gc.get_objects()), gc.get_freeze_count())"
    )
    told = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, check=True, text=True, timeout=60
    )
    before, left, spared = map(int, told.stdout.split())
    assert before > 10_000
    assert left < before / 100
    assert spared > 0.9 * before
