import math

import pytest

from epp.core.knowledge import hit_accuracy as module
from epp.core.knowledge.hit_accuracy import (
    BYTES_PER_TOKEN_MAX,
    BYTES_PER_TOKEN_MIN,
    ERROR_BOUNDS,
    MODEL_CHARACTERS_MAX,
    MODELS_MAX,
    Expected,
    HitAccuracy,
    Side,
    Verdict,
)
from epp.core.types import EndpointMetrics

WINDOW_S = 30.0
REQUESTS = 40
TOKENS = 1_000


def expected(predicted=0, tokens=TOKENS, *, prompts=1, **fields):
    return Expected(
        prompt_tokens=tokens,
        predicted_tokens=predicted,
        prompt_bytes=4 * tokens,
        prompts=prompts,
        **fields,
    )


def page(queried, hit, requests=math.nan, **fields):
    return EndpointMetrics(
        cache_queried_tokens=queried, cache_hit_tokens=hit, ttft_count=requests, **fields
    )


class Pod:
    """One engine at slot 0, what is sent to it, and what it counts."""

    def __init__(self, accuracy=None, slot=0):
        self.accuracy = accuracy or HitAccuracy()
        self.slot = slot
        self.now = 0.0
        self.queried = self.hit = self.requests = 0.0
        self.scrape()

    def scrape(self, told=None):
        """What came of it; `told` in the place of its own page."""
        metrics = told or page(self.queried, self.hit, self.requests)
        return self.accuracy.scraped(self.slot, metrics, self.now)

    def window(
        self,
        *,
        predicted=0.5,
        found=0.5,
        bytes_per_token=4.0,
        others=0,
        others_found=0.0,
        peers=0,
        model="llama",
        told=None,
        **fields,
    ):
        """Requests of ours, of peers and of `others`, and the scrape at the window's end."""
        for _ in range(REQUESTS):
            self.accuracy.decided(self.slot, model, expected(int(predicted * TOKENS), **fields))
        for _ in range(peers):
            self.accuracy.peer_decided(self.slot, self.now)
        tokens = TOKENS * 4.0 / bytes_per_token
        ours = (REQUESTS + peers) * tokens
        self.queried += ours + others * tokens
        self.hit += ours * found + others * tokens * others_found
        self.requests += REQUESTS + peers + others
        self.now += WINDOW_S
        return self.scrape(told)

    @property
    def compared(self):
        return self.accuracy.comparison(self.slot)

    @property
    def verdict(self):
        return self.accuracy.verdict(self.slot)


def test_shares_of_the_same_requests_are_compared():
    pod = Pod()
    assert (pod.verdict, pod.compared) == (Verdict.WAITING, None)
    correction = pod.window(predicted=0.75, found=0.5)
    assert pod.verdict is Verdict.MEASURED
    assert pod.compared.predicted == pytest.approx(0.75)
    assert pod.compared.engine == pytest.approx(0.5)
    assert pod.compared.known_share == 1.0
    assert correction.error == pytest.approx(0.25)


def test_a_token_of_another_size_is_no_error():
    """Sums of tokens would differ by half, shares do not."""
    pod = Pod()
    assert pod.window(bytes_per_token=2.0).error == pytest.approx(0.0)


def test_a_window_weighs_half_of_the_next():
    pod = Pod()
    pod.window(predicted=0.0, found=0.3)
    pod.window(predicted=0.6, found=0.3)
    assert pod.compared.predicted == pytest.approx(0.4)
    assert pod.compared.engine == pytest.approx(0.3)


def test_a_window_has_its_requests_and_its_time():
    """One of few requests goes on until it is too old, and then counts only with some."""
    pod = Pod()
    pod.now = module.WINDOW_S_MIN
    for _ in range(module.WINDOW_REQUESTS_MIN - 1):
        pod.accuracy.decided(0, "llama", expected())
    pod.queried = 1_000.0
    assert pod.scrape() is None
    pod.now = module.WINDOW_S_MAX
    assert pod.scrape() is not None
    assert pod.verdict is Verdict.MEASURED
    for _ in range(module.FEW_REQUESTS_MIN):
        pod.accuracy.decided(0, "llama", expected(TOKENS))
    pod.queried += 1_000.0
    pod.now += module.WINDOW_S_MAX
    assert pod.scrape() is not None


