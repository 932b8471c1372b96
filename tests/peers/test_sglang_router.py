"""sglang-router 0.3.2: the first generation of cache-aware routing."""

import pytest

from epp.plugins.contract import config_of, producer, step
from homing_rivals.radix_tree import RadixTreeSettings
from homing_rivals.smg_cache_aware import CacheAware1
from tests.peers.comparison import compare
from tests.peers.driver import Ours, running_peer
from tests.peers.workload import conversations

pytestmark = pytest.mark.timeout(240)
MODULE = "sglang_router.launch_router"
FLAGS = ("--disable-retries", "--disable-circuit-breaker", "--log-level", "warn")


@pytest.mark.parametrize(("balance_abs", "balance_rel"), [(64, 1.5), (2, 1.2)])
async def test_cache_aware_decides_alike(tmp_path, versions, keep, balance_abs, balance_rel):
    """Request by request: nothing is left to chance."""
    config = config_of(
        producer(RadixTreeSettings.type_name, blockSizeTokens=16),
        step(CacheAware1.type_name, balanceAbs=balance_abs, balanceRel=balance_rel),
    )
    steps = list(conversations(200))
    async with running_peer(
        tmp_path,
        MODULE,
        *("--policy", "cache_aware", "--balance-abs-threshold", str(balance_abs)),
        *("--balance-rel-threshold", str(balance_rel), *FLAGS),
    ) as peer:
        done = await compare(
            f"sglang-router {versions['sglang-router']}",
            f"cache_aware {balance_abs} {balance_rel}",
            "smg-cache-aware-1",
            steps,
            peer,
            lambda order: Ours(config, order),
        )
    keep(done)
    assert done.disagreed == []
    assert done.decided == len(steps)
