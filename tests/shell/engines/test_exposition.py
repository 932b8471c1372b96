import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from epp.shell.engines import exposition
from epp.shell.engines.exposition import (
    ADAPTER_NAME_BYTES_MAX,
    ADAPTERS_MAX,
    ENGINE_LABELS,
    ESCAPED_BYTES_MAX,
    LABELS_MAX,
    LINES_MAX,
    SERIES_MAX,
    ExpositionError,
    PageReader,
    metric_names,
    selector,
)

READER = PageReader()


def read(text, labels=None):
    return READER.read(text.encode(), labels or {})


def test_a_real_page_is_read(shared_data):
    """The recorded page of vLLM 0.32 gives its gauges, its cache size and its start."""
    page = (shared_data / "truth" / "vllm-0.32-cpu" / "metrics.txt").read_bytes()
    metrics = READER.read(page, {})
    assert (metrics.waiting_requests, metrics.running_requests) == (0.0, 0.0)
    assert metrics.kv_cache_usage == 0.0
    assert (metrics.block_size_tokens, metrics.blocks_total) == (32, 200)
    assert metrics.process_started_at_s == 1795230349.67
    assert metrics.requests_total == 176887.0
    assert (metrics.cache_queried_tokens, metrics.cache_hit_tokens) == (176887.0, 102272.0)
    assert (round(metrics.ttft_sum_s, 3), metrics.ttft_count) == (3.856, 300.0)
    assert (metrics.answers_total, metrics.answer_tokens_total) == (300.0, 7400.0)
    others = dict.fromkeys(("host", "disk", "p2p", "external_unspecified"), 0.0)
    assert metrics.tier_hit_tokens == {"device": 102272.0, **others}
    assert metrics.adapters is None
    assert not metrics.asleep


@pytest.mark.parametrize(
    ("load", "histogram", "at_once"),
    [
        ("vllm:num_requests_waiting", "vllm:time_to_first_token_seconds", True),
        ("sglang:num_queue_reqs", "sglang:time_to_first_token_seconds", True),
        ("trtllm_num_requests_waiting", "trtllm_time_to_first_token_seconds", False),
    ],
)
def test_first_tokens_are_read_of_every_engine_that_counts_them(load, histogram, at_once):
    """Of all models and ranks together; buckets are passed over. TensorRT-LLM counts them at the end."""
    metrics = read(
        f"{load} 1\n# TYPE {histogram} histogram\n"
        f'{histogram}_sum{{model_name="a"}} 1.5\n{histogram}_bucket{{model_name="a",le="1"}} 9\n'
        f'{histogram}_count{{model_name="a"}} 3\n{histogram}_sum{{model_name="b"}} 2.5\n'
        f'{histogram}_count{{model_name="b"}} 4\n'
    )
    assert (metrics.ttft_sum_s, metrics.ttft_count) == (4.0, 7.0)
    assert (
        metrics.first_outputs_total == 7.0 if at_once else math.isnan(metrics.first_outputs_total)
    )


def test_ranks_are_summed_and_their_kv_usage_averaged():
    """Data-parallel ranks behind one port count as one endpoint."""
    metrics = read(
        'vllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:num_requests_running{engine="1"} 4.0\n'
        'vllm:num_requests_waiting{engine="0"} 1.0\n'
        'vllm:num_requests_waiting{engine="1"} 1e1\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.25\n'
        'vllm:prompt_tokens_total{engine="0"} 1.5e+03\n'
        'vllm:prompt_tokens_total{engine="1"} 500.0\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1.0\n'
    )
    assert metrics.running_requests == 7.0
    assert metrics.waiting_requests == 11.0
    assert metrics.kv_cache_usage == 0.375
    assert metrics.requests_total == 2000.0
    assert (metrics.block_size_tokens, metrics.blocks_total) == (16, 200)


