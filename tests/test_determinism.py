import os
import subprocess
import sys

from tests.decision_digest import REQUESTS

PICKERS = ("weighted-random-picker", "random-picker", "max-score-picker")


def started(*, hash_seed, seed):
    """A process that decides by itself."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.decision_digest", str(seed), *PICKERS],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.getcwd()},
    )


def digests(process):
    """By picker."""
    output, _ = process.communicate()
    assert process.returncode == 0
    rows = [line.split() for line in output.splitlines()]
    assert [int(lines) for _, lines, _ in rows] == [REQUESTS] * len(PICKERS), "all are logged"
    return {picker: digest for picker, _, digest in rows}


def test_the_same_seed_decides_alike_in_every_process():
    """Strings hash differently in the two; no decision and no score depends on it."""
    with (
        started(hash_seed=1, seed=7) as one,
        started(hash_seed=2, seed=7) as two,
        started(hash_seed=1, seed=8) as three,
    ):
        first, second, other_seed = digests(one), digests(two), digests(three)
    assert set(first) == set(PICKERS)
    assert first == second
    for picker in ("weighted-random-picker", "random-picker"):
        assert first[picker] != other_seed[picker], "the seed decides where dice are thrown"
    assert len(set(first.values())) == len(PICKERS)