def test_what_is_old_is_not_shown():
    """An endpoint that gets next to nothing is not compared by what it got an hour ago."""
    pod = Pod()
    pod.window(predicted=0.9, found=0.1)
    for _ in range(module.FEW_REQUESTS_MIN - 1):
        pod.accuracy.decided(0, "llama", expected(TOKENS))
    pod.now += module.WINDOW_S_MAX - 1.0
    assert pod.scrape() is None
    assert pod.compared is not None
    pod.now += 1.0
    assert pod.scrape() is None
    assert (pod.verdict, pod.compared) == (Verdict.WAITING, None)
    pod.window(predicted=0.5)
    assert pod.compared.predicted == pytest.approx(0.5), "what was sent in vain is in no window"


def test_requests_of_others_widen_what_ours_can_be():
    """A third of the requests are of nobody who is known, and found nothing: ours found 0.6."""
    pod = Pod()
    correction = pod.window(predicted=0.6, found=0.6, others=20)
    compared = pod.compared
    assert compared.known_share == pytest.approx(2 / 3)
    assert compared.engine == pytest.approx(0.4)
    assert compared.low <= 0.6 <= compared.high
    assert correction.error == 0.0


def test_what_cannot_be_whoever_the_others_are_is_an_error():
    pod = Pod()
    correction = pod.window(predicted=0.9, found=0.2, others=20)
    assert correction.error == pytest.approx(0.9 - 0.2, abs=0.01)


def test_requests_of_peers_are_known():
    """Of two replicas that tell each other all requests are known, and shares are of all."""
    pod = Pod()
    assert pod.window(predicted=0.6, found=0.5, peers=REQUESTS).error == pytest.approx(0.1)
    assert pod.compared.known_share == 1.0


def test_what_peers_told_of_before_the_window_is_no_part_of_it():
    pod = Pod()
    pod.window()
    for _ in range(REQUESTS):
        pod.accuracy.peer_decided(0, pod.now - 1.0)
    pod.window(others=REQUESTS)
    assert pod.compared.known_share < 0.9


def test_an_engine_that_does_not_count_requests_corrects_nothing():
    pod = Pod()
    told = page(REQUESTS * TOKENS * 1.0, 0.0)
    correction = pod.window(predicted=0.9, told=told)
    assert correction.error == 0.0
    assert pod.compared.predicted == pytest.approx(0.9)
    assert pod.compared.engine == 0.0
    assert [sum(errors.counts) for errors in pod.accuracy.errors.values()] == [0, 0]


def test_a_request_whose_prompt_is_not_known_is_that_of_another():
    """It is neither believed nor a share of anything, and its engine counts it."""
    pod = Pod()
    for _ in range(20):
        pod.accuracy.decided(0, "", expected(tokens=0))
        pod.accuracy.withdrawn(0, expected(tokens=0), pod.now)
    pod.window(predicted=0.6, others=20)
    assert pod.compared.predicted == pytest.approx(0.6)
    assert pod.compared.known_share == pytest.approx(2 / 3)
    assert [model for model, _ in pod.accuracy.models()] == ["llama"]


def test_each_prompt_is_a_request_to_the_engine():
    """Of two in each of ours, so that those of the engine are all known."""
    pod = Pod()
    pod.window(prompts=2, others=REQUESTS, others_found=0.5)
    assert pod.compared.known_share == 1.0


