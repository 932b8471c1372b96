"""The hooks of the conformance suite."""

import msgspec
import pytest

from epp.configuration.build import default_config, plugin_tables
from epp.plugins import FILTERS
from tests.builders import candidates, endpoint, request

HOOKS = FILTERS["header-based-testing-filter"]()
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
        assert HOOKS.response_headers(request(), endpoint(), served) == {SERVED: served}
    told = HOOKS.response_headers(request(), endpoint(), "")[SERVED]
    assert told.startswith("fail: ")
    assert endpoint().address not in told


def test_the_response_repeats_what_the_request_lists():
    """Names of headers only: a status or a broken entry is left out, who served is not forged."""
    listed = f"X-Foo: a:b ,bar:1,:status:500,broken header:1,{SERVED}:forged,,empty"
    headers = HOOKS.response_headers(
        request(headers={"x-echo-set-header": listed}), endpoint(), "10.0.0.1:1"
    )
    assert headers == {"x-foo": "a:b", "bar": "1", "empty": "", SERVED: "10.0.0.1:1"}


def test_no_default_configuration_has_the_hooks():
    """They would let any client steer."""
    config = default_config(plugin_tables())
    types = {named.plugin.type_name for named in config.profile.filters}
    assert HOOKS.type_name not in types


def test_the_hooks_take_no_parameters():
    """A type like the others, strict like the others."""
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"header": "x"}, FILTERS["header-based-testing-filter"])
