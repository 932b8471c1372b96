"""What the conformance suite of the Gateway API inference extension steers and watches a picker by.

Only for tests: any client could steer its own requests. No default names it; a configuration that
does says so by the type.
"""

import re
from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np

from epp.core.address import host_of
from epp.core.knowledge.pool import canonical_address
from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Endpoint,
    InferenceRequest,
    Parameters,
)

SELECTION_HEADER: Final = "test-epp-endpoint-selection"
SERVED_HEADER: Final = "x-conformance-test-served-endpoint"
ECHO_HEADER: Final = "x-echo-set-header"
SERVED_MISSING: Final = "fail: missing destination endpoint served metadata"
"""What the suite expects of a picker whose gateway does not say who served: the gateway fails."""
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header name, which a pseudo header's is not (RFC 9110, 5.6.2)."""


class HeaderBasedTesting(Parameters, frozen=True):
    """Only for conformance tests: keep the endpoints that the client lists.

    They stand in header `test-epp-endpoint-selection` as "ip:port" or a bare ip, with commas
    between them; without the header all stay. The response repeats the headers ("name:value",
    commas between them) that the request lists in `X-Echo-Set-Header`.
    """

    type_name: ClassVar[str] = "header-based-testing-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("headers", "endpoints"), marks_responses=True)

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        wanted = request.headers.get(SELECTION_HEADER, "").strip()
        if not wanted:
            return np.ones(len(candidates), dtype=np.bool_)
        named = {canonical_address(entry) for entry in wanted.split(",")}
        addresses = [canonical_address(endpoint.address) for endpoint in candidates.endpoints]
        return np.array(
            [not named.isdisjoint((address, host_of(address))) for address in addresses],
            dtype=np.bool_,
        )

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        """What the client asked to see again; who served is not its to say."""
        echoed = (entry.partition(":") for entry in request.headers.get(ECHO_HEADER, "").split(","))
        found = ((name.strip().lower(), value.strip()) for name, _, value in echoed)
        return {
            name: value for name, value in found if _NAME.fullmatch(name) and name != SERVED_HEADER
        }


class DestinationEndpointServedVerifier(Parameters, frozen=True):
    """Only for conformance tests: the response says who served it.

    In `x-conformance-test-served-endpoint`, as the gateway tells and never as the picker assumes. It
    works by being declared; no profile names it.
    """

    type_name: ClassVar[str] = "destination-endpoint-served-verifier"
    abilities: ClassVar[Abilities] = Abilities(marks_responses=True)

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        return {SERVED_HEADER: served or SERVED_MISSING}
