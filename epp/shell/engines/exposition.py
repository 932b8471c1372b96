"""A metrics page of a model server -> `EndpointMetrics`. Pure.

A vLLM page is 50 to 80 KB and a scheduler wants ten of its six hundred series. One regular
expression of the wanted names walks the page from line to line; only what it finds is read. Where
an endpoint's last page is remembered, most of its pages need not even be walked: `page_layout`.
What is wanted from each engine is data: `MetricNames`. The tables below are the engines' own names.

Whoever answers at an endpoint's address writes the page, so that there are limits to what it can
make the reader do. A page beyond one of them is refused as a whole: what is left out could be load.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from epp.configuration.compatibility import ENGINE_LABELS
from epp.core.types import AdapterReport, EndpointMetrics
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
"""What follows the name on a line: labels, value, the rest. Never backtracks."""
_LABEL: Final = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]++|\\.)*+)"')
_ESCAPE: Final = re.compile(rb"\\(.)")
_ESCAPED: Final = {b"n": b"\n", b'"': b'"', b"\\": b"\\"}
_SELECTOR: Final = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{([^{}]*)\})?")
_PAIR: Final = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"?([^",]*?)"?\s*')
LINES_MAX: Final = 65_536
"""Wanted or not. An engine writes 1,000 for each of its ranks."""
SERIES_MAX: Final = 8_192
"""Wanted ones of a page: each state of the adapters that there ever was is one in `lora_requests_info`."""
LABELS_MAX: Final = 32_768
"""Of all wanted series together."""
ESCAPED_BYTES_MAX: Final = 32 * 1024
"""Of all wanted lines with a backslash or a comment: they are read byte by byte."""
ADAPTERS_MAX: Final = 4_096
"""In one list of adapters."""
ADAPTER_NAME_BYTES_MAX: Final = 256
KV_CACHE_USAGE_MAX: Final = 1.05
"""A share is 1 at most. Some engines count a block twice while it moves; what is above is no share."""
VALUE_MAX: Final = 1e15
"""Above it is no count of requests or tokens and no instant; and it fits into every column."""
_NUMBER_BYTES_MAX: Final = 64
_SHOWN_BYTES: Final = 80
_DIGITS_MAX: Final = 15
"""A count with more digits than this is not a count of blocks or tokens."""


class ExpositionError(ValueError):
    """The page cannot be used; its text is one sentence."""


class Selector(Struct, frozen=True):
    """The series of one name that carry all of these label values."""

    name: bytes
    labels: tuple[tuple[bytes, bytes], ...] = ()


class MetricNames(Struct, frozen=True, kw_only=True):
    """Where one engine keeps what a scheduler wants.

    Of several selectors the first that the page has is read. An empty tuple: the engine does not
    tell. Series that differ only in other labels (data-parallel ranks, models) are summed; the
    share of the KV cache in use is averaged.
    """

    waiting: tuple[Selector, ...] = ()
    running: tuple[Selector, ...] = ()
    kv_cache_usage: tuple[Selector, ...] = ()
    """0 to 1; what is a little above 1 counts as 1."""
    rejections_total: tuple[Selector, ...] = ()
    """Counter of requests that were refused because the engine is full."""
    requests_total: tuple[Selector, ...] = ()
    """One counter, whose fall means a restart. At most one: two would be compared to each other."""
    cache_queried: tuple[Selector, ...] = ()
    """Counter of prompt tokens that were looked up in the prefix cache."""
    cache_hit: tuple[Selector, ...] = ()
    """Those among them that were there, in all tiers together; a label may say in which."""
    ttft: bytes = b""
    """A histogram or summary of seconds to the first token, of which sum and count are read."""
    first_outputs: tuple[Selector, ...] = ()
    """Counter of requests that have had their first token, counted when they have it."""
    answers: tuple[Selector, ...] = ()
    """Counter of answers that have ended."""
    answer_tokens: tuple[Selector, ...] = ()
    """Counter of their tokens, counted when they have ended."""
    block_size_tokens: tuple[Selector, ...] = ()
    blocks_total: tuple[Selector, ...] = ()
    cache_info: bytes = b""
    """A series that carries both as labels; used where the gauges are missing."""
    adapter_requests: bytes = b""
    """`lora_requests_info`: a series a state, its value the instant it was true."""
    adapter_loaded: bytes = b""
    """`lora_adapter_loaded`: a series an adapter that is held, at a level."""
    adapter_slots: bytes = b""
    """`max_gpu_lora_adapters`, the companion of `adapter_loaded` that is always there."""
    awake: tuple[Selector, ...] = ()
    """0 in every rank: the engine sleeps."""
    attributes: tuple[tuple[str, Selector], ...] = ()
    """Keys, and the series that tell them, what a configuration asks for beside the load; not summed."""


def selector(text: str) -> Selector:
    """Read `name` or `name{label=value,other="value"}`.

    Raises `ValueError`, in one sentence, for anything else.
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
    """Names as a configuration spells them, each for `selector`; "": the engine does not tell.

    Raises `ValueError`, in one sentence, for a malformed one.
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
    # vLLM 0.8 to 0.32, `vllm/v1/metrics/loggers.py`. 0.9 and 0.10 show both names of the KV usage.
    # The adapter residency gauges are those of vllm-project/vllm#54830.
    "vllm": MetricNames(
        waiting=_selectors("vllm:num_requests_waiting"),
        running=_selectors("vllm:num_requests_running"),
        kv_cache_usage=_selectors("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        rejections_total=_selectors("vllm:admission_rejections_total"),
        requests_total=_selectors("vllm:prompt_tokens_total"),
        cache_queried=_selectors(
            "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"
        ),
        # Since 0.32 by tier; those after it are of the device alone.
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
        awake=_selectors('vllm:engine_sleep_state{sleep_state="awake"}'),
    ),
    # `page_size` and `num_pages` are gauges since 0.5.11, labels before.
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
        # Not known to be counted before a request is done, so that it tells no first outputs.
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
    # Plain Triton has no gauge of running requests: `nv_inference_exec_count`, which the field
    # reads as one, counts executions since the start. It serves as the counter instead.
    "triton": MetricNames(
        waiting=_selectors("nv_inference_pending_request_count"),
        requests_total=_selectors("nv_inference_exec_count"),
    ),
    # `kv_cache_usage_ratio` was removed from newer servers.
    "llama.cpp": MetricNames(
        waiting=_selectors("llamacpp:requests_deferred"),
        running=_selectors("llamacpp:requests_processing"),
        kv_cache_usage=_selectors("llamacpp:kv_cache_usage_ratio"),
        requests_total=_selectors("llamacpp:prompt_tokens_total"),
    ),
}
"""Engine type -> names, in the order in which an unlabelled endpoint's page is tried."""

