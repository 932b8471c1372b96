"""Handlers of stages and deciders in configurations."""

import json

import pytest

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import ConfigError, load_config
from epp.configuration.describing import config_hash, describe, diff_configs
from epp.configuration.explaining import explain, stage_reason
from epp.configuration.upgrading import upgrade
from epp.core.decision.stages import Always, Multimodal, Never, Order, PrefillEnd, Uncached

TABLES = plugin_tables()
ROLES = ("decode", "prefill", "encode")
ALWAYS = {"type": "always-disagg-pd-decider"}
BY_PREFIX = {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 16}}
OF_MEDIA = {"type": "always-disagg-multimodal-decider"}


def handler(kind="disagg-profile-handler", **parameters):
    return {"type": kind, "parameters": parameters}


def document(*plugins, names=("decode", "prefill"), version="llm-d.ai/v1", weight=1):
    """Return a document with a profile for each of `names`; the handler may come first."""
    roles = [role for role in ROLES if any(role in name for name in names)]
    used = [*plugins, *({"type": f"{role}-filter"} for role in roles), {"type": "queue-scorer"}]
    profiles = [
        {
            "name": name,
            "plugins": [
                {"pluginRef": f"{role if role in ROLES else 'decode'}-filter"},
                {"pluginRef": "queue-scorer", "weight": weight},
            ],
        }
        for name in names
        for role in [name.partition("-")[0]]
    ]
    return json.dumps(
        {
            "apiVersion": version,
            "kind": "EndpointPickerConfig",
            "plugins": used,
            "schedulingProfiles": profiles,
        }
    )


def loaded(*plugins, **options):
    return load_config(document(*plugins, **options), "c", TABLES)


def problems(*plugins, **options):
    with pytest.raises(ConfigError) as error:
        loaded(*plugins, **options)
    return list(error.value.problems)


def warned(*plugins, **options):
    return [warning.removeprefix("c: ") for warning in loaded(*plugins, **options).warnings]


def test_a_handler_may_come_before_the_plugins_that_it_names():
    config = loaded(handler(deciders={"prefill": "prefix-based-pd-decider"}), BY_PREFIX)
    stages = config.stages
    assert (stages.decode.name, stages.prefill.name, stages.encode) == ("decode", "prefill", None)
    assert stages.prefill_if == Uncached(16, 0)
    assert stages.encode_if == Never()
    assert stages.order is Order.DECODE_FIRST
    assert build_settings(config).stages.prefill.name == "prefill"


def test_the_index_that_a_decider_reads_is_added_with_a_warning():
    config = loaded(handler(deciders={"prefill": "prefix-based-pd-decider"}), BY_PREFIX)
    assert config.prefix == "approx-prefix-cache-producer"
    assert any("approx-prefix-cache-producer is added" in said for said in config.warnings)
    always = loaded(handler(deciders={"prefill": "always-disagg-pd-decider"}), ALWAYS)
    assert always.prefix == ""


def test_nested_and_flat_parameters_mean_the_same_and_flat_ones_warn():
    nested = loaded(
        handler(
            profiles={"decode": "decode-a", "prefill": "prefill-a", "encode": "encode-a"},
            deciders={"prefill": ALWAYS["type"], "encode": OF_MEDIA["type"]},
        ),
        ALWAYS,
        OF_MEDIA,
        names=("decode-a", "prefill-a", "encode-a"),
    )
    flat = loaded(
        handler(
            decodeProfile="decode-a",
            prefillProfile="prefill-a",
            encodeProfile="encode-a",
            prefillDeciderPluginName=ALWAYS["type"],
            encodeDeciderPluginName=OF_MEDIA["type"],
            deciderPluginName="not-this-one",
        ),
        ALWAYS,
        OF_MEDIA,
        names=("decode-a", "prefill-a", "encode-a"),
    )
    assert nested.stages == flat.stages
    assert nested.stages.encode_if == Multimodal()
    assert nested.warnings == ()
    assert sum("is deprecated, use" in said for said in flat.warnings) == 6


def test_nested_and_flat_parameters_together_are_an_error_that_names_them():
    (problem,) = problems(
        handler(deciders={"prefill": ALWAYS["type"]}, decodeProfile="decode"), ALWAYS
    )
    assert "deciders" in problem
    assert "decodeProfile" in problem


@pytest.mark.parametrize("order", ["prefill-first", "Prefill_First", "PREFILL", "prefillfirst"])
def test_the_order_is_read_in_every_spelling(order):
    stages = loaded(handler(stageOrder=order)).stages
    assert stages.order is Order.PREFILL_FIRST
    assert stages.prefill is not None


def test_an_unknown_order_is_an_error():
    (problem,) = problems(handler(stageOrder="encode-first"))
    assert "it must be decode-first or prefill-first" in problem


def test_a_prefill_decider_contradicts_prefill_first():
    (problem,) = problems(
        handler(stageOrder="prefill-first", deciders={"prefill": ALWAYS["type"]}), ALWAYS
    )
    assert "contradicts stageOrder prefill-first" in problem


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"profiles": {"prefill": "prefil"}}, "profile prefil of stage prefill is not in"),
        ({"profiles": {"decode": "other"}}, "profile other of stage decode is not in"),
        ({"profiles": {"fallback": "other"}}, "profile other of stage fallback is not in"),
        ({"deciders": {"prefill": "nobody"}}, "nobody names no declared plugin"),
        ({"deciders": {"prefill": "queue-scorer"}}, "queue-scorer is a scorer, expected a decider"),
    ],
)
def test_a_missing_profile_or_decider_is_an_error(parameters, said):
    assert any(said in problem for problem in problems(handler(**parameters)))


