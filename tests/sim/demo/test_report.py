"""What the demo writes: numbers that can be checked by hand and a page that needs nothing."""

import json
from html.parser import HTMLParser

import msgspec
import pytest

from sim.demo.client import RequestOutcome
from sim.demo.report import SCHEMA, Summary, render_report, summarise


def outcome(ttft_s, *, prompt=100, cached=0, error=""):
    return RequestOutcome(
        conversation=0,
        turn=0,
        sent_at_s=0.0,
        ttft_s=ttft_s,
        prompt_tokens=prompt,
        cached_tokens=cached,
        error=error,
    )


OUTCOMES = [outcome(index / 1000, cached=index % 2 * 50) for index in range(1, 102)]


def test_a_summary_counts_what_was_answered():
    """Percentiles and hit rate over whole answers; failed requests are counted as errors."""
    found = summarise([*OUTCOMES, outcome(9.0, error="no")], [51, 50])
    assert found.requests == 102
    assert found.errors == 1
    assert found.ttft_ms == {"p50": 51.0, "p90": 91.0}
    assert found.prefix_hit_rate == pytest.approx(51 * 50 / (101 * 100), abs=1e-4)
    assert found.requests_per_pod == [51, 50]


def test_nothing_answered_is_no_number():
    """Without an answer there is no percentile, and the page still renders."""
    empty = summarise([outcome(0.0, error="no")], [0])
    assert empty.ttft_ms == {"p50": None, "p90": None}
    assert empty.prefix_hit_rate == 0
    summary = Summary(schema=SCHEMA, seed=1, arms={"round_robin": empty})
    assert "No request was answered" in render_report(summary, {"round_robin": []}, [])


class Page(HTMLParser):
    """Collects tags with their attributes, and the text."""

    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.text += text


def summary_of_both():
    return Summary(
        schema=SCHEMA,
        seed=7,
        arms={
            "round_robin": summarise(OUTCOMES, [26, 25, 25, 25]),
            "homing": summarise(OUTCOMES, [40, 31, 20, 10]),
        },
    )


def test_the_summary_has_the_documented_shape():
    """summary.json: schema, seed and both arms with exactly the promised members."""
    written = json.loads(msgspec.json.encode(summary_of_both()))
    assert set(written) == {"schema", "seed", "arms"}
    assert (written["schema"], written["seed"]) == (1, 7)
    assert set(written["arms"]) == {"round_robin", "homing"}
    for arm in written["arms"].values():
        assert set(arm) == {
            "requests",
            "errors",
            "ttft_ms",
            "prefix_hit_rate",
            "requests_per_pod",
        }
        assert set(arm["ttft_ms"]) == {"p50", "p90"}


def test_the_page_opens_offline():
    """Nothing is fetched, and nothing may be; both arms are in the charts, values are escaped."""
    outcomes = {"round_robin": OUTCOMES, "homing": OUTCOMES}
    source = render_report(summary_of_both(), outcomes, [("Again", "sim <demo> & more")])
    page = Page()
    page.feed(source)
    names = [tag for tag, _ in page.tags]
    assert not {"link", "img", "iframe"} & set(names)
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
    assert source.count("url(") == source.count("url(#")
    assert "://" not in source
    policies = [found["content"] for _, found in page.tags if "http-equiv" in found]
    assert [policy.split(";")[0] for policy in policies] == ["default-src 'none'"]
    # The first chart is drawn for screens that are wide, and for phones.
    assert names.count("svg") == 2 + 1
    assert names.count("polyline") == 2 * 2
    assert names.count("rect") == 8
    shares = [attributes["style"] for tag, attributes in page.tags if "style" in attributes]
    assert shares == ["width:25.2%", "width:25.2%"]
    assert page.text.count("Round robin, pod 0: 26") == 1
    assert "sim <demo> & more" in page.text
    assert "Homing" in page.text
    assert "Seed 7" in page.text
