"""Write the Grafana dashboards of the Helm chart: `python -m docs.dashboards`.

A dashboard consists of rows of panels; a panel has a title, a description, a unit and queries. All
other settings of Grafana are the same for all. `tests/chart/test_monitoring.py` fails if a
dashboard file is stale.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from docs.row_lines import row_lines

FOLDER: Final = Path(__file__).parents[1] / "charts/homing/files/dashboards"
COLUMNS: Final = 24
"""Number of columns of Grafana's panel grid."""
JOB: Final = 'job=~"$job"'
POD: Final = 'job=~"$job", endpoint_name=~"$endpoint"'
BY_ENDPOINT: Final = "endpoint_name, port"
SOURCE: Final = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


class Panel(Struct, frozen=True):
    """A panel of a dashboard: a time series, unless `kind` names another type."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """PromQL expression and legend of each query of the panel."""
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    steps: tuple[tuple[str, float], ...] = ()
    """Colours of the panel's values, each with the value from which on it applies; values below the
    first are green.
    """


class Row(Struct, frozen=True):
    title: str
    panels: tuple[Panel, ...]


class Dashboard(Struct, frozen=True):
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[tuple[str, str, str], ...] = ()
    """Name, label and query of each dashboard variable, besides data source and job."""

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.uid.removeprefix('homing-').replace('homing', 'overview')}.json"


def rate(name: str, by: str = "", *, select: str = JOB) -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({name}{{{select}}}[$__rate_interval]))"


def quantiles(name: str, *shown: str, select: str = JOB) -> tuple[tuple[str, str], ...]:
    """Return one query for each quantile in `shown`, such as "p50" or "p99". `name` is the
    histogram.
    """
    buckets = rate(f"{name}_bucket", "le", select=select)
    return tuple((f"histogram_quantile(0.{p[1:]}, {buckets})", p) for p in shown)


def mean(name: str, by: str = "", *, select: str = JOB) -> str:
    return f"{rate(f'{name}_sum', by, select=select)} / {rate(f'{name}_count', by, select=select)}"


def latest(name: str, by: str, *, how: str = "max", select: str = JOB) -> str:
    return f"{how} by ({by}) ({name}{{{select}}})"


def share(part: str, whole: str, by: str, *, select: str = JOB) -> str:
    return f"{rate(part, by, select=select)} / ({rate(whole, by, select=select)} > 0)"


def engine_share(by: str, *, select: str = JOB) -> str:
    """Return the PromQL expression of the hit rate that engines count; every picker exports the
    same counters.
    """
    grouped = f"sum by ({by}) " if by else "sum"
    hits, queried = (
        f"{grouped}(max by ({BY_ENDPOINT}) "
        f"(rate(homing_per_endpoint_cache_{what}_tokens_total{{{select}}}[$__rate_interval])))"
        for what in ("hit", "queried")
    )
    return f"{hits} / ({queried} > 0)"


def engine_ttft(*, select: str = JOB, ago: str = "") -> str:
    """Return the PromQL expression of the mean TTFT that engines measure; every picker exports the
    same histogram.
    """
    total, count = (
        f"max by ({BY_ENDPOINT}) (rate(homing_per_endpoint_engine_ttft_seconds_{what}"
        f"{{{select}}}[$__rate_interval]{ago}))"
        for what in ("sum", "count")
    )
    return f"{total} / ({count} > 0)"


def query(expression: str, legend: str = "") -> tuple[tuple[str, str], ...]:
    """Return the queries of a panel with a single expression."""
    return ((expression, legend),)


def each_endpoint(expression: str) -> tuple[tuple[str, str], ...]:
    """Return the queries of a panel with one line for each endpoint."""
    return query(expression, _ENDPOINT_LEGEND)


def ttft_panel(*, select: str = JOB) -> Panel:
    """Return the panel with the TTFT that the pickers measure."""
    return Panel(
        "Time to first token",
        "Time from the request headers to the first part of the answer. It needs a gateway that shows response bodies.",
        "s",
        quantiles("homing_request_ttft_seconds", "p50", "p90", "p99", select=select),
    )


def against_median(name: str) -> tuple[tuple[str, str], ...]:
    """Return queries for the mean of each endpoint, and for the median of these means. `name` is
    the histogram.
    """
    each = mean(name, BY_ENDPOINT)
    shown = mean(name, BY_ENDPOINT, select=POD)
    return (shown, "{{endpoint_name}}:{{port}}"), (f"quantile(0.5, {each})", "median of all")


_ENDPOINT_LEGEND: Final = "{{endpoint_name}}:{{port}}"
_MODEL: Final = 'job=~"$job", model_name=~"$model"'
_BAD: Final = (("yellow", 1.0), ("red", 2.0))

MEMORY_PRESSURE: Final = Panel(
    "Memory pressure",
    "Indexes shrink at 1; long bodies also pass unread at 2.",
    "short",
    query(latest("homing_memory_pressure", "pod"), "{{pod}}"),
)

OVERVIEW: Final = Dashboard(
    "homing",
    "Homing",
    "State of the picker: health first, then requests, replicas and the picker itself.",
    (
        Row(
            "Health",
            (
                Panel(
                    "Endpoints ready",
                    "Endpoints that are reachable, awake, not excluded and have fresh metrics. Requests get 503 at 0.",
                    "short",
                    query(latest("homing_ready_endpoints", "name"), "{{name}}"),
                    "stat",
                    4,
                    4,
                ),
                Panel(
                    "Outliers",
                    "Endpoints that are slower than the others or answer with errors only. The dashboard of endpoints names them.",
                    "short",
                    query(
                        "count(max by (endpoint_name, port) (homing_per_endpoint_outlier{"
                        + JOB
                        + "})) or vector(0)"
                    ),
                    "stat",
                    4,
                    4,
                    _BAD,
                ),
                Panel(
                    "Requests that fail",
                    "Share of requests that were refused, answered with an error by the engine, or broken off. An alert fires from 5 % on.",
                    "percentunit",
                    query(
                        rate("homing_request_error_total") + " / " + rate("homing_request_total")
                    ),
                    "stat",
                    4,
                    4,
                    (("yellow", 0.01), ("red", 0.05)),
                ),
                Panel(
                    "First token, p99",
                    "Time to first token that one client in a hundred exceeds. It needs a gateway that shows response bodies.",
                    "s",
                    quantiles("homing_request_ttft_seconds", "p99"),
                    "stat",
                    4,
                    4,
                    (("yellow", 5.0), ("red", 10.0)),
                ),
                Panel(
                    "Prefix hits",
                    "Share of the prompt tokens that engines found in their caches, by their own counts.",
                    "percentunit",
                    query(engine_share("")),
                    "stat",
                    4,
                    4,
                ),
                Panel(
                    "Decision, p99",
                    "Time of the slowest hundredth of decisions. An alert fires from 10 ms on.",
                    "s",
                    quantiles("homing_scheduler_e2e_duration_seconds", "p99"),
                    "stat",
                    4,
                    4,
                    (("yellow", 0.005), ("red", 0.01)),
                ),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    "Requests",
                    "Requests by the model that clients name.",
                    "reqps",
                    query(
                        rate("homing_request_total", "model_name", select=_MODEL), "{{model_name}}"
                    ),
                ),
                Panel(
                    "Errors",
                    "Requests that were refused, answered with an error by the engine, or broken off.",
                    "reqps",
                    query(
                        rate("homing_request_error_total", "error_code", select=_MODEL),
                        "{{error_code}}",
                    ),
                ),
                Panel(
                    "Refusals",
                    "Refused requests by the reason that the client receives.",
                    "reqps",
                    query(rate("homing_refusals_total", "reason"), "{{reason}}"),
                ),
                Panel(
                    "Duration",
                    "Time from the request headers to the end of the response.",
                    "s",
                    quantiles(
                        "homing_request_duration_seconds", "p50", "p90", "p99", select=_MODEL
                    ),
                ),
                ttft_panel(select=_MODEL),
                Panel(
                    "Time to response headers",
                    "Time until the engine's response headers. A stream's headers are not its first token, because engines send them at once.",
                    "s",
                    quantiles("homing_response_headers_seconds", "p50", "p90", "p99"),
                ),
                Panel(
                    "Running",
                    "Requests that were routed and have not ended.",
                    "short",
                    query(
                        latest("homing_request_running", "model_name", how="sum", select=_MODEL),
                        "{{model_name}}",
                    ),
                ),
                Panel(
                    "Request body",
                    "Size of the request bodies that were read.",
                    "bytes",
                    quantiles("homing_request_size_bytes", "p50", "p99", select=_MODEL),
                ),
                Panel(
                    "Tokens",
                    "Tokens per second. Output and cached tokens need --parse-response-usage.",
                    "short",
                    (
                        (rate("homing_request_input_tokens_sum", select=_MODEL), "prompt"),
                        (rate("homing_request_output_tokens_sum", select=_MODEL), "output"),
                        (
                            rate("homing_request_cached_tokens_sum", select=_MODEL),
                            "served from cache",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Replicas",
            (
                Panel(
                    "Replicas received and not received",
                    "Number of other replicas that each one receives. The decisions of a replica that is not received are unknown there.",
                    "short",
                    (
                        (latest("homing_peers", "pod"), "received by {{pod}}"),
                        (latest("homing_peer_replicas_unheard", "pod"), "not received by {{pod}}"),
                    ),
                ),
                Panel(
                    "Records sent and learnt",
                    "Records of decisions that replicas share, by outcome.",
                    "ops",
                    query(
                        rate("homing_peer_records_total", "direction, outcome"),
                        "{{direction}}: {{outcome}}",
                    ),
                ),
                Panel(
                    "Age of learnt records",
                    "Age of shared records when a replica learns them, for the oldest peer.",
                    "s",
                    query(latest("homing_peer_lag_seconds", "pod"), "{{pod}}"),
                ),
                Panel(
                    "Hits owed to other replicas alone",
                    "Share of the look-ups with a hit whose deepest block came from another replica.",
                    "percentunit",
                    query(
                        rate("homing_prefix_known_from_peers_total", "pod")
                        + ' / (sum by (pod) (rate(homing_prefix_indexer_lookups_total{job=~"$job",result=~"full|partial"}[$__rate_interval])) > 0)',
                        "{{pod}}",
                    ),
                ),
                Panel(
                    "Lost frames",
                    "Frames that others sent and that did not arrive, or arrived late.",
                    "ops",
                    query(rate("homing_peer_frames_lost_total", "pod"), "{{pod}}"),
                ),
                Panel(
                    "Failed connections, dropped frames",
                    "Failures by kind. A frame is dropped if a queue is full.",
                    "ops",
                    (
                        (rate("homing_peer_failures_total", "kind"), "{{kind}}"),
                        (
                            rate(
                                "homing_peer_frames_total",
                                "direction",
                                select=JOB + ', outcome="dropped"',
                            ),
                            "dropped: {{direction}}",
                        ),
                    ),
                ),
                Panel(
                    "Bytes sent and received",
                    "Bytes between replicas, without encryption overhead.",
                    "Bps",
                    query(rate("homing_peer_bytes_total", "direction"), "{{direction}}"),
                ),
            ),
        ),
        Row(
            "Picker",
            (
                Panel(
                    "Streams",
                    "Open ext_proc streams, one for each request.",
                    "short",
                    query(
                        latest("homing_extproc_streams_inflight", "pod", how="sum"), "open, {{pod}}"
                    ),
                ),
                Panel(
                    "Loop late",
                    "Time that a request waits until the event loop reads it. An alert fires from a mean of 20 ms on.",
                    "s",
                    (
                        (mean("homing_loop_lag_seconds", "pod"), "mean, {{pod}}"),
                        *quantiles("homing_loop_lag_seconds", "p99"),
                    ),
                ),
                Panel(
                    "CPU",
                    "Cores that the picker's process uses. It is one thread except for the capture and gRPC.",
                    "short",
                    query(rate("homing_process_cpu_seconds_total", "pod"), "cores, {{pod}}"),
                ),
                Panel(
                    "Memory",
                    "Resident memory of the picker's process.",
                    "bytes",
                    query(latest("homing_process_resident_memory_bytes", "pod"), "{{pod}}"),
                ),
                Panel(
                    "Capture lost",
                    "Events that are missing in the capture, by the part that had no room for them.",
                    "ops",
                    query(
                        rate("homing_capture_dropped_total", "pod, reason"), "{{pod}} {{reason}}"
                    ),
                ),
                Panel(
                    "Streams ended",
                    "Ended streams by gRPC status code.",
                    "short",
                    query(rate("homing_extproc_streams_total", "code"), "{{code}}"),
                ),
                Panel(
                    "Streams cut by a drain, connections cut by reason",
                    "Streams and connections that the picker cut. Neither count should increase.",
                    "short",
                    (
                        (
                            latest("homing_drain_cut_streams_total", "pod", how="sum"),
                            "{{pod}} streams",
                        ),
                        (
                            latest(
                                "homing_extproc_connections_cut_total", "pod, reason", how="sum"
                            ),
                            "{{pod}} connections, {{reason}}",
                        ),
                    ),
                ),
                Panel(
                    "Time since the last message of the API server",
                    "Normal values are below about 90 s; the API server sends nothing above.",
                    "s",
                    query(
                        latest("homing_kube_staleness_seconds", "pod, resource"),
                        "{{pod}} {{resource}}",
                    ),
                ),
                Panel(
                    "Failed lists and watches",
                    "Failures by kind.",
                    "short",
                    query(
                        rate("homing_kube_errors_total", "resource, kind"), "{{resource}} {{kind}}"
                    ),
                ),
                Panel(
                    "Leader",
                    "The value 1 means that this replica leads. The series is absent without leader election.",
                    "short",
                    query(latest("homing_leader", "pod"), "{{pod}}"),
                ),
                Panel(
                    "Not counted or logged",
                    "Events that were lost by a defect; requests continued.",
                    "short",
                    query(rate("homing_telemetry_failures_total", "event"), "{{event}}"),
                ),
                MEMORY_PRESSURE,
                Panel(
                    "Newest configuration accepted",
                    "The value 0 means that it was rejected and the last valid one is in force.",
                    "short",
                    query(
                        latest("homing_config_last_reload_successful", "pod", how="min"), "{{pod}}"
                    ),
                ),
            ),
        ),
    ),
    (("model", "Model", 'label_values(homing_request_total{job=~"$job"}, model_name)'),),
)

ENDPOINTS: Final = Dashboard(
    "homing-endpoints",
    "Homing: endpoints",
    "Comparison of each endpoint with the median of the pool, followed by details.",
    (
        Row(
            "Pods against the median",
            (
                Panel(
                    "Slowness",
                    "Duration of requests relative to the expected duration there, over the median of the pool. An endpoint is an outlier from 3 on.",
                    "short",
                    each_endpoint(
                        latest("homing_per_endpoint_slowness_ratio", BY_ENDPOINT, select=POD)
                    ),
                    width=12,
                ),
                Panel(
                    "Outliers",
                    "The value 1 means slower than the others, or failing.",
                    "short",
                    query(
                        latest("homing_per_endpoint_outlier", BY_ENDPOINT + ", cause", select=POD),
                        _ENDPOINT_LEGEND + " {{cause}}",
                    ),
                    width=12,
                ),
                Panel(
                    "Time to first token by the engines' own clocks",
                    "Mean over all requests that the engines serve, from any client, by their metrics pages.",
                    "s",
                    (
                        (engine_ttft(select=POD), _ENDPOINT_LEGEND),
                        (f"quantile(0.5, {engine_ttft()})", "median of all"),
                        (f"quantile(0.5, {engine_ttft(ago=' offset 1d')})", "median a day ago"),
                    ),
                ),
                Panel(
                    "Time to first chunk",
                    "Mean of streamed answers, if the gateway shows them.",
                    "s",
                    against_median("homing_per_endpoint_ttft_seconds"),
                ),
                Panel(
                    "Time to response headers",
                    "Mean time to response headers. It is nearly the whole duration of an answer that is not streamed.",
                    "s",
                    against_median("homing_per_endpoint_response_headers_seconds"),
                ),
                Panel(
                    "Duration",
                    "Mean duration of the requests that ended normally.",
                    "s",
                    against_median("homing_per_endpoint_request_duration_seconds"),
                ),
                Panel(
                    "Errors",
                    "Responses per second by class of status. The class unreached means that the gateway got no connection.",
                    "reqps",
                    query(
                        rate(
                            "homing_per_endpoint_error_total", BY_ENDPOINT + ", status", select=POD
                        ),
                        _ENDPOINT_LEGEND + " {{status}}",
                    ),
                ),
                Panel(
                    "Predicted less actual hits",
                    "Predicted hits less the engine's count, as a share of the prompt tokens, in the last windows of each. The prediction is too high above 0.",
                    "percentunit",
                    each_endpoint(
                        latest(
                            "homing_predicted_hit_ratio",
                            BY_ENDPOINT,
                            how="avg",
                            select=POD + ', index="all"',
                        )
                        + " - "
                        + latest(
                            "homing_engine_hit_ratio",
                            BY_ENDPOINT,
                            how="avg",
                            select=POD + ', tier="all"',
                        )
                    ),
                ),
                Panel(
                    "Actual hits by tier",
                    "Share of the prompt tokens that engines found cached, by tier.",
                    "percentunit",
                    query(
                        latest(
                            "homing_engine_hit_ratio", BY_ENDPOINT + ", tier", how="avg", select=POD
                        ),
                        _ENDPOINT_LEGEND + " {{tier}}",
                    ),
                ),
                Panel(
                    "Predicted hits by index",
                    "Index all is the prediction that decisions used. Another index shows what it alone would have predicted, beside the index with KV events.",
                    "percentunit",
                    query(
                        latest(
                            "homing_predicted_hit_ratio",
                            BY_ENDPOINT + ", index",
                            how="avg",
                            select=POD,
                        ),
                        _ENDPOINT_LEGEND + " {{index}}",
                    ),
                ),
                Panel(
                    "Predicted hits",
                    "Share of its prompt tokens that each endpoint was predicted to have cached.",
                    "percentunit",
                    (
                        (
                            share(
                                "homing_per_endpoint_predicted_hit_tokens_total",
                                "homing_per_endpoint_prompt_tokens_total",
                                BY_ENDPOINT,
                                select=POD,
                            ),
                            _ENDPOINT_LEGEND,
                        ),
                        (
                            share(
                                "homing_per_endpoint_predicted_hit_tokens_total",
                                "homing_per_endpoint_prompt_tokens_total",
                                "job",
                            ),
                            "all",
                        ),
                    ),
                ),
                Panel(
                    "Actual hits",
                    "Share of its prompt tokens that each engine counted as cached. The index is wrong if this is far from the prediction.",
                    "percentunit",
                    (
                        (engine_share(BY_ENDPOINT, select=POD), _ENDPOINT_LEGEND),
                        (engine_share(""), "all"),
                    ),
                ),
            ),
        ),
        Row(
            "Load",
            (
                Panel(
                    "Picks",
                    "Decisions for each endpoint.",
                    "reqps",
                    each_endpoint(
                        rate(
                            "homing_scheduler_attempts_total",
                            BY_ENDPOINT,
                            select=POD + ', endpoint_name!=""',
                        )
                    ),
                ),
                Panel(
                    "In flight",
                    "Requests that the pickers sent there and that have not ended, by the picker that counts most. Each counts those of its peers.",
                    "short",
                    each_endpoint(
                        latest("homing_inflight_requests", BY_ENDPOINT, how="max", select=POD)
                    ),
                ),
                Panel(
                    "Prompt tokens not yet prefilled",
                    "Estimated tokens that the engine still has to compute.",
                    "short",
                    each_endpoint(
                        latest("homing_inflight_tokens", BY_ENDPOINT, how="max", select=POD)
                    ),
                ),
                Panel(
                    "Waiting",
                    "Requests in the engine's queue, as last scraped.",
                    "short",
                    query(
                        latest("homing_per_endpoint_queue_size", "model_server_endpoint, port"),
                        "{{model_server_endpoint}}:{{port}}",
                    ),
                ),
                Panel(
                    "Running",
                    "Requests in the engine's batch, as last scraped.",
                    "short",
                    each_endpoint(
                        latest("homing_per_endpoint_running_requests", BY_ENDPOINT, select=POD)
                    ),
                ),
                Panel(
                    "KV cache",
                    "Share of the KV cache in use, as last scraped.",
                    "percentunit",
                    each_endpoint(
                        latest("homing_per_endpoint_kv_cache_utilization", BY_ENDPOINT, select=POD)
                    ),
                ),
            ),
        ),
        Row(
            "State",
            (
                Panel(
                    "Endpoints",
                    "Endpoints that are ready, known, set aside after failures, ejected as outliers, and full.",
                    "short",
                    (
                        (latest("homing_ready_endpoints", "name"), "ready {{name}}"),
                        (latest("homing_known_endpoints", "name"), "known {{name}}"),
                        (latest("homing_endpoints_set_aside", "name"), "set aside {{name}}"),
                        (latest("homing_endpoints_ejected", "name"), "ejected {{name}}"),
                        (latest("homing_endpoints_full", "name"), "full {{name}}"),
                    ),
                ),
                Panel(
                    "Age of metrics",
                    "Time since the last successful scrape.",
                    "s",
                    each_endpoint(
                        latest("homing_per_endpoint_metrics_age_seconds", BY_ENDPOINT, select=POD)
                    ),
                ),
                Panel(
                    "Failed scrapes",
                    "Failures by kind.",
                    "short",
                    query(rate("homing_scrape_errors_total", "kind"), "{{kind}}"),
                ),
                Panel(
                    "Set aside, ejected",
                    "Number in an hour.",
                    "short",
                    (
                        (
                            "sum by (endpoint_name, port) (increase(homing_set_aside_total{"
                            + POD
                            + "}[1h]))",
                            "set aside " + _ENDPOINT_LEGEND,
                        ),
                        (
                            "sum by (cause) (increase(homing_endpoint_ejections_total{"
                            + JOB
                            + "}[1h]))",
                            "ejected: {{cause}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "KV events",
            (
                Panel(
                    "Streams",
                    "Endpoints by the state of their KV events, by the picker with most of each state. The panel is empty if no index receives events.",
                    "short",
                    (
                        (latest("homing_kv_event_streams", "state"), "{{state}}"),
                        (
                            f"max(homing_kv_event_streams_incomplete{{{JOB}}})",
                            "live, not complete",
                        ),
                        (f"max(homing_kv_event_streams_silent{{{JOB}}})", "silent"),
                    ),
                ),
                Panel(
                    "Events",
                    "Events that all pickers together read per second; each picker receives every engine.",
                    "short",
                    query(rate("homing_kv_events_total", "type"), "{{type}}"),
                ),
                Panel(
                    "Faults of KV events",
                    "Messages that were not understood or ignored, and frames that streams lost or requested again.",
                    "short",
                    (
                        (rate("homing_kv_event_faults_total", "reason"), "{{reason}}"),
                        (
                            rate(
                                "homing_kv_event_stream_changes_total",
                                "kind",
                                select=JOB + ', kind!~"frames|duplicates"',
                            ),
                            "{{kind}}",
                        ),
                    ),
                ),
                Panel(
                    "Data-parallel ranks",
                    "Requests to endpoints with several ranks behind one address: a named rank, or the reason why the engine chose. The panel is empty if no plugin chooses ranks.",
                    "reqps",
                    query(rate("homing_rank_choices_total", "result"), "{{result}}"),
                ),
            ),
        ),
    ),
    (
        (
            "endpoint",
            "Endpoint",
            'label_values(homing_inflight_requests{job=~"$job"}, endpoint_name)',
        ),
    ),
)

TUNING: Final = Dashboard(
    "homing-tuning",
    "Homing: tuning",
    "Effect of the weights: the configuration, its decisions, and their results. Lines mark each change.",
    (
        Row(
            "Before and after",
            (
                Panel(
                    "Weights",
                    "Weights in force.",
                    "short",
                    query(
                        latest("homing_scorer_weight", "profile, scorer"), "{{profile}} {{scorer}}"
                    ),
                ),
                Panel(
                    "Configuration in force",
                    "Configuration of each replica. A step is a change.",
                    "short",
                    query(
                        latest("homing_config_info", "pod, hash, generation"),
                        "{{pod}}: {{hash}}, generation {{generation}}",
                    ),
                ),
                ttft_panel(),
                Panel(
                    "Hits by the engines' own counts",
                    "Share of prompt tokens that engines found cached, beside the prediction.",
                    "percentunit",
                    (
                        (engine_share(""), "served"),
                        (
                            rate("homing_per_endpoint_predicted_hit_tokens_total")
                            + " / "
                            + rate("homing_per_endpoint_prompt_tokens_total"),
                            "predicted",
                        ),
                    ),
                ),
                Panel(
                    "Spread of the load",
                    "Standard deviation of the queues over their mean. The load is even at 0.",
                    "short",
                    query(
                        "max by (name) (homing_std_dev_queue_size{"
                        + JOB
                        + "}) / (max by (name) (homing_average_queue_size{"
                        + JOB
                        + "}) > 0)",
                        "{{name}}",
                    ),
                ),
                Panel(
                    "Duration",
                    "Mean duration of all requests.",
                    "s",
                    query(mean("homing_request_duration_seconds"), "mean"),
                ),
            ),
        ),
        Row(
            "Decisions",
            (
                Panel(
                    "Scorers' parts for the chosen endpoint",
                    "Mean weighted score of each scorer, which shows the scorer that decides.",
                    "short",
                    query(mean("homing_scorer_contribution", "scorer"), "{{scorer}}"),
                ),
                Panel(
                    "Candidates dropped",
                    "Dropped candidates by filter.",
                    "short",
                    query(rate("homing_filter_eliminated_total", "filter"), "{{filter}}"),
                ),
                Panel(
                    "Plugins that fail",
                    "Failures by plugin. Decisions omit the contribution of a failing plugin.",
                    "short",
                    query(rate("homing_plugin_errors_total", "plugin"), "{{plugin}}"),
                ),
                Panel(
                    "Time of a decision",
                    "Duration of the decision alone.",
                    "s",
                    quantiles("homing_scheduler_e2e_duration_seconds", "p50", "p90", "p99"),
                ),
                Panel(
                    "Time until the answer",
                    "Time from the request headers to the picker's answer, including the wait for the body.",
                    "s",
                    quantiles("homing_request_processing_duration_seconds", "p50", "p99"),
                ),
                Panel(
                    "Decided without the prompt",
                    "Requests by body mode of the gateway. The mode memory means that there was no memory to read the body.",
                    "reqps",
                    query(rate("homing_scheduled_without_prefix_total", "mode"), "{{mode}}"),
                ),
            ),
        ),
        Row(
            "Prefix index",
            (
                Panel(
                    "Predicted hit ratio",
                    "Mean share of the prompt that the chosen endpoint is predicted to have cached.",
                    "percentunit",
                    query(mean("homing_prefix_indexer_hit_ratio"), "mean"),
                ),
                Panel(
                    "Predicted and served from cache",
                    "Tokens per second of requests whose usage was parsed.",
                    "short",
                    query(rate("homing_prefix_hit_tokens_total", "source"), "{{source}}"),
                ),
                Panel(
                    "Look-ups",
                    "Look-ups by result.",
                    "short",
                    query(rate("homing_prefix_indexer_lookups_total", "result"), "{{result}}"),
                ),
                Panel(
                    "Evictions",
                    "Evictions by cause. The cause capacity is an index that follows its engines; memory is one that is too small.",
                    "short",
                    query(rate("homing_prefix_indexer_evictions_total", "cause"), "{{cause}}"),
                ),
                Panel(
                    "Entries",
                    "Entries of the index, one for each block and endpoint.",
                    "short",
                    query(
                        latest("homing_prefix_indexer_size", "pod, index", how="sum"),
                        "{{pod}} {{index}}",
                    ),
                ),
                Panel(
                    "Segments of long prompts",
                    "Segments of long prompts. The blocks of known ones were not hashed again.",
                    "short",
                    query(rate("homing_prompt_segments_total", "result"), "{{result}}"),
                ),
            ),
        ),
    ),
)

CAPACITY: Final = Dashboard(
    "homing-capacity",
    "Homing: capacity",
    "Load of the pool and of the picker, to judge whether they are large enough.",
    (
        Row(
            "Pool",
            (
                Panel(
                    "Waiting requests",
                    "Mean and standard deviation over the endpoints. An alert fires from 50 on.",
                    "short",
                    (
                        (latest("homing_average_queue_size", "name"), "mean {{name}}"),
                        (
                            latest("homing_std_dev_queue_size", "name"),
                            "standard deviation {{name}}",
                        ),
                    ),
                ),
                Panel(
                    "KV cache use",
                    "Mean and standard deviation over the endpoints. An alert fires from 90 % on.",
                    "percentunit",
                    (
                        (latest("homing_average_kv_cache_utilization", "name"), "mean {{name}}"),
                        (
                            latest("homing_std_dev_kv_cache_utilization", "name"),
                            "standard deviation {{name}}",
                        ),
                    ),
                ),
                Panel(
                    "Running requests",
                    "Mean and standard deviation over the endpoints.",
                    "short",
                    (
                        (latest("homing_average_running_requests", "name"), "mean {{name}}"),
                        (
                            latest("homing_std_dev_running_requests", "name"),
                            "standard deviation {{name}}",
                        ),
                    ),
                ),
                Panel(
                    "Requests by endpoint",
                    "Requests per second and ready endpoint.",
                    "reqps",
                    query(
                        "sum(rate(homing_request_total{"
                        + JOB
                        + "}[$__rate_interval])) / sum(max by (name) (homing_ready_endpoints{"
                        + JOB
                        + "}))",
                        "requests",
                    ),
                ),
                Panel(
                    "Uncached prompt tokens by endpoint",
                    "Tokens per second that prefill must compute.",
                    "short",
                    query(
                        "("
                        + rate("homing_per_endpoint_prompt_tokens_total")
                        + " - "
                        + rate("homing_per_endpoint_predicted_hit_tokens_total")
                        + ") / sum(max by (name) (homing_ready_endpoints{"
                        + JOB
                        + "}))",
                        "tokens",
                    ),
                ),
                Panel(
                    "Shed",
                    "Requests that were refused because the pool is full.",
                    "reqps",
                    query(
                        rate(
                            "homing_refusals_total",
                            "reason",
                            select=JOB + ', reason="rejected-saturated"',
                        ),
                        "{{reason}}",
                    ),
                ),
            ),
        ),
        Row(
            "Queue",
            (
                Panel(
                    "Waiting in the picker",
                    "Requests in the queue by priority. Nothing is shown unless the feature gate flowControl is on.",
                    "short",
                    query(
                        latest("homing_flow_waiting", "priority", how="sum"),
                        "priority {{priority}}",
                    ),
                ),
                Panel(
                    "Oldest wait",
                    "Time for which the oldest request of each priority has waited. An alert fires from 30 s on.",
                    "s",
                    query(
                        latest("homing_flow_oldest_wait_seconds", "priority"),
                        "priority {{priority}}",
                    ),
                ),
                Panel(
                    "Mean wait",
                    "Mean wait of the requests that left the queue, by outcome and priority.",
                    "s",
                    query(
                        mean("homing_flow_wait_seconds", "outcome, priority"),
                        "{{outcome}}, priority {{priority}}",
                    ),
                ),
                Panel(
                    "Outcomes",
                    "Requests per second that left the queue or did not have to wait, by outcome and priority, and evicted ones.",
                    "reqps",
                    (
                        (
                            rate("homing_flow_requests_total", "outcome, priority"),
                            "{{outcome}}, priority {{priority}}",
                        ),
                        (
                            rate("homing_flow_evictions_total", "priority"),
                            "evicted, priority {{priority}}",
                        ),
                    ),
                ),
                Panel(
                    "Saturation",
                    "Mean load of the endpoints as a share of their room. With learned room, it changes only when a request begins to wait or is refused.",
                    "percentunit",
                    query(latest("homing_flow_saturation", "instance"), "{{instance}}"),
                ),
                Panel(
                    "Fairness between flows",
                    "Flows with a waiting request, and the mean wait of light flows relative to all. An alert fires from 80 % on.",
                    "short",
                    (
                        (
                            latest("homing_flow_flows", "priority"),
                            "flows, priority {{priority}}",
                        ),
                        (
                            latest("homing_flow_light_wait_ratio", "priority"),
                            "light flows' wait, priority {{priority}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Picker",
            (
                Panel(
                    "Requests by replica",
                    "Requests per second of each replica.",
                    "reqps",
                    query(rate("homing_request_total", "pod"), "{{pod}}"),
                ),
                Panel(
                    "Open streams",
                    "Open streams, limited by --concurrent-streams-max.",
                    "short",
                    query(latest("homing_extproc_streams_inflight", "pod", how="sum"), "{{pod}}"),
                ),
                Panel(
                    "Refused by the picker itself",
                    "Requests refused because too many streams are open, or too many bodies are held.",
                    "reqps",
                    query(
                        rate(
                            "homing_refusals_total",
                            "reason",
                            select=JOB + ', reason=~"rejected-overloaded|rejected-bodies-held"',
                        ),
                        "{{reason}}",
                    ),
                ),
                Panel(
                    "Bodies held",
                    "Share of the limit for held bodies in use.",
                    "percentunit",
                    query(
                        latest("homing_held_body_bytes", "pod")
                        + " / "
                        + latest("homing_held_body_bytes_max", "pod"),
                        "{{pod}}",
                    ),
                ),
                Panel(
                    "Index",
                    "Memory that the index accounts for.",
                    "bytes",
                    query(
                        latest("homing_prefix_indexer_memory_bytes", "pod, index", how="sum"),
                        "{{pod}} {{index}}",
                    ),
                ),
                MEMORY_PRESSURE,
                Panel(
                    "Scrapes",
                    "Duration of successful scrapes.",
                    "s",
                    quantiles("homing_scrape_duration_seconds", "p50", "p99"),
                ),
                Panel(
                    "Messages parsed by protobuf",
                    "Messages that the fast parser leaves to protobuf because they are unusual.",
                    "ops",
                    query(
                        rate(
                            "homing_extproc_messages_total",
                            "path",
                            select=JOB + ', path="protobuf"',
                        ),
                        "{{path}}",
                    ),
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = (OVERVIEW, ENDPOINTS, TUNING, CAPACITY)


def text_of(dashboard: Dashboard) -> str:
    """Return the JSON text of a dashboard's file."""
    return row_lines(_board(dashboard))