@pytest.mark.parametrize(
    ("page", "queried", "hit"),
    [
        (
            (
                'vllm:num_requests_waiting 0\nvllm:prefix_cache_queries_total{engine="0"} 100\n'
                'vllm:prefix_cache_queries_total{engine="1"} 50\nvllm:prefix_cache_hits_total 60\n'
            ),
            *(150.0, 60.0),
        ),
        (
            (
                "vllm:num_requests_waiting 0\nvllm:gpu_prefix_cache_queries_total 9\n"
                "vllm:gpu_prefix_cache_hits_total 3\n"
            ),
            *(9.0, 3.0),
        ),
        (
            (
                "sglang:num_queue_reqs 0\nsglang:prompt_tokens_total 7\n"
                'sglang:cached_tokens_total{cache_source="device"} 4\n'
                'sglang:cached_tokens_total{cache_source="host"} 1\n'
            ),
            *(7.0, 5.0),
        ),
        (
            (
                "vllm:num_requests_waiting 0\nvllm:prefix_cache_queries_total 100\n"
                "vllm:prefix_cache_hits_total 60\n"
                'vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 60\n'
                'vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 25\n'
            ),
            *(100.0, 85.0),
        ),
        ("vllm:num_requests_waiting 0\n", math.nan, math.nan),
        ("llamacpp:requests_deferred 0\n", math.nan, math.nan),
    ],
    ids=["vllm", "vllm before 0.11", "sglang", "vllm of several tiers", "off", "does not tell"],
)
def test_what_the_engine_found_in_its_cache_is_read(page, queried, hit):
    """All ranks together; an engine that does not tell is unknown, not without hits."""
    metrics = read(page)
    assert metrics.cache_queried_tokens == pytest.approx(queried, nan_ok=True)
    assert metrics.cache_hit_tokens == pytest.approx(hit, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "series", "tiers"),
    [
        (
            "vllm:prompt_tokens_cached_by_source_total",
            {'engine="0",source="device"': 4, 'engine="1",source="device"': 2, 'source="p2p"': 1},
            {"device": 6.0, "p2p": 1.0},
        ),
        (
            "sglang:cached_tokens_total",
            {
                'cache_source="device"': 4,
                'cache_source="storage_nixl"': 2,
                'cache_source="total"': 9,
            },
            {"device": 4.0, "storage": 2.0},
        ),
        ("vllm:prompt_tokens_cached_by_source_total", {'source="device"': "NaN"}, None),
        ("vllm:prompt_tokens_cached_by_source_total", {'source="moon"': 1}, None),
        ("vllm:prompt_tokens_cached_by_source_total", {'resource="device"': 1}, None),
        ("vllm:prompt_tokens_cached_by_source_total", {r'x="\",source=\"device"': 1}, None),
        ("vllm:prefix_cache_hits_total", {'engine="0"': 1}, None),
    ],
)
def test_the_tier_of_what_was_found_is_read(name, series, tiers):
    """Of all ranks together; what names no tier, or says what cannot be, tells none."""
    page = (
        "vllm:num_requests_waiting 0\n" if name.startswith("vllm") else "sglang:num_queue_reqs 0\n"
    )
    page += "".join(f"{name}{{{labels}}} {value}\n" for labels, value in series.items())
    assert read(page).tier_hit_tokens == tiers


@pytest.mark.parametrize(
    ("page", "usage"),
    [
        ("vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.25\n", 0.25),
        ("vllm:gpu_cache_usage_perc 0.5\n", 0.5),
    ],
)
def test_the_new_name_of_the_kv_usage_wins(page, usage):
    """0.9 and 0.10 show both names, older engines only the old one."""
    assert read(page).kv_cache_usage == usage


@pytest.mark.parametrize("first", [True, False])
def test_a_name_that_only_starts_alike_is_another_series(first):
    """`num_requests_waiting_by_reason` never counts as `num_requests_waiting`, on either side."""
    wanted = "vllm:num_requests_waiting 4\n"
    other = 'vllm:num_requests_waiting_by_reason{reason="capacity"} 9\n'
    assert read(wanted + other if first else other + wanted).waiting_requests == 4.0


def test_help_text_and_label_values_are_not_series():
    """A series name counts only at the start of a line."""
    metrics = read(
        "# HELP vllm:num_requests_running vllm:num_requests_waiting 7\n"
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{m="vllm:num_requests_waiting 8"} 2\n'
    )
    assert metrics.running_requests == 2.0
    assert math.isnan(metrics.waiting_requests)


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_waiting 5",
        "vllm:num_requests_waiting 5.0e0\r\n",
        "vllm:num_requests_waiting\t+5 1787260028703\n",
        "vllm:num_requests_waiting { } 5\n",
        'vllm:num_requests_waiting{a="x,y",b="}",c="{"} 5 -1\n',
        'vllm:num_requests_waiting{a="say \\"hi\\"} 9",b="\\\\"} 5\n',
        'vllm:num_requests_waiting{a="#"} 5 # {trace_id="}"} 0.5 1\n',
        "vllm:num_requests_waiting 5 # {} 1\n",
    ],
)
def test_every_way_to_write_a_sample_is_read(line):
    """Escapes, braces in labels, timestamps, exemplars, CRLF and a missing last newline."""
    assert read("# comment\n" + line).waiting_requests == 5.0
    assert read(line).waiting_requests == 5.0


