import pytest

from epp.core.address import address_of, host_of, port_of


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [("10.0.0.1", 9004, "10.0.0.1:9004"), ("fe80::1", 1, "[fe80::1]:1")],
)
def test_addresses_have_brackets_where_they_need_them(host, port, address):
    assert address_of(host, port) == address
    assert (host_of(address), port_of(address)) == (host, port)
