"""All that a plugin needs, in one place whose path stays.

`docs/plugins.md` is the guide. The protocols and nouns live where the core uses them; a plugin,
built in or installed, names them by this module.
"""

from epp.core.decision.plugin import (
    Filter,
    GoesBySessions,
    MarksResponses,
    Picker,
    ReadsColumns,
    ReadsIndex,
    Scorer,
    TellsCost,
)
from epp.core.duration import Duration
from epp.core.knowledge.candidates import (
    AdapterColumns,
    Affinity,
    Bools,
    Candidates,
    Floats,
    Ints,
)
from epp.core.knowledge.index import (
    Abilities,
    AffinityIndex,
    AffinityIndexSettings,
    CountsInflight,
    IndexMeasures,
    LimitsMemory,
    MeasuresItself,
    Origin,
    SharedIndex,
)
from epp.core.moment import Moment
from epp.core.parameters import Parameters, Plugin
from epp.core.prompt.request import InferenceRequest
from epp.core.session_tokens import SessionTokens
from epp.core.types import ApiKind, Endpoint, Seconds

__all__ = [
    "Abilities",
    "AdapterColumns",
    "Affinity",
    "AffinityIndex",
    "AffinityIndexSettings",
    "ApiKind",
    "Bools",
    "Candidates",
    "CountsInflight",
    "Duration",
    "Endpoint",
    "Filter",
    "Floats",
    "GoesBySessions",
    "IndexMeasures",
    "InferenceRequest",
    "Ints",
    "LimitsMemory",
    "MarksResponses",
    "MeasuresItself",
    "Moment",
    "Origin",
    "Parameters",
    "Picker",
    "Plugin",
    "ReadsColumns",
    "ReadsIndex",
    "Scorer",
    "Seconds",
    "SessionTokens",
    "SharedIndex",
    "TellsCost",
]
