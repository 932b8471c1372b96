"""One request of a client, and what becomes of it."""

import math
from enum import StrEnum

from epp.core.protocol.waiting import Wait
from epp.core.types import Refusal, Seconds
from sim.cluster.policies import Policy, Route
from sim.cluster.simulated_pod import SimulatedPod
from sim.engine.request import EngineRequest
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes


class Fate(StrEnum):
    """How a request ended for its client. Each has exactly one."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """By the picker."""
    FAILED = "failed"
    """The pod could not serve it, or died."""
    ABORTED = "aborted"
    """The client left."""


class Failure(StrEnum):
    """Why a pod did not serve a request."""

    CONTEXT = "longer than the model's context"
    KV_CACHE = "longer than the KV cache"
    ADAPTER = "for an adapter, without adapter slots"
    RANK = "for a data-parallel rank that the engine has not"
    POD_DIED = "the pod died"
    UNREACHABLE = "the gateway did not get through"
    NO_PICKER = "no picker was there"


class SimulatedRequest:
    """One request and all that happened to it. Times are simulated seconds."""

    __slots__ = (
        "arrival", "arrived_at", "ended_at", "engine", "failure", "fate", "finished_at", "first_token_at", "hashes",
        "life", "metrics_age_s", "passed_over", "pod", "policy", "predicted_cached_tokens", "refusal", "replica", "retries",
        "route", "routed_at", "sequence", "status", "submitted_at", "wait",
    )  # fmt: skip

    def __init__(self, sequence: int, arrival: Arrival, arrived_at: Seconds) -> None:
        self.sequence = sequence
        """Counts requests from 0, in the order of their arrival."""
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.replica: int | None = None
        """The picker that it reaches; None: there is none."""
        self.retries = 0
        """How often it was sent again; what follows is of the last time."""
        self.forget_attempt()

    def forget_attempt(self) -> None:
        """Nothing has happened to it since it was sent."""
        self.routed_at: Seconds | None = None
        self.wait: Wait | None = None
        """It waits at its picker, which has read it and cannot place it yet."""
        self.route: Route | None = None
        self.policy: Policy | None = None
        """The process that routed it, which may be gone since."""
        self.refusal: Refusal | None = None
        self.pod: SimulatedPod | None = None
        """Which serves it, or is asked to."""
        self.passed_over = 0
        """Endpoints that the picker named and that the gateway did not get through to."""
        self.life = 0
        self.predicted_cached_tokens = 0
        self.metrics_age_s: Seconds = math.inf
        """How old the chosen pod's metrics were when it was chosen; infinite if unknown."""
        self.submitted_at: Seconds | None = None
        self.hashes: PromptHashes | None = None
        """From the picker to the engine."""
        self.engine: EngineRequest | None = None
        self.first_token_at: Seconds | None = None
        self.finished_at: Seconds | None = None
        self.ended_at: Seconds | None = None
        self.fate: Fate | None = None
        self.failure: Failure | None = None
        self.status = 0
        """HTTP status, 0 until there is one."""

    @property
    def request_id(self) -> str:
        return str(self.sequence)
