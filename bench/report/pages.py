"""Metrics pages of the pods in the performance report.

Small pages have the few series that influence decisions, with other numbers each time; they keep
the endpoints fresh while requests are measured. Large ones are those of a simulated engine under
load, 60 KB and more (`bench.scrape.live_pages`).
"""

from contextlib import AbstractContextManager
from random import Random
from typing import Final

from bench.pods import Pages, served
from bench.scrape import live_pages

_LONG_NAME: Final = "meta-llama/Llama-3.1-8B-Instruct"
_SMALL_PAGES: Final = 997
_SMALL: Final = """\
vllm:num_requests_waiting{{model_name="m"}} {waiting}
vllm:num_requests_running{{model_name="m"}} {running}
vllm:kv_cache_usage_perc{{model_name="m"}} {usage:.4f}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="27214"}} 1.0
"""


def small_pages() -> list[bytes]:
    random = Random("report:pages")
    return [
        _SMALL.format(
            waiting=random.randint(0, 9), running=random.randint(0, 64), usage=random.random()
        ).encode()
        for _ in range(_SMALL_PAGES)
    ]


def pages(cores: frozenset[int], *, large: bool) -> AbstractContextManager[Pages]:
    """Serve small or large metrics pages from a process on `cores` during the context."""
    return served(live_pages(_LONG_NAME) if large else small_pages(), cores)
