"""The built-in default configuration, which depends on the roles of endpoints."""

import pytest

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import (
    DEFAULT_CONFIG,
    DEFAULT_SOURCE,
    STAGED_DEFAULT_CONFIG,
    STAGED_DEFAULT_SOURCE,
    load_config,
)
from epp.configuration.explaining import explain
from epp.configuration.live import LiveConfiguration, divides_stages
from epp.core.decision.stages import ByTime, Order
from epp.flags.command_lines import parse_serve
from tests.core.decision.staged import of_role

TABLES = plugin_tables()


def pool(*roles):
    return [of_role(number, role) for number, role in enumerate(roles)]


def live(content=None):
    name = ("--config-file", "c.yaml") if content else ()
    return LiveConfiguration(parse_serve(["--endpoints-file", "e", *name], {}), TABLES, content)


@pytest.mark.parametrize(
    ("roles", "divided"),
    [
        ((), False),
        ((None, None), False),
        (("decode", None), False),
        (("both", "prefill-decode"), False),
        (("encode", "decode"), False),
        (("prefill", "decode"), True),
        (("prefill", None), True),
        (("encode-prefill", "decode"), True),
        (("prefill",), True),
    ],
)
def test_a_pool_is_served_by_role_if_an_endpoint_only_prefills(roles, divided):
    assert divides_stages(endpoint.labels for endpoint in pool(*roles)) == divided


def test_the_default_follows_the_roles_and_returns():
    configuration = live()
    before = configuration.hash
    assert configuration.default_for(pool(None, "decode")) is None
    offer = configuration.default_for(pool("prefill", None))
    assert not offer.settings.stages.alone
    configuration.accept(offer)
    assert configuration.config.source == STAGED_DEFAULT_SOURCE
    assert configuration.default_for(pool("prefill", "decode")) is None
    assert configuration.told(2).document == STAGED_DEFAULT_CONFIG
    back = configuration.default_for(pool("decode"))
    configuration.accept(back)
    assert (configuration.config.source, configuration.hash) == (DEFAULT_SOURCE, before)
    assert configuration.generation == 3


def test_a_given_configuration_stays():
    assert live(DEFAULT_CONFIG.encode()).default_for(pool("prefill", "decode")) is None


def test_both_defaults_have_the_same_indexes():
    """The indexes therefore keep their content when the default changes."""
    whole, staged = (
        build_settings(load_config(text, "c", TABLES))
        for text in (DEFAULT_CONFIG, STAGED_DEFAULT_CONFIG)
    )
    assert whole.index_settings == staged.index_settings
    assert isinstance(staged.stages.prefill_if, ByTime)
    assert staged.stages.order is Order.PREFILL_FIRST


def test_the_default_by_role_loads_without_a_warning_and_explains_its_rule():
    config = load_config(STAGED_DEFAULT_CONFIG, STAGED_DEFAULT_SOURCE, TABLES)
    assert config.warnings == ()
    text = explain(config)
    assert "if it saves time" in text
    assert "5120 tokens, 20 decode at D: " in text
