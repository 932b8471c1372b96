"""The smallest number of pods, in few tries, also where a try misleads."""

from random import Random

import pytest

from sim.experiments.pod_search import next_step, smallest_of_all


def searched(enough, *, start, highest):
    """(what is found, which numbers were tried)."""
    known = {}
    while True:
        step = next_step(known, start=start, highest=highest)
        if step.ask is None:
            return step.found, list(known)
        assert step.ask not in known
        assert 1 <= step.ask <= highest
        known[step.ask] = enough(step.ask)


@pytest.mark.parametrize("highest", [1, 2, 3, 7, 64])
def test_it_finds_what_trying_every_number_finds(highest):
    """From wherever it begins, and also if none is enough."""
    for needed in range(1, highest + 2):
        for start in range(1, highest + 1):
            found, _ = searched(
                lambda pods, needed=needed: pods >= needed, start=start, highest=highest
            )
            table = {pods: pods >= needed for pods in range(1, highest + 1)}
            assert found == smallest_of_all(table) == (needed if needed <= highest else None)


def test_it_looks_no_lower_than_it_is_told():
    """Fewer are known not to be enough, whatever a try of them would say."""
    for lowest in range(1, 9):
        known = {}
        while (step := next_step(known, start=8, lowest=lowest, highest=64)).ask is not None:
            known[step.ask] = step.ask >= 3
        assert step.found == max(3, lowest)
        assert min(known) >= lowest


def test_it_tries_few():
    """Of 256 numbers no more than two a doubling, from a start that is far off too."""
    for needed in range(1, 257):
        _, tried = searched(lambda pods, needed=needed: pods >= needed, start=16, highest=256)
        assert len(tried) <= 2 * 8 + 2
    _, tried = searched(lambda pods: pods >= 17, start=16, highest=256)
    assert sorted(tried) == [16, 17, 18], "a good guess costs the number, and both beside it"


def test_a_number_that_is_enough_by_luck_is_not_taken():
    """The next one above it is not: what is found lies beyond that."""
    found, tried = searched(lambda pods: pods == 8 or pods >= 12, start=8, highest=64)
    assert found == 12
    assert {8, 9, 11, 12, 13} <= set(tried)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_is_noisy_its_neighbours_agree(seed):
    """The one below is not enough, it is itself, and so is the one above."""
    random = Random(seed)
    table = {pods: random.random() < pods / 40 for pods in range(1, 65)}
    found, _ = searched(table.__getitem__, start=random.randint(1, 64), highest=64)
    if found is None:
        assert not table[64]
        return
    assert table[found]
    assert found == 64 or table[found + 1]
    assert found == 1 or not table[found - 1]


def test_what_is_known_is_not_asked_again():
    """A search that was stopped goes on where it was."""
    known = {8: False, 9: False, 11: True, 10: True}
    assert next_step(known, start=8, highest=64).ask is None
    assert next_step(known, start=8, highest=64).found == 10
