"""Kinds of networks for KV transfers, and the texts that name them."""

import pytest

from sim.engine.links import LINKS, LinkError, link_named

GB = 1e9


def test_links_are_those_of_the_reference():
    """In the order of their bandwidth, each with its source."""
    speeds = [link.bytes_per_s for link in LINKS.values()]
    assert list(LINKS) == ["nvlink", "ib-ndr400", "roce200", "tcp-100gbe", "tcp-25gbe"]
    assert speeds == sorted(speeds, reverse=True)
    assert all(link.setup_s_min < link.setup_s < link.setup_s_max for link in LINKS.values())
    assert all(link.source for link in LINKS.values())


def test_a_network_has_a_name_or_a_bandwidth_and_a_set_up_time():
    assert link_named("roce200") is LINKS["roce200"]
    link = link_named("12.5:0.002")
    assert (link.bytes_per_s, link.setup_s) == (12.5 * GB, 0.002)
    assert link.transfer_s(25 * GB) == pytest.approx(2.002)


@pytest.mark.parametrize("text", ["roce", "20", "0:0", "20:-1", "nan:0", "1e9:0", "20:0.1:2", ""])
def test_what_is_no_network_is_refused(text):
    with pytest.raises(LinkError, match=r"expected one of nvlink, .* or GB/S:S") as refused:
        link_named(text)
    assert repr(text) in str(refused.value)