def test_what_another_index_would_have_predicted_stands_beside_it():
    pod = Pod()
    pod.window(predicted=0.75, found=0.75, indexes={"approx": 250})
    assert pod.compared.error == pytest.approx(0.0)
    assert pod.compared.indexes == {"approx": pytest.approx(0.25)}
    for _ in range(10):
        wrong = expected(TOKENS, indexes={"approx": TOKENS})
        pod.accuracy.decided(0, "llama", wrong)
        pod.accuracy.withdrawn(0, wrong, pod.now)
    pod.window(predicted=0.75, found=0.75, indexes={"approx": 250})
    assert pod.compared.indexes == {"approx": pytest.approx(0.25)}
    pod.window()
    assert pod.compared.indexes == {}, "it is not asked any more"


def test_a_withdrawn_request_is_in_no_share():
    pod = Pod()
    pod.accuracy.decided(0, "llama", expected(TOKENS))
    pod.accuracy.withdrawn(0, expected(TOKENS), pod.now)
    pod.window(predicted=0.5)
    assert pod.compared.predicted == pytest.approx(0.5)


def test_a_request_of_an_earlier_window_is_not_taken_from_this_one():
    pod = Pod()
    pod.window(predicted=0.5)
    pod.accuracy.withdrawn(0, expected(500), 0.0)
    pod.window(predicted=0.5)
    assert pod.compared.predicted == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        (page(math.nan, math.nan), Verdict.UNTOLD),
        (page(100_000.0, math.nan), Verdict.UNTOLD),
        (page(40_000.0, 20_000.0, 40.0), Verdict.STILL),
        (page(10_000.0, 20_000.0, 80.0), Verdict.FELL),
        (page(80_000.0, 10_000.0, 80.0), Verdict.FELL),
        (page(80_000.0, 30_000.0, 3.0), Verdict.FELL),
        (page(80_000.0, 80_000.0, 80.0), Verdict.IMPOSSIBLE),
        (page(40_000.0, 30_000.0, 80.0), Verdict.IMPOSSIBLE),
        (page(math.inf, 30_000.0, 80.0), Verdict.IMPOSSIBLE),
    ],
)
def test_counters_that_cannot_be_used_say_nothing(told, verdict):
    """After a good window: nothing is shown, nothing is corrected, and the next good one counts."""
    pod = Pod()
    pod.window()
    assert pod.window(told=told) is None
    assert (pod.verdict, pod.compared) == (verdict, None)
    sizes = dict(pod.accuracy.models())
    pod.scrape()  # what the engine says from now on is good again
    assert pod.window(predicted=0.25) is not None
    assert pod.verdict is Verdict.MEASURED
    assert pod.compared.predicted == pytest.approx(0.25)
    assert pod.compared.engine == pytest.approx(0.5)
    assert dict(pod.accuracy.models()) == pytest.approx(sizes)


def test_a_page_without_counters_at_one_pod_leaves_the_others():
    accuracy = HitAccuracy()
    mute, other = Pod(accuracy, 0), Pod(accuracy, 1)
    mute.window(told=page(math.nan, math.nan))
    other.window(predicted=0.5)
    assert mute.verdict is Verdict.UNTOLD
    assert other.compared.predicted == pytest.approx(0.5)


def test_counters_that_come_back_are_waited_for():
    pod = Pod()
    pod.scrape(page(math.nan, math.nan))
    assert pod.verdict is Verdict.UNTOLD
    pod.scrape()
    assert pod.verdict is Verdict.WAITING


def test_tiers_are_shares_of_what_was_looked_up():
    pod = Pod()
    pod.accuracy.forget(0)
    pod.scrape(page(0.0, 0.0, 0.0, tier_hit_tokens={"device": 0.0, "host": 50.0}))
    told = page(40_000.0, 20_000.0, 40.0, tier_hit_tokens={"device": 10_000.0, "host": 10_050.0})
    pod.window(told=told)
    assert pod.compared.tiers == {"device": 0.25, "host": 0.25}


def test_a_tier_that_fell_or_came_is_not_told():
    pod = Pod()
    pod.accuracy.forget(0)
    pod.scrape(page(0.0, 0.0, 0.0, tier_hit_tokens={"device": 9.0}))
    pod.window(told=page(40_000.0, 20_000.0, 40.0, tier_hit_tokens={"device": 1.0, "disk": 5.0}))
    assert pod.compared.tiers == {}


