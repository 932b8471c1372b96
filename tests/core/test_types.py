from epp.core.types import ranks_of
from tests.builders import endpoint


def test_ranks_of_a_pod_count_up_with_its_ports():
    """In whatever order endpoints come; pods of one name at two hosts are two."""
    addresses = {
        "uid:8001": "10.0.0.1:8001",
        "uid:8000": "10.0.0.1:8000",
        "other:9000": "10.0.0.2:9000",
        "uid:8002": "10.0.0.3:8002",
    }
    endpoints = [endpoint(endpoint_id=known, address=at) for known, at in addresses.items()]
    assert ranks_of(endpoints) == {"uid:8001": 1, "uid:8000": 0, "other:9000": 0, "uid:8002": 0}


def test_an_address_is_a_host_and_a_port():
    both = endpoint(address="[fe80::1]:8000")
    assert (both.host, both.port) == ("fe80::1", 8000)
