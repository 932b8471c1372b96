"""Pickers that hear engines, in simulated time: production's subscriptions, and a pipe between.

As with scrapes nothing is done at the instant at which a frame arrives: before a picker decides, what has
arrived by then is taken note of, in its order. A frame takes `delay_s`; one that is lost opens a gap, and
is asked for again with the next one that comes, as production does it, at `delay_s` each way and without
loss.
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
"""Within which a new endpoint is connected to. Both: as `epp/shell/engines/kv_events` has them."""
_NUMBER_BYTES: Final = 8


class KVEventSettings(Struct, frozen=True, kw_only=True):
    """What is between engines and pickers."""

    delay_s: Seconds
    """One way, of every frame."""
    loss: float = 0.0
    """Share of the frames that do not arrive, drawn for each picker."""


class _Source:
    """One picker hearing one rank of one process of an engine."""

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
        """The number of the frame that comes next."""
        self._replay: tuple[Seconds, int] | None = None
        """When an answer is there, and from which frame on."""
        self._watch_at = connects_at + WATCH_S
        self._connected = False
        self.subscription = Subscription(
            scheduler, slot, rank=rank, replays=True, read=self._read, now=connects_at
        )

    def hear(self, now: Seconds) -> None:
        """Take note of what has happened by `now`, in its order."""
        while (at := self._next_at()) <= now:
            self._happen(at)
        if now >= self._watch_at:
            self._watch_at = now + WATCH_S
            self._act(self.subscription.watch(now), now)

    def close(self, now: Seconds) -> None:
        """It is not heard any more; who is in its slot now may be another."""
        if self._scheduler.pool.slot_of(self.endpoint) == self.slot:
            self.subscription.close(now)

    def _next_at(self) -> Seconds:
        """When something happens next; infinite: not as far as is known."""
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
        """What happens at `at`, which `_next_at` has said."""
        subscription, log, delay_s = self.subscription, self.log, self._settings.delay_s
        if not self._connected:
            self._connects_at = math.inf
            if log.ended_at_s <= at:
                return
            self._connected = True
            # What was sent before is not for us.
            self._next = log.next_at(at - delay_s)
            self._act(subscription.connected(at), at)
            return
        if self._replay is not None and self._replay[0] <= at:
            _, first = self._replay
            self._replay = None
            for told in log.kept(first, log.next_at(at - delay_s)):
                subscription.replayed(told.number, _payload(told.number), at)
            self._act(subscription.replay_ended(at, marked=True), at)
            return
        if self._next < log.next:
            number = self._next
            frame = log.frame(number)
            if frame is None:
                # Nobody looked for so long that it is not kept: it was lost on the way.
                self._next = log.first
                return
            if frame.sent_at_s + delay_s <= at:
                self._next += 1
                loss = self._settings.loss
                if not (loss and self._random.random() < loss):
                    self._act(subscription.received(number, _payload(number), at), at)
                return
        # The process is gone; nobody is connected to again that is not announced anew.
        self._connected = False
        self._replay = None
        self._act(subscription.disconnected(at), at)

    def _act(self, asked: Sequence[Asked], at: Seconds) -> None:
        """Ask what is to be asked, and take note of what came."""
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
            # Whoever waits for longer than engines keep frames has lost them.
            return Batch(faults=(Fault.NOT_A_BATCH,))
        changes = log.changes_of(frame, _told_block_tokens(self._scheduler))
        rank = self.subscription.rank
        return BlocksChanged(self.slot, changes, engine_block_tokens=log.block_tokens, rank=rank)


class Listener:
    """One picker hearing all pods. `seed` decides what is lost.

    Pods with several ranks are heard where a plugin chooses ranks, as in production.
    """

    def __init__(
        self, scheduler: Scheduler, settings: KVEventSettings, *, seed: int, replica: int
    ) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._seed = seed
        self._replica = replica
        self._sources: dict[tuple[str, int], _Source] = {}
        """By endpoint and rank."""
        self._there = True
        """Those that come now were there before, and have been heard since they began."""

    @property
    def subscriptions(self) -> list[Subscription]:
        """Of the endpoints that are heard, one a rank."""
        return [source.subscription for source in self._sources.values()]

    def replace(self, pods: Sequence[SimulatedPod], now: Seconds) -> None:
        """The picker knows `pods` from now on, and nobody else, and is configured as it is."""
        before, self._sources = self._sources, {}
        responders = self._scheduler.settings.profile.responders
        ranks_chosen = any(one.plugin.abilities.chooses_ranks for one in responders)
        for pod in pods if self._scheduler.hearing else ():
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
        self.hear(now)

    def hear(self, now: Seconds) -> None:
        """Take note of what has arrived by `now`."""
        for source in self._sources.values():
            source.hear(now)

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
        # A question and its answer before, who was there has been told all.
        connects_at = now + random.random() * CONNECT_PAUSE_S
        if self._there:
            connects_at = now - 2 * self._settings.delay_s
        return _Source(
            self._scheduler, self._settings, endpoint, slot, log, random, connects_at, rank=rank
        )


def _payload(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def _told_block_tokens(scheduler: Scheduler) -> int:
    """Tokens in a block of the first index that hears engines."""
    settings: Any = scheduler.settings.indexes[next(iter(scheduler.hearing))]
    tokens: int = settings.block_tokens
    return tokens
