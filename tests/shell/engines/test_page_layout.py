"""Pages read by the layout of the last one, compared to the same pages read whole."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.engines import exposition
from epp.shell.engines.exposition import ENGINE_LABELS, ExpositionError, PageMemory, PageReader
from epp.shell.engines.page_layout import (
    GROWTH_BYTES_MAX,
    KEPT_BYTES_MAX,
    LINES_ALONE_MAX,
    NEAR_BYTES,
    PAGES_MAX,
    SELDOM_EVERY,
    headings_of,
    layout_of,
)

READER = PageReader()
USAGE = "# TYPE vllm:kv_cache_usage_perc gauge\n"
STATES = "# TYPE vllm:lora_requests_info gauge\n"
STATE = 'vllm:lora_requests_info{running_lora_adapters="sql"} 2\n'


def page(waiting="4", *, started="7", after="", filling=400):
    """`filling`: bytes that nobody wants, at the end."""
    return (
        "# HELP process_start_time_seconds Start.\n# TYPE process_start_time_seconds gauge\n"
        f"process_start_time_seconds {started}\n"
        "# HELP vllm:num_requests_waiting Requests.\n# TYPE vllm:num_requests_waiting gauge\n"
        f"vllm:num_requests_waiting {waiting}\n{after}# {'x' * filling}\n"
    )


class Reading:
    """The pages of one endpoint, one after the other."""

    def __init__(self, *pages):
        self.memory = PageMemory()
        for text in pages:
            self.read(text)

    def read(self, text):
        return READER.read(text.encode(), {}, self.memory)


def test_a_metric_that_comes_unnoticed_is_seen_when_the_layout_is_taken_anew():
    """The price of a layout, and its bound: the page did not grow, nothing moved."""
    reading = Reading(page())
    unnoticed = page(after=USAGE + "vllm:kv_cache_usage_perc 0.5\n", filling=300)
    usages = [reading.read(unnoticed).kv_cache_usage for _ in range(PAGES_MAX + 2)]
    assert all(math.isnan(usage) for usage in usages[:PAGES_MAX])
    assert usages[PAGES_MAX:] == [0.5, 0.5]


def test_a_metric_that_makes_the_page_grow_is_seen_at_once():
    """As metrics do that a server adds while it runs."""
    reading = Reading(page(), page())
    grown = page(after=USAGE + "vllm:kv_cache_usage_perc 0.5\n")
    assert len(grown) > len(page()) + GROWTH_BYTES_MAX
    assert reading.read(grown).kv_cache_usage == 0.5


def test_the_first_series_below_a_heading_is_seen_at_once():
    """vLLM writes the headings of its LoRA metrics from the start, the series with the first use."""
    reading = Reading(page(after=STATES), page(after=STATES))
    assert reading.read(page(after=STATES)).adapters is None
    adapters = reading.read(page(after=STATES + STATE, filling=340)).adapters
    assert adapters.active == {"sql"}


def test_what_moved_less_than_a_little_is_found():
    """Lines above it grow and shrink by some digits."""
    unnoticed = USAGE + "vllm:kv_cache_usage_perc 0.5\n"
    reading = Reading("# " + "x" * NEAR_BYTES + "\n" + page())
    metrics = reading.read("# x\n" + page("5", after=unnoticed))
    assert metrics.waiting_requests == 5.0
    assert math.isnan(metrics.kv_cache_usage)


@pytest.mark.parametrize(
    "different",
    [
        page(started="8", after=USAGE + "vllm:kv_cache_usage_perc 0.5\n", filling=300),
        "# HELP x\n" * NEAR_BYTES + page(after=USAGE + "vllm:kv_cache_usage_perc 0.5\n"),
        page("44", after=USAGE + "vllm:kv_cache_usage_perc 0.5\n", filling=300).replace(
            "waiting gauge", "waiting untyped"
        ),
    ],
    ids=["another-process", "moved-far", "another-heading"],
)
def test_a_page_that_is_another_is_read_whole(different):
    """A new process, or a heading that is not where it was: then all of it may be different."""
    assert Reading(page(), page()).read(different).kv_cache_usage == 0.5


def test_a_page_whose_last_gauge_goes_is_refused():
    """A heading without a series tells no load, as on a first page."""
    reading = Reading(page(), page())
    with pytest.raises(ExpositionError, match="has no load gauge"):
        reading.read(page().replace("vllm:num_requests_waiting 4\n", ""))
    assert reading.read(page("6")).waiting_requests == 6.0


def test_another_reader_or_another_engine_starts_anew():
    """What one configuration found says nothing to the next."""
    memory = PageMemory()
    text = (page() + "sglang:num_queue_reqs 9\n").encode()
    assert READER.read(text, {}, memory).waiting_requests == 4.0
    assert PageReader(default_engine="sglang").read(text, {}, memory).waiting_requests == 9.0
    assert READER.read(text, {ENGINE_LABELS[0]: "vllm"}, memory).waiting_requests == 4.0


def test_a_series_may_tell_load_and_cache_size():
    """Triton's cache has one metric for its usage and its size."""
    name = "nv_trt_llm_kv_cache_block_metrics"
    text = page().replace("vllm:num_requests_waiting", name).replace(f"{name} 4", "{lines}")
    line = name + '{{kv_cache_block_type="{}"}} {}\n'
    reading = Reading()
    for usage, blocks in [(0.5, 40), (0.25, 40), (0.25, 50)]:
        lines = line.format("fraction", usage) + line.format("max", blocks)
        metrics = reading.read(text.replace("{lines}\n", lines))
        assert (metrics.kv_cache_usage, metrics.blocks_total) == (usage, blocks)


