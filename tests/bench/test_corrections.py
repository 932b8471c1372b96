import pytest

from bench.corrections import CHAT_REQUESTS, RECORDED_BLOCKS, chats, predict, recorded, run


@pytest.fixture(scope="module")
def not_told():
    """The same requests, without corrections and with them, where the engine's size is not known."""
    served = recorded()
    return [
        predict(served, RECORDED_BLOCKS, corrected=corrected, told=False, text=False)
        for corrected in (False, True)
    ]


def test_corrections_bring_belief_closer_to_what_a_real_engine_had(not_told):
    as_it_is, corrected = not_told
    assert corrected.wrong < as_it_is.wrong
    assert (corrected.cached, corrected.prompt) == (as_it_is.cached, as_it_is.prompt)


def test_chats_overflow_the_cache_and_find_some_of_it():
    served = chats(100, 0)
    assert len(served) == CHAT_REQUESTS
    prompt = sum(len(one.ids) for one in served)
    assert 0.1 * prompt < sum(one.cached_tokens for one in served) < 0.9 * prompt


def test_corrections_bring_belief_closer_on_chats_that_nobody_looked_at():
    served = chats(100, 0)
    as_it_is, corrected = (
        predict(served, 100, corrected=corrected, told=False, text=False)
        for corrected in (False, True)
    )
    assert corrected.wrong < as_it_is.wrong / 2


def test_each_kind_is_told_with_and_without(monkeypatch):
    monkeypatch.setattr("bench.corrections.CHAT_BLOCKS", (100,))
    rows = list(run())
    assert len(rows) == 16
    assert len({what for what, _ in rows}) == 16