_BLOCK_SIZE_LABELS: Final = (b"block_size", b"page_size")
_BLOCKS_TOTAL_LABELS: Final = (b"num_gpu_blocks", b"num_pages")
_PROCESS_STARTED: Final = b"process_start_time_seconds"
_TIER: Final = re.compile(
    rb'(?:\A|,)(?:cache_)?source="(?:(device|host|disk|p2p|external_unspecified)"|(storage))'
)
"""How vLLM and SGLang say of a series which tier it is of; storage of SGLang has its kind behind it."""

_Found: TypeAlias = dict[bytes, list[tuple[bytes, float]]]
"""Name -> (text between the braces, value) of each of its series on one page."""


class _Engine:
    """What is wanted from an engine, and how it is found."""

    def __init__(self, names: MetricNames) -> None:
        self.names = names
        # Of what a page has not, nothing is found.
        self.ttft_sum = (Selector(names.ttft + b"_sum"),) if names.ttft else ()
        self.ttft_count = (Selector(names.ttft + b"_count"),) if names.ttft else ()
        answers = (*names.answers, *names.answer_tokens)
        self.alone = frozenset(each.name for each in (*self.ttft_sum, *self.ttft_count, *answers))
        """Lines of histograms, which stand among those of their buckets."""
        caches = (*names.cache_queried, *names.cache_hit)
        load = (
            *(*names.waiting, *names.running, *names.kv_cache_usage, *names.requests_total),
            *(*names.rejections_total, *names.first_outputs),
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
        """What is compared over half a minute or more, and nothing else."""
        wanted = fresh | self.compared
        self.load = frozenset(wanted - rest)
        """Series that tell nothing but what changes from page to page."""
        names_wanted = _alternatives(sorted(wanted))
        self.lines = re.compile(rb"\n(" + names_wanted + rb")([{ \t][^\n]*)")
        """(name, the rest of the line) of each line that begins with exactly a wanted name."""
        self.headings = headings_of(names_wanted)


class _Allowance:
    """What one page may still make the reader do, whatever engines it is tried with."""

    __slots__ = ("escaped_bytes", "labels", "series")

    def __init__(self) -> None:
        self.series = SERIES_MAX
        self.labels = LABELS_MAX
        self.escaped_bytes = ESCAPED_BYTES_MAX

    def take(self, page: bytes, engine: _Engine) -> _Found:
        """The wanted series of `engine`. Raises `ExpositionError` if there are too many."""
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
            raise ExpositionError(f"it has more than {SERIES_MAX} series that are wanted")
        if self.labels < 0:
            raise ExpositionError(f"its wanted series have more than {LABELS_MAX} labels")
        if self.escaped_bytes < 0:
            raise ExpositionError(
                f"its wanted series with escapes or comments take more than {ESCAPED_BYTES_MAX} bytes"
            )


class _Reading(Struct):
    """A page that was read, and the next ones that are read by it."""

    engines: tuple[_Engine, ...]
    """Those that came into question."""
    engine: _Engine
    layout: PageLayout
    found: _Found
    metrics: EndpointMetrics
    used: bool = False
    """At least one page was read by it."""

    def read(self, page: bytes) -> EndpointMetrics | None:
        """None: the page is that of a new process, or laid out in another way. Read it whole."""
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
    """What reading a page leaves behind for reading the next one of the same endpoint.

    Whoever reads the pages of an endpoint keeps one for it and gives it to `PageReader.read`.
    """

    __slots__ = ("_pages_until_layout", "_reading")

    def __init__(self) -> None:
        self._reading: _Reading | None = None
        self._pages_until_layout = 0

    def read(self, page: bytes, engines: tuple[_Engine, ...]) -> EndpointMetrics | None:
        """None: the page must be read whole."""
        reading, self._reading = self._reading, None
        if reading is None or reading.engines is not engines:
            return None
        try:
            metrics = reading.read(page)
        except ExpositionError:
            metrics = None  # the whole page tells the first of its errors
        if metrics is not None:
            self._reading = reading
        elif not reading.used:
            # A page that is another each time would pay for a layout each time.
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
        """Read the next page by this one, if the format's rules hold on it."""
        if self._pages_until_layout:
            self._pages_until_layout -= 1
            return
        lines = {name: len(samples) for name, samples in found.items()}
        layout = layout_of(page, engine.headings, lines, engine.alone, engine.compared)
        if layout is None:
            self._pages_until_layout = PAGES_MAX  # a page without headings will have none soon
        else:
            self._reading = _Reading(engines, engine, layout, found, metrics)


class PageReader:
    """Reads the pages of endpoints, whatever engine they run.

    `engines`: engine type -> names. `engine_labels`: labels of an endpoint that may name its
    engine type. Where they name none of `engines`, the page is tried with `default_engine` first,
    then with the others in order.
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

    def read(
        self, page: bytes, labels: Mapping[str, str], memory: PageMemory | None = None
    ) -> EndpointMetrics:
        """Read the page of an endpoint with these labels.

        With the `memory` of the endpoint's last page, what is new on this one may be seen some
        pages later, as `page_layout` says; all else is the same.

        A counter that is NaN, infinite, negative or above `VALUE_MAX` is unknown. Raises
        `ExpositionError` when the page has no load gauge of the engine (of any, where the labels
        name none), when one of them says what cannot be, when a series that is wanted is malformed,
        or when a limit is exceeded.
        """
        engines = self._engines_of(labels)
        if memory is not None:
            metrics = memory.read(page, engines)
            if metrics is not None:
                return metrics
        if not page.startswith(b"#"):
            page = b"\n" + page  # each line begins after a newline, the first too
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
        raise ExpositionError(
            f"the page of {len(page)} bytes has no load gauge, expected one of {wanted}"
        )

    def _engines_of(self, labels: Mapping[str, str]) -> tuple[_Engine, ...]:
        """An engine type that is not in the table is no reason to be blind: all are tried."""
        for label in self._labels:
            engine = self._engines.get(labels.get(label, ""))
            if engine is not None:
                return engine
        return self._every


class SeriesReader:
    """Reads the series of one name on pages of whatever server, within the same limits."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()
        self._engine = _Engine(MetricNames(attributes=((name, selector(name)),)))

    def read(self, page: bytes) -> list[tuple[Mapping[bytes, bytes], float]]:
        """Labels and value of each; one whose value is no count is left out.

        Raises `ExpositionError` when one is malformed, or when a limit is exceeded.
        """
        if page.count(b"\n") > LINES_MAX:
            raise ExpositionError(f"it has more than {LINES_MAX} lines")
        found = _Allowance().take(b"\n" + page, self._engine)
        rows = found.get(self._name, ())
        return [(_labels(labels), value) for labels, value in rows if not math.isnan(value)]


def _alternatives(names: Sequence[bytes]) -> bytes:
    """An expression for the names, and for the start of the process."""
    # The inner group lets the compiler see that the engine's names begin alike: twice as fast.
    engine = b"|".join(re.escape(name) for name in names) or _PROCESS_STARTED
    return _PROCESS_STARTED + rb"|(?:" + engine + rb")"


def _metrics(engine: _Engine, found: _Found) -> EndpointMetrics | None:
    """None: none of this engine's load gauges is on the page."""
    return _with_load(_without_load(engine.names, found), engine, found)


def _without_load(names: MetricNames, found: _Found) -> EndpointMetrics:
    """What changes seldom."""
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
    """`rest` with what changes from page to page; None: no load gauge is among `found`."""
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
    )


