import asyncio
import contextlib
import time
from datetime import UTC, datetime
from random import Random

import pytest
from structlog.testing import capture_logs

from epp.shell.kubernetes.leader import Election, ElectionTiming, LeaderElector, LeaseSpec
from tests.shell.kubernetes.fake_api_server import LEASES, FakeApiServer
from tests.shell.kubernetes.kube import connected, eventually, running

TIMING = ElectionTiming(lease_s=2, renew_deadline_s=0.5, retry_s=0.05)
DEFAULT = ElectionTiming()
WALL = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def spec(holder, renewed="1", **fields):
    return LeaseSpec(holder_identity=holder, renew_time=renewed, **fields)


def test_a_free_lease_may_be_taken_and_a_held_one_only_when_it_stands_still():
    """For its whole duration, by our clock, since we saw it change."""
    election = Election("us", DEFAULT)
    assert election.observe(LeaseSpec(), 0.0)
    assert not election.observe(spec("them", "1"), 1.0)
    assert not election.observe(spec("them", "1"), 15.9)
    assert not election.observe(spec("them", "2"), 16.0), "renewed in between"
    assert not election.observe(spec("them", "2"), 30.9)
    assert election.observe(spec("them", "2"), 31.0)


def test_the_duration_is_that_of_the_holder():
    """It may be configured otherwise than we are."""
    election = Election("us", DEFAULT)
    assert not election.observe(spec("them", lease_duration_seconds=60), 0.0)
    assert not election.observe(spec("them", lease_duration_seconds=60), 59.0)
    assert election.observe(spec("them", lease_duration_seconds=60), 60.0)


def test_a_leader_acts_until_its_deadline_counted_from_sending():
    """Earlier than the moment anybody else may take the Lease."""
    election = Election("us", DEFAULT)
    assert not election.leads(0.0)
    election.written(100.0)
    assert election.leads(109.9)
    assert not election.leads(110.0)
    assert DEFAULT.renew_deadline_s < DEFAULT.lease_s


def test_a_lease_that_names_another_ends_our_lead_at_once():
    """Somebody took it while we were away."""
    election = Election("us", DEFAULT)
    election.written(100.0)
    assert not election.observe(spec("them"), 101.0)
    assert not election.leads(101.0)


def test_a_claim_counts_transitions_and_keeps_the_time_of_acquiring():
    """As the field's controllers write it, in UTC with microseconds."""
    election = Election("us", DEFAULT)
    first = election.claim(None, WALL)
    assert first == LeaseSpec(
        holder_identity="us",
        lease_duration_seconds=15,
        acquire_time="2026-01-02T03:04:05.000678Z",
        renew_time="2026-01-02T03:04:05.000678Z",
        lease_transitions=0,
    )
    again = election.claim(first, WALL.replace(second=7))
    assert (again.acquire_time, again.lease_transitions) == (first.acquire_time, 0)
    taken = election.claim(spec("them", lease_transitions=3), WALL)
    assert taken.lease_transitions == 4


def test_times_that_would_let_two_lead_are_refused():
    """The deadline must come before the Lease ends."""
    with pytest.raises(ValueError):
        ElectionTiming(lease_s=10, renew_deadline_s=10.0)


class Candidates:
    """Electors of one Lease, and who leads when."""

    def __init__(self, server, folder):
        self.server = server
        self.folder = folder
        self.stack = contextlib.AsyncExitStack()
        self.leading = set()
        self.most = 0
        self.ended_at_s = 0.0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.stack.aclose()

    async def join(self, identity):
        client = await self.stack.enter_async_context(connected(self.server, self.folder))

        def changed():
            (self.leading.add if elector.leading else self.leading.discard)(identity)
            self.most = max(self.most, len(self.leading))
            self.ended_at_s = time.monotonic()

        elector = LeaderElector(
            client,
            namespace="llm",
            name="homing-llama",
            identity=identity,
            on_change=changed,
            random=Random(identity),
            timing=TIMING,
        )
        elector.task = await self.stack.enter_async_context(running(elector.run()))
        return elector


