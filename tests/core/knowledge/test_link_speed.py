import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.candidates import Candidates, Columns
from epp.core.knowledge.link_speed import (
    BYTES_PER_S_MAX,
    BYTES_PER_S_MIN,
    DOUBLED_S,
    FORGOTTEN_S,
    RANKS_MAX,
    REMEMBERED_S,
    RISES_MAX,
    LinkSpeeds,
)
from epp.core.types import KvTransfers

PAGE_S = 0.2
LINK = 2.5e9


class Pool:
    """Endpoints in slots 0, 1, ... whose engines receive KV blocks and count them."""

    def __init__(self, endpoints, ranks=1):
        self.columns = Columns()
        for _ in range(endpoints):
            self.columns.add_slot()
        self.speeds = LinkSpeeds(self.columns)
        self.ranks = ranks
        self.now = 1_000.0
        self.sums = {slot: [0.0, 0.0, 0.0] for slot in range(endpoints)}
        for slot in range(endpoints):
            self.page(slot)

    def page(self, slot, received_tokens=math.nan):
        size_bytes, ended, ended_s = self.sums[slot]
        told = KvTransfers(
            received_bytes=size_bytes, ended=ended, ended_s=ended_s, received_tokens=received_tokens
        )
        self.speeds.scraped(slot, told, self.now)
        self.now += PAGE_S

    def receive(self, slot, size_bytes=1e9, *, bytes_per_s=LINK, requests=1):
        """Count transfers of equal size, whose ranks share the speed."""
        sums = self.sums[slot]
        sums[0] += size_bytes * requests
        sums[1] += self.ranks * requests
        sums[2] += self.ranks * requests * size_bytes / bytes_per_s
        self.page(slot)

    def of(self, slot, configured=20e9):
        found = Candidates(self.columns, _slots(slot), self.now, affinities={}).link_bytes_per_s(
            configured
        )
        return found if isinstance(found, float) else found.item(0)


def _slots(slot):
    return np.array([slot])


def test_the_speed_is_that_of_the_bytes_in_their_time():
    pool = Pool(2)
    assert pool.of(0) == 20e9
    pool.receive(0)
    assert pool.of(0) == pytest.approx(LINK)
    # The other endpoint, from which nothing is known, has the speed of the pool.
    assert pool.of(1) == pytest.approx(LINK)
    pool.receive(1, bytes_per_s=2 * LINK)
    assert (pool.of(0), pool.of(1)) == (pytest.approx(LINK), pytest.approx(2 * LINK))


@given(st.lists(st.integers(1, 8), min_size=10, max_size=60), st.integers(0, 1_000))
def test_transfers_that_share_the_network_hide_its_speed_only_a_little(sharing, seed):
    """Each of n transfers at once takes n times as long. The measured speed is never above that of
    the network, and it is that of the network if some transfers are alone.
    """
    pool, random = Pool(1), Random(seed)
    for others in sharing[:RISES_MAX]:
        pool.receive(0, random.uniform(1e7, 1e10), bytes_per_s=LINK / others)
    alone = sum(others == 1 for others in sharing[:RISES_MAX])
    assert LINK / max(sharing) <= pool.of(0) * 1.001
    assert pool.of(0) <= LINK * 1.001
    if alone > 0.1 * len(sharing[:RISES_MAX]):
        assert pool.of(0) == pytest.approx(LINK)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_ranks_of_an_engine_count_their_parts(ranks):
    """A page may show several requests, and one in ten pages only some ranks of a request."""
    pool, random = Pool(3, ranks=ranks), Random(1)
    for _ in range(120):
        pool.receive(random.randrange(3), requests=random.choice([1, 1, 2, 3]))
    assert [pool.of(slot) for slot in range(3)] == pytest.approx([LINK] * 3)
    sums = pool.sums[0]
    if ranks > 1:
        sums[0], sums[1], sums[2] = sums[0] + 1e8, sums[1] + 1, sums[2] + ranks * 1e8 / LINK
        pool.page(0)
        assert pool.of(0) == pytest.approx(LINK)


def test_several_requests_on_a_first_page_do_not_look_like_ranks():
    pool = Pool(3)
    pool.receive(0)
    pool.receive(1)
    pool.receive(2, requests=6)
    assert pool.of(2) == pytest.approx(LINK)


