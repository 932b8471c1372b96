import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.rendezvous import identity_hash, rendezvous_weights

keys = st.integers(0, 2**64 - 1)
ids = st.lists(st.text(max_size=12), min_size=1, max_size=30, unique=True)


def order(names, key):
    """Names from the first choice to the last."""
    hashes = np.array([identity_hash(name) for name in names], dtype=np.uint64)
    return [names[at] for at in np.argsort(rendezvous_weights(hashes, key))[::-1]]


@given(ids, keys, st.randoms())
def test_the_order_does_not_depend_on_the_slots(names, key, random):
    """Pickers discover the same endpoints in another order; a weight is that of its endpoint."""
    shuffled = random.sample(names, len(names))
    assert order(names, key) == order(shuffled, key)


@given(ids, keys, st.data())
def test_who_leaves_moves_only_its_own_keys(names, key, data):
    """The order of the others stays as it was."""
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    assert [name for name in order(names, key) if name != gone] == order(left, key)


def test_keys_that_differ_little_are_spread_evenly():
    """Of 8,000 keys in a row each of 8 endpoints wins a thousand, within five deviations.

    So do its second choices, wherever the first one is: who takes over shares the load.
    """
    names = [f"uid-{number}:8000" for number in range(8)]
    orders = [order(names, key) for key in range(8_000)]
    for place, expected, deviation in ((0, 1_000, 30), (1, 1_000, 30)):
        won = [sum(one[place] == name for one in orders) for name in names]
        assert all(abs(count - expected) < 5 * deviation for count in won), won
    pairs = {}
    for first, second, *_ in orders:
        pairs[first, second] = pairs.get((first, second), 0) + 1
    assert len(pairs) == 56
    assert all(abs(count - 8_000 / 56) < 5 * 12 for count in pairs.values())


def test_the_identities_are_left_as_they_were():
    """They are the pool's."""
    identities = np.arange(5, dtype=np.uint64)
    rendezvous_weights(identities, 7)
    assert identities.tolist() == [0, 1, 2, 3, 4]


def test_every_process_finds_the_same():
    """Strings hash differently there; these numbers are part of how replicas agree."""
    program = (
        "import numpy as np; from epp.core.knowledge.rendezvous import *;"
        "print(rendezvous_weights(np.array([identity_hash('uid-1:8000')], np.uint64), 2**63).item())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert told == {"15120434083482514728\n"}
