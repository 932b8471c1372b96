"""Configurations with topology, revisions, header profiles and data-parallel ports."""

import json

import pytest

from epp.configuration.build import build_settings
from epp.configuration.config import ConfigError, load_config
from epp.configuration.describing import config_hash, describe, diff_configs
from epp.configuration.explaining import explain
from epp.core.decision.stages import Never, Uncached
from epp.core.knowledge.topology import DEFAULT_TOPOLOGY, TopologyLabels
from tests.configuration.test_stages import (
    ALWAYS,
    BY_PREFIX,
    TABLES,
    document,
    handler,
    loaded,
    problems,
    warned,
)

EXTRACTOR = {"type": "topology-extractor", "parameters": {"rack": "nvlink"}}
NEAR = {"type": "topology-affinity-scorer"}
STAGED = (handler(deciders={"prefill": ALWAYS["type"]}), ALWAYS)
BY_HEADER = {"type": "header-profile-handler"}
PHASES = ("decode", "prefill", "encode")
SCREENER = {
    "type": "disaggregatedset-rollout-screener",
    "parameters": {
        "scope": {"labelSelector": "disaggregatedset.x-k8s.io/name=my-set"},
        "revisionGating": {
            "mode": "max-role",
            "requireRoles": {"values": ["prefill", "decode"]},
        },
    },
}
RANKS = {"type": "data-parallel-profile-handler", "parameters": {"primaryPort": 8000}}


# --- topology ---


def test_the_extractor_names_the_labels():
    config = loaded(*STAGED, EXTRACTOR, NEAR)
    assert build_settings(config).topology == TopologyLabels(rack="nvlink")
    assert build_settings(loaded(*STAGED, NEAR)).topology == DEFAULT_TOPOLOGY
    assert describe(config)["topology"]["rack"] == "nvlink"
    assert config_hash(config) != config_hash(loaded(*STAGED, NEAR))


def test_an_extractor_that_no_plugin_uses_warns():
    assert any("no plugin uses the topology" in said for said in warned(*STAGED, EXTRACTOR))


@pytest.mark.parametrize("name", ["", "topology-extractor"])
def test_the_default_producer_need_not_be_declared(name):
    assert loaded(*STAGED, NEAR | {"parameters": {"topologyProducerName": name}})


def test_a_plugin_can_name_the_extractor():
    named = NEAR | {"parameters": {"topologyProducerName": "places"}}
    assert loaded(*STAGED, EXTRACTOR | {"name": "places"}, named)
    (problem,) = problems(*STAGED, named)
    assert "topologyProducerName places names no declared topology-extractor" in problem


# --- revisions ---


def test_the_screener_applies_before_every_stage_without_a_reference():
    config = loaded(*STAGED, SCREENER)
    (named,) = build_settings(config).stages.screen.filters
    assert named.name == SCREENER["type"]
    assert any(one.name == SCREENER["type"] for one in config.profile.responders)
    assert "runs      before every stage, for every request" in explain(config)
    assert f"screen filter {SCREENER['type']}" in describe(config)
    assert not any(SCREENER["type"] in said for said in config.warnings)


def test_a_single_profile_can_have_a_screener():
    config = loaded(SCREENER, names=("decode",))
    assert not config.stages.alone
    assert config.stages.screen is not None


def test_a_screener_in_a_profile_is_an_error():
    """It must see all endpoints, before the filters of any stage."""
    written = json.loads(document(*STAGED, SCREENER))
    written["schedulingProfiles"][0]["plugins"].append({"pluginRef": SCREENER["type"]})
    with pytest.raises(ConfigError, match="is a screener, expected a filter or scorer or picker"):
        load_config(json.dumps(written), "c", TABLES)


def test_other_parameters_are_another_configuration():
    other = SCREENER | {"parameters": SCREENER["parameters"] | {"scope": {}}}
    (line,) = diff_configs(loaded(*STAGED, SCREENER), loaded(*STAGED, other))[:1]
    assert "scope" in line


