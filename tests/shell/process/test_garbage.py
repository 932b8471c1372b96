"""Freeing soon what only the garbage collector frees."""

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from epp.shell.process.garbage import PAUSE_S, SHARE_MAX, WHOLE_PAUSE_S_MIN, GarbageCollection


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


class Collector:
    """A collector whose looks at the whole take as long as we choose, and each young one too."""

    def __init__(self, *, young_s=0.0, whole_s=0.0):
        self.took_s = {1: young_s, 2: whole_s}
        self.looked = []
        self.now = 0.0

    def collect(self, generation):
        self.looked.append(generation)
        self.now += self.took_s[generation]

    def after(self, looks):
        garbage = GarbageCollection(self.collect, lambda: self.now)
        for _ in range(looks):
            garbage.look()
        return self.looked


@pytest.mark.parametrize("whole_s", [0.001, 0.015, 0.5])
def test_looks_at_the_whole_take_a_bounded_share_of_the_loop(whole_s):
    """The longer one takes the rarer they are; at what is new there is one each second."""
    looked = Collector(whole_s=whole_s).after(5_000)
    assert looked.count(1) == 5_000
    whole = looked.count(2)
    assert whole * whole_s <= SHARE_MAX * 5_000 * PAUSE_S + whole_s
    assert whole * WHOLE_PAUSE_S_MIN <= 5_000 * PAUSE_S
    least = max(WHOLE_PAUSE_S_MIN, whole_s / SHARE_MAX) + PAUSE_S
    assert whole >= 5_000 * PAUSE_S / least - 1


def test_much_young_garbage_does_not_make_looks_rare():
    """There would be more of it at the next one."""
    assert Collector(young_s=0.5).after(100) == Collector().after(100)


async def test_it_looks_until_it_is_cancelled():
    """Again and again."""
    looked = asyncio.Queue()
    running = asyncio.create_task(GarbageCollection(looked.put_nowait, pause_s=0.0).run())
    for _ in range(4):
        await asyncio.wait_for(looked.get(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_what_is_there_at_the_start_is_spared():
    """In a process of its own: what is frozen stays so."""
    asked = (
        "import gc; from epp.shell.process.garbage import exempt_existing_objects; "
        "before = len(gc.get_objects()); exempt_existing_objects(); "
        "print(before, len(gc.get_objects()), gc.get_freeze_count())"
    )
    told = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, check=True, text=True, timeout=60
    )
    before, left, spared = map(int, told.stdout.split())
    assert before > 10_000
    assert left < before / 100
    assert spared > 0.9 * before
