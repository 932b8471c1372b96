import asyncio
import os
import subprocess
import sys

import pytest

from epp.shell.process.memory import (
    POLL_S,
    TRIM_AGAIN_S,
    TRIM_FROM_BYTES,
    MemoryReturn,
    malloc_trim,
    memory_limit_bytes,
    resident_bytes,
)
from epp.shell.process.pressure import MemoryPressure

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(
    ("told", "expected"),
    [("104857600\n", 104_857_600), ("max\n", MACHINE), ("9223372036854771712\n", MACHINE)],
)
def test_the_limit_of_the_container_counts(name, told, expected, tmp_path):
    """In either version of control groups; without a limit it is what the machine has."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(told)
    assert memory_limit_bytes(tmp_path) == expected


def test_without_control_groups_it_is_what_the_machine_has(tmp_path):
    """No file is there to be read."""
    assert memory_limit_bytes(tmp_path / "none") == MACHINE


class Process:
    """A process whose memory we choose."""

    def __init__(self):
        self.resident = 100 * 2**20
        self.held = 0
        self.trimmed = 0

    def trim(self):
        self.trimmed += 1

    def returning(self):
        return MemoryReturn(
            lambda: self.held, resident=lambda: self.resident, trim=self.trim, poll_s=0.0
        )


async def test_after_a_peak_memory_is_given_back_once():
    """While it is in use there is nothing to give, and what stays is what the process needs."""
    process = Process()
    returning = process.returning()
    assert not await returning.look()
    process.resident += 10 * TRIM_FROM_BYTES
    process.held = 10 * TRIM_FROM_BYTES
    assert not await returning.look()
    process.held = 0
    assert await returning.look()
    assert not await returning.look()
    process.resident -= 9 * TRIM_FROM_BYTES
    assert not await returning.look()
    process.resident += TRIM_FROM_BYTES
    assert await returning.look()
    assert process.trimmed == 2


async def test_where_the_allocator_cannot_pressure_is_told_all_the_same():
    """Nothing is given back, and there is less to give."""
    told = []
    pressure = MemoryPressure(1_000)
    returning = MemoryReturn(
        lambda: 0, resident=lambda: 950, trim=None, pressure=pressure, pressed=told.append
    )
    assert not await returning.look()
    returning.weigh()
    assert told == [pressure]
    assert pressure.level == 2


async def test_pressure_is_weighed_again_and_again_and_told_when_it_changes():
    """By the task itself, from what the process holds at each look."""
    held = iter([100, 850, 750, 600, 600])
    told = []
    done = asyncio.Event()

    def resident():
        used = next(held, None)
        if used is None:
            done.set()
        return used or 600

    pressure = MemoryPressure(1_000)
    task = asyncio.create_task(
        MemoryReturn(
            lambda: 0,
            resident=resident,
            trim=None,
            pressure=pressure,
            pressed=lambda pressed: told.append(pressed.index_share),
            poll_s=0.0,
        ).run()
    )
    await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert told == [0.875, 1.0]


async def test_under_pressure_memory_is_given_back_now_and_then_without_a_peak():
    """Often enough for what the indexes gave up, not at each look: it takes its time."""
    process = Process()
    pressure = MemoryPressure(110 * 2**20)
    returning = MemoryReturn(
        lambda: 0, resident=lambda: process.resident, trim=process.trim, pressure=pressure
    )
    await returning.look()
    assert process.trimmed == 0
    returning.weigh()
    assert pressure.level
    looks = 2 * int(TRIM_AGAIN_S / POLL_S)
    for _ in range(looks + 2):
        await returning.look()
        returning.weigh()
    assert 2 <= process.trimmed <= 3


async def test_what_was_freed_really_goes_back_to_the_machine():
    """Objects of the size of pieces of bodies, some of which stay."""
    trim = malloc_trim()
    if trim is None:
        pytest.skip("the allocator of this machine has no malloc_trim")
    trim()
    returning = MemoryReturn(lambda: 0, trim=trim)
    before = resident_bytes()
    pieces = [b"x" * (62_000 + number % 7) for number in range(4_000)]
    stays = pieces[::50]
    held = resident_bytes() - before
    assert held > 200 * 2**20
    del pieces
    assert await returning.look()
    assert resident_bytes() - before < 0.2 * held
    assert len(stays) == 80


def test_large_blocks_are_given_back_at_once():
    """A block of two megabytes that is freed below one that stays is no part of the process."""
    asked = """
from epp.shell.process.memory import LARGE_BYTES, tune_allocator, resident_bytes
tune_allocator()
first, kept = bytearray(b"x") * (32 * LARGE_BYTES), []
del first
empty = resident_bytes()
for _ in range(10):
    freed = bytearray(b"x") * (2 * LARGE_BYTES)
    kept.append(bytearray(b"x") * (LARGE_BYTES // 4))
    del freed
print((resident_bytes() - empty) / LARGE_BYTES)
"""
    told = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, check=True, text=True, timeout=60
    )
    assert float(told.stdout) < 10 / 4 + 1
