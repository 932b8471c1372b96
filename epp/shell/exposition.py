"""A metrics page of a model server -> `EndpointMetrics`. Pure.

A vLLM page is 50 to 80 KB and a scheduler wants ten of its six hundred series, so nothing is
parsed that is not wanted: the page is searched for a line that starts with the name, and only
that line, and those of the same name that follow it, are read. The text format promises that the
series of one name stand together (Prometheus, "Exposition formats").

What is read, for each engine, is data: `MetricNames`. The tables below are the engines' own names.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from epp.core.types import AdapterReport, EndpointMetrics

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
_NAME_ENDS: Final = (b"{", b" ", b"\t")
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

    waiting: tuple[Selector, ...]
    running: tuple[Selector, ...] = ()
    kv_cache_usage: tuple[Selector, ...] = ()
    """0 to 1; a value above 1 counts as 1."""
    requests_total: tuple[Selector, ...] = ()
    """One counter, whose fall means a restart. At most one: two would be compared to each other."""
    block_size_tokens: tuple[Selector, ...] = ()
    blocks_total: tuple[Selector, ...] = ()
    cache_info: bytes = b""
    """A series that carries both as the labels named below; used where the gauges are missing."""
    block_size_label: bytes = b"block_size"
    blocks_total_label: bytes = b"num_gpu_blocks"
    adapter_requests: bytes = b""
    """`lora_requests_info`: a series a state, its value the instant it was true."""
    adapter_loaded: bytes = b""
    """`lora_adapter_loaded`: a series an adapter that is held, at a level."""
    adapter_slots: bytes = b""
    """`max_gpu_lora_adapters`, the companion of `adapter_loaded` that is always there."""
    awake: tuple[Selector, ...] = ()
    """0 in every rank: the engine sleeps."""


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
    return tuple(selector(text) for text in texts)


ENGINES: Final[Mapping[str, MetricNames]] = {
    # vLLM 0.8 to 0.32, `vllm/v1/metrics/loggers.py`. 0.9 and 0.10 show both names of the KV usage.
    # The adapter residency gauges are those of vllm-project/vllm#54830.
    "vllm": MetricNames(
        waiting=_selectors("vllm:num_requests_waiting"),
        running=_selectors("vllm:num_requests_running"),
        kv_cache_usage=_selectors("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        requests_total=_selectors("vllm:prompt_tokens_total"),
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
        block_size_tokens=_selectors("sglang:page_size"),
        blocks_total=_selectors("sglang:num_pages"),
        cache_info=b"sglang:cache_config_info",
        block_size_label=b"page_size",
        blocks_total_label=b"num_pages",
    ),
    "trtllm-serve": MetricNames(
        waiting=_selectors("trtllm_num_requests_waiting"),
        running=_selectors("trtllm_num_requests_running"),
        kv_cache_usage=_selectors("trtllm_kv_cache_utilization"),
        requests_total=_selectors("trtllm_request_success_total"),
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

ENGINE_LABELS: Final = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
"""Labels of an endpoint that name its engine type; the second is the legacy spelling."""

_PROCESS_STARTED: Final = _selectors("process_start_time_seconds")


def choose_names(
    labels: Mapping[str, str], engines: Mapping[str, MetricNames] = ENGINES
) -> tuple[MetricNames, ...]:
    """What to look for on the page of an endpoint with these labels, in order.

    An engine type that `engines` does not have is no reason to be blind: all are tried.
    """
    for label in ENGINE_LABELS:
        names = engines.get(labels.get(label, ""))
        if names is not None:
            return (names,)
    return tuple(engines.values())


def read_metrics(page: bytes, engines: Sequence[MetricNames]) -> EndpointMetrics:
    """Read one page with the first of `engines` (at least one) of which it has a load gauge.

    A value that is NaN, infinite or negative is unknown. Raises `ExpositionError` when the page
    has no load gauge of any engine, or when a series that is wanted is not well-formed.
    """
    for names in engines:
        waiting = _sum(page, names.waiting)
        running = _sum(page, names.running)
        usage = _first(page, names.kv_cache_usage)
        if waiting is not None or running is not None or usage:
            break
    else:
        wanted = ", ".join(names.waiting[0].name.decode() for names in engines)
        raise ExpositionError(
            f"the page of {len(page)} bytes has no load gauge, expected one of {wanted}"
        )
    block_size_tokens, blocks_total = _cache_size(page, names)
    started_at_s = [value for _, value in _first(page, _PROCESS_STARTED)]
    awake = [value for _, value in _first(page, names.awake)]
    return EndpointMetrics(
        waiting_requests=math.nan if waiting is None else waiting,
        running_requests=math.nan if running is None else running,
        # min() gives back its first argument when the second is NaN, so NaN comes first.
        kv_cache_usage=min(sum(v for _, v in usage) / len(usage), 1.0) if usage else math.nan,
        adapters=_adapters(page, names),
        block_size_tokens=block_size_tokens,
        blocks_total=blocks_total,
        process_started_at_s=_known(max(started_at_s, default=math.nan)),
        requests_total=_known(_sum(page, names.requests_total)),
        asleep=bool(awake) and not any(awake),
    )


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _first(page: bytes, selectors: Sequence[Selector]) -> list[tuple[bytes, float]]:
    """(labels, value) of each series of the first selector that the page has; [] if of none."""
    for wanted in selectors:
        found = [
            (labels, value)
            for labels, value in _samples(page, wanted.name)
            if not wanted.labels or _carries(labels, wanted.labels)
        ]
        if found:
            return found
    return []


def _carries(text: bytes, wanted: Sequence[tuple[bytes, bytes]]) -> bool:
    if b"\\" not in text and not all(value in text for _, value in wanted):
        return False  # spares most series the reading of their labels
    labels = _labels(text)
    return all(labels.get(name) == value for name, value in wanted)


def _sum(page: bytes, selectors: Sequence[Selector]) -> float | None:
    """Sum over the series; NaN if one of them is unknown, None if there is none."""
    found = _first(page, selectors)
    return sum(value for _, value in found) if found else None


def _samples(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield (text between the braces, value) of each series called exactly `name`."""
    at = _line_of(page, name)
    while at >= 0:
        stop = page.find(b"\n", at)
        line = page[at:stop] if stop >= 0 else page[at:]
        yield _sample(line, len(name))
        at = stop + 1 if stop >= 0 and _is_at(page, name, stop + 1) else -1


