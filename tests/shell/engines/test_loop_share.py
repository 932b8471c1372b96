import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.engines.loop_share import (
    COST_S_MAX,
    CREDIT_S,
    SHARE_ALL_MAX,
    SHARE_ONE_MAX,
    LoopShare,
)

INTERVAL_S = 0.2
PATIENCE_S = 1.0


class Clock:
    """CPU time that passes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def read(account, clock, cost_s):
    """A page that costs so much; the pause after it."""
    with account:
        clock.now += cost_s
    return account.settle(INTERVAL_S, PATIENCE_S)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shared(clock):
    return LoopShare(clock)


def test_a_page_that_costs_little_is_read_at_the_interval(shared, clock):
    """A hundred microseconds every 200 ms are a twentieth of what one endpoint may take."""
    account = shared.open()
    assert {read(account, clock, 0.0001) for _ in range(100)} == {INTERVAL_S}


def test_a_dear_page_is_paid_for_with_a_pause_in_proportion(shared, clock):
    """6 ms are one per cent of 600 ms; what was charged without a clock counts as well."""
    account = shared.open()
    assert read(account, clock, 0.006) == pytest.approx(0.6)
    account.charge(0.003)
    assert read(account, clock, 0.003) == pytest.approx(0.6)
    assert read(account, clock, 0.0) == INTERVAL_S


def test_one_dear_page_does_not_make_its_endpoint_stale(shared, clock):
    """The collector ran in the middle of a usual page: it is paid for in instalments."""
    account = shared.open()
    pauses = [read(account, clock, 0.09 if at == 0 else 0.0001) for at in range(50)]
    assert max(pauses) == PATIENCE_S
    assert sum(pauses) == pytest.approx(9.0 + 49 * 0.01, abs=50 * INTERVAL_S)
    assert pauses[-1] == INTERVAL_S


def test_credit_ends(shared, clock):
    """One that is dear each time waits as long as it owes in the end."""
    account = shared.open()
    pauses = [read(account, clock, 0.05) for _ in range(20)]
    assert pauses[0] == PATIENCE_S
    assert pauses[-1] == pytest.approx(5.0)


@given(st.lists(st.floats(0.0, COST_S_MAX), min_size=1, max_size=60))
def test_no_sequence_of_costs_takes_more_than_the_share_of_one(costs_s):
    """Apart from the credit, which is bounded."""
    clock = Clock()
    account = LoopShare(clock).open()
    pauses_s = sum(read(account, clock, cost_s) for cost_s in costs_s)
    assert sum(costs_s) <= SHARE_ONE_MAX * (pauses_s + CREDIT_S + 1e-6)


@pytest.mark.parametrize(("endpoints", "cost_s"), [(400, 0.05), (2_000, 0.001), (60, 0.0019)])
def test_all_together_take_no_more_than_the_share_of_all(shared, clock, endpoints, cost_s):
    """Whether few are dear or many are just below it."""
    accounts = [shared.open() for _ in range(endpoints)]
    for _ in range(4):
        # What each owes from the rounds before is paid by then.
        pauses_s = [read(account, clock, cost_s) for account in accounts]
    assert sum(cost_s / pause_s for pause_s in pauses_s) == pytest.approx(SHARE_ALL_MAX)


def test_dear_endpoints_do_not_slow_down_the_others(shared, clock):
    """Each of them takes one per cent at most, and so do ten of them together ten."""
    for account in [shared.open() for _ in range(10)]:
        read(account, clock, 0.1)
    assert read(shared.open(), clock, 0.0001) == INTERVAL_S


def test_an_endpoint_that_left_takes_nothing(shared, clock):
    """Its share is free for the others again."""
    accounts = [shared.open() for _ in range(100)]
    for account in accounts:
        read(account, clock, 0.1)
    assert shared.stretch == pytest.approx(2.0)
    for account in accounts:
        account.close()
    assert shared.stretch == 1.0
