"""The hooks of the conformance suite."""

import msgspec
import pytest

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.configuration.config import load_config
from epp.configuration.describing import diff_configs
from epp.configuration.document import ConfigError
from epp.configuration.explaining import explain
from epp.core.decision.inputs import PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.plugins import FILTERS
from epp.plugins.conformance import DestinationEndpointServedVerifier
from tests.builders import candidates, endpoint, request

HOOKS = FILTERS["header-based-testing-filter"]()
VERIFIER = DestinationEndpointServedVerifier()
SERVED = "x-conformance-test-served-endpoint"


def kept(selection, pool):
    headers = {} if selection is None else {"test-epp-endpoint-selection": selection}
    return HOOKS.keep(request(headers=headers), pool).tolist()


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, [True, True, True]),
        (" ", [True, True, True]),
        ("192.168.1.2:8000", [False, True, False]),
        ("192.168.1.1, 192.168.1.3:8000", [True, False, True]),
        ("192.168.1.1:3000", [False, False, False]),
        ("256.256.256.256", [False, False, False]),
        (",", [False, False, False]),
    ],
)
def test_the_endpoints_that_the_client_lists_stay(selection, expected):
    """By ip:port or ip; nobody if none is there, all without the header."""
    assert kept(selection, candidates(3)) == expected


@pytest.mark.parametrize("selection", ["[fd00::0:1]:8000", "fd00::1", "[fd00::1]"])
def test_ipv6_may_be_spelt_in_any_way(selection):
    """As in subset hints."""
    pool = candidates(1)
    pool._columns.endpoints[0] = endpoint(0, address="[fd00::1]:8000")
    assert kept(selection, pool) == [True]


def test_who_served_is_what_the_gateway_says():
    """Never the picker's own choice: a gateway that does not tell must fail."""
    for served in ("10.0.0.9:3000", "[fd00::1]:3000"):
        assert VERIFIER.response_headers(request(), endpoint(), served) == {SERVED: served}
    told = VERIFIER.response_headers(request(), endpoint(), "")[SERVED]
    assert told.startswith("fail: ")
    assert endpoint().address not in told


def test_the_response_repeats_what_the_request_lists():
    """Names of headers only: a status or a broken entry is left out, who served is not forged."""
    listed = f"X-Foo: a:b ,bar:1,:status:500,broken header:1,{SERVED}:forged,,empty"
    headers = HOOKS.response_headers(
        request(headers={"x-echo-set-header": listed}), endpoint(), "10.0.0.1:1"
    )
    assert headers == {"x-foo": "a:b", "bar": "1", "empty": ""}


def test_no_default_configuration_has_the_hooks():
    """They would let any client steer."""
    config = default_config(plugin_tables())
    types = {named.plugin.type_name for named in config.profile.filters}
    assert HOOKS.type_name not in types
    assert config.profile.responders == ()


CONFORMANCE = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: header-based-testing-filter
- type: destination-endpoint-served-verifier
schedulingProfiles:
- name: conformance-profile
  plugins:
  - pluginRef: header-based-testing-filter
"""
"""The configuration of the suite's manifests from v1.3 to v1.5, its names and its order."""


@pytest.mark.parametrize("removed", ["- type: destination-endpoint-served-verifier\n", ""])
def test_who_served_is_told_where_that_is_declared(removed):
    """As the manifests have it: declared, and in no profile."""
    text = CONFORMANCE.replace(removed, "") if removed else CONFORMANCE
    config = load_config(text, "conformance", plugin_tables())
    scheduler = Scheduler(build_settings(config), seed=1)
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1)]), 0.0)
    decision = scheduler.schedule(request(), 0.0)
    expected = {} if removed else {SERVED: "10.0.0.9:3000"}
    assert decision.response_headers("10.0.0.9:3000") == expected


def test_no_profile_names_what_only_answers():
    """One sentence, as for any other plugin that is none of a profile."""
    text = CONFORMANCE + "  - pluginRef: destination-endpoint-served-verifier\n"
    with pytest.raises(ConfigError, match="is a response plugin, expected a filter or scorer"):
        load_config(text, "conformance", plugin_tables())


def test_a_configuration_that_tells_who_served_is_another_one():
    """For `check-config --diff` and the hash that pages and logs show."""
    tables = plugin_tables()
    with_it = load_config(CONFORMANCE, "a", tables)
    without = load_config(
        CONFORMANCE.replace("- type: destination-endpoint-served-verifier\n", ""), "b", tables
    )
    assert diff_configs(without, with_it) == [
        "response plugin destination-endpoint-served-verifier: added"
    ]
    assert "x-conformance" not in explain(without)
    assert "destination-endpoint-served-verifier" in explain(with_it)


def test_the_hooks_take_no_parameters():
    """A type like the others, strict like the others."""
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"header": "x"}, FILTERS["header-based-testing-filter"])
