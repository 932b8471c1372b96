"""The /metrics page of a simulated engine, with the names, labels, types and buckets of vLLM 0.32.

Each pod has its own prometheus_client registry, like the real page. As in a real engine, the gauges
are those at the end of the last step, not of the scrape. The page is rendered at the first scrape
after a change. It is the same until the next change, also in its process metrics, so that the page
of an idle engine costs nothing. Series of parts that are not simulated (FLOP counters, the cache of
media) exist and stay 0. `http_*`, which the real server's web framework adds, is omitted. Only
engines with a KV connector have `transfers`.
"""

from collections.abc import Mapping
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from epp.core.types import Seconds
from sim.engine.engine import EngineSettings, EngineSnapshot, Step
from sim.engine.request import EngineRequest
from sim.pods.transfer_series import TransferSeries

_SECONDS_LONG: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_SECONDS_FIRST_TOKEN: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_SECONDS_TOKEN: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
_ANSWERS: Final = (1, 2, 5, 10, 20)
_ADAPTER_SETS_MAX: Final = 1024
"""Maximum number of label sets of the metric `lora_requests_info`; the oldest are removed. A real
engine never removes one, but the simulator's memory is limited here.
"""

_GAUGES: Final = (
    ("num_requests_running", "Number of requests in model execution batches."),
    ("num_requests_waiting", "Number of requests waiting to be processed."),
)
_COUNTERS: Final[tuple[tuple[str, str, str, tuple[str, ...]], ...]] = (
    (
        "prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        "",
        (),
    ),
    ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", "", ()),
    (
        "external_prefix_cache_queries",
        (
            "External prefix cache queries from KV connector cross-instance cache sharing, in terms of "
            "number of queried tokens."
        ),
        "",
        (),
    ),
    (
        "external_prefix_cache_hits",
        (
            "External prefix cache hits from KV connector cross-instance cache sharing, in terms of "
            "number of cached tokens."
        ),
        "",
        (),
    ),
    (
        "mm_cache_queries",
        "Multi-modal cache queries, in terms of number of queried items.",
        "",
        (),
    ),
    ("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.", "", ()),
    ("num_preemptions", "Cumulative number of preemption from the engine.", "", ()),
    ("prompt_tokens", "Number of prefill tokens processed.", "", ()),
    (
        "prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", "", ()),
    (
        "prompt_tokens_cached_by_source",
        (
            "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host "
            "(offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or "
            "external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits + "
            "vllm:external_prefix_cache_hits."
        ),
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    ("generation_tokens", "Number of generation tokens processed.", "", ()),
    (
        "request_success",
        "Count of successfully processed requests.",
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
    ),
)
_FLOPS: Final = tuple(
    (
        f"estimated_{what}_per_gpu",
        f"Estimated number of {text} per GPU (for Model Flops Utilization calculations).",
    )
    for what, text in (
        ("flops", "floating point operations"),
        ("read_bytes", "bytes read from memory"),
        ("write_bytes", "bytes written to memory"),
    )
)
_LATENCIES: Final = (
    ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds."),
    ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request."),
    ("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request."),
    ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request."),
    ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request."),
)


class MetricsPage:
    """The metrics of one simulated pod. `observe` is called after each engine step, `render` for
    each scrape.
    """

    def __init__(
        self, *, model: str, settings: EngineSettings, max_model_len_tokens: int, ranks: int = 1
    ) -> None:
        """Create the metrics page.

        With several `ranks`, all counts have the label of the first rank; only the cache
        configuration has a series for each rank.
        """
        self.registry = CollectorRegistry()
        GCCollector(self.registry)
        PlatformCollector(self.registry)
        ProcessCollector(registry=self.registry)
        self._labels = {"model_name": model, "engine": "0"}
        self._max_loras = settings.max_loras
        self._adapter_sets: dict[tuple[str, ...], None] = {}
        self._preemptions = 0
        for name, text in _FLOPS:
            self._counter(name, text)
        gauges = [self._gauge(name, text) for name, text in _GAUGES]
        self._running, self._waiting = (gauge.labels(**self._labels) for gauge in gauges)
        self._by_reason = self._gauge(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for "
            "scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV "
            "transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
            "reason",
            ("capacity", "deferred"),
        )
        self._sleep_state()
        self._usage = self._gauge(
            "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage."
        ).labels(**self._labels)
        self._counters = {
            name: self._counter(name, text, label, values)
            for name, text, label, values in _COUNTERS
        }
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._rejections.labels(model, reason)
        self._histograms = self._make_histograms(_token_buckets(max_model_len_tokens))
        self._adapters: Gauge | None = None
        if settings.max_loras:
            self._adapters = Gauge(
                "vllm:lora_requests_info",
                "Running stats on lora requests.",
                ["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
                registry=self.registry,
            )
        self.transfers: TransferSeries | None = None
        """Metrics of KV transfers on the page; None if the engine has no KV connector."""
        if settings.kv_connector is not None:
            self.transfers = TransferSeries(self.registry, self._labels)
        self._cache_config(settings, max_model_len_tokens, ranks)
        self._rendered: bytes | None = None
        """Bytes of the rendered metrics page, or None if a metric changed since it was rendered."""

    def observe(self, step: Step, after: EngineSnapshot, wall_s: Seconds) -> None:
        """Count an engine step that has ended, and set the gauges to the engine's state `after` it.

        `wall_s` is the Unix time, which is the value of `lora_requests_info`.
        """
        for request in step.admitted:
            self._add("prefix_cache_queries", request.prompt_tokens)
            self._add("prefix_cache_hits", request.cached_tokens)
            self._add("prompt_tokens_cached_by_source", request.cached_tokens, source="device")
            if request.fetched_tokens:
                self._count_fetched(request)
        computed_tokens = 0
        for request in step.outputs:
            if request.generated_tokens == 1:
                computed_tokens += (
                    request.prompt_tokens - request.cached_tokens - request.fetched_tokens
                )
                self._observe_first_token(request, step)
            else:
                self._histograms["inter_token_latency_seconds"].observe(request.token_gap_s)
        if step.outputs:
            given_tokens = len(step.outputs) + step.work.drafts_accepted
            self._add("generation_tokens", given_tokens)
            tokens = computed_tokens + given_tokens
            self._histograms["iteration_tokens_total"].observe(tokens)
        self._add("num_preemptions", after.preemptions - self._preemptions)
        self._preemptions = after.preemptions
        self.show(after, wall_s)

    def show(self, after: EngineSnapshot, wall_s: Seconds) -> None:
        """Set the gauges to an engine's state, without counting a step."""
        self._rendered = None
        self._running.set(after.running)
        self._waiting.set(after.waiting)
        self._by_reason.labels(**self._labels, reason="capacity").set(
            after.waiting - after.deferred
        )
        self._by_reason.labels(**self._labels, reason="deferred").set(after.deferred)
        self._usage.set(after.kv_cache_usage)
        if self._adapters is not None:
            self._show_adapters(self._adapters, after.adapters, wall_s)
        if self.transfers is not None:
            self.transfers.show(after)

    def finish(self, request: EngineRequest, reason: str, tokens_max: int) -> None:
        """Count a request that has left the engine. Its latencies count only if it generated a
        token.

        `reason` is `stop`, `length`, `abort` or `error`; `tokens_max` is the request's limit of
        answer tokens.
        """
        self._rendered = None
        self._add("request_success", 1, finished_reason=reason)
        observe = self._histograms
        observe["request_prompt_tokens"].observe(request.prompt_tokens)
        observe["request_generation_tokens"].observe(request.generated_tokens)
        observe["request_max_num_generation_tokens"].observe(request.generated_tokens)
        observe["request_params_n"].observe(1)
        observe["request_params_max_tokens"].observe(tokens_max)
        observe["request_num_preemptions"].observe(request.preemptions)
        arrived, scheduled = request.arrived_at, request.scheduled_at
        first, last = request.first_token_at, request.last_token_at
        if arrived is None or scheduled is None or first is None or last is None:
            return
        observe["e2e_request_latency_seconds"].observe(last - arrived)
        observe["request_queue_time_seconds"].observe(scheduled - request.queued_at)
        observe["request_inference_time_seconds"].observe(last - scheduled)
        observe["request_prefill_time_seconds"].observe(first - scheduled)
        observe["request_decode_time_seconds"].observe(last - first)
        mean = (last - first) / max(1, request.generated_tokens - 1)
        observe["request_time_per_output_token_seconds"].observe(mean)
        observe["request_prefill_kv_computed_tokens"].observe(
            request.prompt_tokens - request.cached_tokens - request.fetched_tokens
        )

    def reject(self, reason: str) -> None:
        """Count a request that a queue limit rejected; `reason` is the name of the limit."""
        self._rendered = None
        self._rejections.labels(self._labels["model_name"], reason).inc()

    def render(self) -> bytes:
        """Return the text of the page, which is rendered again only after a metric changed."""
        if self._rendered is None:
            self._rendered = generate_latest(self.registry)
        return self._rendered

    def _count_fetched(self, request: EngineRequest) -> None:
        """Count, in the metrics page's counters about external caches, the prompt tokens of a
        request that another engine computed.
        """
        fetched = request.fetched_tokens
        self._add("external_prefix_cache_queries", request.prompt_tokens - request.cached_tokens)
        self._add("external_prefix_cache_hits", fetched)
        self._add("prompt_tokens_cached_by_source", fetched, source="p2p")

    def _observe_first_token(self, request: EngineRequest, step: Step) -> None:
        self._add("prompt_tokens", request.prompt_tokens)
        # vLLM counts the last token of a fetched prompt as fetched, although it computes it again.
        known = request.cached_tokens + request.fetched_tokens
        self._add("prompt_tokens_cached", known)
        self._add("prompt_tokens_by_source", request.prompt_tokens - known, source="local_compute")
        self._add("prompt_tokens_by_source", request.cached_tokens, source="local_cache_hit")
        if request.fetched_tokens:
            self._add(
                "prompt_tokens_by_source", request.fetched_tokens, source="external_kv_transfer"
            )
        assert request.arrived_at is not None
        self._histograms["time_to_first_token_seconds"].observe(step.ends_at - request.arrived_at)

    def _show_adapters(self, gauge: Gauge, adapters: tuple[str, ...], wall_s: Seconds) -> None:
        # In vLLM 0.12 and later, both lists name every adapter with a running or waiting request.
        names = ",".join(adapters)
        labels = (str(self._max_loras), names, names)
        self._adapter_sets.pop(labels, None)
        self._adapter_sets[labels] = None
        if len(self._adapter_sets) > _ADAPTER_SETS_MAX:
            oldest = next(iter(self._adapter_sets))
            del self._adapter_sets[oldest]
            gauge.remove(*oldest)
        gauge.labels(*labels).set(wall_s)

    def _add(self, name: str, amount: float, **extra: str) -> None:
        self._counters[name].labels(**self._labels, **extra).inc(amount)

    def _counter(
        self, name: str, text: str, label: str = "", values: tuple[str, ...] = ()
    ) -> Counter:
        names = ["model_name", "engine", *([label] if label else [])]
        counter = Counter(f"vllm:{name}", text, names, registry=self.registry)
        for value in values:
            counter.labels(**self._labels, **{label: value})
        if not values:
            counter.labels(**self._labels)
        return counter

    def _gauge(self, name: str, text: str, label: str = "", values: tuple[str, ...] = ()) -> Gauge:
        names = ["model_name", "engine", *([label] if label else [])]
        gauge = Gauge(f"vllm:{name}", text, names, registry=self.registry)
        for value in values:
            gauge.labels(**self._labels, **{label: value})
        return gauge

    def _make_histograms(self, token_buckets: tuple[int, ...]) -> dict[str, Histogram]:
        shapes: list[tuple[str, str, tuple[float, ...]]] = [
            ("request_prompt_tokens", "Number of prefill tokens processed.", token_buckets),
            ("request_generation_tokens", "Number of generation tokens processed.", token_buckets),
            (
                "iteration_tokens_total",
                "Histogram of number of tokens per engine_step.",
                _STEP_TOKENS,
            ),
            (
                "request_max_num_generation_tokens",
                "Histogram of maximum number of requested generation tokens.",
                token_buckets,
            ),
            ("request_params_n", "Histogram of the n request parameter.", _ANSWERS),
            (
                "request_params_max_tokens",
                "Histogram of the max_tokens request parameter.",
                token_buckets,
            ),
            (
                "time_to_first_token_seconds",
                "Histogram of time to first token in seconds.",
                _SECONDS_FIRST_TOKEN,
            ),
            (
                "inter_token_latency_seconds",
                "Histogram of inter-token latency in seconds.",
                _SECONDS_TOKEN,
            ),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                _SECONDS_TOKEN,
            ),
            *((name, text, _SECONDS_LONG) for name, text in _LATENCIES),
            (
                "request_num_preemptions",
                "Histogram of the number of times a request was preempted.",
                _PREEMPTIONS,
            ),
            (
                "request_prefill_kv_computed_tokens",
                "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
                token_buckets,
            ),
        ]
        return {
            name: Histogram(
                f"vllm:{name}",
                text,
                ["model_name", "engine"],
                buckets=buckets,
                registry=self.registry,
            ).labels(**self._labels)
            for name, text, buckets in shapes
        }

    def _sleep_state(self) -> None:
        gauge = self._gauge(
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is "
            "awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level "
            "2.",
            "sleep_state",
            ("awake", "weights_offloaded", "discard_all"),
        )
        gauge.labels(**self._labels, sleep_state="awake").set(1)

    def _cache_config(
        self, settings: EngineSettings, max_model_len_tokens: int, ranks: int
    ) -> None:
        tokens = settings.blocks_total * settings.block_size_tokens
        labels: Mapping[str, str] = {
            "_block_size_resolved": "True",
            "block_size": str(settings.block_size_tokens),
            "cache_dtype": "auto",
            "cache_hit_alignment_tokens": "None",
            "effective_attention_block_size": str(settings.block_size_tokens),
            "enable_mamba_shared_prefix_checkpoint": "False",
            "enable_prefix_caching": "True",
            "engine": "0",
            "gpu_memory_utilization": "0.92",
            "hash_block_size": "None",
            "is_attention_free": "False",
            "kv_cache_dtype_skip_layers": "[]",
            "kv_cache_layout": "None",
            "kv_cache_max_concurrency": str(tokens / max_model_len_tokens),
            "kv_cache_memory_bytes": "None",
            "kv_cache_size_tokens": str(tokens),
            "kv_offloading_backend": "native",
            "kv_offloading_size": "None",
            "kv_sharing_fast_prefill": "False",
            "mamba_block_size": "None",
            "mamba_cache_dtype": "auto",
            "mamba_cache_mode": "none",
            "mamba_page_size_padded": "None",
            "mamba_ssm_cache_dtype": "float32",
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(settings.blocks_total),
            "num_gpu_blocks_override": "None",
            "prefix_cache_retention_interval": "0",
            "prefix_caching_hash_algo": "sha256",
            "prefix_match_unit": "None",
            "replayssm_buffer_len": "16",
            "skip_page_size_padded": "None",
            "sliding_window": "None",
            "swa_bounded_replay": "True",
            "use_kda_recoverssm": "False",
            "use_replayssm": "False",
            "user_specified_block_size": "False",
        }
        gauge = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            list(labels),
            registry=self.registry,
        )
        for rank in range(ranks):
            gauge.labels(**{**labels, "engine": str(rank)}).set(1)


def _token_buckets(tokens_max: int) -> tuple[int, ...]:
    """Return the bucket limits 1, 2, 5, 10, 20, 50 and so on up to the context length, as vLLM has
    them for tokens.
    """
    buckets: list[int] = []
    decade = 1
    while decade <= tokens_max:
        buckets.extend(step * decade for step in (1, 2, 5) if step * decade <= tokens_max)
        decade *= 10
    return tuple(buckets)
