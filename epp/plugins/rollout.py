"""Revisions of a deployment whose roles must match: only endpoints of one serve a request.

The KV cache of a prefill endpoint is of no use to a decode endpoint with another revision of the
model or the engine, and can corrupt its answers. Before any profile runs, this filter draws one
revision and drops the endpoints of all others.

Source: llm-d/llm-d-router, `requestcontrol/screener/disaggregatedsetrollout`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta, field

from epp.core.labels import parse_selector
from epp.core.types import pod_of
from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Endpoint,
    InferenceRequest,
    Parameters,
)

REVISION_LABEL: Final = "disaggregatedset.x-k8s.io/revision"
ROLE_LABEL: Final = "disaggregatedset.x-k8s.io/role"
_DRAW_SEED: Final = 0x7265_7669
"""Seed of the hash that draws a revision, so that other draws by the request id are independent."""
_SELECTORS_MAX: Final = 64

_Name = Annotated[str, Meta(min_length=1)]
_Pods = Mapping[str, Mapping[str, int]]
"""Number of pods by revision, then by role."""

_selector = lru_cache(maxsize=_SELECTORS_MAX)(parse_selector)


class SelectorMode(StrEnum):
    STRICT = "strict"
    """The request is served only by endpoints whose label has the value of the header."""
    PREFER = "prefer"
    """The response returns the label; a `header-label-affinity-scorer` can prefer it."""


class HeaderSelector(Parameters, frozen=True):
    """A header of the request that names a label of endpoints, and that the response returns."""

    header_name: _Name
    label_key: _Name
    mode: SelectorMode
    name: str = ""


class GatingMode(StrEnum):
    SUM = "sum"
    MAX_ROLE = "max-role"
    DISABLED = "disabled"


class RequiredRoles(Parameters, frozen=True):
    """Roles of which a revision needs at least one ready pod each."""

    values: Annotated[tuple[_Name, ...], Meta(min_length=1)]


class RevisionGating(Parameters, frozen=True):
    """The parameters of the choice of the revision that serves a request."""

    mode: GatingMode
    require_roles: RequiredRoles | None = None
    required_roles: tuple[_Name, ...] = ()
    """Alternative name of `requireRoles.values`, from a guide of llm-d; it applies if
    `requireRoles` is not given.
    """
    revision_label_key: _Name = REVISION_LABEL
    role_label_key: _Name = ROLE_LABEL
    revision_header_name: str = ""
    """Name of a header that selects the revision, as a strict entry of `headerSelectors` does. A
    guide of llm-d uses it.
    """

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles that a revision needs, without duplicates."""
        told = self.required_roles if self.require_roles is None else self.require_roles.values
        return tuple(dict.fromkeys(told))


class Scope(Parameters, frozen=True):
    """The pods that count for the choice of the revision."""

    label_selector: str = ""


