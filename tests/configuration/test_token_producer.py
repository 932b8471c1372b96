"""Which backends a `token-producer` may have, and what is told of parameters that do less."""

from typing import ClassVar

import pytest
import yaml
from msgspec import structs

from epp.configuration.build import plugin_tables
from epp.configuration.config import ConfigError, load_config
from epp.configuration.describing import describe, diff_configs
from epp.configuration.token_producer import (
    Backend,
    EndpointDiscovery,
)
from epp.core.abilities import Abilities
from epp.core.parameters import Parameters
from tests.builders import endpoint


def loaded(
    *producers, type_name="token-producer", index="precise-prefix-cache-producer", scorer=None
):
    """`scorer`: a class that scores instead of `queue-scorer`."""
    tables = plugin_tables()
    name = "queue-scorer"
    if scorer is not None:
        name = scorer.type_name
        tables = structs.replace(tables, scorers={**tables.scorers, name: scorer})
    document = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            *({"type": type_name, "name": f"t{n}", "parameters": one} for n, one in enumerate(producers)),
            *([{"type": index}] if index else []),
            {"type": name},
        ],
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": name}]}],
    }  # fmt: skip
    return load_config(yaml.safe_dump(document), "config.yaml", tables)


@pytest.mark.parametrize(
    ("parameters", "backend"),
    [
        ({}, Backend.ESTIMATE),
        ({"estimate": {}}, Backend.ESTIMATE),
        ({"modelName": "m", "estimate": {}}, Backend.ESTIMATE),
        ({"vllm": {}}, Backend.VLLM),
        ({"modelName": "m", "vllm": {"url": "https://r:1/base"}}, Backend.VLLM),
        ({"modelName": "m"}, Backend.VLLM),
        ({"local": {"autoDiscoveryDir": "/t"}}, Backend.LOCAL),
        ({"local": {"modelTokenizerMap": {"m": "/t"}}, "tokenizeTimeout": "50ms"}, Backend.LOCAL),
    ],
)
def test_the_backend_is_what_is_given(parameters, backend):
    """A model's name alone means the renderer, as in the reference picker."""
    config = loaded(parameters)
    assert config.tokens.backend is backend
    assert ("tokens" in describe(config)) == (backend is not Backend.ESTIMATE)


def test_without_one_prompts_are_measured_by_their_bytes():
    """And a second one has no effect."""
    assert loaded().tokens.backend is Backend.ESTIMATE
    config = loaded({"vllm": {}}, {"local": {"autoDiscoveryDir": "/t"}})
    assert config.tokens.backend is Backend.VLLM
    assert any("t0 is declared before it" in warning for warning in config.warnings)


def test_its_old_name_is_deprecated():
    """It loads all the same."""
    config = loaded({"vllm": {}}, type_name="tokenizer")
    assert config.tokens.backend is Backend.VLLM
    assert any("use token-producer" in warning for warning in config.warnings)


