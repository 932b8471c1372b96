"""What several pickers share of flow control: limits, and charges of flows that may be lost."""

from hypothesis import given
from hypothesis import strategies as st

from epp.core.flow.bands import State
from epp.core.flow.control import FlowControl
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings
from epp.core.flow.shares import CHARGES_MAX, ORIGINS_MAX, FlowShares, key_of
from tests.core.flow.test_control import Endpoints, serve, ticket

A, B = b"origin-a", b"origin-b"


def shares(pickers=2):
    made = FlowShares()
    made.pickers = pickers
    return made


def report(sender, receiver, origin=A, *, whole=False, lost=False):
    totals = dict(sender.outgoing(whole=whole))
    if not lost:
        receiver.hear(origin, totals, whole=whole)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shares_of_a_limit_are_never_zero_and_add_up_to_it_at_most(limit, pickers):
    share = shares(pickers).share_of(limit)
    assert share >= min(1, limit)
    assert share == 1 or share * pickers <= limit
    assert shares(1).share_of(limit) == limit


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(-50, 1_000), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_charges_arrive_whichever_reports_are_lost(events):
    """A report has totals, so that the next one repairs a lost one."""
    sender, receiver = shares(), shares()
    report(sender, receiver, whole=True)
    charged = {}
    for key, change, lost, whole in events:
        # A correction takes back a part of what was charged.
        amount = max(change, -charged.get(key, 0.0) / 4.0)
        charged[key] = charged.get(key, 0.0) + amount
        sender.charge(key, amount)
        report(sender, receiver, lost=lost, whole=whole)
    report(sender, receiver, whole=True)
    found = receiver.take_fresh()
    for key, total in charged.items():
        assert abs(found.get(key, 0.0) - total) < 1e-6 * max(1.0, total)


def test_what_was_charged_before_a_peer_is_heard_does_not_count():
    sender, receiver = shares(), shares()
    sender.charge(1, 500.0)
    report(sender, receiver)
    assert receiver.take_fresh() == {}, "the first report that counts is a whole one"
    report(sender, receiver, whole=True)
    sender.charge(1, 30.0)
    report(sender, receiver)
    assert receiver.take_fresh() == {1: 30.0}


def test_a_peer_that_returns_is_heard_from_there_on():
    sender, receiver = shares(), shares()
    report(sender, receiver, whole=True)
    sender.charge(1, 20.0)
    receiver.forget(A)
    report(sender, receiver, whole=True)
    assert receiver.take_fresh() == {}
    sender.charge(1, 5.0)
    report(sender, receiver, whole=True)
    assert receiver.take_fresh() == {1: 5.0}


def test_a_flow_that_its_picker_forgot_begins_anew():
    receiver = shares()
    receiver.hear(A, {1: 900.0}, whole=True)
    receiver.hear(A, {1: 40.0}, whole=False)
    assert receiver.take_fresh() == {1: 40.0}


def test_the_charges_of_a_thousand_flows_are_stored():
    """The flow that was charged longest ago is dropped first, here and of each peer."""
    sender, receiver = shares(), shares()
    report(sender, receiver, whole=True)
    for key in range(2 * CHARGES_MAX):
        sender.charge(key, 1.0)
        if key % 100 == 99:
            report(sender, receiver)
    assert len(sender.outgoing(whole=True)) == CHARGES_MAX
    assert len(receiver.take_fresh()) == CHARGES_MAX
    for key in range(100):
        receiver.hear(bytes([key]) * 8, {}, whole=True)
    assert "pickers" in repr(receiver)


def test_one_picker_alone_stores_no_charges():
    alone = shares(1)
    alone.charge(1, 10.0)
    assert alone.outgoing(whole=True) == []


def test_flows_of_other_bands_and_units_have_other_keys():
    keys = {key_of(unit, priority, "f") for unit in Fairness for priority in (0, 1)}
    assert len(keys) == 2 * len(Fairness)


def test_pickers_wait_until_they_say_otherwise_or_leave():
    one = shares(3)
    assert one.pickers_waiting == 1
    assert one.waits(A, waits=True)
    assert not one.waits(A, waits=True)
    assert one.waits(B, waits=True)
    assert one.pickers_waiting == 3
    assert one.waits(B, waits=False)
    one.forget(A)
    assert one.pickers_waiting == 1