IMPOSSIBLE = ["NaN", "+Inf", "-Inf", "-1", "Infinity", "1e300", "1.1e15"]


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_a_counter_that_cannot_be_is_unknown(value):
    """NaN, infinite, negative and absurd values; the rest of the page still counts."""
    metrics = read(
        f"vllm:num_requests_running 3\nvllm:prompt_tokens_total {value}\n"
        f"vllm:admission_rejections_total {value}\n"
        f"process_start_time_seconds {value}\nvllm:max_gpu_lora_adapters {value}\n"
    )
    assert metrics.running_requests == 3.0
    assert metrics.adapters.slots_max == 0
    assert metrics.requests_total is None
    assert metrics.rejections_total is None
    assert metrics.process_started_at_s is None


@pytest.mark.parametrize(
    "gauge", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
)
@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_a_load_that_cannot_be_is_an_error(gauge, value):
    """Whoever says that says nothing that can be gone by: not of one rank either."""
    for line in (
        f"vllm:{gauge} {value}\n",
        f'vllm:{gauge}{{engine="1"}} 0\nvllm:{gauge} {value}\n',
    ):
        with pytest.raises(ExpositionError) as refused:
            read("vllm:num_requests_waiting 0\n" + line)
        assert str(refused.value).startswith(f"'vllm:{gauge}' is no valid number")


def test_a_usage_in_percent_is_an_error():
    with pytest.raises(ExpositionError) as refused:
        read("vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 57\n")
    assert str(refused.value) == "'vllm:kv_cache_usage_perc' is 57, expected 0 to 1.05"


def test_a_kv_usage_above_one_is_full():
    """Rounding may exceed one; a pool is never fuller than full."""
    assert read("vllm:kv_cache_usage_perc 1.02\n").kv_cache_usage == 1.0


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_waiting five",
        "vllm:num_requests_waiting 1_0",
        "vllm:num_requests_waiting ",
        "vllm:num_requests_waiting 1 2 3",
        "vllm:num_requests_waiting " + "1" * 65,
        'vllm:num_requests_waiting{a="x} 1',
        'vllm:num_requests_waiting{a="x"',
        'vllm:num_requests_waiting{a="\\"} 1',
        'vllm:num_requests_waiting {a="#} 1',
        'vllm:num_requests_waiting a="x"} 1',
    ],
)
def test_a_malformed_line_is_refused_in_one_sentence(line):
    """The sentence shows the name, and nothing else that the pod wrote."""
    with pytest.raises(ExpositionError, match=r"^'vllm:num_requests_waiting.* (is|has) n"):
        read(line + "\n")


@pytest.mark.parametrize("page", ["", "\n", "<html>vllm:num_requests_waiting</html>", "up 1\n"])
def test_a_page_without_a_load_gauge_is_refused(page):
    """The sentence says how large the page was and which names would have done."""
    with pytest.raises(ExpositionError, match=r"bytes has no load gauge such as vllm:"):
        read(page)


def test_the_newest_adapter_state_counts():
    """States are never removed; the greatest value is now, and both lists are joined."""
    adapters = read(
        "vllm:num_requests_running 0\n"
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",'
        'waiting_lora_adapters=""} 1.7872679534e+09\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql, chat",'
        'waiting_lora_adapters="sql,a\\"b"} 1.7872679801e+09\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="",'
        'waiting_lora_adapters=""} NaN\n'
    ).adapters
    assert adapters.active == {"sql", "chat", 'a"b'}
    assert adapters.slots_max == 4
    assert not adapters.resident_known