class RolloutScreener(Parameters, frozen=True):
    """`disaggregatedset-rollout-screener`: all endpoints of a request have one revision, before any
    profile runs.

    A revision needs a ready pod of each of the roles `revisionGating.requireRoles.values`. One of
    those that have them is drawn for each request, by its number of ready pods: of all required
    roles (mode `sum`), or of the required role with the most pods in these revisions (mode
    `max-role`). The draw is a hash of the request id, so that calls with the same id get the same
    revision. A request is refused with 503 if no revision has every role. Mode `disabled` draws no
    revision.

    A strict entry of `headerSelectors` limits a request with its header to endpoints with that
    label, and refuses it with 503 if there is none. Such a header for the label of the revision
    replaces the draw; that revision must have every required role too. Every entry returns the
    label of the endpoint that was chosen, if it has that label, in a response header.

    The plugin has an effect once it is declared; a profile does not name it. Only pods that
    `scope.labelSelector` selects count for the draw.
    """

    type_name: ClassVar[str] = "disaggregatedset-rollout-screener"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("labels", "endpoints", "headers", "request_id"), marks_responses=True, warns=True
    )

    revision_gating: RevisionGating
    """Rule by which a revision is drawn for each request: the mode, the required roles and the names
    of the labels.
    """
    scope: Scope = field(default_factory=Scope)
    """Pods that count, by `labelSelector`, such as "app=vllm,role in (prefill,decode)"; all if it is
    empty.
    """
    header_selectors: tuple[HeaderSelector, ...] = ()
    """Headers that name labels of endpoints; each has `headerName`, `labelKey`, a `mode` and a
    `name`.
    """

    def __post_init__(self) -> None:
        gating = self.revision_gating
        if gating.mode is not GatingMode.DISABLED and not gating.roles:
            raise ValueError(
                f"revisionGating.requireRoles.values is empty; mode {gating.mode} needs the roles "
                "that a revision must have"
            )
        _selector(self.scope.label_selector)

    def warnings(self) -> Sequence[str]:
        """Return a sentence if a parameter is used under another name, and one if the mode is
        `disabled`, so that no revision is drawn; the caller adds the plugin's place in the
        document.
        """
        found = []
        if self.revision_gating.required_roles:
            found.append("revisionGating.requiredRoles is read as requireRoles.values; use that")
        if self.revision_gating.mode is GatingMode.DISABLED:
            found.append(
                "revisionGating.mode is disabled, so stages of one request can have different "
                "revisions"
            )
        return found

    @property
    def selectors(self) -> tuple[HeaderSelector, ...]:
        """Return the entries of `header_selectors`, and that of `revision_header_name`."""
        gating = self.revision_gating
        if not gating.revision_header_name:
            return self.header_selectors
        of_revision = HeaderSelector(
            header_name=gating.revision_header_name,
            label_key=gating.revision_label_key,
            mode=SelectorMode.STRICT,
        )
        return (*self.header_selectors, of_revision)

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        endpoints = candidates.endpoints
        keep = np.ones(len(endpoints), dtype=np.bool_)
        gating = self.revision_gating
        wanted: str | None = None
        for selector in self.selectors:
            value = request.headers.get(selector.header_name.lower(), "")
            if not value or selector.mode is not SelectorMode.STRICT:
                continue
            keep &= _labelled(endpoints, selector.label_key, value)
            if selector.label_key == gating.revision_label_key:
                wanted = value
        if gating.mode is GatingMode.DISABLED:
            return keep
        in_question = [one for one, kept in zip(endpoints, keep.tolist(), strict=True) if kept]
        pods = self._complete(self._counts(in_question))
        revision = self._revision(pods, request.request_id) if wanted is None else wanted
        if revision is None or revision not in pods:
            return np.zeros(len(endpoints), dtype=np.bool_)
        keep &= _labelled(endpoints, gating.revision_label_key, revision)
        return keep

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        labels = endpoint.labels
        return {
            selector.header_name.lower(): labels[selector.label_key]
            for selector in self.selectors
            if labels.get(selector.label_key)
        }

    def shares(self, endpoints: Sequence[Endpoint]) -> Mapping[str, float]:
        """Return the share of the requests without a strict header that each revision gets, by
        revision. It is 0 for a revision that lacks a required role. Return {} if revisions are not drawn.
        """
        if self.revision_gating.mode is GatingMode.DISABLED:
            return {}
        counts = self._counts(endpoints)
        weights = self._weights(self._complete(counts))
        total = sum(weights.values())
        return {name: weights.get(name, 0) / total if total else 0.0 for name in sorted(counts)}

    def _complete(self, counts: _Pods) -> _Pods:
        """Return those revisions of `counts` that have every required role."""
        required = len(self.revision_gating.roles)
        return {name: roles for name, roles in counts.items() if len(roles) == required}

    def _counts(self, endpoints: Sequence[Endpoint]) -> _Pods:
        """Return the number of pods in scope by revision, then by required role."""
        gating, scope = self.revision_gating, _selector(self.scope.label_selector)
        seen: set[tuple[str, str]] = set()
        counts: dict[str, dict[str, int]] = {}
        for endpoint in endpoints:
            labels, pod = endpoint.labels, pod_of(endpoint)
            revision = labels.get(gating.revision_label_key, "")
            role = labels.get(gating.role_label_key, "")
            if not revision or role not in gating.roles or pod in seen or not scope.matches(labels):
                continue
            seen.add(pod)
            by_role = counts.setdefault(revision, {})
            by_role[role] = by_role.get(role, 0) + 1
        return counts

    def _revision(self, pods: _Pods, request_id: str) -> str | None:
        """Return one of the revisions of `pods`, drawn by its weight, or None if there is none."""
        if not pods:
            return None
        by_name = self._weights(pods)
        names = sorted(by_name)
        weights = [by_name[name] for name in names]
        id_bytes = request_id.encode("utf-8", "surrogatepass")
        drawn = xxhash.xxh64_intdigest(id_bytes, seed=_DRAW_SEED) * sum(weights) >> 64
        return names[int(np.searchsorted(np.cumsum(weights), drawn, side="right"))]

    def _weights(self, pods: _Pods) -> dict[str, int]:
        """Return the weight in the draw of each revision of `pods`, which have every role."""
        gating = self.revision_gating
        counted = gating.roles
        if gating.mode is GatingMode.MAX_ROLE:
            totals = {role: sum(of[role] for of in pods.values()) for role in gating.roles}
            counted = (max(gating.roles, key=totals.__getitem__),)
        return {name: sum(of[role] for role in counted) for name, of in pods.items()}


def _labelled(endpoints: Sequence[Endpoint], key: str, value: str) -> Bools:
    """Return bool[n]: True for endpoints whose label `key` has the value `value`."""
    return np.array([one.labels.get(key) == value for one in endpoints], dtype=np.bool_)
