"""Events through bytes: the scrape and the endpoint again, and the documentation's list of them."""

import math
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from epp.core.decision.inputs import IndexMemoryLimited, ScrapeFailed, Tick
from epp.core.journal.events import (
    PLAIN,
    Asked,
    Event,
    Observed,
    Opened,
    endpoint_of,
    member_of,
    page_of,
    plain_event,
    plain_input,
    same_page,
    shape_of,
)
from epp.core.journal.lines import Salt
from epp.core.types import AdapterReport, EndpointMetrics, KvTransfers, MetricsTarget
from epp.journal.records import Record
from tests.builders import endpoint

PAGE = Path("docs/capture-format.md").read_text()
SALT = Salt(b"a salt of twenty bytes")
WHOLE = EndpointMetrics(
    waiting_requests=1.0,
    running_requests=2.0,
    kv_cache_usage=0.3,
    cache_queried_tokens=4.0,
    first_outputs_total=7.0,
    answers_total=11.0,
    answer_tokens_total=12.0,
    cache_hit_tokens=5.0,
    ttft_count=10.0,
    block_size_tokens=6,
    blocks_total=7,
    process_started_at_s=8.0,
    requests_total=9.0,
    rejections_total=3.0,
    attributes={"load/me": 0.1},
    asleep=True,
)
"""All but adapters, whose names are hashed."""


def through_bytes(event):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event)


@pytest.mark.parametrize(
    "metrics",
    [
        EndpointMetrics(),
        EndpointMetrics(waiting_requests=2.0, kv_cache_usage=0.1 + 0.2, requests_total=1e9 + 0.5),
        EndpointMetrics(running_requests=1.0, blocks_total=7, block_size_tokens=16, asleep=True),
        WHOLE,
    ],
)
def test_a_scrape_comes_back_as_it_was(metrics):
    """What it did not tell is not told again; floats are exact."""
    page = page_of(metrics, SALT)
    again = through_bytes(Observed(at_s=0.1 + 0.2, slot=1, page=page)).page
    assert same_page(again, page)
    told = msgspec.structs.asdict(again)
    for name, value in msgspec.structs.asdict(metrics).items():
        assert told[name] == value or (math.isnan(told[name]) and math.isnan(value))


def test_what_a_scrape_does_not_tell_is_not_written():
    """Whichever NaN stands for it, and times to first token, by which nothing is decided."""
    nan = float("nan")
    metrics = EndpointMetrics(waiting_requests=nan, running_requests=2.0, ttft_sum_s=1.0)
    page = page_of(metrics, SALT)
    assert msgspec.json.encode(Observed(slot=0, page=page)) == (
        b'{"event":"observed","slot":0,"page":{"running_requests":2.0}}'
    )
    assert same_page(page, page_of(EndpointMetrics(running_requests=2.0), SALT))
    assert not same_page(page, page_of(EndpointMetrics(running_requests=3.0), SALT))


def test_a_whole_scrape_tells_every_field():
    """So that the test above forgets none that is added; nothing is decided by what is left out."""
    unknown = msgspec.structs.asdict(EndpointMetrics())
    told = msgspec.structs.asdict(WHOLE)
    left_out = {name for name, value in told.items() if value is unknown[name]}
    assert left_out == {"adapters", "ttft_sum_s", "tier_hit_tokens", "transfers"}


def test_of_kv_transfers_what_decisions_depend_on_is_kept():
    told = KvTransfers(received_tokens=5.0, received_bytes=1e9, ended=2.0, ended_s=0.5, failed=1.0)
    kept = page_of(EndpointMetrics(transfers=told), SALT).transfers
    assert (kept.received_tokens, kept.received_bytes) == (5.0, 1e9)
    assert (kept.ended, kept.ended_s) == (2.0, 0.5)
    assert math.isnan(kept.failed)
    assert page_of(EndpointMetrics(transfers=KvTransfers(failed=1.0)), SALT).transfers is None


def test_adapters_are_named_as_requests_name_them():
    """So that a request finds its adapter, and nobody else does."""
    report = AdapterReport(active=frozenset({"sql"}), gpu=frozenset({"chat"}), slots_max=4)
    found = page_of(EndpointMetrics(adapters=report), SALT).adapters
    assert found.active == {SALT.name("sql")}
    assert found.gpu == {SALT.name("chat")}
    assert found.slots_max == 4


@pytest.mark.parametrize("metrics", [None, MetricsTarget(port=9)])
def test_an_endpoint_comes_back_but_for_where_it_is_scraped(metrics):
    """Whether it is scraped decides when it is ready."""
    one = endpoint(3, labels={"a": "b"}, incarnation="2", ready_after_s=5.0, metrics=metrics)
    again = endpoint_of(member_of(3, one))
    assert msgspec.structs.replace(again, metrics=metrics) == one
    assert (again.metrics is None) is (metrics is None)


@pytest.mark.parametrize("given", [Tick(), IndexMemoryLimited(0.25)])
def test_an_input_that_is_noted_as_it_is_comes_back(given):
    """With the time, and by the tag of its event."""
    event = through_bytes(plain_event(given, 1.5))
    assert (event.at_s, plain_input(event)) == (1.5, given)


def test_every_input_that_is_noted_as_it_is_is_among_those_above():
    """Others, and their events, have no plain form."""
    assert set(PLAIN) == {Tick, IndexMemoryLimited}
    assert plain_event(ScrapeFailed(slot=1, answered=True), 0.0) is None
    assert plain_input(Observed(slot=1)) is None


def test_the_documentation_lists_every_event():
    """And its example of the first line is one."""
    listed = set(re.findall(r"`(\w+)`", PAGE.partition("| event |")[2].partition("\n\n")[0]))
    names = {kind.__struct_config__.tag for kind in get_args(Record)}
    assert names <= listed
    examples = re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)
    (example,) = [one for one in examples if '"event"' in one]
    opened = msgspec.json.decode(example, type=Record)
    assert isinstance(opened, Opened)
    assert set(msgspec.json.decode(example)) == {"event", *Opened.__struct_fields__}


def test_a_shape_has_no_text():
    """Names and blocks are keyed hashes; a length beyond all limits is cut."""
    asked = Asked(
        *("c4n4ry", "c4n4ry", "c4n4ry", 10**9, 0, -1),
        chains=(b"c4n4ry--" * 2, b""),
        token_chains=(b"c4n4ry--",),
        media=(b"c4n4ry--" * 4,),
        known_tokens=10**9,
    )
    shape = shape_of(asked, SALT)
    assert b"c4n4ry" not in msgspec.msgpack.encode(shape)
    assert (len(shape.model), len(shape.session), len(shape.cache_salt)) == (16, 16, 16)
    assert list(map(len, shape.chains)) == [16, 0]
    assert (len(shape.media), len(shape.token_chains[0])) == (8, 8)
    assert (shape.prompt_tokens, shape.output_tokens_max, shape.known_tokens) == (10**7, None, 0)
