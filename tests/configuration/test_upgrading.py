import datetime as dt
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.configuration import upgrading
from epp.configuration.build import plugin_tables
from epp.configuration.compatibility import MOVED_TO_INDEX
from epp.configuration.config import ConfigError, load_config
from epp.configuration.upgrading import CHANGES_MAX, upgrade

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
TABLES = plugin_tables()


def upgraded(text):
    return upgrade(text, "config.yaml")


def plain(text):
    return yaml.safe_load(upgraded(text).text)


def test_a_document_of_today_stays_as_it_is():
    """Byte by byte."""
    text = HEAD + "plugins:  # all\n- {type: queue-scorer}\n"
    found = upgraded(text)
    assert (found.text, found.changes) == (text, ())


def test_comments_and_layout_stay():
    """What is not concerned is not touched, and each change names its line."""
    text = """\
# The first.
apiVersion: inference.networking.x-k8s.io/v1alpha1  # of old
kind: EndpointPickerConfig
plugins:
# who tells tokens
- type: tokenizer   # the engine's
  parameters:
    modelName: m    # a model
- type: "queue-scorer"
"""
    found = upgraded(text)
    assert found.text == text.replace(
        "inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1alpha1"
    ).replace("type: tokenizer", "type: token-producer")
    assert [change.line for change in found.changes] == [2, 6]


def test_who_refers_to_a_plugin_by_its_type_refers_to_the_new_one():
    """A plugin without a name goes by its type; one with a name keeps it."""
    found = plain(
        HEAD
        + "plugins:\n- type: by-label-selector\n- type: by-label-selector\n  name: second\n"
        + "schedulingProfiles:\n- name: default\n  plugins:\n  - pluginRef: by-label-selector\n"
        + "  - pluginRef: second\n"
    )
    assert [one["type"] for one in found["plugins"]] == ["label-selector-filter"] * 2
    references = [one["pluginRef"] for one in found["schedulingProfiles"][0]["plugins"]]
    assert references == ["label-selector-filter", "second"]


@pytest.mark.parametrize("style", ["block", "flow"])
def test_parameters_of_the_index_move_to_it(style):
    """The scorer had them before the index was a plugin of its own."""
    document = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {
                "type": "prefix-cache-scorer",
                "parameters": {"hashBlockSize": 256, "lruCapacityPerServer": 100},
            }
        ],
    }
    text = yaml.safe_dump(document) if style == "block" else json.dumps(document)
    found = upgraded(text)
    assert yaml.safe_load(found.text)["plugins"] == [
        {"type": "prefix-cache-scorer"},
        {
            "type": "approx-prefix-cache-producer",
            "parameters": {"blockSizeTokens": 64, "lruCapacityPerServer": 100},
        },
    ]
    assert len(found.changes) == 2


