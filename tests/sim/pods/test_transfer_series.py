"""The metrics pages of engines that hand KV blocks over."""

import re

from sim.engine.engine import Engine, EngineSettings
from sim.engine.legs import KVConnector
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest
from sim.pods.exposition import MetricsPage


def made(connector):
    settings = EngineSettings(blocks_total=100, kv_connector=connector)
    page = MetricsPage(model="m", settings=settings, max_model_len_tokens=4_096)
    return Engine(settings, find_profile(DEFAULT_PROFILE)), page


def value(page, series):
    found = re.search(rf"^vllm:{re.escape(series)} (\S+)$", page.render().decode(), re.MULTILINE)
    assert found, f"{series} is not on the page"
    return float(found[1])


def named(name, **labels):
    told = {"engine": "0", "model_name": "m", **labels}
    return name + "{" + ",".join(f'{key}="{told[key]}"' for key in sorted(told)) + "}"


def leg(name, *, prompt=80, output=3, fetches=True):
    one = EngineRequest(
        name, prompt_tokens=prompt, output_tokens=output, chain=[hash((name, n)) for n in range(5)]
    )
    one.fetches = fetches
    return one


def waiting(page):
    reasons = ("capacity", "deferred")
    return [value(page, named("num_requests_waiting_by_reason", reason=one)) for one in reasons]


def stages(page):
    names = ("waiting_to_start", "in_progress", "completed_waiting")
    return [value(page, named("num_requests_kv_fetch_by_stage", stage=one)) for one in names]


def test_a_leg_in_transfer_is_deferred_and_one_without_room_is_not():
    engine, page = made(KVConnector())
    legs = [leg("a", prompt=1_400), leg("b", prompt=1_400)]
    for one in legs:
        engine.submit(one, 0.0)
    engine.begin(0.0)
    page.show(engine.snapshot(), 0.0)
    assert value(page, named("num_requests_waiting")) == 2
    assert waiting(page) == [1, 1]
    assert stages(page) == [1, 1, 0]
    assert value(page, named("kv_cache_usage_perc")) == 88 / 99
    engine.received(legs[0], 1.0)
    page.show(engine.snapshot(), 1.0)
    assert stages(page) == [1, 0, 1]
    assert waiting(page) == [1, 1]


def test_fetched_tokens_have_a_source_of_their_own():
    """Tokens by source add up to all prompt tokens."""
    engine, page = made(KVConnector())
    engine.submit(leg("a", fetches=False), 0.0)
    now = 0.0
    while (step := engine.step(now)) is not None:
        page.observe(step, engine.snapshot(), 0.0)
        now = step.ends_at
    fetching = leg("a", prompt=96)
    fetching.chain = [*fetching.chain, 1]
    fetching.chain_ends = range(1, 7)
    engine.submit(fetching, now)
    engine.begin(now)
    engine.received(fetching, now)
    assert page.transfers is not None
    page.transfers.transferred(2_000.0, 0.02)
    while (step := engine.step(now)) is not None:
        page.observe(step, engine.snapshot(), 0.0)
        now = step.ends_at
    sources = {
        source: value(page, named("prompt_tokens_by_source_total", source=source))
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert sources == {"local_compute": 80, "local_cache_hit": 80, "external_kv_transfer": 16}
    assert value(page, named("prompt_tokens_total")) == 176
    assert value(page, named("prompt_tokens_cached_total")) == 96
    assert value(page, named("external_prefix_cache_queries_total")) == 16
    assert value(page, named("external_prefix_cache_hits_total")) == 16
    assert value(page, named("prompt_tokens_cached_by_source_total", source="p2p")) == 16
    assert value(page, named("nixl_bytes_transferred_sum")) == 2_000
    assert value(page, named("nixl_xfer_time_seconds_count")) == 1


def test_failures_and_expired_leases_are_counted():
    _, page = made(KVConnector())
    assert page.transfers is not None
    page.transfers.transfer_failed()
    page.transfers.lease_expired()
    page.reject("max_num_queued_reqs")
    assert value(page, named("nixl_num_failed_transfers_total")) == 1
    assert value(page, named("nixl_num_failed_notifications_total")) == 0
    assert value(page, named("nixl_num_kv_expired_reqs_total")) == 1
    assert value(page, 'admission_rejections_total{model_name="m",reason="max_num_queued_reqs"}')


def test_a_usual_engine_has_no_such_series():
    _, page = made(None)
    assert page.transfers is None
    text = page.render().decode()
    assert "nixl" not in text
    assert "kv_fetch" not in text
