"""Plugins for the conformance suite of the Gateway API inference extension.

They are only for tests, because any client could steer its own requests with them. No default
configuration uses them.
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
"""Value of `SERVED_HEADER` that the suite expects if the gateway does not report which endpoint
served a request.
"""
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Regular expression of a header name (RFC 9110, 5.6.2), which excludes pseudo headers such as
`:path`.
"""


class HeaderBasedTesting(Parameters, frozen=True):
    """Keep the endpoints that the client lists; only for conformance tests.

    The request header `test-epp-endpoint-selection` lists these endpoints as "ip:port" or a bare
    ip, separated by commas. All endpoints stay if the request does not have this header. The
    response repeats the headers ("name:value", separated by commas) that the request lists in
    `X-Echo-Set-Header`.
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
        """Return the headers that the picker sets on the response, because the request asks for
        them in its header `X-Echo-Set-Header`; `SERVED_HEADER` and invalid names are left out.
        """
        echoed = (entry.partition(":") for entry in request.headers.get(ECHO_HEADER, "").split(","))
        found = ((name.strip().lower(), value.strip()) for name, _, value in echoed)
        return {
            name: value for name, value in found if _NAME.fullmatch(name) and name != SERVED_HEADER
        }


class DestinationEndpointServedVerifier(Parameters, frozen=True):
    """Name the endpoint that served a request in its response; only for conformance tests.

    The response header `x-conformance-test-served-endpoint` contains the address that the gateway
    reports, never one that the picker assumes. Declaring `destination-endpoint-served-verifier` in
    the document enables it; no scheduling profile needs to name it.
    """

    type_name: ClassVar[str] = "destination-endpoint-served-verifier"
    abilities: ClassVar[Abilities] = Abilities(marks_responses=True)

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        return {SERVED_HEADER: served or SERVED_MISSING}
