"""vllm-router 0.1.17: a fork of SGLang's first generation that asks engines for tokens."""

from collections import Counter

import pytest

from epp.plugins.contract import config_of, producer, step
from homing_rivals.radix_tree import RadixTreeSettings
from homing_rivals.smg_cache_aware import CacheAware1
from tests.peers.comparison import compare
from tests.peers.driver import PODS, Ours, running_peer
from tests.peers.workload import Step, chunk, conversations

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
        *(tmp_path, versions, keep, steps, "vllm-router-cache-aware", config),
        *("--policy", "cache_aware", *flags),
    )
    assert done.disagreed == []
    assert done.decided == len(steps)


async def test_sticky_least_loaded_counts_sessions(tmp_path, versions):
    """A session stays, and a new one goes to the fewest sessions; ours counts requests."""
    steps = list(conversations(80))
    flags = ("--policy", "sticky_least_loaded", *FLAGS)
    async with running_peer(
        tmp_path, MODULE, *flags, key_header=KEY, counts_requests=False
    ) as peer:
        went = [await peer.send(each) for each in steps]
        order = peer.order
    home = {}
    for each, pod in zip(steps, went, strict=True):
        sessions = Counter(home.values())
        if each.key not in home:
            assert sessions[pod] == min(sessions[name] for name in order)
        assert home.setdefault(each.key, pod) == pod


async def test_consistent_hash_keeps_sessions(tmp_path, versions):
    """The ring's hash is another; a session stays in both, and sessions spread."""
    steps = [Step(chunk(0, key), f"key-{key}", 1) for _ in range(2) for key in range(45)]
    steps[0] = steps[0]._replace(ends=0)
    flags = ("--policy", "consistent_hash", *FLAGS)
    async with running_peer(tmp_path, MODULE, *flags, key_header=KEY) as peer:
        went = [await peer.send(each) for each in steps]
        order = peer.order
    ours = Ours("vllm-router-consistent-hash", order, key_header=KEY)
    for one in (went, [ours.send(each)[0] for each in steps]):
        assert one[:45] == one[45:], "a session stays"
        assert len(set(one)) == PODS