# --- queues ---------------------------------------------------------------------------------------


TOKENS = FlowSettings(default_band=BandSettings(fairness=Fairness.TOKENS))


def queue(shared, settings=TOKENS):
    endpoints = Endpoints(1)
    control = FlowControl(settings, endpoints, 0.0, shared)
    control.enqueue(ticket("first"), 0.0)
    endpoints.placed.clear()
    return control, endpoints


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 10)), min_size=40, max_size=120))
def test_two_flows_share_two_pickers_evenly(turns):
    """One tenant waits at both pickers, the other one at the first only, which makes up for it.

    `turns` are the pickers that have room, and the cost of the next request of the large tenant.
    Whenever the first picker serves, the tenant that was charged less by both is next.
    """
    both = [shares(), shares()]
    report(both[1], both[0], B, whole=True)
    queues = [queue(shared) for shared in both]
    for number, (_, cost) in enumerate(turns):
        for control, _ in queues:
            control.enqueue(ticket(f"large-{number}", flow="large", cost=cost), 0.1)
        queues[0][0].enqueue(ticket(f"small-{number}", flow="small", cost=5), 0.1)
    tokens = {"large": 0, "small": 0}
    for second, _ in turns:
        control, endpoints = queues[second]
        (name,) = serve(control, endpoints)
        flow = name.split("-")[0]
        before = dict(tokens)
        tokens[flow] += endpoints.placed[-1].prompt_tokens
        report(both[1], both[0], B)
        if not second and before["large"] != before["small"]:
            assert flow == min(before, key=before.get)
    if sum(not second for second, _ in turns) > 2 * len(turns) / 3:
        assert abs(tokens["large"] - tokens["small"]) <= 20


def test_limits_are_divided_while_a_peer_is_heard():
    """What waits already stays when another picker comes."""
    shared = shares(1)
    control, _ = queue(shared, FlowSettings(requests_max=4, default_band=BandSettings()))
    for _ in range(3):
        assert control.enqueue(ticket(), 0.0) == []
    shared.pickers = 2
    (verdict,) = control.enqueue(ticket(), 0.1)
    assert verdict.ticket.state is State.REFUSED
    assert control.requests == 3
    shared.pickers = 1
    assert control.enqueue(ticket(), 0.2) == []
    assert control.requests == shared.waiting == 4


@given(st.integers(1, 64), st.integers(1, 50))
def test_one_request_may_always_wait(pickers, size):
    """However many pickers divide the limits, if it fits the whole limit."""
    settings = FlowSettings(
        requests_max=3,
        bytes_max=50,
        default_band=BandSettings(requests_max=2, bytes_max=50),
    )
    control, _ = queue(shares(pickers), settings)
    assert control.enqueue(ticket(body_bytes=size), 0.0) == []
    (verdict,) = control.enqueue(ticket(body_bytes=51), 0.0)
    assert verdict.ticket.state is State.REFUSED


def test_a_queue_tells_how_many_wait_in_it():
    shared = shares()
    control, endpoints = queue(shared)
    one = ticket()
    control.enqueue(one, 0.0)
    control.enqueue(ticket(), 0.0)
    assert shared.waiting == 2
    control.cancel(one)
    control.configure(TOKENS, 0.0)
    assert shared.waiting == 1
    serve(control, endpoints)
    assert shared.waiting == 0


def test_a_waiting_peer_above_the_limit_is_not_news():
    shared = shares(ORIGINS_MAX + 2)
    peers = [number.to_bytes(8, "big") for number in range(ORIGINS_MAX + 1)]
    assert [shared.waits(peer, waits=True) for peer in peers] == [True] * ORIGINS_MAX + [False]
    assert not shared.waits(peers[-1], waits=True)
    assert shared.pickers_waiting == ORIGINS_MAX + 1
    assert not shared.waits(peers[-1], waits=False)
    shared.forget(peers[0])
    assert shared.waits(peers[-1], waits=True)
