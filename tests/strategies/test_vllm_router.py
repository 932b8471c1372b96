"""vllm-router's policies that begin with the session."""

from collections import Counter

from tests.strategies.driven import Driven, text


def test_a_session_stays_where_it_went_whatever_it_says():
    """In both policies; another prompt does not move it, nor does a cold cache."""
    for name in ("vllm-router-cache-aware", "vllm-router-sticky-least-loaded"):
        pods = Driven(name, pods=4)
        home = pods.ask(text("first", 256), session_id="s")
        for at in range(8):
            pods.ask(text(f"other{at}", 256), session_id=f"t{at}")
        assert pods.ask(text("second", 256), session_id="s") == home, name


def test_a_session_stays_on_a_saturated_endpoint():
    """prime-rl #3255 and sglang #33959 ask for a bound; there is none."""
    for name in ("vllm-router-cache-aware", "vllm-router-sticky-least-loaded"):
        pods = Driven(name, pods=4)
        home = pods.send(text("turn", 64), session_id="s")
        went = [pods.send(text(f"turn{at}", 64), session_id="s") for at in range(200)]
        assert set(went) == {home}, name


def test_new_sessions_go_to_the_least_loaded():
    """One each, while the first is still busy."""
    pods = Driven("vllm-router-sticky-least-loaded", pods=4)
    went = Counter(pods.send(text("same", 64), session_id=f"s{at}") for at in range(40))
    assert went == dict.fromkeys(range(4), 10)


def test_without_a_session_prefixes_decide():
    """As in the first generation of SGLang's router."""
    pods = Driven("vllm-router-cache-aware", pods=4)
    home = pods.ask(text("shared", 256))
    assert {pods.ask(text("shared", 256) + text(f"{at}", 64)) for at in range(6)} == {home}
    assert pods.ask(text("cold", 256)) != home, "the smallest tree"


def test_a_session_is_forgotten_after_an_hour_or_with_its_endpoint():
    """Then it is new."""
    pods = Driven("vllm-router-sticky-least-loaded", pods=2)
    home = pods.send(text("a", 64), session_id="s")
    pods.now = 3_600.0
    for slot in range(2):
        pods.report(slot)
    assert pods.ask(text("a", 64), session_id="s") == home
    pods.now = 7_200.1
    for slot in range(2):
        pods.report(slot)
    assert pods.ask(text("a", 64), session_id="s") == 1 - home, "the other has nothing to do"
