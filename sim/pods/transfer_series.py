"""The series of a metrics page about KV transfers, which only engines with a connector have.

Names, types and texts are those of vLLM 0.32 with its NIXL connector. The decode engine counts
transfers, the prefill engine expired leases. Post times and descriptors are not simulated, so their
histograms stay empty.
"""

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epp.core.types import Seconds
from sim.engine.engine import EngineSnapshot

# Bucket bounds of histograms as in vLLM, in seconds, bytes, and descriptors per transfer.
_XFER_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_POST_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
_BYTES: Final = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
_DESCRIPTORS: Final = (
    *(10, 20, 30, 50, 75, 100, 200, 400),
    *(1_000, 2_000, 4_000, 10_000, 20_000, 50_000),
)
_HISTOGRAMS: Final[tuple[tuple[str, str, tuple[float, ...]], ...]] = (
    (
        "nixl_xfer_time_seconds",
        "Histogram of transfer duration for NIXL KV Cache transfers.",
        _XFER_S,
    ),
    (
        "nixl_post_time_seconds",
        "Histogram of transfer post time for NIXL KV Cache transfers.",
        _POST_S,
    ),
    (
        "nixl_bytes_transferred",
        "Histogram of bytes transferred per NIXL KV Cache transfers.",
        _BYTES,
    ),
    (
        "nixl_num_descriptors",
        "Histogram of number of descriptors per NIXL KV Cache transfers.",
        _DESCRIPTORS,
    ),
)
_COUNTERS: Final = (
    ("nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers."),
    ("nixl_num_failed_notifications", "Number of failed NIXL KV Cache notifications."),
    (
        "nixl_num_kv_expired_reqs",
        (
            "Number of requests that had their KV expire. NOTE: This metric is tracked on the P "
            "instance."
        ),
    ),
)


class TransferSeries:
    """The metrics of KV transfers on the metrics page of one engine. `labels` are the values of the
    page's common labels.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        names = list(labels)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, names, registry=registry, buckets=buckets).labels(
                **labels
            )
            for name, text, buckets in _HISTOGRAMS
        }
        self._counters = {
            name: Counter(f"vllm:{name}", text, names, registry=registry).labels(**labels)
            for name, text in _COUNTERS
        }
        stages = Gauge(
            "vllm:num_requests_kv_fetch_by_stage",
            "Number of requests that fetch KV from another engine, by stage.",
            [*names, "stage"],
            registry=registry,
        )
        self._to_fetch = stages.labels(**labels, stage="waiting_to_start")
        self._fetching = stages.labels(**labels, stage="in_progress")
        self._fetched = stages.labels(**labels, stage="completed_waiting")

    def show(self, after: EngineSnapshot) -> None:
        """Set the numbers of requests that fetch KV blocks, by stage, to those in `after`."""
        self._to_fetch.set(after.to_fetch)
        self._fetching.set(after.fetching)
        self._fetched.set(after.fetched)

    def transferred(self, size_bytes: float, transfer_s: Seconds) -> None:
        """Count a KV transfer whose blocks this decode engine received."""
        self._histograms["nixl_bytes_transferred"].observe(size_bytes)
        self._histograms["nixl_xfer_time_seconds"].observe(transfer_s)

    def transfer_failed(self) -> None:
        """Count a KV transfer whose blocks did not arrive at this decode engine."""
        self._counters["nixl_num_failed_transfers"].inc()

    def lease_expired(self) -> None:
        """Count a prefill leg whose blocks this engine released before they were read."""
        self._counters["nixl_num_kv_expired_reqs"].inc()