def _board(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "title": dashboard.title,
        "uid": dashboard.uid,
        "description": dashboard.description,
        "tags": ["homing", "inference"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Homing",
                "tags": ["homing"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": [_configured()]},
        "templating": {
            "list": [
                {
                    "name": "DS_PROMETHEUS",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Data source",
                },
                _variable("job", "Job", "label_values(homing_info, job)"),
                *(_variable(*variable) for variable in dashboard.variables),
            ]
        },
        "panels": _panels(dashboard.rows),
    }


def _configured() -> dict[str, Any]:
    return {
        "name": "Configuration applied",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": 'sum by (pod) (increase(homing_config_reloads_total{job=~"$job", result="success"}[1m])) > 0',
        "titleFormat": "Configuration applied",
        "textFormat": "{{pod}}",
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "multi": True,
        "includeAll": True,
        # Without it "All" would list every name in each query.
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _panels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, placed in the grid row by row, from left to right."""
    placed: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        head = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        placed.append({"id": len(placed) + 1, **head, "gridPos": place})
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            placed.append(_panel(panel, len(placed) + 1, place))
            x += panel.width
            height = max(height, panel.height)
        y += height
    return placed


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.steps:
        steps = [{"color": colour, "value": value} for colour, value in panel.steps]
        green = {"color": "green", "value": None}
        defaults["thresholds"] = {"mode": "absolute", "steps": [green, *steps]}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi"},
    }
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for at, (expression, legend) in enumerate(panel.queries)
        ],
        "options": options,
    }


def main() -> int:
    """Write every dashboard file that changed, and print its name."""
    for dashboard in DASHBOARDS:
        text = text_of(dashboard)
        if not dashboard.file.is_file() or dashboard.file.read_text(encoding="utf-8") != text:
            dashboard.file.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{dashboard.file.name} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
