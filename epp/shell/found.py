"""The results of discovery (endpoints, objectives, rewrites), from a file or from Kubernetes."""

from collections.abc import Mapping

from msgspec import Struct, field

from epp.core.prompt.rewrite import ModelRewrites
from epp.core.types import Endpoint


class Found(Struct, frozen=True, kw_only=True):
    """The endpoints, objectives and model rewrites that discovery found."""

    endpoints: tuple[Endpoint, ...] = ()
    objectives: Mapping[str, int] = field(default_factory=dict)
    """Priority of each inference objective, by the objective's name."""
    rewrites: ModelRewrites = field(default_factory=ModelRewrites)
