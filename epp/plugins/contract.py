"""Everything that a plugin imports, in one module with a stable path.

`docs/plugins.md` is the guide. The protocols and types are defined where the core uses them.
Built-in and installed plugins import them from this module.
"""

from epp.core.abilities import Abilities, Origin
from epp.core.decision.plugin import (
    ChoosesRanks,
    Filter,
    GoesBySessions,
    HoldsRequests,
    MarksRequests,
    MarksResponses,
    Picker,
    ReadsIndex,
    Scorer,
    TellsCost,
)
from epp.core.decision.profile import highest
from epp.core.decision.stages import (
    KV_BYTES_PER_TOKEN,
    LINK_BYTES_PER_S,
    PREFILL_DELAY,
    REMOTE_OVERHEAD_S,
    REMOTE_OVERHEAD_S_PER_TOKEN,
    UNMEASURED_FACTOR,
    ByTime,
)
from epp.core.duration import Duration, check_above_zero
from epp.core.knowledge.affinity import SessionSources
from epp.core.knowledge.agent_sessions import AGENT_HEADERS, AGENT_SESSIONS, ROOM
from epp.core.knowledge.candidates import (
    REPORTED_S_MAX,
    AdapterColumns,
    Affinity,
    Bools,
    Candidates,
    EngineLoad,
    Floats,
    Ints,
)
from epp.core.knowledge.hit_accuracy import Correction
from epp.core.knowledge.index import (
    EXACT,
    HOST_BLOCKS,
    AffinityIndex,
    AffinityIndexSettings,
    CorrectedIndex,
    CountsInflight,
    IndexMeasures,
    LimitsMemory,
    MeasuresItself,
    SharedIndex,
)
from epp.core.knowledge.latency import ExpectedLatency, Slo
from epp.core.knowledge.prefill_speed import ATTENTION_TOKENS, STEP_TOKENS, prefill_work
from epp.core.knowledge.prefix import PrefixIndex, PrefixIndexSettings
from epp.core.knowledge.rendezvous import Hashes, rendezvous_weights
from epp.core.knowledge.request_load import RequestLoad
from epp.core.moment import Moment
from epp.core.parameters import Parameters, Plugin
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.prompt.request import InferenceRequest
from epp.core.session_tokens import SessionTokens
from epp.core.types import BYTES_PER_TOKEN, ApiKind, Endpoint, Seconds, attribute_key
from epp.plugins.cost import scores_of_cost
from epp.plugins.held_blocks import HeldBlocks, block_lists
from epp.plugins.strategy import Step, Strategy, config_of, named, producer, step

__all__ = [
    "AGENT_HEADERS",
    "AGENT_SESSIONS",
    "ATTENTION_TOKENS",
    "BYTES_PER_TOKEN",
    "EXACT",
    "HASH_BYTES",
    "HOST_BLOCKS",
    "KV_BYTES_PER_TOKEN",
    "LINK_BYTES_PER_S",
    "PREFILL_DELAY",
    "REMOTE_OVERHEAD_S",
    "REMOTE_OVERHEAD_S_PER_TOKEN",
    "REPORTED_S_MAX",
    "ROOM",
    "STEP_TOKENS",
    "UNMEASURED_FACTOR",
    "Abilities",
    "AdapterColumns",
    "Affinity",
    "AffinityIndex",
    "AffinityIndexSettings",
    "ApiKind",
    "Bools",
    "ByTime",
    "Candidates",
    "ChoosesRanks",
    "CorrectedIndex",
    "Correction",
    "CountsInflight",
    "Duration",
    "Endpoint",
    "EngineLoad",
    "ExpectedLatency",
    "Filter",
    "Floats",
    "GoesBySessions",
    "Hashes",
    "HeldBlocks",
    "HoldsRequests",
    "IndexMeasures",
    "InferenceRequest",
    "Ints",
    "LimitsMemory",
    "MarksRequests",
    "MarksResponses",
    "MeasuresItself",
    "Moment",
    "Origin",
    "Parameters",
    "Picker",
    "Plugin",
    "PrefixIndex",
    "PrefixIndexSettings",
    "ReadsIndex",
    "RequestLoad",
    "Scorer",
    "Seconds",
    "SessionSources",
    "SessionTokens",
    "SharedIndex",
    "Slo",
    "Step",
    "Strategy",
    "TellsCost",
    "attribute_key",
    "block_lists",
    "check_above_zero",
    "config_of",
    "highest",
    "named",
    "prefill_work",
    "producer",
    "rendezvous_weights",
    "scores_of_cost",
    "step",
]
