"""One simulated request of a client, with its state during the run."""

import math
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from epp.core.protocol.flow_queue import Place
from epp.core.protocol.waiting import Wait
from epp.core.types import Refusal, Seconds
from sim.cluster.policies import Policy, Route
from sim.cluster.simulated_pod import SimulatedPod
from sim.engine.request import EngineRequest
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes

if TYPE_CHECKING:
    from sim.cluster.handovers import Handover


class Fate(StrEnum):
    """The final result of a request for its client. Each request has exactly one."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """The picker refused the request, or evicted it before its response began."""
    FAILED = "failed"
    """The request could not be served, for one of the reasons in `Failure`."""
    ABORTED = "aborted"
    """The client aborted the request."""


class Failure(StrEnum):
    """The reason why a request failed. The values are keys of summaries."""

    CONTEXT = "longer than the model's context"
    KV_CACHE = "longer than the KV cache"
    ADAPTER = "for an adapter, without adapter slots"
    RANK = "for a data-parallel rank that the engine has not"
    POD_DIED = "the pod died"
    PREFILL_POD_DIED = "the prefill pod died"
    KV_TRANSFER = "the prefill pod died before its KV blocks were read"
    UNREACHABLE = "the gateway did not get through"
    NO_PICKER = "no picker was there"


class SimulatedRequest:
    """A simulated request and what happened to it. Times are in simulated seconds."""

    __slots__ = (
        "arrival",
        "arrived_at",
        "ended_at",
        "engine",
        "failure",
        "fate",
        "finished_at",
        "first_token_at",
        "handover",
        "hashes",
        "life",
        "metrics_age_s",
        "passed_over",
        "place",
        "pod",
        "policy",
        "predicted_cached_tokens",
        "refusal",
        "replica",
        "retries",
        "route",
        "routed_at",
        "sent_at",
        "sequence",
        "spare",
        "status",
        "submitted_at",
        "wait",
    )  # fmt: skip

    def __init__(self, sequence: int, arrival: Arrival, arrived_at: Seconds) -> None:
        self.sequence = sequence
        """Number of the request in order of arrival, counted from 0."""
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.replica: int | None = None
        """Number of the picker that the request is sent to, or None if no picker runs."""
        self.retries = 0
        """Number of retries of the request so far. The fields below describe the last attempt."""
        self.sent_at = arrived_at
        self.forget_attempt()

    def forget_attempt(self) -> None:
        """Reset the fields that describe one attempt of the request, before it is sent for the
        first time or again.
        """
        self.routed_at: Seconds | None = None
        self.forget_placement()
        self.wait: Wait | None = None
        """Handle of the request's wait at its picker, for the renderer or in the queue. None if the
        request does not wait.
        """
        self.place: Place | None = None
        """Place of the request in its picker's queue, also after it was placed; None if it did not
        wait there.
        """
        self.policy: Policy | None = None
        """Policy of the picker process that routed the request. The process may have ended
        since.
        """
        self.refusal: Refusal | None = None
        self.passed_over = 0
        """Number of times that the gateway went on to the next endpoint that the picker had named
        for the request, because it could not connect.
        """
        self.life = 0
        self.metrics_age_s: Seconds = math.inf
        """Age in seconds of the chosen pod's metrics when the picker decided; infinite if
        unknown.
        """
        self.first_token_at: Seconds | None = None
        self.finished_at: Seconds | None = None
        self.ended_at: Seconds | None = None
        self.fate: Fate | None = None
        self.failure: Failure | None = None
        self.status = 0
        """HTTP status of the answer; 0 if there is none."""

    def forget_placement(self) -> None:
        """Reset the fields that describe where the request is served. After an eviction they are those
        of a request that was refused.
        """
        self.route: Route | None = None
        self.pod: SimulatedPod | None = None
        """Pod to which the gateway sent the request."""
        self.predicted_cached_tokens = 0
        self.submitted_at: Seconds | None = None
        self.hashes: PromptHashes | None = None
        """Hashes of the prompt, stored from routing until the engines have received the request."""
        self.handover: Handover | None = None
        """Prefill leg and KV transfer of the request, or None if the pod that decodes the request
        also computes its prompt.
        """
        self.engine: EngineRequest | None = None
        self.spare: Callable[[], None] | None = None
        """Function that protects the request against eviction, or None if it cannot be evicted."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached, as `usage` reports them: those of the pod that computed
        the prompt.
        """
        if self.handover is not None:
            return self.handover.cached_tokens
        return 0 if self.engine is None else self.engine.cached_tokens

    @property
    def request_id(self) -> str:
        return str(self.sequence)
