"""One request of a client, and its state over the run."""

import math
from enum import StrEnum
from typing import TYPE_CHECKING

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
    """The result of a request for its client. Each request has exactly one."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """The picker refused it."""
    FAILED = "failed"
    """The pod could not serve it, or died."""
    ABORTED = "aborted"
    """The client left."""


class Failure(StrEnum):
    """The reason why a pod did not serve a request."""

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
    """A request and everything that happened to it. Times are simulated seconds."""

    __slots__ = (
        "arrival", "arrived_at", "ended_at", "engine", "failure", "fate", "finished_at", "first_token_at", "handover", "hashes",
        "life", "metrics_age_s", "passed_over", "pod", "policy", "predicted_cached_tokens", "refusal", "replica", "retries",
        "route", "routed_at", "sequence", "status", "submitted_at", "wait",
    )  # fmt: skip

    def __init__(self, sequence: int, arrival: Arrival, arrived_at: Seconds) -> None:
        self.sequence = sequence
        """Number of the request in order of arrival, starting from 0."""
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.replica: int | None = None
        """Picker that the request reaches, or None if no picker runs."""
        self.retries = 0
        """Number of retries. The fields below describe the last attempt."""
        self.forget_attempt()

    def forget_attempt(self) -> None:
        """Reset the fields of an attempt before the request is sent."""
        self.routed_at: Seconds | None = None
        self.wait: Wait | None = None
        """Wait at its picker, which has read the request and cannot place it yet. None if it does
        not wait."""
        self.route: Route | None = None
        self.policy: Policy | None = None
        """Picker process that routed the request, which may have ended since."""
        self.refusal: Refusal | None = None
        self.pod: SimulatedPod | None = None
        """Pod that serves the request, or that it was sent to."""
        self.passed_over = 0
        """Endpoints that the picker named and that the gateway could not connect to."""
        self.life = 0
        self.predicted_cached_tokens = 0
        self.metrics_age_s: Seconds = math.inf
        """Age of the chosen pod's metrics at the decision, in seconds; infinite if unknown."""
        self.submitted_at: Seconds | None = None
        self.hashes: PromptHashes | None = None
        """Hashes of the prompt, kept between the picker and the engine."""
        self.handover: Handover | None = None
        """Prefill leg and KV transfer, or None if its pod computes the prompt."""
        self.engine: EngineRequest | None = None
        self.first_token_at: Seconds | None = None
        self.finished_at: Seconds | None = None
        self.ended_at: Seconds | None = None
        self.fate: Fate | None = None
        self.failure: Failure | None = None
        self.status = 0
        """HTTP status of the answer; 0 before it."""

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
