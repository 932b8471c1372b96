"""What a plugin does besides its verb: declared with its class, never found out by looking at it."""

from enum import StrEnum

from msgspec import Struct


class Origin(StrEnum):
    """How an index comes to know what endpoints hold."""

    TOLD = "told"
    """The engines say so."""
    DECIDED = "decided"
    """Requests were sent there from here, or as peers tell from there."""
    PEERS = "peers"
    """Peers alone say so."""


class Abilities(Struct, frozen=True, kw_only=True):
    """What a plugin reads, learns, shares and costs; its class declares it as `abilities`.

    One that says yes to anything has what the sentence names. Whatever is left out is not asked of it.
    """

    differs: str = ""
    """How it differs from what others call by its name, told to whoever loads it: a sentence."""

    # Of a filter, a scorer or a picker.

    reads: tuple[str, ...] | None = None
    """Columns of the candidates and fields of the request, of `READABLE`; None: any. A scorer whose
    reads are all of `KEPT_READS` is asked again only once one of them has changed."""
    reads_index: bool = False
    """It has `producer_type` and `producer`: it is a `ReadsIndex`."""
    configures_index: bool = False
    """It has `producer_parameters`, those of the index, should it have to be made."""
    sheds_load: bool = False
    """When this filter leaves nobody the client is told 429, come back; without it 503."""
    holds_requests: bool = False
    """This filter is a `HoldsRequests`."""
    goes_by_sessions: bool = False
    """It is a `GoesBySessions`."""
    reads_session_tokens: bool = False
    """It has `reads_tokens`, whether its parameters make the tokens of sessions decide."""
    marks_responses: bool = False
    """It is a `MarksResponses`."""
    marks_requests: bool = False
    """It is a `MarksRequests`."""
    chooses_ranks: bool = False
    """It is a `ChoosesRanks`: engines with several ranks behind one address are heard."""
    tells_cost: bool = False
    """It is a `TellsCost`."""
    limits_metrics_age: bool = False
    """It has `metrics_age_max_s`: metrics that are older mean nothing to it."""
    tells_prefill_speed: bool = False
    """It has `peak_prefill_throughput`, in tokens a second, or None."""
    reads_attribute: bool = False
    """It has `attribute_key`, of the attribute of endpoints that it goes by."""
    brings_filter: bool = False
    """This scorer has `filter`: the filter that comes with it into a profile, or None."""
    names_load_producer: bool = False
    """It has `in_flight_load_producer_name`, of who counts load in flight; "" for whoever does."""
    warns: bool = False
    """It has `warnings`: what its parameters do less, or other, than they say; sentences without a place."""
    picks_several: bool = False
    """This picker has a parameter `max_num_of_endpoints`."""

    # Of the settings of an index.

    origin: Origin | None = None
    """Set: it counts blocks of `block_tokens` tokens that endpoints hold. A request that is not
    served teaches it nothing, and the first of each origin make up `matched_blocks`."""
    counts_blocks: bool = False
    """Its settings have `block_tokens`: it needs the hashes of blocks of so many tokens."""
    names_sessions: bool = False
    """Its settings have `session_in`, which says what a request names as its session, "" for nothing."""
    shares: bool = False
    """It is a `SharedIndex`."""
    counts_inflight: bool = False
    """It is a `CountsInflight`."""
    corrected: bool = False
    """It is a `CorrectedIndex`."""
    limits_memory: bool = False
    """It is a `LimitsMemory`, and its settings have `memory_max_bytes`."""
    measures: bool = False
    """It is a `MeasuresItself`."""
    hears_engines: bool = False
    """It is a `HearsEngines`, and its settings have `kv_events_config`."""
    reads_token_ids: bool = False
    """It looks up prompts by the ids of their tokens: requests wait until those are found out."""