def _attributes(names: MetricNames, found: _Found) -> dict[str, float]:
    """What a page tells of them, by the first series of each; a value that is no number from 0 on is none."""
    told = ((key, _values(found, (series,))[:1]) for key, series in names.attributes)
    return {key: value for key, values in told for value in values if not math.isnan(value)}


def _gauges(found: _Found, selectors: Sequence[Selector], most: float = VALUE_MAX) -> list[float]:
    """`_values` of a gauge of load. Raises `ExpositionError` for one that is not from 0 to `most`."""
    values = _values(found, selectors)
    for value in values:
        if not value <= most:  # NaN too
            says = "no number that it can be" if math.isnan(value) else f"{value:g}"
            name = next(selector.name for selector in selectors if selector.name in found)
            raise ExpositionError(f"{_shown(name)} says {says}, expected 0 to {most:g}")
    return values


def _summed(found: _Found, selectors: Sequence[Selector]) -> float:
    """NaN: the page does not tell."""
    values = _values(found, selectors)
    return sum(values) if values else math.nan


def _by_tier(found: _Found, selectors: Sequence[Selector]) -> dict[str, float] | None:
    """What `_summed` adds up, by tier. None: no series says its tier, or one what cannot be."""
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
    """The value of each series of the first selector that the page has; [] if of none."""
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
        return False  # spares most series the reading of their labels
    labels = _labels(text)
    return all(labels.get(name) == value for name, value in wanted)


