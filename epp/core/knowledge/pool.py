"""The pool of endpoints: their state in columns, and the selection of those that may receive
requests now.
"""

import ipaddress
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import numpy as np

from epp.core.address import host_of
from epp.core.knowledge.candidates import LISTED, Columns, Ints, kv_capacity_tokens
from epp.core.knowledge.load_report import LoadReport
from epp.core.knowledge.rendezvous import identity_hash
from epp.core.types import Endpoint, EndpointMetrics, KvTransfers, Seconds, siblings_of

FAILURES_BEFORE_SET_ASIDE: Final = 2
"""Number of responses 502, 503 or 504 in a row, without a good scrape in between, after which an
endpoint is set aside, that is, gets no requests.
"""
UNUSUAL_SPELLINGS_FREE: Final = 256
"""Maximum number of entries of one subset hint, in addition to two per endpoint of the pool, that
are parsed because they equal no known spelling of an endpoint's address. Later entries of this kind
match no endpoint, even if they are another spelling of an address.
"""
UPSTREAM_FAILURES: Final = frozenset({502, 503, 504})
SET_ASIDE_UNSCRAPED_S: Final = 10.0
"""Time in seconds for which an endpoint that serves no metrics stays set aside, because no scrape
can end that state.
"""
UNANSWERED_BEFORE_UNREACHABLE: Final = 2
"""Number of scrapes in a row without a connection or an answer after which an endpoint counts as
unreachable. A single one may be an accident.
"""


class Standing(StrEnum):
    """The standing of an endpoint for new requests: ready, or the reason why other endpoints are
    preferred.
    """

    READY = "ready"
    UNREACHABLE = "unreachable"
    """The last scrapes of the endpoint got no answer, or the last one did not and its metrics are
    too old or missing.
    """
    STALE = "stale"
    """The endpoint's metrics are too old, although its scrapes get an answer."""
    ASLEEP = "asleep"
    SET_ASIDE = "set aside"
    """Requests to the endpoint failed, so it receives none until its next good scrape, or for 10 s
    if it serves no metrics.
    """
    NEVER_SCRAPED = "never scraped"


class _Member:
    """The part of the state of one endpoint of the pool that is not in the columns."""

    __slots__ = (
        "answered",
        "asleep",
        "failures",
        "joined_at_s",
        "kv_size",
        "process_started_at_s",
        "requests_total",
        "set_aside_at_s",
        "transfers",
        "unanswered",
    )

    def __init__(self, joined_at_s: Seconds) -> None:
        self.joined_at_s = joined_at_s
        self.failures = 0
        self.unanswered = 0
        """Number of scrapes of the endpoint in a row without an answer."""
        self.answered = False
        """True if any scrape of the endpoint got an answer, even one without metrics."""
        self.set_aside_at_s: Seconds | None = None
        self.process_started_at_s: float | None = None
        self.requests_total: float | None = None
        self.transfers: KvTransfers | None = None
        self.asleep = False
        self.kv_size: tuple[float | None, float | None] = (None, None)
        """Reported number of KV-cache blocks, and number of tokens in each; None if not reported."""


