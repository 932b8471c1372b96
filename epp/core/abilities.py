"""Optional abilities of plugins. A plugin class declares its abilities; the framework never detects
them by inspection.
"""

from enum import StrEnum

from msgspec import Struct


class Origin(StrEnum):
    """The source of an index's knowledge about what endpoints have cached."""

    TOLD = "told"
    """The source is the engines, which report in KV-cache events which blocks they have cached."""
    DECIDED = "decided"
    """The source is the decisions of this picker and of peers that share theirs, from which the
    index estimates the cached prompts.
    """
    PEERS = "peers"
    """The source is the decisions of peers alone, from which the index estimates the cached
    prompts.
    """


class Abilities(Struct, frozen=True, kw_only=True):
    """The abilities that a plugin has beyond its main method; its class declares them as the class
    variable `abilities`.

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
    None if it may read any. If a scorer reads only names in `KEPT_READS`, its scores are computed
    again only after one of them has changed.
    """
    reads_index: bool = False
    """True if the plugin reads an affinity index; it then has the members of `ReadsIndex`,
    `producer_type` and `producer`.
    """
    configures_index: bool = False
    """True if the plugin sets the parameters of the index that it reads; it then has
    `producer_parameters`, with which the framework creates a missing index.
    """
    sheds_load: bool = False
    """True if the client receives status 429, instead of 503, when this filter leaves no candidate.
    """
    holds_requests: bool = False
    """True if the filter can make requests wait; it then has the members of `HoldsRequests`."""
    goes_by_sessions: bool = False
    """True if the plugin may use the sessions of requests; it then has the members of
    `GoesBySessions`.
    """
    reads_session_tokens: bool = False
    """True if the plugin may use session tokens; it then has `reads_tokens`, which is true if its
    parameters make it do so.
    """
    marks_responses: bool = False
    """True if the plugin sets headers on responses; it then has the members of `MarksResponses`."""
    marks_requests: bool = False
    """True if the plugin sets headers on requests; it then has the members of `MarksRequests`."""
    chooses_ranks: bool = False
    """True if the plugin selects data-parallel ranks; it then has the members of `ChoosesRanks`.
    The picker then subscribes to every rank of an engine behind one address.
    """
    tells_cost: bool = False
    """True if the scorer can return costs; it then has the members of `TellsCost`."""
    limits_metrics_age: bool = False
    """True if the plugin does not rely on old metrics; it then has `metrics_age_max_s`, the age in
    seconds up to which it does.
    """
    tells_prefill_speed: bool = False
    """True if the plugin has `peak_prefill_throughput`, a prefill speed in tokens per second, or
    None.
    """
    reads_attribute: bool = False
    """True if the plugin reads an endpoint attribute; it then has `attribute_key`, the key of that
    attribute.
    """
    brings_filter: bool = False
    """True if the scorer has `filter`, which is a filter that is added to the profile together with
    the scorer, or None if it adds none.
    """
    names_load_producer: bool = False
    """True if the plugin has `in_flight_load_producer_name`: the name of the producer that counts
    load in flight, or "" for the default.
    """
    warns: bool = False
    """True if the plugin has `warnings`: sentences about parameters that have less effect than
    documented, or another effect.
    """
    picks_several: bool = False
    """True if the picker plugin has a parameter `max_num_of_endpoints`."""

    # Abilities of the settings of an index.

    origin: Origin | None = None
    """Source of what the index knows about cached blocks, or None if it does not count cached
    blocks.

    An index with an origin counts cached blocks of `block_tokens` tokens. If a request is not
    served, what the index recorded for it is undone. The first index of each origin, among those
    whose block length fits, contributes to `matched_blocks`.
    """
    counts_blocks: bool = False
    """True if the index counts blocks; its settings then have `block_tokens`, the number of tokens
    in a block for which it needs hashes.
    """
    caches_media: bool = False
    """True if the index counts encoded images, audio and video. If another endpoint encodes them
    for a request, the index records the request at that endpoint only.
    """
    names_sessions: bool = False
    """True if the settings have `session_in`, which returns the session that a request names, or ""
    if it names none.
    """
    shares: bool = False
    """True if pickers can share the content of the index; it then has the members of `SharedIndex`."""
    counts_inflight: bool = False
    """True if the index must learn when requests end; it then has the members of `CountsInflight`."""
    corrected: bool = False
    """True if the index is corrected by counted cache hits; it then has the members of
    `CorrectedIndex`.
    """
    limits_memory: bool = False
    """True if the memory of the index can be limited; it then has the members of `LimitsMemory`,
    and its settings have `memory_max_bytes`.
    """
    measures: bool = False
    """True if the index reports its entries, memory and look-ups; it then has the members of
    `MeasuresItself`.
    """
    hears_engines: bool = False
    """True if the index receives KV-cache events; it then has the members of `HearsEngines`, and
    its settings have `kv_events_config`.
    """
    reads_token_ids: bool = False
    """True if the index looks up prompts by token ids; requests then wait for their token ids, at
    most `tokenizeTimeout`, if a `token-producer` determines them.
    """