def _sample(name: bytes, text: bytes) -> tuple[bytes, float]:
    """Labels, unread, and value of a line of the series `name`, which goes on with `text`."""
    if b"\\" in text or b"#" in text:
        whole = _SAMPLE.fullmatch(text)
        if whole is None:
            raise _malformed(name, text)
        return whole[1] or b"", _number(name, text, whole[2])
    # Without escapes and exemplars the last brace ends the labels: five times faster.
    labels, brace, rest = text.rpartition(b"}")
    labels = labels.lstrip(b" \t")
    fields = rest.split(None, 2)
    if not 1 <= len(fields) <= 2 or (brace and labels[:1] != b"{") or labels.count(b'"') % 2:
        raise _malformed(name, text)
    return labels[1:], _number(name, text, fields[0])


def _sample_like(name: bytes, text: bytes, sample: tuple[bytes, float]) -> tuple[bytes, float]:
    """`_sample` of a line that nearly always has the labels of `sample`: then twice as fast."""
    labels = sample[0]
    opening = b"{%b} " % labels if labels else b" "
    value = text[len(opening) :]
    if text.startswith(opening) and value.translate(None, b".e+").isdigit():
        return labels, _number(name, text, value)
    return _sample(name, text)


def _malformed(name: bytes, text: bytes) -> ExpositionError:
    return ExpositionError(f"{_shown(name)} is not a name, labels and a value")


