"""Requests that a client wants served only if an endpoint has the prompt cached.

A coordinator sends the header `Prefer: if-available` with a request that it will otherwise prefill
first. The picker answers 412 if too little of the prompt is cached, and counts the request at no
endpoint. The header has no effect if one profile chooses among all candidates (`Stages.alone`).

Sources: RFC 7240 (`Prefer`), RFC 9110 section 15.5.13 (412), llm-d/llm-d-router pull request 2335.
"""

from collections.abc import Mapping
from typing import Final

from epp.core.types import Refusal, RefusalReason

PREFER_HEADER: Final = "prefer"
_IF_AVAILABLE: Final = "if-available"


def if_available(headers: Mapping[str, str]) -> bool:
    """Return whether the header `prefer` has the preference `if-available`, in any case and with
    any value or parameters.
    """
    told = headers.get(PREFER_HEADER)
    if not told:
        return False
    names = (part.partition(";")[0].partition("=")[0].strip() for part in told.split(","))
    return any(name.lower() == _IF_AVAILABLE for name in names)


def not_cached(endpoint: str, prompt_tokens: int, cached_tokens: int) -> Refusal:
    """Return the refusal (status 412) of a request of whose prompt too little is cached at
    `endpoint`.
    """
    return Refusal(
        reason=RefusalReason.NOT_CACHED,
        status=412,
        message=(
            f"{cached_tokens} of {prompt_tokens} prompt tokens are cached at {endpoint}, "
            "which is too few for Prefer: if-available"
        ),
    )
