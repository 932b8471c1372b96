from epp.core.knowledge import model_names as module
from epp.core.knowledge.model_names import AWAITED_MAX, AWAITED_S, ModelNames


def serving(*adapters):
    names = ModelNames()
    names.adapters_told(adapters)
    return names


def test_where_no_adapters_are_served_every_name_is_the_model_itself():
    assert ModelNames().adapter_of("any", ()) == ""


def test_an_adapter_is_one_when_an_engine_has_named_it():
    names = serving("sql")
    assert names.adapter_of("sql", ()) == "sql"
    assert names.adapter_of("tuned", ()) is None
    assert names.adapter_of("", ()) == ""


def test_a_name_is_the_models_own_when_what_it_asked_for_is_held_as_the_models():
    """Once that is known, it needs no more to be held."""
    names = serving("sql")
    names.asked("base", 7, {7}, 0.0)
    assert names.adapter_of("base", {7}) is None, "it was there before it was asked for"
    names.asked("base", 8, {7}, 0.0)
    assert names.adapter_of("base", {7}) is None
    assert names.adapter_of("base", {7, 8}) == ""
    assert names.adapter_of("base", ()) == ""
    names.adapters_told(["base"])
    assert names.adapter_of("base", ()) == "base", "what an engine says counts more"


def test_another_request_is_awaited_where_the_first_was_not_heard_of():
    """It may have failed, or was given up before anybody looked; the first counts too, if it is later."""
    names = serving()
    assert not names.awaits("base", 0.0)
    names.asked("base", 8, (), 0.0)
    between_s = AWAITED_S / AWAITED_MAX
    assert names.awaits("base", between_s / 2)
    assert not names.awaits("base", between_s)
    for number in range(1, AWAITED_MAX):
        names.asked("base", 8 + number, (), number * between_s)
    assert names.adapter_of("base", {7}) is None
    assert names.adapter_of("base", {8}) == ""


def test_what_is_awaited_is_bounded():
    names = serving()
    for number in range(AWAITED_MAX + 1):
        names.asked("base", number, (), number * AWAITED_S)
    assert names.adapter_of("base", {0}) is None
    assert names.adapter_of("base", {1}) == ""


def test_names_that_clients_choose_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "NAMES_MAX", 2)
    monkeypatch.setattr(module, "ADAPTERS_MAX", 2)
    names = serving("one", "two")
    names.adapters_told(["three"])
    assert names.adapter_of("three", ()) is None
    for key, name in enumerate("abc"):
        names.asked(name, key, (), 0.0)
    assert [names.adapter_of(name, range(3)) for name in "abc"] == [None, "", ""]


def test_adapters_that_are_only_named_say_nothing_of_other_names():
    names = ModelNames()
    names.adapters_named(["sql"])
    assert names.adapter_of("sql", ()) == "sql"
    assert names.adapter_of("base", ()) == ""