def _line_of(page: bytes, name: bytes) -> int:
    """Where the first series called exactly `name` begins; -1: there is none."""
    if _is_at(page, name, 0):
        return 0
    needle = b"\n" + name
    at = page.find(needle)
    while at >= 0 and not _is_at(page, name, at + 1):  # a longer name that starts alike
        at = page.find(needle, at + 1)
    return at + 1 if at >= 0 else -1


def _is_at(page: bytes, name: bytes, at: int) -> bool:
    end = at + len(name)
    return page.startswith(name, at) and page[end : end + 1] in _NAME_ENDS


def _sample(line: bytes, name_bytes: int) -> tuple[bytes, float]:
    """Labels and value of one line, whose name is `name_bytes` long."""
    text = line[name_bytes:]
    if b"\\" in text or b"#" in text:
        whole = _SAMPLE.fullmatch(text)
        if whole is None:
            raise _malformed(line)
        return whole[1] or b"", _number(line, whole[2])
    # Without escapes and exemplars the last brace ends the labels: five times faster.
    labels, brace, rest = text.rpartition(b"}")
    labels = labels.lstrip(b" \t")
    fields = rest.split()
    if not 1 <= len(fields) <= 2 or (brace and labels[:1] != b"{") or labels.count(b'"') % 2:
        raise _malformed(line)
    return labels[1:], _number(line, fields[0])


def _malformed(line: bytes) -> ExpositionError:
    return ExpositionError(f"{_shown(line)} is not a name, labels and a value")


def _shown(line: bytes) -> str:
    """The start of a line, for an error."""
    return repr(line[:_SHOWN_BYTES].decode(errors="replace"))


def _number(line: bytes, text: bytes) -> float:
    """NaN for what no gauge here can be: NaN itself, infinite, below zero."""
    try:
        # float() takes digit groups, the format does not.
        value = float(text.replace(b"_", b"x"))
    except ValueError:
        raise ExpositionError(f"{_shown(line)} has no number as its value") from None
    return value if 0 <= value < math.inf else math.nan


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


def _count(text: bytes) -> int | None:
    """A positive whole number; engines write "None" for what they do not know."""
    return int(text) or None if text.isdigit() and len(text) <= _DIGITS_MAX else None


def _cache_size(page: bytes, names: MetricNames) -> tuple[int | None, int | None]:
    """Tokens a block, and blocks of all ranks together."""
    sizes = [value for _, value in _first(page, names.block_size_tokens)]
    blocks = [value for _, value in _first(page, names.blocks_total)]
    if names.cache_info and not (sizes and blocks):
        rows = [_labels(labels) for labels, _ in _samples(page, names.cache_info)]
        sizes = [_count(row.get(names.block_size_label, b"")) or math.nan for row in rows]
        blocks = [_count(row.get(names.blocks_total_label, b"")) or math.nan for row in rows]
    size = max(sizes, default=math.nan)
    total = sum(blocks) if blocks else math.nan
    return int(size) if size > 0 else None, int(total) if total > 0 else None


def _adapters(page: bytes, names: MetricNames) -> AdapterReport | None:
    """Both generations; None if the page has neither (LoRA is off, or no step has run yet)."""
    if not names.adapter_requests:
        return None
    states = list(_samples(page, names.adapter_requests))
    slots = [value for _, value in _samples(page, names.adapter_slots)]
    if not states and not slots:
        return None
    loaded = [_labels(labels) for labels, held in _samples(page, names.adapter_loaded) if held > 0]
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


def _listed(text: bytes) -> frozenset[str]:
    """Adapter names of a comma-joined label."""
    parts = (part.strip() for part in text.split(b","))
    return frozenset(part.decode(errors="replace") for part in parts if part)


def _with(loaded: Sequence[Mapping[bytes, bytes]], label: bytes, value: bytes) -> frozenset[str]:
    """Names of the held adapters whose `label` says `value`."""
    return frozenset(
        row[b"adapter_name"].decode(errors="replace")
        for row in loaded
        if b"adapter_name" in row and row.get(label, b"").lower() == value
    )
