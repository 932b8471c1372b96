"""Every metric that the picker exports, in one table: tests and documentation read it.

Names, as far as the field has one, are those of the reference endpoint picker with the prefix
`homing_`. A counter is listed by the name that is queried, with `_total`.
"""

from typing import Final, Literal, TypeAlias

from msgspec import Struct

from epp.core.knowledge.hit_accuracy import ERROR_BOUNDS

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]
"""A summary has no quantiles: a sum and a count."""

DECISION_BUCKETS_S: Final = (
    *(0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
"""The aim is 60 µs for an 8 KB chat and 1.2 ms for 450 KB; what is slower is a fault."""
PROCESSING_BUCKETS_S: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
REQUEST_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
SIZE_BUCKETS_BYTES: Final = tuple(float(4**power) for power in range(3, 14))
"""64 bytes to 64 MiB."""
TOKEN_BUCKETS: Final = (0.0, *(float(2**power) for power in range(4, 19)))
"""0, then 16 to 262,144."""
RATIO_BUCKETS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CONTRIBUTION_BUCKETS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
TOKENIZE_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0),
)
SCRAPE_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


LAG_BUCKETS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)


class MetricSpec(Struct, frozen=True):
    """One row. `help` is one sentence; `buckets` are upper bounds, without +Inf."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    sampled: bool = False
    """Read from the scheduler when a page is made; nothing is counted per request."""


_REQUEST = ("model_name", "target_model_name", "priority")
_ENDPOINT = ("endpoint_name", "namespace", "port")
_RESOURCE = ("resource",)


def _sampled(
    name: str, unit: str, help_: str, labels: tuple[str, ...] = (), kind: Kind = "gauge"
) -> MetricSpec:
    return MetricSpec(name, kind, unit, help_, labels, sampled=True)


METRICS: Final[tuple[MetricSpec, ...]] = (
    # Requests.
    MetricSpec(
        "homing_request_total",
        "counter",
        "requests",
        "Requests that were routed, were refused, or whose stream failed before either.",
        _REQUEST,
    ),
    MetricSpec(
        "homing_request_error_total",
        "counter",
        "requests",
        "Requests that failed, by refusal reason, why their stream failed, HTTP status of the "
        "engine or how they ended.",
        (*_REQUEST, "error_code"),
    ),
    MetricSpec(
        "homing_request_duration_seconds",
        "histogram",
        "seconds",
        "From the request headers to the end of the response, of requests that were routed.",
        _REQUEST,
        REQUEST_BUCKETS_S,
    ),
    MetricSpec(
        "homing_request_size_bytes",
        "histogram",
        "bytes",
        "Size of the request body.",
        _REQUEST,
        SIZE_BUCKETS_BYTES,
    ),
    MetricSpec(
        "homing_request_input_tokens",
        "histogram",
        "tokens",
        "Prompt tokens as estimated from its bytes, or counted where the prompt is token ids or was "
        "decided by them.",
        _REQUEST,
        TOKEN_BUCKETS,
    ),
    MetricSpec(
        "homing_request_output_tokens",
        "histogram",
        "tokens",
        "Output tokens as the engine reported them, where the response is parsed.",
        _REQUEST,
        TOKEN_BUCKETS,
    ),
    MetricSpec(
        "homing_request_cached_tokens",
        "histogram",
        "tokens",
        "Prompt tokens that the engine served from its cache, where the response is parsed.",
        _REQUEST,
        TOKEN_BUCKETS,
    ),
    MetricSpec(
        "homing_request_ttft_seconds",
        "histogram",
        "seconds",
        "From the request headers to the first output token, where the response is parsed.",
        _REQUEST,
        REQUEST_BUCKETS_S,
    ),
    MetricSpec(
        "homing_first_token_error_seconds",
        "histogram",
        "seconds",
        "By how much the first token came later or earlier than the scorer expected, of at most eight "
        "requests a second, where the response is parsed.",
        ("came",),
        REQUEST_BUCKETS_S,
    ),
    MetricSpec(
        "homing_first_token_expected_seconds_total",
        "counter",
        "seconds",
        "After how long first tokens were expected, added up over the requests of "
        "homing_first_token_error_seconds.",
    ),
    MetricSpec(
        "homing_first_token_observed_seconds_total",
        "counter",
        "seconds",
        "After how long first tokens came, added up over the requests of "
        "homing_first_token_error_seconds.",
    ),
    MetricSpec(
        "homing_request_running",
        "gauge",
        "requests",
        "Requests that were routed and have not ended.",
        _REQUEST,
    ),
    MetricSpec(
        "homing_request_processing_duration_seconds",
        "histogram",
        "seconds",
        "From the request headers to the picker's answer, the wait for the body included.",
        (),
        PROCESSING_BUCKETS_S,
    ),
    MetricSpec(
        "homing_response_headers_seconds",
        "histogram",
        "seconds",
        "From the request headers to the response headers; of a stream not its first token.",
        (),
        REQUEST_BUCKETS_S,
    ),
    # Decisions.
    MetricSpec(
        "homing_scheduler_e2e_duration_seconds",
        "histogram",
        "seconds",
        "Time that one decision took.",
        (),
        DECISION_BUCKETS_S,
    ),
    MetricSpec(
        "homing_scheduler_attempts_total",
        "counter",
        "decisions",
        "Decisions by outcome and, where there is one, by the endpoint chosen.",
        ("status", "target_model_name", *_ENDPOINT),
    ),
    MetricSpec(
        "homing_refusals_total", "counter", "requests", "Requests refused, by reason.", ("reason",)
    ),
    MetricSpec(
        "homing_filter_eliminated_total",
        "counter",
        "endpoints",
        "Candidates that each filter or step dropped, summed over decisions and refusals.",
        ("filter",),
    ),
    _sampled(
        "homing_plugin_errors_total",
        "calls",
        "Calls of each plugin that failed; what it adds was left out of the decision.",
        ("plugin",),
        "counter",
    ),
    MetricSpec(
        "homing_scorer_contribution",
        "histogram",
        "score",
        "Weighted score that each scorer gave the chosen endpoint.",
        ("scorer",),
        CONTRIBUTION_BUCKETS,
    ),
    MetricSpec(
        "homing_scheduled_without_prefix_total",
        "counter",
        "requests",
        "Requests scheduled without their prompt, by body mode; `memory`: there was none to read it.",
        ("mode",),
    ),
    MetricSpec(
        "homing_requests_unparsed_total",
        "counter",
        "requests",
        "Requests placed although the picker did not fully understand the body, by API (end of the "
        "path) and reason. `unknown-shape`: with what could be read of the prompt; all other "
        "reasons: without prompt knowledge.",
        ("api", "reason"),
    ),
    MetricSpec(
        "homing_unknown_body_mode_total",
        "counter",
        "streams",
        "Streams whose gateway announced a body mode that the picker does not know.",
        ("mode",),
    ),
    MetricSpec(
        "homing_unknown_objective_total",
        "counter",
        "requests",
        "Requests that name an objective that is not known; they have priority 0.",
    ),
    _sampled("homing_held_body_bytes", "bytes", "Unfinished request bodies that are held."),
    _sampled(
        "homing_held_body_bytes_max",
        "bytes",
        "What they may take before new bodies are refused.",
    ),
    _sampled(
        "homing_memory_limit_bytes",
        "bytes",
        "Memory that bodies and indexes are sized for.",
    ),
    _sampled(
        "homing_memory_pressure",
        "level",
        "0: none; 1: near the memory limit, indexes shrink; 2: long bodies pass unread too.",
    ),
    _sampled(
        "homing_load_reports_total",
        "responses",
        "Responses whose headers tell the load of the engine, by whether it could be read.",
        ("result",),
        "counter",
    ),
    MetricSpec(
        "homing_protocol_violations_total",
        "counter",
        "streams",
        "Streams ended because the gateway sent what their phase does not allow.",
        ("phase", "event"),
    ),
    MetricSpec(
        "homing_response_bodies_declined_total",
        "counter",
        "responses",
        "Responses whose body the gateway was asked not to show (--decline-response-bodies).",
    ),
    MetricSpec(
        "homing_response_usage_unseen_total",
        "counter",
        "responses",
        "Responses whose usage was to be read and whose body the gateway does not show.",
    ),
    MetricSpec(
        "homing_gateways_without_responses_total",
        "counter",
        "gateways",
        "Gateways that showed no response of 20 requests: whether endpoints fail cannot be seen there.",
    ),
    # Prefix.
    MetricSpec(
        "homing_prefix_indexer_hit_ratio",
        "histogram",
        "ratio",
        "Share of the prompt's full blocks that the chosen endpoint is believed to hold.",
        (),
        RATIO_BUCKETS,
    ),
    MetricSpec(
        "homing_prefix_indexer_hit_bytes",
        "histogram",
        "bytes",
        "Bytes of prompt that the chosen endpoint is believed to hold.",
        (),
        (0.0, *SIZE_BUCKETS_BYTES),
    ),
    MetricSpec(
        "homing_predicted_hit_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens that the chosen endpoints were believed to hold.",
    ),
    MetricSpec(
        "homing_prefix_hit_tokens_total",
        "counter",
        "tokens",
        "Of requests whose usage was parsed: tokens predicted as cached, and served from cache.",
        ("source",),
    ),
    _sampled(
        "homing_index_info",
        "info",
        "1 for each affinity index: its type, and how it knows what endpoints hold, if it knows that.",
        ("index", "type", "origin"),
    ),
    _sampled(
        "homing_prefix_indexer_size",
        "blocks",
        "Entries of each affinity index, one a block and endpoint.",
        ("index",),
    ),
    _sampled(
        "homing_prefix_indexer_memory_bytes",
        "bytes",
        "Memory that each affinity index accounts for.",
        ("index",),
    ),
    _sampled(
        "homing_prefix_indexer_lookups_total",
        "lookups",
        "Look-ups in each affinity index, by result.",
        ("index", "result"),
        "counter",
    ),
    _sampled(
        "homing_prefix_indexer_evictions_total",
        "blocks",
        "Entries that each affinity index dropped, by cause.",
        ("index", "cause"),
        "counter",
    ),
    _sampled(
        "homing_prefix_known_from_peers_total",
        "prompts",
        "Prompts sent to an endpoint whose deepest known block was known from another replica alone.",
        ("index",),
        "counter",
    ),
    _sampled(
        "homing_prompt_segments_total",
        "segments",
        "Segments of 16 KB of long prompts: known, so that their blocks were not hashed, or new.",
        ("result",),
        "counter",
    ),
    _sampled(
        "homing_spans_total",
        "spans",
        "Spans of sampled requests: exported, failed at the collector, or dropped for want of room. "
        "With --tracing only.",
        ("result",),
        "counter",
    ),
    # Pool.
    _sampled(
        "homing_ready_endpoints",
        "endpoints",
        "Endpoints that requests go to first: reachable, awake, not set aside, with fresh metrics.",
        ("name",),
    ),
    _sampled("homing_known_endpoints", "endpoints", "Endpoints known, ready or not.", ("name",)),
    _sampled(
        "homing_endpoints_set_aside",
        "endpoints",
        "Endpoints not used until their next good scrape because requests to them failed.",
        ("name",),
    ),
    _sampled(
        "homing_average_kv_cache_utilization",
        "ratio",
        "Mean KV-cache use of the endpoints that report it, 0 to 1.",
        ("name",),
    ),
    _sampled(
        "homing_average_queue_size",
        "requests",
        "Mean number of waiting requests of the endpoints that report it.",
        ("name",),
    ),
    _sampled(
        "homing_average_running_requests",
        "requests",
        "Mean number of running requests of the endpoints that report it.",
        ("name",),
    ),
    _sampled(
        "homing_std_dev_kv_cache_utilization",
        "ratio",
        "Standard deviation of the KV-cache use.",
        ("name",),
    ),
    _sampled(
        "homing_std_dev_queue_size",
        "requests",
        "Standard deviation of the waiting requests.",
        ("name",),
    ),
    _sampled(
        "homing_std_dev_running_requests",
        "requests",
        "Standard deviation of the running requests.",
        ("name",),
    ),
    _sampled(
        "homing_per_endpoint_queue_size",
        "requests",
        "Requests waiting in the engine, as last scraped.",
        ("name", "model_server_endpoint", "port"),
    ),
    _sampled(
        "homing_per_endpoint_metrics_age_seconds",
        "seconds",
        "Age of the last good scrape; absent before the first.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_inflight_requests",
        "requests",
        "Requests that this picker sent there and that have not ended.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_inflight_tokens",
        "tokens",
        "Uncached prompt tokens sent there and, as far as is known, not yet prefilled.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_set_aside_total",
        "counter",
        "endpoints",
        "Times that an endpoint was set aside because requests to it failed.",
        _ENDPOINT,
    ),
    # Each endpoint, as this picker saw it. Those that left are gone from the page.
    MetricSpec(
        "homing_per_endpoint_response_headers_seconds",
        "summary",
        "seconds",
        "From the request headers to the response headers; of a stream not its first token.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_per_endpoint_ttft_seconds",
        "summary",
        "seconds",
        "From the request headers to the first chunk of a streamed answer, where the gateway shows it.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_per_endpoint_request_duration_seconds",
        "summary",
        "seconds",
        "From the request headers to the end of the response, of those that came to it.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_per_endpoint_error_total",
        "counter",
        "responses",
        "Error responses, by class of status; unreached: the gateway's own, for it got no connection.",
        (*_ENDPOINT, "status"),
    ),
    MetricSpec(
        "homing_per_endpoint_prompt_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens of the requests that ended there, as they were decided: as of "
        "homing_request_input_tokens.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_per_endpoint_predicted_hit_tokens_total",
        "counter",
        "tokens",
        "Those among them that the endpoint was believed to hold.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_per_endpoint_cache_queried_tokens_total",
        "tokens",
        "Prompt tokens that the engine looked up in its prefix cache, as last scraped.",
        _ENDPOINT,
        "counter",
    ),
    _sampled(
        "homing_per_endpoint_cache_hit_tokens_total",
        "tokens",
        "Those among them that it held, in any tier that it tells of, as last scraped.",
        _ENDPOINT,
        "counter",
    ),
    _sampled(
        "homing_predicted_hit_ratio",
        "ratio",
        "Share of the prompt tokens sent there that the endpoint was believed to hold, over the last "
        "windows of half a minute to five minutes: in all, and by each index beside the one that "
        "engines tell, had it alone been asked.",
        (*_ENDPOINT, "index"),
    ),
    _sampled(
        "homing_engine_hit_ratio",
        "ratio",
        "Share of the prompt tokens looked up there that its engine found, over the same windows: in "
        "all, and by tier where it tells.",
        (*_ENDPOINT, "tier"),
    ),
    MetricSpec(
        "homing_predicted_hit_error_ratio",
        "histogram",
        "ratio",
        "By how much of the prompt tokens belief was wrong in each window of an endpoint of which "
        "that can be said: by too much or too little. One without an error is in both.",
        ("side",),
        ERROR_BOUNDS,
        sampled=True,
    ),
    _sampled(
        "homing_hit_verdicts",
        "endpoints",
        "Endpoints by what the last window came to: measured, waiting for requests, untold by the "
        "engine, or with counters that stand still, fell or say what cannot be.",
        ("verdict",),
    ),
    _sampled(
        "homing_bytes_per_token",
        "bytes",
        "Bytes of prompts a token, by model, as the engines' counters show.",
        ("model_name",),
    ),
    _sampled(
        "homing_answer_tokens",
        "tokens",
        "Of an answer of the pool on average, as engines count; none while too little is known.",
    ),
    _sampled(
        "homing_per_endpoint_engine_ttft_seconds",
        "seconds",
        "Time to first token by the engine's own clock, of all that it served, as last scraped.",
        _ENDPOINT,
        "summary",
    ),
    _sampled(
        "homing_per_endpoint_running_requests",
        "requests",
        "Requests running in the engine, as last scraped.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_per_endpoint_kv_cache_utilization",
        "ratio",
        "KV-cache use, 0 to 1, as last scraped.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_per_endpoint_slowness_ratio",
        "ratio",
        "What requests take beside what was to be expected of them there, over the median of the "
        "pool; absent where too few ended.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_per_endpoint_outlier",
        "boolean",
        "1: the endpoint is slow beside the others, or fails; absent: neither.",
        (*_ENDPOINT, "cause"),
    ),
    _sampled(
        "homing_endpoints_ejected",
        "endpoints",
        "Endpoints that get no requests for a while because they are outliers.",
        ("name",),
    ),
    _sampled(
        "homing_endpoints_full",
        "endpoints",
        "Endpoints that refused requests for want of room and get fewer for a while.",
        ("name",),
    ),
    _sampled(
        "homing_endpoint_ejections_total",
        "ejections",
        "Endpoints that were ejected, by cause.",
        ("cause",),
        "counter",
    ),
    # Scrapes.
    _sampled(
        "homing_tokenize_requests_total",
        "requests",
        "Requests whose tokens were to be found out, by who was asked and how that ended: found, or "
        "why they were placed by their bytes.",
        ("backend", "result"),
        "counter",
    ),
    MetricSpec(
        "homing_tokenize_duration_seconds",
        "histogram",
        "seconds",
        "How long requests waited for their tokens, in vain or not.",
        ("backend",),
        TOKENIZE_BUCKETS_S,
    ),
    _sampled(
        "homing_tokenize_compared_total",
        "requests",
        "Requests whose token ids were compared with those that the engine stored, by who found them "
        "out: it agrees or differs.",
        ("backend", "result"),
        "counter",
    ),
    _sampled(
        "homing_tokenize_waiting",
        "requests",
        "Requests that wait for their tokens now.",
        ("backend",),
    ),
    _sampled(
        "homing_tokenize_circuit_open",
        "boolean",
        "Whether nobody is asked for tokens for some seconds, because the last questions failed.",
        ("backend",),
    ),
    MetricSpec(
        "homing_scrape_duration_seconds",
        "histogram",
        "seconds",
        "Time that one good scrape of an endpoint took.",
        (),
        SCRAPE_BUCKETS_S,
    ),
    MetricSpec(
        "homing_scrape_errors_total",
        "counter",
        "scrapes",
        "Scrapes that failed, by kind of failure.",
        ("kind",),
    ),
    _sampled(
        "homing_endpoint_pages_unread",
        "endpoints",
        "Endpoints that did not give a page beside their metrics when they were asked last: models, "
        "gpus.",
        ("page",),
    ),
    # Kubernetes.
    _sampled(
        "homing_kube_staleness_seconds",
        "seconds",
        "Since the API server last told of a kind of object or took up a watch of it; infinite "
        "before it first did.",
        _RESOURCE,
    ),
    _sampled(
        "homing_kube_synced",
        "boolean",
        "1: all objects of the kind were listed; 0: not yet, or its CRD is missing.",
        _RESOURCE,
    ),
    _sampled(
        "homing_kube_objects",
        "objects",
        "Objects held that concern the pool; of pods those that may serve.",
        _RESOURCE,
    ),
    _sampled("homing_kube_lists_total", "lists", "Lists begun.", _RESOURCE, "counter"),
    _sampled("homing_kube_watches_total", "watches", "Watches begun.", _RESOURCE, "counter"),
    _sampled(
        "homing_kube_repairs_total",
        "objects",
        "Objects that a periodic list found other than the watch had told; should stay 0.",
        _RESOURCE,
        "counter",
    ),
    _sampled(
        "homing_kube_errors_total",
        "steps",
        "Lists and watches that failed, by kind of failure.",
        ("resource", "kind"),
        "counter",
    ),
    _sampled(
        "homing_kube_events_total",
        "events",
        "Kubernetes Events that were written, or dropped by their rate or by an error.",
        ("result",),
        "counter",
    ),
    _sampled(
        "homing_leader",
        "boolean",
        "1: this replica leads; 0: it follows; absent without leader election.",
    ),
    # KV events. All absent where no index hears engines.
    _sampled(
        "homing_kv_event_streams",
        "endpoints",
        "Endpoints by how their KV events are heard: none, connecting, replaying, live, stale.",
        ("state",),
    ),
    _sampled(
        "homing_kv_event_streams_incomplete",
        "endpoints",
        "Endpoints whose KV events are live and that told not all that they hold.",
    ),
    _sampled(
        "homing_kv_event_streams_silent",
        "endpoints",
        "Endpoints that send no KV events although their engines compute prompts.",
    ),
    _sampled(
        "homing_kv_events_total",
        "events",
        "KV events that were read, by type.",
        ("type",),
        "counter",
    ),
    _sampled(
        "homing_kv_event_faults_total",
        "events",
        "KV events and payloads that are not known, by reason.",
        ("reason",),
        "counter",
    ),
    _sampled(
        "homing_kv_event_stream_changes_total",
        "changes",
        "What happened to streams of KV events: frames, gaps, lost, implausible numbers, replays, "
        "restarts and others.",
        ("kind",),
        "counter",
    ),
    _sampled(
        "homing_rank_choices_total",
        "requests",
        "Requests sent to an endpoint with several data-parallel ranks: one was named, or why its "
        "engine chose: unheld, alike, crowded, fallback, failed. With a plugin that chooses ranks only.",
        ("result",),
        "counter",
    ),
    # Replicas. All absent where this picker is alone.
    _sampled("homing_peers", "replicas", "Other replicas that were heard in the last 3 seconds."),
    _sampled(
        "homing_peer_replicas_unheard",
        "replicas",
        "Other replicas that there should be and that are not heard.",
    ),
    _sampled(
        "homing_peer_records_total",
        "records",
        "Records of decisions, told to other replicas or by them, by what became of them; of "
        "unreadable, dropped and over_rate it counts frames, each of many records.",
        ("direction", "outcome"),
        "counter",
    ),
    _sampled(
        "homing_peer_lag_seconds",
        "seconds",
        "How old the last record was when it was learnt, at the sender and here, of the replica "
        "where it was oldest; the way is not counted.",
    ),
    _sampled(
        "homing_peer_frames_lost_total",
        "frames",
        "Frames of other replicas that were sent and did not come, or came late.",
        kind="counter",
    ),
    _sampled(
        "homing_peer_frames_asked_again_total",
        "frames",
        "Frames that were missed and asked for again, each as often as it was asked for.",
        kind="counter",
    ),
    _sampled(
        "homing_peer_frames_recovered_total",
        "frames",
        "Frames that came late, mostly because they were asked for again.",
        kind="counter",
    ),
    _sampled(
        "homing_peer_claims_cut_total",
        "claims",
        "What other replicas said that they have in flight at an endpoint and that cannot be, by "
        "the engine's page and the time since: it was believed up to what can.",
        kind="counter",
    ),
    _sampled(
        "homing_peers_known",
        "replicas",
        "Other replicas whose address is known, or of a broker those that are heard.",
    ),
    _sampled(
        "homing_peer_frames_total",
        "frames",
        "Frames by direction and outcome; dropped: a queue was full, unreadable: no frame at all.",
        ("direction", "outcome"),
        "counter",
    ),
    _sampled(
        "homing_peer_bytes_total",
        "bytes",
        "Bytes to and from other replicas, without what encryption adds.",
        ("direction",),
        "counter",
    ),
    _sampled(
        "homing_peer_failures_total",
        "connections",
        "Connections between replicas that failed, by kind: silent, lost, handshake, refused, too many, "
        "origin, broker, internal.",
        ("kind",),
        "counter",
    ),
    _sampled(
        "homing_peer_snapshots_total",
        "snapshots",
        "Snapshots taken from or given to replicas, of the broker and of --snapshot-dir, by outcome.",
        ("place", "outcome"),
        "counter",
    ),
    MetricSpec(
        "homing_peer_snapshot_seconds",
        "histogram",
        "seconds",
        "Time until a snapshot had come in whole, by where it came from.",
        ("source",),
        SCRAPE_BUCKETS_S,
    ),
    # Configuration.
    MetricSpec(
        "homing_config_last_reload_successful",
        "gauge",
        "boolean",
        "1: the newest configuration is in force; 0: it was rejected, the last good one is.",
    ),
    MetricSpec(
        "homing_config_reloads_total",
        "counter",
        "reloads",
        "Configurations read, by result.",
        ("result",),
    ),
    MetricSpec(
        "homing_last_good_in_force",
        "gauge",
        "boolean",
        "1: the file was broken at the start and its copy of --last-good-dir is in force.",
        ("file",),
    ),
    MetricSpec(
        "homing_last_good_write_errors_total",
        "counter",
        "writes",
        "Copies for --last-good-dir that could not be written.",
        ("file",),
    ),
    MetricSpec(
        "homing_config_info",
        "gauge",
        "info",
        "The configuration in force; always 1.",
        ("hash", "generation"),
    ),
    MetricSpec(
        "homing_scorer_weight",
        "gauge",
        "weight",
        "Weight of each scorer in force.",
        ("profile", "scorer"),
    ),
    # Shadow profile.
    _sampled(
        "homing_shadow_decisions_total",
        "decisions",
        "Decisions that a shadow profile judged: it agreed, differed, had nobody left, or failed.",
        ("verdict",),
        "counter",
    ),
    _sampled(
        "homing_shadow_picks_total",
        "decisions",
        "Decisions that the shadow profile would have sent to each endpoint.",
        _ENDPOINT,
        "counter",
    ),
    _sampled(
        "homing_shadow_uncached_tokens_total",
        "tokens",
        "Prompt tokens believed not to be cached where requests went (live) and would have gone "
        "(shadow).",
        ("profile",),
        "counter",
    ),
    _sampled(
        "homing_shadow_inflight_requests_total",
        "requests",
        "Requests already in flight where each request went (live) and would have gone (shadow), "
        "added up.",
        ("profile",),
        "counter",
    ),
    # Capture.
    _sampled(
        "homing_capture_requests_total",
        "requests",
        "Requests that became lines of the capture.",
        (),
        "counter",
    ),
    _sampled(
        "homing_capture_events_total",
        "events",
        "Events that became lines of the capture: decisions, scrapes, ends of requests.",
        (),
        "counter",
    ),
    _sampled(
        "homing_capture_dropped_total",
        "events",
        "Events that are missing in the capture: the queue was full, or the disk failed.",
        ("reason",),
        "counter",
    ),
    _sampled(
        "homing_capture_write_errors_total",
        "writes",
        "Times the capture could not be written; requests went on.",
        (),
        "counter",
    ),
    _sampled(
        "homing_capture_bytes",
        "bytes",
        "Size of all captures in the directory of --capture.",
    ),
    # Kept decisions.
    _sampled(
        "homing_decision_history_records_total",
        "records",
        "Decisions, refusals and ends of requests that were written to --decisions-dir.",
        (),
        "counter",
    ),
    _sampled(
        "homing_decision_history_dropped_total",
        "records",
        "Records that are missing in --decisions-dir: the queue was full, or the disk failed.",
        ("reason",),
        "counter",
    ),
    _sampled(
        "homing_decision_history_write_errors_total",
        "writes",
        "Times --decisions-dir could not be written; requests went on.",
        (),
        "counter",
    ),
    _sampled(
        "homing_decision_history_bytes",
        "bytes",
        "Size of all files of decisions in the directory of --decisions-dir.",
    ),
    # Process and transport.
    MetricSpec(
        "homing_loop_lag_seconds",
        "histogram",
        "seconds",
        "How late a timer of the event loop runs, fifty times a second, missed ones included: what "
        "a request waits that comes at any instant.",
        (),
        LAG_BUCKETS_S,
    ),
    _sampled(
        "homing_process_cpu_seconds_total",
        "seconds",
        "CPU time of the picker's process, user and system, all threads.",
        kind="counter",
    ),
    _sampled(
        "homing_process_resident_memory_bytes",
        "bytes",
        "Memory of the machine that the picker's process holds.",
    ),
    MetricSpec("homing_info", "gauge", "info", "The version that runs; always 1.", ("version",)),
    MetricSpec(
        "homing_extproc_streams_inflight", "gauge", "streams", "ext_proc streams that are open."
    ),
    MetricSpec(
        "homing_extproc_streams_total",
        "counter",
        "streams",
        "ext_proc streams that ended, by gRPC status code.",
        ("code",),
    ),
    MetricSpec(
        "homing_extproc_stream_duration_seconds",
        "histogram",
        "seconds",
        "Life of an ext_proc stream.",
        (),
        REQUEST_BUCKETS_S,
    ),
    _sampled(
        "homing_extproc_messages_total",
        "messages",
        "Messages of gateways, by how they were read: scanned, or left to protobuf, which takes "
        "longer, because something in them is unusual.",
        ("path",),
        "counter",
    ),
    _sampled("homing_extproc_connections", "connections", "Connections of gateways that are open."),
    _sampled(
        "homing_extproc_unacknowledged_bytes",
        "bytes",
        "What has come on all connections and was not given back to their windows: it waits for a "
        "turn, or for earlier answers to be taken.",
    ),
    MetricSpec(
        "homing_extproc_connections_cut_total",
        "counter",
        "connections",
        "Connections ended against their gateway's will: they only opened streams and reset them, "
        "broke the rules of HTTP/2, had much of their window not given back, were the idlest when "
        "a newer one needed their place, or got none.",
        ("reason",),
    ),
    MetricSpec(
        "homing_drain_cut_streams_total",
        "counter",
        "streams",
        "Streams still open when the drain timed out, and therefore cut.",
    ),
    MetricSpec(
        "homing_task_ends_total",
        "counter",
        "ends",
        "Ends of tasks that are to run until the picker ends; each was started anew.",
        ("task",),
    ),
    MetricSpec(
        "homing_telemetry_failures_total",
        "counter",
        "events",
        "Events that were not counted or logged because of a defect; requests went on.",
        ("event",),
    ),
)
