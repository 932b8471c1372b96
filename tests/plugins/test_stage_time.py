"""The scorers of the default stages."""

import numpy as np
import pytest

from epp.plugins.added_time import ATTENTION_TOKENS
from epp.plugins.contract import Duration
from epp.plugins.stage_time import DecodeTime, PrefillTime, RemotePrefillTimes
from tests.builders import candidates, request

TOKENS = 6_400
BLOCKS = 100
FREE_LINK = DecodeTime(link_bytes_per_second=1e14)


def best(plugin, peer=-1, prompt_tokens=TOKENS, **columns):
    """Return the positions of the cheapest endpoints for a prompt of a hundred blocks."""
    pool = candidates(prompt_tokens=prompt_tokens, **({"total_blocks": BLOCKS} | columns))
    offered = pool if peer < 0 else pool.near(peer).take(np.arange(len(pool)) != peer)
    scores = plugin.score(request(prompt_tokens=prompt_tokens), offered)
    assert np.all((scores >= 0) & (scores <= 1))
    return [at for at, score in enumerate(scores) if score == 1.0]


def test_prefill_goes_where_the_prompt_is_computed_soonest():
    work = TOKENS * (1 + TOKENS / 2 / ATTENTION_TOKENS) * 1.5
    cached = {"matched_blocks": [BLOCKS, 0], "plugin": PrefillTime()}
    assert best(**cached, inflight_prefill_tokens=[work - 1.0, 0.0]) == [0]
    assert best(**cached, inflight_prefill_tokens=[work + 1.0, 0.0]) == [1]


def test_requests_that_decode_do_not_delay_a_prefill_endpoint():
    assert best(PrefillTime(), matched_blocks=[0, 0], inflight_requests=[9, 0]) == [0, 1]


def test_decode_goes_where_fewer_requests_decode_if_the_prefill_is_elsewhere():
    columns = {"matched_blocks": [0, 0, 0], "inflight_requests": [0, 8, 2]}
    assert best(FREE_LINK, peer=0, **columns) == [1]


def test_a_prefill_elsewhere_ends_the_affinity_of_a_prompt_to_its_decode_endpoint():
    """The second decode endpoint has the prompt cached and decodes more requests. With a fast link
    the first one decodes.
    """
    columns = {"matched_blocks": [BLOCKS, 0, BLOCKS], "inflight_requests": [0, 1, 4]}
    alone = {"matched_blocks": [0, BLOCKS], "inflight_requests": [1, 4]}
    assert best(DecodeTime(), **alone) == [1]
    assert best(FREE_LINK, peer=0, **columns) == [0]
    assert best(DecodeTime(link_bytes_per_second=1e8), peer=0, **columns) == [1]


def test_without_a_prefill_endpoint_the_wait_for_other_prefills_counts():
    columns = {"matched_blocks": [0, 0], "inflight_prefill_tokens": [1_000.0, 0.0]}
    assert best(FREE_LINK, **columns) == [1]


def test_without_a_link_the_decode_endpoint_is_chosen_as_without_a_prefill_endpoint():
    columns = {"matched_blocks": [0, 3, 2], "inflight_requests": [0, 4, 3]}
    unlinked = DecodeTime(link_bytes_per_second=0.0)
    alone = {name: values[1:] for name, values in columns.items()}
    assert best(unlinked, peer=0, **columns) == best(unlinked, **alone)


def test_prefill_goes_to_an_endpoint_with_less_to_send_if_the_network_is_slow():
    """What the second endpoint sends meanwhile does not matter."""
    sending = {"matched_blocks": [0, 0, 0], "sending_tokens": [64_000.0, 6_400.0, 0.0]}
    assert best(PrefillTime(link_bytes_per_second=5e9), **sending) == [1, 2]
    assert best(PrefillTime(link_bytes_per_second=0.0), **sending) == [0, 1, 2]


def test_decode_goes_to_an_endpoint_with_less_to_receive_if_the_prefill_is_elsewhere():
    columns = {"matched_blocks": [0, 0, 0], "inflight_requests": [0, 8, 8]}
    receiving = {"receiving_tokens": [0.0, 64_000.0, 0.0], **columns}
    assert best(FREE_LINK, peer=0, **columns) == [0, 1]
    assert best(DecodeTime(), peer=0, **receiving) == [1]
    assert best(DecodeTime(link_bytes_per_second=0.0), peer=0, **receiving) == [0, 1]


@pytest.mark.parametrize(
    ("name", "key"), [("overhead", "overhead"), ("overhead_per_token", "overheadPerToken")]
)
def test_an_overhead_is_a_time(name, key):
    with pytest.raises(ValueError, match=f"{key} is -1s; it must be at least 0s and below 1h"):
        RemotePrefillTimes(**{name: Duration(-1.0)})