# --- profiles by header ---


def test_each_profile_can_be_named_by_the_header():
    stages = build_settings(loaded(BY_HEADER, names=PHASES)).stages
    assert list(stages.named) == list(PHASES)
    assert stages.header == "epp-profile"
    assert stages.decode is stages.named["decode"]
    assert stages.prefill_if == Never()


def test_the_default_profile_must_be_there():
    (problem,) = problems(BY_HEADER, names=("prefill", "encode"))
    assert "defaultProfile decode is not in schedulingProfiles" in problem
    named = handler("header-profile-handler", defaultProfile="prefill", headerName="X-Phase")
    stages = loaded(named, names=("prefill", "encode")).stages
    assert (stages.decode.name, stages.header) == ("prefill", "x-phase")


def test_a_single_profile_needs_no_default():
    assert loaded(BY_HEADER, names=("prefill",)).stages.decode.name == "prefill"


def test_a_decider_counts_the_tokens_of_prefer_if_available():
    config = loaded(BY_HEADER, BY_PREFIX, names=PHASES)
    assert config.stages.prefill_if == Uncached(16)
    assert config.prefix == "approx-prefix-cache-producer"
    assert not any("has no effect" in said for said in config.warnings)
    assert "Prefer: if-available is refused with 412: 16 or more prompt tokens" in explain(config)


def test_another_decider_has_no_effect_beside_the_header():
    assert any("has no effect" in said for said in warned(BY_HEADER, ALWAYS, names=PHASES))


def test_only_one_handler_chooses_profiles():
    (problem, *_) = problems(BY_HEADER, *STAGED, names=PHASES)
    assert "only one handler of stages is allowed" in problem


def test_the_profiles_and_the_header_are_part_of_the_configuration():
    config = loaded(BY_HEADER, names=PHASES)
    assert describe(config)["stages"]["profiles"] == list(PHASES)
    renamed = loaded(handler("header-profile-handler", headerName="X-Phase"), names=PHASES)
    assert any("header epp-profile -> x-phase" in line for line in diff_configs(config, renamed))


# --- data-parallel ranks ---


def test_a_primary_port_selects_the_header():
    assert build_settings(loaded(RANKS, names=("decode",))).primary_port == 8000
    assert not any("primaryPort" in said for said in warned(RANKS, names=("decode",)))
    assert build_settings(loaded(*STAGED, RANKS)).primary_port == 8000


def test_without_a_port_the_handler_has_no_effect():
    without = {"type": RANKS["type"]}
    assert build_settings(loaded(without, names=("decode",))).primary_port == 0
    assert any("without primaryPort" in said for said in warned(without, names=("decode",)))


# --- deadline of the prefill ---


def test_the_deadline_of_a_prefill_is_a_duration():
    config = loaded(handler(deciders={"prefill": ALWAYS["type"]}, prefillDeadline="15s"), ALWAYS)
    assert config.stages.prefill_deadline_s == 15.0
    assert loaded(*STAGED).stages.prefill_deadline_s == 60.0
    (problem,) = problems(handler(prefillDeadline="0s"))
    assert "prefillDeadline is 0.0s; it must be finite and above 0s" in problem


# --- latency prediction ---


@pytest.mark.parametrize(
    ("plugins", "profiles", "why"),
    [
        (STAGED, ("decode", "prefill"), "requests are split into stages"),
        ((SCREENER,), ("decode",), "a plugin drops endpoints before the profile chooses"),
        ((BY_HEADER,), PHASES, "a request header names the profile"),
    ],
    ids=["stages", "screener", "header"],
)
def test_the_warning_says_why_latencies_are_not_predicted(plugins, profiles, why):
    said = warned(*plugins, {"type": "predicted-latency-producer"}, names=profiles)
    (warning,) = (one for one in said if one.startswith("latencies are not predicted"))
    assert warning == f"latencies are not predicted, because {why}"