class EndpointPool:
    """The endpoints of the pool by slot. A slot is reused once its endpoint has left.

    An endpoint is *ready* if its engine is awake, and if the endpoint was scraped or joined at
    least `ready_after_s` ago. It is not ready while it is *set aside* (excluded): after two
    upstream failures in a row without a good scrape in between, it receives no requests until its
    next good scrape, or for 10 s if it serves no metrics. At most half the pool is set aside at a
    time.

    A pod can have several ports, of which some have no server. In such a pod, a port whose scrapes
    never got an answer is not ready if any endpoint of the pool has answered.

    An endpoint stays ready if its scrapes get no answer or its metrics are stale, because there may
    be no other one. It ranks below the others, and its *standing* gives the reason.
    """

    def __init__(self) -> None:
        self.columns = Columns()
        self.generation = 0
        """Number of times that the pool's list of endpoints was replaced. If this number is
        unchanged, so is the list.
        """
        self._slot_by_id: dict[str, int] = {}
        self._slot_by_address: dict[str, int] = {}
        self._canonical: dict[str, str] = {}
        """Canonical spelling of the address of each endpoint, by the spelling that the endpoint
        itself uses.
        """
        self._slots_by_ip: dict[str, list[int]] = {}
        self._members: list[_Member | None] = []
        self._free: list[int] = []
        self._ready: Ints = np.empty(0, dtype=np.int64)
        self._ready_until_s: Seconds = -math.inf
        self._unreachable: set[int] = set()
        self._with_siblings: frozenset[str] = frozenset()
        """Identities of the endpoints whose pod has other endpoints of the pool."""

    def __len__(self) -> int:
        return len(self._slot_by_id)

    def __repr__(self) -> str:
        return f"<EndpointPool [{len(self)} endpoints, {self.set_aside_count()} set aside]>"

    def endpoints(self) -> list[tuple[int, Endpoint]]:
        """Return (slot, endpoint) of all endpoints of the pool, in the order of the slots."""
        columns = self.columns
        return [(slot, at) for slot, at in enumerate(columns.endpoints) if at is not None]

    def endpoint_in(self, slot: int) -> Endpoint:
        """Return the endpoint in `slot`. The slot must not be empty."""
        endpoint = self.columns.endpoints[slot]
        assert endpoint is not None, f"slot {slot} is empty"
        return endpoint

    def slot_of(self, endpoint: Endpoint) -> int | None:
        """Return the slot of this incarnation of `endpoint`, or None if it left or restarted."""
        slot = self._slot_by_id.get(endpoint.endpoint_id)
        if slot is None:
            return None
        present = self.columns.endpoints[slot]
        assert present is not None
        return slot if present.incarnation == endpoint.incarnation else None

    def slot_at(self, address: str) -> int | None:
        """Return the slot of the endpoint at `address` ("ip:port"), or None if there is none in the
        pool.
        """
        slot = self._slot_by_address.get(address)
        return self._slot_by_address.get(canonical_address(address)) if slot is None else slot

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> list[int]:
        """Replace the list of endpoints. Return the slots whose endpoints left or restarted, of
        which all knowledge must be dropped.

        An endpoint with a new incarnation keeps its slot and is reset. One with new labels or a new
        address keeps everything.
        """
        self.generation += 1
        wanted = {endpoint.endpoint_id: endpoint for endpoint in endpoints}
        gone = [i for i in self._slot_by_id if i not in wanted]
        forgotten = [self._remove(endpoint_id) for endpoint_id in gone]
        for endpoint in wanted.values():
            slot = self._slot_by_id.get(endpoint.endpoint_id)
            if slot is None:
                self._add(endpoint, now)
                continue
            present = self.columns.endpoints[slot]
            assert present is not None
            if present.incarnation != endpoint.incarnation:
                forgotten.append(slot)
                self._restart(slot, now)
            self.columns.endpoints[slot] = endpoint
        self._index_addresses()
        self._with_siblings = siblings_of(wanted.values())
        self.columns.changed(*LISTED)
        self._ready_until_s = -math.inf
        return forgotten

    def observe(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> bool:
        """Store the values of a good scrape of `slot`, which also ends the state of being set
        aside, unreachable or saturated. Return True if the values show that the engine restarted;
        all earlier values are then dropped.

        A changed process start time or a counter that fell shows a restart. The container may have
        restarted inside its pod, which keeps the pod's UID (design D5).
        """
        member = self._member(slot)
        started_at_s, requests_total = metrics.process_started_at_s, metrics.requests_total
        restarted = _changed(member.process_started_at_s, started_at_s) or _fell(
            member.requests_total, requests_total
        )
        if restarted:
            self._restart(slot, now)
            member = self._member(slot)
        member.process_started_at_s = started_at_s
        member.requests_total = requests_total
        member.transfers = metrics.transfers
        columns = self.columns
        kv_size = (metrics.blocks_total, metrics.block_size_tokens)
        # Every scrape reports the size, so only a change matters.
        if kv_size != member.kv_size:
            member.kv_size = kv_size
            columns.set_kv_capacity(slot, kv_capacity_tokens(*kv_size))
        if (
            columns.observed_at_s.item(slot) == -math.inf
            or not member.answered
            or member.set_aside_at_s is not None
            or member.asleep is not metrics.asleep
        ):
            self._ready_until_s = -math.inf
        member.answered = True
        member.asleep = metrics.asleep
        member.failures = 0
        member.set_aside_at_s = None
        if member.unanswered:
            self._mark_answered(slot, member)
        columns.saturated[slot] = False
        columns.observed_at_s[slot] = now
        columns.unreported_requests[slot] = 0
        columns.set_scraped(slot, metrics)
        return restarted

    def transfers(self, slot: int) -> KvTransfers | None:
        """Return the KV-cache transfers that the engine in `slot` reported last, or None if it
        reported none.
        """
        return self._member(slot).transfers

    def report(self, slot: int, report: LoadReport) -> bool:
        """Store the load that the engine in `slot` reported in a response. Return False, without a
        change, if the endpoint was never scraped.

        Only the reported values become newer, and a reported number of waiting requests resets the
        count of requests that no report includes. The age stays that of the last good scrape,
        because all other values are of that age. Marks that a good scrape would clear stay too,
        because an endpoint that answers one request may fail the next.
        """
        columns = self.columns
        if columns.observed_at_s[slot] == -math.inf:
            return False
        told = (
            (columns.waiting_requests, report.waiting_requests),
            (columns.running_requests, report.running_requests),
            (columns.kv_cache_usage, report.kv_cache_usage),
        )
        columns.set_load(
            slot, *(column.item(slot) if math.isnan(value) else value for column, value in told)
        )
        if not math.isnan(report.waiting_requests):
            columns.unreported_requests[slot] = 0
        return True

    def observe_failure(self, slot: int, *, answered: bool) -> None:
        """Record a failed scrape of the endpoint in `slot`. `answered` is False if there was no
        connection, or no response in time. `UNANSWERED_BEFORE_UNREACHABLE` of these in a row mark
        the endpoint as unreachable; an answer removes the mark. Without an answer, the endpoint no
        longer counts as saturated.
        """
        member = self._member(slot)
        if answered:
            if not member.answered:
                member.answered = True
                self._ready_until_s = -math.inf
            self._mark_answered(slot, member)
            return
        member.unanswered += 1
        # The refused request was then not refused by the engine.
        self.columns.saturated[slot] = False
        if member.unanswered >= UNANSWERED_BEFORE_UNREACHABLE:
            self.columns.unreachable[slot] = True
            self._unreachable.add(slot)

    def _mark_answered(self, slot: int, member: _Member) -> None:
        member.unanswered = 0
        if slot in self._unreachable:
            self._unreachable.discard(slot)
            self.columns.unreachable[slot] = False

    def responded(self, slot: int, status: int, now: Seconds, *, by_gateway: bool = False) -> bool:
        """Record the HTTP status of a response of `slot`. Return True if this failure makes the
        pool set the endpoint aside.

        Only 502, 503 and 504 count as failures; another status ends a row of them. Unless
        the last scrape got no answer, a 503 of the engine also marks the endpoint as saturated,
        until its next scrape that succeeds or gets no answer.

        `by_gateway` is True if the response is the gateway's own, because it could not reach the
        endpoint.
        """
        member = self._member(slot)
        if status not in UPSTREAM_FAILURES:
            member.failures = 0
            return False
        member.failures += 1
        # vLLM answers 503 when its admission limits are reached; Envoy does so when it cannot
        # connect.
        if status == 503 and not by_gateway and not member.unanswered:
            self.columns.saturated[slot] = True
        if member.failures < FAILURES_BEFORE_SET_ASIDE:
            return False
        return self._set_aside(member, now)

    def set_aside(self, slot: int, now: Seconds) -> bool:
        """Set the endpoint in `slot` aside until its next good scrape, or for
        `SET_ASIDE_UNSCRAPED_S` if it serves no metrics. Return False if it is already set aside, or
        if one more would be more than half of the pool.
        """
        return self._set_aside(self._member(slot), now)

    def _set_aside(self, member: _Member, now: Seconds) -> bool:
        if member.set_aside_at_s is not None:
            return False
        if 2 * (self.set_aside_count() + 1) > len(self):
            return False
        member.set_aside_at_s = now
        self._ready_until_s = -math.inf
        return True

    def set_aside_count(self) -> int:
        """Return the number of endpoints that are set aside, so that they receive no requests."""
        return sum(m is not None and m.set_aside_at_s is not None for m in self._members)

    def standings(self, now: Seconds, staleness_s: Seconds) -> dict[int, Standing]:
        """Return the standing of each endpoint by slot. Metrics older than `staleness_s` seconds
        are stale.

        If no endpoint has a good scrape, none counts as stale.
        """
        ready = set(self.ready(None, now).tolist())
        observed_at_s = self.columns.observed_at_s.tolist()
        fresh_since_s = now - staleness_s
        if not any(observed_at_s[slot] != -math.inf for slot, _ in self.endpoints()):
            fresh_since_s = -math.inf
        return {
            slot: self._standing(slot, observed_at_s[slot], fresh_since_s, ready=slot in ready)
            for slot, _ in self.endpoints()
        }

    def _standing(
        self, slot: int, observed_at_s: Seconds, fresh_since_s: Seconds, *, ready: bool
    ) -> Standing:
        member = self._member(slot)
        fresh = observed_at_s >= fresh_since_s
        known = observed_at_s != -math.inf
        if slot in self._unreachable or (member.unanswered and not (fresh and known)):
            return Standing.UNREACHABLE
        if member.asleep:
            return Standing.ASLEEP
        if member.set_aside_at_s is not None:
            return Standing.SET_ASIDE
        if ready and fresh:
            return Standing.READY
        return Standing.STALE if known else Standing.NEVER_SCRAPED

    def ready(self, subset: tuple[str, ...] | None, now: Seconds) -> Ints:
        """Return the slots of the endpoints that may receive requests, ascending. With a `subset`
        of addresses, return only those that it names.
        """
        if now >= self._ready_until_s:
            self._find_ready(now)
        if subset is None:
            return self._ready
        named: set[int] = set()
        unusual_left = UNUSUAL_SPELLINGS_FREE + 2 * len(self)
        for entry in subset:
            known = self._named(entry)
            if not known and unusual_left:
                # Parsing an address takes 10 µs, and a hint may have thousands of entries.
                unusual_left -= 1
                known = self._named(canonical_address(entry))
            named.update(known)
        allowed = np.fromiter(sorted(named), dtype=np.int64, count=len(named))
        return self._ready[np.isin(self._ready, allowed)]

    def all_observed_since(self, cutoff_s: Seconds) -> bool:
        """Return whether no endpoint of the pool is unreachable and all ready ones have a good
        scrape of `cutoff_s` or later.
        """
        if self._unreachable:
            return False
        if self.columns.observed_since_s < cutoff_s:
            observed_at_s = self.columns.observed_at_s[self._ready]
            self.columns.observed_since_s = float(
                np.minimum.reduce(observed_at_s, initial=math.inf)
            )
        return self.columns.observed_since_s >= cutoff_s

    def _named(self, entry: str) -> Sequence[int]:
        """Return the slots of the endpoints at `entry`, an address or a bare IP address in
        canonical spelling; () if there is none.
        """
        slot = self._slot_by_address.get(entry)
        return (slot,) if slot is not None else self._slots_by_ip.get(entry, ())

    def _find_ready(self, now: Seconds) -> None:
        """Determine the ready endpoints, and the time until which this result stays valid if no
        scrape comes. Endpoints without metrics are no longer set aside after
        `SET_ASIDE_UNSCRAPED_S`.
        """
        ready: list[int] = []
        until_s = math.inf
        any_answered = any(member is not None and member.answered for member in self._members)
        for slot, member in enumerate(self._members):
            if member is None or member.asleep:
                continue
            endpoint = self.columns.endpoints[slot]
            assert endpoint is not None
            if (
                any_answered
                and not member.answered
                and endpoint.metrics is not None
                and endpoint.endpoint_id in self._with_siblings
            ):
                continue
            observed = self.columns.observed_at_s[slot] != -math.inf
            if member.set_aside_at_s is not None:
                back_at_s = member.set_aside_at_s + SET_ASIDE_UNSCRAPED_S
                if endpoint.metrics is not None or now < back_at_s:
                    if endpoint.metrics is None:
                        until_s = min(until_s, back_at_s)
                    continue
                member.set_aside_at_s = None
                member.failures = 0
            due_s = member.joined_at_s + endpoint.ready_after_s
            if observed or now >= due_s:
                ready.append(slot)
            else:
                until_s = min(until_s, due_s)
        self._ready = np.array(ready, dtype=np.int64)
        self._ready.setflags(write=False)
        in_order = ready == list(range(len(ready)))
        self.columns.first_slots = self._ready if in_order else None
        self._ready_until_s = until_s
        self.columns.observed_since_s = -math.inf

    def _add(self, endpoint: Endpoint, now: Seconds) -> None:
        if self._free:
            slot = self._free.pop()
            self.columns.clear(slot)
        else:
            slot = self.columns.add_slot()
            self._members.append(None)
        self.columns.endpoints[slot] = endpoint
        self.columns.identities[slot] = identity_hash(endpoint.endpoint_id)
        self._members[slot] = _Member(now)
        self._slot_by_id[endpoint.endpoint_id] = slot

    def _remove(self, endpoint_id: str) -> int:
        slot = self._slot_by_id.pop(endpoint_id)
        self._members[slot] = None
        self._unreachable.discard(slot)
        self.columns.clear(slot)
        self._free.append(slot)
        return slot

    def _restart(self, slot: int, now: Seconds) -> None:
        """Reset the state of an endpoint whose process restarted, with its scraped values and its
        requests in flight.
        """
        endpoint = self.columns.endpoints[slot]
        self._unreachable.discard(slot)
        self.columns.clear(slot)
        self.columns.endpoints[slot] = endpoint
        self._members[slot] = _Member(now)
        self._ready_until_s = -math.inf

    def _member(self, slot: int) -> _Member:
        member = self._members[slot]
        assert member is not None, f"slot {slot} is empty"
        return member

    def _index_addresses(self) -> None:
        self._slot_by_address.clear()
        self._slots_by_ip.clear()
        known, self._canonical = self._canonical, {}
        for slot, endpoint in self.endpoints():
            # Parsing an address takes 10 µs, and most of a large pool does not change.
            address = known.get(endpoint.address) or canonical_address(endpoint.address)
            self._canonical[endpoint.address] = address
            self._slot_by_address[address] = slot
            ip = host_of(address)
            self._slots_by_ip.setdefault(ip, []).append(slot)


def canonical_address(text: str) -> str:
    """Return the address `text`, "ip:port" or a bare IP address, in canonical spelling: IPv6
    shortest, in brackets before a port.

    Any other text is returned unchanged; it equals no endpoint's address.
    """
    host, port = text.strip(), ""
    if host.startswith("["):
        host, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return text
    if not port:
        return str(ip)
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


def _changed(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and before != after


def _fell(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before