def test_the_new_adapter_gauges_tell_where_each_is_held():
    """Levels, pins and slots of the new generation; a series at 0 is not held."""
    adapters = read(
        "vllm:num_requests_running 0\n"
        'vllm:lora_adapter_loaded{adapter_name="a",level="gpu",pinned="True",rank="0"} 1.0\n'
        'vllm:lora_adapter_loaded{adapter_name="b",level="cpu",pinned="false",rank="0"} 1.0\n'
        'vllm:lora_adapter_loaded{adapter_name="c",level="gpu",pinned="false",rank="0"} 0.0\n'
        'vllm:num_gpu_loaded_lora_adapters{engine="0"} 1.0\n'
        'vllm:max_gpu_lora_adapters{engine="0"} 2.0\n'
    ).adapters
    assert adapters.resident_known
    assert (adapters.gpu, adapters.cpu, adapters.pinned) == ({"a"}, {"b"}, {"a"})
    assert adapters.slots_max == 2
    assert adapters.active == frozenset()


def test_nothing_loaded_is_known_from_the_slots_alone():
    """An engine without a loaded adapter still tells that it has room."""
    adapters = read("vllm:num_requests_running 0\nvllm:max_gpu_lora_adapters 2\n").adapters
    assert adapters.resident_known
    assert adapters.gpu == frozenset()
    assert adapters.slots_max == 2


@pytest.mark.parametrize(("awake", "asleep"), [("1.0", False), ("0.0", True)])
def test_a_sleeping_engine_says_so(awake, asleep):
    """`awake` at 0 means asleep."""
    page = (
        "vllm:num_requests_running 0\n"
        f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}\n'
        'vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0\n'
    )
    assert read(page).asleep is asleep


PAGES = {
    "sglang": (
        'sglang:num_queue_reqs{m="x"} 2\nsglang:num_running_reqs{m="x"} 3\n'
        'sglang:token_usage{m="x"} 0.5\nsglang:page_size{m="x"} 16\nsglang:num_pages{m="x"} 40\n'
        'sglang:num_requests_total{m="x"} 9\n'
    ),
    "trtllm-serve": (
        "trtllm_num_requests_waiting 2\ntrtllm_num_requests_running 3\n"
        "trtllm_kv_cache_utilization 0.5\ntrtllm_kv_cache_tokens_per_block 16\n"
        'trtllm_kv_cache_max_blocks 40\ntrtllm_request_success_total{finished_reason="stop"} 9\n'
    ),
    "triton-tensorrt-llm": (
        'nv_inference_request_success{model="m"} 9\nnv_inference_pending_request_count 77\n'
        'nv_trt_llm_request_metrics{model="m",request_type="waiting"} 2\n'
        'nv_trt_llm_request_metrics{model="m",request_type="scheduled"} 3\n'
        'nv_trt_llm_request_metrics{model="m",request_type="max"} 512\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.5\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 16\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 40\n'
    ),
}


@pytest.mark.parametrize("engine", PAGES)
@pytest.mark.parametrize("labelled", [True, False])
def test_other_engines_are_read_by_label_and_by_their_names(engine, labelled):
    """An engine type label chooses the names; without one the page tells."""
    metrics = read(PAGES[engine], {ENGINE_LABELS[1]: engine} if labelled else {"app": "x"})
    assert (metrics.waiting_requests, metrics.running_requests) == (2.0, 3.0)
    assert metrics.kv_cache_usage == 0.5
    assert (metrics.block_size_tokens, metrics.blocks_total) == (16, 40)
    assert metrics.requests_total == 9.0


def test_engines_that_tell_less_leave_the_rest_unknown():
    """Plain Triton has only a queue and a counter, llama.cpp has no KV usage any more."""
    triton = read('nv_inference_pending_request_count{m="a"} 2\nnv_inference_exec_count 9\n')
    assert (triton.waiting_requests, triton.requests_total) == (2.0, 9.0)
    assert math.isnan(triton.running_requests)
    llama = read("llamacpp:requests_processing 3\nllamacpp:requests_deferred 2\n")
    assert (llama.waiting_requests, llama.running_requests) == (2.0, 3.0)
    assert math.isnan(llama.kv_cache_usage)


def test_old_sglang_tells_its_cache_size_in_labels():
    """Before 0.5.11 page size and count were labels."""
    page = 'sglang:num_queue_reqs 0\nsglang:cache_config_info{num_pages="40",page_size="1"} 1\n'
    metrics = read(page)
    assert (metrics.block_size_tokens, metrics.blocks_total) == (1, 40)


