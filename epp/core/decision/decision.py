"""The decision that the scheduler returns for a request that it placed."""

from msgspec import Struct

from epp.core.decision.account import Account, Leg
from epp.core.decision.choice import predicted_tokens
from epp.core.decision.profile import Marker, RequestMarker
from epp.core.decision.rank_choice import RankChooser
from epp.core.knowledge.candidates import Candidates
from epp.core.knowledge.inflight import Lease
from epp.core.types import Endpoint, Stage


class Decision(Struct, frozen=True, kw_only=True, gc=False):
    """The placement of one request: its decision record, and the plugins that set headers for it."""

    account: Account
    """Record of the decision: the request, the chosen endpoint and the reasons."""
    leg: Leg
    """First leg of the decision record, whose endpoint receives the request from the gateway."""
    markers: tuple[Marker, ...] = ()
    """Plugins that set headers on the response to the client."""
    request_markers: tuple[RequestMarker, ...] = ()
    """Plugins that set headers on the request to the endpoint."""
    offered: Candidates | None = None
    """Candidates of the decision before filtering, or None if there are no `request_markers`."""
    earlier: tuple[Leg, ...] = ()
    """Legs of the prefill and encode stages; () if one endpoint serves the whole request."""
    primary_port: int = 0
    """Port of the endpoint's pod to which the gateway sends the request, with a header that names the
    endpoint; 0 if it sends the request to the endpoint itself.
    """
    rank_chooser: RankChooser | None = None
    """Plugin that selects a data-parallel rank, or None if none is configured."""

    @property
    def number(self) -> int:
        """Return the number of the decision; the scheduler counts its decisions from 1."""
        return self.account.number

    @property
    def endpoint(self) -> Endpoint:
        return self.leg.endpoint

    @property
    def lease(self) -> Lease:
        return self.leg.lease

    @property
    def prefiller(self) -> Endpoint | None:
        """Return the endpoint of the prefill leg, or None if the request has no such leg."""
        legs = (leg for leg in self.earlier if leg.stage is Stage.PREFILL)
        return next((leg.endpoint for leg in legs), None)

    @property
    def encoders(self) -> tuple[Endpoint, ...]:
        """Return the endpoints that encode media; () if the request has no encode leg."""
        legs = (leg for leg in self.earlier if leg.stage is Stage.ENCODE)
        return next(((leg.endpoint, *leg.fallbacks) for leg in legs), ())

    @property
    def predicted_tokens(self) -> int:
        """Return the number of prompt tokens that the endpoint that now serves the request was
        estimated to have cached when the request was sent to it.
        """
        leg = self.leg
        tokens = leg.request.prompt_tokens
        return predicted_tokens(leg.lease.matched_blocks, leg.block_tokens, tokens)

    @property
    def rank(self) -> int | None:
        """Return the data-parallel rank that must serve the request, or None if the engine chooses."""
        return self.leg.rank

    @property
    def marks_requests(self) -> bool:
        """Return whether any plugin may set headers on requests, even if it sets none on this one."""
        return bool(self.request_markers) or self.rank_chooser is not None

    def request_headers(self) -> dict[str, str]:
        """Return the headers to set on the request to the endpoint, by name. Call this before the
        scheduler decides again.
        """
        found: dict[str, str] = {}
        if self.offered is not None:
            for marker in self.request_markers:
                request = self.lease.request
                found.update(marker.request_headers(request, self.offered, self.endpoint))
        if self.rank_chooser is not None and self.rank is not None:
            found[self.rank_chooser.plugin.rank_header] = str(self.rank)
        return found

    @property
    def own_request_headers(self) -> frozenset[str]:
        """Return the names of request headers that only plugins may set. The gateway must remove
        such headers that a client sent.
        """
        names = {name for marker in self.request_markers for name in marker.plugin.own_headers}
        if self.rank_chooser is not None:
            names.add(self.rank_chooser.plugin.rank_header)
        return frozenset(names)

    def response_headers(self, served: str) -> dict[str, str]:
        """Return the headers to set on the response to the client, by name, such as a session
        token.

        `served` is the address that the gateway reports as the origin of the response, or "" if it
        reports none.
        """
        found: dict[str, str] = {}
        for marker in self.markers:
            found.update(marker.response_headers(self.lease.request, self.endpoint, served))
        return found
