"""Delivery of KV-cache events from engines to pickers in simulated time: production's subscriptions
over a simulated network.

As with scrapes, nothing is done when a frame arrives. Before a picker decides, all frames that have
arrived are processed in order. A frame takes `delay_s`. A lost frame leaves a gap. When the next
frame arrives, the picker requests a replay, as in production. The replay takes `delay_s` in each
direction and has no losses.
"""

import math
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from msgspec import Struct

from epp.core.decision.inputs import BlocksChanged
from epp.core.decision.scheduler import Scheduler
from epp.core.kv_events.payload import Batch, Fault
from epp.core.kv_events.stream import AskReplay
from epp.core.subscription import Asked, Subscription
from epp.core.types import Endpoint, Seconds
from sim.cluster.event_log import EventLog
from sim.cluster.simulated_pod import SimulatedPod

WATCH_S: Final[Seconds] = 0.25
CONNECT_PAUSE_S: Final[Seconds] = 0.5
"""Maximum pause in seconds before a picker connects to a new endpoint to receive its KV-cache
events. This constant and `WATCH_S` have the values of `epp/shell/engines/kv_events`.
"""
_NUMBER_BYTES: Final = 8


class KVEventSettings(Struct, frozen=True, kw_only=True):
    """Settings of the simulated network for KV-cache events from engines to pickers."""

    delay_s: Seconds
    """Delay of every frame of events in one direction, in seconds."""
    loss: float = 0.0
    """Share of the frames of events that are lost, drawn for each picker. Replays are not lost."""