def test_a_handler_needs_a_decode_profile():
    found = problems(handler(), names=("prefill",))
    assert any("profile decode of stage decode is not in" in problem for problem in found)


def test_two_handlers_and_two_profiles_of_one_name_are_errors():
    assert any(
        "only one handler of stages" in problem
        for problem in problems(handler(), handler("pd-profile-handler"), ALWAYS)
    )
    assert any(
        "is taken by an earlier profile" in problem
        for problem in problems(handler(), names=("decode", "decode"))
    )


def test_what_never_runs_warns():
    never = warned(handler())
    assert any("stage prefill never runs" in said for said in never)
    lonely = warned(handler(), names=("decode", "extra"))
    assert any("no stage uses profile extra" in said for said in lonely)
    unnamed = warned(handler(deciders={"prefill": ALWAYS["type"]}), ALWAYS, OF_MEDIA)
    assert any("does not name it" in said for said in unnamed)
    of_nothing = warned(handler(deciders={"prefill": ALWAYS["type"]}), ALWAYS, names=("decode",))
    assert any("there is no profile of prefill" in said for said in of_nothing)
    zero = {"type": "prefix-based-pd-decider"}
    assert any(
        "which means never" in said
        for said in warned(handler(deciders={"prefill": zero["type"]}), zero)
    )


def test_the_old_handler_disaggregates_with_and_without_its_header_handler():
    old = handler("pd-profile-handler", deciderPluginName=ALWAYS["type"], primaryPort=8000)
    alone = loaded(old, ALWAYS)
    beside = loaded(old, ALWAYS, {"type": "prefill-header-handler"})
    assert alone.stages == beside.stages
    assert alone.stages.prefill_if == Always()
    assert any("use disagg-profile-handler" in said for said in alone.warnings)
    assert any("primaryPort has no effect" in said for said in alone.warnings)
    assert any("headers of stages are always set" in said for said in beside.warnings)


def test_a_fallback_may_be_the_profile_of_a_stage():
    stages = loaded(
        handler(profiles={"fallback": "decode"}, deciders={"prefill": ALWAYS["type"]}), ALWAYS
    ).stages
    assert stages.fallback == stages.decode


def test_the_end_of_prefill_is_a_parameter():
    stages = loaded(handler(prefillEnd="output")).stages
    assert stages.prefill_end is PrefillEnd.OUTPUT


def test_a_single_profile_has_the_same_hash_with_a_handler_and_without():
    alone = loaded(names=("decode",))
    handled = loaded(handler(), names=("decode",))
    assert describe(alone) == describe(handled)
    assert config_hash(alone) == config_hash(handled)
    assert alone.stages.alone


def test_a_change_of_any_stage_is_shown_and_changes_the_hash():
    parts = (handler(deciders={"prefill": "prefix-based-pd-decider"}),)
    one = loaded(*parts, BY_PREFIX)
    more = loaded(
        *parts, {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 512}}
    )
    heavier = loaded(*parts, BY_PREFIX, weight=2)
    assert diff_configs(one, more) == ["stages: prefillIf.tokens 16 -> 512"]
    assert diff_configs(one, heavier) == [
        "decode scorer queue-scorer: weight 1 -> 2",
        "prefill scorer queue-scorer: weight 1 -> 2",
    ]
    assert len({config_hash(config) for config in (one, more, heavier)}) == 3


def test_the_explanation_has_a_table_for_each_stage_and_an_example():
    said = explain(
        loaded(
            handler(deciders={"prefill": "prefix-based-pd-decider", "encode": OF_MEDIA["type"]}),
            BY_PREFIX,
            OF_MEDIA,
            names=("decode", "prefill", "encode"),
        )
    ).splitlines()
    for heading in ("decode", "prefill", "encode"):
        assert f"stage {heading}: profile {heading}" in said
    assert "      5120 tokens, 1024 cached at D, 4096 >= 16: prefill" in said
    assert "      5120 tokens, 5120 cached at D, 0 < 16: no prefill" in said
    assert "a request is refused if a stage that must run has no endpoint" in said


@pytest.mark.parametrize(
    ("rule", "tokens", "cached", "said"),
    [
        (Uncached(16), 20, 8, "20 tokens, 8 cached at D, 12 < 16: no prefill"),
        (Uncached(16, 64), 20, 0, "20 tokens, 0 cached at D, 20 < 64: no prefill"),
        (Uncached(0), 20, 0, "20 tokens, 0 cached at D, never: no prefill"),
        (Always(), 20, 0, "for every request: prefill"),
    ],
)
def test_the_reason_of_a_stage_is_a_sentence(rule, tokens, cached, said):
    assert stage_reason("prefill", rule, tokens, cached) == said


def test_an_upgrade_nests_the_parameters_of_the_handler():
    old = handler(
        decodeProfile="decode", prefillProfile="prefill", deciderPluginName=ALWAYS["type"]
    )
    text = document(old, ALWAYS)
    newer = upgrade(text, "c")
    config = load_config(newer.text, "c", TABLES)
    assert config.warnings == ()
    assert config_hash(config) == config_hash(load_config(text, "c", TABLES))
    assert upgrade(newer.text, "c").changes == ()


def test_an_upgrade_replaces_the_old_handler_and_removes_its_header_handler():
    old = handler("pd-profile-handler", deciderPluginName=ALWAYS["type"], primaryPort=8000)
    text = document(old, ALWAYS, {"type": "prefill-header-handler"})
    newer = upgrade(text, "c")
    config = load_config(newer.text, "c", TABLES)
    assert config.warnings == ()
    assert config_hash(config) == config_hash(load_config(text, "c", TABLES))
