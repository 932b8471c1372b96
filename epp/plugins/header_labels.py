"""Labels of endpoints that a request prefers by a header, and that the response returns.

Source: llm-d/llm-d-router, `scheduling/scorer/headerlabelaffinity`.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    Abilities,
    Candidates,
    Endpoint,
    Floats,
    InferenceRequest,
    Parameters,
)


class HeaderLabelAffinity(Parameters, frozen=True):
    """Prefer endpoints whose label `label_key` equals the request header `header_name`.

    The score is 1 for these endpoints and 0 for the others. All scores are 0 without the header.
    The response has a header of the same name with the label of the endpoint that was chosen,
    unless that endpoint lacks the label or `stamp_response_header` is false. A client can send it
    back with its next request.
    """

    type_name: ClassVar[str] = "header-label-affinity-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("labels", "headers"), marks_responses=True)

    header_name: Annotated[str, Meta(min_length=1)]
    label_key: Annotated[str, Meta(min_length=1)]
    stamp_response_header: bool = True

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        wanted = request.headers.get(self.header_name.lower(), "")
        if not wanted:
            return np.zeros(len(candidates))
        labels = candidates.labels
        return np.array([one.get(self.label_key) == wanted for one in labels], dtype=np.float64)

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        label = endpoint.labels.get(self.label_key, "")
        return {self.header_name.lower(): label} if label and self.stamp_response_header else {}
