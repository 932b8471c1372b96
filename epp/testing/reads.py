"""Stand-ins for a request and its candidates that record which values a plugin reads, to compare
them with its declaration.
"""

from collections.abc import Mapping
from typing import Any, Final

from epp.core.knowledge.candidates import Affinity, Candidates, EngineLoad
from epp.core.knowledge.request_load import RequestLoad
from epp.core.prompt.request import InferenceRequest

_OF_CANDIDATES: Final[Mapping[str, str]] = {
    "metrics_age_s_max": "metrics_age_s",
    "metrics_age_s_of": "metrics_age_s",
    "all_observed_within": "metrics_age_s",
    "inflight_requests_of": "inflight_requests",
    "adapters_reported": "adapter_state",
    "prefill_alike": "prefill_tokens_per_s",
    "common_prefill_tokens_per_s": "prefill_tokens_per_s",
    "name_of": "endpoints",
    "labelled": "labels",
    "prefix_match": "matched_blocks",
}
"""Name under which a plugin declares the read of a column, by the other names under which it can
read the column.
"""
_OF_REQUEST: Final[Mapping[str, str]] = {
    **dict.fromkeys(("chains", "chains_of", "tails", "tails_of", "block_hash"), "prompts"),
    "media_items": "media",
    "prompt_count": "prompts",
    **dict.fromkeys(("first_text", "opening", "segments", "cache_salt", "api"), "prompts"),
}
_ANYBODY: Final = frozenset({"slot", "block_tokens", "take", "affinity"})
"""Members of candidates that a plugin need not declare to read, or that record their reads
themselves.
"""


class ReadsObserved:
    """A recorder of the values that a plugin reads from a request and candidates."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def request(self, of: InferenceRequest) -> Any:
        """Return a stand-in for the request `of` that records each field that is read."""
        return _Watched(of, self, _OF_REQUEST)

    def candidates(self, of: Candidates) -> Any:
        """Return a stand-in for the candidates `of` that records each column that is read."""
        return _WatchedCandidates(of, self, _OF_CANDIDATES)


class _Watched:
    """A stand-in for a request that records which of its values are read."""

    def __init__(self, of: Any, reads: ReadsObserved, names: Mapping[str, str]) -> None:
        self._of = of
        self._reads = reads
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name == "moment":
            return _Watched(self._of.moment, self._reads, {})
        self._reads.names.add(self._names.get(name, name))
        return getattr(self._of, name)


class _WatchedCandidates(_Watched):
    """A stand-in for candidates that records which of their columns are read."""

    def __len__(self) -> int:
        return len(self._of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name) if name in _ANYBODY else super().__getattr__(name)

    def engine_load(self) -> EngineLoad:
        self._reads.names |= {"waiting_requests", "running_requests"}
        self._reads.names |= {"kv_cache_usage", "kv_capacity_tokens"}
        load: EngineLoad = self._of.engine_load()
        return load

    def request_load(self, load: EngineLoad) -> RequestLoad:
        self._reads.names |= {"inflight_requests", "inflight_context_tokens"}
        requests: RequestLoad = self._of.request_load(load)
        return requests

    def take(self, keep: Any) -> Any:
        return _WatchedCandidates(self._of.take(keep), self._reads, self._names)

    def affinity(self, name: str) -> Affinity:
        if not name:
            self._reads.names.add("matched_blocks")
        found: Affinity = self._of.affinity(name)
        return found