WANTED = rb"a|b"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"\n# TYPE a gauge\na 1\n", {b"a": 2}),
        (b"\n# TYPE a gauge\n# TYPE a gauge\na 1\n", {b"a": 1}),
        (b"\n# TYPE a gauge\n\na 1\n", {b"a": 1}),
        (b"\n# TYPE a gauge\nax 1\na 1\n", {b"a": 1}),
        (b"\na 1\n", {b"a": 1}),
        (b"# TYPE a gauge\na 1\n", {b"a": 1}),
        (b"\n# TYPE a gauge\n" + b"a 1\n" * KEPT_BYTES_MAX, {b"a": KEPT_BYTES_MAX}),
    ],
    ids=[
        "elsewhere-too",
        "two-headings",
        "a-gap",
        "another-between",
        "no-heading",
        "first-line",
        "too-much",
    ],
)
def test_a_page_that_is_not_as_it_should_be_has_no_layout(text, lines):
    """It is always read whole."""
    assert layout_of(text, headings_of(WANTED), lines) is None


def test_what_has_not_changed_is_not_told():
    """Also at the end of a page, with or without its newline."""
    text = b'\n# TYPE a gauge\na{x="1"} 1\n# HELP b\n# TYPE b gauge\nb 2'
    layout = layout_of(text, headings_of(WANTED), {b"a": 1, b"b": 1})
    assert layout.changed(text) == {}
    assert layout.changed(text + b"2") == {b"b": [b" 22"]}
    assert layout.changed(text + b"2\nb{} 3\n") == {b"b": [b" 22", b"{} 3"]}
    assert layout.changed(text.replace(b" 1\n", b" 1\na 5\n")) == {
        b"a": [b'{x="1"} 1', b" 5"],
        b"b": [b" 2"],
    }


def test_pages_that_are_others_each_time_are_not_laid_out_each_time(monkeypatch):
    """Else a server whose pages fit no layout would make each of them cost twice."""
    taken = []

    def spy(*arguments):
        taken.append(arguments)
        return layout_of(*arguments)

    monkeypatch.setattr(exposition, "layout_of", spy)
    reading = Reading()
    for number in range(3 * PAGES_MAX):
        lead = "#" + "x" * (2 * NEAR_BYTES) * (number % 2) + "\n"
        assert reading.read(lead + page(str(number))).waiting_requests == number
    assert len(taken) == 3
    # One that keeps to its layout has it again.
    for number in range(3 * PAGES_MAX):
        reading.read(page(str(number % 9)))
    assert len(taken) <= 7


def test_series_that_grow_beyond_what_is_kept_end_the_layout():
    """A page of the same size may have series where it had a comment."""
    lines = b"a 1\n" * KEPT_BYTES_MAX
    head = b"\n# TYPE a gauge\na 1\n"
    layout = layout_of(head + b"#" * len(lines), headings_of(WANTED), {b"a": 1})
    assert layout.changed(head + lines) is None


