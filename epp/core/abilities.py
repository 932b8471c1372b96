"""Optional abilities of plugins. A class declares its abilities; the code never detects them by
inspection.
"""

from enum import StrEnum

from msgspec import Struct


class Origin(StrEnum):
    """The source of an index's knowledge about what endpoints have cached."""

    TOLD = "told"
    """The engines report it."""
    DECIDED = "decided"
    """The index assumes it from the decisions of this picker, and of peers that share theirs."""
    PEERS = "peers"
    """The index assumes it from the decisions of peers alone."""


class Abilities(Struct, frozen=True, kw_only=True):
    """The things that a plugin reads, learns, shares and computes; its class declares them as
    `abilities`.

    A plugin that declares an ability must have the members that the ability's text names. The
    framework never uses an ability that is not declared.
    """

    differs: str = ""
    """One sentence about how the plugin differs from the reference plugin of the same name; it is
    reported when the plugin is loaded.
    """

    # Abilities of a filter, a scorer or a picker.

    reads: tuple[str, ...] | None = None
    """Names of the candidate columns and request fields that the plugin reads, from `READABLE`;
    None if it may read any. The framework computes a scorer's scores again only after a change in
    what it reads, if all its reads are in `KEPT_READS`.
    """
    reads_index: bool = False
    """The plugin has `producer_type` and `producer`: it is a `ReadsIndex`."""
    configures_index: bool = False
    """The plugin has `producer_parameters`, the parameters with which a missing index is made."""
    sheds_load: bool = False
    """The client receives status 429 if this filter drops every candidate, instead of 503."""
    holds_requests: bool = False
    """The filter is a `HoldsRequests`."""
    goes_by_sessions: bool = False
    """The plugin is a `GoesBySessions`."""
    reads_session_tokens: bool = False
    """The plugin has `reads_tokens`, which is true if its parameters make it use session tokens."""
    marks_responses: bool = False
    """The plugin is a `MarksResponses`."""
    marks_requests: bool = False
    """The plugin is a `MarksRequests`."""
    chooses_ranks: bool = False
    """The plugin is a `ChoosesRanks`; with it, the picker subscribes to every rank of an engine
    behind one address.
    """
    tells_cost: bool = False
    """The plugin is a `TellsCost`."""
    limits_metrics_age: bool = False
    """The plugin has `metrics_age_max_s`, the age above which it ignores metrics."""
    tells_prefill_speed: bool = False
    """The plugin has `peak_prefill_throughput`, in tokens per second, or None."""
    reads_attribute: bool = False
    """The plugin has `attribute_key`, the key of the endpoint attribute that it reads."""
    brings_filter: bool = False
    """The scorer has `filter`, a filter that is added to the profile together with it, or None."""
    names_load_producer: bool = False
    """The plugin has `in_flight_load_producer_name`, the name of the producer that counts load in
    flight, or "" for the default.
    """
    warns: bool = False
    """The plugin has `warnings`: sentences about parameters that have less effect than documented,
    or another one.
    """
    picks_several: bool = False
    """The picker has a parameter `max_num_of_endpoints`."""

    # Abilities of the settings of an index.

    origin: Origin | None = None
    """The source of the index's knowledge, or None if the index does not count cached blocks.

    An index with an origin counts cached blocks of `block_tokens` tokens. It forgets a request that
    was not served. The first index of each origin contributes to `matched_blocks`.
    """
    counts_blocks: bool = False
    """The settings have `block_tokens`; the index needs the hashes of blocks of that many tokens.
    """
    caches_media: bool = False
    """The index counts encoded images, audio and video. If another endpoint encodes them for a
    request, the index records the request at that endpoint only.
    """
    names_sessions: bool = False
    """The settings have `session_in`, which returns the session that a request names, or "" if it
    names none.
    """
    shares: bool = False
    """The index is a `SharedIndex`."""
    counts_inflight: bool = False
    """The index is a `CountsInflight`."""
    corrected: bool = False
    """The index is a `CorrectedIndex`."""
    limits_memory: bool = False
    """The index is a `LimitsMemory`, and its settings have `memory_max_bytes`."""
    measures: bool = False
    """The index is a `MeasuresItself`."""
    hears_engines: bool = False
    """The index is a `HearsEngines`, and its settings have `kv_events_config`."""
    reads_token_ids: bool = False
    """The index looks up prompts by token ids; requests wait until their token ids are known."""