HOSTILE = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1e15),
    st.sampled_from([0.0, 1.0, 1e15, -1.0, 0.5]),
)


@given(st.lists(st.tuples(HOSTILE, HOSTILE, HOSTILE, HOSTILE), max_size=40))
def test_no_page_has_an_effect_on_other_endpoints(pages):
    """The speed of the liar itself stays in the range of plausible ones."""
    pool = Pool(4)
    for slot in (1, 2, 3):
        pool.receive(slot)
    for tokens, size_bytes, ended, ended_s in pages:
        told = KvTransfers(
            received_tokens=tokens, received_bytes=size_bytes, ended=ended, ended_s=ended_s
        )
        pool.speeds.scraped(0, told, pool.now)
        pool.now += PAGE_S
        pool.speeds.tick(pool.now)
        assert BYTES_PER_S_MIN <= pool.of(0) <= BYTES_PER_S_MAX * RANKS_MAX
    assert [pool.of(slot) for slot in (1, 2, 3)] == pytest.approx([LINK] * 3)
    assert pool.columns.pool_link_bytes_per_s == pytest.approx(LINK)


def test_sums_that_fall_begin_anew():
    pool = Pool(1)
    pool.receive(0)
    pool.sums[0] = [0.0, 0.0, 0.0]
    pool.page(0)
    assert pool.speeds.ignored == 1
    assert pool.of(0) == pytest.approx(LINK)
    pool.receive(0, bytes_per_s=4 * LINK)
    assert pool.of(0) == pytest.approx(4 * LINK)


@pytest.mark.parametrize(
    "implausible",
    [
        {"received_bytes": 1e9, "ended": 1.0, "ended_s": 0.0},
        {"received_bytes": 0.0, "ended": 1.0, "ended_s": 1.0},
        {"received_bytes": 1e15, "ended": 1.0, "ended_s": 1e-6},
        {"received_bytes": 1.0, "ended": 1.0, "ended_s": 1e6},
        {"received_bytes": math.nan, "ended": 1.0, "ended_s": 1.0},
        {"received_bytes": 1e9, "ended": 1.0},
        {"received_bytes": 1e9, "ended": 0.5, "ended_s": 1.0},
    ],
)
def test_an_implausible_speed_is_ignored_and_counted(implausible):
    pool = Pool(1)
    pool.speeds.scraped(0, KvTransfers(**implausible), pool.now)
    assert pool.speeds.ignored == 1
    assert pool.of(0) == 20e9


def test_an_endpoint_that_restarted_has_the_speed_of_the_others():
    pool = Pool(3)
    pool.receive(0, bytes_per_s=9 * LINK)
    pool.receive(1)
    pool.receive(2)
    pool.speeds.forget(0)
    assert pool.of(0) == pytest.approx(LINK)


def test_a_speed_that_nothing_confirms_is_doubled_and_then_forgotten():
    """A network that was slow for a while is tried again."""
    pool = Pool(2)
    pool.receive(0)
    measured_s = pool.now - PAGE_S
    pool.speeds.tick(measured_s + REMEMBERED_S)
    assert pool.of(0) == pytest.approx(LINK)
    pool.speeds.tick(measured_s + 3 * DOUBLED_S)
    assert pool.of(0) == pytest.approx(4 * LINK)
    pool.speeds.tick(measured_s + FORGOTTEN_S + 1.0)
    assert pool.of(0) == 20e9
    pool.receive(1)
    assert pool.of(0) == pytest.approx(LINK)


def test_only_a_pool_whose_engines_count_transfers_waits_for_the_first():
    """An engine whose blocks are written by the sender counts tokens and no transfer."""
    columns = Columns()
    assert not Candidates(columns, _slots(0), 0.0, affinities={}).link_unmeasured
    pool = Pool(2)

    def unmeasured():
        return Candidates(pool.columns, _slots(0), 0.0, affinities={}).link_unmeasured

    assert unmeasured()
    pool.page(0, received_tokens=0.0)
    assert unmeasured()
    pool.page(0, received_tokens=512.0)
    assert not unmeasured()
    assert pool.of(0) == 20e9
    pool.receive(1)
    assert not unmeasured()
    assert pool.of(0) == pytest.approx(LINK)
