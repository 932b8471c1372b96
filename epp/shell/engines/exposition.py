"""Parse the metrics page of a model server into `EndpointMetrics`.

A vLLM page has 50 to 80 KB, and a scheduler needs ten of its six hundred series. One regular
expression with the wanted names finds their lines, and only these are parsed. If the layout of an
endpoint's last page is remembered, most of the endpoint's pages need not be searched at all
(`page_layout`).

The wanted series of each engine are data: `MetricNames`. The tables below contain the engines'
names.

The page comes from whatever server answers at the endpoint's address. Limits therefore bound the
work of parsing. A page that exceeds a limit is rejected completely, because a part that is ignored
could contain the load. This module performs no I/O.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from epp.configuration.compatibility import ENGINE_LABELS
from epp.core.types import AdapterReport, EndpointMetrics, KvTransfers
from epp.plugins.filters import ROLE_LABEL, DecodeRole
from epp.shell.engines.page_layout import PAGES_MAX, PageLayout, headings_of, layout_of

_SAMPLE: Final = re.compile(
    rb"""
    [ \t]*+
    (?:\{ ((?: [^"}]++ | "(?:[^"\\]++|\\.)*+" )*+) \})?+
    [ \t]*+ ([^\s{}"#]++)     # the value
    (?:[ \t]++[-+0-9.eE]++)?+ # a timestamp says nothing that the scrape does not
    [ \t]*+ (?:\#.*+)?+       # an OpenMetrics exemplar
    \r?+
    """,
    re.VERBOSE,
)
"""Regular expression for the part of a metrics line after the name: labels, value and the rest. It
never backtracks.
"""
_LABEL: Final = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]++|\\.)*+)"')
_ESCAPE: Final = re.compile(rb"\\(.)")
_ESCAPED: Final = {b"n": b"\n", b'"': b'"', b"\\": b"\\"}
_SELECTOR: Final = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{([^{}]*)\})?")
_PAIR: Final = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"?([^",]*?)"?\s*')
LINES_MAX: Final = 65_536
"""Maximum number of lines of a metrics page; an engine writes 1,000 for each of its ranks."""
SERIES_MAX: Final = 8_192
"""Maximum number of series on a metrics page that the scheduler needs; `lora_requests_info` has one
per past state of the adapters.
"""
LABELS_MAX: Final = 32_768
"""Maximum number of labels on a metrics page, in all series that the scheduler needs."""
ESCAPED_BYTES_MAX: Final = 32 * 1024
"""Maximum number of bytes on a metrics page in wanted lines with a backslash or a comment, which
are parsed byte by byte.
"""
ADAPTERS_MAX: Final = 4_096
"""Maximum number of LoRA adapters that one list on a metrics page may contain."""
ADAPTER_NAME_BYTES_MAX: Final = 256
KV_CACHE_USAGE_MAX: Final = 1.05
"""Maximum valid value of a KV-cache usage as a share. Some engines count a block twice while it
moves, so the usage may exceed 1.
"""
VALUE_MAX: Final = 1e15
"""Maximum valid value of a count or time on a metrics page, which fits into every column of an
endpoint table.
"""
_NUMBER_BYTES_MAX: Final = 64
_SHOWN_BYTES: Final = 80
_DIGITS_MAX: Final = 15
"""Maximum number of digits of a label that contains a number of blocks or tokens."""


class ExpositionError(ValueError):
    """Raised if a metrics page cannot be used. The message is one sentence."""


class Selector(Struct, frozen=True):
    """A selector of the metric series that have a given name and certain label values."""

    name: bytes
    labels: tuple[tuple[bytes, bytes], ...] = ()


class MetricNames(Struct, frozen=True, kw_only=True):
    """The metric series of one type of engine that contain the scheduler's inputs.

    The first selector that matches the page is used. An empty tuple means that the engine has no
    such series. Series that differ only in other labels (data-parallel ranks, models) are added up;
    the usage of the KV cache is averaged, and the largest block size is used.
    """

    waiting: tuple[Selector, ...] = ()
    waiting_to_decode: tuple[Selector, ...] = ()
    """Gauge of waiting requests without those that receive their KV cache. For endpoints whose role
    label includes decode, it is read instead of `waiting` if the page has it.
    """
    running: tuple[Selector, ...] = ()
    kv_cache_usage: tuple[Selector, ...] = ()
    """Gauge of the used share of the KV cache, from 0 to 1; a slightly greater value counts as
    1.
    """
    rejections_total: tuple[Selector, ...] = ()
    """Counter of requests that the engine refused because it was full."""
    requests_total: tuple[Selector, ...] = ()
    """Counter of requests or of their prompt tokens, whose decrease indicates a restart of the
    engine.

    At most one selector, because two counters would be mixed up.
    """
    cache_queried: tuple[Selector, ...] = ()
    """Counter of prompt tokens that the engine looked up in its prefix cache."""
    cache_hit: tuple[Selector, ...] = ()
    """Counter of prompt tokens that the engine found in its prefix cache, in any tier; a label may
    name the tier.
    """
    ttft: bytes = b""
    """Name of a histogram or summary of seconds to the first token; its sum and count are read."""
    first_outputs: tuple[Selector, ...] = ()
    """Counter of requests to the engine that produced their first token, incremented at that
    time.
    """
    answers: tuple[Selector, ...] = ()
    """Counter of responses that the engine completed."""
    answer_tokens: tuple[Selector, ...] = ()
    """Counter of the output tokens of responses that the engine completed."""
    block_size_tokens: tuple[Selector, ...] = ()
    blocks_total: tuple[Selector, ...] = ()
    cache_info: bytes = b""
    """A series with the block size and the number of blocks as labels, used unless the page has
    gauges for both.
    """
    adapter_requests: bytes = b""
    """Name of vLLM's series `lora_requests_info`: one per state of the adapters, with the time of
    the state as value.
    """
    adapter_loaded: bytes = b""
    """Name of vLLM's series `lora_adapter_loaded`: one per cached adapter and level."""
    adapter_slots: bytes = b""
    """Name of vLLM's series `max_gpu_lora_adapters`, which is always present together with
    `adapter_loaded`.
    """
    received_tokens: tuple[Selector, ...] = ()
    """Counter of prompt tokens whose KV cache came from another engine."""
    received_bytes: tuple[Selector, ...] = ()
    """Counter of bytes of KV cache that came from other engines."""
    transfer_time: bytes = b""
    """Name of a histogram of the seconds of each transfer to this engine; its sum and count are
    read.
    """
    failed_transfers: tuple[Selector, ...] = ()
    """Counter of KV-cache transfers that failed."""
    expired_transfers: tuple[Selector, ...] = ()
    """Counter of requests whose KV cache was dropped before another engine read it."""
    awake: tuple[Selector, ...] = ()
    """Gauge that is 0 in every rank while the engine is in sleep mode."""
    attributes: tuple[tuple[str, Selector], ...] = ()
    """Keys and series of the custom metrics in the configuration. Series of one key are not added
    up.
    """


def selector(text: str) -> Selector:
    """Return the selector of a metric series that `text` spells: `name` or
    `name{label=value,other="value"}`.

    Raises `ValueError` with one sentence for any other text.
    """
    whole = _SELECTOR.fullmatch(text)
    pairs = [_PAIR.fullmatch(part) for part in (whole[2] or "").split(",") if part] if whole else []
    if whole is None or None in pairs:
        raise ValueError(f"{text!r} is not a metric such as name or name{{label=value}}")
    labels = tuple((pair[1].encode(), pair[2].encode()) for pair in pairs if pair)
    return Selector(whole[1].encode(), labels)


def _selectors(*texts: str) -> tuple[Selector, ...]:
    return tuple(selector(text) for text in texts if text)


def metric_names(
    *,
    waiting: str = "",
    running: str = "",
    kv_cache_usage: str = "",
    adapter_requests: str = "",
    cache_info: str = "",
    block_size_tokens: str = "",
    blocks_total: str = "",
) -> MetricNames:
    """Return the metric series of an engine from their names as they stand in a configuration; ""
    means that the engine has no such series.

    Raises `ValueError` with one sentence if a name is malformed.
    """
    return MetricNames(
        waiting=_selectors(waiting),
        running=_selectors(running),
        kv_cache_usage=_selectors(kv_cache_usage),
        adapter_requests=selector(adapter_requests).name if adapter_requests else b"",
        cache_info=selector(cache_info).name if cache_info else b"",
        block_size_tokens=_selectors(block_size_tokens),
        blocks_total=_selectors(blocks_total),
    )


ENGINES: Final[Mapping[str, MetricNames]] = {
    # vLLM 0.8 to 0.32, `vllm/v1/metrics/loggers.py`. Versions 0.9 and 0.10 have both names of the
    # KV usage. The gauges of adapter residency are those of vllm-project/vllm#54830.
    "vllm": MetricNames(
        waiting=_selectors("vllm:num_requests_waiting"),
        waiting_to_decode=_selectors('vllm:num_requests_waiting_by_reason{reason="capacity"}'),
        running=_selectors("vllm:num_requests_running"),
        kv_cache_usage=_selectors("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        rejections_total=_selectors("vllm:admission_rejections_total"),
        requests_total=_selectors("vllm:prompt_tokens_total"),
        cache_queried=_selectors(
            "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"
        ),
        # The first one exists since 0.32 and is split by tier; the others cover only the device.
        cache_hit=_selectors(
            "vllm:prompt_tokens_cached_by_source_total",
            "vllm:prefix_cache_hits_total",
            "vllm:gpu_prefix_cache_hits_total",
        ),
        ttft=b"vllm:time_to_first_token_seconds",
        first_outputs=_selectors("vllm:time_to_first_token_seconds_count"),
        answers=_selectors("vllm:request_generation_tokens_count"),
        answer_tokens=_selectors("vllm:request_generation_tokens_sum"),
        cache_info=b"vllm:cache_config_info",
        adapter_requests=b"vllm:lora_requests_info",
        adapter_loaded=b"vllm:lora_adapter_loaded",
        adapter_slots=b"vllm:max_gpu_lora_adapters",
        received_tokens=_selectors(
            'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
        ),
        received_bytes=_selectors("vllm:nixl_bytes_transferred_sum"),
        transfer_time=b"vllm:nixl_xfer_time_seconds",
        failed_transfers=_selectors("vllm:nixl_num_failed_transfers_total"),
        expired_transfers=_selectors("vllm:nixl_num_kv_expired_reqs_total"),
        awake=_selectors('vllm:engine_sleep_state{sleep_state="awake"}'),
    ),
    # `page_size` and `num_pages` are gauges since 0.5.11 and were labels before.
    "sglang": MetricNames(
        waiting=_selectors("sglang:num_queue_reqs"),
        running=_selectors("sglang:num_running_reqs"),
        kv_cache_usage=_selectors("sglang:token_usage"),
        requests_total=_selectors("sglang:num_requests_total"),
        cache_queried=_selectors("sglang:prompt_tokens_total"),
        cache_hit=_selectors("sglang:cached_tokens_total"),
        ttft=b"sglang:time_to_first_token_seconds",
        first_outputs=_selectors("sglang:time_to_first_token_seconds_count"),
        block_size_tokens=_selectors("sglang:page_size"),
        blocks_total=_selectors("sglang:num_pages"),
        cache_info=b"sglang:cache_config_info",
    ),
    "trtllm-serve": MetricNames(
        waiting=_selectors("trtllm_num_requests_waiting"),
        running=_selectors("trtllm_num_requests_running"),
        kv_cache_usage=_selectors("trtllm_kv_cache_utilization"),
        requests_total=_selectors("trtllm_request_success_total"),
        # This histogram may be updated only when a request ends, so it does not count first
        # outputs.
        ttft=b"trtllm_time_to_first_token_seconds",
        block_size_tokens=_selectors("trtllm_kv_cache_tokens_per_block"),
        blocks_total=_selectors("trtllm_kv_cache_max_blocks"),
    ),
    "triton-tensorrt-llm": MetricNames(
        waiting=_selectors("nv_trt_llm_request_metrics{request_type=waiting}"),
        running=_selectors("nv_trt_llm_request_metrics{request_type=scheduled}"),
        kv_cache_usage=_selectors(
            "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}"
        ),
        requests_total=_selectors("nv_inference_request_success"),
        block_size_tokens=_selectors(
            "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}"
        ),
        blocks_total=_selectors("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}"),
    ),
    # Plain Triton has no gauge of running requests. Other pickers read `nv_inference_exec_count` as
    # one, but it counts executions since the start. It is used as a counter here.
    "triton": MetricNames(
        waiting=_selectors("nv_inference_pending_request_count"),
        requests_total=_selectors("nv_inference_exec_count"),
    ),
    # Newer servers do not have `kv_cache_usage_ratio`.
    "llama.cpp": MetricNames(
        waiting=_selectors("llamacpp:requests_deferred"),
        running=_selectors("llamacpp:requests_processing"),
        kv_cache_usage=_selectors("llamacpp:kv_cache_usage_ratio"),
        requests_total=_selectors("llamacpp:prompt_tokens_total"),
    ),
}
"""Metric series by engine type, in the order in which they are tried, after those of the default
engine, on pages of endpoints without a label of the engine type.
"""

_BLOCK_SIZE_LABELS: Final = (b"block_size", b"page_size")
_BLOCKS_TOTAL_LABELS: Final = (b"num_gpu_blocks", b"num_pages")
_PROCESS_STARTED: Final = b"process_start_time_seconds"
_TIER: Final = re.compile(
    rb'(?:\A|,)(?:cache_)?source="(?:(device|host|disk|p2p|external_unspecified)"|(storage))'
)
"""Regular expression for the label with the cache tier in series of vLLM and SGLang. SGLang appends
the kind of storage.
"""

_Found: TypeAlias = dict[bytes, list[tuple[bytes, float]]]
"""Label text and value of each wanted series on a metrics page, by name."""


class _Engine:
    """The metric series that are wanted from one type of engine, with the expressions that find
    them.
    """

    def __init__(self, names: MetricNames) -> None:
        self.names = names
        # Selectors that match nothing are harmless.
        self.ttft_sum, self.ttft_count = _sum_and_count(names.ttft)
        self.transfer_time_sum, self.transfer_time_count = _sum_and_count(names.transfer_time)
        answers = (*names.answers, *names.answer_tokens)
        self.alone = frozenset(
            each.name
            for each in (
                *(*self.ttft_sum, *self.ttft_count, *answers, *names.received_bytes),
                *(*self.transfer_time_sum, *self.transfer_time_count),
            )
        )
        """Names of the sums and counts of histograms, whose lines stand among those of the
        buckets.
        """
        self.transfers = (
            *(*names.received_tokens, *names.received_bytes),
            *(*self.transfer_time_sum, *self.transfer_time_count),
            *(*names.failed_transfers, *names.expired_transfers),
        )
        caches = (*names.cache_queried, *names.cache_hit, *self.transfers)
        load = (
            *(*names.waiting, *names.running, *names.kv_cache_usage, *names.requests_total),
            # First outputs and the tokens that were received for them are compared page by page.
            *(*names.rejections_total, *names.first_outputs, *names.received_tokens),
            *(*self.ttft_sum, *self.ttft_count, *answers),
            *(series for _, series in names.attributes),
        )
        seldom = (*names.block_size_tokens, *names.blocks_total, *names.awake)
        infos = {
            names.cache_info,
            names.adapter_requests,
            names.adapter_loaded,
            names.adapter_slots,
        }
        rest = {selector.name for selector in seldom} | infos - {b""}
        fresh = {selector.name for selector in load} | rest
        self.compared = frozenset({selector.name for selector in caches} - fresh)
        """Names of series whose values are only compared over half a minute or more, so that they
        are searched rarely.
        """
        wanted = fresh | self.compared
        self.load = frozenset(wanted - rest)
        """Names of series that contain only values that change from page to page, such as the
        load.
        """
        names_wanted = _alternatives(sorted(wanted))
        self.lines = re.compile(rb"\n(" + names_wanted + rb")([{ \t][^\n]*)")
        """Regular expression for each line that begins with a wanted name: the name and the rest of
        the line.
        """
        self.headings = headings_of(names_wanted)


def _sum_and_count(histogram: bytes) -> tuple[tuple[Selector, ...], tuple[Selector, ...]]:
    """Return the selectors of the sum and of the count of `histogram`, none of both if it is b""."""
    if not histogram:
        return (), ()
    return (Selector(histogram + b"_sum"),), (Selector(histogram + b"_count"),)


class _Allowance:
    """The remaining numbers of series, labels and bytes that may be parsed on one metrics page,
    over all engines that are tried.
    """

    __slots__ = ("escaped_bytes", "labels", "series")

    def __init__(self) -> None:
        self.series = SERIES_MAX
        self.labels = LABELS_MAX
        self.escaped_bytes = ESCAPED_BYTES_MAX

    def take(self, page: bytes, engine: _Engine) -> _Found:
        """Return the wanted series of `engine` on `page`, and subtract them from what may still be
        parsed. Raises `ExpositionError` if they exceed the limits of a page.
        """
        found: _Found = {}
        for line in islice(engine.lines.finditer(page), self.series + 1):
            name, rest = line.groups()
            self._pay(rest)
            found.setdefault(name, []).append(_sample(name, rest))
        return found

    def _pay(self, text: bytes) -> None:
        self.series -= 1
        self.labels -= text.count(b'"') // 2
        if b"\\" in text or b"#" in text:
            self.escaped_bytes -= len(text)
        if self.series < 0:
            raise ExpositionError(f"it has more than {SERIES_MAX} wanted series")
        if self.labels < 0:
            raise ExpositionError(f"its wanted series have more than {LABELS_MAX} labels")
        if self.escaped_bytes < 0:
            raise ExpositionError(
                f"its wanted series with escapes or comments have more than {ESCAPED_BYTES_MAX} "
                "bytes"
            )


class _Reading(Struct):
    """A parsed metrics page, with which the next pages of the endpoint are parsed faster."""

    engines: tuple[_Engine, ...]
    """Types of engines of which the page could be: the one that the endpoint's labels name, or all.
    """
    engine: _Engine
    layout: PageLayout
    found: _Found
    metrics: EndpointMetrics
    used: bool = False
    """True if at least one later page of the endpoint was read with this parsed page."""

    def read(self, page: bytes) -> EndpointMetrics | None:
        """Return the metrics of the endpoint's next page, or None if that page must be parsed
        completely.

        It must if it comes from a new process, has another layout, or lacks a gauge of load. Raises
        `ExpositionError` if it is invalid.
        """
        changed = self.layout.changed(page)
        if changed is None or _PROCESS_STARTED in changed:
            return None
        if changed:
            for name, lines in changed.items():
                before = self.found.get(name, ())
                if len(before) == len(lines):
                    known = zip(lines, before, strict=True)
                    self.found[name] = [_sample_like(name, line, sample) for line, sample in known]
                else:
                    self.found[name] = [_sample(name, line) for line in lines]
            only_load = changed.keys() <= self.engine.load
            rest = self.metrics if only_load else _without_load(self.engine.names, self.found)
            metrics = _with_load(rest, self.engine, self.found)
            if metrics is None:
                return None
            self.metrics = metrics
        self.used = True
        return self.metrics


class PageMemory:
    """The memory of an endpoint's last metrics page, which speeds up parsing the next one.

    The caller keeps one instance per endpoint and passes it to `PageReader.read`.
    """

    __slots__ = ("_pages_until_layout", "_reading")

    def __init__(self) -> None:
        self._reading: _Reading | None = None
        self._pages_until_layout = 0

    def read(self, page: bytes, engines: tuple[_Engine, ...]) -> EndpointMetrics | None:
        """Return the metrics of the endpoint's next metrics page, or None if the page must be
        parsed completely. In that case the memory of the last page is dropped.
        """
        reading, self._reading = self._reading, None
        if reading is None or reading.engines is not engines:
            return None
        try:
            metrics = reading.read(page)
        except ExpositionError:
            metrics = None  # parsing the complete page reports its first error
        if metrics is not None:
            self._reading = reading
        elif not reading.used:
            # A page with a different layout each time would waste the work for its layout.
            self._pages_until_layout = PAGES_MAX
        return metrics

    def keep(
        self,
        page: bytes,
        engines: tuple[_Engine, ...],
        engine: _Engine,
        found: _Found,
        metrics: EndpointMetrics,
    ) -> None:
        """Remember this page for parsing the next one, if it follows the rules of the exposition
        format. If it does not, or if the memory of an earlier page was of no use, the next
        `PAGES_MAX` pages are not remembered.
        """
        if self._pages_until_layout:
            self._pages_until_layout -= 1
            return
        lines = {name: len(samples) for name, samples in found.items()}
        layout = layout_of(page, engine.headings, lines, engine.alone, engine.compared)
        if layout is None:
            self._pages_until_layout = PAGES_MAX  # later pages will have no headings either
        else:
            self._reading = _Reading(engines, engine, layout, found, metrics)


class PageReader:
    """A parser of metrics pages of any engine.

    `engines` maps an engine type to the names of its metric series. `engine_labels` are labels of
    an endpoint that may contain its engine type. If they contain none of `engines`, the page is
    tried with `default_engine` first, then with the others in order.
    """

    def __init__(
        self,
        engines: Mapping[str, MetricNames] = ENGINES,
        *,
        engine_labels: Sequence[str] = ENGINE_LABELS,
        default_engine: str = "vllm",
    ) -> None:
        self._labels = tuple(engine_labels)
        self._engines = {
            engine: (_Engine(names),)
            for engine, names in sorted(engines.items(), key=lambda row: row[0] != default_engine)
        }
        self._every = tuple(engine for (engine,) in self._engines.values())
        self._decoding = {name: (_decoding(engine),) for name, (engine,) in self._engines.items()}
        self._every_decoding = tuple(engine for (engine,) in self._decoding.values())

    def read(
        self, page: bytes, labels: Mapping[str, str], memory: PageMemory | None = None
    ) -> EndpointMetrics:
        """Return the metrics on `page`, a metrics page of an endpoint that has the labels `labels`.

        With the `memory` of the endpoint's last page, new series may be noticed, and the values of
        histograms and of rarely compared series updated, some pages later (`page_layout`);
        everything else is identical. A counter that is NaN, infinite, negative or above `VALUE_MAX`
        is unknown.

        Raises `ExpositionError` in these cases:

        - The page lacks every load gauge of the endpoint's engine, or of all engines if no label
          names the engine.
        - A load gauge has an impossible value.
        - A wanted series is malformed.
        - A limit is exceeded.
        """
        engines = self._engines_of(labels)
        if memory is not None:
            metrics = memory.read(page, engines)
            if metrics is not None:
                return metrics
        if not page.startswith(b"#"):
            page = b"\n" + page  # each line must begin after a newline, including the first one
        if len(page) > LINES_MAX and page.count(b"\n") > LINES_MAX + 1:
            raise ExpositionError(f"it has more than {LINES_MAX} lines")
        allowance = _Allowance()
        for engine in engines:
            found = allowance.take(page, engine)
            metrics = _metrics(engine, found)
            if metrics is not None:
                if memory is not None:
                    memory.keep(page, engines, engine, found, metrics)
                return metrics
        every = [engine.names for engine in engines]
        gauges = [(*names.waiting, *names.running, *names.kv_cache_usage) for names in every]
        wanted = ", ".join(gauge[0].name.decode() for gauge in gauges if gauge)
        raise ExpositionError(f"the page of {len(page)} bytes has no load gauge such as {wanted}")

    def _engines_of(self, labels: Mapping[str, str]) -> tuple[_Engine, ...]:
        """Return the engine that the endpoint's labels name, or all engines if they name none."""
        # An endpoint without a role receives no KV cache.
        decodes = ROLE_LABEL in labels and labels[ROLE_LABEL] in DecodeRole.roles
        engines = self._decoding if decodes else self._engines
        for label in self._labels:
            engine = engines.get(labels.get(label, ""))
            if engine is not None:
                return engine
        return self._every_decoding if decodes else self._every


class SeriesReader:
    """A parser of the series of one metric name on pages of any server, within the same limits as
    engines' pages.
    """

    def __init__(self, name: str) -> None:
        self._name = name.encode()
        self._engine = _Engine(MetricNames(attributes=((name, selector(name)),)))

    def read(self, page: bytes) -> list[tuple[Mapping[bytes, bytes], float]]:
        """Return labels and value of each series with the name on `page`, without series that have
        no valid value.

        Raises `ExpositionError` if a series is malformed or a limit is exceeded.
        """
        if page.count(b"\n") > LINES_MAX:
            raise ExpositionError(f"it has more than {LINES_MAX} lines")
        found = _Allowance().take(b"\n" + page, self._engine)
        rows = found.get(self._name, ())
        return [(_labels(labels), value) for labels, value in rows if not math.isnan(value)]


def _decoding(engine: _Engine) -> _Engine:
    """Return `engine` with the queue of an endpoint that decodes what others prefilled."""
    names = engine.names
    if not names.waiting_to_decode:
        return engine
    return _Engine(replace(names, waiting=(*names.waiting_to_decode, *names.waiting)))


def _alternatives(names: Sequence[bytes]) -> bytes:
    """Return the regular expression that matches one of `names` or the name of the process's start
    time.
    """
    # The inner group lets the compiler use the common beginning of the names: twice as fast.
    engine = b"|".join(re.escape(name) for name in names) or _PROCESS_STARTED
    return _PROCESS_STARTED + rb"|(?:" + engine + rb")"


def _metrics(engine: _Engine, found: _Found) -> EndpointMetrics | None:
    """Return the engine's metrics on a page, or None if the page has none of this engine's load
    gauges.
    """
    return _with_load(_without_load(engine.names, found), engine, found)


def _without_load(names: MetricNames, found: _Found) -> EndpointMetrics:
    """Return those metrics on a page that rarely change: adapters, cache size, start time and sleep
    mode.
    """
    awake = _values(found, names.awake)
    block_size_tokens, blocks_total = _cache_size(names, found)
    return EndpointMetrics(
        adapters=_adapters(names, found),
        block_size_tokens=block_size_tokens,
        blocks_total=blocks_total,
        process_started_at_s=_known([value for _, value in found.get(_PROCESS_STARTED, ())][:1]),
        asleep=bool(awake) and not any(awake),
    )


def _with_load(rest: EndpointMetrics, engine: _Engine, found: _Found) -> EndpointMetrics | None:
    """Return the rarely changing metrics `rest` together with the values that change from page to
    page, or None if the page has no load gauge.
    """
    names = engine.names
    waiting, running = _gauges(found, names.waiting), _gauges(found, names.running)
    usage = _gauges(found, names.kv_cache_usage, KV_CACHE_USAGE_MAX)
    if not (waiting or running or usage):
        return None
    return replace(
        rest,
        waiting_requests=sum(waiting) if waiting else math.nan,
        running_requests=sum(running) if running else math.nan,
        kv_cache_usage=min(sum(usage) / len(usage), 1.0) if usage else math.nan,
        requests_total=_known(_values(found, names.requests_total)),
        rejections_total=_known(_values(found, names.rejections_total)),
        cache_queried_tokens=_summed(found, names.cache_queried),
        cache_hit_tokens=_summed(found, names.cache_hit),
        tier_hit_tokens=_by_tier(found, names.cache_hit),
        ttft_sum_s=_summed(found, engine.ttft_sum),
        ttft_count=_summed(found, engine.ttft_count),
        attributes=_attributes(names, found) if names.attributes else {},
        first_outputs_total=_summed(found, names.first_outputs),
        answers_total=_summed(found, names.answers),
        answer_tokens_total=_summed(found, names.answer_tokens),
        transfers=_transfers(engine, found),
    )


def _transfers(engine: _Engine, found: _Found) -> KvTransfers | None:
    """Return the KV-cache transfers on a page, or None if it has none of their series."""
    if not any(one.name in found for one in engine.transfers):
        return None
    names = engine.names
    return KvTransfers(
        received_tokens=_summed(found, names.received_tokens),
        received_bytes=_summed(found, names.received_bytes),
        ended=_summed(found, engine.transfer_time_count),
        ended_s=_summed(found, engine.transfer_time_sum),
        failed=_summed(found, names.failed_transfers),
        expired=_summed(found, names.expired_transfers),
    )


def _attributes(names: MetricNames, found: _Found) -> dict[str, float]:
    """Return the custom metrics by key, each from the first matching series, without invalid
    values.
    """
    told = ((key, _values(found, (series,))[:1]) for key, series in names.attributes)
    return {key: value for key, values in told for value in values if not math.isnan(value)}


def _gauges(found: _Found, selectors: Sequence[Selector], most: float = VALUE_MAX) -> list[float]:
    """Return the values of a load gauge in the series that `selectors` match.

    Raises `ExpositionError` if a value is not from 0 to `most`.
    """
    values = _values(found, selectors)
    for value in values:
        if not value <= most:  # NaN too
            says = "no valid number" if math.isnan(value) else f"{value:g}"
            name = next(selector.name for selector in selectors if selector.name in found)
            raise ExpositionError(f"{_shown(name)} is {says}, expected 0 to {most:g}")
    return values


def _summed(found: _Found, selectors: Sequence[Selector]) -> float:
    """Return the sum of the values of the series that match the first selector with any match, or
    NaN if no selector matches or a value is invalid.
    """
    values = _values(found, selectors)
    return sum(values) if values else math.nan


def _by_tier(found: _Found, selectors: Sequence[Selector]) -> dict[str, float] | None:
    """Return the sum of the series' values by cache tier, or None if no series has a tier or a
    value is invalid.
    """
    tiers: dict[str, float] = {}
    for labels, value in next(filter(None, (found.get(one.name) for one in selectors)), ()):
        carried = _TIER.search(labels)
        if carried is not None:
            tier = (carried[1] or carried[2]).decode()
            tiers[tier] = tiers.get(tier, 0.0) + value
    return tiers if tiers and not math.isnan(sum(tiers.values())) else None


def _known(values: Sequence[float]) -> float | None:
    total = sum(values)
    return None if not values or math.isnan(total) else total


def _values(found: _Found, selectors: Sequence[Selector]) -> list[float]:
    """Return the values of the series that match the first selector with any match, or [] if no
    selector matches.
    """
    for wanted in selectors:
        values = [
            value
            for labels, value in found.get(wanted.name, ())
            if not wanted.labels or _carries(labels, wanted.labels)
        ]
        if values:
            return values
    return []


def _carries(text: bytes, wanted: Sequence[tuple[bytes, bytes]]) -> bool:
    if b"\\" not in text and not all(value in text for _, value in wanted):
        return False  # most series are rejected without parsing their labels
    labels = _labels(text)
    return all(labels.get(name) == value for name, value in wanted)


def _sample(name: bytes, text: bytes) -> tuple[bytes, float]:
    """Return the unparsed labels and the value of a metrics line, given its `name` and the text
    after it. Raises `ExpositionError` if the line is malformed.
    """
    if b"\\" in text or b"#" in text:
        whole = _SAMPLE.fullmatch(text)
        if whole is None:
            raise _malformed(name)
        return whole[1] or b"", _number(name, whole[2])
    # Without escapes and exemplars the last brace ends the labels, which is five times faster.
    labels, brace, rest = text.rpartition(b"}")
    labels = labels.lstrip(b" \t")
    fields = rest.split(None, 2)
    if not 1 <= len(fields) <= 2 or (brace and labels[:1] != b"{") or labels.count(b'"') % 2:
        raise _malformed(name)
    return labels[1:], _number(name, fields[0])


def _sample_like(name: bytes, text: bytes, sample: tuple[bytes, float]) -> tuple[bytes, float]:
    """Return the unparsed labels and the value of a metrics line, twice as fast as `_sample` if the
    labels equal those of the earlier `sample`.
    """
    labels = sample[0]
    opening = b"{%b} " % labels if labels else b" "
    value = text[len(opening) :]
    if text.startswith(opening) and value.translate(None, b".e+").isdigit():
        return labels, _number(name, value)
    return _sample(name, text)


def _malformed(name: bytes) -> ExpositionError:
    return ExpositionError(f"{_shown(name)} is not a name with labels and a value")


def _shown(name: bytes) -> str:
    """Return a metric name as text for an error message, shortened, because a line may contain
    anything.
    """
    return repr(name[:_SHOWN_BYTES].decode(errors="replace"))


def _number(name: bytes, text: bytes) -> float:
    """Return the value of a metrics line, or NaN if it is NaN, negative or above `VALUE_MAX`.

    Raises `ExpositionError` if it is not a number.
    """
    try:
        # float() accepts digit groups, which the format does not allow.
        value = float(text[:_NUMBER_BYTES_MAX].replace(b"_", b"x"))
    except ValueError:
        value = None
    if value is None or len(text) > _NUMBER_BYTES_MAX:
        raise ExpositionError(
            f"{_shown(name)} has a value that is not a number of at most {_NUMBER_BYTES_MAX} bytes"
        )
    return value if 0 <= value <= VALUE_MAX else math.nan


def _labels(text: bytes) -> dict[bytes, bytes]:
    if (
        b"\\" not in text
    ):  # without escapes each quote starts or ends a value, which is ten times faster
        parts = text.split(b'"')
        return {
            name.strip(b", \t="): value
            for name, value in zip(parts[::2], parts[1::2], strict=False)
        }
    return {
        name: _ESCAPE.sub(_unescaped, value) if b"\\" in value else value
        for name, value in _LABEL.findall(text)
    }


def _unescaped(escape: re.Match[bytes]) -> bytes:
    return _ESCAPED.get(escape[1], escape[0])


def _label_count(text: bytes, wanted: Sequence[bytes]) -> float:
    """Return the value of the first label in `wanted` that is a positive whole number, or NaN if
    there is none.

    The first wanted label is searched as `,name="`: parsing all forty labels of vLLM's series takes
    an eighth of the time for the page.
    """
    opening = wanted[0] + b'="'
    at = 0 if text.startswith(opening) else text.find(b"," + opening) + 1
    # An even number of quotes before it shows that it is not inside another label's value.
    if (at or text.startswith(opening)) and b"\\" not in text and not text.count(b'"', 0, at) % 2:
        start = at + len(opening)
        count = _count(text[start : text.find(b'"', start)])
        if count:
            return count
    row = _labels(text)
    return next((count for label in wanted if (count := _count(row.get(label, b"")))), math.nan)


def _count(text: bytes) -> int | None:
    """Parse a positive whole number; return None for any other text. Engines write "None" for
    unknown values.
    """
    return int(text) or None if text.isdigit() and len(text) <= _DIGITS_MAX else None


def _cache_size(names: MetricNames, found: _Found) -> tuple[int | None, int | None]:
    """Return the block size of the KV cache in tokens, and the number of blocks of all ranks
    together; None where unknown.
    """
    sizes, blocks = _values(found, names.block_size_tokens), _values(found, names.blocks_total)
    if names.cache_info and not (sizes and blocks):
        rows = [labels for labels, _ in found.get(names.cache_info, ())]
        sizes = [_label_count(row, _BLOCK_SIZE_LABELS) for row in rows]
        blocks = [_label_count(row, _BLOCKS_TOTAL_LABELS) for row in rows]
    size = max(sizes, default=math.nan)
    total = sum(blocks) if blocks else math.nan
    return int(size) if size > 0 else None, int(total) if total > 0 else None


def _adapters(names: MetricNames, found: _Found) -> AdapterReport | None:
    """Return the LoRA adapters from either generation of vLLM's series, or None if the page has
    neither.

    Neither exists if LoRA is disabled or no step has run yet.
    """
    states = found.get(names.adapter_requests, ())
    slots = [value for _, value in found.get(names.adapter_slots, ())]
    held = [labels for labels, level in found.get(names.adapter_loaded, ()) if level > 0]
    _limit_adapters(len(held))
    loaded = [_labels(labels) for labels in held]
    if not (states or slots or loaded):
        return None
    # Old states are never removed. The one with the greatest value, a time, is current.
    state = _labels(max(states, key=lambda row: row[1] if row[1] > 0 else 0.0)[0]) if states else {}
    slots_max = [int(value) for value in slots if value >= 0]
    return AdapterReport(
        # Before vLLM 0.12 either list alone misses adapters; later both contain the same ones.
        active=_listed(state.get(b"running_lora_adapters", b""))
        | _listed(state.get(b"waiting_lora_adapters", b"")),
        slots_max=max(slots_max, default=_count(state.get(b"max_lora", b"")) or 0),
        resident_known=bool(slots or loaded),
        gpu=_with(loaded, b"level", b"gpu"),
        cpu=_with(loaded, b"level", b"cpu"),
        pinned=_with(loaded, b"pinned", b"true"),
    )


def _limit_adapters(count: int) -> None:
    if count > ADAPTERS_MAX:
        raise ExpositionError(f"it lists more than {ADAPTERS_MAX} adapters")


def _adapter_name(text: bytes) -> str:
    if len(text) > ADAPTER_NAME_BYTES_MAX:
        raise ExpositionError(
            f"the adapter name {_shown(text)} has more than {ADAPTER_NAME_BYTES_MAX} bytes"
        )
    return text.decode(errors="replace")


def _listed(text: bytes) -> frozenset[str]:
    """Return the LoRA adapter names in a comma-separated label value."""
    _limit_adapters(text.count(b",") + 1)
    parts = (part.strip() for part in text.split(b","))
    return frozenset(_adapter_name(part) for part in parts if part)


def _with(loaded: Sequence[Mapping[bytes, bytes]], label: bytes, value: bytes) -> frozenset[str]:
    """Return the names of those cached LoRA adapters whose label `label` has the value `value`."""
    return frozenset(
        _adapter_name(row[b"adapter_name"])
        for row in loaded
        if b"adapter_name" in row and row.get(label, b"").lower() == value
    )
