"""The roles of pods, and rules that choose the prefill pod of a request for policies that do not.

With such a rule, the picker chooses only among the pods that decode, which include pods without a
role. Baselines need a rule to serve disaggregated requests.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint
from epp.plugins.filters import ROLE_LABEL, DecodeRole, PrefillRole

PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""Roles as values of the label `llm-d.ai/role`. The filters of the picker define all values."""


def prefills(labels: Mapping[str, str]) -> bool:
    """Return whether a pod with these labels serves prefill legs; the rule of `prefill-filter`."""
    return labels.get(ROLE_LABEL) in PrefillRole.roles


def decodes(labels: Mapping[str, str]) -> bool:
    """Return whether a pod with these labels serves decode legs; the rule of `decode-filter`.

    A pod without a role decodes.
    """
    return labels.get(ROLE_LABEL) in DecodeRole.roles


class PrefillRule(Protocol):
    """A choice of the prefill pod, after the picker has chosen the decode pod."""

    def choose(
        self, request: InferenceRequest, decode: Endpoint, prefill: Sequence[Endpoint]
    ) -> Endpoint | None:
        """Return one of the announced `prefill` endpoints, or None to compute the prompt at
        `decode`.
        """
        ...


class RoundRobinPrefill:
    """A rule that chooses prefill endpoints round robin, for prompts of at least `tokens_min`
    tokens.
    """

    def __init__(self, *, tokens_min: int = 0) -> None:
        self._tokens_min = tokens_min
        self._chosen = 0

    def choose(
        self, request: InferenceRequest, decode: Endpoint, prefill: Sequence[Endpoint]
    ) -> Endpoint | None:
        if not prefill or request.prompt_tokens < self._tokens_min:
            return None
        chosen = prefill[self._chosen % len(prefill)]
        self._chosen += 1
        return chosen
