"""Sequences on a disk that outlives the process."""

import pytest

from sim.caches.behaviour import Stored
from sim.caches.mlx_disk import MEASURED_TOKENS, RESTORE_S, SAVE_S, Disk, measured_s
from tests.sim.caches.made import begun, ended, opened, request, served


def test_a_new_process_restores_what_the_last_one_wrote():
    """A whole sequence that begins the prompt; the first look-up reads it, the next does not."""
    cache = opened("mlx-disk")
    served(cache, (1, 4_096))
    cache = opened("mlx-disk", before=cache)
    found = cache.fetch(request((1, 4_096), (2, 10)), 0, 0.0)
    assert (found.tokens, found.restore_s) == (4_096, pytest.approx(2.0e-3))
    assert cache.fetch(request((1, 4_096), (3, 10)), 0, 0.0).restore_s == 0.0


def test_a_new_pod_has_nothing():
    """Without the disk of the last one."""
    served(opened("mlx-disk"), (1, 4_096))
    assert begun(opened("mlx-disk"), request((1, 4_096), (2, 10))) == 0


def test_half_a_sequence_is_not_read():
    """The disk knows whole sequences; memory can trim, and is not asked to."""
    cache = opened("mlx-disk")
    served(cache, (1, 4_096), (2, 500))
    cache = opened("mlx-disk", before=cache)
    assert begun(cache, request((1, 4_096), (3, 500))) == 0


def test_short_sequences_are_not_written():
    """Below 256 tokens, and then nothing is waited for."""
    cache = opened("mlx-disk")
    one = request((1, 240))
    begun(cache, one)
    assert ended(cache, one) == 0.0
    assert cache.disk.sequences == []


def test_a_sequence_is_written_once():
    """The prompt and the answer behind it: two files; the same again: none."""
    cache = opened("mlx-disk")
    times_s = []
    for _ in range(2):
        one = request((1, 4_088), answer=3)
        begun(cache, one)
        times_s.append(ended(cache, one))
    assert times_s == [pytest.approx(measured_s(SAVE_S, 4_088) + 54e-3), 0.0]
    assert [stored.tokens for stored in cache.disk.sequences] == [4_088, 4_096]


def test_four_inserts_of_148_mb_in_400_mb_leave_the_last_two():
    """The published probe: 0.148, 0.297, 0.297 and 0.297 GB on disk, the survivors are 2 and 3."""
    disk = Disk(400_000_000)
    prompts = [request((number, 4_096)).parts for number in range(4)]
    steps = []
    for prompt in prompts:
        disk.write(Stored(prompt, 1), 148_400_000)
        steps.append((round(disk.kept_bytes / 1e9, 3), len(disk.sequences)))
    assert steps == [(0.148, 1), (0.297, 2), (0.297, 2), (0.297, 2)]
    assert [disk.read(prompt) is not None for prompt in prompts] == [False, False, True, True]


def test_what_is_read_stays_longer():
    """`last_used_at` is that of the last reading."""
    disk = Disk(300)
    prompts = [request((number, 4_096)).parts for number in range(4)]
    for prompt in prompts[:3]:
        disk.write(Stored(prompt, 1), 100)
    disk.read(prompts[0])
    disk.write(Stored(prompts[3], 1), 100)
    assert [disk.read(prompt) is not None for prompt in prompts] == [True, False, True, True]


def test_nothing_stays_that_is_larger_than_the_disk():
    """It goes as it came."""
    disk = Disk(300)
    disk.write(Stored(request((1, 4_096)).parts, 1), 301)
    assert disk.kept_bytes == 0


@pytest.mark.parametrize("times_s", [RESTORE_S, SAVE_S])
def test_times_are_the_measured_ones_and_rise_between_them(times_s):
    """At the four points what was measured; from nothing, and on behind the last."""
    assert [measured_s(times_s, tokens) for tokens in MEASURED_TOKENS] == pytest.approx(times_s)
    curve = [measured_s(times_s, tokens) for tokens in range(0, 200_000, 1_000)]
    assert curve[0] == 0.0
    assert curve == sorted(curve)