NAMES = st.sampled_from(
    ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc",
     "vllm:prompt_tokens_total", "vllm:cache_config_info", "vllm:lora_requests_info",
     "vllm:engine_sleep_state", "process_start_time_seconds", "other",
     "vllm:num_requests_waiting_by_reason"]
)  # fmt: skip
KINDS = st.sampled_from(["gauge"] * 14 + ["counter", ""])
LABELS = st.sampled_from(
    ["", '{engine="0"}', '{engine="1",model_name="m"}', '{a="x\\"y\\\\"}', '{a="}# TYPE "}',
     '{block_size="16",num_gpu_blocks="90"}', '{running_lora_adapters="a,b",max_lora="3"}',
     '{sleep_state="awake"}', "{ }"]
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(0, 10**9).map(str), st.floats(0, 1e9).map(str), st.sampled_from(["0", "0.0"])
)
ODD_LINES = st.sampled_from([" NaN", " -1", ' 5 # {x="y"} 1', " 5 1787260028703", "\t3\r"])
MALFORMED_LINES = st.sampled_from([" five", "{", '{a="b} 1'])
SOUND_LINES = st.builds("{} {}".format, LABELS, NUMBERS)
LINES = st.sampled_from([SOUND_LINES] * 50 + [ODD_LINES] * 4 + [MALFORMED_LINES]).flatmap(
    lambda lines: lines
)


class Block:
    """A metric on a page: its heading, if it has one, and its lines."""

    def __init__(self, name, kind, lines):
        self.name, self.kind, self.lines = name, kind, lines

    def text(self):
        heading = f"# TYPE {self.name} {self.kind}\n" if self.kind else ""
        return heading + "".join(f"{self.name}{line}\n" for line in self.lines)


METRICS = st.builds(Block, NAMES, KINDS, st.lists(LINES, max_size=3))
FILLERS = st.integers(1, 6).map(lambda count: Block("#", "", [" filled" * 20] * count))
BLOCKS = st.one_of(METRICS, METRICS, METRICS, FILLERS)


def text_of(blocks):
    return ("# HELP\n" + "".join(block.text() for block in blocks)).encode()


def is_second(block, blocks):
    return block.name != "#" and block.name in [each.name for each in blocks if each is not block]


def change(data, blocks, *, may_add):
    """Change a page in one way."""
    block = data.draw(st.sampled_from(blocks))
    where = data.draw(st.integers(0, len(blocks) - 1))
    match data.draw(st.integers(0, 14)):
        case 0 if len(blocks) > 1:
            blocks.remove(block)
        case 1 if may_add:
            new = data.draw(BLOCKS)
            if is_second(new, blocks):
                new.kind = ""  # the format allows one heading a metric
            blocks.insert(where, new)
        case 2:
            blocks.remove(block)
            blocks.insert(where, block)
        case 3 if block.name != "#" and not is_second(block, blocks):
            block.kind = data.draw(KINDS)
        case 4:
            block.lines.append(data.draw(LINES))
        case 5 if block.lines:
            block.lines.append(block.lines[0])
        case 6 if block.lines:
            block.lines.pop(0)
        case _ if block.lines and block.name != "#":
            block.lines[-1] = data.draw(LINES)
        case _:
            pass


def outcome(page, memory=None):
    """What reading gives, comparable although NaN differs from itself."""
    try:
        return repr(READER.read(page, {ENGINE_LABELS[0]: "vllm"}, memory))
    except ExpositionError as error:
        return str(error).partition(" bytes ")[2] or str(error)


@given(
    st.lists(BLOCKS, min_size=3, max_size=8, unique_by=lambda block: block.name),
    st.booleans(),
    st.data(),
)
def test_a_page_read_by_a_layout_gives_what_the_whole_page_gives(blocks, is_cut, data):
    """Whatever changes between scrapes; only what is new on a page may not count yet."""
    blocks.insert(0, Block("vllm:gpu_cache_usage_perc", "gauge", [" 0.5"]))
    memory = PageMemory()
    new = []
    for _ in range(data.draw(st.integers(1, PAGES_MAX - 1))):
        page = text_of(blocks)[: -is_cut or None]
        new = [block for block in new if block in blocks]
        allowed = [
            outcome(text_of([block for block in blocks if block not in unseen])[: -is_cut or None])
            for count in range(len(new) + 1)
            for unseen in combinations(new, count)
        ]
        assert outcome(page, memory) in allowed
        before = [block for block in blocks if block.text()]
        change(data, blocks, may_add=len(new) < 4)
        new += [block for block in blocks if block.text() and block not in before + new]


