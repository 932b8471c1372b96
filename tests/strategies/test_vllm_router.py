"""vllm-router's policies: one of sessions, one of prefixes."""

from collections import Counter

from tests.strategies.driven import Driven, text


def test_a_session_stays_where_it_went_whatever_it_says():
    """Another prompt does not move it, nor does a cold cache."""
    pods = Driven("vllm-router-sticky-least-loaded", pods=4)
    home = pods.ask(text("first", 256), session_id="s")
    for at in range(8):
        pods.ask(text(f"other{at}", 256), session_id=f"t{at}")
    assert pods.ask(text("second", 256), session_id="s") == home


def test_a_session_stays_on_a_saturated_endpoint():
    """prime-rl #3255 and sglang #33959 ask for a bound; there is none."""
    pods = Driven("vllm-router-sticky-least-loaded", pods=4)
    home = pods.send(text("turn", 64), session_id="s")
    went = [pods.send(text(f"turn{at}", 64), session_id="s") for at in range(200)]
    assert set(went) == {home}


def test_new_sessions_go_to_the_least_loaded():
    """One each, while the first is still busy."""
    pods = Driven("vllm-router-sticky-least-loaded", pods=4)
    went = Counter(pods.send(text("same", 64), session_id=f"s{at}") for at in range(40))
    assert went == dict.fromkeys(range(4), 10)


def test_prefixes_decide_whatever_the_session():
    """As in the first generation of SGLang's router: 0.1.17 does not ask for sessions there."""
    pods = Driven("vllm-router-cache-aware", pods=4)
    home = pods.send(text("shared", 256), session_id="s")
    went = {pods.send(text("shared", 256) + text(f"{at}", 64)) for at in range(6)}
    assert went == {home}
    others = [pods.send(text(f"cold{at}", 256), session_id="s") for at in range(3)]
    assert len({home, *others}) == 4, "the fewest requests"
    pods.end()
    assert pods.send(text("cold", 256)) == 0, "not the smallest tree, and of equals the first"


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
