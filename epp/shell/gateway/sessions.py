"""Makes the session of each stream, by the settings that are in force when it opens."""

from functools import partial
from random import Random

import msgspec

from epp.core.decision.scheduler import Scheduler
from epp.core.prompt.parse import ParserSet
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.session import Gateway, Observer, Session, SessionSettings
from epp.core.protocol.waiting import Resolver
from epp.shell.found import Found


class Sessions:
    """`open` is what `ExtProc` calls; `settings` changes for streams that open later."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: SessionSettings,
        observer: Observer,
        budget: BodyBudget,
        *,
        seed: int,
        resolver: Resolver | None = None,
    ) -> None:
        """`budget` of all streams; `seed` of the names of requests that have none, and of rewrites."""
        self._scheduler = scheduler
        self._observer = observer
        self._budget = budget
        self._resolver = resolver
        self._request_ids = Random(f"{seed}:request-id")  # noqa: S311  names, not secrets
        self._rewrite_dice = Random(f"{seed}:rewrite")  # noqa: S311  weights, not secrets
        self.settings = settings

    def configure(self, parsers: ParserSet, resolver: Resolver | None = None) -> None:
        """The document names other parsers, or what requests wait for."""
        self.settings = msgspec.structs.replace(self.settings, parsers=parsers)
        self._resolver = resolver

    def pass_from(self, bytes_: int | None) -> None:
        """Memory is scarce: bodies of so many bytes are routed unread; None: it is not."""
        self.settings = msgspec.structs.replace(self.settings, pass_from_bytes=bytes_)

    def know(self, found: Found) -> None:
        """Discovery found other objectives or rewrites."""
        self.settings = msgspec.structs.replace(
            self.settings,
            priorities=found.objectives,
            rewrite=partial(found.rewrites.target, random=self._rewrite_dice)
            if found.rewrites
            else None,
        )

    def open(self, gateway: Gateway) -> Session:
        """The session of one more stream of `gateway`."""
        return Session(
            self._scheduler,
            self.settings,
            gateway,
            self._observer,
            self._new_request_id,
            self._budget,
            self._resolver,
        )

    def _new_request_id(self) -> str:
        return f"{self._request_ids.getrandbits(128):032x}"
