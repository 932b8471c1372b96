"""production-stack's estimate of the time to the first token."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.candidates import Affinity
from epp.strategies.outstanding_work import AttentionWorkSettings, OutstandingWork, work
from tests.builders import candidates, request
from tests.strategies.driven import Driven, text


def best(matched, attended=None, *, uncached=None, prompt_tokens=640, **columns):
    nothing = [0.0] * len(matched)
    recent = {
        "attended_tokens": np.array(attended or nothing),
        "uncached_tokens": np.array(uncached or nothing),
    }
    known = Affinity(np.array(matched), 10, recent)
    some = candidates(len(matched), affinities={AttentionWorkSettings.type_name: known}, **columns)
    scores = OutstandingWork().score(request(prompt_tokens=prompt_tokens), some)
    return np.flatnonzero(scores == 1.0).tolist()


@given(tokens=st.integers(0, 200), data=st.data())
def test_work_is_the_sum_of_what_each_uncached_token_attends_to(tokens, data):
    """Token number i, from 1, attends to i tokens."""
    cached = data.draw(st.integers(0, tokens))
    assert work(tokens, np.array([float(cached)]))[0] == sum(range(cached + 1, tokens + 1))


def test_the_end_of_a_long_prompt_costs_more_than_its_beginning():
    """With half of 640 tokens cached 3/4 of the work is left, and 200 tokens ahead are too much."""
    ahead = {"inflight_prefill_tokens": [100.0, 0.0]}
    assert best([5, 0], [320.0, 0.0], **ahead) == [0], "153,760 + 32,000 against 205,120"
    assert best([5, 0], [600.0, 0.0], **ahead) == [1], "153,760 + 60,000"


def test_work_ahead_without_a_known_context_is_taken_to_be_as_long_as_this():
    """Of a peer's requests only the tokens are known: 100 * 320.5."""
    assert best([5, 0], inflight_prefill_tokens=[100.0, 0.0]) == [0]
    assert best([5, 0], inflight_prefill_tokens=[170.0, 0.0]) == [1]


def test_what_waits_in_the_engine_has_no_first_token():
    """However long ago it was sent: 3 requests of 100 tokens each, or 400 of our own count."""
    waiting = {"waiting_requests": [3.0, math.nan], "uncached": [100.0, 100.0]}
    assert best([5, 0], [170.0, 0.0], **waiting) == [0], "153,760 + 51,000 against 205,120"
    assert best([5, 0], [180.0, 0.0], **waiting) == [1], "153,760 + 54,000"
    assert best([5, 0], [170.0, 0.0], inflight_prefill_tokens=[400.0, 0.0], **waiting) == [1]


def test_ties_go_to_the_last_that_holds_nothing():
    """Those that hold something are compared first, and a later one wins."""
    assert best([0, 0, 0]) == [2]
    assert best([10, 10, 10]) == [2]
    assert best([10, 0, 10]) == [2]
    even = {"inflight_prefill_tokens": [640.0, 0.0, 640.0]}
    assert best([10, 0, 10], [320.5, 0.0, 320.5], **even) == [1], "all have 205,120 to do"


def test_contexts_are_learnt_from_what_was_sent():
    """1,280 tokens of which 640 are held: each of the rest attends to 960.5."""
    index = AttentionWorkSettings().open()
    first, second = text("first", 640), text("second", 640)

    def attended(column="attended_tokens"):
        return index.match(request(), 2, 0.0).columns[column].tolist()

    def send(prompt):
        index.record(request(prompts=(prompt.encode(),), prompt_tokens=len(prompt) // 4), 0, 0.0)

    assert attended() == [0.0, 0.0]
    send(first)
    assert attended() == [320.5, 0.0]
    index.forget(0)
    send(first)
    send(first)
    assert attended() == [320.5, 0.0], "what is held adds nothing"
    send(first + second)
    expected = (0.9 * 640 * 320.5 + 640 * 960.5) / (0.9 * 640 + 640)
    assert np.allclose(attended(), [expected, 0.0])
    assert np.allclose(attended("uncached_tokens"), [640.0, 0.0])
    index.forget(0)
    assert attended() == [0.0, 0.0]


def test_cold_prompts_go_to_the_last_endpoint_while_nothing_is_pending():
    """As SGLang's router pins them to the first; with work pending they spread."""
    pods = Driven("production-stack-ttft", pods=3)
    assert {pods.ask(text(f"cold{at}", 256)) for at in range(6)} == {2}
    assert {pods.send(text(f"busy{at}", 256)) for at in range(3)} == {0, 1, 2}
    pods = Driven("production-stack-ttft-fixed", pods=3)
    assert {pods.ask(text(f"cold{at}", 256)) for at in range(6)} == {0, 1, 2}


def test_a_prefix_is_left_when_its_holder_has_more_work_ahead_than_it_saves():
    """What #670 is for: prefix-aware routing alone would queue behind a long prompt."""
    pods = Driven("production-stack-ttft", pods=2)
    home = pods.ask(text("system", 256))
    asked = text("system", 256) + text("question", 64)
    assert pods.ask(asked) == home
    pods.send(text("system", 256) + text("a very long document", 6_000))
    assert pods.ask(asked) == 1 - home