@pytest.mark.parametrize("text", ["None", "", "0", "-5", "1.5", "9" * 5000])
def test_a_cache_size_that_is_no_count_is_unknown(text):
    """Engines write "None" for what they do not know."""
    page = f'vllm:num_requests_running 0\nvllm:cache_config_info{{num_gpu_blocks="{text}"}} 1\n'
    assert read(page).blocks_total is None


def test_a_label_chooses_and_an_unknown_one_tries_all():
    """The newer label wins; a type without a table is no reason to be blind."""
    both = {ENGINE_LABELS[0]: "sglang", ENGINE_LABELS[1]: "vllm"}
    with pytest.raises(ExpositionError, match=r"no load gauge such as sglang:num_queue_reqs$"):
        read("vllm:num_requests_running 3\n", both)
    metrics = read("vllm:num_requests_running 3\n", {ENGINE_LABELS[0]: "unheard-of"})
    assert metrics.running_requests == 3.0


def test_names_can_be_overridden():
    """Any metric, with or without label filters, can stand for a gauge."""
    names = metric_names(waiting='my_queue{kind="batch", x=y}', cache_info="mine")
    page = 'my_queue{kind="batch",x="z"} 1\nmy_queue{kind="batch",x="y"} 6\n'
    reader = PageReader({"mine": names})
    assert reader.read(page.encode(), {}).waiting_requests == 6.0
    with pytest.raises(ExpositionError, match=r"no load gauge such as my_queue$"):
        reader.read(b"process_start_time_seconds 1\n", {})


def test_an_engine_that_tells_nothing_is_never_recognised():
    """No name at all must not mean every name."""
    with pytest.raises(ExpositionError, match="no load gauge"):
        PageReader({"mute": metric_names()}).read(b"{} 1\n 2\nprocess_start_time_seconds 1\n", {})


def test_the_default_engine_is_tried_first():
    """A page may have the gauges of two engines; the label key can be another one."""
    page = b"vllm:num_requests_waiting 1\nsglang:num_queue_reqs 2\n"
    reader = PageReader(default_engine="sglang", engine_labels=["engine"])
    assert reader.read(page, {ENGINE_LABELS[0]: "vllm"}).waiting_requests == 2.0
    assert reader.read(page, {"engine": "vllm"}).waiting_requests == 1.0


@pytest.mark.parametrize("text", ["", "a b", "a{b}", "a{b=c", "a{b=c}}", "1a", 'a{b="c"d}'])
def test_a_malformed_selector_is_refused_in_one_sentence(text):
    """The sentence says how a selector looks."""
    with pytest.raises(ValueError, match="is not a metric such as name"):
        selector(text)


RANKS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.floats(0, 1e9),
        st.floats(0, 1),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda rank: rank[0],
)


