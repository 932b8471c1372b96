"""Configurations of strategies are what a user would write."""

from epp.configuration.build import plugin_tables
from epp.configuration.config import load_config
from epp.plugins.strategy import config_of, named, producer, step


def test_a_configuration_names_its_plugins_once_and_weighs_them():
    """What is only declared is no part of the profile; the picker is last."""
    text = config_of(
        producer("approx-prefix-cache-producer", blockSizeTokens=128),
        step("prefix-cache-scorer", 3),
        step("queue-scorer"),
        picker=step("random-picker"),
    )
    config = load_config(text, "made", plugin_tables())
    assert [member.name for member in config.profile.scorers] == [
        "prefix-cache-scorer", "queue-scorer",
    ]  # fmt: skip
    assert [member.weight for member in config.profile.scorers] == [3.0, 1.0]
    assert config.profile.picker_name == "random-picker"
    assert config.indexes["approx-prefix-cache-producer"].block_size_tokens == 128


def test_two_of_one_type_have_names():
    """By which the profile refers to them."""
    text = config_of(
        step("prefix-cache-scorer", 3),
        named("lengths", step("prefix-cache-scorer", 1, matchLengthWeight=1.0)),
    )
    config = load_config(text, "made", plugin_tables())
    assert [(member.name, member.weight) for member in config.profile.scorers] == [
        ("prefix-cache-scorer", 3.0), ("lengths", 1.0),
    ]  # fmt: skip
