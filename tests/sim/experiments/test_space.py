"""What `sim tune` varies: by default, by a file, and what becomes of it in a document."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from epp.configuration.config import ConfigError
from sim.cluster.policies import PolicySource, policy_source
from sim.experiments.space import OFF, Choice, DimensionKind, Range, Space, SpaceError

ROOT = Path(__file__).parents[3]
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
FILTERED = HEAD + (
    "- {type: prefix-cache-affinity-filter, parameters: {peakPrefillThroughput: 9000}}\n"
    "- {type: token-load-scorer}\n"
)


def made(text, name="made"):
    return PolicySource(name=name, text=text, source=f"{name}.yaml")


def named(space):
    return {one.name: one for one in space.dimensions}


def asked(tmp_path, text, policy="weighted-scores"):
    """A space by a file with `text`."""
    file = tmp_path / "space.toml"
    file.write_text(text)
    return Space(policy_source(policy) if isinstance(policy, str) else policy, file=file)


def present(space):
    return {one.name: one.present for one in space.dimensions}


def test_weights_and_numbers_with_bounds_are_varied_by_default():
    """Each weight may be off; between bounds where there are two, else ten times round the present."""
    found = named(Space(policy_source("weighted-scores")))
    weights = [name for name, one in found.items() if one.what is DimensionKind.WEIGHT]
    assert weights == [
        f"weight of {name}-scorer"
        for name in ("prefix-cache", "queue", "kv-cache-utilization", "lora-affinity", "active-request")
    ]  # fmt: skip
    assert {str(found[name].span) for name in weights} == {"0.1 to 10 or off"}
    assert str(found["maxBusyScore of active-request-scorer"].span) == "0 to 1"
    scale = found["matchLengthScaleTokens of prefix-cache-scorer"]
    assert scale.span == Range(low=819.2, high=81_920.0, logarithmic=True)
    assert "idleThreshold of active-request-scorer" not in found, "it is 0: ten times what?"


def test_what_is_measured_is_not_varied_and_a_single_weight_does_not_matter():
    """How fast engines are is no matter of taste; filters are varied too."""
    assert set(named(Space(made(FILTERED)))) == {
        "affinityThreshold of prefix-cache-affinity-filter",
        "explorationProbability of prefix-cache-affinity-filter",
        "maxTTFTPenaltyMs of prefix-cache-affinity-filter",
        "queueThresholdTokens of token-load-scorer",
    }


def test_agreement_is_varied_where_there_are_pickers_to_agree():
    """It has no effect otherwise, and would only be one more thing to search."""
    agreeing = {
        f"{name} of prefix-cache-scorer" for name in ("agreementBelow", "agreementKeyTokens")
    }
    assert agreeing <= set(named(Space(policy_source("weighted-scores"), pickers=4)))
    assert not agreeing & set(named(Space(policy_source("weighted-scores"))))


@pytest.mark.parametrize(
    "policy",
    [
        policy_source("weighted-scores"),
        policy_source("sticky-until-saturated"),
        policy_source(str(ROOT / "docs/examples/tuned.yaml")),
        made(HEAD + "- type: queue-scorer\n- type: prefix-cache-scorer\n"),
        made(FILTERED),
    ],
    ids=lambda policy: policy.name,
)
def test_the_present_values_are_the_present_configuration(policy):
    """To the last digit, with a profile and a picker spelt out where it has none."""
    space = Space(policy)
    again = space.source(present(space), "again")
    assert again.hash == policy.hash
    profile = yaml.safe_load(again.text)["schedulingProfiles"][0]
    assert profile["plugins"][-1]["pluginRef"] == policy.load().profile.picker_name


DEFAULT = Space(policy_source("weighted-scores"), pickers=2)


@given(st.data())
def test_whatever_is_drawn_is_a_configuration_or_has_no_weight(data):
    """Nothing leaves its range by rounding; only all weights off are refused."""
    values = {}
    for one in DEFAULT.dimensions:
        draw = st.integers if one.span.integer else st.floats
        low, high = one.span.low, one.span.high
        values[one.name] = data.draw(
            draw(int(low), int(high)) if one.span.integer else draw(low, high)
        )
    source = DEFAULT.source(values, "drawn")
    off = all(
        values[one.name] < one.span.off_below
        for one in DEFAULT.dimensions
        if one.what is DimensionKind.WEIGHT
    )
    if off:
        with pytest.raises(ConfigError, match="all weights of profile default are 0"):
            source.load()
        return
    scorers = {scorer.name: scorer for scorer in source.load().profile.scorers}
    for one in DEFAULT.dimensions:
        if one.what is DimensionKind.WEIGHT:
            weight = scorers[one.plugin].weight
            assert weight == 0 if values[one.name] < 0.1 else 0.1 <= weight <= 10
            assert weight == pytest.approx(values[one.name], rel=0.06) or not weight


def test_a_file_adds_to_what_is_varied_and_replaces_it_by_name(tmp_path):
    """Weights, numbers, values of a list, whole plugins; those of indexes too."""
    space = asked(
        tmp_path,
        """
        [[weights]]
        plugin = "queue-scorer"
        low = 1
        high = 50
        off = false

        [[parameters]]
        plugin = "prefix-cache-scorer"
        name = "agreement"
        values = ["none", "rendezvous"]

        [[parameters]]
        plugin = "active-request-scorer"
        name = "idleThreshold"
        low = 0
        high = 8

        [[parameters]]
        plugin = "active-request-scorer"
        name = "maxBusyScore"
        values = [0.5, 1]

        [[plugins]]
        plugin = "max-score-picker"
        types = ["weighted-random-picker", "random-picker"]

        [[plugins]]
        plugin = "lora-affinity-scorer"
        types = ["none"]
        """,
    )
    found = named(space)
    assert len(found) == len(Space(policy_source("weighted-scores")).dimensions) + 4
    assert found["weight of queue-scorer"].span == Range(low=1, high=50, logarithmic=True)
    assert found["idleThreshold of active-request-scorer"].span.integer
    values = present(space) | {
        "agreement of prefix-cache-scorer": "rendezvous",
        "idleThreshold of active-request-scorer": 3,
        "maxBusyScore of active-request-scorer": "1",
        "type of max-score-picker": "weighted-random-picker",
        "type of lora-affinity-scorer": OFF,
        "weight of queue-scorer": 33.333,
    }
    config = space.source(values, "chosen").load()
    assert config.profile.picker_name == "weighted-random-picker"
    weights = {scorer.name: scorer.weight for scorer in config.profile.scorers}
    assert "lora-affinity-scorer" not in weights
    assert weights["queue-scorer"] == 33.3
    plugins = {scorer.name: scorer.plugin for scorer in config.profile.scorers}
    assert plugins["prefix-cache-scorer"].agreement == "rendezvous"
    assert plugins["active-request-scorer"].idle_threshold == 3


def test_the_file_of_the_documentation_is_one(tmp_path):
    """All of its kinds of tables, on the default configuration."""
    page = (ROOT / "docs/simulator.md").read_text()
    text, *_ = re.findall(r"```toml\n(defaults.*?)```", page, re.DOTALL)
    found = named(asked(tmp_path, text))
    assert {one.what for one in found.values()} == set(DimensionKind)
    assert found["weight of queue-scorer"].span == Range(low=0.5, high=50, logarithmic=True)
    assert "agreement of prefix-cache-scorer" in found


def test_a_file_alone_says_what_is_varied_if_it_asks_for_that(tmp_path):
    """An index of the document, an integer on a logarithmic scale."""
    space = asked(
        tmp_path,
        'defaults = false\n[[parameters]]\nplugin = "approx-prefix-cache-producer"\n'
        'name = "lruCapacityPerServer"\nlow = 100\nhigh = 1000000\nlog = true\n',
        str(ROOT / "docs/examples/tuned.yaml"),
    )
    (one,) = space.dimensions
    assert one.span == Range(low=100, high=1_000_000, logarithmic=True, integer=True)
    index = space.source({one.name: 4_321}, "small").load().indexes["approx-prefix-cache-producer"]
    assert index.lru_capacity_per_server == 4_321


def test_the_parameters_of_a_plugin_do_not_follow_it_to_another_type(tmp_path):
    """Nor its values: the other type may have none of that name."""
    space = asked(
        tmp_path,
        '[[plugins]]\nplugin = "token-load-scorer"\ntypes = ["load-aware-scorer"]\n',
        made(FILTERED),
    )
    values = present(space) | {
        "type of token-load-scorer": "load-aware-scorer",
        "queueThresholdTokens of token-load-scorer": 5_000.0,
    }
    (scorer,) = space.source(values, "other").load().profile.scorers
    assert (scorer.name, scorer.plugin.threshold) == ("load-aware-scorer", 128.0)


def test_the_weight_follows_to_another_type(tmp_path):
    """It is one of the place in the profile; what is left out has none."""
    space = asked(
        tmp_path,
        '[[plugins]]\nplugin = "queue-scorer"\ntypes = ["token-load-scorer", "none"]\n',
        "llm-d-3-2-2",
    )
    values = present(space) | {"weight of queue-scorer": 7.0}
    for chosen, weights in (("token-load-scorer", [3, 7, 2]), (OFF, [3, 2])):
        config = space.source(values | {"type of queue-scorer": chosen}, "other").load()
        assert [scorer.weight for scorer in config.profile.scorers] == weights


def test_a_choice_whose_present_value_is_not_among_it_says_so(tmp_path):
    """The search then has nothing to begin with."""
    space = asked(
        tmp_path,
        '[[parameters]]\nplugin = "prefix-cache-scorer"\nname = "agreement"\n'
        'values = ["none", "rendezvous"]\n',
    )
    one = named(space)["agreement of prefix-cache-scorer"]
    assert (one.span, one.present) == (
        Choice(values={"none": "none", "rendezvous": "rendezvous"}), None
    )  # fmt: skip


PARAMETER = '[[parameters]]\nplugin = "queue-scorer"\n'
BUSY = '[[parameters]]\nplugin = "active-request-scorer"\nname = "maxBusyScore"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("weight = 1", "Object contains unknown|has unknown field `weight`"),
        ("a = [", "Invalid value|Unclosed array"),
        ('[[weights]]\nplugin = "queu-scorer"', "profile, did you mean `queue-scorer`"),
        ('[[weights]]\nplugin = "queue-scorer"\nlow = 0', r"weights\[0\]: expected 0 < low < high"),
        ('[[weights]]\nplugin = "queue-scorer"\nlow = "a"', r"weights\[0\].low: expected a number"),
        (PARAMETER + 'name = "x"\nlow = 1\nhigh = 2', "queue-scorer has no parameter x"),
        (BUSY, "expected values, or low and high"),
        (BUSY + "low = 0.5\nhigh = 0.1", "low below high"),
        (BUSY + "low = 0\nhigh = 1\nlog = true", "expected low above 0 on a logarithmic scale"),
        (BUSY + "values = [1]", "expected either low and high, or values, two or more"),
        (BUSY + "low = 0\nhigh = 1\nvalues = [0, 1]", "expected either low and high, or values"),
        ('[[parameters]]\nplugin = "prefix-cache-scorer"\nname = "agreement"\nlow = 1\nhigh = 2',
         "agreement is not a number: give values"),
        ('[[parameters]]\nplugin = "queue"\nname = "x"', "declares no plugin queue"),
        ('[[plugins]]\nplugin = "queue-scorer"\ntypes = ["load-scorer"]', "load-scorer is unknown"),
        ('[[plugins]]\nplugin = "queue-scorer"\ntypes = ["queue-scorer"]', "types other than"),
        ("defaults = false", "has nothing to vary: name weights, parameters or plugins in the file of"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_one_sentence(tmp_path, text, told):
    """With the file and the place in it."""
    with pytest.raises(SpaceError, match=told) as problem:
        asked(tmp_path, text)
    assert "\n" not in str(problem.value)
    assert "space.toml" in str(problem.value) or "built-in weighted-scores" in str(problem.value)


def test_what_has_no_configuration_cannot_be_varied(tmp_path):
    """A baseline, a profile of which nothing matters, a file that is away, or too long, or no text."""
    with pytest.raises(SpaceError, match="random has no configuration"):
        Space(policy_source("random"))
    with pytest.raises(SpaceError, match=r"bare.yaml has nothing to vary"):
        Space(made(HEAD + "- type: queue-scorer\n", "bare"))
    file = tmp_path / "space.toml"
    with pytest.raises(SpaceError, match="No such file"):
        Space(policy_source("weighted-scores"), file=file)
    file.write_bytes(b"\xff")
    with pytest.raises(SpaceError, match="expected TOML in UTF-8"):
        Space(policy_source("weighted-scores"), file=file)
    file.write_bytes(b"#" * 1_000_001)
    with pytest.raises(SpaceError, match="expected 1,000,000 bytes at most"):
        Space(policy_source("weighted-scores"), file=file)
    rows = [f'[[weights]]\nplugin = "s{at}"\n' for at in range(101)]
    plugins = "".join(f"- {{type: queue-scorer, name: s{at}}}\n" for at in range(101))
    file.write_text("".join(rows))
    with pytest.raises(SpaceError, match="101 things to vary, expected at most 100"):
        Space(made(HEAD + plugins), file=file)
