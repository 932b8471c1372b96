"""Define every exported metric in one table, which tests and documentation read.

Names are those of the reference endpoint picker (Gateway API inference extension) with the prefix
`homing_`, if that picker has the metric. A counter is listed by the name that queries use, with
`_total`.
"""

from typing import Final, Literal, TypeAlias

from msgspec import Struct

from epp.core.knowledge.hit_accuracy import ERROR_BOUNDS

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]
"""Kind of a metric. A summary has a sum and a count but no quantiles."""

DECISION_BUCKETS_S: Final = (
    *(0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
"""Bucket bounds in seconds for the duration of a decision. The target is 60 µs for an 8 KB chat and
1.2 ms for 450 KB; longer times indicate a fault.
"""
PROCESSING_BUCKETS_S: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
REQUEST_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
SIZE_BUCKETS_BYTES: Final = tuple(float(4**power) for power in range(3, 14))
"""Bucket bounds in bytes for sizes of requests and of cached prompts, from 64 bytes to 64 MiB."""
TOKEN_BUCKETS: Final = (0.0, *(float(2**power) for power in range(4, 19)))
"""Bucket bounds for numbers of tokens: 0, then powers of two from 16 to 262,144."""
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
    """One row of the table of metrics. `help` is one sentence; `buckets` are upper bounds without
    +Inf.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    sampled: bool = False
    """True if the metric's value is read for each page, mostly from the scheduler, instead of being
    counted with each event.
    """


_REQUEST = ("model_name", "target_model_name", "priority")
_ENDPOINT = ("endpoint_name", "namespace", "port")
_RESOURCE = ("resource",)
_ROLE = ("name", "role")


def _sampled(
    name: str, unit: str, help_: str, labels: tuple[str, ...] = (), kind: Kind = "gauge"
) -> MetricSpec:
    return MetricSpec(name, kind, unit, help_, labels, sampled=True)


METRICS: Final[tuple[MetricSpec, ...]] = (
    # Requests
    MetricSpec(
        "homing_request_total",
        "counter",
        "requests",
        "Requests that were routed, were refused, or failed before that.",
        _REQUEST,
    ),
    MetricSpec(
        "homing_request_error_total",
        "counter",
        "requests",
        "Requests that failed, by reason of refusal, failure of the stream, HTTP status of the "
        "engine or ending.",
        (*_REQUEST, "error_code"),
    ),
    MetricSpec(
        "homing_request_duration_seconds",
        "histogram",
        "seconds",
        "Time from the request headers to the end of the response, for routed requests.",
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
        "Prompt tokens, estimated from bytes, or exact if the prompt consists of ids or they were "
        "determined.",
        _REQUEST,
        TOKEN_BUCKETS,
    ),
    MetricSpec(
        "homing_request_output_tokens",
        "histogram",
        "tokens",
        "Output tokens that the engine reported, if responses are parsed.",
        _REQUEST,
        TOKEN_BUCKETS,
    ),
    MetricSpec(
        "homing_request_cached_tokens",
        "histogram",
        "tokens",
        "Prompt tokens that the engine found in its cache, if responses are parsed.",
        _REQUEST,
        TOKEN_BUCKETS,
    ),
    MetricSpec(
        "homing_request_ttft_seconds",
        "histogram",
        "seconds",
        "Time from the request headers to the first output token, if responses are parsed.",
        _REQUEST,
        REQUEST_BUCKETS_S,
    ),
    MetricSpec(
        "homing_first_token_error_seconds",
        "histogram",
        "seconds",
        "Difference between the observed and the expected time to first token, for at most eight "
        "requests a second, if responses are parsed.",
        ("came",),
        REQUEST_BUCKETS_S,
    ),
    MetricSpec(
        "homing_first_token_expected_seconds_total",
        "counter",
        "seconds",
        "Sum of the expected times to first token of the requests in "
        "homing_first_token_error_seconds, with the time of a prefill at another endpoint.",
    ),
    MetricSpec(
        "homing_first_token_observed_seconds_total",
        "counter",
        "seconds",
        "Sum of the observed times to first token, from the request headers on and without the wait "
        "in the queue, of the requests in homing_first_token_error_seconds.",
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
        "Time from the request headers to the picker's answer, including the wait for the body.",
        (),
        PROCESSING_BUCKETS_S,
    ),
    MetricSpec(
        "homing_response_headers_seconds",
        "histogram",
        "seconds",
        "Time from the request headers to the response headers, which precede the first token of "
        "a stream.",
        (),
        REQUEST_BUCKETS_S,
    ),
    # Decisions
    MetricSpec(
        "homing_scheduler_e2e_duration_seconds",
        "histogram",
        "seconds",
        "Duration of one decision.",
        (),
        DECISION_BUCKETS_S,
    ),
    MetricSpec(
        "homing_scheduler_attempts_total",
        "counter",
        "decisions",
        "Decisions by outcome and by chosen endpoint, if any.",
        ("status", "target_model_name", *_ENDPOINT),
    ),
    MetricSpec(
        "homing_refusals_total", "counter", "requests", "Refused requests by reason.", ("reason",)
    ),
    MetricSpec(
        "homing_routes_total",
        "counter",
        "requests",
        "Decisions by the stages that have an endpoint of their own; only if the configuration has several stages. A route with `prefill` does not prove that KV blocks were transferred.",
        ("route",),
    ),
    MetricSpec(
        "homing_stage_refusals_total",
        "counter",
        "requests",
        "Requests refused because a stage had no endpoint; a saturated stage counts too.",
        ("stage",),
    ),
    _sampled(
        "homing_prefills_overdue_total",
        "requests",
        "Prefill stages that neither ended nor failed within the deadline; `epp explain` and "
        "`/debug/endpoints` name their endpoints.",
        kind="counter",
    ),
    _sampled(
        "homing_kv_transfer_speed_bytes_per_second",
        "bytes/s",
        "Measured speed of KV transfers, the median of the endpoints; absent if the engines have "
        "not reported any transfer for half an hour.",
    ),
    _sampled(
        "homing_kv_transfer_speeds_ignored_total",
        "readings",
        "Changes of an engine's sums of KV transfers that were ignored, because they give no "
        "plausible speed; a restart of an engine may count once.",
        kind="counter",
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
        "Failed calls of each plugin; the decision ignores its contribution.",
        ("plugin",),
        "counter",
    ),
    MetricSpec(
        "homing_scorer_contribution",
        "histogram",
        "score",
        "Weighted score of each scorer for the chosen endpoint.",
        ("scorer",),
        CONTRIBUTION_BUCKETS,
    ),
    MetricSpec(
        "homing_scheduled_without_prefix_total",
        "counter",
        "requests",
        "Requests scheduled without their prompt, by body mode; `memory` means that memory was "
        "short.",
        ("mode",),
    ),
    MetricSpec(
        "homing_requests_unparsed_total",
        "counter",
        "requests",
        "Requests routed although the body was not fully understood, by API (end of the path) and "
        "reason. `unknown-shape` uses the readable part of the prompt, other reasons use nothing "
        "of it.",
        ("api", "reason"),
    ),
    MetricSpec(
        "homing_unknown_body_mode_total",
        "counter",
        "streams",
        "Streams whose gateway announced an unknown body mode.",
        ("mode",),
    ),
    MetricSpec(
        "homing_unknown_objective_total",
        "counter",
        "requests",
        "Requests with an unknown objective, which have priority 0.",
    ),
    _sampled("homing_held_body_bytes", "bytes", "Size of buffered, unfinished request bodies."),
    _sampled(
        "homing_held_body_bytes_max",
        "bytes",
        "Limit of homing_held_body_bytes, beyond which new bodies are refused.",
    ),
    _sampled(
        "homing_memory_limit_bytes",
        "bytes",
        "Memory limit from which the sizes of bodies and indexes are derived.",
    ),
    _sampled(
        "homing_memory_pressure",
        "level",
        "Level of memory pressure: 0 for none, 1 if indexes shrink, 2 if long bodies also pass "
        "unread.",
    ),
    _sampled(
        "homing_load_reports_total",
        "responses",
        "Responses with a load report of the engine in their headers, by whether it was readable.",
        ("result",),
        "counter",
    ),
    MetricSpec(
        "homing_protocol_violations_total",
        "counter",
        "streams",
        "Streams ended because the gateway sent an event that their phase does not allow.",
        ("phase", "event"),
    ),
    MetricSpec(
        "homing_response_bodies_declined_total",
        "counter",
        "responses",
        "Responses whose body the gateway was asked not to send (--decline-response-bodies).",
    ),
    MetricSpec(
        "homing_response_usage_unseen_total",
        "counter",
        "responses",
        "Responses whose usage could not be read because the gateway sent no body.",
    ),
    MetricSpec(
        "homing_gateways_without_responses_total",
        "counter",
        "gateways",
        "Gateways that reported no response for 20 requests, so that failing endpoints are "
        "undetected.",
    ),
    # Prefix
    MetricSpec(
        "homing_prefix_indexer_hit_ratio",
        "histogram",
        "ratio",
        "Share of the prompt's full blocks that were estimated as cached at the chosen endpoint.",
        (),
        RATIO_BUCKETS,
    ),
    MetricSpec(
        "homing_prefix_indexer_hit_bytes",
        "histogram",
        "bytes",
        "Prompt bytes that were estimated as cached at the chosen endpoint.",
        (),
        (0.0, *SIZE_BUCKETS_BYTES),
    ),
    MetricSpec(
        "homing_predicted_hit_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens that were estimated as cached at the chosen endpoints.",
    ),
    MetricSpec(
        "homing_prefix_hit_tokens_total",
        "counter",
        "tokens",
        "Cached prompt tokens as predicted and as served, for requests whose usage was parsed.",
        ("source",),
    ),
    _sampled(
        "homing_index_info",
        "info",
        "Always 1 for each affinity index, with its type and the source of its information, if "
        "any.",
        ("index", "type", "origin"),
    ),
    _sampled(
        "homing_prefix_indexer_size",
        "blocks",
        "Entries of each affinity index, one per block and endpoint.",
        ("index",),
    ),
    _sampled(
        "homing_prefix_indexer_memory_bytes",
        "bytes",
        "Estimated memory of each affinity index.",
        ("index",),
    ),
    _sampled(
        "homing_prefix_indexer_lookups_total",
        "lookups",
        "Lookups in each affinity index, by result.",
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
        "Prompts routed to an endpoint whose deepest known block was known only from another "
        "replica.",
        ("index",),
        "counter",
    ),
    _sampled(
        "homing_prompt_segments_total",
        "segments",
        "Segments of 16 KB of long prompts: known (blocks were not hashed again) or new.",
        ("result",),
        "counter",
    ),
    _sampled(
        "homing_spans_total",
        "spans",
        "Spans of sampled requests: exported, failed at the collector, or dropped because the "
        "queue was full or the picker stopped. Only with --tracing.",
        ("result",),
        "counter",
    ),
    # Pool
    _sampled(
        "homing_ready_endpoints",
        "endpoints",
        "Endpoints that are preferred for requests: reachable, awake, not excluded, with fresh "
        "metrics.",
        ("name",),
    ),
    _sampled("homing_known_endpoints", "endpoints", "Known endpoints, ready or not.", ("name",)),
    _sampled(
        "homing_endpoints_set_aside",
        "endpoints",
        "Endpoints excluded until their next successful scrape because requests to them failed.",
        ("name",),
    ),
    _sampled(
        "homing_average_kv_cache_utilization",
        "ratio",
        "Mean KV-cache usage of the endpoints that report it, from 0 to 1.",
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
        "Standard deviation of the KV-cache usage.",
        ("name",),
    ),
    _sampled(
        "homing_std_dev_queue_size",
        "requests",
        "Standard deviation of the number of waiting requests.",
        ("name",),
    ),
    _sampled(
        "homing_std_dev_running_requests",
        "requests",
        "Standard deviation of the number of running requests.",
        ("name",),
    ),
    _sampled(
        "homing_revision_share",
        "ratio",
        "Share of requests that disaggregatedset-rollout-screener gives to a revision; 0 if the "
        "revision lacks a ready pod of a required role.",
        ("name", "revision"),
    ),
    _sampled(
        "homing_role_endpoints",
        "endpoints",
        "Ready endpoints by role, the value of their label `llm-d.ai/role`; like all metrics by "
        "role only for endpoints with this label.",
        _ROLE,
    ),
    _sampled(
        "homing_role_average_queue_size",
        "requests",
        "Mean number of waiting requests of the ready endpoints that report it, by role.",
        _ROLE,
    ),
    _sampled(
        "homing_role_average_running_requests",
        "requests",
        "Mean number of running requests of the ready endpoints that report it, by role.",
        _ROLE,
    ),
    _sampled(
        "homing_role_average_kv_cache_utilization",
        "ratio",
        "Mean KV-cache usage of the ready endpoints that report it, from 0 to 1, by role.",
        _ROLE,
    ),
    _sampled(
        "homing_role_inflight_requests",
        "requests",
        "Requests in flight at the ready endpoints from this picker and its peers, by role.",
        _ROLE,
    ),
    _sampled(
        "homing_role_inflight_tokens",
        "tokens",
        "Uncached prompt tokens of this picker and its peers that the ready endpoints are "
        "estimated not to have prefilled yet, by role.",
        _ROLE,
    ),
    _sampled(
        "homing_per_endpoint_queue_size",
        "requests",
        "Requests waiting in the engine at the last scrape.",
        ("name", "model_server_endpoint", "port"),
    ),
    _sampled(
        "homing_per_endpoint_metrics_age_seconds",
        "seconds",
        "Age of the last successful scrape; absent before the first one.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_inflight_requests",
        "requests",
        "Requests of this picker and its peers that are in flight at the endpoint.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_inflight_tokens",
        "tokens",
        "Uncached prompt tokens of this picker and its peers at the endpoint, estimated as not yet "
        "prefilled.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_set_aside_total",
        "counter",
        "endpoints",
        "Number of times that an endpoint was excluded because requests to it failed.",
        _ENDPOINT,
    ),
    # Endpoints as this picker observed them. Removed endpoints are no longer on the page.
    MetricSpec(
        "homing_per_endpoint_response_headers_seconds",
        "summary",
        "seconds",
        "Time from the request headers to the response headers, which precede the first token of "
        "a stream.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_per_endpoint_ttft_seconds",
        "summary",
        "seconds",
        "Time from the request headers to the first chunk of a streamed response, if the gateway "
        "sends it.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_per_endpoint_request_duration_seconds",
        "summary",
        "seconds",
        "Time from the request headers to the end of the response, for requests that completed.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_per_endpoint_error_total",
        "counter",
        "responses",
        "Error responses by class of status; `unreached` means that the gateway could not connect.",
        (*_ENDPOINT, "status"),
    ),
    MetricSpec(
        "homing_per_endpoint_prompt_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens of requests that ended at the endpoint, counted as in "
        "homing_request_input_tokens.",
        _ENDPOINT,
    ),
    MetricSpec(
        "homing_per_endpoint_predicted_hit_tokens_total",
        "counter",
        "tokens",
        "Part of homing_per_endpoint_prompt_tokens_total that was estimated as cached at the "
        "endpoint.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_per_endpoint_cache_queried_tokens_total",
        "tokens",
        "Prompt tokens that the engine looked up in its prefix cache, at the last scrape.",
        _ENDPOINT,
        "counter",
    ),
    _sampled(
        "homing_per_endpoint_cache_hit_tokens_total",
        "tokens",
        "Part of the looked up tokens that the engine found in any reported tier, at the last "
        "scrape.",
        _ENDPOINT,
        "counter",
    ),
    _sampled(
        "homing_predicted_hit_ratio",
        "ratio",
        "Share of prompt tokens routed to the endpoint that were estimated as cached, over "
        "windows of 20 s to 5 minutes. By index: all, or one that does not receive KV events, as "
        "if used alone.",
        (*_ENDPOINT, "index"),
    ),
    _sampled(
        "homing_engine_hit_ratio",
        "ratio",
        "Share of looked up prompt tokens that the engine found, over the same windows: in total, "
        "and by tier if reported.",
        (*_ENDPOINT, "tier"),
    ),
    MetricSpec(
        "homing_predicted_hit_error_ratio",
        "histogram",
        "ratio",
        "Error of the estimated cache hits as a share of the prompt tokens, per window and "
        "endpoint: too high or too low. A window without error counts in both.",
        ("side",),
        ERROR_BOUNDS,
        sampled=True,
    ),
    _sampled(
        "homing_hit_verdicts",
        "endpoints",
        "Endpoints by result of the last window: measured, waiting for requests, not reported by "
        "the engine, or with counters that stand still, decreased or are impossible.",
        ("verdict",),
    ),
    _sampled(
        "homing_bytes_per_token",
        "bytes",
        "Prompt bytes per token by model, derived from the engines' counters.",
        ("model_name",),
    ),
    _sampled(
        "homing_answer_tokens",
        "tokens",
        "Mean output tokens per response of the pool, counted by the engines; absent if too "
        "little is known.",
    ),
    _sampled(
        "homing_latency_prediction_error_ratio",
        "ratio",
        "Median relative error of the last 200 predictions of a latency (ttft, tpot), by the "
        "estimate alone and by the regression; only if latencies are predicted.",
        (*_ENDPOINT, "latency", "by"),
    ),
    _sampled(
        "homing_latency_prediction_used",
        "info",
        "1 for what predictions of a latency are made of: estimate, learned or none; only if "
        "latencies are predicted.",
        (*_ENDPOINT, "latency", "by"),
    ),
    _sampled(
        "homing_per_endpoint_engine_ttft_seconds",
        "seconds",
        "Time to first token measured by the engine for all its requests, at the last scrape.",
        _ENDPOINT,
        "summary",
    ),
    _sampled(
        "homing_per_endpoint_running_requests",
        "requests",
        "Requests running in the engine at the last scrape.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_per_endpoint_kv_cache_utilization",
        "ratio",
        "KV-cache usage from 0 to 1, at the last scrape.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_per_endpoint_slowness_ratio",
        "ratio",
        "Duration of requests relative to the expectation, as a multiple of the pool's median; "
        "absent if too few ended.",
        _ENDPOINT,
    ),
    _sampled(
        "homing_per_endpoint_outlier",
        "boolean",
        "Always 1 for an endpoint that is slow compared with others or fails; absent for others.",
        (*_ENDPOINT, "cause"),
    ),
    _sampled(
        "homing_endpoints_ejected",
        "endpoints",
        "Endpoints that are ejected as outliers and get no requests for a while.",
        ("name",),
    ),
    _sampled(
        "homing_endpoints_full",
        "endpoints",
        "Endpoints that refused requests because they are full and get fewer for a while.",
        ("name",),
    ),
    _sampled(
        "homing_endpoint_ejections_total",
        "ejections",
        "Ejections of endpoints by cause.",
        ("cause",),
        "counter",
    ),
    # Scrapes
    _sampled(
        "homing_tokenize_requests_total",
        "requests",
        "Requests whose tokens were requested, by backend and result: found, or the reason why "
        "the prompt was measured by bytes.",
        ("backend", "result"),
        "counter",
    ),
    MetricSpec(
        "homing_tokenize_duration_seconds",
        "histogram",
        "seconds",
        "Time that requests waited for their tokens, successfully or not.",
        ("backend",),
        TOKENIZE_BUCKETS_S,
    ),
    _sampled(
        "homing_flow_requests_total",
        "requests",
        "Requests that the queue placed, at once or after a wait, refused or lost, by outcome and "
        "priority.",
        ("outcome", "priority"),
        "counter",
    ),
    _sampled(
        "homing_flow_wait_seconds",
        "seconds",
        "Waits of the requests that left the queue, by outcome and priority.",
        ("outcome", "priority"),
        "summary",
    ),
    _sampled(
        "homing_flow_waiting",
        "requests",
        "Requests that wait in the queue, by priority.",
        ("priority",),
    ),
    _sampled(
        "homing_flow_waiting_bytes",
        "bytes",
        "Size of the bodies of the requests that wait in the queue, by priority.",
        ("priority",),
    ),
    _sampled(
        "homing_flow_flows",
        "flows",
        "Flows, such as tenants, with a request in the queue, by priority.",
        ("priority",),
    ),
    _sampled(
        "homing_flow_oldest_wait_seconds",
        "seconds",
        "Time since which the oldest request has waited in the queue, by priority; 0 if none waits.",
        ("priority",),
    ),
    _sampled(
        "homing_flow_light_wait_ratio",
        "ratio",
        "Mean wait of the flows that used less than half of the mean use, relative to the mean wait "
        "of all flows, by priority: about 1 if light flows wait as long as heavy ones. Over the last "
        "complete minute; missing if no flow was light.",
        ("priority",),
    ),
    _sampled(
        "homing_flow_evictions_total",
        "requests",
        "Running requests that were refused before their response began, for a waiting request of "
        "higher priority, by their own priority.",
        ("priority",),
        "counter",
    ),
    _sampled(
        "homing_flow_agent_sessions",
        "sessions",
        "Agent sessions by state: admitted, or waiting with a request in the queue. A session may be "
        "both; waiting requests without a session count as one. Missing without `thunder-agent`.",
        ("state",),
    ),
    _sampled(
        "homing_flow_agent_tokens",
        "tokens",
        "Tokens of the KV caches that the admitted agent sessions need together, as far as this "
        "picker served them.",
    ),
    _sampled(
        "homing_flow_agent_changes_total",
        "changes",
        "Changes of agent sessions, by change: admitted, or paused because a session gave up its room "
        "to others.",
        ("change",),
        "counter",
    ),
    _sampled(
        "homing_flow_saturation",
        "ratio",
        "Mean load of the endpoints of the fullest stage as a share of their room; 1 without ready "
        "endpoints.",
    ),
    _sampled(
        "homing_tokenize_compared_total",
        "requests",
        "Requests whose token ids were compared with those that the engine stored, by backend and "
        "result: agrees or differs.",
        ("backend", "result"),
        "counter",
    ),
    _sampled(
        "homing_tokenize_waiting",
        "requests",
        "Requests that are waiting for their tokens.",
        ("backend",),
    ),
    _sampled(
        "homing_tokenize_circuit_open",
        "boolean",
        "Circuit breaker of the backend: 1 while open after repeated failures, else 0.",
        ("backend",),
    ),
    MetricSpec(
        "homing_scrape_duration_seconds",
        "histogram",
        "seconds",
        "Duration of one successful scrape of an endpoint.",
        (),
        SCRAPE_BUCKETS_S,
    ),
    MetricSpec(
        "homing_scrape_errors_total",
        "counter",
        "scrapes",
        "Failed scrapes by kind of failure.",
        ("kind",),
    ),
    _sampled(
        "homing_endpoint_pages_unread",
        "endpoints",
        "Endpoints whose last fetch of an additional page failed, by page: models, gpus.",
        ("page",),
    ),
    # Kubernetes
    _sampled(
        "homing_kube_staleness_seconds",
        "seconds",
        "Time since the API server last reported a kind of object or started a watch of it; "
        "infinite before the first time.",
        _RESOURCE,
    ),
    _sampled(
        "homing_kube_synced",
        "boolean",
        "Synchronization: 1 once all objects of the kind were listed, 0 before or if its CRD is "
        "missing.",
        _RESOURCE,
    ),
    _sampled(
        "homing_kube_objects",
        "objects",
        "Known objects that concern the pool; for pods only those that can serve.",
        _RESOURCE,
    ),
    _sampled("homing_kube_lists_total", "lists", "Lists started.", _RESOURCE, "counter"),
    _sampled("homing_kube_watches_total", "watches", "Watches started.", _RESOURCE, "counter"),
    _sampled(
        "homing_kube_repairs_total",
        "objects",
        "Objects for which a periodic list differed from the watch; should stay 0.",
        _RESOURCE,
        "counter",
    ),
    _sampled(
        "homing_kube_errors_total",
        "steps",
        "Failed lists and watches by kind of failure.",
        ("resource", "kind"),
        "counter",
    ),
    _sampled(
        "homing_kube_events_total",
        "events",
        "Kubernetes Events that were written, or dropped by the rate limit or an error.",
        ("result",),
        "counter",
    ),
    _sampled(
        "homing_leader",
        "boolean",
        "Leadership of this replica: 1 if it leads, 0 if not; absent without leader election.",
    ),
    # KV events. All are absent if no index receives events from engines.
    _sampled(
        "homing_kv_event_streams",
        "endpoints",
        "Endpoints by state of their KV events: none, connecting, replaying, live, stale.",
        ("state",),
    ),
    _sampled(
        "homing_kv_event_streams_incomplete",
        "endpoints",
        "Endpoints with live KV events that did not report all cached blocks.",
    ),
    _sampled(
        "homing_kv_event_streams_silent",
        "endpoints",
        "Endpoints that send no KV events although their engines compute prompts.",
    ),
    _sampled(
        "homing_kv_events_total",
        "events",
        "Processed KV events by type.",
        ("type",),
        "counter",
    ),
    _sampled(
        "homing_kv_event_faults_total",
        "events",
        "Unknown KV events and payloads, and rejected connections and messages, by reason.",
        ("reason",),
        "counter",
    ),
    _sampled(
        "homing_kv_event_stream_changes_total",
        "changes",
        "Incidents in streams of KV events: frames, gaps, losses, implausible numbers, replays, "
        "restarts and others.",
        ("kind",),
        "counter",
    ),
    _sampled(
        "homing_rank_choices_total",
        "requests",
        "Requests to endpoints with several data-parallel ranks: a rank was selected, or the "
        "reason why the engine selects it (unheld, alike, crowded, fallback, failed). Only with a "
        "plugin that selects ranks.",
        ("result",),
        "counter",
    ),
    # Replicas. All are absent if this picker has no peers.
    _sampled(
        "homing_peers", "replicas", "Other replicas from which data arrived in the last 3 seconds."
    ),
    _sampled(
        "homing_peer_replicas_unheard",
        "replicas",
        "Other replicas that are expected but send no data.",
    ),
    _sampled(
        "homing_peer_records_total",
        "records",
        "Records of decisions sent to or received from other replicas, by outcome; unreadable, "
        "dropped and over_rate count frames of many records.",
        ("direction", "outcome"),
        "counter",
    ),
    _sampled(
        "homing_peer_lag_seconds",
        "seconds",
        "Age of the latest received record, at the sender and here without the transfer, for the "
        "replica where it was greatest.",
    ),
    _sampled(
        "homing_peer_frames_lost_total",
        "frames",
        "Frames of other replicas that were sent but did not arrive, or arrived late.",
        kind="counter",
    ),
    _sampled(
        "homing_peer_frames_asked_again_total",
        "frames",
        "Requests for missed frames, counted once per repetition.",
        kind="counter",
    ),
    _sampled(
        "homing_peer_frames_recovered_total",
        "frames",
        "Frames that arrived late, mostly after a repeated request.",
        kind="counter",
    ),
    _sampled(
        "homing_peer_claims_cut_total",
        "claims",
        "Load reports of other replicas that exceeded what the engine's page and the time since "
        "allow; they were reduced to the possible value.",
        kind="counter",
    ),
    _sampled(
        "homing_peers_known",
        "replicas",
        "Other replicas with a known address, or with a broker those that send data.",
    ),
    _sampled(
        "homing_peer_frames_total",
        "frames",
        "Frames by direction and outcome; dropped means a full queue, unreadable means an invalid "
        "frame.",
        ("direction", "outcome"),
        "counter",
    ),
    _sampled(
        "homing_peer_bytes_total",
        "bytes",
        "Bytes sent to and received from other replicas, without the overhead of encryption.",
        ("direction",),
        "counter",
    ),
    _sampled(
        "homing_peer_failures_total",
        "connections",
        "Failed connections between replicas by kind: silent, lost, handshake, refused, too many, "
        "origin, broker, internal.",
        ("kind",),
        "counter",
    ),
    _sampled(
        "homing_peer_snapshots_total",
        "snapshots",
        "Snapshots taken from or given to replicas, the broker or --snapshot-dir, by outcome.",
        ("place", "outcome"),
        "counter",
    ),
    MetricSpec(
        "homing_peer_snapshot_seconds",
        "histogram",
        "seconds",
        "Time until a snapshot was received completely, by source.",
        ("source",),
        SCRAPE_BUCKETS_S,
    ),
    # Configuration
    MetricSpec(
        "homing_config_last_reload_successful",
        "gauge",
        "boolean",
        "Result of the last reload: 1 if the newest configuration is in force, 0 if it was "
        "rejected and the last valid one is.",
    ),
    MetricSpec(
        "homing_config_reloads_total",
        "counter",
        "reloads",
        "Configurations that were read, by result.",
        ("result",),
    ),
    MetricSpec(
        "homing_last_good_in_force",
        "gauge",
        "boolean",
        "State of the copy in --last-good-dir: 1 while in force because the file was broken at "
        "start, else 0.",
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
        "Always 1, with hash and generation of the configuration in force.",
        ("hash", "generation"),
    ),
    MetricSpec(
        "homing_scorer_weight",
        "gauge",
        "weight",
        "Weight of each scorer in force.",
        ("profile", "scorer"),
    ),
    # Shadow profile
    _sampled(
        "homing_shadow_decisions_total",
        "decisions",
        "Decisions that the shadow profile evaluated: it agreed, differed, had no candidates "
        "left, or failed.",
        ("verdict",),
        "counter",
    ),
    _sampled(
        "homing_shadow_picks_total",
        "decisions",
        "Decisions that the shadow profile would have routed to each endpoint.",
        _ENDPOINT,
        "counter",
    ),
    _sampled(
        "homing_shadow_uncached_tokens_total",
        "tokens",
        "Prompt tokens estimated as not cached at the chosen endpoints (live) and at those of the "
        "shadow profile (shadow).",
        ("profile",),
        "counter",
    ),
    _sampled(
        "homing_shadow_inflight_requests_total",
        "requests",
        "Sum of requests in flight at the chosen endpoints (live) and at those of the shadow "
        "profile (shadow), at each decision.",
        ("profile",),
        "counter",
    ),
    # Capture
    _sampled(
        "homing_capture_requests_total",
        "requests",
        "Requests written to the capture.",
        (),
        "counter",
    ),
    _sampled(
        "homing_capture_events_total",
        "events",
        "Events written to the capture, such as decisions, scrapes and ends of requests.",
        (),
        "counter",
    ),
    _sampled(
        "homing_capture_dropped_total",
        "events",
        "Events missing in the capture because the queue was full or the disk failed.",
        ("reason",),
        "counter",
    ),
    _sampled(
        "homing_capture_write_errors_total",
        "writes",
        "Failed writes of the capture; requests continue.",
        (),
        "counter",
    ),
    _sampled(
        "homing_capture_bytes",
        "bytes",
        "Size of all captures in the directory of --capture.",
    ),
    # Recorded decisions
    _sampled(
        "homing_decision_history_records_total",
        "records",
        "Records written to --decisions-dir: decisions, refusals, ends of requests, and changes of "
        "settings and states.",
        (),
        "counter",
    ),
    _sampled(
        "homing_decision_history_dropped_total",
        "records",
        "Records missing in --decisions-dir because the queue was full or the disk failed.",
        ("reason",),
        "counter",
    ),
    _sampled(
        "homing_decision_history_write_errors_total",
        "writes",
        "Failed writes to --decisions-dir; requests continue.",
        (),
        "counter",
    ),
    _sampled(
        "homing_decision_history_bytes",
        "bytes",
        "Size of all files of decisions in the directory of --decisions-dir.",
    ),
    # Process and transport
    MetricSpec(
        "homing_loop_lag_seconds",
        "histogram",
        "seconds",
        "Delay of an event-loop timer, fifty times a second including missed ones: the wait of a "
        "request that arrives at a random time.",
        (),
        LAG_BUCKETS_S,
    ),
    _sampled(
        "homing_process_cpu_seconds_total",
        "seconds",
        "CPU time of the picker's process in user and kernel mode, over all threads.",
        kind="counter",
    ),
    _sampled(
        "homing_process_resident_memory_bytes",
        "bytes",
        "Resident memory of the picker's process.",
    ),
    MetricSpec("homing_info", "gauge", "info", "Always 1, with the running version.", ("version",)),
    _sampled("homing_extproc_streams_inflight", "streams", "Open ext_proc streams."),
    MetricSpec(
        "homing_extproc_streams_total",
        "counter",
        "streams",
        "Ended ext_proc streams by gRPC status code.",
        ("code",),
    ),
    MetricSpec(
        "homing_extproc_stream_duration_seconds",
        "histogram",
        "seconds",
        "Duration of an ext_proc stream.",
        (),
        REQUEST_BUCKETS_S,
    ),
    _sampled(
        "homing_extproc_messages_total",
        "messages",
        "Messages of gateways by decoder: scanned, or protobuf, which is slower and used for "
        "unusual messages.",
        ("path",),
        "counter",
    ),
    _sampled("homing_extproc_connections", "connections", "Open connections of gateways."),
    _sampled(
        "homing_extproc_unacknowledged_bytes",
        "bytes",
        "Received bytes on all connections that were not returned to their flow-control windows, "
        "because they wait for processing or for earlier answers to be read.",
    ),
    MetricSpec(
        "homing_extproc_connections_cut_total",
        "counter",
        "connections",
        "Connections that the picker closed, refused or asked to leave, by reason: they only opened "
        "and reset streams, violated HTTP/2, left much of their window unreturned, or exceeded the "
        "number of connections.",
        ("reason",),
    ),
    MetricSpec(
        "homing_drain_cut_streams_total",
        "counter",
        "streams",
        "Streams that were still open when the drain timed out and were ended.",
    ),
    MetricSpec(
        "homing_task_ends_total",
        "counter",
        "ends",
        "Unexpected ends of background tasks, which were restarted, and failed calls of the queue "
        "(task `queue`), which were repeated.",
        ("task",),
    ),
    MetricSpec(
        "homing_telemetry_failures_total",
        "counter",
        "events",
        "Events that were not counted or logged because of a defect; requests continue.",
        ("event",),
    ),
)
