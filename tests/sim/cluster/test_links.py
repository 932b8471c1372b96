"""Transfers between pods, and the fair shares of their NICs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cluster.links import Network, Nics, exposed_share
from sim.cluster.loop import Loop

GB = 1e9


def start(network, source, target, size_bytes, ended, *, setup_s=0.0):
    ends = []

    def done():
        ends.append(network._loop.now)
        ended.append(network._loop.now)

    network.start(source, target, size_bytes=size_bytes, setup_s=setup_s, done=done)
    return ends


def test_a_lone_transfer_takes_its_set_up_and_its_bytes():
    """The slower side decides."""
    loop, ended = Loop(), []
    start(Network(loop), Nics(10 * GB), Nics(40 * GB), 5 * GB, ended, setup_s=0.1)
    loop.run()
    assert ended == [pytest.approx(0.6)]


def test_two_transfers_share_a_source_until_one_ends():
    """1 GB and 3 GB at 1 GB/s: half each for 2 s, then the longer one alone for 2 s."""
    loop, ended = Loop(), []
    network, source = Network(loop), Nics(GB)
    short = start(network, source, Nics(GB), GB, ended)
    long = start(network, source, Nics(GB), 3 * GB, ended)
    loop.run()
    assert short == [pytest.approx(2.0)]
    assert long == [pytest.approx(4.0)]


def test_a_transfer_gets_the_smaller_of_both_shares():
    """Three sources of 1 GB/s to one target of 1.5 GB/s: 0.5 GB/s each."""
    loop, ended = Loop(), []
    network, target = Network(loop), Nics(1.5 * GB)
    for _ in range(3):
        start(network, Nics(GB), target, GB, ended)
    loop.run()
    assert ended == [pytest.approx(2.0)] * 3


def test_the_set_up_takes_no_bandwidth():
    loop, ended = Loop(), []
    network, source = Network(loop), Nics(GB)
    first = start(network, source, Nics(GB), GB, ended)
    second = start(network, source, Nics(GB), GB, ended, setup_s=1.0)
    loop.run()
    assert (first, second) == ([pytest.approx(1.0)], [pytest.approx(2.0)])


@pytest.mark.parametrize("at_s", [0.5, 1.5])
def test_a_cancelled_transfer_leaves_its_bandwidth(at_s):
    """During its set-up or its bytes; it never ends."""
    loop, ended = Loop(), []
    network, source = Network(loop), Nics(GB)
    other = start(network, source, Nics(GB), 4 * GB, ended)
    gone = network.start(
        source, Nics(GB), size_bytes=GB, setup_s=1.0, done=lambda: ended.append("gone")
    )
    loop.at(at_s, network.cancel, gone)
    loop.run()
    network.cancel(gone)
    assert ended == other == [pytest.approx(4.0 if at_s < 1 else 4.25)]
    assert not source.active


TRANSFERS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 5.0), st.integers(0, 2), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)
"""(start in seconds, size in GB, source, target)."""


def played(transfers, watch=None):
    """End of each transfer; `watch` gets all NICs after each event."""
    loop, ended = Loop(), []
    network = Network(loop)
    sources = [Nics(speed * GB) for speed in (1.0, 2.0, 4.0)]
    targets = [Nics(speed * GB) for speed in (1.5, 3.0, 0.7)]
    ends = [None] * len(transfers)
    for number, (at_s, size_gb, source, target) in enumerate(transfers):

        def done(number=number):
            ends[number] = loop.now
            ended.append(number)

        loop.at(
            at_s,
            lambda size=size_gb, source=source, target=target, done=done: network.start(
                sources[source], targets[target], size_bytes=size * GB, setup_s=0.01, done=done
            ),
        )
    loop.run(None if watch is None else lambda: watch((*sources, *targets)))
    return ends


@given(TRANSFERS)
def test_shares_never_exceed_what_a_nic_can(transfers):
    def watch(nics):
        for each in nics:
            used = sum(transfer.bytes_per_s for transfer in each.active)
            assert used <= each.bytes_per_s * (1 + 1e-9)

    ends = played(transfers, watch)
    for end, (at_s, size_gb, source, target) in zip(ends, transfers, strict=True):
        alone_s = size_gb / min((1.0, 2.0, 4.0)[source], (1.5, 3.0, 0.7)[target])
        assert end >= at_s + 0.01 + alone_s - 1e-6


@given(TRANSFERS, st.floats(0.1, 5.0))
def test_more_bytes_take_longer(transfers, more_gb):
    """For the transfer itself."""
    before = played(transfers)[0]
    at_s, size_gb, source, target = transfers[0]
    grown = [(at_s, size_gb + more_gb, source, target), *transfers[1:]]
    assert played(grown)[0] > before


@given(TRANSFERS, TRANSFERS)
def test_more_transfers_make_none_faster_at_its_own_nics(transfers, others):
    """One source and one target: every further transfer delays all that are under way."""
    alone = [(at_s, size, 0, 0) for at_s, size, _, _ in transfers]
    more = [(at_s, size, 0, 0) for at_s, size, _, _ in others]
    before, after = played(alone), played([*alone, *more])
    for one, other in zip(before, after, strict=False):
        assert other >= one - 1e-6


def test_the_exposed_part_of_a_layer_wise_transfer():
    """At least the last layer, at most everything."""
    assert exposed_share(transfer_s=0.0, overlap_s=1.0, layers=10) == 1.0
    assert exposed_share(transfer_s=2.0, overlap_s=0.0, layers=10) == 1.0
    assert exposed_share(transfer_s=1.0, overlap_s=100.0, layers=10) == pytest.approx(0.1)
    assert exposed_share(transfer_s=2.0, overlap_s=1.0, layers=10) == pytest.approx(0.55)
    assert exposed_share(transfer_s=2.0, overlap_s=1.0, layers=1) == 1.0


def test_a_slower_link_delays_the_bytes_that_are_left():
    """3 GB at 1 GB/s for 1 s, then the rest at half the bandwidth; the other NIC has room."""
    loop, ended = Loop(), []
    network, source = Network(loop), Nics(GB)
    start(network, source, Nics(4 * GB), 3 * GB, ended)
    loop.at(1.0, network.change, source, 0.5 * GB)
    loop.run()
    assert ended == [pytest.approx(5.0)]