def test_an_endpoint_that_left_is_forgotten():
    pod = Pod()
    pod.window()
    pod.accuracy.forget(0)
    assert (pod.verdict, pod.compared) == (Verdict.WAITING, None)
    pod.accuracy.forget(99)


def test_errors_are_counted_by_their_side():
    pod = Pod()
    pod.window(predicted=0.75, found=0.5)
    errors = pod.accuracy.errors
    assert errors[Side.OVER].counts[ERROR_BOUNDS.index(0.3)] == 1
    assert errors[Side.OVER].total == pytest.approx(0.25)
    assert sum(errors[Side.UNDER].counts) == 0
    pod.accuracy.forget(0)
    pod.scrape()
    pod.window(predicted=0.0, found=0.75)
    assert errors[Side.UNDER].counts[-1] == 1, "above all bounds"


# Bytes a token.


def test_bytes_of_a_token_are_learnt_by_model():
    pod = Pod()
    pod.window(bytes_per_token=2.0, model="code")
    pod.window(bytes_per_token=5.0, model="prose")
    assert pod.accuracy.bytes_per_token("code") == pytest.approx(2.0)
    assert pod.accuracy.bytes_per_token("prose") == pytest.approx(5.0)
    assert 2.0 < pod.accuracy.bytes_per_token("another") < 5.0, "that of the pool"


def test_requests_of_others_do_not_change_the_bytes_of_a_token():
    pod = Pod()
    pod.window(bytes_per_token=2.0, others=80)
    assert pod.accuracy.bytes_per_token("llama") == pytest.approx(2.0)


def test_of_little_nothing_is_learnt():
    pod = Pod()
    assert pod.accuracy.bytes_per_token("llama") is None
    pod.window(bytes_per_token=40.0)
    assert pod.accuracy.bytes_per_token("llama") is None, "4,000 tokens"
    assert list(pod.accuracy.models()) == []


def test_bytes_of_a_prompt_that_was_withdrawn_are_not_counted():
    pod = Pod()
    for _ in range(REQUESTS):
        pod.accuracy.decided(0, "llama", expected())
        pod.accuracy.withdrawn(0, expected(), pod.now)
    pod.window(bytes_per_token=2.0)
    assert pod.accuracy.bytes_per_token("llama") == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("bytes_per_token", "learnt"), [(0.001, BYTES_PER_TOKEN_MIN), (8_000.0, BYTES_PER_TOKEN_MAX)]
)
def test_a_lie_about_tokens_is_bounded(monkeypatch, bytes_per_token, learnt):
    monkeypatch.setattr(module, "EVIDENCE_TOKENS_MIN", 1)
    pod = Pod()
    pod.window(bytes_per_token=bytes_per_token)
    assert pod.accuracy.bytes_per_token("llama") == learnt


def test_so_many_models_and_no_more():
    pod = Pod()
    for number in range(MODELS_MAX + 3):
        pod.window(model=f"model-{number}")
    known = [model for model, _ in pod.accuracy.models()]
    assert len(known) == MODELS_MAX
    assert known[0] == "model-3"


def test_a_name_that_is_too_long_is_not_kept():
    pod = Pod()
    pod.window(model="m" * (MODEL_CHARACTERS_MAX + 1))
    pod.window(model="m" * MODEL_CHARACTERS_MAX)
    assert [len(model) for model, _ in pod.accuracy.models()] == [MODEL_CHARACTERS_MAX]


def test_a_mixed_window_is_of_no_model():
    pod = Pod()
    pod.accuracy.decided(0, "another", expected())
    pod.window(bytes_per_token=2.0)
    assert list(pod.accuracy.models()) == []
    assert pod.accuracy.bytes_per_token("llama") == pytest.approx(2.0, rel=0.05)