async def test_of_two_candidates_one_leads_and_gives_way_when_it_ends(tmp_path):
    """It gives the Lease back, so that the other need not wait for it to expire."""
    async with FakeApiServer() as server, Candidates(server, tmp_path) as candidates:
        one = await candidates.join("one")
        await eventually(lambda: one.leading)
        two = await candidates.join("two")
        lease = server.objects[LEASES]["homing-llama"]["spec"]
        assert lease["holderIdentity"] == "one"
        assert lease["leaseDurationSeconds"] == 2
        first = lease["renewTime"]
        await eventually(
            lambda: server.objects[LEASES]["homing-llama"]["spec"]["renewTime"] != first
        )
        assert not two.leading
        one.task.cancel()
        await eventually(lambda: two.leading)
        holders = [after["spec"].get("holderIdentity") for *_, after in server.history]
        assert holders[holders.index(None) :][:2] == [None, "two"], "given back, not expired"
        assert server.objects[LEASES]["homing-llama"]["spec"]["leaseTransitions"] >= 1
        assert candidates.most == 1


async def test_a_lease_of_somebody_else_keeps_what_they_wrote(tmp_path):
    """That of the chart: its labels tell Helm that it goes with the release."""
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    made = {"metadata": {"name": "homing-llama", "uid": "uid-lease", "labels": labels}}
    async with FakeApiServer() as server, Candidates(server, tmp_path) as candidates:
        server.put(LEASES, made)
        one = await candidates.join("one")
        await eventually(lambda: one.leading)
        lease = server.objects[LEASES]["homing-llama"]
        assert lease["spec"]["holderIdentity"] == "one"
        assert lease["metadata"]["labels"] == labels


@pytest.mark.parametrize("fault", ["silent", 500, "reset"])
async def test_a_leader_that_cannot_renew_stops_before_its_lease_ends(tmp_path, fault):
    """Whether the API server answers with errors or not at all."""
    async with FakeApiServer() as server, Candidates(server, tmp_path) as candidates:
        one = await candidates.join("one")
        await eventually(lambda: one.leading)
        renewed = server.objects[LEASES]["homing-llama"]["metadata"]["resourceVersion"]
        for verb in ("GET", "UPDATE"):
            server.fail(verb, LEASES, *[fault] * 200)
        lease_ends_s = time.monotonic() + TIMING.lease_s
        await eventually(lambda: not one.leading)
        assert candidates.ended_at_s < lease_ends_s
        assert int(server.objects[LEASES]["homing-llama"]["metadata"]["resourceVersion"]) <= (
            int(renewed) + 1
        )
        server.heal()
        await eventually(lambda: one.leading)


async def test_never_do_two_lead_while_the_api_server_comes_and_goes(tmp_path):
    """Three candidates, a server with faults: leaders change, but there is one at most."""
    dice = Random(3)
    async with FakeApiServer() as server, Candidates(server, tmp_path) as candidates:
        for name in ("one", "two", "three"):
            await candidates.join(name)
        for _ in range(30):
            verb = dice.choice(["GET", "UPDATE", "CREATE"])
            server.fail(verb, LEASES, *[dice.choice([500, 409, "reset", 503])] * dice.randrange(6))
            await asyncio.sleep(0.03)
        server.heal()
        await eventually(lambda: len(candidates.leading) == 1)
        assert candidates.most == 1


async def test_a_missing_right_is_said_once_by_verb_and_resource(tmp_path):
    """And nobody leads."""
    async with FakeApiServer() as server, Candidates(server, tmp_path) as candidates:
        server.fail("GET", LEASES, *[403] * 4)
        with capture_logs() as logs:
            one = await candidates.join("one")
            await eventually(lambda: one.leading)
        (line,) = [line for line in logs if line["log_level"] == "error"]
        assert "verbs get, create and update on resource leases" in line["event"]