def test_the_fields_own_parameters_load():
    """All that the reference picker documents for its renderer."""
    renderer = {
        "timeout": "5s",
        "mmTimeout": "30s",
        "messagesRenderMode": "auto",
        "responsesRenderMode": "native",
        "prefillOnly": True,
        "omitMMKwargs": False,
        "endpointDiscovery": {
            "portRules": [
                {"selector": {"matchLabels": {"role": "decode"}}, "basePort": 8200},
                {"basePort": 8000},
            ],
            "loadBalancer": {"type": "round-robin"},
            "attemptTimeout": "1s",
            "minModelLen": 1000,
            "contextLimitLabel": "room",
        },
    }
    tls = {"url": "https://r", "caCertPath": "/a", "clientCertPath": "/b", "clientKeyPath": "/c"}
    assert loaded({"modelName": "m", "vllm": renderer}).tokens.renderer.prefill_only
    config = loaded({"vllm": tls | {"insecureSkipVerify": True}})
    assert not any("(t0)" in warning for warning in config.warnings)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"vllm": {}, "local": {"autoDiscoveryDir": "/t"}}, "has the backends vllm and local"),
        ({"hf": {}}, "the picker loads nothing from a hub"),
        ({"udsTokenizerConfig": {}}, "use `vllm`"),
        ({"local": {}}, "autoDiscoveryDir or modelTokenizerMap"),
        ({"tokenizeTimeout": "0s"}, "tokenizeTimeout is 0.0s; it must be finite and above 0s"),
        ({"vllm": {"url": "renderer:8000"}}, "expected one such as"),
        ({"vllm": {"url": "http://r:99999"}}, "expected one such as"),
        ({"vllm": {"url": "http://u:p@r"}}, "expected one such as"),
        ({"vllm": {"url": "http://r?a=1"}}, "expected one such as"),
        ({"vllm": {"timeout": "-1s"}}, "timeout is -1.0s; it must be"),
        ({"vllm": {"clientCertPath": "/a"}}, "must be given together"),
        ({"vllm": {"endpointDiscovery": {}, "caCertPath": "/a"}}, "render by http"),
        ({"vllm": {"endpointDiscovery": {"discoverModelLimits": True}}}, "set contextLimitLabel"),
        ({"vllm": {"endpointDiscovery": {"minModelLen": 5}}}, "needs contextLimitLabel"),
        ({"vllm": {"endpointDiscovery": {"loadBalancer": {"type": "random"}}}}, "random"),
        ({"vllm": {"endpointDiscovery": {"portRules": [{"basePort": 0}]}}}, "basePort"),
        ({"vllm": {"messagesRenderMode": "new"}}, "new"),
    ],
)
def test_what_does_not_go_is_refused(parameters, problem):
    """With one sentence."""
    with pytest.raises(ConfigError) as error:
        loaded(parameters)
    (told,) = error.value.problems
    assert problem in told


@pytest.mark.parametrize(
    ("parameters", "warning"),
    [
        ({"estimate": {"image": {}}}, "a token counts as 4 bytes"),
        ({"modelName": "m"}, "modelName alone selects the renderer at http://localhost:8000"),
        ({"vllm": {"messagesRenderMode": "legacy"}}, "render mode legacy has no effect"),
        ({"modelName": "${MODEL_NAME}", "vllm": {}}, "has a literal ${"),
    ],
)
def test_what_does_less_than_it_says_is_warned_of(parameters, warning):
    """Once."""
    (told,) = [sentence for sentence in loaded(parameters).warnings if "(t0)" in sentence]
    assert warning in told


class IdsScorer(Parameters, frozen=True):
    """Reads ids itself."""

    type_name: ClassVar[str] = "ids-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("token_ids",))

    def score(self, request, candidates):
        return None


class AnythingScorer(IdsScorer, frozen=True):
    """Does not say what it reads."""

    type_name: ClassVar[str] = "anything-scorer"
    abilities: ClassVar[Abilities] = Abilities()


@pytest.mark.parametrize("parameters", [{"vllm": {}}, {"local": {"autoDiscoveryDir": "/t"}}])
def test_nobody_waits_for_ids_that_nothing_reads(parameters):
    """It is said once, with the name of the configuration; what was configured stays what it is."""
    config = loaded(parameters, index="approx-prefix-cache-producer")
    assert config.tokens_asked.backend is Backend.ESTIMATE
    assert config.tokens.backend is not Backend.ESTIMATE
    (told,) = config.warnings
    assert told.startswith("config.yaml: plugins[0] (t0): ")
    assert "reads token ids" in told


@pytest.mark.parametrize(
    ("index", "scorer"),
    [
        ("precise-prefix-cache-producer", None),
        (None, IdsScorer),
        (None, AnythingScorer),
    ],
)
def test_requests_wait_for_ids_that_something_may_read(index, scorer):
    """An index, or a plugin that reads them itself, or does not say what it reads."""
    config = loaded({"vllm": {}}, index=index, scorer=scorer)
    assert config.tokens_asked is config.tokens
    assert not any("reads token ids" in warning for warning in config.warnings)


def test_a_change_is_told_of():
    """As of every other part of a configuration."""
    before, after = loaded({"vllm": {}}), loaded({"vllm": {"url": "http://r"}})
    assert diff_configs(before, after) == ["tokens: url http://localhost:8000 -> http://r"]
    assert diff_configs(loaded(), before) == ["tokens: added"]


def test_without_rules_an_endpoint_renders_where_it_serves():
    """Whatever its rank."""
    assert EndpointDiscovery().port_of(endpoint(address="[::1]:8001"), 3) == 8001