def test_the_precise_scorer_becomes_an_index_and_a_scorer():
    """References go on meaning the scorer."""
    found = plain(
        HEAD
        + "plugins:\n- type: precise-prefix-cache-scorer\n  parameters:\n"
        + "    tokenProcessorConfig:\n      blockSize: 64\n"
        + "schedulingProfiles:\n- name: default\n  plugins:\n"
        + "  - pluginRef: precise-prefix-cache-scorer\n    weight: 3\n"
    )
    index, scorer = found["plugins"]
    assert index == {
        "type": "precise-prefix-cache-producer",
        "parameters": {"tokenProcessorConfig": {"blockSizeTokens": 64}},
    }
    assert scorer["name"] == "precise-prefix-cache-scorer"
    assert scorer["parameters"] == {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"}


def test_sections_of_old_stand_where_they_stand_today():
    """A detector of its own parameters becomes a plugin."""
    found = plain(
        HEAD
        + "saturationDetector:\n  queueDepthThreshold: 5\nparser:\n  pluginRef: openai-parser\n"
        + "featureGates: [dataLayer, prepareDataPlugins]\nplugins:\n- type: openai-parser\n"
    )
    assert found["flowControl"] == {"saturationDetector": {"pluginRef": "utilization-detector"}}
    assert found["requestHandler"] == {"parsers": [{"pluginRef": "openai-parser"}]}
    assert found["plugins"][1] == {
        "type": "utilization-detector",
        "parameters": {"queueDepthThreshold": 5},
    }
    assert not {"saturationDetector", "parser", "featureGates"} & found.keys()


@pytest.mark.parametrize(
    ("plugin", "parameters"),
    [
        ({"type": "active-request-scorer", "parameters": {"requestTimeout": "2m"}}, None),
        (
            {
                "type": "mm-embeddings-cache-producer",
                "parameters": {"cacheSizeInMB": 2048},
            },
            {"cacheSizeInMBPerServer": 2048},
        ),
        (
            {
                "type": "approx-prefix-cache-producer",
                "parameters": {"blockSize": 64, "blockSizeTokens": 128},
            },
            {"blockSizeTokens": 128},
        ),
        (
            {
                "type": "endpoint-attribute-filter",
                "parameters": {"attribute": "GPUUtilization/dcgm-extractor"},
            },
            {"attribute": "GPUUtilization", "producer": "dcgm-extractor"},
        ),
        (
            {"type": "session-affinity-scorer", "parameters": {"headerName": "X-Pin"}},
            {"encodedEndpointHeaderConfig": {"header": "X-Pin"}},
        ),
        (
            {"type": "by-label", "parameters": {"label": "a", "validValues": ["b", "c"]}},
            {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b", "c"]}]},
        ),
    ],
)
@pytest.mark.parametrize("flow", [False, True])
def test_parameters_get_their_names_of_today(plugin, parameters, flow):
    """In a block and on one line."""
    plugins = json.dumps([plugin]) + "\n" if flow else "\n" + yaml.safe_dump([plugin])
    text = f"{HEAD}plugins: {plugins}"
    assert plain(text)["plugins"][0].get("parameters") == parameters


@pytest.mark.parametrize(
    ("sections", "stays"),
    [
        ({"saturationDetector": None}, True),
        ({"saturationDetector": {"pluginRef": "a", "headroom": 1}}, True),
        ({"saturationDetector": {}, "plugins": [{"type": "utilization-detector", "name": "a"}]}, True),
        ({"saturationDetector": {}, "plugins": [{"type": "queue-scorer"}]}, False),
        ({"saturationDetector": {"headroom": 1}, "flowControl": {}}, False),
        ({"saturationDetector": {}, "flowControl": {"saturationDetector": {"pluginRef": "b"}}}, False),
        ({"parser": None}, True),
        ({"parser": {"pluginRef": "a"}, "requestHandler": None}, True),
        ({"parser": {"pluginRef": "a"}, "requestHandler": {"parsers": []}}, True),
        ({"parser": {"pluginRef": "a"}, "requestHandler": {"parsers": [{"pluginRef": "b"}]}}, False),
    ],
)  # fmt: skip
def test_a_section_that_cannot_move_without_a_loss_stays(sections, stays):
    """It loads where it is."""
    name = next(iter(sections))
    found = plain(HEAD + yaml.safe_dump(sections, sort_keys=False))
    assert (name in found) is stays
    if stays:
        assert found == yaml.safe_load(HEAD) | sections


def test_parameters_of_an_index_that_is_declared_go():
    """They meant nothing beside it."""
    plugins = [
        {
            "type": "prefix-cache-scorer",
            "parameters": {"hashBlockSize": 64, "matchLengthWeight": 1},
        },
        {"type": "approx-prefix-cache-producer", "parameters": {"blockSizeTokens": 128}},
    ]
    found = upgraded(HEAD + yaml.safe_dump({"plugins": plugins}))
    assert yaml.safe_load(found.text)["plugins"] == [
        {"type": "prefix-cache-scorer", "parameters": {"matchLengthWeight": 1}},
        plugins[1],
    ]
    assert ["is removed" in change.what for change in found.changes] == [True]


@pytest.mark.parametrize(
    ("parameters", "left"),
    [
        ({"maxPrefixBlocksToMatch": 256}, None),
        ({"maxPrefixBlocksToMatch": 256, "maxPrefixTokensToMatch": 9}, {"maxPrefixTokensToMatch": 9}),
        (
            {"maxPrefixBlocksToMatch": 256, "maxPrefixTokensToMatch": 0},
            {"maxPrefixBlocksToMatch": 256, "maxPrefixTokensToMatch": 0},
        ),
    ],
)  # fmt: skip
def test_a_limit_in_blocks_goes_where_it_means_nothing(parameters, left):
    """The one in tokens goes before it unless it is 0."""
    plugin = {"type": "approx-prefix-cache-producer", "parameters": parameters}
    text = f"{HEAD}plugins: {json.dumps([plugin])}\n"
    (found,) = plain(text)["plugins"]
    assert found.get("parameters") == left


@pytest.mark.parametrize(
    "old",
    [
        {"type": "by-label-selector", "parameters": {"matchLabels": {"a": "b"}}},
        {"type": "by-label", "parameters": {"label": "a", "validValues": ["b"]}},
    ],
)
@pytest.mark.parametrize("flow", [False, True])
def test_where_the_new_name_is_taken_the_old_one_stays_a_name(old, flow):
    """So that who refers to it goes on meaning it."""
    plugins = [{"type": "label-selector-filter"}, old]
    document = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": old["type"]}]}],
    }
    text = json.dumps(document) if flow else yaml.safe_dump(document)
    found = plain(text)
    assert found["schedulingProfiles"] == document["schedulingProfiles"]
    assert found["plugins"][1]["type"] == "label-selector-filter"
    assert found["plugins"][1]["name"] == old["type"]
    profile = load_config(upgraded(text).text, "new", TABLES).profile
    assert [one.name for one in profile.filters] == [old["type"]]


def test_a_type_in_a_block_of_text_is_one_too():
    """With the line break that ends it."""
    text = HEAD + "plugins:\n- type: >-\n    tokenizer\n  name: mine\n- type: 'tokenizer'\n"
    found = plain(text)["plugins"]
    assert found == [{"type": "token-producer", "name": "mine"}, {"type": "token-producer"}]


def test_what_json_does_not_have_stays_what_it_is():
    """Dates are no texts for YAML, and keys may be anything."""
    text = HEAD + (
        "saturationDetector: {2020-01-01: a}\nplugins: [{type: by-label, parameters: "
        '{label: a, validValues: [2020-01-01, "\\u00e9"]}}]\n'
    )
    found = plain(text)
    (expression,) = found["plugins"][0]["parameters"]["matchExpressions"]
    assert expression["values"] == ["2020-01-01", "é"]
    assert list(found["plugins"][1]["parameters"]) == [dt.date(2020, 1, 1)]


OLD_PLUGINS = st.sampled_from(
    [
        {"type": "tokenizer"},
        {"type": "tokenizer", "name": "mine"},
        {"type": "by-label", "parameters": {"label": "a", "validValues": ["b"]}},
        {"type": "by-label-selector"},
        {"type": "label-selector-filter"},
        {"type": "prefix-cache-scorer", "parameters": {"hashBlockSize": 64, "blockSize": 5}},
        {"type": "approx-prefix-cache-producer", "parameters": {"blockSize": 64}},
        {"type": "approx-prefix-cache-producer", "parameters": {}},
        {"type": "precise-prefix-cache-scorer", "name": "told", "parameters": {
            "tokenProcessorConfig": {"blockSize": 16, "hashSeed": "4"}}},
        {"type": "active-request-scorer", "parameters": {"requestTimeout": "1m"}},
        {"type": "session-affinity-filter", "parameters": {"headerName": "a", "strategy": "b"}},
        {"type": "endpoint-attribute-scorer", "parameters": {"attributeKey": "a/b/c"}},
        {"type": "mm-embeddings-cache-producer", "parameters": {"cacheSizeInMB": 1}},
        {"type": "queue-scorer", "parameters": {"text": "a\n b\n", "é": [None, True, 1.5]}},
        "nothing",
    ]
)  # fmt: skip
OLD_SECTIONS = st.fixed_dictionaries(
    {"apiVersion": st.just("inference.networking.x-k8s.io/v1alpha1")},
    optional={
        "plugins": st.lists(OLD_PLUGINS, max_size=4),
        "parser": st.sampled_from([{"pluginRef": "openai-parser"}, None, "a"]),
        "saturationDetector": st.sampled_from([{"pluginRef": "a"}, {"headroom": 1}, {}, None]),
        "flowControl": st.sampled_from([{}, {"saturationDetector": {"pluginRef": "b"}}, None]),
        "requestHandler": st.sampled_from([{}, None]),
        "featureGates": st.lists(
            st.sampled_from(["dataLayer", "prepareDataPlugins=true", "flowControl"]), max_size=3
        ),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    OLD_SECTIONS,
    st.sampled_from([None, False, True]),
    st.sampled_from([2, 4]),
    st.booleans(),
)
def test_any_older_document_is_rewritten_once(sections, flow, indent, comments):
    """What comes out is a document, of today, and what was not concerned is as it was."""
    # Equal parts are copies: no aliases.
    plainly = json.loads(json.dumps(sections))
    text = yaml.safe_dump(plainly, default_flow_style=flow, indent=indent, sort_keys=False)
    if comments and flow is False:
        text = "".join(f"{line}  # {n}\n" if line.endswith(":") else f"{line}\n"
                       for n, line in enumerate(text.splitlines()))  # fmt: skip
    found = upgraded(text)
    after = yaml.safe_load(found.text)
    assert after["apiVersion"] == "llm-d.ai/v1alpha1"
    assert upgraded(found.text).changes == ()
    if "requestHandler" not in sections and isinstance(sections.get("parser"), dict):
        assert after["requestHandler"] == {"parsers": [sections["parser"]]}
    kept = {"queue-scorer", "label-selector-filter"}
    for before in sections.get("plugins", ()):
        if isinstance(before, dict) and before["type"] in kept:
            assert before in after["plugins"]
    lines = text.count("\n")
    assert all(1 <= change.line <= lines for change in found.changes)


def test_the_page_names_all_that_is_rewritten():
    """Old name and new."""
    page = (Path(__file__).parents[2] / "docs/from-llm-d.md").read_text(encoding="utf-8")
    names = [
        *upgrading._RENAMED.items(),
        *((old, new) for (_, old), new in upgrading._RENAMED_PARAMETERS.items()),
        *((type_name, old) for type_name, old in upgrading._REMOVED_PARAMETERS),
        *((name, name) for name in (*upgrading._REMOVED_GATES, *MOVED_TO_INDEX)),
    ]
    assert [pair for pair in names for name in pair if f"`{name}`" not in page] == []


def test_what_was_rewritten_loads():
    """An old document that loads with warnings loads without those after it."""
    text = HEAD + (
        "plugins:\n- type: prefix-cache-scorer\n  parameters:\n    hashBlockSize: 256\n"
        "- type: tokenizer\n- type: by-label\n  parameters:\n    label: a\n    validValues: [b]\n"
    )
    before = load_config(text, "old", TABLES).warnings
    after = load_config(upgraded(text).text, "new", TABLES).warnings
    assert before
    assert not [warning for warning in after if "deprecated" in warning or "moved" in warning]


@pytest.mark.parametrize(
    "text",
    [
        HEAD,
        HEAD + "plugins:\n",
        HEAD + "plugins: 7\nsaturationDetector:\nparser: [1]\nfeatureGates: {a: b}\n",
        HEAD + "plugins: [a, [b], {type: [c]}, {type: tokenizer, parameters: }]\n",
        HEAD + "plugins:\n- type: prefix-cache-scorer\n  parameters: {blockSize: {a: b}}\n",
        HEAD + "plugins:\n- parameters:\n    a: |\n      text\n  type: tokenizer\n",
        HEAD + "saturationDetector: 5",
        "\ufeff" + HEAD + "parser: {pluginRef: a}\r\nplugins: []\r\n",
        "{}",
    ],
)
def test_whatever_the_document_it_stays_one(text):
    """What is wrong with it is told by who loads it."""
    found = upgraded(text)
    assert isinstance(yaml.safe_load(found.text), dict)
    assert upgraded(found.text).changes == ()


@pytest.mark.parametrize("text", ["", "[]", "a: &b 1\nc: *b\n", "a: 1\na: 2\n", "{"])
def test_what_is_no_document_is_refused(text):
    """As everywhere."""
    with pytest.raises(ConfigError):
        upgraded(text)


def test_what_needs_too_many_changes_is_refused():
    """Each reads the document anew."""
    items = "".join(f"- {{type: tokenizer, name: t{n}}}\n" for n in range(CHANGES_MAX + 1))
    with pytest.raises(ConfigError, match="64 or more parts"):
        upgraded(HEAD + "plugins:\n" + items)