def _shown(name: bytes) -> str:
    """A name, for an error; the rest of a line could be anything."""
    return repr(name[:_SHOWN_BYTES].decode(errors="replace"))


def _number(name: bytes, line: bytes, text: bytes) -> float:
    """NaN for what no gauge here can be: NaN itself, below zero, beyond all counts."""
    try:
        # float() takes digit groups, the format does not.
        value = float(text[:_NUMBER_BYTES_MAX].replace(b"_", b"x"))
    except ValueError:
        value = None
    if value is None or len(text) > _NUMBER_BYTES_MAX:
        raise ExpositionError(f"{_shown(name)} has no number as its value")
    return value if 0 <= value <= VALUE_MAX else math.nan


def _labels(text: bytes) -> dict[bytes, bytes]:
    if b"\\" not in text:  # then each quote ends or starts a value: ten times faster
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
    """The first of the labels `wanted` that is a count; NaN: none is.

    Looks for the first where it is most likely written as `,name="`: to read all forty labels of
    vLLM's series takes an eighth of the whole page's time.
    """
    opening = wanted[0] + b'="'
    at = 0 if text.startswith(opening) else text.find(b"," + opening) + 1
    # An even number of quotes before it, or it stands inside of another label's value.
    if (at or text.startswith(opening)) and b"\\" not in text and not text.count(b'"', 0, at) % 2:
        start = at + len(opening)
        count = _count(text[start : text.find(b'"', start)])
        if count:
            return count
    row = _labels(text)
    return next((count for label in wanted if (count := _count(row.get(label, b"")))), math.nan)


def _count(text: bytes) -> int | None:
    """A positive whole number; engines write "None" for what they do not know."""
    return int(text) or None if text.isdigit() and len(text) <= _DIGITS_MAX else None


def _cache_size(names: MetricNames, found: _Found) -> tuple[int | None, int | None]:
    """Tokens a block, and blocks of all ranks together."""
    sizes, blocks = _values(found, names.block_size_tokens), _values(found, names.blocks_total)
    if names.cache_info and not (sizes and blocks):
        rows = [labels for labels, _ in found.get(names.cache_info, ())]
        sizes = [_label_count(row, _BLOCK_SIZE_LABELS) for row in rows]
        blocks = [_label_count(row, _BLOCKS_TOTAL_LABELS) for row in rows]
    size = max(sizes, default=math.nan)
    total = sum(blocks) if blocks else math.nan
    return int(size) if size > 0 else None, int(total) if total > 0 else None


def _adapters(names: MetricNames, found: _Found) -> AdapterReport | None:
    """Both generations; None if the page has neither (LoRA is off, or no step has run yet)."""
    states = found.get(names.adapter_requests, ())
    slots = [value for _, value in found.get(names.adapter_slots, ())]
    held = [labels for labels, level in found.get(names.adapter_loaded, ()) if level > 0]
    _limit_adapters(len(held))
    loaded = [_labels(labels) for labels in held]
    if not (states or slots or loaded):
        return None
    # Old states are never removed: the one with the greatest value, its instant, is true now.
    state = _labels(max(states, key=lambda row: row[1] if row[1] > 0 else 0.0)[0]) if states else {}
    slots_max = [int(value) for value in slots if value >= 0]
    return AdapterReport(
        # Either list alone misses adapters before vLLM 0.12; both name the same ones since.
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
    """Adapter names of a comma-joined label."""
    _limit_adapters(text.count(b",") + 1)
    parts = (part.strip() for part in text.split(b","))
    return frozenset(_adapter_name(part) for part in parts if part)


def _with(loaded: Sequence[Mapping[bytes, bytes]], label: bytes, value: bytes) -> frozenset[str]:
    """Names of the held adapters whose `label` says `value`."""
    return frozenset(
        _adapter_name(row[b"adapter_name"])
        for row in loaded
        if b"adapter_name" in row and row.get(label, b"").lower() == value
    )