class _Source:
    """One picker's subscription to the KV-cache events of one rank of one engine process."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: KVEventSettings,
        endpoint: Endpoint,
        slot: int,
        log: EventLog,
        random: Random,
        connects_at: Seconds,
        *,
        rank: int,
    ) -> None:
        self.endpoint = endpoint
        self.slot = slot
        self.log = log
        self._scheduler = scheduler
        self._settings = settings
        self._random = random
        self._connects_at = connects_at
        self._next = 0
        """Number of the frame of KV-cache events that the subscription receives next from the
        engine.
        """
        self._replay: tuple[Seconds, int] | None = None
        """Time when the requested replay arrives, and the number of its first frame; None if no
        replay is requested.
        """
        self._watch_at = connects_at + WATCH_S
        self._connected = False
        self.subscription = Subscription(
            scheduler, slot, rank=rank, replays=True, read=self._read, now=connects_at
        )

    def catch_up(self, now: Seconds) -> None:
        """Process all frames of KV-cache events, replays and connection changes that happened until
        `now`, in order of time.
        """
        while (at := self._next_at()) <= now:
            self._happen(at)
        if now >= self._watch_at:
            self._watch_at = now + WATCH_S
            self._act(self.subscription.watch(now), now)

    def close(self, now: Seconds) -> None:
        """End the subscription to an endpoint's KV-cache events. Do nothing if the slot no longer
        belongs to the endpoint.
        """
        if self._scheduler.pool.slot_of(self.endpoint) == self.slot:
            self.subscription.close(now)

    def _next_at(self) -> Seconds:
        """Return the time of the next thing that happens to the subscription: the connection, a
        frame, a replay, or the end of the engine's process. The time is infinite if none is known.
        """
        if not self._connected:
            return self._connects_at
        delay_s = self._settings.delay_s
        at = self.log.ended_at_s + delay_s
        if self._next < self.log.next:
            frame = self.log.frame(self._next)
            at = min(at, -math.inf if frame is None else frame.sent_at_s + delay_s)
        if self._replay is not None:
            at = min(at, self._replay[0])
        return at

    def _happen(self, at: Seconds) -> None:
        """Process the next thing that happens to the subscription, at the time `at` that `_next_at`
        returned.
        """
        subscription, log, delay_s = self.subscription, self.log, self._settings.delay_s
        if not self._connected:
            self._connects_at = math.inf
            if log.ended_at_s <= at:
                return
            self._connected = True
            # Frames that were sent before the connection do not arrive.
            self._next = log.next_at(at - delay_s)
            self._act(subscription.connected(at), at)
            return
        if self._replay is not None and self._replay[0] <= at:
            _, first = self._replay
            self._replay = None
            for told in log.retained(first, log.next_at(at - delay_s)):
                subscription.replayed(told.number, _payload(told.number), at)
            self._act(subscription.replay_ended(at, marked=True), at)
            return
        if self._next < log.next:
            number = self._next
            frame = log.frame(number)
            if frame is None:
                # The frame was not read for so long that it is no longer retained. It counts as
                # lost.
                self._next = log.first
                return
            if frame.sent_at_s + delay_s <= at:
                self._next += 1
                loss = self._settings.loss
                if not (loss and self._random.random() < loss):
                    self._act(subscription.received(number, _payload(number), at), at)
                return
        # The process has ended. A new one is connected to only after a new announcement.
        self._connected = False
        self._replay = None
        self._act(subscription.disconnected(at), at)

    def _act(self, asked: Sequence[Asked], at: Seconds) -> None:
        """Schedule the replays of frames that are requested in `asked`, and apply the KV-cache
        events that the subscription has received.
        """
        questions = [*asked]
        while self.subscription.works:
            questions += self.subscription.work(at)
        for question in questions:
            if isinstance(question, AskReplay):
                self._replay = (at + 2 * self._settings.delay_s, question.first)

    def _read(self, payload: bytes) -> BlocksChanged | Batch:
        log = self.log
        frame = log.frame(int.from_bytes(payload, "big"))
        if frame is None:
            # A frame that waits longer than engines retain frames is lost.
            return Batch(faults=(Fault.NOT_A_BATCH,))
        changes = log.changes_of(frame, _event_block_tokens(self._scheduler))
        rank = self.subscription.rank
        return BlocksChanged(self.slot, changes, engine_block_tokens=log.block_tokens, rank=rank)


class Listener:
    """One picker's subscriptions to the KV-cache events of all pods. `seed` determines which frames
    are lost and when the picker connects.

    As in production, pods with several ranks are subscribed to only if a plug-in chooses ranks.
    """

    def __init__(
        self, scheduler: Scheduler, settings: KVEventSettings, *, seed: int, replica: int
    ) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._seed = seed
        self._replica = replica
        self._sources: dict[tuple[str, int], _Source] = {}
        """Subscriptions to KV-cache events by (id of the endpoint, rank)."""
        self._there = True
        """True before the first call of `replace`. The subscriptions of that call begin one round
        trip earlier, so that a replay of the events so far has just arrived.
        """

    @property
    def subscriptions(self) -> list[Subscription]:
        """The picker's subscriptions to all endpoints, one per rank."""
        return [source.subscription for source in self._sources.values()]

    def replace(self, pods: Sequence[SimulatedPod], now: Seconds) -> None:
        """Subscribe to the KV-cache events of exactly these pods, if the picker's present
        configuration has an index for events; end the other subscriptions.
        """
        before, self._sources = self._sources, {}
        responders = self._scheduler.settings.profile.responders
        ranks_chosen = any(one.plugin.abilities.chooses_ranks for one in responders)
        for pod in pods if self._scheduler.indexes.hearing else ():
            endpoint = pod.endpoint
            slot = self._scheduler.pool.slot_of(endpoint)
            if slot is None or (len(pod.events) > 1 and not ranks_chosen):
                continue
            for rank, log in enumerate(pod.events):
                key = endpoint.endpoint_id, rank
                known = before.pop(key, None)
                if known is not None and known.log is log and known.slot == slot:
                    self._sources[key] = known
                    continue
                if known is not None:
                    known.close(now)
                self._sources[key] = self._source(pod, endpoint, slot, log, now, rank)
        for gone in before.values():
            gone.close(now)
        self._there = False
        self.catch_up(now)

    def catch_up(self, now: Seconds) -> None:
        """Process all KV-cache events of all subscriptions that have arrived by `now`."""
        for source in self._sources.values():
            source.catch_up(now)

    def _source(
        self,
        pod: SimulatedPod,
        endpoint: Endpoint,
        slot: int,
        log: EventLog,
        now: Seconds,
        rank: int,
    ) -> _Source:
        purpose = f"kv-events:{self._replica}:{pod.place}:{endpoint.incarnation}"
        if rank:
            purpose += f":{rank}"
        random = Random(f"{self._seed}:{purpose}")
        # One round trip before the start, a picker that already ran had received everything.
        connects_at = now + random.random() * CONNECT_PAUSE_S
        if self._there:
            connects_at = now - 2 * self._settings.delay_s
        return _Source(
            self._scheduler, self._settings, endpoint, slot, log, random, connects_at, rank=rank
        )


def _payload(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def _event_block_tokens(scheduler: Scheduler) -> int:
    """Return the block size in tokens of the first index that receives KV-cache events."""
    settings: Any = scheduler.settings.indexes[next(iter(scheduler.indexes.hearing))]
    tokens: int = settings.block_tokens
    return tokens