@given(ranks=RANKS, started_at_s=st.floats(0, 1e10), adapters=st.sets(st.text("abc-_.é")))
def test_what_prometheus_client_writes_is_read_back(ranks, started_at_s, adapters):
    """Whatever the label values, the numbers written are the numbers read."""
    registry = CollectorRegistry()
    by_reason = Gauge("vllm:num_requests_waiting_by_reason", "x", ["m"], registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", 'say "\\ x\n', ["m"], registry=registry)
    usage = Gauge("vllm:kv_cache_usage_perc", "x", ["m"], registry=registry)
    tokens = Counter("vllm:prompt_tokens", "x", ["m"], registry=registry)
    info = Gauge("vllm:cache_config_info", "x", ["a", "num_gpu_blocks"], registry=registry)
    lora = Gauge("vllm:lora_requests_info", "x", ["running_lora_adapters"], registry=registry)
    Gauge("process_start_time_seconds", "x", registry=registry).set(started_at_s)
    for name, load, share in ranks:
        by_reason.labels(name).set(1e12)
        waiting.labels(name).set(load)
        usage.labels(name).set(share)
        tokens.labels(name).inc(load)
        info.labels(name, "7").set(1)
    lora.labels(",".join(sorted(adapters))).set(2)
    lora.labels("other").set(1)

    metrics = READER.read(generate_latest(registry), {})

    assert metrics.waiting_requests == pytest.approx(sum(load for _, load, _ in ranks))
    assert metrics.requests_total == metrics.waiting_requests
    assert metrics.kv_cache_usage == pytest.approx(sum(s for _, _, s in ranks) / len(ranks))
    assert metrics.blocks_total == 7 * len(ranks)
    assert metrics.process_started_at_s == started_at_s
    assert metrics.adapters.active == {name for name in adapters if name}


GAUGE = "vllm:num_requests_waiting 1\n"


@pytest.fixture
def looked_at(monkeypatch):
    """The series and adapter names that were looked at one by one."""
    seen = []
    for function in ("_sample", "_adapter_name", "_labels"):
        real = getattr(exposition, function)

        def spy(*arguments, real=real):
            seen.append(arguments)
            return real(*arguments)

        monkeypatch.setattr(exposition, function, spy)
    return seen


def listed(count, name="adapter-{}"):
    names = ",".join(name.format(number) for number in range(count))
    return f'vllm:lora_requests_info{{running_lora_adapters="{names}"}} 1\n'


def held(count):
    return "".join(
        f'vllm:lora_adapter_loaded{{adapter_name="a{number}",level="gpu"}} 1\n'
        for number in range(count)
    )


def waiting(count):
    return "".join(f'vllm:num_requests_waiting{{e="{number}"}} 1\n' for number in range(count))


@pytest.mark.parametrize(
    ("page", "words", "at_most"),
    [
        (GAUGE + "\n" * 4_000_000, f"more than {LINES_MAX} lines", 0),
        (waiting(60_000), f"more than {SERIES_MAX} wanted series", SERIES_MAX),
        (
            "".join(f"{name} 1\n" for name in ("sglang:num_pages", "vllm:lora_requests_info"))
            * SERIES_MAX,
            f"more than {SERIES_MAX} wanted series",
            SERIES_MAX + 1,
        ),
        (
            GAUGE + "vllm:cache_config_info{" + 'a="",' * 800_000 + "} 1\n",
            f"more than {LABELS_MAX} labels",
            1,
        ),
        (
            GAUGE + 'vllm:cache_config_info{a="' + "\\\\" * 1_000_000 + '"} 1\n',
            f"have more than {ESCAPED_BYTES_MAX} bytes",
            1,
        ),
        (GAUGE + listed(500_000), f"more than {ADAPTERS_MAX} adapters", 3),
        (
            GAUGE + held(ADAPTERS_MAX + 1),
            f"more than {ADAPTERS_MAX} adapters",
            ADAPTERS_MAX + 2,
        ),
        (
            GAUGE + listed(1, "x" * (ADAPTER_NAME_BYTES_MAX + 1)),
            f"^the adapter name 'x{{80}}' has more than {ADAPTER_NAME_BYTES_MAX} bytes$",
            4,
        ),
        ("vllm:num_requests_waiting " + "1 " * 2_000_000 + "\n", "is not a name with labels", 1),
        ("vllm:num_requests_waiting " + "1" * 4_000_000 + "\n", "has a value that is not a number", 1),
    ],
    ids=["lines", "series", "engines", "labels", "escapes", "listed", "held", "name", "fields", "digits"],
)  # fmt: skip
def test_a_page_beyond_a_limit_is_refused_after_bounded_work(page, words, at_most, looked_at):
    """The sentence names the limit, and no more was looked at than it allows."""
    with pytest.raises(ExpositionError, match=words) as refused:
        read(page)
    assert len(str(refused.value)) < 400
    assert len(looked_at) <= at_most


def test_a_page_within_the_limits_is_read():
    """Thousands of adapters, their states of the past, and a rank for each of many cards."""
    states = "".join(
        f'vllm:lora_requests_info{{running_lora_adapters="a{number},b"}} {number}\n'
        for number in range(SERIES_MAX - ADAPTERS_MAX - 65)
    )
    metrics = read(waiting(64) + states + listed(3_000) + held(ADAPTERS_MAX))
    assert metrics.waiting_requests == 64
    assert metrics.adapters.active == {f"a{SERIES_MAX - ADAPTERS_MAX - 66}", "b"}
    assert len(metrics.adapters.gpu) == ADAPTERS_MAX


PIECES = st.sampled_from(
    ["vllm:num_requests_waiting", "vllm:lora_requests_info", "_x", "{", "}", '"', "\\", "a=", ",",
     " ", "\n", "\r", "#", "1", "NaN", "\t", "é", "\x00"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=30).map("".join))
def test_no_page_breaks_the_reader(page):
    """Any bytes give metrics or an `ExpositionError`, nothing else."""
    with contextlib.suppress(ExpositionError):
        read(page)


QUEUES = (
    'vllm:num_requests_waiting{engine="0"} 7\n'
    'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2\n'
    'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 5\n'
    'vllm:num_requests_running{engine="0"} 1\n'
)


@pytest.mark.parametrize(
    ("role", "waiting"),
    [
        (None, 7.0),
        ("prefill", 7.0),
        ("encode", 7.0),
        ("decode", 2.0),
        ("prefill-decode", 2.0),
        ("encode-prefill-decode", 2.0),
    ],
)
def test_requests_that_receive_their_kv_cache_do_not_wait_to_decode(role, waiting):
    """Only those that wait for capacity are the queue of an endpoint that decodes."""
    labels = {} if role is None else {"llm-d.ai/role": role}
    assert read(QUEUES, labels).waiting_requests == waiting
    assert read(QUEUES, labels | {ENGINE_LABELS[0]: "vllm"}).waiting_requests == waiting


def test_an_older_engine_that_decodes_has_one_queue():
    page = QUEUES.splitlines(keepends=True)[0]
    assert read(page, {"llm-d.ai/role": "decode"}).waiting_requests == 7.0


def test_a_page_keeps_its_queue_if_the_role_is_changed():
    """The memory of the last page belongs to one role."""
    memory = exposition.PageMemory()
    page = b"# TYPE vllm:num_requests_waiting gauge\n" + QUEUES.encode()
    for role, waiting in (("decode", 2.0), ("prefill", 7.0), ("decode", 2.0)):
        metrics = READER.read(page, {"llm-d.ai/role": role}, memory)
        assert metrics.waiting_requests == waiting


def test_transfers_of_kv_caches_are_read():
    transfers = read(
        QUEUES
        + 'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 9\n'
        + 'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 512\n'
        + 'vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 64\n'
        + "# TYPE vllm:nixl_bytes_transferred histogram\n"
        + 'vllm:nixl_bytes_transferred_bucket{engine="0",le="1e6"} 3\n'
        + 'vllm:nixl_bytes_transferred_sum{engine="0"} 4096\n'
        + 'vllm:nixl_bytes_transferred_count{engine="0"} 3\n'
        + 'vllm:nixl_num_failed_transfers_total{engine="0"} 1\n'
    ).transfers
    assert (transfers.received_tokens, transfers.received_bytes) == (576.0, 4096.0)
    assert transfers.failed == 1.0
    assert math.isnan(transfers.expired)


NIXL_PAGE = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration for NIXL KV Cache transfers.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="m"} 0.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} ENDED
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} ENDED
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} SECONDS
# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred per NIXL KV Cache transfers.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0",model_name="m"} 0.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} ENDED
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} ENDED
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} BYTES
"""


def nixl_page(ended, seconds, size_bytes):
    page = NIXL_PAGE.replace("ENDED", str(ended)).replace("SECONDS", str(seconds))
    return page.replace("BYTES", str(size_bytes)).encode()


def test_the_sums_of_kv_transfers_belong_to_one_page():
    """They are searched on one of eight pages, all on the same, so their ratio is a speed."""
    memory = exposition.PageMemory()
    speeds = set()
    for ended in range(40):
        told = READER.read(nixl_page(ended, ended * 0.25, ended * 1e9), {}, memory).transfers
        assert (told.ended_s, told.received_bytes) == (told.ended * 0.25, told.ended * 1e9)
        speeds.add(told.ended)
    assert len(speeds) >= 5


RECEIVED_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 1
# HELP vllm:prompt_tokens_by_source Prompt tokens by where they came from.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} RECEIVED
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} COUNT
vllm:time_to_first_token_seconds_count{engine="0"} COUNT
vllm:time_to_first_token_seconds_sum{engine="0"} COUNT
"""


def test_first_outputs_and_received_tokens_are_those_of_each_page():
    """They are compared page by page: whose first output a page shows follows from both."""
    memory = exposition.PageMemory()
    for count in range(40):
        page = RECEIVED_PAGE.replace("COUNT", str(count)).replace("RECEIVED", str(100 * count))
        told = READER.read(page.encode(), {}, memory)
        assert told.first_outputs_total == count
        assert told.transfers.received_tokens == 100 * count


def test_an_engine_without_a_connector_has_no_transfers():
    assert read(QUEUES).transfers is None