def histogram(*engines, kept="# TYPE vllm:time_to_first_token_seconds histogram\n", longer=""):
    """Of (sum, count) by rank, in the order of prometheus_client."""
    text = kept
    for rank, (total_s, count) in enumerate(engines):
        labels = f'engine="{rank}",model_name="a {{strange}} name"'
        for bound in ("0.1", "+Inf"):
            text += f'vllm:time_to_first_token_seconds_bucket{{{labels},le="{bound}"}} {count}\n'
        text += f"vllm:time_to_first_token_seconds_count{{{labels}}} {count}{longer}\n"
        text += f"vllm:time_to_first_token_seconds_sum{{{labels}}} {total_s}\n"
    return text


def first_tokens(metrics):
    return metrics.ttft_sum_s, metrics.ttft_count


def test_sum_and_count_of_a_histogram_are_followed_by_the_layout():
    """On every page, because decisions count on first outputs, and without reading the page whole."""
    reading = Reading(page(after=histogram((1.5, 3.0), (2.0, 4.0))))
    for number in range(2 * SELDOM_EVERY):
        grown = histogram((1.5, 3.0), (12.25 + number, 10004.0 + number))
        metrics = reading.read(page("5", after=grown, filling=390))
        assert first_tokens(metrics) == (13.75 + number, 10_007.0 + number)
        assert metrics.first_outputs_total == 10_007.0 + number
        assert metrics.waiting_requests == 5.0
    assert reading.memory._reading.used, "by the layout"


def caches(queried, hit):
    """By tier, as vLLM 0.32 has what it found."""
    found = "vllm:prompt_tokens_cached_by_source_total"
    return (
        "# TYPE vllm:prefix_cache_queries_total counter\n"
        f"vllm:prefix_cache_queries_total {queried}\n"
        f'# TYPE {found} counter\n{found}{{source="device"}} {hit}\n'
    )


def test_what_caches_found_is_looked_for_on_one_page_of_some():
    """Beside what was looked up there, of the same page; what follows it moves with them."""
    reading = Reading(page(after=caches(10, 5)))
    told = [
        reading.read(page("5", after=caches(100 + number, 50 + number) + USAGE, filling=390))
        for number in range(2 * SELDOM_EVERY)
    ]
    found = [(one.cache_queried_tokens, one.cache_hit_tokens, one.tier_hit_tokens) for one in told]
    seen = sorted(dict.fromkeys((queried, hit) for queried, hit, _ in found))
    assert len(seen) == 3
    assert seen[0] == (10.0, 5.0)
    assert all(queried - hit == 50.0 for queried, hit in seen[1:])
    assert all(tiers == {"device": hit} for _, hit, tiers in found)
    assert reading.memory._reading.used, "by the layout"


def test_a_histogram_is_found_where_it_moved():
    reading = Reading(page(after=histogram((1.0, 1.0))))
    for digits in range(1, SELDOM_EVERY + 1):
        metrics = reading.read(page("1" * digits, after=histogram((2.0, 2.0))))
    assert first_tokens(metrics) == (2.0, 2.0)
    assert reading.memory._reading.used


def test_a_rank_that_comes_is_seen_at_once():
    reading = Reading(page(after=histogram((1.0, 1.0))))
    reading.read(page(after=histogram((1.0, 1.0))))
    assert first_tokens(reading.read(page(after=histogram((1.0, 1.0), (2.0, 2.0))))) == (3.0, 3.0)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(histogram((1.0, 1.0), longer=' # {a="b"} 1'), id="an exemplar"),
        pytest.param(histogram(*[(1.0, 1.0)] * (LINES_ALONE_MAX + 1)), id="too many"),
        pytest.param(histogram((1.0, 1.0)) + histogram((1.0, 1.0)), id="twice"),
    ],
)
def test_an_odd_histogram_is_read_with_the_whole_page(text):
    """And right all the same."""
    reading = Reading(page(after=text))
    whole = READER.read(page(after=text).encode(), {})
    for _ in range(SELDOM_EVERY + 1):
        assert first_tokens(reading.read(page(after=text))) == first_tokens(whole)


def test_a_page_without_a_histogram_tells_of_no_first_token():
    assert all(math.isnan(told) for told in first_tokens(READER.read(page().encode(), {})))
