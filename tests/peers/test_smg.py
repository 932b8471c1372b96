"""smg 1.13.0: the fourth generation of cache-aware routing, and its two choices."""

import pytest

from epp.plugins.contract import config_of, producer, step
from homing_rivals.radix_tree import RadixTreeSettings
from homing_rivals.smg_cache_aware import CacheAware4
from tests.peers.comparison import compare
from tests.peers.driver import Ours, running_peer
from tests.peers.workload import CHUNK, conversations

pytestmark = pytest.mark.timeout(240)
MODULE = "smg.cli launch"
FLAGS = ("--disable-retries", "--disable-circuit-breaker", "--log-level", "warn")
NO_WARMUP = ("--worker-warmup-secs", "0", "--worker-warmup-thin-ratio", "0")
WAIT = "the expected wait is of reports every 10 s and of what was sent since; ours is of requests"


async def followed(tmp_path, versions, keep, steps, strategy, config, *flags, note=""):
    """The comparison of `steps`, kept."""
    async with running_peer(tmp_path, MODULE, *flags, *FLAGS) as peer:
        done = await compare(
            f"smg {versions['smg']}",
            " ".join(flags).replace("--policy ", "").replace("--", ""),
            strategy,
            steps,
            peer,
            lambda order: Ours(config or strategy, order),
            note,
        )
    keep(done)
    return done


@pytest.mark.parametrize(("balance_abs", "balance_rel"), [(64, 1.5), (2, 1.2)])
async def test_cache_aware_follows_holders_alike(
    tmp_path, versions, keep, balance_abs, balance_rel
):
    """Where one pod holds the prefix and may be used; otherwise the expected wait decides."""
    config = config_of(
        producer(RadixTreeSettings.type_name, blockSizeTokens=16),
        step(CacheAware4.type_name, balanceAbs=balance_abs, balanceRel=balance_rel),
    )
    steps = list(conversations(200))
    done = await followed(
        *(tmp_path, versions, keep, steps, "smg-cache-aware-4", config),
        *("--policy", "cache_aware", "--balance-abs-threshold", str(balance_abs)),
        *("--balance-rel-threshold", str(balance_rel), *NO_WARMUP),
        note=WAIT,
    )
    held = [at for at, some in enumerate(done.allowed) if some == _holders(steps, done.went, at)]
    assert len(held) > 100
    assert not set(done.disagreed) & set(held)
    # Six system prompts are too few for even shares, wherever they go; the ports of the pods decide.
    assert min(*done.shares[0], *done.shares[1]) > 0.02
    assert done.hits[0] == pytest.approx(done.hits[1], abs=0.03)


def _holders(steps, went, at):
    """Pods that were sent the longest known head of prompt `at`, if that is over 0.3 of it."""
    prompt = steps[at].prompt
    before = list(zip(steps[:at], went, strict=False))
    for blocks in range(len(prompt) // CHUNK, 3 * len(prompt) // CHUNK // 10, -1):
        head = prompt[: blocks * CHUNK]
        found = frozenset(pod for step, pod in before if step.prompt.startswith(head))
        if found:
            return found
    return frozenset()


async def test_two_choices_are_never_both_the_worst(tmp_path, versions, keep):
    """Who is drawn is chance, who of two is taken is not."""
    done = await followed(
        *(tmp_path, versions, keep, list(conversations(80)), "power-of-two-live", ""),
        *("--policy", "power_of_two", "--power-of-two-load-metric", "least_requests"),
    )
    assert done.disagreed == []
