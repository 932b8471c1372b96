"""Creation of a session for each ext_proc stream, with the settings in force when the stream
opens.
"""

import time
from functools import partial
from random import Random

import msgspec

from epp.core.decision.scheduler import Scheduler
from epp.core.prompt.parse import ParserSet
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.flow_queue import FlowQueue
from epp.core.protocol.session import Gateway, Observer, Session, SessionSettings
from epp.core.protocol.waiting import Resolver
from epp.shell.found import Found


class Sessions:
    """A factory of sessions, whose `open` is called for each ext_proc stream. New `settings` apply
    to streams that open later.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: SessionSettings,
        observer: Observer,
        budget: BodyBudget,
        *,
        seed: int,
        resolver: Resolver | None = None,
        queue: FlowQueue | None = None,
    ) -> None:
        """Create the factory of sessions. `budget` is the memory budget of bodies that all streams
        share. Requests wait in `queue` if the scheduler's settings let them.

        `seed` determines generated request ids and the choices of model rewrites.
        """
        self._scheduler = scheduler
        self._observer = observer
        self._budget = budget
        self._resolver = resolver
        self.queue = queue
        self._queue_in_use = queue if queue is not None and queue.active else None
        self._request_ids = Random(f"{seed}:request-id")  # noqa: S311  names, not secrets
        self._rewrite_dice = Random(f"{seed}:rewrite")  # noqa: S311  weights, not secrets
        self.settings = settings

    def configure(self, parsers: ParserSet, resolver: Resolver | None = None) -> None:
        """Use the parsers of a new configuration for new sessions, and in them `resolver` for
        requests that must wait for data such as their token ids. Without a resolver no request
        waits for data. The queue adopts the new settings of the scheduler, which must have them.
        """
        self.settings = msgspec.structs.replace(self.settings, parsers=parsers)
        self._resolver = resolver
        queue = self.queue
        if queue is not None:
            queue.configure(time.monotonic())
            queue.know_priorities(self.settings.priorities.values())
            self._queue_in_use = queue if queue.active else None

    def pass_from(self, bytes_: int | None) -> None:
        """Let new sessions route request bodies of `bytes_` or more without reading them, while memory
        is scarce, unless their model may have to be rewritten; None removes the limit.
        """
        self.settings = msgspec.structs.replace(self.settings, pass_from_bytes=bytes_)

    def know(self, found: Found) -> None:
        """Use the inference objectives and model rewrites that discovery found, for new
        sessions.
        """
        self.settings = msgspec.structs.replace(
            self.settings,
            priorities=found.objectives,
            rewrite=partial(found.rewrites.target, random=self._rewrite_dice)
            if found.rewrites
            else None,
        )
        if self.queue is not None:
            self.queue.know_priorities(found.objectives.values())

    def open(self, gateway: Gateway) -> Session:
        """Return the session for a new ext_proc stream of `gateway`."""
        return Session(
            self._scheduler,
            self.settings,
            gateway,
            self._observer,
            self._new_request_id,
            self._budget,
            self._resolver,
            self._queue_in_use,
        )

    def _new_request_id(self) -> str:
        return f"{self._request_ids.getrandbits(128):032x}"
