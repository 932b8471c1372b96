"""vllm-router 0.1.17: a fork of SGLang's first generation that asks engines for tokens."""

import pytest

from epp.plugins.contract import config_of, producer, step
from homing_rivals.radix_tree import RadixTreeSettings
from homing_rivals.smg_cache_aware import CacheAware1
from tests.peers.comparison import compare
from tests.peers.driver import Ours, running_peer
from tests.peers.workload import conversations

pytestmark = pytest.mark.timeout(240)
MODULE = "vllm_router.launch_router"
KEY = "x-session-id"
FLAGS = ("--disable-retries", "--disable-circuit-breaker", "--log-level", "warning")


async def followed(tmp_path, versions, keep, steps, strategy, config, *flags):
    """The comparison of `steps`, kept; every request names its session."""
    async with running_peer(tmp_path, MODULE, *flags, *FLAGS, key_header=KEY) as peer:
        done = await compare(
            f"vllm-router {versions['vllm-router']}",
            " ".join(flags).replace("--policy ", "").replace("--", ""),
            strategy,
            steps,
            peer,
            lambda order: Ours(config or strategy, order, key_header=KEY),
        )
    keep(done)
    return done


@pytest.mark.parametrize(("balance_abs", "balance_rel"), [(64, 1.5), (2, 1.2)])
async def test_cache_aware_decides_alike(tmp_path, versions, keep, balance_abs, balance_rel):
    """Request by request: nothing is left to chance, and no session is asked for."""
    config = config_of(
        producer(RadixTreeSettings.type_name, blockSizeTokens=16),
        step(CacheAware1.type_name, balanceAbs=balance_abs, balanceRel=balance_rel),
    )
    steps = list(conversations(200))
    flags = (
        "--balance-abs-threshold",
        str(balance_abs),
        "--balance-rel-threshold",
        str(balance_rel),
    )
    done = await followed(
        *(tmp_path, versions, keep, steps, "smg-cache-aware-1", config),
        *("--policy", "cache_aware", *flags),
    )
    assert done.disagreed == []
    assert done.decided == len(steps)
